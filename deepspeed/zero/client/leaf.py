"""Leaf modules: declared to be gathered as one unit. Correctness never needs the mark; it is accepted and honoured."""

from collections.abc import Callable, Iterable

import torch

_MARK = "_z3_leaf"


def z3_leaf_module(module: torch.nn.Module) -> bool:
    """True when ``module`` is marked."""
    return bool(getattr(module, _MARK, False))


def z3_leaf_parameter(param: torch.nn.Parameter) -> bool:
    """True when ``param`` lies in a module that was marked when the engine was built."""
    return bool(getattr(param, "ds_z3_leaf_module", None))


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All marked modules of ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    """Mark or unmark one module."""
    setattr(model, _MARK, flag)


def _mark(
    model: torch.nn.Module, matches: Callable[[str, torch.nn.Module], bool], *, flag: bool
) -> list[torch.nn.Module]:
    found = [module for name, module in model.named_modules() if matches(name, module)]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _require(found: list[torch.nn.Module], wanted: Iterable[object], what: str, model: torch.nn.Module) -> None:
    if not found:
        names = ", ".join(str(entry) for entry in wanted)
        raise ValueError(
            f"No module of {type(model).__name__} has a {what} among: {names}. See model.named_modules() for "
            "what there is."
        )


def _class_names(cls: type) -> set[str]:
    return {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}


def _by_class(
    model: torch.nn.Module, classes: list[type] | list[str], *, flag: bool, raise_if_not_found: bool
) -> list[torch.nn.Module]:
    if not isinstance(classes, list | tuple | set):
        raise TypeError(f"Leaf modules are given as a list of classes or class names, got {classes!r}.")
    types = tuple(entry for entry in classes if isinstance(entry, type))
    names = {entry for entry in classes if isinstance(entry, str)}
    if len(types) + len(names) < len(set(classes)):
        raise TypeError(f"Leaf modules are given as classes or class names, got {classes!r}.")
    found = _mark(
        model, lambda _, module: isinstance(module, types) or bool(names & _class_names(type(module))), flag=flag
    )
    if raise_if_not_found:
        _require(found, classes, "class", model)
    return found


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: list[type] | list[str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Mark the modules of the given classes (or class names, short or with their module); returns them.

    Raises ValueError when nothing matches.
    """
    return _by_class(model, leaf_module_classes, flag=True, raise_if_not_found=raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: list[type] | list[str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Take the mark from the modules of the given classes; returns them. Raises ValueError when nothing matches."""
    return _by_class(model, leaf_module_classes, flag=False, raise_if_not_found=raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module, leaf_module_names: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Mark (or with ``flag=False`` unmark) modules by their full name in ``model``. Raises ValueError when nothing
    matches.
    """
    wanted = set(leaf_module_names)
    found = _mark(model, lambda name, _: name in wanted, flag=flag)
    if raise_if_not_found:
        _require(found, leaf_module_names, "name", model)
    return found


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module, leaf_module_suffixes: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Mark modules whose name ends in one of the suffixes, at a dot. Raises ValueError when nothing matches."""
    wanted = tuple(leaf_module_suffixes)
    found = _mark(
        model, lambda name, _: any(name == suffix or name.endswith(f".{suffix}") for suffix in wanted), flag=flag
    )
    if raise_if_not_found:
        _require(found, leaf_module_suffixes, "name ending", model)
    return found
