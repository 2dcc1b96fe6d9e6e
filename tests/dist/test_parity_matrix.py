"""Stage x model x bucket x overlap: losses, gradients, norms and parameters equal plain one-process AdamW within 1e-6.

Why the optimizer has eps = lr: see [Note: the gate's Adam settings] in deepspeed/tools/verify/reference.py.
"""

from typing import Any

import pytest

from deepspeed.tools.verify import TOLERANCE
from deepspeed.tools.verify.grads import BUCKETS, Cell, Errors, run_cell
from tests.harness.cases import case_named
from tests.harness.pool import RankPool
from tests.harness.training import STAGES

# Each model, and the stage at which ``make test`` runs it: at none, where test_verify_training.py has the loop, or
# test_dtypes.py the buffers.
MATRIX = {
    "plain": 0,
    "accumulation": 1,
    "clipping": 3,
    "checkpoint_reentrant": 3,
    "checkpoint_nonreentrant": 3,
    "used_twice": 0,
    "tied": 0,
    "unused": 0,
    "frozen": 2,
    "conditional": 2,
    "two_losses": None,
    "retain_graph": None,
    "manual": None,
    "manual_accumulation": 0,
    "by_hand": 3,
    "by_hand_twice": None,
}
CORNERS = {
    "functional_tied": 3,
    "odd_shapes": 3,
    "mixed_dtype": 3,
    "shared_module": 3,
    "containers": 3,
    "no_grad_first": 3,
    "frozen_checkpointed": 3,
    "dropout_checkpointed": 3,
    "everything": None,
    "rotary": None,
    "batch_norm": 3,
    "constants": None,
    "doubles": 3,
}


def rows_of(cases: dict[str, int | None]) -> list[str]:
    return [f"{name}-{stage}" for name, stage in cases.items() if stage is not None]


# Bucket and overlap. Every commit runs the two that differ most; the other two add least.
APART = (("tiny", True), ("huge", False))
BETWEEN = (("tiny", False), ("huge", True))
OVERLAPPED = tuple((bucket, True) for bucket in BUCKETS)


def run(cell: Cell) -> tuple[Cell, Errors]:
    """Train the case that a cell names on the ranks of this process group."""
    return cell, run_cell(cell, case=case_named(cell.model))


def sweep(case: str, stage: int, settings: tuple[tuple[str, bool], ...]) -> list[tuple[Cell, Errors]]:
    """Run one model at one stage under each (bucket, overlap) of ``settings``."""
    return [run(Cell(case, stage=stage, bucket=bucket, overlap=overlap)) for bucket, overlap in settings]


def check(per_rank: list[list[tuple[Cell, Errors]]]) -> None:
    """Every cell on every rank is within the tolerance; the message is the table of those that are not."""
    bad = [
        f"rank {rank} {' '.join(cell.label())}: {errors}"
        for rank, results in enumerate(per_rank)
        for cell, errors in results
        if not max(errors.values())[0] <= TOLERANCE
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.in_make_test(*rows_of(MATRIX))
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", MATRIX)
def test_parity(pool2: RankPool, case: str, stage: int) -> None:
    check(pool2.run(sweep, case, stage, APART))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", MATRIX)
def test_parity_of_the_settings_between(pool2: RankPool, case: str, stage: int) -> None:
    check(pool2.run(sweep, case, stage, BETWEEN))


@pytest.mark.in_make_test(*rows_of(CORNERS))
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CORNERS)
def test_corner(pool2: RankPool, case: str, stage: int) -> None:
    check(pool2.run(sweep, case, stage, OVERLAPPED))


@pytest.mark.in_make_test("everything-3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", ["conditional", "unused", "everything", "tied"])
def test_three_ranks(pool3: RankPool, case: str, stage: int) -> None:
    """Nothing divides by three: every shard is padded."""
    check(pool3.run(sweep, case, stage, OVERLAPPED))


@pytest.mark.in_make_test("plain-1", "everything-3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", ["plain", "everything"])
def test_one_rank(pool1: RankPool, case: str, stage: int) -> None:
    check(pool1.run(sweep, case, stage, OVERLAPPED))


@pytest.mark.in_make_test("accumulation-shard_groups", "accumulation-secondary_shards")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=["shard_groups", "secondary_shards"]
)
@pytest.mark.parametrize("case", ["plain", "accumulation", "conditional"])
def test_two_level_sharding(pool4: RankPool, case: str, zero: dict[str, int]) -> None:
    """Parameters sharded within groups of two and replicated (or sharded) across them, on four ranks."""
    cell = Cell(case, stage=3, bucket="tiny", overlap=True, config={"zero_optimization": zero})
    check([[result] for result in pool4.run(run, cell)])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "keys", [{"gradient_predivide_factor": 3.0}, {"prescale_gradients": True}], ids=["predivide", "prescale"]
)
@pytest.mark.parametrize("stage", STAGES)
def test_who_divides_does_not_matter(pool2: RankPool, stage: int, keys: dict[str, Any]) -> None:
    """Gradients, norm and clipping are those of the mean, whatever part of the ranks' number is divided out before the
    reduction.
    """
    config = {**keys, "zero_optimization": {"reduce_scatter": False}}
    cell = Cell("clipping", stage=stage, bucket="huge", overlap=stage > 1, config=config)
    check([[result] for result in pool2.run(run, cell)])
