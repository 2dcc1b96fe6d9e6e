"""Core lists, the machine's cores as the kernel shows them, and fair shares of them."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.launcher.job import Job
from deepspeed.launcher.machine import parse_core_list, plan_cores, share_cores, usable_cores
from tests.harness.rows import for_each


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


@for_each(
    "text", ["", " 1", "1, 2", "1,", "a", "3-1", "2,1", "0-3,3", "1-", "-1", "0x1", "1--2", "0-99999999", "\u0661"]
)
def test_malformed_core_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected ascending") as caught:
        parse_core_list(text)
    assert isinstance(caught.value, DeepSpeedConfigError)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_every_ascending_list_reads_back(cores: set[int]) -> None:
    assert parse_core_list(",".join(map(str, sorted(cores)))) == sorted(cores)


def test_one_allowed_cpu_per_physical_core(two_sockets: str, tmp_path: Path) -> None:
    assert usable_cores(range(16), two_sockets) == list(range(8))
    assert usable_cores({9, 2, 10, 4}, two_sockets) == [2, 9, 4]  # node by node
    assert usable_cores({3, 1}, str(tmp_path / "nothing")) == [1, 3]


@given(st.lists(st.integers(0, 300), unique=True, min_size=1).map(sorted), st.integers(1, 40))
def test_shares_are_equal_and_disjoint(cores: list[int], ranks: int) -> None:
    if ranks > len(cores):
        with pytest.raises(AssertionError, match=f"{ranks} ranks cannot be bound to {len(cores)} core"):
            share_cores(cores, ranks)
        return
    shares = share_cores(cores, ranks)
    assert {len(share) for share in shares} == {len(cores) // ranks}
    assert sum(shares, ()) == tuple(cores[: len(cores) // ranks * ranks])


def test_plan(two_sockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    here = {"root": two_sockets, "allowed": range(16)}
    assert plan_cores(job(), 2, **here) == [(), ()]
    assert plan_cores(job(bind_cores=True), 2, **here) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan_cores(job(core_list="4-7"), 2, **here) == [(4, 5), (6, 7)]
    with pytest.raises(UsageError, match=r"core\(s\) \[16\] do not exist here"):
        plan_cores(job(core_list="15-16"), 2, **here)
    assert len(plan_cores(job(bind_cores=True), 1)[0]) >= 1
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    with pytest.raises(ValueError, match="KMP_AFFINITY"):
        plan_cores(job(bind_cores=True), 2, **here)
