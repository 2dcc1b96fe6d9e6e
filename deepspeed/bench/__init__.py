"""Measuring on the user's machine: ``ds_bench`` (drive, checkpoints, optimizer on the host), ``ds_io`` and
``ds_nvme_tune``.
"""
