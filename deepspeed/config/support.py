"""What this release does with a configuration key: the vocabulary of the table in ``keys.py``."""

from dataclasses import dataclass
from enum import Enum


class Support(str, Enum):
    """The three classes; every key is in exactly one."""

    HONOURED = "honoured"  # changing the value changes what happens, or is refused
    INERT = "inert here"  # accepted, has no effect with this design or device; said once in the log
    NOT_YET = "not yet"  # asking for it is a DeepSpeedConfigError that says so


@dataclass(frozen=True)
class Key:
    """One row. ``meaning`` is one line for the manual; ``note`` says why a key is inert, or what is missing.

    A key asks for something when it is written with a value other than its default and other than those in ``off``.
    ``gate`` is the path of the switch that a detail hangs on: while the switch asks for nothing, neither does the detail.
    """

    support: Support
    meaning: str
    note: str = ""
    gate: str = ""
    off: tuple[object, ...] = ()


def honoured(meaning: str, *, off: tuple[object, ...] = ()) -> Key:
    """A key that takes effect; ``off`` matters only when it is the gate of keys that are not there yet."""
    return Key(Support.HONOURED, meaning, off=off)


def inert(meaning: str, why: str) -> Key:
    """A key that is accepted without effect, and why."""
    return Key(Support.INERT, meaning, why)


def not_yet(meaning: str, missing: str = "", *, gate: str = "", off: tuple[object, ...] = ()) -> Key:
    """A key whose effect this release lacks; ``missing`` continues the sentence 'is not in this release yet: ...'."""
    return Key(Support.NOT_YET, meaning, missing, gate, off)
