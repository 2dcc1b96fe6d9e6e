"""What a configuration asks for that this release does not do, judged by the one table in ``keys.py``."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed.config.explain.keys import KEYS, Key, Support
from deepspeed.config.explain.messages import at_line
from deepspeed.config.model.settings import Setting, settings
from deepspeed.config.parse import ConfigSource

if TYPE_CHECKING:
    from deepspeed.config.model.root import DeepSpeedConfig


def plain(value: Any) -> Any:
    """``value`` as a file would write it: the value of an enum."""
    return getattr(value, "value", value)


def as_written(value: Any) -> str:
    """``value`` in the notation of the file."""
    return json.dumps(plain(value), default=str)


def _differs(setting: Setting, key: Key) -> bool:
    value = plain(setting.value)
    return value != plain(setting.default) and not any(value == item and type(value) is type(item) for item in key.off)


def asks(setting: Setting, values: Mapping[str, Setting]) -> bool:
    """Whether ``setting`` was written and wants something: another value than the default, behind a switch that is on.

    ``values`` are the settings of the same configuration by path.
    """
    key = KEYS[setting.pattern]
    if setting.origin != "file" or not _differs(setting, key):
        return False
    return gate_open(key, values)


def gate_open(key: Key, values: Mapping[str, Setting]) -> bool:
    """Whether the switch that ``key`` hangs on is on; true for a key without one."""
    if not key.gate:
        return True
    switch = values.get(key.gate)
    return switch is not None and _differs(switch, KEYS[switch.pattern]) and gate_open(KEYS[switch.pattern], values)


def _said_by_its_gate(key: Key) -> bool:
    return bool(key.gate) and KEYS[key.gate].support is Support.NOT_YET


def support_faults(config: "DeepSpeedConfig", source: ConfigSource) -> list[str]:
    """One sentence, with its line, per requested feature that is not in this release."""
    values = {item.path: item for item in settings(config)}
    out = []
    for item in values.values():
        key = KEYS.get(item.pattern)
        if key is not None and key.support is Support.NOT_YET and not _said_by_its_gate(key) and asks(item, values):
            reason = f": {key.note}" if key.note else ""
            sentence = (
                f"{item.path} {as_written(item.value)} is not in this release yet{reason}. Remove it from the "
                "configuration."
            )
            out.append(at_line(source, item.path, sentence))
    return out


def inert_keys(items: Iterable[Setting]) -> list[Setting]:
    """The written keys that are accepted without effect."""
    return [
        item
        for item in items
        if item.origin == "file" and item.pattern in KEYS and KEYS[item.pattern].support is Support.INERT
    ]


def inert_notes(config: "DeepSpeedConfig") -> list[str]:
    """One clause per written key that is accepted without effect, for the log."""
    return [f"{item.path} ({KEYS[item.pattern].note})" for item in inert_keys(settings(config))]
