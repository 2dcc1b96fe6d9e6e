"""One owner each: parameters are re-pointed in one module, and a unit is written to by its own methods."""

import ast

from tests.budget.source import modules, nodes

PARAM = "deepspeed.zero.param"
UNIT = "deepspeed.zero.unit"


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _written(home: str) -> list[tuple[str, ast.Attribute]]:
    """Every assignment to an attribute, outside ``home``."""
    return [
        (f"{module}:{target.lineno}", target)
        for module, path in modules().items()
        if module != home
        for node in nodes(path)
        for target in _targets(node)
        if isinstance(target, ast.Attribute)
    ]


def test_one_module_points_tensors_elsewhere_and_changes_their_class() -> None:
    """``.data`` of a DTensor must never be written, and nobody else needs to know what is one."""
    attributes = ("data", "_local_tensor", "__class__")
    assert not [place for place, target in _written(PARAM) if target.attr in attributes]


def _is_unit(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("unit", "u", "_unit")


def test_a_unit_is_written_to_by_its_own_methods_only() -> None:
    assert not [f"{place} {target.attr}" for place, target in _written(UNIT) if _is_unit(target.value)]
    changed = {"add", "clear", "pop", "append", "discard", "update", "remove", "setdefault", "extend"}
    calls = [
        f"{module}:{node.lineno} {node.func.value.attr}.{node.func.attr}"
        for module, path in modules().items()
        if module != UNIT
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in changed
        if isinstance(node.func.value, ast.Attribute) and _is_unit(node.func.value.value)
    ]
    assert not calls
