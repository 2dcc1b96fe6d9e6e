"""Leaf modules: declared to be gathered as one unit. Correctness never needs the mark; it is accepted and honoured."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

_Labels = str | Iterable[str]


def z3_leaf_module(module: nn.Module) -> bool:
    """Tell whether ``module`` is marked."""
    return bool(getattr(module, "_z3_leaf", False))


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Tell whether ``param`` lies in a module that was marked when the engine was built."""
    return bool(getattr(param, "ds_z3_leaf_module", None))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return all marked modules of ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark one module."""
    model._z3_leaf = flag  # type: ignore[assignment]


def _mark(
    model: nn.Module, matches: Callable[[str, nn.Module], bool], *, flag: bool, required: tuple[str, Any] | None
) -> list[nn.Module]:
    """Mark (or unmark) modules that match. With ``required`` (kind, values asked for) ValueError if none does."""
    chosen = [module for name, module in model.named_modules() if matches(name, module)]
    for module in chosen:
        set_z3_leaf_module(module, flag)
    if required is not None and not chosen:
        raise ValueError(
            f"No module of {type(model).__name__} has a {required[0]} among: {', '.join(map(str, required[1]))}. "
            "See model.named_modules() for what there is."
        )
    return chosen


def _by_class(model: nn.Module, classes: Any, *, flag: bool, required: bool) -> list[nn.Module]:
    classes = [classes] if isinstance(classes, str | type) else classes
    if not isinstance(classes, list | tuple | set) or not all(isinstance(entry, type | str) for entry in classes):
        raise TypeError(f"Leaf modules are given as a list of classes or class names, got {classes!r}.")
    types = tuple(entry for entry in classes if isinstance(entry, type))

    def matches(_: str, module: nn.Module) -> bool:
        short, long = type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"
        return isinstance(module, types) or short in classes or long in classes

    return _mark(model, matches, flag=flag, required=("class", classes) if required else None)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type] | list[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of the given classes (or their names, short or with the module's); returns them.

    Raises ValueError when nothing matches and ``raise_if_not_found``.
    """
    return _by_class(model, leaf_module_classes, flag=True, required=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type] | list[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark from the modules of the given classes; returns them. Raises ValueError when nothing matches."""
    return _by_class(model, leaf_module_classes, flag=False, required=raise_if_not_found)


def _by_label(
    model: nn.Module, kind: str, labels: _Labels, of: Callable[[str, str], bool], *, flag: bool, needed: bool
) -> tuple[list[nn.Module], list[str]]:
    wanted = [labels] if isinstance(labels, str) else list(labels)
    required = (kind, wanted) if needed else None
    chosen = _mark(model, lambda name, _: any(of(name, label) for label in wanted), flag=flag, required=required)
    names = [name for name, _ in model.named_modules()]
    return chosen, [label for label in wanted if not any(of(name, label) for name in names)]


def set_z3_leaf_modules_by_name(
    model: nn.Module, leaf_module_names: str | Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark (with ``flag=False`` unmark) modules by their full name in ``model``.

    Returns them, and the names that no module has. ValueError when nothing matches and ``raise_if_not_found``.
    """
    return _by_label(model, "name", leaf_module_names, str.__eq__, flag=flag, needed=raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, leaf_module_suffixes: str | Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose name ends in one of the suffixes, at a dot; returns them and the suffixes that fit no name.

    Raises ValueError when nothing matches and ``raise_if_not_found``.
    """

    def ends(name: str, suffix: str) -> bool:
        return f".{name}".endswith(f".{suffix}")

    return _by_label(model, "name ending", leaf_module_suffixes, ends, flag=flag, needed=raise_if_not_found)
