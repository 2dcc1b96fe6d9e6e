"""Files of ``torch.save`` read without executing anything.

torch's weights-only unpickler builds what it holds safe, and stand-ins for the names in a table here; a file that names
anything else is refused, and no class that a file names is imported. Tensors stay in the file until they are read.
"""

import contextlib
import math
import struct
import threading
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from deepspeed.errors import CheckpointError

CHUNK_BYTES = 4 << 20
LOCAL_HEADER_BYTES = 30  # the lengths of name and extra field are in its last four
NUMPY_KINDS = "biufcSU"


class TensorFile:
    """The records of one zip file: where they lie, and whether they are what was written.

    Raises CheckpointError when the file is truncated, damaged, or not of this kind; OSError when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._length = path.stat().st_size
        try:
            with zipfile.ZipFile(path) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, ValueError, ArithmeticError, struct.error, NotImplementedError, OSError) as error:
            raise CheckpointError(f"{path} {_no_zip(path)} ({error})") from error
        pickles = [i.filename for i in infos if i.filename.endswith("/data.pkl") and i.filename.count("/") == 1]
        if len(pickles) != 1 or len({i.filename for i in infos}) != len(infos):
            raise CheckpointError(f"{path} is a zip file, but not one that torch.save wrote")
        self.records: dict[int, zipfile.ZipInfo] = {}  # by the offset of their first byte
        with path.open("rb") as stream:
            named = {i.filename.partition("/")[2]: self._add(stream, i) for i in infos}
        # set_crc32_options(False) leaves every checksum zero.
        self._checked = set(self.records) if self.records[named["data.pkl"]].CRC == 0 else set[int]()
        self.content(named["data.pkl"])
        if "byteorder" in named and self.content(named["byteorder"]) != b"little":
            raise CheckpointError(f"{path} was written on a machine of the other byte order")

    def _add(self, stream: Any, info: zipfile.ZipInfo) -> int:
        stream.seek(info.header_offset)
        header = stream.read(LOCAL_HEADER_BYTES)
        if len(header) < LOCAL_HEADER_BYTES or header[:4] != b"PK\3\4" or info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self.path} is damaged: its record {info.filename!r} has no readable beginning")
        first: int = info.header_offset + LOCAL_HEADER_BYTES + sum(struct.unpack("<HH", header[26:]))
        if first + info.file_size > self._length:
            raise CheckpointError(
                f"{self.path} is truncated: its record {info.filename!r} of {info.file_size} bytes is not all there"
            )
        self.records[first] = info
        return first

    def content(self, first: int) -> bytes:
        """The whole record that begins at ``first``."""
        found = bytearray(self.records[first].file_size)
        self.read_into(first, memoryview(found), at=0)
        return bytes(found)

    def read_into(self, first: int, out: memoryview, *, at: int) -> None:
        """Bytes from ``at`` on of the record that begins at ``first``. The first time, the whole record is read against
        its checksum.
        """
        if at + len(out) > self.records[first].file_size:
            raise CheckpointError(
                f"{self.path} has no byte {at + len(out)} in its record {self.records[first].filename!r}"
            )
        with self.path.open("rb") as stream:
            if first not in self._checked:
                self._check(stream, first)
            stream.seek(first + at)
            if stream.readinto(out) != len(out):
                raise CheckpointError(f"{self.path} became shorter while it was read")

    def _check(self, stream: Any, first: int) -> None:
        stream.seek(first)
        left, crc = self.records[first].file_size, 0
        while left and (chunk := stream.read(min(left, CHUNK_BYTES))):
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
        if crc != self.records[first].CRC:
            name = self.records[first].filename.partition("/")[2]
            raise CheckpointError(
                f"{self.path} is damaged: the checksum of its record {name!r} does not match; use another copy"
            )
        self._checked.add(first)


def _no_zip(path: Path) -> str:
    with path.open("rb") as stream:
        begin = stream.read(4)
    if not begin:
        return "is empty"
    if begin.startswith(b"PK"):
        return "is truncated or damaged: its zip directory is missing"
    if begin.startswith(b"\x80"):
        return "is in torch's format from before 1.6, which is a bare pickle; load and save it again with a newer torch"
    return "is not a file of torch.save"


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a file: described by ``like`` on the meta device, whose storage is the record that begins at
    ``first``.
    """

    file: TensorFile
    first: int
    like: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    @property
    def numel(self) -> int:
        return self.like.numel()

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for tensors that were one in memory."""
        return self.file.path, self.first, self.like.storage_offset(), self.dtype, self.shape, self.like.stride()

    def read(self, out: torch.Tensor, *, start: int = 0) -> None:
        """Fill the flat host tensor ``out`` (any dtype) with elements from ``start`` on, in row-major order."""
        if not self.like.is_contiguous():
            span = 1 + sum((n - 1) * s for n, s in zip(self.like.shape, self.like.stride(), strict=True))
            values = torch.empty(span, dtype=self.dtype, device="cpu")
            self._fill(values, 0)
            out.copy_(values.as_strided(self.shape, self.like.stride()).reshape(-1)[start : start + out.numel()])
        elif out.dtype == self.dtype:
            self._fill(out, start)
        else:  # a piece at a time, so that a cast needs little memory
            step = CHUNK_BYTES // self.dtype.itemsize
            for lo in range(0, out.numel(), step):
                part = torch.empty(min(step, out.numel() - lo), dtype=self.dtype, device="cpu")
                self._fill(part, start + lo)
                out[lo : lo + part.numel()].copy_(part)

    def tensor(self) -> torch.Tensor:
        """All of it, in its shape."""
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(found.view(-1))
        return found.requires_grad_() if self.like.requires_grad else found

    def _fill(self, out: torch.Tensor, start: int) -> None:
        if out.numel():
            target = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]
            self.file.read_into(self.first, target, at=(int(self.like.storage_offset()) + start) * self.dtype.itemsize)


def load_restricted(path: Path) -> Any:
    """The object of a ``torch.save`` file, with ``Stored`` in place of tensors and ``Record`` in place of foreign
    objects.

    Raises CheckpointError when the file is damaged, in the old non-zip format, or names anything outside torch's list
    of safe names and the table of this module; nothing of the file is executed in any case. Threads may call it at
    once; but torch's list is one for the process, and a weights-only ``torch.load`` of the program's own in another
    thread meets this module's list at that moment.
    """
    file = TensorFile(path)
    try:
        with _LOCK, _only(_STAND_INS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the pickle protocol; what cannot be read of it is an error
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if foreign:
                raise CheckpointError(
                    f"{path} needs {', '.join(sorted(foreign))}, not among the classes that are read; nothing "
                    "was executed. "
                    "If it is part of your client state, save the checkpoint again without it, or with its plain values"
                )
            # On the meta device nothing is read for a tensor, and its storage says where in the file it lies.
            found = torch.load(path, map_location="meta", weights_only=True)
        return _mapped(found, lambda leaf: _settled(file, leaf))
    except (CheckpointError, OSError):
        raise
    except RecursionError:
        raise CheckpointError(f"{path} holds state that is nested too deeply, or contains itself") from None
    except Exception as error:  # whatever a malformed stream leads the unpickler to
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
        hint = "; save it with torch.save's own pickle_protocol=2" if "Unsupported operand" in reason else ""
        raise CheckpointError(
            f"{path} cannot be read by torch's weights-only unpickler: {type(error).__name__}: {reason}{hint}"
        ) from error


def materialize(value: Any) -> Any:
    """``value`` with its tensors read, one tensor for one place in a file; containers are new. Raises
    CheckpointError.
    """
    known: dict[tuple[Any, ...], torch.Tensor] = {}

    def read(leaf: Any) -> Any:
        if not isinstance(leaf, Stored):
            return leaf
        key = (leaf.place, leaf.like.requires_grad)
        if key not in known:
            known[key] = leaf.tensor()
        return known[key]

    try:
        return _mapped(value, read)
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"state in the checkpoint is malformed: {type(error).__name__}: {error}") from error


def _mapped(value: Any, change: Callable[[Any], Any], memo: dict[int, Any] | None = None) -> Any:
    """``value`` with new containers, and ``change`` applied to what is in them. What is shared is visited once and
    stays shared.
    """
    memo = {} if memo is None else memo  # the old object beside the new one: it must outlive its id
    if id(value) in memo:
        return memo[id(value)][1]
    if type(value) in (list, tuple, set, frozenset):
        made: Any = type(value)(_mapped(item, change, memo) for item in value)
    elif type(value) in (dict, Counter, OrderedDict):
        made = type(value)({_mapped(k, change, memo): _mapped(v, change, memo) for k, v in value.items()})
        if type(value) is OrderedDict:
            vars(made).update(_mapped(vars(value), change, memo))
    elif type(value) is Namespace:
        made = Namespace(**_mapped(vars(value), change, memo))
    else:
        made = Record(_mapped(value.state, change, memo)) if isinstance(value, Record) else change(value)
    memo[id(value)] = value, made
    return made


def _settled(file: TensorFile, value: Any) -> Any:
    """A tensor as ``Stored``, what stands for a value of numpy as that value."""
    if isinstance(value, torch.TypedStorage | torch.UntypedStorage):
        raise CheckpointError(
            f"{file.path} holds a bare storage ({type(value).__name__}), which is not read; save a tensor of it"
        )
    if not isinstance(value, torch.Tensor):
        return value.made if isinstance(value, _Numpy) else value
    plain = (
        type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized
    )
    if not plain or value.is_conj() or value.is_neg():
        raise CheckpointError(
            f"{file.path} holds a {type(value).__name__} of a kind that is not read ({value.layout}, {value.dtype})"
        )
    first: int = getattr(value.untyped_storage(), "_checkpoint_offset", -1)
    nbytes = value.untyped_storage().nbytes()  # a view that does not fit has made it grow
    # More elements than bytes is a view that repeats its elements; a few bytes could ask for any amount of memory that
    # way.
    if (
        first not in file.records
        or nbytes != file.records[first].file_size
        or value.numel() * value.dtype.itemsize > nbytes
    ):
        raise CheckpointError(f"{file.path}: a tensor of shape {tuple(value.shape)!r:.100} does not fit its record")
    return Stored(file, first, value)


@contextlib.contextmanager
def _only(names: list[Any]) -> Iterator[None]:
    """torch's safe names and these. What the program has added is left out: no file of a checkpoint may make objects of
    it.
    """
    theirs = torch.serialization.get_safe_globals()
    # torch looks into its own table first, so what it would build from any argument has to be replaced there.
    table = torch._weights_only_unpickler._get_allowed_globals()
    kept = {name: table[name] for name in _BOUNDED if name in table}
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(names)
    table.update((name, _BOUNDED[name]) for name in kept)
    try:
        yield
    finally:
        table.update(kept)
        added = [
            name for name in torch.serialization.get_safe_globals() if name not in names
        ]  # by another thread meanwhile
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*theirs, *added])


class Record:
    """Stands for an object of which only the attributes matter."""

    state: dict[str, Any]

    def __init__(self, state: dict[str, Any]) -> None:
        self.__setstate__(state)

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or any(type(key) is not str for key in state):
            raise TypeError("attributes that are no dict")
        self.state = state


class _Numpy:
    """Stands for a dtype or array, ``made`` once its state is known."""

    made: Any

    def __init__(self, *args: Any) -> None:
        self.args = args


class _Dtype(_Numpy):
    def __setstate__(self, state: Any) -> None:
        plain = np.dtype(_of(str, self.args[0]))
        if plain.kind not in NUMPY_KINDS or len(state) != 8 or state[2:5] != (None, None, None):
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
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _scalar(dtype: Any, content: Any) -> Any:
    return _array(dtype, (), content)[()]


def _bounded(make: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """``make`` of what pickle gives it. A count, or a tensor that repeats its elements, could ask for any amount of
    memory.
    """
    return lambda *args: make(*(_of(kind, arg) for arg in args))


_LOCK = threading.RLock()  # around what _only and catch_warnings change for the whole process
_BOUNDED: dict[str, Any] = {
    "builtins.bytearray": _bounded(bytearray, bytes),
    "builtins.set": _bounded(set, list),
    "_codecs.encode": _bounded(str.encode, str),
    "collections.Counter": _bounded(Counter, dict),
    "collections.OrderedDict": _bounded(OrderedDict, list),
    # copies a tensor whatever it repeats; None is not callable
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": None,
}
# What stands for the names that DeepSpeed's files and plain client state hold beyond those torch knows.
_STAND_INS = [
    *((Record, f"deepspeed.runtime.fp16.loss_scaler.{name}") for name in ("LossScaler", "DynamicLossScaler")),
    (Record, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Namespace, "argparse.Namespace"),
    (_bounded(frozenset, list), "builtins.frozenset"),
    (_bounded(bytes, bytes), "builtins.bytes"),
    *((Path, f"pathlib.{name}") for name in ("PosixPath", "WindowsPath")),
    (PurePosixPath, "pathlib.PurePosixPath"),
    (PureWindowsPath, "pathlib.PureWindowsPath"),
    (_Dtype, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((_Array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
]
