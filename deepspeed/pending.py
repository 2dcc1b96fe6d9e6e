"""Documented names that this release does not contain yet: importable, and clear about it when used."""

from collections.abc import Callable
from typing import Any, NoReturn

from deepspeed.errors import NotYetError


def raise_not_yet(name: str, instead: str = "") -> NoReturn:
    """Raise ``NotYetError`` for the public ``name``; ``instead`` says what to use until it exists."""
    hint = f" {instead}" if instead else ""
    raise NotYetError(f"{name} is part of the documented interface but this release does not contain it yet.{hint}")


def pending_function(name: str, instead: str = "") -> Callable[..., Any]:
    """A function that can be imported and mocked, and that raises ``NotYetError`` when called."""

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise_not_yet(name, instead)

    missing.__name__ = missing.__qualname__ = name.rpartition(".")[2]
    missing.__doc__ = f"Not in this release: calling it raises NotYetError. {instead}".rstrip()
    return missing


def pending_class(name: str, instead: str = "") -> type:
    """A class for ``isinstance`` and annotations; nothing is an instance of it, as its construction raises."""
    doc = f"Not in this release: constructing it raises NotYetError. {instead}".rstrip()
    module, _, short = name.rpartition(".")
    return type(short, (), {"__init__": pending_function(name, instead), "__doc__": doc, "__module__": module})
