"""Plain Python state as JSON and tensors, exactly and without pickle. docs/checkpoint-format.md is the specification.

None, bool, int, float, str, lists and str-keyed dicts stay readable JSON. Everything else is ``{"$": tag, ...}``; a
dict that has the key ``$`` itself is written as pairs. Types are compared exactly: a subclass may carry what JSON would
lose, so it is refused.
"""

import base64
import datetime
import json
import math
import re
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed.errors import CheckpointError, PlainStateError

TAG = "$"
DEEPEST = 64  # levels of nesting; far below where JSON parsers and Python's stack give up
INLINE_BYTES = 1024  # longer byte strings become tensors
LONGEST_NAME = 200
LISTED = 10
NUMPY_KINDS = "biufcSUmM"  # no objects, no records
NUMPY_DTYPE = re.compile(rf"[<>|][{NUMPY_KINDS}][0-9]+(\[[0-9]*[a-zA-Z]+\])?")  # what dtype.str says of them
CONTAINERS = (list, tuple, set, frozenset, deque, dict, OrderedDict, Counter, Namespace)
PURE_PATHS: dict[str, type[PurePosixPath] | type[PureWindowsPath]] = {
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}
OPT_IN = "checkpoint.allow_pickle: true"


class Encoded(NamedTuple):
    """``json``: what ``json.dumps`` takes, without nan. ``tensors``: on the host, contiguous, detached; may share
    memory with the state.
    """

    json: Any
    tensors: dict[str, torch.Tensor]


def encode(value: Any, *, name: str) -> Encoded:
    """``value`` as JSON and tensors; tensors are named ``name/key/index``.

    Raises PlainStateError that lists every place that holds something else than plain state, or a cycle, or too deep
    nesting.
    """
    encoded, rest = split(value, name=name)
    if rest:
        listed = [f"  {path}: {_type_name(item)}" for path, item in list(rest.items())[:LISTED]]
        more = [f"  and {len(rest) - LISTED} more"] if len(rest) > LISTED else []
        raise PlainStateError(
            "\n".join(
                [
                    f"{len(rest)} object(s) in the state to save cannot be stored without pickle:",
                    *listed,
                    *more,
                    "Store plain values instead (numbers, str, bytes, lists, tuples, sets, dicts, tensors, "
                    "numpy arrays, "
                    f'dates, Namespace, Path; for example obj.state_dict()), or set "{OPT_IN}" in the configuration.',
                ]
            )
        )
    return encoded


class Collected:
    """Values as JSON, one after the other, and the tensors of all of them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, value: Any, name: str) -> Any:
        """The JSON of ``encode``."""
        found = encode(value, name=name)
        self.tensors |= found.tensors
        return found.json


def split(value: Any, *, name: str) -> tuple[Encoded, dict[str, Any]]:
    """As ``encode``; what cannot be stored is left out, marked by its path, and returned by path."""
    encoder = _Encoder(name)
    try:
        found = encoder.value(value, name)
    except RecursionError:
        raise PlainStateError(f"{name} is nested too deeply to be stored; flatten it") from None
    return Encoded(found, encoder.tensors), encoder.rest


def decode(json: Any, tensor: Callable[[str], torch.Tensor], *, pickled: Mapping[str, Any] | None = None) -> Any:
    """What ``encode`` or ``split`` was given, types included. ``json``: parsed JSON. ``tensor``: returns an entry of
    ``tensors`` by name.

    ``pickled``: the objects that ``split`` left out. Raises CheckpointError when they are needed and not given, or on
    malformed content.
    """
    try:
        missing = sorted(set(_references(json)) - set(pickled or {}))
        if missing:
            listed = "\n".join([f"  {path}" for path in missing[:LISTED]])
            raise CheckpointError(
                f"{len(missing)} object(s) of this checkpoint were stored with pickle and are not loaded:\n{listed}\n"
                f'If you trust whoever wrote the checkpoint, set "{OPT_IN}" in the configuration.'
            )
        return _Decoder(tensor, pickled or {}).value(json)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(
            "stored state is nested too deeply; the file is damaged or was not written by this package"
        ) from None
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"stored state is malformed: {type(error).__name__}: {error}") from error


def _type_name(value: Any) -> str:
    kind = type(value)
    note = f" of dtype {value.dtype}" if kind is np.ndarray else ""
    return f"{kind.__module__}.{kind.__qualname__}{note}"


def _key_name(key: Any, position: int) -> str:
    """How a path spells a key; one that no path can spell, or that is too long for one, by its position."""
    if type(key) is str and len(key) <= LONGEST_NAME and not _surrogates(key):
        return key
    if type(key) in (bool, float) or (type(key) is int and key.bit_length() < LONGEST_NAME):
        return str(key)
    return f"key {position}"


class _Encoder:
    """One walk over a value. ``rest``: what cannot be encoded, by path."""

    def __init__(self, name: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.rest: dict[str, Any] = {}
        self._open: dict[int, str] = {}  # containers on the way down, with their paths
        self._known: dict[tuple[Any, ...], str] = {}
        self._leaves: dict[type, Callable[[Any, str], Any]] = {
            int: self._int,
            float: self._float,
            complex: lambda v, p: {TAG: "complex", "value": [self._float(v.real, p), self._float(v.imag, p)]},
            str: self._str,
            bytes: lambda v, p: {TAG: "bytes", **self._raw(v, p)},
            bytearray: lambda v, p: {TAG: "bytearray", **self._raw(bytes(v), p)},
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            torch.dtype: lambda v, p: {TAG: "torch.dtype", "value": str(v).removeprefix("torch.")},
            torch.device: lambda v, p: {TAG: "torch.device", "value": str(v)},
            torch.Size: lambda v, p: {TAG: "torch.Size", "value": [int(n) for n in v]},
            PosixPath: lambda v, p: {TAG: "Path", "value": self._str(str(v), p)},
            WindowsPath: lambda v, p: {TAG: "Path", "value": self._str(str(v), p)},
            PurePosixPath: lambda v, p: {TAG: "PurePosixPath", "value": self._str(str(v), p)},
            PureWindowsPath: lambda v, p: {TAG: "PureWindowsPath", "value": self._str(str(v), p)},
            np.ndarray: self._array,
            datetime.timedelta: lambda v, p: {TAG: "timedelta", "value": [v.days, v.seconds, v.microseconds]},
            datetime.date: lambda v, p: {TAG: "date", "value": v.isoformat()},
            datetime.datetime: self._datetime,
        }

    def value(self, value: Any, path: str) -> Any:
        if value is None or type(value) is bool:
            return value
        if type(value) in CONTAINERS:
            return self._container(value, path)
        if isinstance(value, np.generic):
            return self._scalar(value, path)
        leaf = self._leaves.get(type(value))
        return self._left_out(value, path) if leaf is None else leaf(value, path)

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._open:
            raise PlainStateError(
                f"{path} contains itself: it is {self._open[id(value)]} again; break the cycle before saving"
            )
        if len(self._open) >= DEEPEST:
            raise PlainStateError(f"{path[:200]} is nested more than {DEEPEST} levels deep; flatten it")
        self._open[id(value)] = path
        try:
            return self._items(value, path)
        finally:
            del self._open[id(value)]

    def _items(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return self._mapping(value, path)
        if isinstance(value, Namespace):
            return {TAG: "Namespace", "value": self._mapping(vars(value), path)}
        found = [self.value(item, f"{path}/{i}") for i, item in enumerate(value)]
        if type(value) is list:
            return found
        if isinstance(value, deque):
            return {TAG: "deque", "items": found, "longest": value.maxlen}
        if type(value) is not tuple:
            found.sort(key=json.dumps)  # the order of a set differs from run to run
        return {TAG: type(value).__name__, "items": found}

    def _datetime(self, value: datetime.datetime, path: str) -> Any:
        text = value.isoformat()
        # repr also tells of named zones and of the second of two equal hours, which the text does not.
        same = repr(datetime.datetime.fromisoformat(text)) == repr(value)
        return {TAG: "datetime", "value": text} if same else self._left_out(value, path)

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        if type(value) is dict and all(type(key) is str and key != TAG and not _surrogates(key) for key in value):
            return {key: self.value(item, f"{path}/{_key_name(key, i)}") for i, (key, item) in enumerate(value.items())}
        names = [_key_name(key, i) for i, key in enumerate(value)]
        pairs = [
            [self.value(key, f"{path}/key {i}"), self.value(item, f"{path}/{names[i]}")]
            for i, (key, item) in enumerate(value.items())
        ]
        if type(value) is dict:
            return {TAG: "dict", "items": pairs}
        # Module.state_dict() returns an OrderedDict with an attribute, and load_state_dict() reads it.
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        extra = {"attributes": self.value(dict(attributes), f"{path}/attributes")} if attributes else {}
        return {TAG: type(value).__name__, "items": pairs, **extra}

    def _left_out(self, value: Any, path: str) -> Any:
        ref = _unused(path, self.rest)
        self.rest[ref] = value
        return {TAG: "pickled", "ref": ref}

    def _int(self, value: int, path: str) -> Any:
        return value if -(2**63) <= value < 2**63 else {TAG: "int", "hex": hex(value)}

    def _float(self, value: float, path: str) -> Any:
        return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}

    def _str(self, value: str, path: str) -> Any:
        return {TAG: "str", **self._raw(value.encode("utf-8", "surrogatepass"), path)} if _surrogates(value) else value

    def _raw(self, value: bytes, path: str) -> dict[str, Any]:
        if len(value) <= INLINE_BYTES:
            return {"base64": base64.b64encode(value).decode()}
        ref = _unused(path, self.tensors)
        self.tensors[ref] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        return {"tensor": ref}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            return self._left_out(value, path)
        known: tuple[Any, ...] = (id(value),)
        if value.numel():
            place = (value.device, value.data_ptr(), value.dtype, value.is_conj(), value.is_neg())
            known = (*place, tuple(value.shape), tuple(value.stride()))
        ref = self._known.get(known)
        if ref is None:
            ref = self._known[known] = _unused(path, self.tensors)
            self.tensors[ref] = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return {TAG: "tensor", "name": ref, **({"requires_grad": True} if value.requires_grad else {})}

    def _array(self, value: np.ndarray, path: str) -> Any:
        if value.dtype.kind not in NUMPY_KINDS:
            return self._left_out(value, path)
        return {
            TAG: "numpy.ndarray",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            **self._raw(value.tobytes(), path),
        }

    def _scalar(self, value: np.generic, path: str) -> Any:
        if type(value) is np.str_:
            return {TAG: "numpy.str", "value": self._str("".join(value), path)}  # str() would drop zeros at the end
        if type(value) is np.bytes_:
            return {TAG: "numpy.bytes", **self._raw(bytes(value), path)}
        if value.dtype.kind not in NUMPY_KINDS or type(value) is not value.dtype.type:
            return self._left_out(value, path)
        return {TAG: "numpy.scalar", "dtype": value.dtype.str, **self._raw(value.tobytes(), path)}


def _surrogates(text: str) -> bool:
    """JSON would join two halves of a surrogate pair into one character."""
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def _unused(name: str, used: Mapping[str, Any]) -> str:
    """``name``, or with a number: keys such as "a/b" and 1 beside "1" give one path twice."""
    count, found = 1, name
    while found in used:
        count += 1
        found = f"{name}~{count}"
    return found


def _references(json: Any) -> Iterable[str]:
    """Paths of all objects that were left out."""
    todo, level = [json], 0
    while todo:
        level += 1
        if level > 5 * DEEPEST:  # a level of state is at most four of JSON
            raise RecursionError
        below: list[Any] = []
        for item in todo:
            if isinstance(item, dict):
                if item.get(TAG) == "pickled":
                    yield _text(item["ref"])
                else:
                    below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        todo = below


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value


def _sizes(values: Any) -> list[int]:
    if type(values) is not list or any(type(n) is not int or n < 0 for n in values):
        raise ValueError(f"no shape: {values!r:.100}")
    return values


class _Decoder:
    """The way back. Only functions of this class run, whatever the content."""

    def __init__(self, tensor: Callable[[str], torch.Tensor], pickled: Mapping[str, Any]) -> None:
        self._read = tensor
        self._pickled = pickled
        self._known: dict[tuple[str, bool], torch.Tensor] = {}
        self._tags: dict[str, Callable[[dict[str, Any]], Any]] = {
            "int": lambda j: int(_text(j["hex"]), 16),
            "float": lambda j: struct.unpack(">d", bytes.fromhex(_text(j["bits"])))[0],
            "complex": self._complex,
            "str": lambda j: self._raw(j).decode("utf-8", "surrogatepass"),
            "bytes": self._raw,
            "bytearray": lambda j: bytearray(self._raw(j)),
            "tuple": lambda j: tuple(self._items(j)),
            "set": lambda j: set(self._items(j)),
            "frozenset": lambda j: frozenset(self._items(j)),
            "dict": lambda j: dict(self._pairs(j)),
            "deque": lambda j: deque(self._items(j), None if j["longest"] is None else _sizes([j["longest"]])[0]),
            "OrderedDict": lambda j: self._with_attributes(OrderedDict(self._pairs(j)), j),
            "Counter": lambda j: self._with_attributes(Counter(dict(self._pairs(j))), j),
            "Namespace": self._namespace,
            "Path": lambda j: Path(_text(self.value(j["value"]))),
            **{name: self._pure_path for name in PURE_PATHS},
            "tensor": self._tensor,
            "torch.dtype": self._dtype,
            "torch.device": lambda j: torch.device(_text(j["value"])),
            "torch.Size": lambda j: torch.Size(_sizes(j["value"])),
            "numpy.ndarray": self._array,
            "numpy.scalar": lambda j: self._array({**j, "shape": []})[()],
            "numpy.str": lambda j: np.str_(_text(self.value(j["value"]))),
            "numpy.bytes": lambda j: np.bytes_(self._raw(j)),
            "timedelta": lambda j: datetime.timedelta(*self.value(j["value"])),
            "date": lambda j: datetime.date.fromisoformat(_text(j["value"])),
            "datetime": lambda j: datetime.datetime.fromisoformat(_text(j["value"])),
            "pickled": lambda j: self._pickled[_text(j["ref"])],
        }

    def value(self, json: Any) -> Any:
        if json is None or type(json) in (bool, int, float, str):
            return json
        if type(json) is list:
            return [self.value(item) for item in json]
        if type(json) is not dict:
            raise TypeError(f"{type(json).__name__} is not of JSON")
        if TAG not in json:
            return {_text(key): self.value(item) for key, item in json.items()}
        found = self._tags.get(_text(json[TAG]))
        if found is None:
            raise ValueError(f"unknown kind of value {json[TAG]!r:.100}; it may need a newer release")
        return found(json)

    def _items(self, json: dict[str, Any]) -> list[Any]:
        items = json["items"]
        if type(items) is not list:
            raise TypeError(f"items of {json[TAG]} are no list")
        return [self.value(item) for item in items]

    def _pairs(self, json: dict[str, Any]) -> list[tuple[Any, Any]]:
        pairs = self._items(json)
        if any(type(pair) is not list or len(pair) != 2 for pair in pairs):
            raise ValueError(f"items of {json[TAG]} are no pairs")
        return [(key, item) for key, item in pairs]

    def _complex(self, json: dict[str, Any]) -> complex:
        real, imag = (self.value(part) for part in json["value"])
        if type(real) is not float or type(imag) is not float:
            raise TypeError("parts of a complex number are no floats")
        return complex(real, imag)

    def _with_attributes(self, found: Any, json: dict[str, Any]) -> Any:
        if "attributes" in json:
            vars(found).update(self._attributes(json["attributes"]))
        return found

    def _namespace(self, json: dict[str, Any]) -> Namespace:
        found = Namespace()
        vars(found).update(self._attributes(json["value"]))
        return found

    def _attributes(self, json: Any) -> dict[str, Any]:
        found = self.value(json)
        if type(found) is not dict:
            raise TypeError("attributes are no dict")
        return {_text(key): item for key, item in found.items()}

    def _pure_path(self, json: dict[str, Any]) -> PurePosixPath | PureWindowsPath:
        return PURE_PATHS[json[TAG]](_text(self.value(json["value"])))

    def _dtype(self, json: dict[str, Any]) -> torch.dtype:
        found = vars(torch).get(_text(json["value"]))  # getattr would import some modules
        if not isinstance(found, torch.dtype):
            raise ValueError(f"no dtype: {json['value']!r:.100}")
        return found

    def _stored(self, name: str) -> torch.Tensor:
        found = self._read(name)
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"tensor {name!r} is missing")
        return found

    def _tensor(self, json: dict[str, Any]) -> torch.Tensor:
        name, trained = _text(json["name"]), json.get("requires_grad") is True
        if (name, trained) not in self._known:
            plain = self._known.get((name, not trained))
            stored = self._stored(name) if plain is None else plain
            self._known[name, trained] = stored.detach().requires_grad_(trained)
        return self._known[name, trained]

    def _raw(self, json: dict[str, Any]) -> bytes:
        if "base64" in json:
            return base64.b64decode(_text(json["base64"]), validate=True)
        stored = self._stored(_text(json["tensor"]))
        if stored.dtype != torch.uint8:
            raise TypeError(f"tensor {json['tensor']!r} does not hold bytes")
        return stored.cpu().numpy().tobytes()

    def _array(self, json: dict[str, Any]) -> np.ndarray:
        text, shape, content = _text(json["dtype"]), _sizes(json["shape"]), self._raw(json)
        if NUMPY_DTYPE.fullmatch(text) is None:
            raise ValueError(f"no dtype: {text!r:.100}")
        dtype = np.dtype(text)
        if math.prod(shape) * dtype.itemsize != len(content):
            raise ValueError(f"{len(content)} bytes are no array of {dtype} and shape {shape!r:.100}")
        return np.ndarray(tuple(shape), dtype, bytearray(content))
