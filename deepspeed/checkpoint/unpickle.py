"""Files of ``torch.save`` read without executing anything.

The pickle inside is interpreted symbolically: a class or function that it names is only ever a name, looked up in a table of things this
module can build itself; what is not in the table is refused. Tensors stay in the file until they are read.
"""

import math
import pickletools
import struct
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

import numpy as np
import torch

from deepspeed.errors import CheckpointError

CHUNK_BYTES = 4 << 20
LOCAL_HEADER_BYTES = 30
NUMPY_KINDS = "biufcSU"

_DTYPES = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Bool": torch.bool},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
STORAGES: dict[str, torch.dtype | None] = {f"torch.{kind}Storage": dtype for kind, dtype in _DTYPES.items()}
STORAGES |= dict.fromkeys(("torch.UntypedStorage", "torch.storage.UntypedStorage"))
_Kind = TypeVar("_Kind")
TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")
# Objects of which only the attributes matter.
RECORDS = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
}


@dataclass
class Record:
    """Stands for an object of the class ``kind``: its attributes and nothing else."""

    kind: str
    state: dict[str, Any] = field(default_factory=dict)


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
        root = pickles[0].removesuffix("data.pkl")
        self._infos = {i.filename.removeprefix(root): i for i in infos}
        # set_crc32_options(False) leaves every checksum zero.
        self._unchecked = set(self._infos) if self._infos["data.pkl"].CRC == 0 else set[str]()
        if "byteorder" in self._infos and self.content("byteorder") != b"little":
            raise CheckpointError(f"{path} was written on a machine of the other byte order")

    def size(self, name: str) -> int:
        """Bytes of a record."""
        if name not in self._infos:
            raise CheckpointError(f"{self.path} lacks its record {name!r}")
        return self._infos[name].file_size

    def content(self, name: str) -> bytes:
        """A whole record."""
        found = bytearray(self.size(name))
        self.read_into(name, memoryview(found), at=0)
        return bytes(found)

    def read_into(self, name: str, out: memoryview, *, at: int) -> None:
        """Bytes of a record from ``at`` on. The first time, the whole record is read against its checksum."""
        size, info = self.size(name), self._infos[name]
        with self.path.open("rb") as stream:
            stream.seek(info.header_offset)
            header = stream.read(LOCAL_HEADER_BYTES)
            if len(header) < LOCAL_HEADER_BYTES or header[:4] != b"PK\3\4" or info.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"{self.path} is damaged: its record {name!r} has no readable beginning")
            first = info.header_offset + LOCAL_HEADER_BYTES + sum(struct.unpack("<HH", header[26:30]))
            if first + size > self._length or not 0 <= at <= at + len(out) <= size:
                raise CheckpointError(f"{self.path} is truncated: its record {name!r} of {size} bytes is not all there")
            if name not in self._unchecked:
                self._check(stream, name, first)
            stream.seek(first + at)
            if stream.readinto(out) != len(out):
                raise CheckpointError(f"{self.path} became shorter while it was read")

    def _check(self, stream: Any, name: str, first: int) -> None:
        stream.seek(first)
        left, crc = self._infos[name].file_size, 0
        while left:
            chunk = stream.read(min(left, CHUNK_BYTES))
            if not chunk:
                break
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
        if crc != self._infos[name].CRC:
            raise CheckpointError(f"{self.path} is damaged: the checksum of its record {name!r} does not match; use another copy")
        self._unchecked.add(name)


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
    """A tensor in a file. ``offset`` and ``stride`` count elements."""

    file: TensorFile
    record: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for tensors that were one in memory."""
        return self.file.path, self.record, self.offset, self.dtype, self.shape, self.stride

    def read(self, out: torch.Tensor, *, start: int = 0) -> None:
        """Fill the flat host tensor ``out`` (any dtype) with elements from ``start`` on, in row-major order."""
        if not self._is_contiguous():
            out.copy_(self._strided().reshape(-1)[start : start + out.numel()])
        elif out.dtype == self.dtype:
            self._fill(out, self.offset + start)
        else:  # a piece at a time, so that a cast needs little memory
            step = CHUNK_BYTES // self.dtype.itemsize
            for lo in range(0, out.numel(), step):
                part = torch.empty(min(step, out.numel() - lo), dtype=self.dtype, device="cpu")
                self._fill(part, self.offset + start + lo)
                out[lo : lo + part.numel()].copy_(part)

    def tensor(self) -> torch.Tensor:
        """All of it, in its shape."""
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(found.view(-1))
        return found.requires_grad_() if self.requires_grad else found

    def _is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    def _fill(self, out: torch.Tensor, first: int) -> None:
        if out.numel():
            target = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]
            self.file.read_into(self.record, target, at=first * self.dtype.itemsize)

    def _strided(self) -> torch.Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        values = torch.empty(span, dtype=self.dtype, device="cpu")
        self._fill(values, self.offset)
        return values.as_strided(self.shape, self.stride)


def load_restricted(path: Path) -> Any:
    """The object of a ``torch.save`` file, with ``Stored`` in place of tensors and ``Record`` in place of foreign objects.

    Raises CheckpointError when the file is damaged, in the old non-zip format, or needs anything outside the table of this module; nothing
    of the file is executed in any case.
    """
    file = TensorFile(path)
    try:
        # Python's opcode reader warns of escapes that no pickler writes; as errors they refuse the file, whatever filters are set.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", module="pickletools")
            return _Machine(file).run(file.content("data.pkl"))
    except CheckpointError:
        raise
    except Warning as warning:
        raise CheckpointError(f"{path} holds a malformed pickle: {warning}") from warning
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"{path} holds a malformed pickle: {type(error).__name__}: {error}") from error


def materialize(value: Any) -> Any:
    """``value`` with its tensors read, one tensor for one place in a file; containers are new. Raises CheckpointError."""
    known: dict[tuple[Any, ...], torch.Tensor] = {}

    def walk(item: Any) -> Any:
        if isinstance(item, Stored):
            if (item.place, item.requires_grad) not in known:
                known[item.place, item.requires_grad] = item.tensor()
            return known[item.place, item.requires_grad]
        if type(item) in (list, tuple, set, frozenset):
            return type(item)(walk(i) for i in item)
        if type(item) is dict:
            return {walk(k): walk(v) for k, v in item.items()}
        if type(item) is OrderedDict:
            found = OrderedDict((walk(k), walk(v)) for k, v in item.items())
            vars(found).update(walk(dict(vars(item))))
            return found
        return Namespace(**walk(item.state)) if isinstance(item, Record) and item.kind == "argparse.Namespace" else item

    try:
        return walk(value)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError("state in the checkpoint is nested too deeply, or contains itself") from None
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"state in the checkpoint is malformed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _Global:
    """A class or function by name."""

    name: str


@dataclass(frozen=True)
class _Storage:
    record: str
    nbytes: int
    dtype: torch.dtype | None


@dataclass(eq=False)
class _Unmade:
    """A numpy dtype or array between its creation and its state. ``slots``: where the memo holds it."""

    kind: str
    code: str = ""
    slots: list[int] = field(default_factory=list)


_MARK = object()


class _Machine:
    """Runs the opcodes of one pickle over plain values."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_dtype,
            "torch._utils._rebuild_parameter": lambda data, trained, hooks: replace(_a(Stored, data), requires_grad=trained is True),
            "torch._tensor._rebuild_from_type_v2": self._tensor_with_attributes,
            "torch.Size": lambda sizes: torch.Size(_sizes(sizes)),
            "torch.device": lambda *args: torch.device(*args),
            "collections.OrderedDict": lambda *args: OrderedDict(*args),
            "collections.Counter": lambda *args: Counter(*args),
            "builtins.set": lambda items=(): set(items),
            "builtins.frozenset": lambda items=(): frozenset(items),
            "builtins.complex": lambda real, imag: complex(float(real), float(imag)),
            "builtins.bytes": lambda: b"",
            "builtins.bytearray": lambda content=b"": bytearray(_a(bytes, content)),
            "_codecs.encode": _encode,
            "pathlib.PosixPath": lambda *parts: Path(*parts),
            "pathlib.WindowsPath": lambda *parts: Path(*parts),
            "pathlib.PurePosixPath": lambda *parts: PurePosixPath(*parts),
            "pathlib.PureWindowsPath": lambda *parts: PureWindowsPath(*parts),
            "deepspeed.runtime.zero.config.ZeroStageEnum": lambda value: int(value),
            "numpy.dtype": lambda code, *flags: _Unmade("dtype", _a(str, code)),
            "numpy._core.multiarray.scalar": lambda dtype, content: _array(dtype, (), _a(bytes, content))[()],
            "numpy._core.multiarray._reconstruct": self._empty_array,
        }
        self._names = {*self._calls, *STORAGES, *RECORDS, *TENSORS, "numpy.ndarray"}
        self._ops = self._table()

    def _table(self) -> dict[str, Callable[[Any], None]]:
        push = self._stack.append
        constants = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
        literals = "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8"
        return {
            **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _: None),
            **{name: partial(lambda value, _: push(value), value) for name, value in constants.items()},
            **dict.fromkeys(literals.split(), push),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._put),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda slot: push(self._memo[slot])),
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_SET": lambda _: push(set()),
            "EMPTY_TUPLE": lambda _: push(()),
            "TUPLE": lambda _: push(tuple(self._marked())),
            "TUPLE1": lambda _: push(tuple(self._pop(1))),
            "TUPLE2": lambda _: push(tuple(self._pop(2))),
            "TUPLE3": lambda _: push(tuple(self._pop(3))),
            "FROZENSET": lambda _: push(frozenset(self._marked())),
            "APPEND": lambda _: self._grow(list, self._pop(1)),
            "APPENDS": lambda _: self._grow(list, self._marked()),
            "ADDITEMS": lambda _: self._grow(set, self._marked()),
            "SETITEM": lambda _: self._update(self._pop(2)),
            "SETITEMS": lambda _: self._update(self._marked()),
            "GLOBAL": lambda arg: self._global(*arg.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._global(*self._pop(2)),
            "REDUCE": self._reduce,
            "NEWOBJ": self._new,
            "BUILD": self._build,
            "BINPERSID": self._persistent,
        }

    def run(self, content: bytes) -> Any:
        end = 0
        for opcode, argument, position in pickletools.genops(content):
            operation = self._ops.get(opcode.name)
            if operation is None:
                raise CheckpointError(
                    f"{self._file.path}: pickle operation {opcode.name} at byte {position} is refused; torch.save writes none"
                )
            operation(argument)
            end = position or 0
        if len(self._stack) != 1 or self._stack[0] is _MARK or end + 1 != len(content):
            raise CheckpointError(f"{self._file.path} holds a malformed pickle: it does not end as it should")
        return self._stack[0]

    def _pop(self, count: int) -> list[Any]:
        found = self._stack[-count:]
        if len(found) != count or any(item is _MARK for item in found):
            raise ValueError("the stack is too short")
        del self._stack[-count:]
        return found

    def _marked(self) -> list[Any]:
        at = next(i for i in range(len(self._stack) - 1, -2, -1) if i < 0 or self._stack[i] is _MARK)
        if at < 0:
            raise ValueError("no mark on the stack")
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def _top(self, *kinds: type) -> Any:
        if not self._stack or type(self._stack[-1]) not in kinds:
            raise TypeError(f"expected {' or '.join(k.__name__ for k in kinds)} on the stack")
        return self._stack[-1]

    def _put(self, slot: int) -> None:
        if self._stack[-1] is _MARK:
            raise ValueError("a mark is no value")
        self._memo[slot] = self._stack[-1]
        if isinstance(self._stack[-1], _Unmade):
            self._stack[-1].slots.append(slot)

    def _grow(self, kind: type, items: list[Any]) -> None:
        (self._top(kind).extend if kind is list else self._top(kind).update)(items)

    def _update(self, items: list[Any]) -> None:
        self._top(dict, OrderedDict).update(zip(items[::2], items[1::2], strict=True))

    def _global(self, module: str, name: str) -> None:
        full = f"{module}.{name}".replace("__builtin__.", "builtins.", 1).replace("numpy.core.", "numpy._core.", 1)
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            self._stack.append(dtype)
        elif full in self._names:
            self._stack.append(_Global(full))
        else:
            raise CheckpointError(
                f"{self._file.path} needs {module}.{name}, which is not among the classes that are read; nothing was executed. "
                "If it is part of your client state, save the checkpoint again without it, or with its plain values"
            )

    def _called(self, items: list[Any]) -> tuple[str, tuple[Any, ...]]:
        function, arguments = items
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise CheckpointError(f"{self._file.path}: a call of {type(function).__name__} is refused")
        return function.name, arguments

    def _reduce(self, _: Any) -> None:
        name, arguments = self._called(self._pop(2))
        call = self._calls.get(name)
        if call is None:
            raise CheckpointError(f"{self._file.path}: a call of {name} is refused")
        self._stack.append(call(*arguments))

    def _new(self, _: Any) -> None:
        name, arguments = self._called(self._pop(2))
        if name not in RECORDS or arguments:
            raise CheckpointError(f"{self._file.path}: an object of {name} made from {len(arguments)} values is refused")
        self._stack.append(Record(name))

    def _build(self, _: Any) -> None:
        (state,) = self._pop(1)
        target = self._top(Record, OrderedDict, _Unmade)
        if isinstance(target, _Unmade):
            made = _made(target, state)
            self._stack[-1] = made
            for slot in target.slots:
                self._memo[slot] = made
            return
        if type(state) is not dict or any(type(key) is not str for key in state):
            raise CheckpointError(f"{self._file.path}: attributes that are no dict are refused")
        (target.state if isinstance(target, Record) else vars(target)).update(state)

    def _persistent(self, _: Any) -> None:
        ((kind, storage, key, _place, numel),) = self._pop(1)
        if kind != "storage" or not isinstance(storage, _Global) or storage.name not in STORAGES:
            raise CheckpointError(f"{self._file.path}: an external object of kind {kind!r:.50} is refused")
        dtype = STORAGES[storage.name]
        record = f"data/{_a(str, key)}"
        nbytes = _sizes((numel,))[0] * (dtype.itemsize if dtype is not None else 1)
        if self._file.size(record) != nbytes:
            raise CheckpointError(f"{self._file.path}: record {record!r} has {self._file.size(record)} bytes where {nbytes} are stated")
        self._stack.append(_Storage(record, nbytes, dtype))

    def _tensor(
        self, storage: Any, offset: Any, shape: Any, stride: Any, trained: Any, hooks: Any, extra: Any = None, *, dtype: Any = None
    ) -> Stored:
        dtype = dtype or getattr(storage, "dtype", None)
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype) or extra:
            raise TypeError("no tensor")
        shape, stride, (offset,) = _sizes(shape), _sizes(stride), _sizes((offset,))
        end = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        # More elements than bytes is a view that repeats its elements; a few bytes could ask for any amount of memory that way.
        if math.prod(shape) and (end * dtype.itemsize > storage.nbytes or math.prod(shape) * dtype.itemsize > storage.nbytes):
            raise CheckpointError(f"{self._file.path}: a tensor of shape {shape!r:.100} does not fit its record {storage.record!r}")
        return Stored(self._file, storage.record, dtype, shape, stride, offset, trained is True)

    def _tensor_of_dtype(self, *args: Any) -> Stored:
        return self._tensor(*args[:6], *args[7:], dtype=args[6])

    def _tensor_with_attributes(self, function: Any, kind: Any, arguments: Any, _attributes: Any) -> Stored:
        """The tensor; the reference hangs attributes of its own on some."""
        if not isinstance(function, _Global) or not isinstance(kind, _Global) or kind.name not in TENSORS:
            raise TypeError("a tensor of its own kind")
        return _a(Stored, self._calls[function.name](*arguments))

    def _empty_array(self, kind: Any, shape: Any, code: Any) -> _Unmade:
        if kind != _Global("numpy.ndarray"):
            raise TypeError("an array of its own kind")
        return _Unmade("ndarray")


def _a(kind: type[_Kind], value: Any) -> _Kind:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list, torch.Size) or any(type(n) is not int or n < 0 for n in values):
        raise ValueError(f"no sizes: {values!r:.100}")
    return tuple(values)


def _encode(text: Any, encoding: Any) -> bytes:
    """How protocol 2 spells bytes."""
    if encoding != "latin1":
        raise ValueError(f"encoding {encoding!r:.50}")
    return _a(str, text).encode("latin1")


def _array(dtype: Any, shape: tuple[int, ...], content: bytes) -> np.ndarray:
    if not isinstance(dtype, np.dtype) or dtype.kind not in NUMPY_KINDS or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"no array of {dtype!r:.50} and shape {shape!r:.50}")
    return np.ndarray(shape, dtype, bytearray(content))


def _made(unmade: _Unmade, state: Any) -> Any:
    """A numpy dtype or array once its state is known."""
    if unmade.kind == "dtype":
        plain = np.dtype(unmade.code)
        if plain.kind not in NUMPY_KINDS or len(state) != 8 or state[2:5] != (None, None, None):
            raise ValueError(f"numpy dtype {unmade.code!r:.50} is refused")
        return plain.newbyteorder(">" if state[1] == ">" else "<")
    _, shape, dtype, fortran, content = state
    shape, content = _sizes(shape), _a(bytes, content)
    return np.asfortranarray(_array(dtype, shape[::-1], content).T) if fortran is True else _array(dtype, shape, content)
