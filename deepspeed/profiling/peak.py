"""What a device can do at most, from its data sheet; and the share of it that a training step uses (MFU)."""

import re

from deepspeed.config.model.values import DtypeName

# Words of the device's name: 10**12 operations a second by dtype, dense, without sparsity. fp32 without TF32.
_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "fp32": 75.0},
    **dict.fromkeys(("H200 NVL", "H100 NVL"), {"bf16": 835.0, "fp16": 835.0, "fp32": 60.0}),
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "fp32": 51.2},
    **dict.fromkeys(("H200", "GH200", "H100", "H800"), {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9}),
    **dict.fromkeys(("A100", "A800"), {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}),
    "L40S": {"bf16": 362.0, "fp16": 362.0, "fp32": 91.6},
    "A10G": {"bf16": 70.0, "fp16": 70.0, "fp32": 35.0},
    "A10": {"bf16": 125.0, "fp16": 125.0, "fp32": 31.2},
    "L4": {"bf16": 121.0, "fp16": 121.0, "fp32": 30.3},
    "V100": {"fp16": 125.0, "fp32": 15.7},
    "T4": {"fp16": 65.0, "fp32": 8.1},
    "MI300X": {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4},
    "MI250": {"bf16": 362.1, "fp16": 362.1, "fp32": 45.3},
}


def peak_tflops(device: str, dtype: DtypeName) -> float | None:
    """Return the peak of the named device in 10**12 operations a second; None where it is not known."""
    words = {name: rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])" for name in _TFLOPS}  # an L40 is no L4
    return next((_TFLOPS[name].get(dtype) for name, word in words.items() if re.search(word, device)), None)
