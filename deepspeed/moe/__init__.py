"""Names of mixture-of-experts layers; not in this release."""
