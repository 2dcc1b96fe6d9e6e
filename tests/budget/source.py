"""The package's sources as syntax trees, for the tests that hold its shape."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deepspeed"


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted module name -> file, for everything under ``deepspeed/``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    """Parsed source."""
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a source, which is walked once for every test."""
    return tuple(ast.walk(tree(path)))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below ``node`` except those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if not _is_type_checking(child):
            yield child
            yield from _running(child)


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Modules that ``module`` imports anywhere, functions included; for ``from a import b`` that is ``a.b`` where that
    is a module.
    """
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in _running(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            names = {f"{base}.{alias.name}" for alias in node.names}
            submodules = names & set(modules())
            found |= submodules
            if len(submodules) < len(names) or not node.names:
                found.add(base)
    return frozenset(found)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(qualified name, lines) of every function, nested ones counted with the outer one and also on their own."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", (child.end_lineno or child.lineno) - child.lineno + 1
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from walk(child, f"{prefix}{child.name}." if named else prefix)

    return walk(tree(path), "")
