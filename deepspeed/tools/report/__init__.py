"""``ds_report``: what this machine and this installation offer, what is missing, and why it matters."""
