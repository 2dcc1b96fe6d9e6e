"""The device, and native code for it and the host; the names that clients call load at their first use."""

from deepspeed.client.attrs import loads_names

_NAMES = ("Accelerator", "DeepSpeedAccelerator", "get_accelerator", "set_accelerator")
__getattr__ = loads_names(__name__, lambda: dict.fromkeys(_NAMES, "deepspeed.accelerator.device"))
