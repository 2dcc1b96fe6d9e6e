"""Each statement of the package that orders streams, taken out in turn: the simulation must see that it is missing.

python -m tests.sim.mutants [MODULE[:NUMBER] ...]     prints a line for each; 1 if one is not seen
"""

import ast
import contextlib
import importlib
import inspect
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "deepspeed.comm.collectives",
    "deepspeed.zero.runtime",
    "deepspeed.zero.unit",
    "deepspeed.zero.gradients",
    "deepspeed.zero.optim_view",
    "deepspeed.tier.drive",
    "deepspeed.tier.staging",
)
_ORDERING = ("wait", "wait_event", "wait_stream", "record", "arrive", "settle")
# In this order, until one sees it.
CASES = (
    "stage3", "stage2", "stage1-accumulated", "mics", "both-on-host", "optimizer-on-host-accumulated", "both-on-drive",
    "no-overlap", "hpz", "skipping", "held", "hpz-parameters-on-host", "hpz-accumulated", "skipping-on-drive",
    "stage1-optimizer-on-drive",
)  # fmt: skip
# Statements whose loss no order of accesses can show: their text -> why.
UNSEEN: dict[str, str] = {}


class _Taker(ast.NodeTransformer):
    """Takes out statement ``number`` of those that wait; None only counts them."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.statements: list[ast.stmt] = []

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _ORDERING:
            self.statements.append(node)
            if len(self.statements) - 1 == self.number:
                return ast.copy_location(ast.Pass(), node)
        return node


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())


def statements(module: str) -> list[str]:
    """Each that waits, in order."""
    taker = _Taker(None)
    taker.visit(_tree(module))
    return [ast.unparse(statement) for statement in taker.statements]


def _functions(owner: object, module: str) -> Iterator[types.FunctionType]:
    for value in list(vars(owner).values()):
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if inspect.isclass(value) and value.__module__ == module:
            yield from _functions(value, module)
        elif callable(value) and getattr(value, "__module__", None) == module:
            function = inspect.unwrap(value)
            if isinstance(function, types.FunctionType):
                yield function


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Codes of a module's functions and of its classes' methods, not of what is inside these."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:
                yield constant
            else:
                yield from _codes(constant)


@contextlib.contextmanager
def left_out(module: str, number: int) -> Iterator[None]:
    """Inside, the functions of ``module`` run without that statement."""
    made = importlib.import_module(module)
    tree = ast.fix_missing_locations(_Taker(number).visit(_tree(module)))
    changed = {(c.co_name, c.co_firstlineno): c for c in _codes(compile(tree, made.__file__ or "", "exec"))}
    before = {}
    for function in _functions(made, module):
        code = function.__code__
        other = changed.get((code.co_name, code.co_firstlineno))
        if other is not None and other.co_code != code.co_code or _inner(other) != _inner(code):
            before[function], function.__code__ = code, other
    assert before, f"no function of {module} has statement {number}"
    try:
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def _inner(code: types.CodeType | None) -> list[bytes]:
    """What the functions inside do."""
    inner = [c for c in (code.co_consts if code else ()) if isinstance(c, types.CodeType)]
    return [part for c in inner for part in (c.co_code, *_inner(c))]


def seen(module: str, number: int) -> str:
    """How the simulation sees that the statement is missing; "" if it does not."""
    from tests.sim.matrix import run

    with left_out(module, number):
        for name in CASES:
            try:
                problems = run(name)["unordered"]
            except Exception as error:
                return f"{name} fails: {type(error).__name__}: {error}"
            if problems:
                return f"{name}: {problems[0].splitlines()[0]}"
    return ""


def main() -> int:
    if sys.argv[1:2] == ["--json"]:
        wanted, out = list(MODULES), sys.argv[2]
    else:
        wanted, out = sys.argv[1:] or list(MODULES), ""
    results: dict[str, str] = {}
    for module in MODULES:
        for number, text in enumerate(statements(module)):
            if module in wanted or f"{module}:{number}" in wanted:
                how = seen(module, number)
                results[f"{module}:{number} {text}"] = how
                sys.stdout.write(f"{'seen' if how else 'UNSEEN'} {module}:{number} {text}\n    {how[:200]}\n")
                sys.stdout.flush()
    if out:
        Path(out).write_text(json.dumps(results))
    return int(any(not how and name.partition(" ")[2] not in UNSEEN for name, how in results.items()))


if __name__ == "__main__":
    sys.exit(main())
