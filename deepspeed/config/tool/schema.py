"""JSON Schema (draft 2020-12) of the configuration, made from the models and the key table, for editors."""

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, TypeAdapter
from pydantic.fields import FieldInfo

from deepspeed.config.explain.check import FILLED_BY_INTEGRATIONS
from deepspeed.config.explain.keys import KEYS, Key, Support
from deepspeed.config.model.batch import BATCH_KEYS
from deepspeed.config.model.features import plain
from deepspeed.config.model.optim_params import PARAM_SPECS
from deepspeed.config.model.parallel import TENSOR_PARALLEL_ALIASES
from deepspeed.config.model.removed import REMOVED_KEYS
from deepspeed.config.model.root import DeepSpeedConfig
from deepspeed.config.model.settings import default_of, keys_of, nested_block
from deepspeed.config.model.values import AUTO, DTYPE_NAMES, dtype_name
from deepspeed.config.model.zero import LEGACY_KEYS, ZERO_ALIASES

Schema = dict[str, Any]

# pydantic leaves bounds behind a validating function in its own words.
_BOUNDS: Mapping[str, str] = MappingProxyType(
    {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
)

# Blocks in which "auto" is as good as absent, whoever reads the file.
_PARAMS = ("optimizer.params", "scheduler.params")
AUTO_BLOCKS = ("zero_optimization", "fp16", "bf16")
DTYPE_SPELLINGS = tuple(name for names in DTYPE_NAMES.values() for name in names)
_FALSE_IS_OFF = frozenset(
    {"datastates_ckpt", *(f"zero_optimization.{name}" for name in ("offload_param", "offload_optimizer", "zenflow"))}
)
_DEPRECATED_SPELLING = frozenset({"stage3_gather_fp16_weights_on_model_save", *LEGACY_KEYS})


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """``schema`` with every reference replaced by what it names, and without generated titles."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    dropped = ("title", "$defs", "description", "default")
    return {_BOUNDS.get(key, key): _inlined(item, definitions) for key, item in schema.items() if key not in dropped}


def _functions(annotation: Any, metadata: Iterable[Any]) -> list[Any]:
    """The functions that see a value of this annotation before its type is judged."""
    found = [item.func for item in metadata if isinstance(item, BeforeValidator)]
    if get_origin(annotation) is Annotated:
        inner, *rest = get_args(annotation)
        return found + _functions(inner, rest)
    return found + [
        function for item in get_args(annotation) if not isinstance(item, str) for function in _functions(item, ())
    ]


def value_schema(path: str, info: FieldInfo) -> Schema:
    """What the key ``path``, which holds no inner block, may be."""
    if path in BATCH_KEYS:
        return {"type": "integer", "minimum": 1}
    if path == "steps_per_print":
        return _either({"type": "integer", "minimum": 1}, {"const": "inf"}, _NULL)
    annotated: Any = Annotated
    parts: Any = (info.annotation, *info.metadata)
    kind: Any = annotated[parts] if info.metadata else info.annotation
    raw = TypeAdapter(kind).json_schema()
    out: Schema = _inlined(raw, raw.get("$defs", {}))
    before = _functions(info.annotation, info.metadata)
    if dtype_name in before:
        return _either({"enum": list(DTYPE_SPELLINGS)}, *([_NULL] if _allows(out, "null") else []))
    strings = any(part.get("type") == "array" and part.get("items") == {"type": "string"} for part in _parts(out))
    return _either(out, {"type": "string"}) if before and strings and not _allows(out, "string") else out


_NULL: Schema = {"type": "null"}


def _parts(schema: Schema) -> list[Schema]:
    """The alternatives of ``schema``."""
    return list(schema["anyOf"]) if set(schema) == {"anyOf"} else [schema]


def _allows(schema: Schema, kind: str) -> bool:
    return any(part.get("type") == kind or not part for part in _parts(schema))


def _either(*schemas: Schema) -> Schema:
    """A schema that accepts what any of ``schemas`` accepts."""
    parts: list[Schema] = []
    for schema in schemas:
        parts += [part for part in _parts(schema) if part not in parts]
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def description(key: Key | None) -> str:
    """The hover text of a key: its meaning, and what this release does with it where that is not what the meaning
    says.
    """
    if key is None:
        return ""
    note = f": {key.note}" if key.note else ""
    tail = {
        Support.HONOURED: "",
        Support.INERT: f" No effect here{note}.",
        Support.NOT_YET: f" Not in this release yet{note}.",
    }
    return key.meaning + tail[key.support]


def block_meaning(path: str, block: type[BaseModel]) -> str:
    """What a block as a whole is for: its row in the table, else the first line of its own description."""
    first = (block.__doc__ or "").split("\n")[0].replace("``", "")
    said = first.partition(": ")[2] if first.startswith(path) and ": " in first else first
    return description(KEYS.get(path)) or said[:1].upper() + said[1:]


def _described(schema: Schema, path: str, default: Any = None) -> Schema:
    text = description(KEYS.get(path))
    out = ({"description": text} if text else {}) | schema
    default = plain(default)
    if default is None or isinstance(default, BaseModel):
        return out
    return out | {"default": json.loads(json.dumps(default))}


def _takes_auto(path: str, block: type[BaseModel]) -> bool:
    return (
        path in FILLED_BY_INTEGRATIONS
        or path.partition(".")[0] in AUTO_BLOCKS
        or getattr(block, "auto_is_absent", False)
    )


def _wrapped(schema: Schema, suffix: str) -> Schema:
    """The schema of a list or of a free-key object of ``schema``; ``suffix`` as in paths: "", "[]", ".<name>",
    combined.
    """
    while suffix:
        is_list = suffix.endswith("[]")
        schema = {"type": "array", "items": schema} if is_list else {"type": "object", "additionalProperties": schema}
        suffix = suffix[:-2] if is_list else suffix[: suffix.rindex(".<")]
    return schema


def _property(path: str, pattern: str, info: FieldInfo, block: type[BaseModel]) -> Schema:
    inner, suffix = nested_block(info.annotation)
    if inner is not None:
        schema = _wrapped(block_schema(inner, f"{pattern}{suffix}."), suffix)
        extra = [{"const": False}] if path in _FALSE_IS_OFF else []
        extra += [] if suffix else [_NULL]
        return _either(schema, *extra) | ({} if suffix else {"description": block_meaning(path, inner)})
    schema = _params_schema(path) if path in _PARAMS else value_schema(path, info)
    if "." not in path and path != "gradient_clipping" and not _allows(schema, "null"):
        schema = _either(schema, _NULL)  # null at the top level is as good as absent
    if (
        _takes_auto(path, block)
        and not _allows(schema, "string")
        and {"const": AUTO, "type": "string"} not in _parts(schema)
    ):
        schema = _either(schema, {"const": AUTO})
    return _described(schema, path, default_of(info))


def _params_schema(prefix: str) -> Schema:
    """The parameters of optimizers or of schedules, all that any of them has; classes of torch have their own
    besides.
    """
    properties = {}
    for path, spec in PARAM_SPECS.items():
        if path.startswith(f"{prefix}."):
            known = spec.default if isinstance(spec.default, bool | int | float) else None
            properties[path[len(prefix) + 1 :]] = _described(_either(spec.json_schema(), {"const": AUTO}), path, known)
    return {"type": "object", "properties": properties, "additionalProperties": True}


def block_schema(block: type[BaseModel], prefix: str = "") -> Schema:
    """The object schema of ``block``; ``prefix`` is its path with a final dot, empty for the root."""
    properties, required = {}, []
    for _, key, info in keys_of(block, prefix):
        path = prefix + key
        properties[key] = _property(path, path, info, block)
        if info.is_required() and prefix:
            required.append(key)
    out: Schema = {
        "type": "object",
        "properties": properties,
        "additionalProperties": block.model_config.get("extra") == "allow",
    }
    return out | ({"required": required} if required else {})


def _spelling(of: str, *, deprecated: bool) -> Schema:
    pointer = "#/properties/" + "/properties/".join(of.split("."))
    out: Schema = {"$ref": pointer, "description": f"Another spelling of {of}."}
    return out | ({"deprecated": True, "description": f"Deprecated. Write {of}."} if deprecated else {})


def _object_of(schema: Schema) -> Schema:
    """The alternative of ``schema`` that is an object with properties."""
    return next(
        part
        for part in _parts({key: item for key, item in schema.items() if key == "anyOf"} or schema)
        if "properties" in part
    )


def _add_spellings(root: Schema) -> None:
    """Aliases, deprecated keys and removed ones; the canonical properties are all there."""
    properties = root["properties"]
    zero = _object_of(properties["zero_optimization"])
    for alias, name in ZERO_ALIASES.items():
        copied = {key: item for key, item in zero["properties"][name].items() if key != "description"}
        deprecated = alias in _DEPRECATED_SPELLING
        about = f"{'Deprecated. Write' if deprecated else 'Another spelling of'} {name}."
        zero["properties"][alias] = {"description": about} | copied | ({"deprecated": True} if deprecated else {})
    for name in LEGACY_KEYS:
        zero["properties"][name] = {"type": ["boolean", "null"], "deprecated": True} | _described(
            {}, f"zero_optimization.{name}"
        )
    for path in KEYS:  # known by name only
        home, _, name = path.rpartition(".")
        if home == "zero_optimization" and name not in zero["properties"]:
            zero["properties"][name] = {"deprecated": True} | _described({}, path)
    zero_block = properties["zero_optimization"]
    properties["zero_optimization"] = {
        **zero_block,
        "anyOf": [*_parts({"anyOf": zero_block["anyOf"]}), {"type": "boolean", "deprecated": True}],
    }
    tensor = _object_of(properties["tensor_parallel"])
    for alias, name in TENSOR_PARALLEL_ALIASES.items():
        tensor["properties"][alias] = tensor["properties"][name]
    properties["bfloat16"] = _spelling("bf16", deprecated=False)
    properties["allgather_size"] = {"type": ["integer", "null"], "deprecated": True} | _described({}, "allgather_size")
    for path, advice in REMOVED_KEYS.items():
        home, _, name = path.rpartition(".")
        if home in ("", "zero_optimization"):  # a value that only says "off" is still accepted
            (zero["properties"] if home else properties)[name] = {
                "deprecated": True,
                "description": f"Removed. {advice}.",
            }


def config_schema() -> Schema:
    """The schema of a whole configuration file."""
    root = block_schema(DeepSpeedConfig)
    root["properties"]["$schema"] = {
        "type": "string",
        "description": "Where editors find this schema; not read otherwise.",
    }
    _add_spellings(root)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "DeepSpeed configuration"}
    return head | root


def schema_text() -> str:
    """The file ``docs/config.schema.json``."""
    return json.dumps(config_schema(), indent=1) + "\n"
