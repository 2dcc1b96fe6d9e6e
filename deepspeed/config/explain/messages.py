"""Turning everything that can be wrong with a configuration into sentences."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from deepspeed.config.model.values import is_auto
from deepspeed.config.parse import ConfigSource, enclosing, line_of
from deepspeed.errors import (
    BatchConfigError,
    ConflictingKeysError,
    DeepSpeedConfigError,
    OptimizerConfigError,
    nearest_hint,
)

RESEMBLES = 0.8  # from here on a foreign key counts as a misspelt one
UNFILLED = (
    'is still "auto". Only an integration (Transformers, Accelerate) fills that in; write a value or delete the key.'
)
_LISTABLE = 12
_COMMON = frozenset({"enabled", "type", "params", "device"})  # too common to connect two sentences
_KINDS = {
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false, not {0!r}"),
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type", "mapping_type"), "must be a block {{...}}, not {0!r}"
    ),
    "invalid_key": "has the key {0!r}, which is not a text",
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list [...], not {0!r}"),
    "string_type": "must be a text, not {0!r}",
    "missing": "is required in this block",
    "too_short": "has too few values: {0!r}",
    "too_long": "has too many values: {0!r}",
}


def unknown_key(path: str, names: Iterable[str], text: str = "unknown key", most: int = _LISTABLE) -> str:
    """Return the sentence about a key that does not exist, with the nearest valid name."""
    valid = sorted(set(names))
    instead = f". Valid here: {', '.join(valid)}." if len(valid) <= most else ". Delete it."
    return f"{path}: {text}{nearest_hint(path.rpartition('.')[2], valid) or instead}"


def block_inside(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Return the block class that a field holds, or None, and its path suffix: "", "[]", or ".<metric>" for a map."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and not arguments:
        return (annotation, "") if issubclass(annotation, BaseModel) else (None, "")
    suffix = "[]" if origin in (tuple, list) else f".<{arguments[0].__name__}>" if origin in (dict, Mapping) else ""
    inside = [(block, suffix + inner) for block, inner in map(block_inside, arguments) if block is not None]
    return inside[0] if inside else (None, "")


def fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a block by their keys in a file."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def _block_at(root: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel] | None:
    """Return the model class that describes the block at ``loc`` below ``root``, or None when there is none."""
    model, rest = root, list(map(str, loc))
    while rest:
        info = fields_by_key(model).get(rest.pop(0))
        block, suffix = (None, "") if info is None else block_inside(info.annotation)
        if block is None or (suffix and not rest):
            return None
        model, rest = block, rest[1:] if suffix else rest
    return model


@dataclass
class Judgement:
    """Collect the faults and notes found while one source is read. ``batch`` is the fault of the batch sizes."""

    source: ConfigSource
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    renames: dict[str, str] = field(default_factory=dict)  # canonical path -> the one that the user wrote
    broken: set[str] = field(default_factory=set)  # canonical paths whose values could not be read
    batch: str = ""
    conflict: bool = False  # two of the keys cannot be combined

    def written(self, path: str) -> str:
        """Return the dotted path as the user wrote it."""
        prefix = enclosing(path, self.renames)
        return self.renames[prefix] + path[len(prefix) :] if prefix else path

    def at_line(self, path: str, sentence: str) -> str:
        """Add the line of ``path`` to ``sentence`` when the configuration came from a text with lines."""
        line = line_of(self.source.lines, self.written(path))
        return sentence if line is None else f"{sentence} (line {line})"

    def fault(self, path: str, sentence: str, *, unread: bool = True) -> None:
        """Record a fault at ``path``; ``unread`` means that the value of the key is unknown from here on."""
        line = self.at_line(path, sentence)
        self.faults += [line] if line not in self.faults else []
        self.broken |= {path} if unread else set()

    def follows(self, sentence: str) -> bool:
        """Return whether ``sentence`` names a key whose value is unknown, and so may only be a consequence."""
        meant = {name for fault in self.faults for name in re.findall(r"did you mean '([^']+)'", fault)}
        names = meant | self.broken | {path.rpartition(".")[2] for path in self.broken} - _COMMON
        return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", sentence) for name in names)

    def raise_faults(self) -> None:
        """Raise all faults as one error. Programs look for the beginning of the batch sentence; people get the file."""
        name, count = self.source.name, len(self.faults)
        if count:
            text = "\n  - ".join([f"{name} has {count} problems:", *self.faults])
            if count == 1:
                text = self.batch if self.batch and self.source.from_program else f"{name}: {self.faults[0]}"
            unknown = self.broken & {"optimizer.type", "scheduler.type"}
            kind = OptimizerConfigError if unknown else ConflictingKeysError if self.conflict else DeepSpeedConfigError
            error = (BatchConfigError if self.batch else kind)(text)
            error.faults = tuple(self.faults)
            raise error

    def validation(
        self, error: ValidationError, root: type[BaseModel], aliases: Mapping[str, Iterable[str]]
    ) -> list[tuple[Any, ...]]:
        """Record one fault per place that pydantic objects to; return these. ``aliases``: further names by block."""
        seen: dict[str, tuple[Any, ...]] = {}
        for fault in error.errors(include_url=False):
            loc, kind, value = tuple(fault["loc"]), fault["type"], fault["input"]
            if "[key]" in loc or kind == "invalid_key":
                loc, kind = loc[: -1 if kind == "invalid_key" else -2], "invalid_key"
            # The members of a union each report their own fault below a made-up path segment.
            while len(loc) > 1 and kind != "extra_forbidden" and _block_at(root, loc[:-1]) is None:
                loc, kind = loc[:-1], "too_short" if kind == "missing" else kind
            path = ".".join(map(str, loc))
            written = self.written(path)
            if written in seen or (kind == "missing" and path in self.broken):  # taken out, because of what it was
                continue
            seen[written] = loc
            sentence = f"{written} {wrong_value(kind, fault['msg'], value)}"
            if kind == "extra_forbidden":
                block, above = _block_at(root, loc[:-1]), ".".join(map(str, loc[:-1]))
                sentence = unknown_key(written, [*(fields_by_key(block) if block else ()), *aliases.get(above, ())])
            self.fault(path, sentence)
        return list(seen.values())


def wrong_value(kind: str, message: str, value: Any) -> str:
    """Return the end of a sentence that begins with the path, from the three parts of a fault of pydantic."""
    if is_auto(value):
        return UNFILLED
    if kind == "value_error":
        return message.removeprefix("Value error, ") + "."
    if kind in _KINDS:
        return _KINDS[kind].format(value) + "."
    return f"must be {message.removeprefix('Input should be ').rstrip('.')}, not {value!r}."
