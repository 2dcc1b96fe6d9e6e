"""Files of ``torch.save`` read without executing anything: torch's weights-only unpickler, with a few stand-ins.

A file that names anything else is refused. Tensors stay in the file until they are read. The end is for client state
that only pickle can hold: a file of its own, written and read when the configuration allows it.
"""

import contextlib
import copy
import io
import math
import pickle
import struct
import threading
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.folders import write_atomically
from deepspeed.errors import CheckpointError, PlainStateError

_CHUNK_BYTES = 4 << 20
_NUMPY_KINDS = "biufcSU"  # no objects: their bytes are addresses


class Records:
    """Records of a zip file by the offset of their first byte; each is compared with its checksum at its first use."""

    def __init__(self, path: Path) -> None:
        self.path, self._checked = path, set[int]()
        self.infos: dict[int, zipfile.ZipInfo] = {}
        with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
            for info in archive.infolist():
                stream.seek(info.header_offset + 26)
                first: int = info.header_offset + 30 + sum(struct.unpack("<HH", stream.read(4)))
                self.infos[first], name = info, info.filename.partition("/")[2]
                if name in ("data.pkl", "byteorder"):
                    self.check(first)
                    stream.seek(first)
                if name == "byteorder" and stream.read(info.file_size) != b"little":
                    raise ValueError("it was written on a machine of the other byte order")

    def check(self, first: int) -> None:
        """Raise CheckpointError when the record is damaged. A checksum of zero is how torch writes none."""
        info, crc = self.infos[first], 0
        if first in self._checked or not info.CRC:
            return
        remaining = info.file_size
        with self.path.open("rb") as stream:
            stream.seek(first)
            while remaining and (chunk := stream.read(min(remaining, _CHUNK_BYTES))):
                crc, remaining = zlib.crc32(chunk, crc), remaining - len(chunk)
        if remaining or crc != info.CRC:
            reason = f"the checksum of its record {info.filename.partition('/')[2]!r} does not match"
            raise CheckpointError(f"{self.path} is damaged: {reason}; use another copy")
        self._checked.add(first)


class FileTensor:
    """Tensor in a file, described by ``like`` on the meta device."""

    def __init__(self, records: Records, like: torch.Tensor) -> None:
        storage = like.untyped_storage()
        self._records, self._like = records, like
        self._first: int = getattr(storage, "_checkpoint_offset", -1)
        self.path = records.path
        self.dtype, self.shape, self.numel = like.dtype, tuple(like.shape), like.numel()
        if like.layout != torch.strided or like.is_quantized or like.is_conj() or like.is_neg():
            raise ValueError(f"it holds a tensor of a kind that is not read ({like.layout}, {like.dtype})")
        # A view that does not fit has made the storage grow; one that repeats its elements may be huge.
        nbytes, info = storage.nbytes(), records.infos.get(self._first)
        if info is None or nbytes != info.file_size or self.numel * self.dtype.itemsize > nbytes:
            raise ValueError(f"a tensor of shape {self.shape!r:.100} does not fit its record")

    @property
    def place(self) -> tuple[Any, ...]:
        """Return a key that is equal for tensors that were one in memory."""
        return self.path, self._first, self._like.storage_offset(), self.dtype, self.shape, self._like.stride()

    def read(self, out: torch.Tensor, *, start: int = 0) -> None:
        """Fill the flat host tensor ``out`` (any dtype) with elements from ``start`` on, in row-major order."""
        if out.numel():
            self._records.check(self._first)
        stride = self._like.stride()
        if not self._like.is_contiguous():
            span = 1 + sum((n - 1) * s for n, s in zip(self.shape, stride, strict=True))
            values = self._elements(0, span).as_strided(self.shape, stride).reshape(-1)
            out.copy_(values[start : start + out.numel()])
            return
        step = _CHUNK_BYTES // self.dtype.itemsize
        for lo in range(0, out.numel(), step):
            part = out[lo : lo + step]
            part.copy_(self._elements(start + lo, part.numel()))

    def _elements(self, start: int, count: int) -> torch.Tensor:
        """Read ``count`` elements of the storage, from ``start`` on, counted from the tensor's first element."""
        width = self.dtype.itemsize
        at = self._first + (int(self._like.storage_offset()) + start) * width
        raw = np.fromfile(self.path, np.uint8, count * width, offset=at)
        if raw.size != count * width:
            raise CheckpointError(f"{self.path} became shorter while it was read")
        return torch.from_numpy(raw).view(self.dtype)

    def tensor(self) -> torch.Tensor:
        """Read the whole tensor, in its shape."""
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(values.view(-1))
        return values.requires_grad_() if self._like.requires_grad else values

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        key = (self.place, self._like.requires_grad)
        if key not in memo:
            memo[key] = self.tensor()
        return memo[key]


def load_restricted(path: Path) -> Any:
    """Load the object of a ``torch.save`` file, with FileTensor for tensors and Namespace for foreign objects.

    Raises OSError; CheckpointError when the file is damaged, in the format from before torch 1.6, or names anything
    outside torch's list of safe names and the table of this module. Nothing of it is executed in any case.
    """
    try:
        records = Records(path)
        with _LOCK, contextlib.ExitStack() as stack:
            # Leaving safe_globals removes its names also where the program had added them before.
            theirs = torch.serialization.get_safe_globals()
            stack.callback(torch.serialization.add_safe_globals, theirs)
            torch.serialization.clear_safe_globals()  # of what stands here for a name there is only one
            torch.serialization.add_safe_globals([g for g in theirs if _name(g) not in set(map(_name, _STAND_INS))])
            # torch looks into its own table first, so what it would build from any argument is replaced there.
            table = torch._weights_only_unpickler._get_allowed_globals()
            stack.callback(table.update, {name: table[name] for name in _BOUNDED if name in table})
            table.update((name, _BOUNDED[name]) for name in _BOUNDED if name in table)
            stack.enter_context(torch.serialization.safe_globals(_STAND_INS))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of the pickle protocol; what cannot be read of it is an error
            if foreign := torch.serialization.get_unsafe_globals_in_checkpoint(path):
                raise CheckpointError(
                    f"{path} needs {', '.join(sorted(foreign))}, not among the classes that are read; nothing was "
                    "executed. If it is part of your client state, save the checkpoint again without it"
                )
            # On the meta device nothing is read for a tensor, and its storage says where in the file it lies.
            tree = torch.load(path, map_location="meta", weights_only=True)
        return _in_file(records, tree, {})
    except (CheckpointError, OSError):
        raise
    except RecursionError:
        raise CheckpointError(f"{path} holds state that is nested too deeply, or contains itself") from None
    except Exception as error:  # whatever a malformed file leads zipfile and the unpickler to
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
        hint = "; save it with torch.save's own pickle_protocol=2" if "Unsupported operand" in reason else ""
        text = f"{path} cannot be read as a file of torch.save (1.6 or later)"
        raise CheckpointError(f"{text}: {type(error).__name__}: {reason}{hint}") from error


def materialize(value: Any) -> Any:
    """Return ``value`` with its tensors read, in new containers. Raises CheckpointError."""
    return copy.deepcopy(value)


def _in_file(records: Records, value: Any, memo: dict[int, Any]) -> Any:
    """Rebuild ``value``: new containers of the same types, tensors as FileTensor. Shared objects stay shared."""
    if id(value) in memo:
        return memo[id(value)]
    made = value
    if isinstance(value, torch.TypedStorage | torch.UntypedStorage):
        raise ValueError(f"it holds a bare storage ({type(value).__name__}), which is not read; save a tensor of it")
    if isinstance(value, torch.Tensor):
        made = FileTensor(records, value)
    elif isinstance(value, _Numpy):
        made = value.made
    elif type(value) in (list, tuple, set, frozenset):
        made = type(value)(_in_file(records, item, memo) for item in value)
    elif isinstance(value, dict | Namespace):
        made = copy.copy(value)
        items = made if isinstance(made, dict) else vars(made)
        for key in items:  # not update, which adds in a Counter
            items[key] = _in_file(records, items[key], memo)
    return memo.setdefault(id(value), made)


def _name(entry: Any) -> str:
    """Return the name by which torch knows an entry of its safe names."""
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


class _Numpy:
    """Stand-in for a numpy dtype or array, ``made`` once its state is known."""

    made: Any

    def __init__(self, *args: Any) -> None:
        self.args = args


class _Dtype(_Numpy):
    def __setstate__(self, state: Any) -> None:
        plain = np.dtype(_of(str, self.args[0]))
        if plain.kind not in _NUMPY_KINDS or len(state) != 8 or state[2:5] != (None, None, None):
            raise ValueError(f"numpy dtype {plain!r:.50} is refused")
        self.made = plain.newbyteorder(">" if state[1] == ">" else "<")


class _Array(_Numpy):
    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        made = _array(dtype, shape[::-1] if fortran is True else shape, content)
        self.made = np.asfortranarray(made.T) if fortran is True else made


def _array(dtype: Any, shape: Any, content: Any) -> np.ndarray:
    kind = _of(_Dtype, dtype).made
    if math.prod(_of(tuple, shape)) * kind.itemsize != len(_of(bytes, content)):
        raise ValueError(f"no array of {kind!r:.50} and shape {shape!r:.50}")
    return np.ndarray(shape, kind, bytearray(content))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, not {type(value).__name__}")
    return value


def _bounded(make: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """Restrict ``make`` to arguments of ``kind``: pickle could pass a count, or repeated elements, and fill memory."""
    return lambda *args: make(*(_of(kind, arg) for arg in args))


_LOCK = threading.Lock()  # around what is changed for the whole process while a file is read
_BOUNDED: dict[str, Any] = {
    "builtins.bytearray": _bounded(bytearray, bytes),
    "builtins.set": _bounded(set, list),
    "_codecs.encode": _bounded(str.encode, str),
    "collections.Counter": _bounded(Counter, dict),
    "collections.OrderedDict": _bounded(OrderedDict, list),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": None,  # copies whatever a tensor repeats; not callable
}
# What stands for the names that DeepSpeed's files and plain client state hold beyond those torch knows. Numpy's own
# functions would take bytes of a file for pointers.
_STAND_INS: list[Any] = [
    *((Namespace, f"deepspeed.runtime.fp16.loss_scaler.{name}") for name in ("LossScaler", "DynamicLossScaler")),
    (Namespace, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *(Namespace, (_bounded(frozenset, list), "builtins.frozenset"), (_bounded(bytes, bytes), "builtins.bytes")),
    *((Path, f"pathlib{sub}.{name}") for sub in ("", "._local") for name in ("PosixPath", "WindowsPath")),
    *((kind, f"pathlib{sub}.{kind.__name__}") for sub in ("", "._local") for kind in (PurePosixPath, PureWindowsPath)),
    *((_Dtype, "numpy.dtype"), (_Array, "numpy.ndarray")),
    *(
        (lambda dtype, content: _array(dtype, (), content)[()], f"numpy.{core}.multiarray.scalar")
        for core in ("core", "_core")
    ),
    *((_Array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
]


def save_pickled(folder: Path, rank: int, objects: dict[str, Any]) -> dict[str, Any]:
    """Pickle ``objects`` by path to a file; return what ``load_pickled`` needs. Raises PlainStateError on failure."""
    buffer = io.BytesIO()
    try:
        torch.save(objects, buffer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise PlainStateError(f"client state cannot be pickled either ({', '.join(objects)}): {error}") from error
    content, name = buffer.getvalue(), f"pickled_client_state_{rank:05d}.pt"
    write_atomically(folder / name, content)
    return {"file": name, "nbytes": len(content), "crc32c": f"{crc32c(content):08x}", "paths": sorted(objects)}


def checked(folder: Path, entry: dict[str, Any]) -> bytes:
    """Return the file's bytes, not unpickled, after comparing size and checksum. Raises CheckpointError."""
    path = folder / Path(str(entry["file"])).name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; it holds pickled client state")
    content = path.read_bytes()
    if len(content) != entry["nbytes"] or f"{crc32c(content):08x}" != entry["crc32c"]:
        raise CheckpointError(f"{path} is damaged: its checksum does not match, so it was not unpickled")
    return content


def load_pickled(folder: Path, entry: dict[str, Any], *, allow: bool) -> dict[str, Any]:
    """Unpickle the objects by path. This runs code from the file, so it needs ``allow``. Raises CheckpointError."""
    if not allow:
        raise CheckpointError(
            f"the client state of {folder} has pickled objects ({', '.join(entry['paths'][:8])}) in {entry['file']}; "
            'reading them can run any code; set "checkpoint": {"allow_pickle": true} if you trust whoever wrote it'
        )
    return dict(torch.load(io.BytesIO(checked(folder, entry)), map_location="cpu", weights_only=False))
