"""A file for ``torch.load`` that is filled tensor by tensor: a whole model never has to be in memory to be written.

torch lays the file out without values (``torch.serialization.skip_data``); each tensor's bytes then go to their place
in the zip archive, which stores them as they are.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from deepspeed.checkpoint.foreign.unpickle import TensorFile
from deepspeed.checkpoint.format.folders import sync_folder, temporary_for

_PIECE = 8 << 20  # elements that are copied at once


class TorchFile:
    """``path`` as a dict of tensors. ``shapes``: (dtype, shape) by name, in order; ``aliases``: further names for
    those.

    The file has its name when the context ends without an error; before, nothing at ``path`` has changed. Raises
    OSError.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        *,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self._shapes = dict(shapes)
        self._aliases = dict(aliases or {})
        self._cleanup = contextlib.ExitStack()
        self._file: BinaryIO | None = None
        self._offsets: dict[str, int] = {}

    def __enter__(self) -> "TorchFile":
        with contextlib.ExitStack() as stack:
            self._partial = stack.enter_context(temporary_for(self.path))
            self._lay_out()
            self._cleanup = stack.pop_all()
        return self

    def _lay_out(self) -> None:
        # Memory that nobody touches costs none.
        state = {n: torch.empty(shape, dtype=dtype, device="cpu") for n, (dtype, shape) in self._shapes.items()}
        named = {n: state[self._aliases[n]] if n in self._aliases else state[n] for n in (*state, *self._aliases)}
        with torch.serialization.skip_data():
            torch.save(named, self._partial)
        records = {
            info.filename.rpartition("/data/")[2]: first for first, info in TensorFile(self._partial).records.items()
        }
        # Storages are numbered as they are met; empty ones have numbers too.
        self._offsets = {name: records[str(number)] for number, name in enumerate(self._shapes)}
        self._file = self._partial.open("r+b")

    def write(self, name: str, values: torch.Tensor, *, start: int = 0) -> None:
        """Elements from ``start`` on of one tensor, in row-major order; on any device, in any dtype."""
        assert self._file is not None
        dtype, _ = self._shapes[name]
        flat = values.detach().reshape(-1)
        for at in range(0, flat.numel(), _PIECE):
            # Always a copy: memory that numpy has seen can never be given back, and that of a gathered unit must be.
            piece = flat[at : at + _PIECE].to(device="cpu", dtype=dtype, copy=True)
            self._file.seek(self._offsets[name] + (start + at) * dtype.itemsize)
            self._file.write(piece.view(torch.uint8).numpy().data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        with self._cleanup:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                os.replace(self._partial, self.path)
                sync_folder(self.path.parent)
