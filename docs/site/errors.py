"""The page of error messages, from the source: each sentence that the package can raise, by module.

A value in a sentence stands as its name. ``python docs/site/errors.py`` prints the page.
"""

import ast
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from pathlib import Path

MOST = 24  # ways to say one sentence
PACKAGE = Path(__file__).resolve().parents[2] / "deepspeed"
# What to read about the sentences of a module; the longest name counts.
PAGES = {
    "": "quickstart.md",
    "checkpoint": "checkpoints.md",
    "client": "migrating.md",
    "client.activation": "config.md#activation_checkpointing",
    "client.aio_handle": "offload.md",
    "client.comm": "measures.md",
    "client.comm.discovery": "launcher.md",
    "client.data_loader": "checkpoints.md",
    "client.data_position": "checkpoints.md",
    "client.elastic": "elastic.md",
    "client.hybrid_engine": "rl.md",
    "client.lr_schedules": "config.md#scheduler",
    "comm": "launcher.md",
    "comm.hang": "hangs.md",
    "config": "config.md",
    "engine.checkpoint": "checkpoints.md",
    "elasticity": "elastic.md",
    "launcher": "launcher.md",
    "launcher.elastic": "elastic.md",
    "mesh": "parallelism.md",
    "module_inject": "tensor-parallelism.md",
    "moe": "experts.md",
    "monitor": "measures.md",
    "native": "tools.md",
    "observe": "measures.md",
    "optim": "config.md#optimizer",
    "pipe": "pipeline.md",
    "profiling": "measures.md",
    "profiling.timeline": "observe.md",
    "reallocate": "weights.md",
    "sequence": "long-sequences.md",
    "tensor": "tensor-parallelism.md",
    "tensor.generation": "rl.md",
    "tensor.prompts": "rl.md",
    "tier": "offload.md",
    "tools": "tools.md",
    "tools.checkpoint": "checkpoints.md",
    "tools.config": "config.md",
    "tools.report": "observe.md",
    "tools.simulate": "simulator.md",
    "zero": "concepts.md",
    "zero.memory": "offload.md",
}


@dataclass(frozen=True)
class Message:
    """One sentence: where it is raised, as which class, and its text with values as ``{name}``."""

    module: str
    line: int
    kind: str
    text: str


class _Scope:
    """What the names in one module stand for, as far as they are strings: of a function first, then of the module."""

    def __init__(self, tree: ast.Module) -> None:
        self.values: dict[tuple[str, str], list[ast.expr]] = {}
        self.returns: dict[str, list[ast.expr]] = {}
        self.owner: dict[ast.AST, str] = {}
        self._walk(tree, "")

    def _walk(self, node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = f"{owner}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else owner
            self.owner[child] = inner
            if (
                isinstance(child, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr)
                and child.value is not None
            ):
                for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                    pairs = [(target, child.value)]
                    if isinstance(target, ast.Tuple) and isinstance(child.value, ast.Tuple):
                        pairs = list(zip(target.elts, child.value.elts, strict=False))
                    for name, value in pairs:
                        self.values.setdefault((inner, ast.unparse(name)), []).append(value)
            if isinstance(child, ast.Return) and child.value is not None:
                self.returns.setdefault(owner.rpartition(".")[2], []).append(child.value)
            self._walk(child, inner)

    def of(self, node: ast.expr, owner: str) -> list[ast.expr]:
        """The values that a name may have."""
        while True:
            if found := self.values.get((owner, ast.unparse(node))):
                return found
            if not owner:
                return []
            owner = owner.rpartition(".")[0]


def _short(node: ast.expr) -> str:
    """A value's name: the last word of it."""
    words = re.findall(r"[A-Za-z_]\w*", ast.unparse(node))
    plain = [w for w in words if w not in ("self", "str", "repr", "len", "sorted", "join", "map", "for", "in", "if")]
    return (plain or words or ["..."])[-1 if isinstance(node, ast.Attribute) else 0].strip("_")


def _texts(node: ast.expr, scope: _Scope, owner: str, depth: int = 0) -> list[str]:
    """The sentences that an expression may be; none where it holds no words."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp():
            return [t for branch in (node.body, node.orelse) for t in _texts(branch, scope, owner, depth)]
        case ast.BoolOp():
            return [t for part in node.values for t in _texts(part, scope, owner, depth)]
        case ast.BinOp(op=ast.Add() | ast.Mod()):
            left, right = (_texts(side, scope, owner, depth) for side in (node.left, node.right))
            right = right if isinstance(node.op, ast.Add) else []
            return [a + b for a in left or [""] for b in right or [""] if a + b]
        case ast.JoinedStr():
            parts = [
                [str(value.value)] if isinstance(value, ast.Constant) else _inner(value.value, scope, owner, depth)
                for value in node.values
                if isinstance(value, ast.Constant | ast.FormattedValue)
            ]
            return ["".join(words) for words in islice(product(*parts), MOST)]
        case ast.Name() | ast.Attribute() if depth < 4:
            return [t for value in scope.of(node, owner) for t in _texts(value, scope, owner, depth + 1)]
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.expr() as inner]):
            return _texts(inner, scope, owner, depth)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if depth < 4 and name in scope.returns:
            return [t for value in scope.returns[name] for t in _texts(value, scope, f".{name}", depth + 1)]
        case ast.Call(args=[*given]):
            return [t for value in given for t in _texts(value, scope, owner, depth + 1)] if depth < 4 else []
        case ast.List() | ast.Tuple():
            return [t for value in node.elts for t in _texts(value, scope, owner, depth)]
    return []


def _inner(node: ast.expr, scope: _Scope, owner: str, depth: int) -> list[str]:
    """A value within a sentence: what it may say where that is known, else its name."""
    if isinstance(node, ast.IfExp | ast.Constant | ast.Name) and depth < 3:
        known = list(dict.fromkeys(_texts(node, scope, owner, depth + 1)))
        if any(" " in text for text in known):
            return [text for text in known if " " in text]
        if known and (len(known) > 1 or not isinstance(node, ast.Name) or node.id.strip("_").isupper()):
            return [known[0] if len(known) == 1 else f"{{{' | '.join(known)}}}"]
    return [f"{{{_short(node)}}}"]


def _of_module(path: Path) -> Iterator[Message]:
    """Raised exceptions, and the tuples (broken, key, sentence) of the rules between configuration keys."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    scope = _Scope(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            kind = _short(called) if not isinstance(called, ast.Name | ast.Attribute) else ast.unparse(called)
            given = [*node.exc.args, *(k.value for k in node.exc.keywords)] if isinstance(node.exc, ast.Call) else []
            for text in {t for arg in given for t in _texts(arg, scope, scope.owner[node]) if " " in t}:
                yield Message(module, node.lineno, kind.rpartition(".")[2], text)
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and module.startswith("config"):
            *_, key, last = [None, *node.value.elts]
            for text in {t for t in _texts(last, scope, scope.owner[node]) if " " in t} if key is not None else ():
                start = (_texts(key, scope, scope.owner[node]) or ["{key}"])[0]
                yield Message(module, node.lineno, "DeepSpeedConfigError", f"{start} {text}")


@cache
def messages() -> list[Message]:
    """All of them, by module and line."""
    found = {m for path in PACKAGE.rglob("*.py") if "prebuilt" not in path.parts for m in _of_module(path)}
    return sorted(found, key=lambda m: (m.module, m.line, m.text))


def classes() -> dict[str, str]:
    """Each class of errors.py with the first sentence of its docstring."""
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    return {
        node.name: (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _shown(text: str) -> str:
    """HTML, with values in italics."""
    plain = html.escape(re.sub(r"\s+", " ", text).strip(), quote=False)
    plain = re.sub(r"[\[\]*_`]", lambda sign: f"&#{ord(sign[0])};", plain)  # no Markdown in it
    return re.sub(r"\{([^{}]*)\}", r"<var>\1</var>", plain)


def page() -> str:
    """The list, in Markdown: the classes of errors, then the sentences of each part of the package."""
    lines = [
        "## Classes",
        "",
        "| class (`deepspeed.errors`) | it says |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in classes().items()),
        "",
    ]
    section, module, said = "", "", set[str]()
    for message in messages():
        part = message.module.partition(".")[0].replace("__init__", "deepspeed")
        if part != section:
            lines += ["", f"## `{part}`"]
            section = part
        if message.module != module:
            names = [n for n in PAGES if not n or f"{message.module}.".startswith(f"{n}.")]
            where = PAGES[max(names, key=len)]
            title = where.partition("#")[0].removesuffix(".md").replace("quickstart", "quick start")
            lines += ["", f"**`deepspeed.{message.module}`**, see [{title}]({where})", ""]
            module, said = message.module, set[str]()
        line = f"- `{message.kind}`: {_shown(message.text)}"
        lines += [line] if line not in said else []
        said.add(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page())
