"""The agreement's arithmetic, without a process group: threads stand for ranks, and no interleaving may hang or differ."""

import random
import threading
from collections.abc import Callable

import pytest

from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import DivergenceError
from deepspeed.zero import agreement as module
from deepspeed.zero.agreement import Agreement, Decision, Kind, Request

NAMES = [f"unit{i}" for i in range(130)]


class Table:
    """An all-gather between threads: everybody puts a row down, everybody sees all rows."""

    def __init__(self, ranks: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.rank = threading.local()

    def exchange(self, row: list[int], _: AxisGroup) -> list[list[int]]:
        self.rows[self.rank.value] = row
        self.barrier.wait()
        found = [list(r) for r in self.rows]
        self.barrier.wait()
        return found


def _together(
    monkeypatch: pytest.MonkeyPatch, ranks: int, body: Callable[[Agreement, int], object], mode: str = "tolerate"
) -> list[object]:
    """Run ``body(agreement, rank)`` on every rank; results (or the exceptions) in rank order."""
    table = Table(ranks)
    monkeypatch.setattr(module, "exchange_ints", table.exchange)
    monkeypatch.setattr(module, "gather_objects", lambda value, _: [value] * ranks)
    results: list[object] = [None] * ranks

    def run(rank: int) -> None:
        table.rank.value = rank
        group = AxisGroup(None, ranks, rank, tuple(range(10, 10 + ranks)), "gloo")
        try:
            results[rank] = body(Agreement(group, mode, NAMES, where=lambda: "step 7, forward"), rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "hung"
    return results


GATHER = Request(Kind.GATHER, (5, 6, 7))
CASES = [
    ([GATHER, GATHER], Decision(Kind.GATHER, (5, 6, 7))),
    ([GATHER, Request(Kind.GATHER, (5,))], Decision(Kind.GATHER, (5,))),
    ([GATHER, Request(Kind.GATHER, (3, 5))], Decision(Kind.GATHER, (3,))),
    ([GATHER, Request(Kind.REDUCE, (9,))], Decision(Kind.REDUCE, (9,))),
    ([Request(Kind.REDUCE, (8,)), Request(Kind.REDUCE, (2,))], Decision(Kind.REDUCE, (2,))),
    ([GATHER, Request(Kind.LEAVE)], Decision(Kind.GATHER, (5,))),
    ([Request(Kind.FLUSH, pending=(1,)), Request(Kind.LEAVE)], Decision(Kind.LEAVE, ())),
    ([Request(Kind.FLUSH, pending=(1, 64)), Request(Kind.FLUSH, pending=(0, 129))], Decision(Kind.FLUSH, (0, 1, 64, 129))),
    ([Request(Kind.FLUSH, pending=(1,)), Request(Kind.STEP, pending=(2,))], Decision(Kind.FLUSH, (1, 2))),
    ([Request(Kind.STEP), GATHER], Decision(Kind.GATHER, (5,))),
]


@pytest.mark.parametrize(("requests", "expected"), CASES)
def test_the_smallest_request_is_everybodys_decision(monkeypatch: pytest.MonkeyPatch, requests: list[Request], expected: Decision) -> None:
    for order in (requests, requests[::-1], [requests[0], *requests]):
        assert _together(monkeypatch, len(order), lambda a, rank, order=order: a.decide(order[rank])) == [expected] * len(order)


@pytest.mark.parametrize("request_", [GATHER, Request(Kind.FLUSH, pending=(3, 70)), Request(Kind.GATHER, (4,), reduces=(1, 2))])
def test_alone_and_unanimous_every_request_is_served_whole(monkeypatch: pytest.MonkeyPatch, request_: Request) -> None:
    alone = Agreement(None, "tolerate", NAMES, where=lambda: "").decide(request_)
    assert alone.reduces == request_.reduces
    assert alone.units == (request_.pending if request_.kind is Kind.FLUSH else request_.units)
    assert _together(monkeypatch, 2, lambda a, _: a.decide(request_)) == [alone, alone]


def _walk(agreement: Agreement, needs: list[tuple[Kind, int]]) -> list[Decision]:
    """A rank's protocol: keep asking until its own request was served, then the next one, then flush."""
    done = []
    for kind, unit in needs:
        while True:
            done.append(agreement.decide(Request(kind, (unit,))))
            if done[-1].kind is kind and unit in done[-1].units:
                break
    for end in (Kind.LEAVE, Kind.FLUSH, Kind.STEP):
        while True:
            done.append(agreement.decide(Request(end)))
            if done[-1].kind is end:
                break
    return done


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_walks_neither_hang_nor_differ(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        needs = [[(draw.choice([Kind.GATHER, Kind.REDUCE]), draw.randrange(6)) for _ in range(draw.randrange(8))] for _ in range(ranks)]
        results = _together(monkeypatch, ranks, lambda a, rank, needs=needs: _walk(a, needs[rank]))
        assert all(result == results[0] for result in results), "ranks executed different collectives"
        assert isinstance(results[0], list) and len(results[0]) <= sum(map(len, needs)) + 3 * ranks


def test_mode_error_raises_on_every_rank_and_says_who(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Request(Kind.GATHER, (1,)), Request(Kind.GATHER, (2,)), Request(Kind.FLUSH)]
    for error in _together(monkeypatch, 3, lambda a, rank: a.decide(asked[rank]), mode="error"):
        assert isinstance(error, DivergenceError)
        for part in ("rank 10 needs 'unit1'", "rank 11 needs 'unit2'", "rank 12 has reached the end of the backward", "step 7", "tolerate"):
            assert part in str(error)


def test_mode_error_allows_different_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Request(Kind.GATHER, (1, 2)), Request(Kind.GATHER, (1, 3))]
    assert _together(monkeypatch, 2, lambda a, rank: a.decide(asked[rank]), mode="error") == [Decision(Kind.GATHER, (1,))] * 2


def test_mode_assume_none_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(a: Agreement, rank: int) -> int:
        a.decide(Request(Kind.GATHER, (rank,)))
        return a.rounds

    assert _together(monkeypatch, 2, count, mode="assume_none") == [0, 0]
