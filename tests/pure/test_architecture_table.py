"""What docs/architecture.md shows is there: the rows that ``make_plan`` makes, moves of states, nouns and proofs."""

import contextlib
import re
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.config import load_config
from deepspeed.errors import InvalidStateError
from deepspeed.zero.plan import StatePlan, make_plan
from deepspeed.zero.unit import Unit, UnitState
from deepspeed.zero.window import GradientWindow, GradState

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
RANKS = 4
ROWS = {
    "stage 0": ({"stage": 0}, False),
    "stage 1": ({"stage": 1}, False),
    "stage 2": ({"stage": 2}, False),
    "stage 3": ({"stage": 3}, False),
    "stage 3, parameters within `param_persistence_threshold`": ({"stage": 3}, True),
    "stage 3 with `mics_shard_size` below the number of ranks (inner, outer axis)": (
        {"stage": 3, "mics_shard_size": 2},
        False,
    ),
    "stage 3 with `zero_hpz_partition_size` below the number of ranks (inner, outer axis)": (
        {"stage": 3, "zero_hpz_partition_size": 2},
        False,
    ),
}


def _spread(state: StatePlan) -> str:
    return " ".join(way.value for way in state.spread)


@pytest.mark.parametrize("label", ROWS)
def test_the_documented_row_is_the_planned_row(label: str) -> None:
    zero, persistent = ROWS[label]
    cells = next(
        [c.strip() for c in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith(f"| {label} |")
    )
    config = load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, world_size=RANKS)
    row = make_plan(config, RANKS).row(trainable=True, persistent=persistent)
    assert row.grad is not None and row.optim is not None
    assert [_spread(row.param), _spread(row.grad), _spread(row.optim)] == cells[1:4]
    assert row.reduce_each_backward == cells[4].startswith("yes")


def _cells(section: str) -> list[list[str]]:
    """The rows below the first one of the table of a section."""
    lines = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]


def test_every_noun_is_defined_where_the_page_says() -> None:
    for names, places, _ in _cells("2. The nouns"):
        paths = [ROOT / "deepspeed" / place for place in re.findall(r"`([\w/.]+)`", places)]
        source = "\n".join(f.read_text() for p in paths for f in (p.rglob("*.py") if p.is_dir() else [p]))
        missing = [n for n in re.findall(r"`(\w+)`", names) if not re.search(rf"^(class|def) {n}\b", source, re.M)]
        assert paths and not missing, (names, missing)


def test_every_invariant_has_its_test_files() -> None:
    for number, _, proof in _cells("4. Invariants"):
        files = re.findall(r"`(test_\w+\.py)`", proof)
        assert files and all((ROOT / "tests" / "dist" / file).is_file() for file in files), number


@pytest.mark.parametrize(("states", "move"), [(UnitState, Unit._move), (GradState, GradientWindow.move)])
def test_states_move_as_the_page_says_and_not_otherwise(states: Any, move: Any) -> None:
    table = re.search(rf"^    {states.__name__} .*(\n {{16}}.*)*", TEXT, re.M)
    assert table is not None
    moves = {pair for chain in re.findall(r"\w+(?: -> \w+)+", table[0]) for pair in pairwise(chain.split(" -> "))}
    for before, after in product(states, states):
        legal = {(before.name, after.name), ("any", after.name)} & moves or (states is GradState and before is after)
        thing: Any = SimpleNamespace(name="layer", _unit="layer", state=before)
        refused = pytest.raises(InvalidStateError, match=f"unit layer: .* from {before.value} to {after.value}")
        with contextlib.nullcontext() if legal else refused:
            move(thing, after)
        assert thing.state is (after if legal else before)
