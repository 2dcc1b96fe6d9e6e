"""Measuring on the user's machine: ``ds_bench ckpt`` and ``ds_bench cpu-adam`` (``ds_bench io`` is in
``deepspeed.nvme``).
"""
