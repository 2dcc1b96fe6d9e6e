"""Dotted attribute paths, as in ``model.encoder.layers.0.weight``."""

import operator
from typing import Any


def recursive_getattr(obj: Any, path: str) -> Any:
    """Attribute at the dotted ``path``; AttributeError names the first missing part."""
    return operator.attrgetter(path)(obj)


def recursive_setattr(obj: Any, path: str, value: Any) -> None:
    """Set the attribute at the dotted ``path``; all parts but the last must exist."""
    parent, _, last = path.rpartition(".")
    setattr(recursive_getattr(obj, parent) if parent else obj, last, value)
