"""Plain Python state as JSON and tensors, exactly and without pickle. Specified in docs/checkpoint-format.md.

What is not readable JSON is ``{"$": tag, ...}``. Types are compared exactly: a subclass may carry what that would lose.
"""

import base64
import datetime
import itertools
import json
import math
import re
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

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
OPT_IN = "checkpoint.allow_pickle: true"


def _dtype(text: str) -> torch.dtype:
    dtype = vars(torch).get(text)  # getattr would import some modules
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {text!r:.100}")
    return dtype


# Types whose values are one text each: tag, type, text of a value, value of a text.
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "torch.dtype": (torch.dtype, lambda v: str(v).removeprefix("torch."), _dtype),
    "torch.device": (torch.device, str, torch.device),
    "Path": (type(Path()), str, Path),
    "PurePosixPath": (PurePosixPath, str, PurePosixPath),
    "PureWindowsPath": (PureWindowsPath, str, PureWindowsPath),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
}
_TEXT_TAGS = {kind: tag for tag, (kind, _, _) in _TEXTS.items()}
_SERIES = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_CONTAINERS = (list, Namespace, *_SERIES.values(), *_MAPPINGS.values())


def encode(value: Any, *, name: str, allow_rest: bool = False, opt_in: bool = True) -> "Encoded":
    """Encode ``value`` as JSON and tensors named ``name/key/index``.

    Raises PlainStateError with the paths: for cycles, deep nesting and, unless ``allow_rest``, what is no plain state.
    ``opt_in``: the configuration can allow that.
    """
    encoded = Encoded(value, name)
    if encoded.rest and not allow_rest:
        lines = [
            f"{path}: {type(v).__module__}.{type(v).__qualname__}{f' {v.dtype}' if isinstance(v, np.ndarray) else ''}"
            for path, v in encoded.rest.items()
        ]
        way_out = f', or set "{OPT_IN}" in the configuration' if opt_in else ""
        raise PlainStateError(
            f"{len(lines)} object(s) in the state to save cannot be stored without pickle:{_listed(lines)}\n"
            "Store plain values instead (numbers, str, bytes, lists, tuples, sets, dicts, tensors, numpy arrays, "
            f"dates, Namespace, Path; for example obj.state_dict()){way_out}."
        )
    return encoded


def _listed(lines: Sequence[str]) -> str:
    """Join lines below each other; of very many only the first."""
    more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "".join(f"\n  {line}" for line in [*lines[:LISTED], *more])


class Collected:
    """Collect several values as JSON, and the tensors of all of them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, value: Any, name: str) -> Any:
        """Encode ``value`` and keep its tensors; return the JSON."""
        encoded = encode(value, name=name, opt_in=False)
        self.tensors |= encoded.tensors
        return encoded.json


def decode(json: Any, tensor: Callable[[str], torch.Tensor], *, pickled: Mapping[str, Any] | None = None) -> Any:
    """Invert ``encode``: ``tensor`` reads a tensor by name, ``pickled`` is the ``rest``. Raises CheckpointError."""
    level = [json]
    for _ in range(4 * DEEPEST + 4):  # as ``encode`` writes at most: four for a Namespace with odd names, and a leaf
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, list | dict)]
        level = [*itertools.chain.from_iterable(parts)]
    if level:
        raise CheckpointError("stored state is nested too deeply; the file is damaged or another program's")
    decoder = _Decoder(tensor, pickled or {})
    try:
        value = decoder.value(json)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"stored state is malformed: {type(error).__name__}: {error}") from error
    if decoder.missing:
        raise CheckpointError(
            f"{len(decoder.missing)} object(s) of this checkpoint were stored with pickle and are not loaded:"
            f"{_listed(sorted(decoder.missing))}\nIf you trust whoever wrote the checkpoint, set "
            f'"{OPT_IN}" in the configuration.'
        )
    return value


def _key_name(key: Any, position: int) -> str:
    """Spell a key in a path; by its position if it is too long or has no such spelling."""
    short = type(key) in (bool, float) or type(key) is int and abs(key) < 2**63
    spelled = short or type(key) is str and len(key) <= LONGEST_NAME and not _surrogates(key)
    return str(key) if spelled else f"key {position}"


def _surrogates(text: str) -> bool:
    """Tell whether ``text`` has surrogates: JSON would join two halves of a surrogate pair into one character."""
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def _unused(name: str, used: Mapping[str, Any]) -> str:
    """Return ``name``, numbered if used: keys such as "a/b", or 1 beside "1", give the same path twice."""
    return next(n for n in itertools.chain([name], (f"{name}~{i}" for i in itertools.count(2))) if n not in used)


class Encoded:
    """Value as ``json`` and ``tensors`` (host, contiguous; may share memory); ``rest``: what needs pickle, by path."""

    def __init__(self, value: Any, name: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.rest: dict[str, Any] = {}
        self._known: dict[tuple[Any, ...], str] = {}
        self.json = self._value(value, name)

    def _value(self, value: Any, path: str, depth: int = 0) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str and not _surrogates(value):
            return value
        if kind is str:
            return {TAG: "str", **self._raw(value.encode("utf-8", "surrogatepass"), path)}
        if kind in _CONTAINERS:
            if depth >= DEEPEST:
                raise PlainStateError(f"{path[:200]} is over {DEEPEST} levels deep, or contains itself; flatten it")
            return self._container(value, path, depth + 1)
        if kind in _TEXT_TAGS:
            # A datetime's text does not tell of named zones, nor of the second of two equal hours; repr does.
            _, write, read = _TEXTS[_TEXT_TAGS[kind]]
            same = repr(read(text := write(value))) == repr(value)
            return {TAG: _TEXT_TAGS[kind], "value": text} if same else self._left_out(value, path)
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {TAG: "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}
        if kind is complex:
            return {TAG: "complex", "value": [self._value(part, path) for part in (value.real, value.imag)]}
        if kind in (bytes, bytearray):
            return {TAG: kind.__name__, **self._raw(value, path)}
        if kind is torch.Size:
            return {TAG: "torch.Size", "value": list(value)}
        if kind is datetime.timedelta:
            return {TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]}
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value, path)
        return self._array(value, path) if isinstance(value, (np.ndarray, np.generic)) else self._left_out(value, path)

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, dict):
            return self._mapping(value, path, depth)
        if isinstance(value, Namespace):
            return {TAG: "Namespace", "value": self._mapping(vars(value), path, depth)}
        items = [self._value(item, f"{path}/{i}", depth) for i, item in enumerate(value)]
        if type(value) is list:
            return items
        if isinstance(value, (set, frozenset)):
            items.sort(key=json.dumps)  # the order of a set differs from run to run
        longest = {"longest": value.maxlen} if isinstance(value, deque) else {}
        return {TAG: type(value).__name__, "items": items, **longest}

    def _mapping(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        names = [_key_name(key, i) for i, key in enumerate(value)]
        items = [self._value(item, f"{path}/{name}", depth) for name, item in zip(names, value.values(), strict=True)]
        if type(value) is dict and all(type(key) is str and key != TAG and not _surrogates(key) for key in value):
            return dict(zip(value, items, strict=True))
        keys = [self._value(key, f"{path}/key {i}", depth) for i, key in enumerate(value)]
        pairs = [list(pair) for pair in zip(keys, items, strict=True)]
        # Module.state_dict() returns an OrderedDict with an attribute, and load_state_dict() reads it.
        attributes = dict(getattr(value, "__dict__", {}))
        extra = {"attributes": self._value(attributes, f"{path}/attributes", depth)} if attributes else {}
        return {TAG: type(value).__name__, "items": pairs, **extra}

    def _left_out(self, value: Any, path: str) -> Any:
        ref = _unused(path, self.rest)
        self.rest[ref] = value
        return {TAG: "pickled", "ref": ref}

    def _raw(self, value: bytes | bytearray, path: str) -> dict[str, Any]:
        if len(value) <= INLINE_BYTES:
            return {"base64": base64.b64encode(value).decode()}
        ref = _unused(path, self.tensors)
        self.tensors[ref] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        return {"tensor": ref}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            return self._left_out(value, path)
        key: tuple[Any, ...] = (id(value),)
        if value.numel():
            place = (value.device, value.data_ptr(), value.dtype, value.is_conj(), value.is_neg())
            key = (*place, tuple(value.shape), tuple(value.stride()))
        if key not in self._known:
            ref = self._known[key] = _unused(path, self.tensors)
            self.tensors[ref] = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return {TAG: "tensor", "name": self._known[key], **({"requires_grad": True} if value.requires_grad else {})}

    def _array(self, value: Any, path: str) -> Any:
        if type(value) not in (np.ndarray, value.dtype.type) or value.dtype.kind not in NUMPY_KINDS:
            return self._left_out(value, path)
        shape = {"shape": list(value.shape)} if isinstance(value, np.ndarray) else {}
        tag = "numpy.ndarray" if shape else "numpy.scalar"
        return {TAG: tag, "dtype": value.dtype.str, **shape, **self._raw(value.tobytes()[: value.nbytes], path)}


class _Decoder:
    """Decode, also the output of earlier versions. Only functions of this class run, whatever the content."""

    def __init__(self, tensor: Callable[[str], torch.Tensor], pickled: Mapping[str, Any]) -> None:
        self.missing: set[str] = set()
        self._read = tensor
        self._pickled = pickled
        self._known: dict[tuple[str, bool], torch.Tensor] = {}
        self._tags: dict[str, Callable[[dict[str, Any]], Any]] = {
            "int": lambda j: int(j["hex"], 16),
            "float": lambda j: struct.unpack(">d", bytes.fromhex(j["bits"]))[0],
            "complex": lambda j: complex(*(float(self.value(part)) for part in j["value"])),
            "str": lambda j: self._raw(j).decode("utf-8", "surrogatepass"),
            "bytes": self._raw,
            "bytearray": lambda j: bytearray(self._raw(j)),
            "deque": lambda j: deque(self.value(j["items"]), j["longest"]),
            "Namespace": lambda j: self._with(Namespace(), j["value"]),
            "tensor": self._tensor,
            "torch.Size": lambda j: torch.Size(j["value"]),
            "numpy.ndarray": self._array,
            "numpy.scalar": lambda j: self._array({**j, "shape": []})[()],
            "numpy.str": lambda j: np.str_(self.value(j["value"])),
            "numpy.bytes": lambda j: np.bytes_(self._raw(j)),
            "timedelta": lambda j: datetime.timedelta(*self.value(j["value"])),
            "pickled": lambda j: self._pickled[j["ref"]] if j["ref"] in self._pickled else self.missing.add(j["ref"]),
        }

    def value(self, json: Any) -> Any:
        if json is None or type(json) in (bool, int, float, str):
            return json
        if type(json) is list:
            return [self.value(item) for item in json]
        if type(json) is not dict:
            raise TypeError(f"{type(json).__name__} is not of JSON")
        if TAG not in json:
            return {key: self.value(item) for key, item in json.items()}
        tag = json[TAG]
        if tag in _TEXTS:
            return _TEXTS[tag][2](self.value(json["value"]))
        if tag in _MAPPINGS:
            mapping = _MAPPINGS[tag](dict(self.value(json["items"])))
            return self._with(mapping, json["attributes"]) if "attributes" in json else mapping
        if tag in self._tags:
            return self._tags[tag](json)
        if tag in _SERIES:
            return _SERIES[tag](self.value(json["items"]))
        raise ValueError(f"unknown kind of value {tag!r:.100}; it may need a newer release")

    def _with(self, value: Any, attributes: Any) -> Any:
        vars(value).update(self.value(attributes))
        return value

    def _tensor(self, json: dict[str, Any]) -> torch.Tensor:
        name, trained = json["name"], json.get("requires_grad") is True
        if (name, trained) not in self._known:
            plain = self._known.get((name, not trained))
            stored = self._read(name) if plain is None else plain
            self._known[name, trained] = stored.detach().requires_grad_(trained)
        return self._known[name, trained]

    def _raw(self, json: dict[str, Any]) -> bytes:
        if "base64" in json:
            return base64.b64decode(json["base64"], validate=True)
        return self._read(json["tensor"]).view(torch.uint8).cpu().numpy().tobytes()

    def _array(self, json: dict[str, Any]) -> np.ndarray:
        text, shape, content = json["dtype"], json["shape"], self._raw(json)
        if NUMPY_DTYPE.fullmatch(text) is None:
            raise ValueError(f"no dtype: {text!r:.100}")
        dtype = np.dtype(text)
        if shape == [] and text[1:] in ("U0", "S0") and not content:
            return np.zeros((), dtype)  # an empty text; numpy made the dtype one wide
        if math.prod(shape) * dtype.itemsize != len(content):
            raise ValueError(f"{len(content)} bytes are no array of {dtype} and shape {shape!r:.100}")
        return np.ndarray(tuple(shape), dtype, bytearray(content))
