"""``ds_plan``: what the states of a rank will hold, asked of an engine on a device that does not exist."""
