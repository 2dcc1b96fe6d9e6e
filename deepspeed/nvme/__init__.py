"""Measuring drives: ``ds_io``, ``ds_bench io`` and ``ds_nvme_tune``."""
