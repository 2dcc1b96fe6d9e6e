"""Ranks that differ, each simulated in a process of its own: fake device and data, real agreement over gloo."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed.tools.verify.ranks import RankFailure, RankPool
from tests.sim.together import STEADY, STEPS, rank_of

SURPRISES = ["skips a block", "another order", "one more evaluation", "raises and tries again"]
LIMIT_S = 400.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, time_limit=LIMIT_S) as ranks:
        yield ranks


def check_order(facts: list[dict[str, Any]]) -> None:
    """All ranks gave every communicator the same collectives in the same order, and none raced."""
    for first, second in itertools.pairwise(
        sorted((group, n) for n, rank in enumerate(facts) for group in rank["issued"])
    ):
        if first[0] == second[0]:
            assert facts[first[1]]["issued"][first[0]] == facts[second[1]]["issued"][first[0]], first[0]
    for rank in facts:
        assert sum(map(len, rank["issued"].values())) > 50
        assert rank["messages"] == facts[0]["messages"] and len(rank["messages"]) == STEPS
        assert not rank["error"] and not rank["unordered"]


@pytest.mark.parametrize(
    "name", [SURPRISES[0], *(pytest.param(n, marks=pytest.mark.exhaustive) for n in SURPRISES[1:])]
)
def test_a_surprise_on_one_rank_is_served_in_one_order(pool: RankPool, tmp_path: Path, name: str) -> None:
    facts = pool.run(rank_of, name, "stage3", str(tmp_path / "store"))
    check_order(facts)
    assert facts[0]["messages"][STEADY - 1] == 1 < facts[0]["messages"][STEADY] and facts[0]["differing"] > 0


@pytest.mark.exhaustive
def test_who_waits_for_a_message_goes_on_when_the_last_has_sent_it(pool: RankPool, tmp_path: Path) -> None:
    """Simulated time travels with messages: a rank that evaluated once more was waited for."""
    first, second = pool.run(rank_of, "one more evaluation", "stage3", str(tmp_path / "store"))
    assert first["now"] == pytest.approx(second["now"], rel=0.02)


@pytest.mark.exhaustive
def test_any_route_on_any_rank_is_one_order(pool: RankPool, tmp_path: Path) -> None:
    check_order(pool.run(rank_of, "any route", "stage3", str(tmp_path / "store")))


@pytest.mark.exhaustive
def test_who_waits_for_a_rank_that_is_gone_is_told(tmp_path: Path) -> None:
    with RankPool(2, time_limit=LIMIT_S) as ranks, pytest.raises(RankFailure) as failure:
        ranks.run(rank_of, "dies", "stage3", str(tmp_path / "store"))
    assert failure.value.types == {0: "RuntimeError", 1: "died"}


def test_a_message_that_meets_one_of_another_step_is_an_error_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    """The simulated program never waits for its collectives: it takes the step that the other rank leaves out."""
    for rank in pool.run(rank_of, "one more backward", "stage3", str(tmp_path / "store")):
        assert f"rank 0 has reached the end of the backward after {STEADY + 1} steps" in rank["error"]
        assert f"rank 1 needs 'first' after {STEADY} steps" in rank["error"]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["stage3", "stage2", "hpz", "optimizer-on-host"])
@pytest.mark.parametrize("world", [4, 8])
def test_many_ranks_are_one_order(tmp_path: Path, world: int, case: str) -> None:
    with RankPool(world, time_limit=500) as ranks:
        for name in ("any route", "skips a block"):
            check_order(ranks.run(rank_of, name, case, str(tmp_path / name)))
