"""Core lists, the machine's cores and memory nodes as the kernel shows them, and fair shares of them."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.launcher.affinity import (
    RankCores,
    parse_core_list,
    plan_cores,
    read_topology,
    share_cores,
    usable_cores,
)
from deepspeed.launcher.job import Job


def job(**fields: object) -> Job:
    return Job(world={"localhost": (0, 1)}, script="s.py", **fields)


@pytest.fixture
def two_sockets(tmp_path: Path) -> str:
    """Eight physical cores on two nodes, two hyperthreads each (c and c + 8), and a third node that has only memory."""
    for cpu in range(16):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    (tmp_path / "cpu/cpufreq").mkdir()
    for node, cpus in enumerate(("0-3,8-11\n", "4-7,12-15\n", "\n")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(cpus)
    return str(tmp_path)


def test_core_list() -> None:
    assert parse_core_list("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_core_list("7") == [7]


@pytest.mark.parametrize(
    "text", ["", " 1", "1, 2", "1,", "a", "3-1", "2,1", "0-3,3", "1-", "-1", "0x1", "1--2", "0-99999999", "\u0661"]
)
def test_malformed_core_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected ascending") as caught:
        parse_core_list(text)
    assert isinstance(caught.value, DeepSpeedConfigError)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_every_ascending_list_reads_back(cores: set[int]) -> None:
    assert parse_core_list(",".join(map(str, sorted(cores)))) == sorted(cores)


def test_topology(two_sockets: str) -> None:
    topology = read_topology(two_sockets)
    assert topology.cores == tuple((core, core + 8) for core in range(8))
    assert dict(topology.nodes) == {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)}


def test_one_allowed_cpu_per_physical_core(two_sockets: str, tmp_path: Path) -> None:
    topology = read_topology(two_sockets)
    assert usable_cores(topology, range(16)) == list(range(8))
    assert usable_cores(topology, {9, 2, 10, 4}) == [2, 9, 4]  # node by node
    assert usable_cores(read_topology(str(tmp_path / "nothing")), {3, 1}) == [1, 3]


def test_shares_and_memory_nodes(two_sockets: str) -> None:
    nodes = read_topology(two_sockets).nodes
    assert share_cores(range(8), 2, nodes) == [RankCores((0, 1, 2, 3), (0,)), RankCores((4, 5, 6, 7), (1,))]
    assert share_cores(range(8), 3, nodes) == [
        RankCores((0, 1), (0,)),
        RankCores((2, 3), (0,)),
        RankCores((4, 5), (1,)),
    ]
    assert share_cores([2, 3, 4, 5], 1, nodes) == [RankCores((2, 3, 4, 5), ())]
    assert share_cores([0, 1], 1, {0: (0, 1), 1: (0, 1)}) == [
        RankCores((0, 1), (0, 1))
    ]  # memory tiers of the same cores
    with pytest.raises(AssertionError, match="3 ranks cannot be bound to 2 core"):
        share_cores([0, 1], 3, nodes)


@given(st.lists(st.integers(0, 300), unique=True, min_size=1).map(sorted), st.integers(1, 40))
def test_shares_are_equal_and_disjoint(cores: list[int], ranks: int) -> None:
    if ranks > len(cores):
        return
    shares = [share.cores for share in share_cores(cores, ranks, {})]
    assert {len(share) for share in shares} == {len(cores) // ranks}
    assert sum(shares, ()) == tuple(cores[: len(cores) // ranks * ranks])


def test_plan(two_sockets: str) -> None:
    here = {"root": two_sockets, "allowed": range(16), "env": {}}
    assert plan_cores(job(), 2, **here) is None
    assert plan_cores(job(bind_cores=True), 2, **here) == [RankCores((0, 1, 2, 3), (0,)), RankCores((4, 5, 6, 7), (1,))]
    assert plan_cores(job(core_list="4-7"), 2, **here) == [RankCores((4, 5), (1,)), RankCores((6, 7), (1,))]
    with pytest.raises(UsageError, match=r"core\(s\) \[16\] do not exist here"):
        plan_cores(job(core_list="15-16"), 2, **here)
    with pytest.raises(ValueError, match="KMP_AFFINITY"):
        plan_cores(job(bind_cores=True), 2, **{**here, "env": {"KMP_AFFINITY": "compact"}})


def test_plan_on_this_machine() -> None:
    plan = plan_cores(job(bind_cores=True), 1, env={})
    assert plan is not None and len(plan[0].cores) >= 1
