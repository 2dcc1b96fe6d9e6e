"""A configuration as a flat list: which keys the models declare, and which value each one ended up with and why.
Pure.
"""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed.config.explain.lines import line_of
from deepspeed.config.model.batch import BATCH_KEYS
from deepspeed.config.model.optim_params import PARAM_SPECS
from deepspeed.config.model.parallel import TENSOR_PARALLEL_ALIASES
from deepspeed.config.model.values import AUTO
from deepspeed.config.model.zero import ZERO_ALIASES
from deepspeed.config.parse import ConfigSource

if TYPE_CHECKING:
    from deepspeed.config.model.root import DeepSpeedConfig

Origin = Literal["file", "auto", "derived", "default"]
# Fields of the root model that are no keys, and the one whose key has another name.
_HIDDEN = ("source", "world_size")
_JSON_NAMES = {"zero": "zero_optimization"}


class Field(NamedTuple):
    """One declared key: its canonical path, the model field behind it, and the model it belongs to."""

    path: str
    info: FieldInfo
    block: type[BaseModel]


@dataclass(frozen=True)
class Setting:
    """One key with its final value. ``pattern`` is its row in the table; ``line`` is known for files only."""

    path: str
    pattern: str
    value: Any
    default: Any
    origin: Origin
    line: int | None = None


def keys_of(block: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, FieldInfo]]:
    """(field name, key in the file, field) of ``block``; an empty ``prefix`` means the root."""
    for name, info in block.model_fields.items():
        if prefix:
            yield name, name, info
        elif name not in _HIDDEN:
            yield name, _JSON_NAMES.get(name, name), info


def default_of(info: FieldInfo) -> Any:
    """The value of an absent key; None where a key is required."""
    return None if info.is_required() else info.get_default(call_default_factory=True)


def is_union(annotation: Any) -> bool:
    """Whether ``annotation`` is a union, in either spelling."""
    return get_origin(annotation) in (Union, types.UnionType)


def nested_block(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The block inside a field's annotation, and what to append to the path: "", "[]", or for a map the type of its
    keys as "<metric>".
    """
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        return annotation, ""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return nested_block(arguments[0])
    suffix = "[]" if origin in (tuple, list) else f".<{arguments[0].__name__}>" if origin in (dict, Mapping) else ""
    if not (is_union(annotation) or suffix):
        return None, ""
    for argument in arguments:
        block, inner = nested_block(argument)
        if block is not None:
            return block, suffix + inner
    return None, ""


def is_optional(annotation: Any) -> bool:
    """Whether null is a value of its own."""
    return (is_union(annotation) and type(None) in get_args(annotation)) or (
        get_origin(annotation) is Annotated and is_optional(get_args(annotation)[0])
    )


def declared_fields(block: type[BaseModel], prefix: str = "") -> Iterator[Field]:
    """Every leaf that ``block`` (the root model) declares, depth first, and every block that may be absent as a
    whole.
    """
    for _, key, info in keys_of(block, prefix):
        path = prefix + key
        inner, suffix = nested_block(info.annotation)
        if inner is None or is_optional(info.annotation):
            yield Field(path, info, block)
        if inner is not None:
            yield from declared_fields(inner, f"{path}{suffix}.")


def bounds_text(info: FieldInfo) -> str:
    """The range of a number in words such as ``>= 0, <= 1``; empty without one."""
    signs = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
    return ", ".join(
        f"{sign} {getattr(item, attr):g}"
        for item in info.metadata
        for kind, attr, sign in signs
        if isinstance(item, kind)
    )


def _spellings(path: str) -> tuple[str, ...]:
    """``path`` and the other ways in which a file may write it."""
    head, _, tail = path.partition(".")
    if head == "bf16":
        return path, f"bfloat16.{tail}"
    if head == "zero_optimization":
        return path, *(f"{head}.{alias}" for alias, name in ZERO_ALIASES.items() if name == tail)
    if head == "tensor_parallel":
        inner, _, rest = tail.partition(".")
        return path, *(
            ".".join(filter(None, (head, alias, rest)))
            for alias, name in TENSOR_PARALLEL_ALIASES.items()
            if name == inner
        )
    return (path,)


_ABSENT = object()


def written_value(data: Mapping[str, Any], path: str) -> tuple[str, Any] | None:
    """(path as written, value) of canonical ``path`` in ``data``, or None when no spelling of it is there."""
    for spelling in _spellings(path):
        value: Any = data
        for part in spelling.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT:
            return spelling, value
    return None


def _walk(block: BaseModel, prefix: str, pattern: str) -> Iterator[tuple[str, str, Any, Any, bool]]:
    """(path, pattern, value, default, was it given) of every leaf below ``block``."""
    for name, own, info in keys_of(type(block), prefix):
        value, given = getattr(block, name), name in block.model_fields_set
        path, row = prefix + own, pattern + own
        _, suffix = nested_block(info.annotation)
        if isinstance(value, BaseModel):
            yield from _walk(value, f"{path}.", f"{row}.")
        elif suffix and isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from _walk(item, f"{path}.{index}.", f"{row}[].")
        elif suffix and isinstance(value, Mapping):
            for key, item in value.items():
                yield from _walk(item, f"{path}.{key}.", f"{row}{suffix}.")
        elif f"{row}." in _PARAM_PREFIXES and isinstance(value, Mapping):
            for key, item in value.items():
                yield f"{path}.{key}", f"{row}.{key}", item, None, True
        else:
            yield path, row, value, default_of(info), given
    for key, value in (block.model_extra or {}).items():
        yield f"{prefix}{key}", f"{pattern}<any>", value, None, True


_PARAM_PREFIXES = frozenset(path.rpartition(".")[0] + "." for path in PARAM_SPECS)


def settings(config: "DeepSpeedConfig", source: ConfigSource | None = None) -> list[Setting]:
    """Every key of ``config`` with its final value. ``source`` adds line numbers; the values need no file."""
    lines = {} if source is None else source.lines
    out = []
    for path, pattern, value, default, given in _walk(config, "", ""):
        written = written_value(config.source, path)
        origin: Origin = "file" if given else "default"
        if written is not None and isinstance(written[1], str) and written[1] == AUTO and value != AUTO:
            origin = "auto"
        elif path in BATCH_KEYS:
            origin = "file" if written is not None and written[1] is not None else "derived"
        line = line_of(lines, written[0]) if written is not None else None
        out.append(Setting(path, pattern, value, default, origin, line))
    return out
