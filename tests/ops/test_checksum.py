"""Checksums are CRC-32C, the same by the instruction, by the tables and without native code, however a range is cut.

Of processors without the instruction, and machines without a compiler: test_cpu_optimizers.py.
"""

import random
from collections.abc import Iterator

import pytest
import torch

from deepspeed.accelerator.native import spec as ops
from deepspeed.accelerator.native.build import try_load
from deepspeed.checkpoint.format import checksum
from deepspeed.checkpoint.format.checksum import copy_with_crc32c, crc32c

# RFC 3720 B.4, and the check value of the catalogue of parametrised CRC algorithms
KNOWN = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}
ROUND = 3 * 2048  # bytes of one round of the native kernel
SIZES = [0, 1, 3, 4, 7, 8, 63, 64, 65, ROUND - 1, ROUND, ROUND + 1, 2 * ROUND + 5, 4 * 2080]
SIZES += [(1 << 18) + 4, (1 << 18) + 7, (1 << 19) + 130]


@pytest.fixture(params=["native", "plain python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the native kernel, and with what runs where there is no compiler."""
    if request.param == "native" and try_load(ops.CPU_CHECKSUM) is None:
        pytest.skip("no C++ compiler")
    if request.param != "native":
        monkeypatch.setattr(checksum, "_native", lambda: None)
    return request.param


def drawn(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bit_by_bit(data: bytes, crc: int = 0) -> int:
    register = crc ^ 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize("data", KNOWN, ids=lambda data: f"{len(data)} bytes")
def test_known_checksums(way: str, data: bytes) -> None:
    assert crc32c(data) == crc32c(bytearray(data)) == crc32c(memoryview(data)) == KNOWN[data]


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_size_and_alignment_is_the_definition(way: str, nbytes: int) -> None:
    values = drawn(nbytes + 8)
    for skip in (0, 1, 4, 7):
        part = values[skip : skip + nbytes]
        assert crc32c(part, 0x12345678) == bit_by_bit(bytes(part.tolist()), 0x12345678)
        if nbytes > 1000:
            break  # the definition is slow


def test_both_ways_agree_on_large_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    if try_load(ops.CPU_CHECKSUM) is None:
        pytest.skip("no C++ compiler")
    values, draw = drawn(3 << 20), random.Random(1)
    for _ in range(20):
        begin, start = draw.randrange(1 << 16), draw.getrandbits(32)
        part = values[begin : begin + draw.randrange(2 << 20)]
        ours = crc32c(part, start)
        with monkeypatch.context() as patch:
            patch.setattr(checksum, "_native", lambda: None)
            assert crc32c(part, start) == ours


def test_a_range_may_be_cut_anywhere(way: str) -> None:
    values, draw = drawn(300_000), random.Random(2)
    whole = crc32c(values)
    for _ in range(20):
        cut = draw.randrange(values.numel() + 1)
        first, second = values[:cut], values[cut:]
        assert crc32c(second, crc32c(first)) == whole


def test_checksums_of_neighbours_are_joined_natively() -> None:
    library = try_load(ops.CPU_CHECKSUM)
    if library is None:
        pytest.skip("no C++ compiler")
    call = library["ds_crc32c_combine"]
    call.restype, call.argtypes = checksum.ctypes.c_uint32, [checksum.ctypes.c_uint32] * 2 + [checksum.ctypes.c_int64]
    values = drawn(300_000)
    for cut in (0, 1, 4097, 299_999, 300_000):
        assert call(crc32c(values[:cut]), crc32c(values[cut:]), 300_000 - cut) == crc32c(values)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_copy_is_a_copy_with_the_same_checksum(way: str, nbytes: int) -> None:
    source, target = drawn(nbytes + 3)[3:], torch.full((nbytes + 2,), 7, dtype=torch.uint8)
    assert copy_with_crc32c(target[1:-1], source, 5) == crc32c(source, 5)
    assert torch.equal(target[1:-1], source) and target[0] == target[-1] == 7


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn]
)
def test_any_dtype_and_shape_counts_as_its_bytes(way: str, dtype: torch.dtype) -> None:
    values = drawn(240).to(torch.float32).to(dtype).view(2, 5, 24)
    raw = values.view(-1).view(torch.uint8)
    assert crc32c(values) == crc32c(raw) == crc32c(bytes(raw.tolist()))
    target = torch.empty_like(raw)
    assert copy_with_crc32c(target, values.requires_grad_(dtype.is_floating_point)) == crc32c(raw) and torch.equal(
        target, raw
    )


def test_one_changed_bit_changes_it(way: str) -> None:
    values = drawn(5000)
    before = crc32c(values)
    for at in (0, 1, 2047, 2048, 4999):
        values[at] ^= 16
        assert crc32c(values) != before
        values[at] ^= 16


def test_what_is_not_plain_host_memory_is_refused(way: str) -> None:
    for values in (torch.zeros(4, 4).t()[1:], torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match="contiguous host tensors"):
            crc32c(values)
    with pytest.raises(ValueError, match="8 bytes do not fit a tensor of 7 bytes"):
        copy_with_crc32c(drawn(7), drawn(8))
