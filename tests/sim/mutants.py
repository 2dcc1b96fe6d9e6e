"""Each call of the package that orders streams, or what the program does with them, taken out in turn: the simulation
must see that it is missing.

python -m tests.sim.mutants [--quick] [ID ...]     prints a line for each; 1 if one is neither seen nor in UNSEEN

First every case runs as it is, and has to be in order; that pass also notes which of the calls it reaches. A mutant
then runs the cases that reach it, until one reports an access without order or fails. A case that failed runs once more
as it is, or its failure might be left over from elsewhere. Code objects are exchanged inside one process, so a mutant
costs one small simulation. ``--quick``: of the calls that are named, and only the cases that should see them.
"""

import ast
import contextlib
import importlib
import inspect
import json
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.sim.unseen import OUTSIDE, SEEN, UNSEEN

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "comm.collectives", "zero.runtime", "zero.sync.order", "zero.unit", "zero.gradients", "zero.optim_view",
    "zero.step", "client.zero.safe_state", "checkpoint.save.content", "tier.arena", "tier.drive", "tier.staging",
    "tier.store", "tier.transfer", "tier.behind", "tier.aio", "engine.engine", "engine.checks", "engine.weights",
    "zero.update.publish", "zero.update.result", "zero.update.policy", "zero.update.inline", "zero.update.tiled",
    "zero.update.staged", "zero.update.speculative", "zero.update.late", "zero.update.selective.policy",
)  # fmt: skip
# What they are called, and what stands for the answer where one is asked for.
ORDERING: dict[str, object] = {
    "wait": True, "wait_event": None, "wait_stream": None, "record": None, "arrive": None, "settle": 0,
    "_finish_fetch": None, "wait_together": None, "begin_step": None, "end_updates": None,
    "synchronize": None, "land_all": None, "_land_all": None, "_wait_for_writes": None, "_wait_for_readers": None,
    "before_update": None,
}  # fmt: skip
_NOTE = "_note_of_mutants"
_WIDTH = 40  # characters of a call's text that name it
LEAST_S, TIMES = 5.0, 10  # seconds of CPU that a mutant may take at least, and how many times what the case takes


class Endless(Exception):
    """A case took much longer than it does."""


class _Calls(ast.NodeTransformer):
    """Finds the calls that order. ``out``: of that number, only what it is called on is left. Else each is noted."""

    def __init__(self, module: str, out: int | None) -> None:
        self.module, self.out = module, out
        self.ids: list[str] = []
        self._where: list[str] = []
        self._seen = Counter[str]()
        self._statement: ast.AST | None = None

    def _inside(self, node: ast.AST) -> ast.AST:
        self._where.append(node.name)  # type: ignore[attr-defined]
        self.generic_visit(node)
        self._where.pop()
        return node

    visit_FunctionDef = visit_ClassDef = _inside

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self._statement = node.value
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        bare = node is self._statement
        text = ast.unparse(node)
        text = text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in ORDERING:
            return node
        name = f"{self.module}:{self._where[-1]}: {text}"
        self._seen[name] += 1
        self.ids.append(name if self._seen[name] == 1 else f"{name} ({self._seen[name]})")
        number = len(self.ids) - 1
        if self.out is None:
            note = ast.Call(ast.Name(_NOTE, ast.Load()), [ast.Constant(self.ids[-1])], [])
            return ast.copy_location(
                ast.Subscript(ast.Tuple([note, node], ast.Load()), ast.Constant(1), ast.Load()), node
            )
        if number != self.out:
            return node
        left = [n for n in ast.walk(node.func.value) if isinstance(n, ast.Call)]
        answer = ast.Constant(ORDERING[node.func.attr])
        if bare:
            return node.func.value if left else ast.copy_location(answer, node)
        return ast.copy_location(answer, node)


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / "deepspeed" / f"{module.replace('.', '/')}.py").read_text())


def calls(module: str) -> list[str]:
    """Each that orders, in the order of the file, as "module:function: text"."""
    finder = _Calls(module, None)
    finder.visit(_tree(module))
    return finder.ids


def modules_of(beginning: str) -> list[str]:
    """Modules of the package whose name begins so, without the package's."""
    package = ROOT / "deepspeed"
    files = [".".join(path.relative_to(package).with_suffix("").parts) for path in sorted(package.rglob("*.py"))]
    return [name for name in files if name.startswith(beginning)]


def unlisted() -> set[str]:
    """Modules that have such calls, and are neither looked at nor said to be no matter of streams."""
    return {m for m in modules_of("") if m not in MODULES and not m.startswith(tuple(OUTSIDE)) and calls(m)}


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


def _bytes_of(code: types.CodeType | None) -> list[object]:
    """What the function and those inside it do."""
    inner = [c for c in (code.co_consts if code else ()) if isinstance(c, types.CodeType)]
    plain = [c for c in (code.co_consts if code else ()) if not isinstance(c, types.CodeType)]
    return [code.co_code if code else b"", plain, *(part for c in inner for part in _bytes_of(c))]


@contextlib.contextmanager
def changed(module: str, out: int | None) -> Iterator[None]:
    """Inside, the functions of ``module`` run without that call; None: every call is noted."""
    made = importlib.import_module(f"deepspeed.{module}")
    tree = ast.fix_missing_locations(_Calls(module, out).visit(_tree(module)))
    file = made.__file__ or ""
    codes = {(c.co_name, c.co_firstlineno): c for c in _codes(compile(tree, file, "exec"))}
    before = {}
    for function in _functions(made, f"deepspeed.{module}"):
        code = function.__code__
        other = codes.get((code.co_name, code.co_firstlineno))
        if other is not None and _bytes_of(other) != _bytes_of(code):
            before[function], function.__code__ = code, other
    assert before, f"no function of {module} has call {out}"
    try:
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def _stop(*_: object) -> None:
    raise Endless("it did not end")


class Bench:
    """Runs ``cases`` of ``tests.sim.matrix``, in that order: as they are, and with a call taken out."""

    def __init__(self, cases: list[str]) -> None:
        self.reached: dict[str, list[str]] = {}  # call -> cases
        self._seconds: dict[str, float] = {}
        for name in cases:
            self._as_it_is(name)

    def _as_it_is(self, name: str) -> None:
        reached: set[str] = set()
        with contextlib.ExitStack() as stack:
            for module in MODULES:
                vars(importlib.import_module(f"deepspeed.{module}"))[_NOTE] = reached.add
                stack.enter_context(changed(module, None))
            begin = time.process_time()
            problems = self._run(name)
        assert not problems, f"{name} is not in order as it is: {problems[0]}"
        self._seconds.setdefault(name, time.process_time() - begin)
        for call in reached:
            cases = self.reached.setdefault(call, [])
            cases += [name] * (name not in cases)

    @staticmethod
    def _run(name: str) -> list[str]:
        from tests.sim.matrix import order_of

        return order_of(name)

    def seen(self, module: str, number: int, call: str, *, first: str = "") -> tuple[str, str]:
        """The case that sees that the call is missing, and how; "" and "" if none does."""
        cases = sorted(self.reached.get(call, ()), key=lambda name: name != first)
        with changed(module, number):
            for name in cases:
                limit = max(LEAST_S, TIMES * self._seconds[name])
                before = signal.signal(signal.SIGPROF, _stop)
                signal.setitimer(signal.ITIMER_PROF, limit, 1.0)  # again, where it is swallowed
                try:
                    problems = self._run(name)
                except Exception as error:
                    signal.setitimer(signal.ITIMER_PROF, 0)
                    how = f"fails: {type(error).__name__}: {error}"
                    break
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
                    signal.signal(signal.SIGPROF, before)
                if problems:
                    return name, problems[0]
            else:
                return "", ""
        self._as_it_is(name)
        return name, how


def main() -> int:
    """With ``--json FILE`` the results go there too: id -> [case, how, cases that reach it]."""
    from tests.sim.matrix import ALONE, CASES

    words = sys.argv[1:]
    out = words.pop(words.index("--json") + 1) if "--json" in words else ""
    wanted = [word for word in words if not word.startswith("--")]
    every = [(module, number, call) for module in MODULES for number, call in enumerate(calls(module))]
    assert len({call for _, _, call in every}) == len(every)
    chosen = [entry for entry in every if not wanted or entry[2] in wanted]
    quick = "--quick" in words
    hints = {call: SEEN.get(call, "") for _, _, call in chosen}
    bench = Bench(sorted({*hints.values()} - {""}) if quick else [*ALONE, *CASES])
    results = {}
    for module, number, call in chosen:
        case, how = bench.seen(module, number, call, first=hints[call])
        results[call] = [case, how, bench.reached.get(call, [])]
        count = len(bench.reached.get(call, []))
        text = f"{case}: {how.splitlines()[0][:200]}" if case else UNSEEN.get(call, "NO REASON IS GIVEN")
        sys.stdout.write(f"{'seen  ' if case else 'UNSEEN'} {call}\n    (reached by {count}) {text}\n")
        sys.stdout.flush()
    if out:
        Path(out).write_text(json.dumps(results, indent=1))
    return int(any(not case and call not in UNSEEN for call, (case, _, _) in results.items()))


if __name__ == "__main__":
    sys.exit(main())
