"""CRC-32C (Castagnoli, as in iSCSI, ext4 and RFC 3720) of tensors and bytes: csrc/cpu/crc32c.cpp, else tables and
torch.

The checksum is a remainder of polynomials over GF(2) (Peterson and Brown 1961), so it is linear: checksums of
neighbouring ranges combine, and without native code a range is folded many 32-bit words at a time.
"""

import ctypes
import functools
from collections.abc import Callable

import torch

from deepspeed.native.build import try_load
from deepspeed.native.ops import CPU_CHECKSUM

_POLYNOMIAL = 0x82F63B78  # bit 31 is the coefficient of x^0, x^32 left out
_ONES = 0xFFFFFFFF
_FOLDS = (1 << 15, 1 << 10, 1 << 5)  # words; a wide fold is quick and leaves a range of its width to the next
_BLOCK = 1 << 20  # bytes checksummed and copied at a time without native code

Update = Callable[[torch.Tensor, int], int]


def crc32c(data: torch.Tensor | bytes | bytearray | memoryview, crc: int = 0) -> int:
    """Checksum of the bytes of ``data`` (a contiguous host tensor of any dtype, or bytes) after those whose checksum is
    ``crc``.

    0 stands for none: ``crc32c(b, crc32c(a)) == crc32c(a + b)``. Raises ValueError for another tensor.
    """
    values = data if isinstance(data, torch.Tensor) else _as_tensor(data)
    calls = _native()
    if calls is None:
        return _by_tables(_as_bytes(values), crc)
    return calls[0](values.data_ptr(), _host_bytes(values), crc)


def copy_with_crc32c(dst: torch.Tensor, src: torch.Tensor, crc: int = 0) -> int:
    """Copy the bytes of ``src`` to ``dst``, as many, not overlapping, in one pass over memory; returns their checksum
    as :func:`crc32c`.

    Both are contiguous host tensors, of any dtypes. Raises ValueError for others.
    """
    nbytes = _host_bytes(src)
    if _host_bytes(dst) != nbytes:
        raise ValueError(f"{nbytes} bytes do not fit a tensor of {_host_bytes(dst)} bytes")
    calls = _native()
    if calls is not None:
        return calls[1](dst.data_ptr(), src.data_ptr(), nbytes, crc)
    for to, source in zip(_as_bytes(dst).split(_BLOCK), _as_bytes(src).split(_BLOCK), strict=True):
        crc = _by_tables(source, crc)
        to.copy_(source)
    return crc


def combine(a: int, b: int, length: int) -> int:
    """Checksum of two neighbouring ranges from theirs, ``a`` and ``b``; the second has ``length`` bytes."""
    return _multiply(_zeros(length), a) ^ b


@functools.cache
def _native() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """The native functions, built on first use; None (after one line in the log) where that is not possible."""
    library = try_load(CPU_CHECKSUM)
    if library is None:
        return None
    plain, copying = library["ds_crc32c"], library["ds_crc32c_copy"]
    plain.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32]
    copying.argtypes = [ctypes.c_void_p, *plain.argtypes]
    plain.restype = copying.restype = ctypes.c_uint32
    return plain, copying


def _host_bytes(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"a checksum takes contiguous host tensors, not {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
    return tensor.numel() * tensor.element_size()


def _as_tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    own = bytearray(data)  # torch takes no read-only memory without a warning
    return torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    _host_bytes(tensor)
    return tensor.detach().reshape(-1).view(torch.uint8)


# --- without native code ---


def _multiply(a: int, b: int) -> int:
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@functools.lru_cache(64)
def _zeros(count: int) -> int:
    """x^(8 * count): what ``count`` appended zero bytes multiply a register by."""
    power, result = 1 << 23, 1 << 31
    while count:
        if count & 1:
            result = _multiply(power, result)
        power, count = _multiply(power, power), count >> 1
    return result


@functools.cache
def _byte_table() -> list[int]:
    """Register after one byte."""
    step = _zeros(1)
    return [_multiply(byte, step) for byte in range(256)]


@functools.cache
def _shift_tables(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of every lower and of every upper half of a register with x^(8 * count): 2 x 65536 words."""
    factor = _zeros(count)
    tables = (torch.zeros(1 << 16, dtype=torch.int32), torch.zeros(1 << 16, dtype=torch.int32))
    for place, table in enumerate(tables):
        for bit in range(16):
            product = _multiply(1 << (16 * place + bit), factor)
            size, signed = 1 << bit, product - (1 << 32 if product >> 31 else 0)
            torch.bitwise_xor(table[:size], signed, out=table[size : 2 * size])
    return tables


def _fold(words: torch.Tensor, width: int, register: int) -> torch.Tensor:
    """``width`` words with the remainder of ``words``, whose first is xored with ``register``.

    Horner's rule with x^(32 * width), on all columns of a row at once; leading zeros change no remainder.
    """
    low, high = _shift_tables(4 * width)
    head = words.numel() % width
    state = torch.zeros(width, dtype=torch.int32)
    state[width - head :] = words[:head]
    first = torch.tensor([register - (1 << 32 if register >> 31 else 0)], dtype=torch.int32)
    if head:
        state[width - head] ^= first[0]
    for index, row in enumerate(words[head:].view(-1, width)):
        state = (
            low.index_select(0, state & 0xFFFF)
            .bitwise_xor_(high.index_select(0, (state >> 16) & 0xFFFF))
            .bitwise_xor_(row)
        )
        if index == 0 and not head:
            state[0] ^= first[0]
    return state


def _by_tables(data: torch.Tensor, crc: int) -> int:
    register, step = crc ^ _ONES, _byte_table()
    count = data.numel() // 4
    words = data[: 4 * count]
    # a view as words needs their alignment in the storage
    words = (words if words.storage_offset() % 4 == 0 else words.clone()).view(torch.int32)
    for width in _FOLDS:
        if words.numel() > 2 * width:
            words, register = _fold(words, width, register), 0
    tail = bytes(words.view(torch.uint8).tolist()) + bytes(data[4 * count :].tolist())
    for byte in tail:
        register = (register >> 8) ^ step[(register ^ byte) & 0xFF]
    return register ^ _ONES
