"""Measuring on the user's machine: ``ds_bench`` (drive, checkpoints, loading, optimizer), ``ds_nvme_tune``."""
