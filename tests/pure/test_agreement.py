"""The agreement's arithmetic, without a process group: threads stand for ranks, and no interleaving may hang or
differ.
"""

import contextlib
import functools
import operator
import queue
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.comm import collectives
from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import DivergenceError
from deepspeed.zero.sync import agreement as module
from deepspeed.zero.sync.agreement import PASSING, Agreement, Decision, Kind, Request

NAMES = [f"unit{i}" for i in range(130)]


class Table:
    """Between threads: everybody puts a row down, everybody sees all rows."""

    def __init__(self, ranks: int) -> None:
        self.rows: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.rank = threading.local()

    def merge(self, largest: list[int], union: list[int], _: AxisGroup) -> tuple[list[int], list[int]]:
        assert all(-(1 << 63) <= number < 1 << 63 for number in (*largest, *union))
        rows = self.exchange([*largest, *union])
        columns, split = list(zip(*rows, strict=True)), len(largest)
        return list(map(max, columns[:split])), [functools.reduce(operator.or_, column) for column in columns[split:]]

    def gather(self, value: Any, _: AxisGroup) -> list[Any]:
        return self.exchange(value)

    def exchange(self, row: Any) -> list[Any]:
        self.rows[self.rank.value] = row
        self.barrier.wait()
        found = list(self.rows)
        self.barrier.wait()
        return found


def _together(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    body: Callable[[Agreement, int], object],
    mode: str = "tolerate",
    *,
    table: Table | None = None,
) -> list[object]:
    """Run ``body(agreement, rank)`` on every rank; results (or the exceptions) in rank order."""
    table = table or Table(ranks)
    monkeypatch.setattr(module, "merge", table.merge)
    monkeypatch.setattr(module, "gather_objects", table.gather)
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


def _one(agreement: Agreement, request: Request) -> Decision:
    (decision,) = agreement.ask(request)
    return decision


GATHER = Request(Kind.GATHER, (5, 6, 7))
CASES = [
    ([GATHER, GATHER], Decision(Kind.GATHER, (5, 6, 7))),
    ([GATHER, Request(Kind.GATHER, (5,))], Decision(Kind.GATHER, (5,))),
    ([GATHER, Request(Kind.GATHER, (3, 5))], Decision(Kind.GATHER, (3,))),
    ([GATHER, Request(Kind.REDUCE, (9,))], Decision(Kind.REDUCE, (9,))),
    ([Request(Kind.REDUCE, (8,)), Request(Kind.REDUCE, (2,))], Decision(Kind.REDUCE, (2,))),
    ([GATHER, Request(Kind.LEAVE)], Decision(Kind.GATHER, (5,))),
    ([Request(Kind.FLUSH, pending=(1,)), Request(Kind.LEAVE)], Decision(Kind.LEAVE, ())),
    ([Request(Kind.FLUSH, pending=(1, 64)), Request(Kind.FLUSH, pending=(0,))], Decision(Kind.FLUSH, (0, 1, 64))),
    ([Request(Kind.FLUSH, pending=(1,)), Request(Kind.STEP, pending=(2,))], Decision(Kind.FLUSH, (1, 2))),
    ([Request(Kind.STEP), GATHER], Decision(Kind.GATHER, (5,))),
]


@pytest.mark.parametrize(("requests", "expected"), CASES)
def test_the_smallest_request_is_everybodys_decision(
    monkeypatch: pytest.MonkeyPatch, requests: list[Request], expected: Decision
) -> None:
    for order in (requests, requests[::-1], [requests[0], *requests]):
        decided = _together(monkeypatch, len(order), lambda a, rank, order=order: _one(a, order[rank]))
        assert decided == [expected] * len(order)


def test_alone_and_unanimous_every_request_is_served_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in (GATHER, Request(Kind.FLUSH, pending=(3, 70, 129)), Request(Kind.GATHER, (4,), reduces=(1, 2))):
        alone = _one(Agreement(None, "tolerate", NAMES, where=lambda: ""), asked)
        assert alone.reduces == asked.reduces
        assert alone.units == (asked.pending if asked.kind is Kind.FLUSH else asked.units)
        assert _together(monkeypatch, 2, lambda a, _, asked=asked: _one(a, asked)) == [alone, alone]


def test_mode_error_raises_on_every_rank_and_says_who(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Request(Kind.GATHER, (1,)), Request(Kind.GATHER, (2,)), Request(Kind.FLUSH)]
    said = ("rank 10 needs 'unit1'", "rank 11 needs 'unit2'", "rank 12 has reached the end of the backward", "step 7")
    for error in _together(monkeypatch, 3, lambda a, rank: _one(a, asked[rank]), mode="error"):
        assert isinstance(error, DivergenceError) and all(part in str(error) for part in (*said, "tolerate"))


def test_mode_error_allows_different_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Request(Kind.GATHER, (1, 2)), Request(Kind.GATHER, (1, 3))]
    decided = _together(monkeypatch, 2, lambda a, rank: _one(a, asked[rank]), mode="error")
    assert decided == [Decision(Kind.GATHER, (1,))] * 2


def test_mode_assume_none_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(a: Agreement, rank: int) -> int:
        _one(a, Request(Kind.GATHER, (rank,)))
        return a.rounds

    assert _together(monkeypatch, 2, count, mode="assume_none") == [0, 0]


# -- by prediction ----------------------------------------------------------------------------------------------------
Program = list[tuple[str, int]]
STEADY: Program = (
    [("need", u) for u in range(5)] + [("leave", 0)] + [("back", u) for u in (3, 2, 1, 0)] + [("flush", 0), ("step", 0)]
)
ENDS = {"leave": Kind.LEAVE, "end": Kind.LEAVE, "flush": Kind.FLUSH, "step": Kind.STEP}
EVALUATION: Program = [("need", u) for u in range(5)] + [("end", 0)]


class Rank:
    """One rank as the runtime drives it: units that are here, gradients that wait, and every collective meeting the
    others'.
    """

    def __init__(self, agreement: Agreement, table: Table) -> None:
        self.agreement, self.table = agreement, table
        self.here: set[int] = set()
        self.local: list[int] = []
        self.reduced: dict[int, int] = {}
        self.log: list[Decision] = []
        self.rounds: list[int] = []

    def ask(self, kind: Kind, units: tuple[int, ...] = (), *, urgent: bool = True) -> Decision | None:
        closing = kind >= Kind.FLUSH
        request = Request(
            kind, units, tuple(sorted(self.local)) if closing else (), () if kind >= Kind.LEAVE else tuple(self.local)
        )
        decision = None
        for decision in self.agreement.ask(request, urgent=urgent):
            everybodys = self.table.exchange([hash((int(decision.kind), decision.units, decision.reduces))])
            assert all(row == everybodys[0] for row in everybodys), "ranks issue different collectives"
            self.log.append(decision)
            for unit in decision.reduced:
                if unit in self.local:
                    self.local.remove(unit)
                    self.reduced[unit] = self.reduced.get(unit, 0) + 1
            if decision.kind is Kind.GATHER and units[:1] and units[0] in decision.units:
                self.here.update(decision.units)
        return decision

    def run(self, program: Program) -> None:
        for verb, unit in program:
            if verb in ("need", "back"):
                while unit not in self.here:
                    self.ask(Kind.GATHER, (unit,))
                if verb == "back":
                    self.local.append(unit)
                    if len(self.local) >= 2:
                        self.reduce()
                self.here.discard((unit - 1) % 5)
                self.ask(Kind.GATHER, ((unit + (1 if verb == "need" else 4)) % 5,), urgent=False)
            elif verb == "user":  # a collective of the user's own
                self.table.exchange([-1])
            else:
                self.end(ENDS[verb], PASSING if verb == "leave" else ())

    def reduce(self) -> None:
        while self.local:
            overdue = len(self.local) > 4
            if self.ask(Kind.REDUCE, (self.local[0],), urgent=overdue) is None:
                break

    def end(self, kind: Kind, units: tuple[int, ...]) -> None:
        while (
            (decision := self.ask(kind, units)) is None
            or decision.kind is not kind
            or (kind is Kind.LEAVE and decision.units != units)
        ):
            pass
        if kind is Kind.LEAVE and not units:
            self.here.clear()
        if kind is Kind.FLUSH:
            self.here.clear()
            self.rounds.append(self.agreement.rounds)
            assert not self.local


def _ranks(monkeypatch: pytest.MonkeyPatch, programs: list[list[Program]]) -> list[Rank]:
    """Every rank runs its programs one after the other; all have to issue the same collectives."""
    table = Table(len(programs))

    def body(agreement: Agreement, rank: int) -> Rank:
        driven = Rank(agreement, table)
        for program in programs[rank]:
            driven.run(program)
        return driven

    found = _together(monkeypatch, len(programs), body, table=table)
    for rank in found:
        assert isinstance(rank, Rank), rank
        assert rank.log == found[0].log  # type: ignore[attr-defined]
    return found  # type: ignore[return-value]


def _messages(rank: Rank) -> list[int]:
    return [b - a for a, b in zip([0, *rank.rounds], rank.rounds, strict=False)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_backwards_come_to_cost_one_message_each(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    for rank in _ranks(monkeypatch, [[STEADY] * 10] * ranks):
        messages = _messages(rank)
        assert messages[0] > 5 and messages[-5:] == [1] * 5
        assert rank.agreement.mismatches == 0
        assert rank.reduced == dict.fromkeys(range(4), 10)


@pytest.mark.parametrize("window", [2, 3])
def test_accumulation_windows_are_predicted_each(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    inner = [step for step in STEADY if step[0] != "step"]
    inner = [("need", unit) if verb == "back" else (verb, unit) for verb, unit in inner]
    programs = [*[inner] * (window - 1), STEADY] * 8
    for rank in _ranks(monkeypatch, [programs] * 2):
        assert _messages(rank)[-window:] == [1] * window
        assert rank.reduced == dict.fromkeys(range(4), 8)


def test_evaluations_and_training_are_predicted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in _ranks(monkeypatch, [[STEADY, EVALUATION, EVALUATION] * 8] * 2):
        assert _messages(rank)[-2:] == [3, 3], "one at the end of each evaluation, one of the backward"


# What one rank does for once instead of STEADY, while the others do not know.
SURPRISES: dict[str, Program] = {
    "skips": [s for s in STEADY if s[1] != 2 or s[0] not in ("need", "back")],
    "skips_the_last": [s for s in STEADY if s[1] != 4 or s[0] not in ("need", "back")],
    "skips_the_first": [s for s in STEADY if s[1] != 0 or s[0] not in ("need", "back")],
    "needs_more": [("need", 0), ("need", 7), *STEADY[1:6], ("back", 7), *STEADY[6:]],
    "needs_more_in_the_backward": [*STEADY[:8], ("need", 9), *STEADY[8:]],
    "other_order": [("need", u) for u in (2, 0, 4, 1, 3)] + STEADY[5:],
    "backward_in_another_order": STEADY[:6] + [("back", u) for u in (0, 1, 2, 3)] + STEADY[10:],
    "uses_one_twice": [*STEADY[:3], ("need", 0), ("need", 1), *STEADY[3:]],
    "does_nothing_in_the_forward": STEADY[5:],
    "is_cut_short_and_tries_again": [*STEADY[:3], *STEADY],
    "is_cut_short_in_the_backward": [*STEADY[:8], *STEADY],
    "runs_a_second_forward": [*STEADY[:6], *STEADY],
    "evaluates_first": [*EVALUATION[:-1], ("leave", 0), *STEADY],
}
OF_ALL_RANKS = {
    **SURPRISES,
    "evaluates": [*EVALUATION, *STEADY],
    "evaluates_before_the_step": [*STEADY[:-1], *EVALUATION, STEADY[-1]],  # nothing is executed for a guest
}


@pytest.mark.parametrize("name", SURPRISES)
def test_a_surprise_on_one_rank_is_served(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for at, ranks in ((5, 2), (6, 3), (9, 2)):
        programs = [[STEADY] * 30 for _ in range(ranks)]
        programs[-1][at] = SURPRISES[name]
        for rank in _ranks(monkeypatch, programs):
            assert max(_messages(rank)[at:]) > 1
            assert _messages(rank)[-3:] == [1] * 3, "and forgotten"


@pytest.mark.parametrize("name", OF_ALL_RANKS)
def test_a_surprise_on_all_ranks_is_served(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    programs = [STEADY] * 7 + [OF_ALL_RANKS[name]] + [STEADY] * 22
    for rank in _ranks(monkeypatch, [programs] * 2):
        assert _messages(rank)[-3:] == [1] * 3


@pytest.mark.parametrize("name", [n for n in SURPRISES if n.startswith("skips")])
def test_a_rank_that_skips_reaches_a_collective_of_the_users_after_the_forward(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def with_user(program: Program) -> Program:
        at = program.index(("leave", 0)) + 1
        return [*program[:at], ("user", 0), *program[at:]]

    programs = [[with_user(STEADY)] * 9 for _ in range(2)]
    programs[1][7] = with_user(SURPRISES[name])
    _ranks(monkeypatch, programs)


def test_random_surprises_neither_hang_nor_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12):
        draw, share = random.Random(seed), 0.5 if seed % 3 == 0 else 0.05
        programs: list[list[Program]] = [[], [], []]
        for _ in range(25):
            common = draw.choice([STEADY] * 6 + [[*EVALUATION, *STEADY]])
            for program in programs:
                program.append(draw.choice([*SURPRISES.values()]) if draw.random() < share else common)
        for rank in _ranks(monkeypatch, programs):
            assert len(rank.rounds) >= 25 - 3


@pytest.mark.parametrize("name", [n for n in SURPRISES if n != "is_cut_short_and_tries_again"])
def test_mode_error_raises_by_prediction_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At the latest at the end of the backward, where the paths are compared."""
    table = Table(2)
    paths = [tuple(u for verb, u in program if verb in ("need", "back")) for program in (STEADY, SURPRISES[name])]

    def body(agreement: Agreement, rank: int) -> str:
        driven = Rank(agreement, table)
        for _ in range(7):
            driven.run(STEADY)
        try:
            while True:
                for decision in agreement.ask(Request(Kind.FLUSH, path=paths[rank])):
                    table.exchange([int(decision.kind)])
        except DivergenceError as error:
            return str(error)

    found = _together(monkeypatch, 2, body, mode="error", table=table)
    assert all(isinstance(text, str) and "rank 10 used" in text and "rank 11 used" in text for text in found), found


class Wires:
    """Point-to-point messages between threads, each in the order in which it was sent."""

    def __init__(self, ranks: int) -> None:
        self.queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (source, target): queue.Queue() for source in range(ranks) for target in range(ranks)
        }
        self.rank = threading.local()

    def isend(self, tensor: torch.Tensor, *, group: object, group_dst: int) -> SimpleNamespace:
        self.queues[self.rank.value, group_dst].put(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor: torch.Tensor, *, group: object, group_src: int) -> SimpleNamespace:
        mine = self.queues[group_src, self.rank.value]
        return SimpleNamespace(wait=lambda: tensor.copy_(mine.get(timeout=20)))


@pytest.mark.parametrize("ranks", [*range(2, 10), 17])
def test_a_message_merges_what_all_ranks_say_however_many_they_are(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Several in a row, in which ranks that are ahead meet no other one; the ends of 64 bits, and words of 62."""
    draw, wires, edge = random.Random(ranks), Wires(ranks), [-(1 << 63), (1 << 63) - 1, 0, -1, (1 << 62) - 1]
    monkeypatch.setattr(collectives, "dist", wires)
    largest = [
        [[draw.choice([*edge, draw.randrange(-9, 9)]) for _ in range(5)] for _ in range(ranks)] for _ in range(6)
    ]
    union = [[[draw.choice([0, 1 << draw.randrange(62)]) for _ in range(3)] for _ in range(ranks)] for _ in range(6)]

    def body(_: Agreement, rank: int) -> list[object]:
        wires.rank.value = rank
        group = AxisGroup(None, ranks, rank, tuple(range(ranks)), "gloo")
        return [
            collectives.merge(numbers[rank], words[rank], group) for numbers, words in zip(largest, union, strict=True)
        ]

    expected = [
        (
            [max(column) for column in zip(*numbers, strict=True)],
            [functools.reduce(operator.or_, c) for c in zip(*words, strict=True)],
        )
        for numbers, words in zip(largest, union, strict=True)
    ]
    assert _together(monkeypatch, ranks, body) == [expected] * ranks


def test_a_step_that_only_some_take_is_an_error_on_all_at_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    table, doubts = Table(3), list[str]()

    @contextlib.contextmanager
    def doubt(text: str) -> Iterator[None]:
        doubts.append(text)
        yield

    def body(agreement: Agreement, rank: int) -> bool:
        agreement._doubt = doubt
        driven = Rank(agreement, table)
        for _ in range(7):
            driven.run(STEADY[:-1])
            if len(driven.rounds) < 7:
                driven.run(STEADY[-1:])
        if rank == 2:  # a micro-batch more
            agreement._reach(GATHER, urgent=True)
        else:  # the predicted step, and all that follows it, which no collective holds up
            agreement._note(agreement._rest.pop())
            agreement._rest.clear()
        with pytest.raises(DivergenceError, match=r"rank 10 .* after 7 steps; .*rank 12 needs 'unit5' after 6 steps"):
            _one(agreement, GATHER if rank == 2 else Request(Kind.FLUSH))
        return agreement.apart

    assert _together(monkeypatch, 3, body, table=table) == [True] * 3
    assert doubts == ["step 7, forward: needs 'unit5' where after the last steps all ranks would take the next"]
