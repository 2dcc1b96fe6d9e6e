"""``ds_report run`` and ``ds_report --job``: what the record of a run says."""
