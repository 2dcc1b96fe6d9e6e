"""Why the messages of a pipeline are not batched: a model of ``pipe/links.py`` over communicators that keep order."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from deepspeed.pipe.orders import Message, Program
from deepspeed.pipe.torch_pipelining import make_order
from tests.harness.rows import for_each
from tests.pure.test_pipe_orders import NAMES


class _Op(NamedTuple):
    kind: str
    message: Message
    peer: int


def _calls(order: Program, rank: int) -> Iterator[tuple[bool, _Op]]:
    """What one rank posts, and (True) what it waits for; shapes are known, as from the second batch on."""
    queues = {r: deque(order.messages(r, rank)) for r in range(order.ranks) if r != rank}
    forwards, posted = set(), set()

    def post(source: int, *, early: bool) -> Iterator[tuple[bool, _Op]]:
        queue = queues[source]
        if queue and (not early or queue[0].op == "F" or (queue[0].chunk - 1, queue[0].micro) in forwards):
            posted.add(queue[0])
            yield False, _Op("receive", queue.popleft(), source)

    for source in queues:
        yield from post(source, early=True)
    for action in order.actions[rank]:
        op, chunk, micro = action
        if op == "W":
            continue
        kind, before = ("F", chunk - 1) if op == "F" else ("B", chunk + 1)
        if 0 <= before < order.chunks and order.homes[before] != rank:
            wanted, source = Message(kind, before, micro), order.homes[before]
            while wanted not in posted:
                yield from post(source, early=False)
            yield from post(source, early=True)
            yield True, _Op("receive", wanted, source)
        if op == "F":
            forwards.add((chunk, micro))
        target = order.sends(action)
        if target is not None:
            yield False, _Op("send", Message(kind, chunk, micro), target)


def _ends(order: Program, *, shared: bool) -> bool:
    """Whether all messages arrive, where a communicator runs what each rank has posted in that order. ``shared``: one
    for each direction; else one for each pair of ranks and direction.
    """
    programs = [_calls(order, rank) for rank in range(order.ranks)]
    current = [next(program, None) for program in programs]
    lines: dict[tuple[int, bool, int], deque[_Op]] = {}
    arrived: set[tuple[int, _Op]] = set()

    def line(rank: int, one: _Op) -> deque[_Op]:
        rising = (rank < one.peer) == (one.kind == "send")
        return lines.setdefault((rank, rising, -1 if shared else one.peer), deque())

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while (call := current[rank]) is not None:
                waits, one = call
                if waits and (rank, one) not in arrived:
                    break
                if not waits:
                    line(rank, one).append(one)
                current[rank], moved = next(program, None), True
        for (rank, *_), queue in [*lines.items()]:
            while queue and queue[0].kind == "send":
                partner = _Op("receive", queue[0].message, rank)
                other = line(queue[0].peer, partner)
                if not other or other[0] != partner:
                    break
                arrived.add((queue.popleft().peer, other.popleft()))
                moved = True
    return not any(lines.values()) and current == [None] * order.ranks


@for_each(("name", "chunks"), NAMES)
def test_every_message_arrives_where_each_pair_of_ranks_has_its_communicators(name: str, chunks: int) -> None:
    for ranks in (2, 3, 4, 8):
        for micros in (1, 2, 4, 8, 16):
            assert _ends(make_order(name, ranks, micros, chunks_per_rank=chunks), shared=False)


def test_in_a_communicator_of_all_stages_1f1b_would_hang() -> None:
    assert not _ends(make_order("1f1b", 4, 8), shared=True)
