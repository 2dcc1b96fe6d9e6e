"""``ds_config``, and the pages and files that are generated from the models."""
