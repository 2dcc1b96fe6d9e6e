"""A configuration as a flat list: which keys exist, which value each ended up with and why, what it asks for."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed.config.explain.lines import line_of
from deepspeed.config.explain.messages import block_inside
from deepspeed.config.model.batch import BATCH_KEYS
from deepspeed.config.model.optim_params import OPTIMIZER_DEFAULT, PARAM_FIELDS, REQUIRED
from deepspeed.config.model.unread import UNREAD
from deepspeed.config.model.values import Key, Support, Violation, block_of, is_auto
from deepspeed.config.model.zero import ZERO_ALIASES
from deepspeed.config.parse import ConfigSource

if TYPE_CHECKING:
    from deepspeed.config.model.root import DeepSpeedConfig

Origin = Literal["file", "auto", "derived", "default"]
TENSOR_PARALLEL_ALIASES: Mapping[str, str] = MappingProxyType(
    {"tp": "tensor_parallel", "kernel_inject": "replace_with_kernel_inject"}
)
_HIDDEN = ("source", "world_size")  # fields of the root model that are no keys
SPELLED: Mapping[str, Key] = MappingProxyType(
    {
        "zero_optimization": Key("Deprecated as true or false: true means stage 1."),
        "allgather_size": Key(
            "Deprecated spelling of zero_optimization.allgather_bucket_size.",
            Support.INERT,
            "each unit is gathered whole",
        ),
        "zero_optimization.legacy_stage1": Key("Deprecated: false is accepted, true is refused."),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": Key(
            "Deprecated spelling of gather_16bit_weights_on_model_save."
        ),
        "zero_optimization.grad_hooks": Key(
            "Described in published documentation.", Support.INERT, "no release reads it"
        ),
        "zero_optimization.cpu_offload": Key("Deprecated spelling of offload_optimizer with device cpu."),
        "zero_optimization.cpu_offload_param": Key("Deprecated spelling of offload_param with device cpu."),
        "zero_optimization.cpu_offload_use_pin_memory": Key("Deprecated spelling of pin_memory in the offload blocks."),
        "pipeline.<any>": Key(
            "A key of the client's own; it is stored and not read.",
            Support.INERT,
            "PipelineModule, which is not in this release, would read or decide it",
        ),
    }
)
"""Keys of the format that are no fields: parsing replaces them by what they stand for, or passes over them."""


class Declared(NamedTuple):
    """One declared key: its canonical path, the model field behind it, and the model it belongs to."""

    path: str
    info: FieldInfo
    block: type[BaseModel]


@dataclass(frozen=True)
class Setting:
    """One key with its final value. ``pattern`` is its path in the manual; ``line`` is known for files only."""

    path: str
    pattern: str
    key: Key | None
    value: Any
    default: Any
    origin: Origin
    line: int | None = None


def keys_of(block: type[BaseModel]) -> list[tuple[str, str, FieldInfo]]:
    """(field name, key in the file, field) of ``block``; what is honoured comes first, what no code reads last."""

    def rank(field: tuple[str, str, FieldInfo]) -> tuple[int, bool]:
        return list(Support).index(Key.of(field[2]).support), field[2].annotation in UNREAD.values()

    fields = [(name, info.alias or name, info) for name, info in block.model_fields.items() if name not in _HIDDEN]
    return sorted(fields, key=rank)


def default_of(info: FieldInfo) -> Any:
    """The value of an absent key; None where a key is required, or where the optimizer has one of its own."""
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    return None if default in (OPTIMIZER_DEFAULT, REQUIRED) else default


def declared_fields(block: type[BaseModel], prefix: str = "") -> Iterator[Declared]:
    """Every leaf that ``block`` (the root model) declares, depth first, and every block that may be absent."""
    for _, key, info in keys_of(block):
        inner, suffix = block_inside(info.annotation)
        if inner is None or not (block_of(info.annotation) or suffix):
            yield Declared(prefix + key, info, block)
        if inner is not None:
            yield from declared_fields(inner, f"{prefix}{key}{suffix}.")


def all_keys(root: type[BaseModel]) -> dict[str, Key]:
    """Path -> what is known of it, of every key of the format."""
    fields = {field.path: field.info for field in declared_fields(root)} | dict(PARAM_FIELDS)
    return {path: Key.of(info) for path, info in fields.items() if info.description} | dict(SPELLED)


def written_paths(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every key and list element of ``data``, outer ones first."""
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield f"{prefix}{key}", value
        yield from written_paths(value, f"{prefix}{key}.")


def canonical_path(path: str) -> str:
    """``path`` in the spelling of the models."""
    head, _, tail = path.partition(".")
    if head == "tensor_parallel":
        name, dot, rest = tail.partition(".")
        return f"{head}.{TENSOR_PARALLEL_ALIASES.get(name, name)}{dot}{rest}".rstrip(".")
    if head == "zero_optimization" and tail in ZERO_ALIASES:
        return f"{head}.{ZERO_ALIASES[tail]}"
    return f"bf16.{tail}" if head == "bfloat16" else path


class _Leaf(NamedTuple):
    path: str
    pattern: str
    value: Any
    info: FieldInfo | None
    given: bool


def _walk(block: BaseModel, prefix: str, pattern: str) -> Iterator[_Leaf]:
    """Every leaf below ``block``, and the blocks whose presence alone asks for something."""
    for name, key, info in keys_of(type(block)):
        value, given = getattr(block, name), name in block.model_fields_set
        path, row, suffix = prefix + key, pattern + key, block_inside(info.annotation)[1]
        if isinstance(value, BaseModel):
            if Key.of(info).support is Support.NOT_YET:
                yield _Leaf(path, row, value, info, given)
            yield from _walk(value, f"{path}.", f"{row}.")
        elif suffix and isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from _walk(item, f"{path}.{index}.", f"{row}[].")
        elif suffix and isinstance(value, Mapping):
            for free, item in value.items():
                yield from _walk(item, f"{path}.{free}.", f"{row}{suffix}.")
        elif row in ("optimizer.params", "scheduler.params") and isinstance(value, Mapping):
            for free, item in value.items():
                yield _Leaf(f"{path}.{free}", f"{row}.{free}", item, PARAM_FIELDS.get(f"{row}.{free}"), given=True)
        else:
            yield _Leaf(path, row, value, info, given)
    for name, value in (block.model_extra or {}).items():
        yield _Leaf(f"{prefix}{name}", f"{pattern}<any>", value, None, given=True)


def settings(config: "DeepSpeedConfig", source: ConfigSource | None = None) -> list[Setting]:
    """Every key of ``config`` with its final value. ``source`` adds line numbers; the values need no file."""
    lines = {} if source is None else source.lines
    items = sorted(written_paths(config.source), key=lambda item: canonical_path(item[0]) == item[0])
    written = {canonical_path(path): (path, value) for path, value in items}  # the canonical spelling wins
    out = []
    for leaf in _walk(config, "", ""):
        spelling, value = written.get(leaf.path, ("", None))
        origin: Origin = "file" if leaf.given else "default"
        if is_auto(value) and leaf.value != value:
            origin = "auto"
        elif leaf.path in BATCH_KEYS:
            origin = "derived" if value is None else "file"
        key = SPELLED.get(leaf.pattern) if leaf.info is None else Key.of(leaf.info)
        default = None if leaf.info is None else default_of(leaf.info)
        out.append(Setting(leaf.path, leaf.pattern, key, leaf.value, default, origin, line_of(lines, spelling)))
    return out


def plain(value: Any) -> Any:
    """``value`` as a file would write it: the value of an enum."""
    return getattr(value, "value", value)


def _differs(item: Setting, key: Key) -> bool:
    value = plain(item.value)
    return value != plain(item.default) and not any(value == off and type(value) is type(off) for off in key.off)


def gate_open(key: Key, values: Mapping[str, Setting]) -> bool:
    """Whether the switch that ``key`` hangs on is on; true for a key without one."""
    switch = values.get(key.gate)
    if switch is None or switch.key is None:
        return not key.gate
    return _differs(switch, switch.key) and gate_open(switch.key, values)


def support_faults(config: "DeepSpeedConfig") -> list[Violation]:
    """One sentence per requested feature that is not in this release.

    A feature is requested by a key that was written, with another value than its default, behind a switch that is on.
    """
    values, out = {item.path: item for item in settings(config)}, []
    for item in values.values():
        key = item.key
        if key is None or key.support is not Support.NOT_YET or item.origin != "file":
            continue
        gate = values.get(key.gate)
        asked_by_gate = gate is not None and gate.key is not None and gate.key.support is Support.NOT_YET
        if not asked_by_gate and _differs(item, key) and gate_open(key, values):
            value = (
                item.value.model_dump(exclude_unset=True) if isinstance(item.value, BaseModel) else plain(item.value)
            )
            reason = f": {key.note}" if key.note else ""
            shown = json.dumps(value, default=str)
            text = f"{item.path} {shown} is not in this release yet{reason}. Remove it from the configuration."
            out.append(Violation(item.path, text))
    return out


def inert_notes(config: "DeepSpeedConfig") -> list[str]:
    """One clause per written key that is accepted without effect, for the log."""
    written = [item for item in settings(config) if item.origin == "file"]
    return [f"{item.path} ({item.key.note})" for item in written if item.key and item.key.support is Support.INERT]


def without_effect(item: Setting, values: Mapping[str, Setting], *, idle: Mapping[str, str]) -> str:
    """Why ``item`` changes nothing in its configuration: its class, the switches around it, other keys; or nothing.

    ``values`` are all settings by path; ``idle`` is what ``rules.inert_under`` says of the same configuration.
    """
    key, parts = item.key, item.path.split(".")
    if key is not None and key.support is Support.INERT:
        return f"inert here: {key.note}"
    for depth in range(len(parts) - 1, 0, -1):
        switch = ".".join([*parts[:depth], "enabled"])
        if switch != item.path and switch in values and values[switch].value is False:
            return f"off: {switch} is false"
    if item.path in idle:
        return f"off: {idle[item.path]}"
    if key is not None and key.gate and not gate_open(key, values):
        return f"off: {key.gate} is not set"
    return "not yet in this release" if key is not None and key.support is Support.NOT_YET else ""


def notes_of(values: Mapping[str, Setting], *, idle: Mapping[str, str]) -> list[str]:
    """One sentence per written key that has no effect."""
    out = []
    for item in values.values():
        reason = without_effect(item, values, idle=idle) if item.origin == "file" else ""
        if reason and not (reason.startswith("not yet") and plain(item.value) == plain(item.default)):
            line = f" (line {item.line})" if item.line is not None else ""
            out.append(f"{item.path} has no effect, {reason}{line}")
    return out
