"""JSON Schema (draft 2020-12) of the configuration for editors: pydantic's own, and what parsing accepts besides."""

import json
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema

from deepspeed.config.explain.check import FILLED_BY_INTEGRATIONS
from deepspeed.config.explain.messages import block_inside
from deepspeed.config.model.optim_params import PARAM_BLOCKS
from deepspeed.config.model.root import DeepSpeedConfig
from deepspeed.config.model.settings import default_of, keys_of
from deepspeed.config.model.spelling import ALIASES, LEGACY_KEYS, REMOVED_KEYS, SPELLED
from deepspeed.config.model.values import AUTO

Schema = dict[str, Any]

# pydantic leaves bounds behind a validating function in its own words.
_BOUNDS: Mapping[str, str] = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_FALSE_IS_OFF = ("offload_param", "offload_optimizer", "zenflow")  # in zero_optimization


class PlainSchema(GenerateJsonSchema):
    """What pydantic says, without titles and with every bound in the words of JSON Schema."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # none says more than the key

    def generate_inner(self, schema: Any) -> Schema:
        return {_BOUNDS.get(name, name): item for name, item in super().generate_inner(schema).items()}


class _EditorSchema(PlainSchema):
    """The same with what parsing accepts besides: null, false or "auto" for absent."""

    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        out, block = super().model_schema(schema), cast("type[BaseModel]", schema["cls"])
        out.pop("title", None)
        for _, name, info in keys_of(block):
            out["properties"][name] = _completed(block, name, info, out["properties"][name])
        return out


def _completed(block: type[BaseModel], name: str, info: FieldInfo, schema: Schema) -> Schema:
    """The schema of one key of ``block``."""
    inner, suffix = block_inside(info.annotation)
    about = {word: schema.pop(word) for word in ("description", "default") if word in schema}
    options = schema.get("anyOf", [schema])
    kinds = {part.get("const", part.get("type", "any")) for part in options if not {"enum", "$ref"} & set(part)}
    absent = not suffix if inner is not None else block is DeepSpeedConfig and name != "gradient_clipping"
    automatic = getattr(block, "auto_is_absent", False) or block in PARAM_BLOCKS.values()
    automatic |= block is DeepSpeedConfig and name in FILLED_BY_INTEGRATIONS
    options += [{"const": False}] if name in _FALSE_IS_OFF else []
    options += [{"type": "null"}] if absent and not kinds & {"null", "any"} else []
    options += [{"const": AUTO}] if automatic and inner is None and not kinds & {"string", "any", AUTO} else []
    if default_of(info) is None or inner is not None:
        about.pop("default", None)
    return about | ({"anyOf": options} if len(options) > 1 else options[0])


def definitions(generator: type[GenerateJsonSchema]) -> dict[str, Schema]:
    """The schema of every block by the name of its class."""
    models: Any = [(model, "validation") for model in (DeepSpeedConfig, *PARAM_BLOCKS.values())]
    out: dict[str, Schema] = models_json_schema(models, schema_generator=generator)[1]["$defs"]
    return out


def _deprecated(text: str, schema: Schema | None = None) -> Schema:
    return {"description": text} | (schema or {}) | {"deprecated": True}


def schema_text() -> str:
    """The file ``docs/config.schema.json``."""
    blocks = definitions(_EditorSchema)
    root = blocks.pop("DeepSpeedConfig")
    properties, zero, tensor = (
        part["properties"] for part in (root, blocks["ZeroConfig"], blocks["TensorParallelKeys"])
    )
    for part, block in PARAM_BLOCKS.items():
        blocks[block.__name__]["additionalProperties"] = True  # classes of torch have their own
        blocks[f"{part.title()}Config"]["properties"]["params"] |= {"$ref": f"#/$defs/{block.__name__}"}
    for alias, name in ALIASES["zero_optimization"].items():
        old, text = f"zero_optimization.{alias}" in SPELLED, {"description": f"Another spelling of {name}."}
        zero[alias] = zero[name] | (_deprecated(f"Deprecated. Write {name}.") if old else text)
    for path, key in SPELLED.items():
        home, _, name = path.rpartition(".")
        if home == "zero_optimization" and name not in zero:
            zero[name] = _deprecated(key.text, {"type": ["boolean", "null"]} if name in LEGACY_KEYS else None)
    properties["zero_optimization"]["anyOf"].append({"type": "boolean", "deprecated": True})
    tensor |= {alias: tensor[name] for alias, name in ALIASES["tensor_parallel"].items()}
    properties["bfloat16"] = {"$ref": "#/properties/bf16", "description": "Another spelling of bf16."}
    properties["allgather_size"] = _deprecated(SPELLED["allgather_size"].text, {"type": ["integer", "null"]})
    for path, advice in REMOVED_KEYS.items():
        home, _, name = path.rpartition(".")
        if home in ("", "zero_optimization"):  # a value that only says "off" is still accepted
            (zero if home else properties)[name] = _deprecated(f"Removed. {advice}.")
    del root["required"], properties["source"], properties["world_size"]
    properties["$schema"] = {"type": "string", "description": "Where editors find this schema; not read otherwise."}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "DeepSpeed configuration"}
    return json.dumps(head | root | {"$defs": blocks}, indent=1) + "\n"
