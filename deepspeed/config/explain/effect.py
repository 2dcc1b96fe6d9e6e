"""Whether a key has any effect in one particular configuration: its class, the switches around it, and the other
keys.
"""

from collections.abc import Iterator, Mapping

from deepspeed.config.explain.keys import KEYS, Support
from deepspeed.config.model.features import gate_open, plain
from deepspeed.config.model.settings import Setting


def _switches(path: str) -> Iterator[str]:
    """The keys called ``enabled`` beside and above ``path``."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        switch = ".".join([*parts[:depth], "enabled"])
        if switch != path:
            yield switch


def without_effect(item: Setting, values: Mapping[str, Setting], *, idle: Mapping[str, str]) -> str:
    """Why ``item`` changes nothing in its configuration; empty when it does.

    ``values`` are all settings by path; ``idle`` is what ``rules.inert_under`` says of the same configuration.
    """
    key = KEYS.get(item.pattern)
    if key is not None and key.support is Support.INERT:
        return f"inert here: {key.note}" if key.note else "inert here"
    for switch in _switches(item.path):
        if switch in values and values[switch].value is False:
            return f"off: {switch} is false"
    if item.path in idle:
        return f"off: {idle[item.path]}"
    if key is not None and key.gate and not gate_open(key, values):
        return f"off: {key.gate} is not set"
    if key is not None and key.support is Support.NOT_YET:
        return "not yet in this release"
    return ""


def notes_of(items: Mapping[str, Setting], *, idle: Mapping[str, str]) -> list[str]:
    """One sentence per written key that has no effect."""
    out = []
    for item in items.values():
        reason = without_effect(item, items, idle=idle) if item.origin == "file" else ""
        if reason and not (reason.startswith("not yet") and plain(item.value) == plain(item.default)):
            line = f" (line {item.line})" if item.line is not None else ""
            out.append(f"{item.path} has no effect, {reason}{line}")
    return out
