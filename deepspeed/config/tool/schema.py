"""JSON Schema (draft 2020-12) of the configuration for editors: pydantic's own, and what parsing accepts besides."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed.config.explain.check import FILLED_BY_INTEGRATIONS
from deepspeed.config.explain.messages import block_inside
from deepspeed.config.model.optim_params import PARAM_BLOCKS, PARAM_FIELDS
from deepspeed.config.model.removed import REMOVED_KEYS
from deepspeed.config.model.root import DeepSpeedConfig
from deepspeed.config.model.settings import SPELLED, TENSOR_PARALLEL_ALIASES, default_of, keys_of, plain
from deepspeed.config.model.values import AUTO, Key, Support
from deepspeed.config.model.zero import LEGACY_KEYS, ZERO_ALIASES

Schema = dict[str, Any]

# pydantic leaves bounds behind a validating function in its own words.
_BOUNDS: Mapping[str, str] = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_DROPPED = ("title", "$defs", "description", "default", "support", "note", "gate", "off")
_NULL: Schema = {"type": "null"}
_AUTO: Schema = {"const": AUTO}
_FALSE_IS_OFF = tuple(f"zero_optimization.{name}" for name in ("offload_param", "offload_optimizer", "zenflow"))


class KeySchema(NamedTuple):
    """One key with its field, the block it belongs to and its schema, which is part of the whole."""

    path: str
    info: FieldInfo
    block: type[BaseModel]
    schema: Schema


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """``schema`` with every reference replaced by what it names, without what pydantic says of names and defaults."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    out = {
        _BOUNDS.get(name, name): _inlined(item, definitions) for name, item in schema.items() if name not in _DROPPED
    }
    if "properties" in schema:
        out["properties"] = {name: _inlined(item, definitions) for name, item in schema["properties"].items()}
    return out


def plain_schema(block: type[BaseModel]) -> Schema:
    """What pydantic says of ``block``."""
    raw = block.model_json_schema()
    out: Schema = _inlined(raw, raw.get("$defs", {}))
    return out


def _holders(schema: Schema) -> Iterator[Schema]:
    """The objects with properties inside ``schema``: alternatives, list elements, free keys."""
    if "properties" in schema:
        yield schema
    inner = [*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")]
    for part in inner if "properties" not in schema else ():
        yield from _holders(part) if isinstance(part, dict) else ()


def parts_of(schema: Schema, block: type[BaseModel], prefix: str = "") -> Iterator[KeySchema]:
    """Every key of ``schema``, which is that of ``block``; outer ones first."""
    for _, name, info in keys_of(block):
        part = KeySchema(prefix + name, info, block, schema["properties"][name])
        yield part
        inner, suffix = block_inside(info.annotation)
        if inner is not None:
            yield from parts_of(next(_holders(part.schema)), inner, f"{part.path}{suffix}.")


def description(key: Key | None) -> str:
    """The hover text of a key: its meaning, and what this release does with it where the meaning does not say it."""
    if key is None or not key.meaning:
        return ""
    note = f": {key.note}." if key.note else "."
    tails = {Support.INERT: f" No effect here{note}", Support.NOT_YET: f" Not in this release yet{note}"}
    return key.meaning + tails.get(key.support, "")


def block_meaning(path: str, info: FieldInfo) -> str:
    """What a block as a whole is for: what its field says, else the first line of its own description."""
    block = block_inside(info.annotation)[0]
    first = ((block.__doc__ if block else "") or "").split("\n")[0].replace("``", "")
    text = first.partition(": ")[2] if first.startswith(path) and ": " in first else first
    return description(Key.of(info)) or text[:1].upper() + text[1:]


def _alternatives(schema: Schema) -> list[Schema]:
    return list(schema["anyOf"]) if "anyOf" in schema else [dict(schema)]


def _allows(schema: Schema, kind: str) -> bool:
    return any(part.get("type") == kind or not part for part in _alternatives(schema))


def _besides(part: KeySchema) -> list[Schema]:
    """What parsing accepts at ``part`` besides a value of its type: null, false or "auto" for absent."""
    path, info, block, schema = part
    inner, suffix = block_inside(info.annotation)
    absent = not suffix if inner is not None else "." not in path and path != "gradient_clipping"
    automatic = path in FILLED_BY_INTEGRATIONS or getattr(block, "auto_is_absent", False) or path in PARAM_FIELDS
    out = [{"const": False}] if path in _FALSE_IS_OFF else []
    out += [_NULL] if absent and not _allows(schema, "null") else []
    free = _allows(schema, "string") or any(part.get("const") == AUTO for part in _alternatives(schema))
    return out + ([_AUTO] if automatic and inner is None and not free else [])


def _complete(part: KeySchema) -> None:
    """Write into the schema of ``part`` what else is accepted, what it means and what its absence means."""
    path, info, _, schema = part
    inner, suffix = block_inside(info.annotation)
    alternatives = [*_alternatives(schema), *_besides(part)]
    out = {"anyOf": alternatives} if len(alternatives) > 1 else dict(schema)
    text = "" if suffix else block_meaning(path, info) if inner is not None else description(Key.of(info))
    default = default_of(info)
    known = {} if inner is not None or default is None else {"default": json.loads(json.dumps(plain(default)))}
    schema.clear()
    schema |= ({"description": text} if text else {}) | out | known


def _completed(block: type[BaseModel], prefix: str = "") -> Schema:
    schema = plain_schema(block)
    for part in list(parts_of(schema, block, prefix)):
        _complete(part)
    return schema


def _deprecated(text: str, schema: Schema | None = None) -> Schema:
    return {"description": text} | (schema or {}) | {"deprecated": True}


def _add_spellings(root: Schema) -> None:
    """Aliases, deprecated keys and removed ones; the canonical properties are all there."""
    properties = root["properties"]
    zero, tensor = (next(_holders(properties[name]))["properties"] for name in ("zero_optimization", "tensor_parallel"))
    for alias, name in ZERO_ALIASES.items():
        copied = {item: value for item, value in zero[name].items() if item != "description"}
        old = f"zero_optimization.{alias}" in SPELLED
        zero[alias] = (
            _deprecated(f"Deprecated. Write {name}.", copied)
            if old
            else {"description": f"Another spelling of {name}."} | copied
        )
    for path, key in SPELLED.items():
        home, _, name = path.rpartition(".")
        if home == "zero_optimization" and name not in zero:
            zero[name] = _deprecated(description(key), {"type": ["boolean", "null"]} if name in LEGACY_KEYS else None)
    properties["zero_optimization"]["anyOf"].append({"type": "boolean", "deprecated": True})
    tensor |= {alias: tensor[name] for alias, name in TENSOR_PARALLEL_ALIASES.items()}
    properties["bfloat16"] = {"$ref": "#/properties/bf16", "description": "Another spelling of bf16."}
    properties["allgather_size"] = _deprecated(description(SPELLED["allgather_size"]), {"type": ["integer", "null"]})
    for path, advice in REMOVED_KEYS.items():
        home, _, name = path.rpartition(".")
        if home in ("", "zero_optimization"):  # a value that only says "off" is still accepted
            (zero if home else properties)[name] = _deprecated(f"Removed. {advice}.")


def config_schema() -> Schema:
    """The schema of a whole configuration file."""
    root = _completed(DeepSpeedConfig)
    for part, block in PARAM_BLOCKS.items():
        params = _completed(block, f"{part}.params.") | {
            "additionalProperties": True
        }  # classes of torch have their own
        params["properties"] = {name: item for name, item in params["properties"].items() if "description" in item}
        next(_holders(root["properties"][part]))["properties"]["params"] |= params
    _add_spellings(root)
    del root["required"]
    for hidden in ("source", "world_size"):
        del root["properties"][hidden]
    text = "Where editors find this schema; not read otherwise."
    root["properties"]["$schema"] = {"type": "string", "description": text}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "DeepSpeed configuration"} | root


def schema_text() -> str:
    """The file ``docs/config.schema.json``."""
    return json.dumps(config_schema(), indent=1) + "\n"
