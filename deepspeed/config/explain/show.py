"""A configuration as text for people: every final value, where it came from, and whether it does anything."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from deepspeed.config.explain.check import Findings, canonical_path
from deepspeed.config.explain.effect import without_effect
from deepspeed.config.explain.keys import KEYS
from deepspeed.config.explain.rules import inert_under
from deepspeed.config.model.batch import BATCH_KEYS
from deepspeed.config.model.dtypes import dtype_rows
from deepspeed.config.model.features import plain
from deepspeed.config.model.settings import Setting, settings
from deepspeed.config.model.values import AUTO

WIDTH = 120
_VALUE_WIDTH, _SHORT = 28, 11  # of a value in front of a remark: at most, and the usual
_SWITCHES = ("bf16.enabled", "fp16.enabled")  # of the compute dtype


def shown_settings(findings: Findings) -> dict[str, Setting]:
    """Every key of a faultless configuration by path, in the order of the models; "auto" values count as such."""
    assert findings.config is not None, "only a configuration without faults has values"
    config = findings.config.model_copy(update={"source": findings.source.data})
    out = {item.path: item for item in settings(config, findings.source)}
    lines = findings.source.lines
    for path in findings.autos:
        if ".params." in path:
            out[path] = Setting(path, path, AUTO, None, "auto", lines[path][-1] if path in lines else None)
    for path in BATCH_KEYS:
        if path in findings.autos:
            out[path] = replace(out[path], value=AUTO)
    parents = {path.rpartition(".")[0] for path in out}
    return {path: item for path, item in out.items() if path not in parents or item.value}


def value_text(value: Any) -> str:
    """``value`` as JSON, in one line."""
    value = plain(value)
    return "inf (never)" if _is_infinite(value) else json.dumps(value, default=str)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and value == float("inf")


def _portable(value: Any) -> Any:
    """``value`` for JSON, which has no infinity."""
    return "inf" if _is_infinite(value) else plain(value)


def _origin_text(item: Setting) -> str:
    return f"line {item.line}" if item.origin == "file" and item.line is not None else item.origin


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def _row(item: Setting, remark: str, indent: int, name_width: int) -> str:
    name = item.path[indent:]
    left = f"  {name:<{name_width}}  {_origin_text(item):<9}  "
    value = value_text(item.value)
    if remark:
        return _cut(f"{left}{_cut(value, _VALUE_WIDTH):<{_SHORT}}  {remark}", WIDTH)
    return _cut(left + value, WIDTH)


def _is_quiet(items: Iterable[Setting]) -> bool:
    return all(item.origin == "default" for item in items)


def _block_lines(block: str, items: list[Setting], remarks: Mapping[str, str], *, everything: bool) -> list[str]:
    if _is_quiet(items) and not everything:
        count = f"{len(items)} keys at their defaults" if len(items) > 1 else f"{value_text(items[0].value)} (default)"
        off = any(item.path == f"{block}.enabled" and item.value is False for item in items)
        return [f"{block}: {'off, ' if off else ''}{count}"]
    indent = len(block) + 1
    # What is set comes in full; a run of defaults below a switch that is off is of no use to anybody.
    listed = [
        item for item in items if everything or item.origin != "default" or not remarks[item.path].startswith("off: ")
    ]
    hidden = len(items) - len(listed)
    width = min(max((len(item.path) - indent for item in listed), default=0), 48)
    lines = [block, *(_row(item, remarks[item.path], indent, width) for item in listed)]
    return lines + ([f"  ... {hidden} more at their defaults, off (--all shows them)"] if hidden else [])


def _blocks(items: Iterable[Setting]) -> dict[str, list[Setting]]:
    """Settings by top-level block; what is no block is under the empty name."""
    out: dict[str, list[Setting]] = {"": []}
    for item in items:
        block = item.path.partition(".")[0] if "." in item.path else ""
        out.setdefault(block, []).append(item)
    for item in [
        item for item in out[""] if item.path in out
    ]:  # a block that may be absent as a whole, next to its details
        out[""].remove(item)
    return out


def values_text(findings: Findings, *, everything: bool = False) -> str:
    """The table of all values; blocks that are wholly at their defaults take one line unless ``everything``."""
    items = shown_settings(findings)
    assert findings.config is not None, "only a configuration without faults has values"
    idle = inert_under(findings.config)
    remarks = {path: _remark(item, items, findings, idle) for path, item in items.items()}
    lines, quiet = [], []
    for block, members in _blocks(items.values()).items():
        if not block:
            width = max(len(item.path) for item in members)
            lines += [_row(item, remarks[item.path], 0, min(width, 48)) for item in members]
            continue
        found = _block_lines(block, members, remarks, everything=everything)
        if len(found) > 1:
            lines += ["", *found]
        else:
            quiet += found
    if quiet:
        lines += ["", "at their defaults (--all lists the keys)", *(f"  {line}" for line in quiet)]
    return "\n".join(lines)


def _is_open(item: Setting, findings: Findings) -> bool:
    return item.path in {canonical_path(path) for path in findings.autos}


def _remark(item: Setting, items: Mapping[str, Setting], findings: Findings, idle: Mapping[str, str]) -> str:
    if item.origin == "auto":
        return "until an integration fills it in" if _is_open(item, findings) else '"auto" means the default here'
    return without_effect(item, items, idle=idle)


def dtypes_text(findings: Findings) -> str:
    """One table: which dtype each quantity of a step has, and the key that decides it."""
    assert findings.config is not None, "only a configuration without faults has dtypes"
    rows = [("quantity", "dtype", "decided by"), *dtype_rows(findings.config)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    lines += [
        f'{path} is "auto": this is the table while it is false.'
        for path in findings.autos
        if canonical_path(path) in _SWITCHES
    ]
    return "\n".join(lines)


def as_json(findings: Findings) -> dict[str, Any]:
    """The same facts for programs."""
    assert findings.config is not None, "only a configuration without faults has values"
    items, idle = shown_settings(findings), inert_under(findings.config)
    rows = []
    for item in items.values():
        key = KEYS.get(item.pattern)
        rows.append(
            {
                "path": item.path,
                "value": _portable(item.value),
                "default": _portable(item.default),
                "origin": item.origin,
                "line": item.line,
                "class": None if key is None else key.support.value,
                "without_effect": without_effect(item, items, idle=idle) or None,
            }
        )
    dtypes = [row._asdict() for row in dtype_rows(findings.config)]
    return {"world_size": findings.config.world_size, "settings": rows, "dtypes": dtypes}
