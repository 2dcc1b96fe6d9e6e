"""A configuration as text for people: every final value, where it came from, and whether it does anything."""

import json
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from deepspeed.config.explain.check import Findings
from deepspeed.config.explain.rules import inert_under
from deepspeed.config.model.batch import BATCH_KEYS
from deepspeed.config.model.dtypes import dtype_rows
from deepspeed.config.model.root import DeepSpeedConfig
from deepspeed.config.model.settings import Setting, canonical_path, plain, settings, without_effect
from deepspeed.config.model.values import AUTO

WIDTH = 120
_VALUE_WIDTH, _SHORT = 28, 11  # of a value in front of a remark: at most, and the usual
_SWITCHES = ("bf16.enabled", "fp16.enabled")  # of the compute dtype


def _config(findings: Findings) -> DeepSpeedConfig:
    assert findings.config is not None, "only a configuration without faults has values"
    return findings.config


def shown_settings(findings: Findings) -> dict[str, Setting]:
    """Every key of a faultless configuration by path, in the order of the models; "auto" values count as such."""
    out = {item.path: item for item in settings(_config(findings), findings.source)}
    lines = findings.source.lines
    for path in findings.autos:
        if ".params." in path:
            out[path] = Setting(path, path, None, AUTO, None, "auto", lines[path][-1] if path in lines else None)
        elif path in BATCH_KEYS:
            out[path] = replace(out[path], value=AUTO)
    parents = {path.rpartition(".")[0] for path in out}
    return {
        path: item
        for path, item in out.items()
        if not isinstance(item.value, BaseModel) and (path not in parents or item.value)
    }


def value_text(value: Any) -> str:
    """``value`` as JSON, in one line."""
    return "inf (never)" if value == float("inf") else json.dumps(plain(value), default=str)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def _row(item: Setting, remark: str, indent: int, name_width: int) -> str:
    origin = f"line {item.line}" if item.origin == "file" and item.line is not None else item.origin
    left = f"  {item.path[indent:]:<{name_width}}  {origin:<9}  "
    value = value_text(item.value)
    return _cut(f"{left}{_cut(value, _VALUE_WIDTH):<{_SHORT}}  {remark}" if remark else left + value, WIDTH)


def _block_lines(block: str, items: list[Setting], remarks: dict[str, str], *, everything: bool) -> list[str]:
    if not everything and all(item.origin == "default" for item in items):
        count = f"{len(items)} keys at their defaults" if len(items) > 1 else f"{value_text(items[0].value)} (default)"
        off = any(item.path == f"{block}.enabled" and item.value is False for item in items)
        return [f"{block}: {'off, ' if off else ''}{count}"]
    # What is set comes in full; a run of defaults below a switch that is off is of no use to anybody.
    listed = [
        item for item in items if everything or item.origin != "default" or not remarks[item.path].startswith("off: ")
    ]
    indent, hidden = len(block) + 1, len(items) - len(listed)
    width = min(max((len(item.path) - indent for item in listed), default=0), 48)
    lines = [block, *(_row(item, remarks[item.path], indent, width) for item in listed)]
    return lines + ([f"  ... {hidden} more at their defaults, off (--all shows them)"] if hidden else [])


def values_text(findings: Findings, *, everything: bool = False) -> str:
    """The table of all values; blocks that are wholly at their defaults take one line unless ``everything``."""
    items = shown_settings(findings)
    remarks = _remarks(findings, items)
    blocks: dict[str, list[Setting]] = {}
    for item in items.values():  # a block that may be absent as a whole is a line of its own where it is
        head, dot, _ = item.path.partition(".")
        alone = not dot and not any(path.startswith(f"{head}.") for path in items)
        blocks.setdefault("" if alone else head, []).append(item)
    width = min(max(len(item.path) for item in blocks[""]), 48)
    lines, quiet = [_row(item, remarks[item.path], 0, width) for item in blocks.pop("")], []
    for block, members in blocks.items():
        text = _block_lines(block, members, remarks, everything=everything)
        if len(text) > 1:
            lines += ["", *text]
        else:
            quiet += text
    if quiet:
        lines += ["", "at their defaults (--all lists the keys)", *(f"  {line}" for line in quiet)]
    return "\n".join(lines)


def _remarks(findings: Findings, items: dict[str, Setting]) -> dict[str, str]:
    """By path, what is to be said of a value."""
    idle, waiting = inert_under(_config(findings)), {canonical_path(path) for path in findings.autos}
    automatic = {True: "until an integration fills it in", False: '"auto" means the default here'}
    return {
        path: automatic[path in waiting] if item.origin == "auto" else without_effect(item, items, idle=idle)
        for path, item in items.items()
    }


def dtypes_text(findings: Findings) -> str:
    """One table: which dtype each quantity of a step has, and the key that decides it."""
    rows = [("quantity", "dtype", "decided by"), *dtype_rows(_config(findings))]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    open_switches = [path for path in findings.autos if canonical_path(path) in _SWITCHES]
    return "\n".join([*lines, *(f'{path} is "auto": this is the table while it is false.' for path in open_switches)])


def as_json(findings: Findings) -> dict[str, Any]:
    """The same facts for programs; JSON has no infinity."""
    config, items, rows = _config(findings), shown_settings(findings), []
    idle = inert_under(config)
    for item in items.values():
        value, default = ("inf" if part == float("inf") else plain(part) for part in (item.value, item.default))
        rows.append(
            {
                "path": item.path,
                "value": value,
                "default": default,
                "origin": item.origin,
                "line": item.line,
                "class": None if item.key is None else item.key.support.value,
                "without_effect": without_effect(item, items, idle=idle) or None,
            }
        )
    dtypes = [row._asdict() for row in dtype_rows(config)]
    return {"world_size": config.world_size, "settings": rows, "dtypes": dtypes}
