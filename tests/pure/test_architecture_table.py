"""docs/architecture.md shows the rows that ``make_plan`` really makes."""

from pathlib import Path

import pytest

from deepspeed.config import load_config
from deepspeed.zero.plan import StatePlan, make_plan

TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
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
