"""Dotted attribute paths, as in ``model.encoder.layers.0.weight``, and methods that only read one."""

import operator
from collections.abc import Callable
from typing import Any


def recursive_getattr(obj: Any, path: str) -> Any:
    """Attribute at the dotted ``path``; AttributeError names the first missing part."""
    return operator.attrgetter(path)(obj)


def recursive_setattr(obj: Any, path: str, value: Any) -> None:
    """Set the attribute at the dotted ``path``; all parts but the last must exist."""
    parent, _, last = path.rpartition(".")
    setattr(recursive_getattr(obj, parent) if parent else obj, last, value)


def answers(what: str | Callable[[Any], Any]) -> Any:
    """A method that answers with what its object holds at the path ``what``, or with that function of it."""
    read = operator.attrgetter(what) if isinstance(what, str) else what
    return lambda self: read(self)
