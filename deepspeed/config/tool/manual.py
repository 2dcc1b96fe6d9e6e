"""The reference page ``docs/config.md`` and the schema beside it, written from the models and the key table.

``python -m deepspeed.config.tool.manual docs`` writes both files into ``docs``; with ``--check`` it only compares them.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed.config.explain.check import FILLED_BY_INTEGRATIONS, REQUIRED
from deepspeed.config.explain.keys import KEYS, Key, Support
from deepspeed.config.model.batch import BATCH_KEYS
from deepspeed.config.model.features import plain
from deepspeed.config.model.optim_params import OPTIMIZER_DEFAULT, PARAM_SPECS
from deepspeed.config.model.removed import REMOVED_KEYS, REMOVED_OPTIMIZERS
from deepspeed.config.model.root import DeepSpeedConfig
from deepspeed.config.model.settings import Field, declared_fields, default_of, keys_of, nested_block
from deepspeed.config.model.zero import LEGACY_KEYS, ZERO_ALIASES
from deepspeed.config.tool.schema import AUTO_BLOCKS, DTYPE_SPELLINGS, Schema, block_meaning, schema_text, value_schema

_INTRO = """\
# Configuration keys

This page is made from the configuration models and the key table by `python -m deepspeed.config.tool.manual docs`;
do not edit it.

A configuration is a dict, a path to a JSON file (comments, trailing commas and bare keys are allowed), or URL-safe
base64 of JSON. It is read once, checked as a whole, and cannot be changed afterwards. A key that does not exist, a
value of the wrong type, a number out of range and two keys that contradict each other are errors that name the key,
its line and the nearest valid name. A top-level key in a dict that a program hands over and that resembles no known
key is only mentioned in the log.

    ds_config check FILE --world RANKS     exit status 0, or 2 and one sentence per fault
    ds_config show FILE --world RANKS      every final value, where it comes from, and whether it has an effect
    ds_config init --goal finetune         a commented file to start from

**Where a value comes from.** `ds_config show` names one of four origins: *line N* or *file* (written), *auto*
(written as "auto"), *derived* (computed from other keys: the batch sizes), *default* (absent).

**"auto".** Transformers and Accelerate replace "auto" before the configuration gets here; the keys for which they do
are marked *auto* below. An "auto" that is left means the default for `gradient_clipping` and in the blocks
AUTO_BLOCKS.
Where "auto" is a value of its own, the type says so. Anywhere else it is an error.

**null.** At the top level null is as good as absent (only `gradient_clipping` refuses it). In a block it is a value
where the type says so.

**Numbers.** Whole numbers may be written as `5e8`. Text in quotes is never taken for a number, nor a number for true
or false.

**Class.** *honoured*: the key does what it says. *inert here*: accepted, because configurations in use contain it,
but without effect for the reason given. *not yet*: asking for it, that is writing another value than the default, is
an error in this release.

**Editors.** `config.schema.json` beside this page describes the same keys. Name it in the file, and the editor
completes and checks keys; the parser passes over `$schema`:

    {"$schema": "path/to/docs/config.schema.json", "train_batch_size": 8}
"""

_SIMPLE = {
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "string": "text",
    "null": "null",
    "object": "block",
    "array": "list",
}


def _bounds(schema: Schema) -> str:
    signs = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
    return ", ".join(f"{sign} {schema[key]:g}" for key, sign in signs if key in schema)


def type_text(schema: Schema) -> str:
    """``schema`` in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(type_text, schema["anyOf"])))
    if schema.get("enum") == list(DTYPE_SPELLINGS):
        return '`"fp32"`, `"fp16"`, `"bf16"` (or `"float16"`, `"torch.float16"`, ...)'
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(item)}`" for item in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kind = schema.get("type")
    if kind == "array" and schema.get("items"):
        return f"list of {type_text(schema['items'])}"
    bounds = _bounds(schema)
    return f"{_SIMPLE.get(str(kind), 'any')}{' ' + bounds if bounds else ''}"


def default_text(value: Any) -> str:
    """A default as a file would write it."""
    value = plain(value)
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e6:
        return f"`{value:g}`"
    text = json.dumps(value, default=str)
    return f"`{text}`" if len(text) <= 40 else "see the schema"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _meaning(key: Key | None) -> str:
    if key is None:
        return ""
    note = f" {'No effect' if key.support is Support.INERT else 'Missing'}: {key.note}." if key.note else ""
    return key.meaning + note


def _row(path: str, kind: str, default: str) -> str:
    key = KEYS.get(path)
    auto = ', or `"auto"`' if path in FILLED_BY_INTEGRATIONS and '`"auto"`' not in kind else ""
    support = key.support.value if key is not None else Support.HONOURED.value
    return f"| `{path}` | {_cell(kind + auto)} | {_cell(default)} | {support} | {_cell(_meaning(key))} |"


def _field_row(field: Field) -> str:
    inner, _ = nested_block(field.info.annotation)
    if inner is not None:
        off = default_of(field.info)
        return _row(field.path, "block, or absent", "absent" if off in (None, False) else default_text(off))
    schema = value_schema(field.path, field.info)
    default = (
        "required"
        if field.info.is_required() and field.path not in BATCH_KEYS
        else default_text(default_of(field.info))
    )
    return _row(field.path, type_text(schema), "derived" if field.path in BATCH_KEYS else default)


def _rows() -> dict[str, list[str]]:
    """Table rows by top-level block; the empty name is for keys outside of any."""
    out: dict[str, list[str]] = {"": []}
    seen = set()
    for field in declared_fields(DeepSpeedConfig):
        seen.add(field.path)
        nested = nested_block(field.info.annotation)[0] is not None or "." in field.path
        out.setdefault(field.path.partition(".")[0] if nested else "", []).append(_field_row(field))
    for path in KEYS:
        if path not in seen and path not in _spellings():
            out.setdefault(path.partition(".")[0] if "." in path else "", []).append(_row(path, *_listed_type(path)))
    return out


def _listed_type(path: str) -> tuple[str, str]:
    """Type and default of a key that is no field of a model: a parameter of an optimizer or schedule, or a name
    only.
    """
    spec = PARAM_SPECS.get(path)
    if spec is None:
        return "any", "absent"
    words = spec.default in (OPTIMIZER_DEFAULT, REQUIRED) or spec.default is None
    return spec.type_text, spec.default_text if words else default_text(spec.default)


def _spellings() -> set[str]:
    return {
        "zero_optimization",
        "allgather_size",
        *(f"zero_optimization.{name}" for name in (*LEGACY_KEYS, *ZERO_ALIASES)),
    }


def _sections() -> Iterator[str]:
    header = "| key | type | default | class | meaning |\n|---|---|---|---|---|\n"
    for block, rows in sorted(_rows().items()):
        info = DeepSpeedConfig.model_fields.get({"zero_optimization": "zero"}.get(block, block))
        inner = nested_block(info.annotation)[0] if info is not None else None
        about = "" if inner is None else f"{block_meaning(block, inner)}\n\n"
        yield f"## {f'`{block}`' if block else 'Top level'}\n\n{about}{header}" + "\n".join(rows) + "\n"


def _other_spellings() -> str:
    lines = ["| written | means | |", "|---|---|---|"]
    lines += [
        f"| `zero_optimization.{alias}` | `zero_optimization.{name}` | {_age(alias)} |"
        for alias, name in ZERO_ALIASES.items()
    ]
    lines += [
        "| `bfloat16` | `bf16`, which wins when both are there | |",
        "| `tensor_parallel.tp` | `tensor_parallel.tensor_parallel` | |",
        "| `tensor_parallel.kernel_inject` | `tensor_parallel.replace_with_kernel_inject` | |",
        "| `zero_optimization: true` | `zero_optimization.stage: 1` | deprecated |",
        "| `allgather_size` | `zero_optimization.allgather_bucket_size` | deprecated |",
        '| `zero_optimization.cpu_offload: true` | `zero_optimization.offload_optimizer.device: "cpu"` | deprecated |',
        '| `zero_optimization.cpu_offload_param: true` | `zero_optimization.offload_param.device: "cpu"` | '
        "deprecated |",
        "| `zero_optimization.cpu_offload_use_pin_memory` | `pin_memory` in both offload blocks | deprecated |",
    ]
    return "## Other spellings\n\n" + "\n".join(lines) + "\n"


def _age(alias: str) -> str:
    return "deprecated" if "fp16" in alias else ""


def _removed() -> str:
    rows = [f"| `{path}` | {_cell(advice)}. |" for path, advice in REMOVED_KEYS.items()]
    rows += [f"| `optimizer.type` `{name}` | Use `{instead}`. |" for name, instead in REMOVED_OPTIMIZERS.items()]
    intro = "Earlier releases of DeepSpeed accepted these; here each is an error that says what to do.\n\n"
    return "## Removed keys\n\n" + intro + "| key | instead |\n|---|---|\n" + "\n".join(rows) + "\n"


def _auto_blocks() -> str:
    """The top-level blocks in which "auto" is as good as absent."""
    blocks = {key: nested_block(info.annotation)[0] for _, key, info in keys_of(DeepSpeedConfig, "")}
    absent = [name for name, block in blocks.items() if getattr(block, "auto_is_absent", False)]
    return ", ".join(f"`{name}`" for name in sorted([*AUTO_BLOCKS, *absent]))


def manual_text() -> str:
    """The whole page."""
    intro = _INTRO.replace("AUTO_BLOCKS", _auto_blocks())
    counts = {support: sum(1 for key in KEYS.values() if key.support is support) for support in Support}
    total = f"{len(KEYS)} keys: " + ", ".join(f"{count} {support.value}" for support, count in counts.items()) + ".\n"
    return "\n".join([intro, total, *_sections(), _other_spellings(), _removed()])


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare both files; exit status 1 when ``--check`` finds one that is not current."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed.config.tool.manual", description="Write docs/config.md and docs/config.schema.json."
    )
    parser.add_argument("folder", nargs="?", help="folder of both files; without it the page goes to standard output")
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    args = parser.parse_args(argv)
    if args.folder is None:
        sys.stdout.write(manual_text())
        return 0
    old = []
    for name, text in (("config.md", manual_text()), ("config.schema.json", schema_text())):
        path = Path(args.folder) / name
        if args.check and not (path.is_file() and path.read_text(encoding="utf-8") == text):
            old.append(str(path))
        elif not args.check:
            path.write_text(text, encoding="utf-8")
    for item in old:
        sys.stderr.write(f"{item} is not current; run: python -m deepspeed.config.tool.manual {args.folder}\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
