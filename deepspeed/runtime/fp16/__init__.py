"""Import paths of the fp16 wrappers; nothing is defined here."""
