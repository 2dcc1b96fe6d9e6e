"""The reference page ``docs/config.md`` and the schema beside it, written from the models.

``python -m deepspeed.config.tool.manual docs`` writes both files into ``docs``; with ``--check`` it only compares them.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.config.explain.check import FILLED_BY_INTEGRATIONS
from deepspeed.config.explain.messages import block_inside
from deepspeed.config.model.batch import BATCH_KEYS
from deepspeed.config.model.optim_params import OPTIMIZER_DEFAULT, PARAM_BLOCKS, PARAM_FIELDS, REQUIRED
from deepspeed.config.model.removed import REMOVED_KEYS, REMOVED_OPTIMIZERS
from deepspeed.config.model.root import DeepSpeedConfig
from deepspeed.config.model.settings import SPELLED, all_keys, declared_fields, default_of, keys_of, plain
from deepspeed.config.model.values import DTYPE_NAMES, Key, Support
from deepspeed.config.model.zero import ZERO_ALIASES
from deepspeed.config.tool.schema import Schema, block_meaning, parts_of, plain_schema, schema_text

_INTRO = """\
# Configuration keys

This page is made from the configuration models by `python -m deepspeed.config.tool.manual docs`; do not edit it.

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

_SIMPLE: Mapping[str, str] = {
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "string": "text",
    "object": "block",
    "array": "list",
}
_SIGNS: Mapping[str, str] = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_HEADER = "| key | type | default | class | meaning |\n|---|---|---|---|---|\n"


def type_text(schema: Schema) -> str:
    """``schema`` in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(type_text, schema["anyOf"])))
    if schema.get("enum") == [name for names in DTYPE_NAMES.values() for name in names]:
        return '`"fp32"`, `"fp16"`, `"bf16"` (or `"float16"`, `"torch.float16"`, ...)'
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(item)}`" for item in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array" and (schema.get("items") or schema.get("prefixItems")):
        return f"list of {type_text(schema.get('items') or schema['prefixItems'][0])}"
    bounds = ", ".join(f"{sign} {schema[key]:g}" for key, sign in _SIGNS.items() if key in schema)
    return f"{_SIMPLE.get(kind, kind)}{' ' if bounds else ''}{bounds}"


def default_text(value: Any) -> str:
    """A default as a file would write it."""
    value = plain(value)
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e6:
        return f"`{value:g}`"
    text = json.dumps(value, default=str)
    return f"`{text}`" if len(text) <= 40 else "see the schema"


def _row(path: str, kind: str, default: str, key: Key) -> str:
    auto = ', or `"auto"`' if path in FILLED_BY_INTEGRATIONS and '`"auto"`' not in kind else ""
    note = f" {'No effect' if key.support is Support.INERT else 'Missing'}: {key.note}." if key.note else ""
    cells = [f"`{path}`", kind + auto, default, key.support.value, key.meaning + note]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _rows() -> dict[str, list[str]]:
    """Table rows by top-level block; the empty name is for keys outside of any."""
    parts = list(parts_of(plain_schema(DeepSpeedConfig), DeepSpeedConfig))
    for name, block in PARAM_BLOCKS.items():
        parts += parts_of(plain_schema(block), block, f"{name}.params.")
    schemas = {part.path: part.schema for part in parts}
    fields = {field.path: field.info for field in declared_fields(DeepSpeedConfig)} | dict(PARAM_FIELDS)
    out: dict[str, list[str]] = {"": []}
    for path, info in fields.items():
        inner, default = block_inside(info.annotation)[0], default_of(info)
        text = "derived" if path in BATCH_KEYS else "required" if info.is_required() else default_text(default)
        if inner is not None:
            text = "absent"
        elif path in PARAM_FIELDS and info.default in (OPTIMIZER_DEFAULT, REQUIRED):
            text = info.default
        kind = "block, or absent" if inner is not None else type_text(schemas[path])
        head = path.partition(".")[0] if "." in path or inner is not None else ""
        out.setdefault(head, []).append(_row(path, kind, text, Key.of(info)))
    for path in ("pipeline.<any>", "zero_optimization.grad_hooks", "zero_optimization.legacy_stage1"):
        out[path.partition(".")[0]].append(_row(path, "any", "absent", SPELLED[path]))
    return out


def _sections() -> Iterator[str]:
    infos = {key: info for _, key, info in keys_of(DeepSpeedConfig)}
    for block, rows in sorted(_rows().items()):
        about = f"{block_meaning(block, infos[block])}\n\n" if block else ""
        yield f"## {f'`{block}`' if block else 'Top level'}\n\n{about}{_HEADER}" + "\n".join(rows) + "\n"


def _other_spellings() -> str:
    zero = "zero_optimization"
    aliases = [
        (f"{zero}.{alias}", f"`{zero}.{name}`", "deprecated" if f"{zero}.{alias}" in SPELLED else "")
        for alias, name in ZERO_ALIASES.items()
    ]
    others = [
        ("bfloat16", "`bf16`, which wins when both are there", ""),
        ("tensor_parallel.tp", "`tensor_parallel.tensor_parallel`", ""),
        ("tensor_parallel.kernel_inject", "`tensor_parallel.replace_with_kernel_inject`", ""),
        (f"{zero}: true", f"`{zero}.stage: 1`", "deprecated"),
        ("allgather_size", f"`{zero}.allgather_bucket_size`", "deprecated"),
        (f"{zero}.cpu_offload: true", f'`{zero}.offload_optimizer.device: "cpu"`', "deprecated"),
        (f"{zero}.cpu_offload_param: true", f'`{zero}.offload_param.device: "cpu"`', "deprecated"),
        (f"{zero}.cpu_offload_use_pin_memory", "`pin_memory` in both offload blocks", "deprecated"),
    ]
    lines = [f"| `{written}` | {means} | {age}{' ' if age else ''}|" for written, means, age in aliases + others]
    return "\n".join(["## Other spellings", "", "| written | means | |", "|---|---|---|", *lines, ""])


def _removed() -> str:
    rows = [f"| `{path}` | {advice}. |" for path, advice in REMOVED_KEYS.items()]
    rows += [f"| `optimizer.type` `{name}` | Use `{instead}`. |" for name, instead in REMOVED_OPTIMIZERS.items()]
    intro = "Earlier releases of DeepSpeed accepted these; here each is an error that says what to do.\n\n"
    return "## Removed keys\n\n" + intro + "| key | instead |\n|---|---|\n" + "\n".join(rows) + "\n"


def manual_text() -> str:
    """The whole page."""
    blocks = {key: block_inside(info.annotation)[0] for _, key, info in keys_of(DeepSpeedConfig)}
    automatic = sorted(f"`{key}`" for key, block in blocks.items() if getattr(block, "auto_is_absent", False))
    keys = all_keys(DeepSpeedConfig)
    counts = Counter(key.support for key in keys.values())
    total = f"{len(keys)} keys: " + ", ".join(f"{counts[support]} {support.value}" for support in Support) + ".\n"
    intro = _INTRO.replace("AUTO_BLOCKS", ", ".join(automatic))
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
