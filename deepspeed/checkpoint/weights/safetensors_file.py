"""safetensors files, written and read in pieces: 8 bytes of header length, a JSON header, then the values without
gaps.
"""

import json
import struct
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deepspeed.checkpoint.weights.weights import Stream
from deepspeed.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGN = 8
_LARGEST_HEADER = 100 << 20


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a flat, contiguous host tensor."""
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)


def write_safetensors(
    file: BinaryIO, streams: Sequence[Stream], *, progress: Callable[[int], None] = lambda _bytes: None
) -> None:
    """Write ``streams``, largest element size first so that every tensor is aligned. Raises CheckpointError for a dtype
    without a name.
    """
    ordered = sorted(streams, key=lambda s: -s.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for s in ordered:
        if s.dtype not in _NAMES:
            raise CheckpointError(f"{s.name} is {s.dtype}, which safetensors files cannot hold; use --format torch")
        header[s.name] = {"dtype": _NAMES[s.dtype], "shape": list(s.shape), "data_offsets": [at, at + s.nbytes]}
        at += s.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    file.write(struct.pack("<Q", len(text)) + text)
    for s in ordered:
        for chunk in s.chunks():
            file.write(as_bytes(chunk))
            progress(chunk.nbytes)


def read_safetensors(path: Path) -> dict[str, Stream]:
    """The tensors of a file, by name; bytes are read when a stream is. Raises CheckpointError for what is no such
    file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise CheckpointError(f"{path} is no safetensors file: it states a header of {length} bytes and has {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        return {name: _stored(path, name, row, base=8 + length, size=size) for name, row in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {type(error).__name__}: {error}") from error


def _stored(path: Path, name: str, row: dict[str, Any], *, base: int, size: int) -> Stream:
    dtype, shape, (begin, end) = _DTYPES[row["dtype"]], tuple(row["shape"]), row["data_offsets"]
    if end - begin != prod(shape) * dtype.itemsize or begin < 0 or base + end > size:
        raise ValueError(f"{name} lies at bytes {begin} to {end}, which does not fit its shape {shape} or the file")

    def read(start: int, out: torch.Tensor) -> None:
        with path.open("rb") as file:
            file.seek(base + begin + start * dtype.itemsize)
            if out.numel() and file.readinto(as_bytes(out)) != out.nbytes:
                raise CheckpointError(f"{path} ends within {name}")

    return Stream(name, dtype, shape, read)
