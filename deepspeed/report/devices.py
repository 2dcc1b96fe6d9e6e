"""Accelerators and the communication backends, as torch sees them."""

import glob
import os
import warnings
from types import ModuleType
from typing import Any

from deepspeed.report.rows import Row, Section, gather, size

_DEVICE_FILES = {"/dev/nvidia[0-9]*": "NVIDIA", "/dev/kfd": "AMD", "/dev/accel/accel[0-9]*": "accelerator"}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def _kind(torch: ModuleType) -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else str(accelerator.type)


def _describe(module: Any, index: int) -> str:
    properties = module.get_device_properties(index)
    parts = [str(getattr(properties, "name", "unnamed"))]
    if (total := getattr(properties, "total_memory", None)) is not None:
        parts.append(size(int(total)))
    if hasattr(properties, "major"):
        parts.append(f"compute capability {properties.major}.{properties.minor}")
    return ", ".join(parts)


def device_rows(torch: ModuleType) -> list[Row]:
    """Type, number, names and memory of the devices; ``none`` where ranks run on the CPU."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        kind = _kind(torch)
        if kind is None:
            reasons = [str(warning.message).partition("\n")[0] for warning in warned]
            return [Row("accelerator", "none: ranks run on the CPU and talk through gloo", _why_none(torch, reasons))]
        count = int(torch.accelerator.device_count())
        module = torch.get_device_module(kind)
        rows = [Row("accelerator", f"{kind}, {count} visible")]
        if hasattr(module, "get_device_properties"):
            rows += [Row(f"{kind}:{index}", _describe(module, index)) for index in range(count)]
    return rows


def _why_none(torch: ModuleType, reasons: list[str]) -> str:
    """Why a machine that has a device, or a torch that was built for one, runs on the CPU; empty when both agree."""
    for name in ("cuda", "hip"):
        if version := getattr(torch.version, name, None):
            reasons += [f"{variable}={os.environ[variable]!r}" for variable in _VISIBLE if variable in os.environ]
            why = "; ".join(reasons) or "the driver is missing, older than torch's, or not passed into the container"
            built = f"torch is built for {name.upper()} {version} but can use no device"
            return f"{built}: {why}. Training will be slow on the CPU."
    if seen := ", ".join(name for pattern, name in _DEVICE_FILES.items() if glob.glob(pattern)):
        return f"This machine has a device ({seen}) but torch is a CPU build; install a torch that is built for it."
    return ""


def nccl_row(torch: ModuleType) -> Row:
    """Version of NCCL (RCCL on ROCm)."""
    if _kind(torch) != "cuda":
        return Row("NCCL", "not used without a CUDA or ROCm device")
    version = torch.get_device_module("cuda").nccl.version()
    return Row("NCCL", ".".join(map(str, version)) if isinstance(version, tuple) else str(version))


def backends_row() -> Row:
    """Backends of torch.distributed."""
    from deepspeed.comm.init import available_backends  # noqa: PLC0415 - imports torch, which may fail

    names = " ".join(available_backends())
    doubt = "This torch has no torch.distributed: only one process can train; install a build that has it."
    return Row("backends", names or "none", "" if names else doubt)


def section(torch: ModuleType | None) -> Section:
    """Devices and communication; one row when torch cannot be imported."""
    if torch is None:
        return Section("device and communication", (Row("accelerator", "unknown (torch cannot be imported)"),))
    return gather(
        "device and communication",
        {"accelerator": lambda: device_rows(torch), "NCCL": lambda: nccl_row(torch), "backends": backends_row},
    )
