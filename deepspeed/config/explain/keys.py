"""The one table of configuration keys, ``keys.json``: path -> what it means and what this release does with it.

Paths are the canonical ones of the file format; ``<name>`` stands for a key of the user's choice, ``[]`` for a list
element. A row is [class, meaning, further fields of ``Key``]. Type, default and range live in the models; a test proves
that both lists of paths are the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any


class Support(str, Enum):
    """The three classes; every key is in exactly one."""

    HONOURED = "honoured"  # changing the value changes what happens, or is refused
    INERT = "inert here"  # accepted, has no effect with this design or device; said once in the log
    NOT_YET = "not yet"  # asking for it is a DeepSpeedConfigError that says so


@dataclass(frozen=True)
class Key:
    """One row. ``meaning`` is one line for the manual; ``note`` says why a key is inert, or what is missing.

    A key asks for something when it is written with a value other than its default and other than those in ``off``.
    ``gate`` is the path of the switch that a detail hangs on: while the switch asks for nothing, neither does the
    detail.
    """

    support: Support
    meaning: str
    note: str = ""
    gate: str = ""
    off: tuple[object, ...] = ()


def _key(support: str, meaning: str, further: Mapping[str, Any] = MappingProxyType({})) -> Key:
    return Key(Support(support), meaning, **{**further, "off": tuple(further.get("off", ()))})


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
KEYS: Mapping[str, Key] = MappingProxyType({path: _key(*row) for path, row in _TABLE.items()})

# Keys of this package that the reference format does not have.
EXTENSIONS = frozenset(
    {
        "checkpoint.allow_pickle",
        "checkpoint.async",
        "checkpoint.client_files",
        "checkpoint.keep_last",
        "checkpoint.rate_limit",
        "checkpoint.restore_data",
        "checkpoint.restore_rng",
        "memory.device_limit",
        "memory.host_limit",
        "seed",
        "zero_optimization.divergence",
        "zero_optimization.mics_hierarchical_params_gather",
        "zero_optimization.mics_shard_size",
    }
)
