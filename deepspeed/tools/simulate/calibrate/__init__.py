"""``ds_simulate --calibrate``: what a machine's constants are, measured once on the machine itself."""
