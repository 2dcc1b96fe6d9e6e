"""Names are the field's terms, and a name means one thing."""

import ast
from collections import defaultdict

from tests.budget.source import PACKAGE, modules, nodes

# Words that say nothing of what a thing is.
DIALECT = {"found", "own", "said", "told", "here", "there", "held"}


def _bound(node: ast.AST) -> str | None:
    """The name that ``node`` gives to something."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.Attribute):
        return node.attr if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.arg):
        return node.arg
    return getattr(node, "name", None) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias) else None


def test_no_house_dialect() -> None:
    named = [
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)} {name}"
        for path in modules().values()
        for node in nodes(path)
        if (name := _bound(node)) is not None and name.lstrip("_") in DIALECT
    ]
    assert not named, "\n".join(named)


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in modules().values():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: where for name, where in homes.items() if len(where) > 1}
