"""What nodes of an elastic job agree on, without a process: their shared state in a store in memory."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from deepspeed.comm.channel import Channel
from deepspeed.errors import UsageError
from deepspeed.launcher.elastic.beats import Beats
from deepspeed.launcher.elastic.membership import JOIN, Membership, Round
from deepspeed.launcher.elastic.sizes import Elastic
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, Verdict

LIMITS = Elastic(min_nodes=2, max_nodes=2, sizes=(1, 2, 3), max_restarts=3)


@pytest.fixture
def member(tmp_path: Path) -> Callable[[int], Membership]:
    """Nodes of one job, each with one rank of the first round; its note is a file ``note.NODE``."""
    store = HashStore()

    def made(node: int, devices: tuple[int, ...] = (0,)) -> Membership:
        made = Membership(
            store, LIMITS, host="ab"[node], address="127.0.0.1", devices=devices, note=str(tmp_path / f"note.{node}")
        )
        made.round, made._channel = Round(0, node, {"a": (0,), "b": (0,)}, "127.0.0.1", 1), Channel(store, "round")
        made._beats, made._takes_part = Beats(made._channel, node, ("a", "b")), True
        return made

    return made


def test_a_job_ends_well_when_the_ranks_of_all_nodes_have(member: Callable[[int], Membership]) -> None:
    """One node goes on watching until then; ``beats`` takes none that has ended for lost."""
    first, second = member(0), member(1)
    assert not first.end_well() and not first.end_well() and not first.over
    assert second.end_well() and first.end_well()


def test_the_first_reason_ends_a_round_on_all_nodes(member: Callable[[int], Membership]) -> None:
    first, second = member(0), member(1)
    assert first.over == second.over == ""
    assert second.end_round("a rank failed") == first.end_round(JOIN) == "a rank failed" == first.over


def test_a_crash_that_several_nodes_see_counts_once_and_not_after_a_checkpoint(
    member: Callable[[int], Membership], tmp_path: Path
) -> None:
    first, second = member(0), member(1)
    assert [first.count_crash(), second.count_crash()] == [1, 1]
    for node in (first, second):
        node.round = Round(1, *tuple(vars(node.round).values())[1:])
    assert [second.count_crash(), first.count_crash()] == [2, 2]
    (tmp_path / "note.1").write_text("ckpt/step6")
    assert second.saved == "" and second.count_crash() == 0 and first.saved == "ckpt/step6"


def test_the_first_verdict_is_that_of_all_nodes_and_one_that_says_none_is_not_waited_for(
    member: Callable[[int], Membership],
) -> None:
    first, second = member(0), member(1)
    assert second.agreed(60.0, lambda: True).status == LOST_HOST_STATUS == second.agreed(0.0, lambda: False).status
    assert first.agree_on(Verdict(7, "why")) == second.agree_on(Verdict(1)) == Verdict(7, "why")
    assert second.agreed(0.0, lambda: False) == Verdict(7, "why")


def test_a_node_outside_the_job_neither_ends_nor_judges_it(member: Callable[[int], Membership]) -> None:
    first, outside = member(0), member(1)
    outside._takes_part = False
    first._job.add("rounds", 1)
    assert outside.outside and not first.outside
    assert outside.agree_on(Verdict(1, "its own")) == Verdict(1, "its own") and outside.over == ""
    assert first.agree_on(Verdict(0)) == Verdict(0)


def test_reports_of_nodes_that_are_lost_are_not_waited_for(member: Callable[[int], Membership]) -> None:
    first = member(0)
    first.leave_ends([{"rank": 0}])
    first._beats.silent.add(1)
    assert first.ends(60.0) == {"a": (0.0, [{"rank": 0}])}
    assert first.leave(60.0, lambda: False), "and neither is their last word"


def test_all_nodes_divide_the_ranks_alike(member: Callable[..., Membership]) -> None:
    """Three of four devices: the largest number that the limits allow."""
    nodes, store, rounds = [member(0, (4, 5)), member(1, (6, 7))], HashStore(), dict[int, Any]()

    def divide(rank: int) -> None:
        rounds[rank] = nodes[rank]._divide(SimpleNamespace(store=store, rank=rank, world_size=2))  # type: ignore[arg-type]

    other = threading.Thread(target=divide, args=(1,))
    other.start()
    divide(0)
    other.join()
    assert [rounds[node].node for node in range(2)] == [0, 1]
    assert rounds[0].world == rounds[1].world and sum(map(len, rounds[0].world.values())) == 3
    assert rounds[0].port == rounds[1].port > 0 and rounds[0].number == rounds[1].number == 0


def test_too_few_nodes_in_time_are_named(member: Callable[[int], Membership], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_JOIN_TIMEOUT_S", "0.5")

    def nobody() -> None:
        raise RendezvousTimeoutError

    node = member(0)
    node._inner = SimpleNamespace(next_rendezvous=nobody)  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"fewer than 2 node\(s\) \(--min_elastic_nodes\) came together within 0.5 s"):
        node.next_rendezvous()
