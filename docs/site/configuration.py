"""``docs/config.md`` and the JSON Schema (draft 2020-12) beside it, written from the models.

``python docs/site/configuration.py`` writes both; with ``--check`` it only compares them. What ``config.md`` says above
the tables is written by hand, and kept. The schema is pydantic's own, and what parsing accepts besides.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema

from deepspeed.config.explain.check import FILLED_BY_INTEGRATIONS
from deepspeed.config.explain.messages import block_inside
from deepspeed.config.model.optim_params import OPTIMIZER_DEFAULT, PARAM_BLOCKS, PARAM_FIELDS, REQUIRED
from deepspeed.config.model.root import DeepSpeedConfig
from deepspeed.config.model.settings import Declared, all_keys, declared_fields, default_of, keys_of, plain
from deepspeed.config.model.spelling import ALIASES, LEGACY_KEYS, REMOVED_KEYS, REMOVED_OPTIMIZERS, SPELLED
from deepspeed.config.model.values import AUTO, BATCH_KEYS, DTYPE_NAMES, Key, Support

Schema = dict[str, Any]
_MARK = "<!-- From here on made by `python docs/site/configuration.py`; do not edit. -->\n"
_SIMPLE = dict(integer="int", number="float", boolean="bool", string="text", object="block", array="list")
_SIGNS: Mapping[str, str] = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
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
        part["properties"] for part in (root, blocks["ZeroConfig"], blocks["TensorParallelConfig"])
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


def type_text(schema: Schema) -> str:
    """``schema`` in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(type_text, schema["anyOf"])))
    if schema.get("enum") == [name for names in DTYPE_NAMES.values() for name in names]:
        return "dtype"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(item)}`" for item in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array" and (schema.get("items") or schema.get("prefixItems")):
        return f"list of {type_text(schema.get('items') or schema['prefixItems'][0])}"
    bounds = ", ".join(f"{sign} {schema[key]:g}" for key, sign in _SIGNS.items() if key in schema)
    return f"{_SIMPLE.get(kind, kind)}{' ' if bounds else ''}{bounds}"


def _default_text(path: str, info: Any) -> str:
    """A default as a file would write it."""
    value = plain(default_of(info))
    if block_inside(info.annotation)[0] is not None:
        return "absent"
    if path in BATCH_KEYS or info.is_required() or info.default in (OPTIMIZER_DEFAULT, REQUIRED):
        return "derived" if path in BATCH_KEYS else REQUIRED if info.is_required() else str(info.default)
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e6:
        return f"`{value:g}`"
    text = json.dumps(value, default=str)
    return f"`{text}`" if len(text) <= 40 else "see the schema"


def _row(path: str, kind: str, default: str, key: Key, above: str = "") -> str:
    """The row of a key; ``above`` is the note of the row before, which is not repeated."""
    auto = ', or `"auto"`' if path in FILLED_BY_INTEGRATIONS and '`"auto"`' not in kind else ""
    label = "No effect" if key.support is Support.INERT else "Missing"
    note = f" {label}: {'as above' if key.note == above else key.note}." if key.note else ""
    cells = [f"`{path}`", kind + auto, default, key.support.value, key.meaning + note]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _rows() -> dict[str, list[str]]:
    """Table rows by top-level block; the empty name is for keys outside of any."""
    schemas, out = definitions(PlainSchema), {"": list[str]()}
    notes: dict[str, str] = {}
    fields = list(declared_fields(DeepSpeedConfig))
    fields += [Declared(path, info, PARAM_BLOCKS[path.split(".")[0]]) for path, info in PARAM_FIELDS.items()]  # type: ignore[index]
    for path, info, block in fields:
        alone = block_inside(info.annotation)[0] is not None
        schema = schemas[block.__name__]["properties"][path.rpartition(".")[2]]
        head = path.partition(".")[0] if "." in path or alone else ""
        kind = "block" if alone else type_text(schema)
        key = Key.of(info)
        out.setdefault(head, []).append(_row(path, kind, _default_text(path, info), key, notes.get(head, "")))
        notes[head] = key.note
    for path in ("pipeline.<any>", "zero_optimization.grad_hooks", "zero_optimization.legacy_stage1"):
        out[path.partition(".")[0]].append(_row(path, "any", "absent", SPELLED[path]))
    return out


def _meaning(path: str, info: Any) -> str:
    """What a block as a whole is for: what its field says, else the first line of its own description."""
    first = (block_inside(info.annotation)[0].__doc__ or "").split("\n")[0].replace("``", "")
    text = first.partition(": ")[2] if first.startswith(path) and ": " in first else first
    return Key.of(info).text or text[:1].upper() + text[1:]


def _table(title: str, head: str, rows: Sequence[str]) -> str:
    rule = "|" + "---|" * (head.count("|") - 1)
    return "\n".join([f"## {title}\n", head, rule, *rows, ""])


def page(old: str) -> str:
    """The page whose last version is ``old``."""
    keys = all_keys(DeepSpeedConfig)
    counts = Counter(key.support for key in keys.values())
    parts = [f"{len(keys)} keys: " + ", ".join(f"{counts[support]} {support.value}" for support in Support) + ".\n"]
    infos = {key: info for _, key, info in keys_of(DeepSpeedConfig)}
    for block, rows in sorted(_rows().items()):
        title = f"`{block}`\n\n{_meaning(block, infos[block])}" if block else "Top level"
        parts.append(_table(title, "| key | type | default | class | meaning |", rows))
    spellings = {f"{block}.{alias}": f"`{block}.{name}`" for block in ALIASES for alias, name in ALIASES[block].items()}
    spellings |= {"bfloat16": "`bf16`, which wins when both are there"}
    spellings |= {path: key.meaning for path, key in SPELLED.items() if key.meaning.startswith("Deprecated")}
    rows = [f"| `{written}` | {means} |" for written, means in spellings.items()]
    parts.append(_table("Other spellings", "| written | means |", rows))
    intro = "Earlier releases of DeepSpeed accepted these; here each is an error that says what to do."
    before = dict(zip(REMOVED_KEYS, ("", *REMOVED_KEYS.values()), strict=False))
    removed = [
        f"| `{path}` | {'As above' if advice == before[path] else advice}. |" for path, advice in REMOVED_KEYS.items()
    ]
    removed += [f"| `optimizer.type` `{name}` | Use `{instead}`. |" for name, instead in REMOVED_OPTIMIZERS.items()]
    parts.append(_table(f"Removed keys\n\n{intro}", "| key | instead |", removed))
    return old.partition(_MARK)[0] + _MARK + "\n" + "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare both files; exit status 1 when ``--check`` finds one that is not current."""
    about = "Write docs/config.md and docs/config.schema.json."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1], help="folder of both files")
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    args, status = parser.parse_args(argv), 0
    for name, make in (("config.md", page), ("config.schema.json", lambda _: schema_text())):
        path = args.folder / name
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not args.check:
            path.write_text(make(old), encoding="utf-8")
        elif make(old) != old:
            sys.stderr.write(f"{path} is not current; run: python {__file__} {args.folder}\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
