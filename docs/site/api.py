"""Parts of the API page that are made from the package: methods of the engine, its answers, tables of calls."""

import importlib
import inspect
import re
from typing import Any

ENGINE = "deepspeed.engine.DeepSpeedEngine"
NOT_YET = "Not in this release"


def _engine() -> type:
    return importlib.import_module("deepspeed.engine").DeepSpeedEngine


def public_names() -> dict[str, Any]:
    """What the engine has beyond ``torch.nn.Module``, by name, without what begins with an underscore."""
    kind = _engine()
    own = [c for c in kind.__mro__ if c.__module__.startswith("deepspeed")]
    names = {n for c in own for n in [*vars(c), *getattr(c, "__annotations__", ())] if not n.startswith("_")}
    return {name: inspect.getattr_static(kind, name, None) for name in sorted(names)}


def _text(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _is_answer(thing: Any) -> bool:
    """Whether it is a property, or a method that ``answers`` has made."""
    return isinstance(thing, property) or getattr(getattr(thing, "__code__", None), "co_name", "") == "<lambda>"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("``", "`") for cell in row] for row in rows]
    return "\n".join([f"| {' | '.join(row)} |" for row in [head, ("---",) * len(head), *cells]]) + "\n"


def answers() -> str:
    """A row for each short answer of the engine."""
    rows = [
        (f"`{name}`" if isinstance(thing, property) else f"`{name}()`", _text(thing))
        for name, thing in public_names().items()
        if _is_answer(thing)
    ]
    missing = [f"`{name}`" for name, thing in public_names().items() if _text(thing).startswith(NOT_YET)]
    return (
        f"{_table(('name', 'it is'), rows)}\nNot in this release, and NotYetError when called: {', '.join(missing)}.\n"
    )


def method(name: str) -> str:
    """One method of the engine, inherited or not, with its signature and docstring."""
    options = f'heading: "{name}"\n      heading_level: 4'
    call = inspect.unwrap(public_names()[name])  # of a part of the engine, for what it has from there
    in_part = call.__module__.startswith("deepspeed.engine.") and not call.__qualname__.startswith("DeepSpeedEngine.")
    path = f"{call.__module__}.{call.__qualname__}" if in_part else f"{ENGINE}.{name}"
    return f"::: {path}\n    options:\n      {options}\n"


def _signature(call: Any) -> str:
    try:
        text = str(inspect.signature(call))
    except (TypeError, ValueError):
        return "()"
    text = re.sub(r"(, )?\*, prof=None, log_name=None, debug=None", "", text)
    return re.sub(r"<RedOpType\.(\w+): \d+>", r"\1", re.sub(r" -> .*$", "", text))


def communication() -> str:
    """The calls of ``deepspeed.comm``."""
    comm = importlib.import_module("deepspeed.comm")
    as_torch = "as `torch.distributed` has it"
    rows = []
    for name in comm.__all__:
        call = getattr(comm, name)
        if callable(call) and inspect.isroutine(call):
            text = as_torch if "as ``torch.distributed`` has it" in (call.__doc__ or "") else _text(call)
            text = text.split(". ")[0] if call.__module__.startswith("deepspeed") else as_torch
            text = as_torch if text.startswith("``") else text
            rows.append((f"`{name}{_signature(call)}`", text))
    return _table(("call", "what it does"), rows)


def optimizers() -> str:
    """The classes of ``deepspeed.ops``, with their keywords."""
    rules, muon = (importlib.import_module(f"deepspeed.optim.{name}") for name in ("rules", "muon"))
    names = ("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "FusedLion", "DeepSpeedCPULion", "FusedLamb")
    kinds = [*(getattr(rules, name) for name in names), muon.MuonWithAuxAdam]
    rows = [
        (f"`{k.__name__}`", _text(k).split(". ")[0], ", ".join(f"`{n}={v!r}`" for n, v in k.keywords.items()))
        for k in kinds
    ]
    return _table(("class", "what it is", "keywords beside the parameters"), rows)


def expanded(markdown: str) -> str:
    """``<!-- methods: a b -->`` becomes the methods of the engine of these names."""
    return re.sub(r"<!-- methods: (.*?) -->", lambda m: "\n".join(map(method, m[1].split())), markdown, flags=re.DOTALL)
