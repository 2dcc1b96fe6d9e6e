"""Every name, argument, default and answer of the interface of DeepSpeed 0.19 that ``tests/data/public_api.txt`` lists
is the same, or is one of the differences that ``docs/migrating.md`` names.
"""

import ast
import fnmatch
import importlib
import inspect
import json
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.client.absent import INSTEAD
from deepspeed.errors import NotYetError
from tests.harness.rows import for_each

_ROOT = Path(__file__).resolve().parents[2]
_API = _ROOT / "tests/data/public_api.txt"
_DOC = _ROOT / "docs/migrating.md"
_LINE = re.compile(r"(?P<path>[\w.]+)(?:\((?P<parameters>.*?)\))?(?: -> (?P<answer>.+))?")


class Entry(NamedTuple):
    """One line: ``holder`` is a section ("module deepspeed.zero"), ``parameters`` None where it is only a name."""

    kind: str
    holder: str
    path: str
    parameters: str | None
    answer: str | None

    @property
    def name(self) -> str:
        """What the table of differences calls it."""
        holder = "engine" if self.kind == "engine" else self.holder.removeprefix("deepspeed.")
        return f"{holder}.{self.path}".removeprefix("deepspeed.")


def _entries() -> Iterator[Entry]:
    kind, holders = "", [""]
    for line in _API.read_text().splitlines():
        if line.startswith("["):
            kind, *holders = line.strip("[]").split()
            if kind == "module":
                yield Entry(kind, holders[0], "", None, None)
        elif line and not line.startswith("#"):
            match = _LINE.fullmatch(line)
            assert match is not None, line
            for holder in holders:
                yield Entry(kind, holder, *match.group("path", "parameters", "answer"))


ENTRIES = tuple(_entries())


def _without_order(value: Any) -> Any:
    """A default as it is compared: sequences as tuples, empty ones as None, members of an enum as their values."""
    value = getattr(value, "value", value)
    return (tuple(value) or None) if isinstance(value, (list, tuple, dict)) else value


def _wanted(text: str) -> list[tuple[str, Any]]:
    """(name, default) of each parameter; ``*`` and ``**`` stand for those that take the rest."""
    call = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(call, ast.FunctionDef)
    given = call.args
    plain = [*given.posonlyargs, *given.args]
    without = [inspect.Parameter.empty] * (len(plain) - len(given.defaults))
    defaults = without + [ast.literal_eval(d) for d in given.defaults]
    named = [(a.arg, d) for a, d in zip(plain, defaults, strict=True)]
    named += [("*", None)] if given.vararg else []
    named += [
        (a.arg, inspect.Parameter.empty if d is None else ast.literal_eval(d))
        for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return named + ([("**", None)] if given.kwarg else [])


def _parameters_differ(value: Any, text: str) -> str | None:
    try:
        actual = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError) as error:
        return f"cannot be called: {error}"
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    got = [(stars.get(p.kind, p.name), p.default) for p in actual if p.name != "self"]
    wanted = _wanted(text)
    rest = [(name, default) for name, default in got[len(wanted) :] if name not in stars.values()]
    if any(default is inspect.Parameter.empty for _, default in rest):
        return f"asks for more: {rest}"
    # further keywords of ours may stand before a "**" of both
    if wanted and wanted[-1][0] == "**" and got and got[-1][0] == "**":
        got = [*got[: len(wanted) - 1], got[-1]]
    for (name, default), (mine, other) in zip(wanted, [*got, *[("nothing", None)] * len(wanted)], strict=False):
        free = default in (..., inspect.Parameter.empty) or name.startswith("*")
        same = free or _without_order(default) == _without_order(other)
        if (name != mine and not name.startswith("_")) or not same:
            return f"{name}={default!r} is {mine}={other!r}"
    return None


def _is_pending(value: Any) -> bool:
    return callable(value) and (inspect.getdoc(value) or "").startswith("Not in this release")


def difference(entry: Entry, holder: Callable[[Entry], Any]) -> str | None:
    """What differs, or None."""
    try:
        value = holder(entry)
    except ImportError as error:
        return None if entry.path else f"missing: {error}"  # once for a module and its names
    try:
        value = operator.attrgetter(entry.path)(value) if entry.path else value
    except AttributeError as error:
        return f"missing: {error}"
    if _is_pending(value):
        with pytest.raises(NotYetError):
            value()
        return "raises NotYetError"
    if entry.parameters is not None and (text := _parameters_differ(value, entry.parameters)):
        return text
    if entry.answer is not None:
        answer = value()
        if not {str(answer), *(kind.__name__ for kind in type(answer).__mro__)} & set(entry.answer.split("|")):
            return f"answers {answer!r}, not {entry.answer}"
    return None


def _loss(output: torch.Tensor, _labels: Any) -> torch.Tensor:
    return output.sum()


def make_engine(kind: str) -> Any:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
    model: nn.Module = nn.Linear(4, 2)
    if kind != "infer":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    if kind == "pipe":
        model = deepspeed.PipelineModule([model], num_stages=1, loss_fn=_loss)
    else:
        config["zero_optimization"] = {"stage": 3 if kind == "infer" else int(kind)}
    return deepspeed.initialize(model=model, config=config)[0]


@pytest.fixture(scope="module")
def holder() -> Iterator[Callable[[Entry], Any]]:
    """What holds the names of an entry: a module, a class, or an engine, of which each kind is made once."""
    engines: dict[str, Any] = {}

    def find(entry: Entry) -> Any:
        if entry.kind == "engine":
            if entry.holder not in engines:
                engines[entry.holder] = make_engine(entry.holder)
            return engines[entry.holder]
        if entry.kind == "class":
            module, _, name = entry.holder.rpartition(".")
            return getattr(importlib.import_module(module), name)
        if entry.holder == "deepspeed.checkpointing":  # an attribute, no module
            return deepspeed.checkpointing
        return importlib.import_module(entry.holder)

    yield find
    for engine in engines.values():
        engine.destroy()


def _listed() -> list[str]:
    """The names of the first column of the tables under "Names that differ", "*" for any."""
    section = _DOC.read_text().split("## Names that differ", 1)[1].split("\n## ", 1)[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("|") and "`" in row]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_name_is_the_same_or_a_listed_difference(holder: Callable[[Entry], Any]) -> None:
    found = {e.name.rstrip("."): text for e in ENTRIES if (text := difference(e, holder)) is not None}
    listed = _listed()
    covered = {name: [x for x in listed if fnmatch.fnmatch(name, x) or name.startswith(f"{x}.")] for name in found}
    unlisted = [f"{name}: {found[name]}" for name, patterns in covered.items() if not patterns]
    assert unlisted == [], "\n".join(["not in docs/migrating.md:", *unlisted])
    stale = sorted(set(listed) - {x for patterns in covered.values() for x in patterns})
    assert stale == [], f"docs/migrating.md names as different what is the same: {stale}"


def test_every_key_of_the_zero_block_has_its_reader() -> None:
    keys = json.loads((_ROOT / "tests/data/config_keys.json").read_text())
    engine = make_engine("2")
    paths = [row["path"] for row in keys if row["path"].startswith("zero_optimization.")]
    names = {path.split(".")[1].removeprefix("stage3_") for path in paths}
    fields = set(type(engine._config.zero).model_fields)
    assert len(names & fields) > 25
    assert [name for name in names & fields if not callable(getattr(engine, f"zero_{name}", None))] == []
    engine.destroy()


@for_each("name", INSTEAD)
def test_a_module_that_is_absent_says_what_to_use_instead(name: str) -> None:
    for module in (f"deepspeed.{name}", f"deepspeed.{name}.part"):
        with pytest.raises(ModuleNotFoundError, match="is not part of this package. Instead: ") as caught:
            importlib.import_module(module)
        assert INSTEAD[name] in str(caught.value) and caught.value.name in module
    owner = importlib.import_module(f"deepspeed.{name}".rpartition(".")[0])
    assert not hasattr(owner, name.rpartition(".")[2])
    assert f"| `{name}` | {INSTEAD[name]} |" in _DOC.read_text()
