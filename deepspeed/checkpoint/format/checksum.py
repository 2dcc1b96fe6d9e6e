"""CRC-32C (Castagnoli, as in iSCSI, ext4 and RFC 3720) of tensors and bytes: csrc/cpu/crc32c.cpp, else numpy tables."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deepspeed.accelerator.native.build import try_load
from deepspeed.accelerator.native.spec import CPU_CHECKSUM

_POLYNOMIAL = 0x82F63B78  # bit 31 is the coefficient of x^0, x^32 left out
_ONES = 0xFFFFFFFF
_LANE_BYTES = 1024  # without native code: steps that all lanes of a range take side by side


def crc32c(data: torch.Tensor | bytes | bytearray | memoryview, crc: int = 0) -> int:
    """Return the CRC-32C of ``data`` (a contiguous host tensor, or bytes), continued from the checksum ``crc``.

    0 stands for no bytes before: ``crc32c(b, crc32c(a)) == crc32c(a + b)``. Raises ValueError for another tensor.
    """
    if not isinstance(data, torch.Tensor):  # torch takes no read-only memory without a warning
        data = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    raw, calls = _as_bytes(data), _native()
    return _by_tables(raw, crc) if calls is None else calls[0](raw.data_ptr(), raw.numel(), crc)


def copy_with_crc32c(dst: torch.Tensor, src: torch.Tensor, crc: int = 0) -> int:
    """Copy ``src`` to ``dst``, contiguous host tensors of equal size in bytes, in one pass; return :func:`crc32c`."""
    to, source, calls = _as_bytes(dst), _as_bytes(src), _native()
    if to.numel() != source.numel():
        raise ValueError(f"{source.numel()} bytes do not fit a tensor of {to.numel()} bytes")
    if calls is not None:
        return calls[1](to.data_ptr(), source.data_ptr(), source.numel(), crc)
    to.copy_(source)
    return _by_tables(to, crc)


@functools.cache
def _native() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """Return the native functions, built on first use; None (after one line in the log) where that is not possible."""
    library = try_load(CPU_CHECKSUM)
    if library is None:
        return None
    plain, copying = library["ds_crc32c"], library["ds_crc32c_copy"]
    plain.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32]
    copying.argtypes = [ctypes.c_void_p, *plain.argtypes]
    plain.restype = copying.restype = ctypes.c_uint32
    return plain, copying


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a checksum takes contiguous host tensors, not {tensor.shape} on {tensor.device}")
    return tensor.detach().reshape(-1).view(torch.uint8)


# --- without native code ---
@functools.cache
def _tables() -> tuple[Any, list[list[int]]]:
    """Return tables of the register: after one byte, by its lowest byte; after a lane of zeros, by its four bytes."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (table & 1) * np.uint32(_POLYNOMIAL)
    lanes = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    for _ in range(_LANE_BYTES):
        lanes = table[lanes & 255] ^ (lanes >> 8)
    return table, lanes.tolist()


def _by_tables(data: torch.Tensor, crc: int) -> int:
    """Compute CRC-32C by tables: it is linear, so lanes run side by side and are joined through lanes of zeros."""
    table, (first, second, third, fourth) = _tables()
    values, register = data.numpy(), crc ^ _ONES
    whole, rest = np.split(values, [values.size // _LANE_BYTES * _LANE_BYTES])
    if whole.size:
        lanes = np.zeros(whole.size // _LANE_BYTES, np.uint32)
        lanes[0] = register
        for column in np.ascontiguousarray(whole.reshape(-1, _LANE_BYTES).T):
            lanes = table[(lanes ^ column) & 255] ^ (lanes >> 8)
        register = 0
        for lane in lanes.tolist():
            low = first[register & 255] ^ second[register >> 8 & 255]
            register = lane ^ low ^ third[register >> 16 & 255] ^ fourth[register >> 24]
    for byte in rest.tolist():
        register = int(table[(register ^ byte) & 255]) ^ (register >> 8)
    return register ^ _ONES
