"""A configuration as text for people: every final value, where it came from, and whether it does anything."""

import json
from typing import Any

from deepspeed.config.explain.check import Findings
from deepspeed.config.model.dtypes import dtype_rows
from deepspeed.config.model.settings import Setting, plain
from deepspeed.config.model.spelling import canonical_path

WIDTH = 120
_VALUE_WIDTH, _SHORT, _NAME_WIDTH = 28, 11, 48  # of a value in front of a remark: at most, and the usual; of a name


def _value_text(value: Any) -> str:
    """``value`` as JSON, in one line."""
    return "inf (never)" if value == float("inf") else json.dumps(plain(value), default=str)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _table(items: list[Setting], remarks: dict[str, str], indent: int) -> list[str]:
    """One aligned line per setting, without the first ``indent`` letters of its path."""
    width, lines = min(max((len(item.path) - indent for item in items), default=0), _NAME_WIDTH), []
    for item in items:
        origin = f"line {item.line}" if item.origin == "file" and item.line is not None else item.origin
        value, remark = _value_text(item.value), remarks[item.path]
        value = f"{_cut(value, _VALUE_WIDTH):<{_SHORT}}  {remark}" if remark else value
        lines.append(_cut(f"  {item.path[indent:]:<{width}}  {origin:<9}  {value}", WIDTH))
    return lines


def values_text(findings: Findings, *, everything: bool = False) -> str:
    """The table of all values; blocks that are wholly at their defaults take one line unless ``everything``."""
    waiting = {canonical_path(path) for path in findings.autos}
    automatic = {True: "until an integration fills it in", False: '"auto" means the default here'}
    remarks, blocks = {}, dict[str, list[Setting]]()
    for path, item in findings.settings.items():  # a block that may be absent as a whole is a line of its own then
        remarks[path] = automatic[path in waiting] if item.origin == "auto" else item.idle
        head, dot, _ = path.partition(".")
        alone = not dot and not any(other.startswith(f"{head}.") for other in findings.settings)
        blocks.setdefault("" if alone else head, []).append(item)
    lines, quiet = _table(blocks.pop(""), remarks, 0), []
    for block, items in blocks.items():
        if not everything and all(item.origin == "default" for item in items):
            count = (
                f"{len(items)} keys at their defaults" if len(items) > 1 else f"{_value_text(items[0].value)} (default)"
            )
            off = any(item.path == f"{block}.enabled" and item.value is False for item in items)
            quiet.append(f"  {block}: {'off, ' if off else ''}{count}")
            continue
        # What is set comes in full; a run of defaults below a switch that is off is of no use to anybody.
        off_by_default = [item.origin == "default" and remarks[item.path].startswith("off: ") for item in items]
        listed = [item for item, hidden in zip(items, off_by_default, strict=True) if everything or not hidden]
        lines += ["", block, *_table(listed, remarks, len(block) + 1)]
        if len(listed) < len(items):
            lines.append(f"  ... {len(items) - len(listed)} more at their defaults, off (--all shows them)")
    return "\n".join([*lines, *(["", "at their defaults (--all lists the keys)", *quiet] if quiet else [])])


def dtypes_text(findings: Findings) -> str:
    """One table: which dtype each quantity of a step has, and the key that decides it."""
    rows = [("quantity", "dtype", "decided by"), *dtype_rows(findings.config)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    waiting = [path for path in findings.autos if canonical_path(path) in ("bf16.enabled", "fp16.enabled")]
    return "\n".join([*lines, *(f'{path} is "auto": this is the table while it is false.' for path in waiting)])


def as_json(findings: Findings) -> dict[str, Any]:
    """The same facts for programs; JSON has no infinity."""
    config = findings.config
    rows = [
        {
            "path": item.path,
            "value": "inf" if item.value == float("inf") else plain(item.value),
            "default": plain(item.default),
            "origin": item.origin,
            "line": item.line,
            "class": None if item.key is None else item.key.support.value,
            "without_effect": item.idle or None,
        }
        for item in findings.settings.values()
    ]
    dtypes = [dict(zip(("quantity", "dtype", "decided_by"), row, strict=True)) for row in dtype_rows(config)]
    return {"world_size": config.world_size, "settings": rows, "dtypes": dtypes}
