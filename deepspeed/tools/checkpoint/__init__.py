"""The ``ds_checkpoint`` command; see ``cli``."""
