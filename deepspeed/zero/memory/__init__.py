"""Memory planned before the first step."""
