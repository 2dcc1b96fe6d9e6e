"""The tables of ``docs/config.md`` and the schema beside it, written from the models.

``python -m deepspeed.config.tool.manual docs`` writes both into ``docs``; with ``--check`` it only compares them. What
``config.md`` says above the tables is written by hand, and kept.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.config.explain.check import FILLED_BY_INTEGRATIONS
from deepspeed.config.explain.messages import block_inside
from deepspeed.config.model.optim_params import OPTIMIZER_DEFAULT, PARAM_BLOCKS, PARAM_FIELDS, REQUIRED
from deepspeed.config.model.root import DeepSpeedConfig
from deepspeed.config.model.settings import Declared, all_keys, declared_fields, default_of, keys_of, plain
from deepspeed.config.model.spelling import ALIASES, REMOVED_KEYS, REMOVED_OPTIMIZERS, SPELLED
from deepspeed.config.model.values import BATCH_KEYS, DTYPE_NAMES, Key, Support
from deepspeed.config.tool.schema import PlainSchema, Schema, definitions, schema_text

_MARK = "<!-- From here on made by `python -m deepspeed.config.tool.manual docs`; do not edit. -->\n"
_SIMPLE = dict(integer="int", number="float", boolean="bool", string="text", object="block", array="list")
_SIGNS: Mapping[str, str] = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


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


def _row(path: str, kind: str, default: str, key: Key) -> str:
    auto = ', or `"auto"`' if path in FILLED_BY_INTEGRATIONS and '`"auto"`' not in kind else ""
    note = f" {'No effect' if key.support is Support.INERT else 'Missing'}: {key.note}." if key.note else ""
    cells = [f"`{path}`", kind + auto, default, key.support.value, key.meaning + note]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _rows() -> dict[str, list[str]]:
    """Table rows by top-level block; the empty name is for keys outside of any."""
    schemas, out = definitions(PlainSchema), {"": list[str]()}
    fields = list(declared_fields(DeepSpeedConfig))
    fields += [Declared(path, info, PARAM_BLOCKS[path.split(".")[0]]) for path, info in PARAM_FIELDS.items()]  # type: ignore[index]
    for path, info, block in fields:
        alone = block_inside(info.annotation)[0] is not None
        schema = schemas[block.__name__]["properties"][path.rpartition(".")[2]]
        head = path.partition(".")[0] if "." in path or alone else ""
        kind = "block, or absent" if alone else type_text(schema)
        out.setdefault(head, []).append(_row(path, kind, _default_text(path, info), Key.of(info)))
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
    removed = [f"| `{path}` | {advice}. |" for path, advice in REMOVED_KEYS.items()]
    removed += [f"| `optimizer.type` `{name}` | Use `{instead}`. |" for name, instead in REMOVED_OPTIMIZERS.items()]
    parts.append(_table(f"Removed keys\n\n{intro}", "| key | instead |", removed))
    return old.partition(_MARK)[0] + _MARK + "\n" + "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare both files; exit status 1 when ``--check`` finds one that is not current."""
    about = "Write docs/config.md and docs/config.schema.json."
    parser = argparse.ArgumentParser(prog="python -m deepspeed.config.tool.manual", description=about)
    parser.add_argument("folder", type=Path, help="folder of both files")
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    args, status = parser.parse_args(argv), 0
    for name, make in (("config.md", page), ("config.schema.json", lambda _: schema_text())):
        path = args.folder / name
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not args.check:
            path.write_text(make(old), encoding="utf-8")
        elif make(old) != old:
            sys.stderr.write(f"{path} is not current; run: python -m deepspeed.config.tool.manual {args.folder}\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
