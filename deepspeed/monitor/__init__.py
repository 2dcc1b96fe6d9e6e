"""Import paths of the metric writers; nothing is defined here."""
