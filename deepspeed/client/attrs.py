"""Dotted attribute paths, as in ``model.encoder.layers.0.weight``, methods that read one or call a part, lazy names."""

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def recursive_getattr(obj: Any, path: str) -> Any:
    """Attribute at the dotted ``path``; AttributeError names the first missing part."""
    return operator.attrgetter(path)(obj)


def recursive_setattr(obj: Any, path: str, value: Any) -> None:
    """Set the attribute at the dotted ``path``; all parts but the last must exist."""
    parent, _, last = path.rpartition(".")
    setattr(recursive_getattr(obj, parent) if parent else obj, last, value)


def replace_attribute(obj: Any, name: str, value: Any, back: ExitStack) -> None:
    """Set an attribute of ``obj`` itself until ``back`` ends, which leaves what a client has put in its place since."""
    before = vars(obj).get(name)

    def undo() -> None:
        if vars(obj).get(name) is value:
            delattr(obj, name)
            if before is not None:
                setattr(obj, name, before)

    back.callback(undo)
    setattr(obj, name, value)


class _Answer(NamedTuple):
    read: Callable[[Any], Any]
    text: str | None

    def __set_name__(self, owner: type, name: str) -> None:
        read = self.read
        answer = lambda self: read(self)  # noqa: E731 - it gets its name here
        answer.__name__, answer.__qualname__, answer.__doc__ = name, f"{owner.__qualname__}.{name}", self.text
        setattr(owner, name, answer)


def answers(getter: str | Callable[[Any], Any], text: str | None = None) -> Any:
    """A method, with the docstring ``text``, that answers with what its object has at the path, or ``getter(self)``."""
    return _Answer(operator.attrgetter(getter) if isinstance(getter, str) else getter, text)


def attribute_of(holder: str | Callable[[Any], Any], name: str, text: str | None = None) -> Any:
    """Make a property that is the attribute ``name`` of what its object has at the path, or of ``holder(self)``."""
    of = operator.attrgetter(holder) if isinstance(holder, str) else holder
    return property(lambda self: getattr(of(self), name), lambda self, value: setattr(of(self), name, value), doc=text)


def of_part(part: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls ``method`` of the object's ``part``, with its signature and docstring."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, part), *args, **kwargs)

    code = call.__code__  # type: ignore[attr-defined]
    call.__code__ = code.replace(co_name=method.__name__)  # type: ignore[attr-defined]  # as stacks show it
    return call


def loads_names(package: str, places: Callable[[], Mapping[str, Any]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package`` (PEP 562) that takes names from ``places()`` at their first use.

    A value of ``places`` that is a text names the module that has the name. AttributeError for every other name.
    """

    def load(name: str) -> Any:
        exports = places() if name == "__all__" or not name.startswith("_") else {}
        if name != "__all__" and name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        value = [*exports] if name == "__all__" else exports[name]
        value = getattr(import_module(value), name) if isinstance(value, str) else value
        setattr(sys.modules[package], name, value)
        return value

    return load
