"""A configuration as a flat list: which keys exist, which value each ended up with and why, what it asks for."""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deepspeed.config.explain.messages import block_inside
from deepspeed.config.model.keys import Configuration
from deepspeed.config.model.optim_params import OPTIMIZER_DEFAULT, PARAM_FIELDS, REQUIRED
from deepspeed.config.model.spelling import SPELLED, canonical_path
from deepspeed.config.model.unread import UNREAD
from deepspeed.config.model.values import BATCH_KEYS, Key, Support, is_auto
from deepspeed.config.parse import ConfigSource, line_of

Origin = Literal["file", "auto", "derived", "default"]
_HIDDEN = ("source", "world_size")  # fields of the root model that are no keys


class Declared(NamedTuple):
    """Describe a declared key: its canonical path, the model field behind it, and the model it belongs to."""

    path: str
    info: FieldInfo
    block: type[BaseModel]


@dataclass(frozen=True)
class Setting:
    """Hold a key's final value. ``pattern``: its path in the manual; ``idle``: why it changes nothing, if asked."""

    path: str
    pattern: str
    key: Key | None
    value: Any
    default: Any
    origin: Origin
    line: int | None = None
    idle: str = ""


@functools.cache
def keys_of(block: type[BaseModel]) -> tuple[tuple[str, str, FieldInfo], ...]:
    """Return (field name, key in the file, field) of ``block``; honoured keys first, keys that no code reads last."""
    fields = [(name, info.alias or name, info) for name, info in block.model_fields.items() if name not in _HIDDEN]
    ranks, unread = list(Support), list(UNREAD.values())
    return tuple(sorted(fields, key=lambda item: (ranks.index(Key.of(item[2]).support), item[2].annotation in unread)))


@functools.cache
def default_of(info: FieldInfo) -> Any:
    """Return the value of an absent key; None where a key is required, or where the optimizer has its own default."""
    default = info.get_default(call_default_factory=True)
    return None if default in (PydanticUndefined, OPTIMIZER_DEFAULT, REQUIRED) else default


def declared_fields(block: type[BaseModel], prefix: str = "") -> Iterator[Declared]:
    """Yield every leaf that ``block`` (the root model) declares, depth first, and every block that may be absent."""
    for _, key, info in keys_of(block):
        inner, suffix = block_inside(info.annotation)
        if inner is None or not (inner is info.annotation or suffix):
            yield Declared(prefix + key, info, block)
        if inner is not None:
            yield from declared_fields(inner, f"{prefix}{key}{suffix}.")


def all_keys(root: type[BaseModel]) -> dict[str, Key]:
    """Return path -> ``Key`` for every key of the format."""
    fields = {field.path: field.info for field in declared_fields(root)} | dict(PARAM_FIELDS)
    return {path: Key.of(info) for path, info in fields.items() if info.description} | dict(SPELLED)


def written_paths(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every key and list element of ``data``, outer ones first."""
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield f"{prefix}{key}", value
        yield from written_paths(value, f"{prefix}{key}.")


def _walk(block: BaseModel, prefix: str, pattern: str) -> Iterator[tuple[str, str, Any, FieldInfo | None, bool]]:
    """Yield (path, pattern, value, field, is it written) of every leaf, and of blocks whose presence has a meaning."""
    for name, key, info in keys_of(type(block)):
        value, given = getattr(block, name), name in block.model_fields_set
        path, row = prefix + key, pattern + key
        if isinstance(value, BaseModel):
            if Key.of(info).support is Support.NOT_YET:
                yield path, row, value, info, given
            yield from _walk(value, f"{path}.", f"{row}.")
        elif isinstance(value, tuple | dict) and (suffix := block_inside(info.annotation)[1]):
            for free, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _walk(item, f"{path}.{free}.", f"{row}{suffix}.")
        elif row in ("optimizer.params", "scheduler.params") and isinstance(value, dict):
            for free, item in value.items():
                yield f"{path}.{free}", f"{row}.{free}", item, PARAM_FIELDS.get(f"{row}.{free}"), True
        else:
            yield path, row, value, info, given
    for name, value in (block.model_extra or {}).items():
        yield f"{prefix}{name}", f"{pattern}<any>", value, None, True


def settings(config: Configuration, source: ConfigSource | None = None, *, given: bool = False) -> list[Setting]:
    """Return keys of ``config`` with their final values, all or those ``given``; ``source`` adds line numbers."""
    lines = {} if source is None else source.lines
    items = sorted(written_paths(config.source), key=lambda item: canonical_path(item[0]) == item[0])
    written = {canonical_path(path): (path, value) for path, value in items}  # the canonical spelling wins
    out = []
    rows = (row for row in _walk(config, "", "") if row[4] or not given)
    for path, pattern, value, info, is_given in rows:
        spelling, as_written = written.get(path, ("", None))
        origin: Origin = "file" if is_given else "default"
        if is_auto(as_written) and value != as_written:
            origin = "auto"
        elif path in BATCH_KEYS:
            origin = "derived" if as_written is None else "file"
        key, default = (SPELLED.get(pattern), None) if info is None else (Key.of(info), default_of(info))
        out.append(Setting(path, pattern, key, value, default, origin, line_of(lines, spelling)))
    return out


def plain(value: Any) -> Any:
    """Return ``value`` as a file would write it: for a member of an enum its value."""
    return getattr(value, "value", value)


def _differs(item: Setting, key: Key) -> bool:
    value = plain(item.value)
    return value != plain(item.default) and not any(value == off and type(value) is type(off) for off in key.off)


def gate_open(key: Key, values: Mapping[str, Setting]) -> bool:
    """Return whether the switch that ``key`` depends on is on; True for a key without a switch."""
    switch = values.get(key.gate)
    if switch is None or switch.key is None:
        return not key.gate
    return _differs(switch, switch.key) and gate_open(switch.key, values)


def support_faults(config: Configuration) -> list[tuple[str, str]]:
    """Return (path, sentence) of each feature asked for (written, no default, not off) that this release lacks."""
    given = [item for item in settings(config, given=True) if item.origin == "file"]
    asked = [(item, item.key) for item in given if item.key is not None and item.key.support is Support.NOT_YET]
    values, out = {item.path: item for item in settings(config)} if asked else {}, []
    for item, key in asked:
        gate = values.get(key.gate)
        asked_by_gate = gate is not None and gate.key is not None and gate.key.support is Support.NOT_YET
        if not asked_by_gate and _differs(item, key) and gate_open(key, values):
            value = plain(item.value)
            block = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
            reason, shown = f": {key.note}" if key.note else "", json.dumps(block, default=str)
            text = f"{item.path} {shown} is not in this release yet{reason}. Remove it from the configuration."
            out.append((item.path, text))
    return out


def inert_notes(config: Configuration) -> list[str]:
    """Return one clause for the log per written key that is accepted without effect."""
    written = [item for item in settings(config, given=True) if item.origin == "file"]
    notes = [f"{item.path} ({item.key.note})" for item in written if item.key and item.key.support is Support.INERT]
    stage = config.zero.stage
    idle = config.zero.offload_param is not None and stage != 3
    return notes + [f"zero_optimization.offload_param (stage {stage} does not shard parameters)"] * idle
