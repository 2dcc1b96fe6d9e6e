"""Accelerators and the communication backends, as torch sees them."""

import glob
import os
import warnings
from types import ModuleType
from typing import Any

from deepspeed.report.rows import Row, Section, gather, size

_DEVICE_FILES = {"/dev/nvidia[0-9]*": "NVIDIA", "/dev/kfd": "AMD", "/dev/accel/accel[0-9]*": "accelerator"}


def _kind(torch: ModuleType) -> str | None:
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else str(found.type)


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
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kind = _kind(torch)
        if kind is None:
            reasons = [str(warning.message).partition("\n")[0] for warning in said]
            return [Row("accelerator", "none: ranks run on the CPU and talk through gloo", _why_none(torch, reasons))]
        count = int(torch.accelerator.device_count())
        module = torch.get_device_module(kind)
        rows = [Row("accelerator", f"{kind}, {count} visible")]
        if hasattr(module, "get_device_properties"):
            rows += [Row(f"{kind}:{index}", _describe(module, index)) for index in range(count)]
    return rows


def _why_none(torch: ModuleType, reasons: list[str]) -> str:
    """Why a machine that has a device, or a torch that was built for one, runs on the CPU; empty when both agree."""
    built = next(
        (f"{name.upper()} {value}" for name in ("cuda", "hip") if (value := getattr(torch.version, name, None))), None
    )
    if built is not None:
        hidden = [
            f"{name}={os.environ[name]!r}"
            for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
            if name in os.environ
        ]
        why = (
            "; ".join([*reasons, *hidden])
            or "the driver is missing, older than torch's, or not passed into the container"
        )
        return f"torch is built for {built} but can use no device: {why}. Training will be slow on the CPU."
    seen = [name for pattern, name in _DEVICE_FILES.items() if glob.glob(pattern)]
    if seen:
        return (
            f"This machine has a device ({', '.join(seen)}) but torch is a CPU build; install a torch that is "
            "built for it."
        )
    return ""


def nccl_row(torch: ModuleType) -> Row:
    """Version of NCCL (RCCL on ROCm)."""
    if _kind(torch) != "cuda":
        return Row("NCCL", "not used without a CUDA or ROCm device")
    version = torch.get_device_module("cuda").nccl.version()
    return Row("NCCL", ".".join(map(str, version)) if isinstance(version, tuple) else str(version))


def backends_row() -> Row:
    """Backends of torch.distributed."""
    from deepspeed.comm.backends import available_backends  # noqa: PLC0415 - imports torch, which may fail

    names = [name for name, there in available_backends().items() if there]
    doubt = (
        "" if names else "This torch has no torch.distributed: only one process can train; install a build that has it."
    )
    return Row("backends", " ".join(names) or "none", doubt)


def section(torch: ModuleType | None) -> Section:
    """Devices and communication; one row when torch cannot be imported."""
    if torch is None:
        return Section("device and communication", (Row("accelerator", "unknown (torch cannot be imported)"),))
    probes = (
        ("accelerator", lambda: device_rows(torch)),
        ("NCCL", lambda: nccl_row(torch)),
        ("backends", backends_row),
    )
    return gather("device and communication", probes)
