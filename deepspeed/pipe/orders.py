"""What every rank of a pipeline does, in which order, and what that costs. Pure.

The layers are cut into *chunks* (virtual stages), numbered in the order of the forward; a rank holds one or several.
An *action* runs a chunk on one micro-batch: F forward, B backward, or B in two halves, I for the gradients of the
chunk's inputs, which the chunk before waits for, and W for those of its weights, for which nobody waits.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed.errors import PipelineError


class Action(NamedTuple):
    """Run of one chunk on one micro-batch; ``op`` is one of F, B, I, W."""

    op: str
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.op}{self.chunk}.{self.micro}"


class Message(NamedTuple):
    """Message between two ranks: activations (F) or gradients (B) that ``chunk`` made of micro-batch ``micro``."""

    op: str
    chunk: int
    micro: int


class Micro(NamedTuple):
    """Data of one micro-batch: ``inputs`` of the first chunk, ``labels`` for the loss after the last."""

    inputs: Any
    labels: Any


class Timed(NamedTuple):
    """Time span in which an action runs on its rank."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Program:
    """Schedule of a batch. ``homes``: the rank of each chunk; ``actions``: the program of each rank."""

    name: str
    micros: int
    homes: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.actions)

    @property
    def chunks(self) -> int:
        """Return the number of chunks, over all ranks."""
        return len(self.homes)

    def needs(self, action: Action) -> Iterator[Action]:
        """Yield the actions that must precede ``action``; of a backward both spellings, of which an order has one."""
        op, chunk, micro = action
        if op == "W":
            yield Action("I", chunk, micro)
        elif op == "F":
            if chunk:
                yield Action("F", chunk - 1, micro)
        else:
            yield Action("F", chunk, micro)
            if chunk + 1 < self.chunks:
                yield Action("B", chunk + 1, micro)
                yield Action("I", chunk + 1, micro)

    def sends(self, action: Action) -> int | None:
        """Return the other rank that waits for the result of ``action``, or None."""
        step = {"F": 1, "B": -1, "I": -1}.get(action.op, 0)
        chunk = action.chunk + step
        remote = step and 0 <= chunk < self.chunks and self.homes[chunk] != self.homes[action.chunk]
        return self.homes[chunk] if remote else None

    def messages(self, source: int, target: int) -> list[Message]:
        """Return the messages from ``source`` to ``target``, in the order in which they are made."""
        made = (action for action in self.actions[source] if self.sends(action) == target)
        return [Message("F" if op == "F" else "B", chunk, micro) for op, chunk, micro in made]

    def places(self, rank: int) -> dict[Message, int]:
        """Return, for each message that ``rank`` makes, the position of the action that makes it."""
        made = enumerate(self.actions[rank])
        return {Message("F" if op == "F" else "B", chunk, micro): at for at, (op, chunk, micro) in made if op != "W"}


def homes_of(ranks: int, chunks_per_rank: int, *, style: str) -> tuple[int, ...]:
    """Return the rank of each chunk: "loop" goes round and round, "v" comes back on the way it went."""
    forth = tuple(range(ranks))
    rounds = [forth if style == "loop" or turn % 2 == 0 else forth[::-1] for turn in range(chunks_per_rank)]
    return tuple(rank for one in rounds for rank in one)


def one_f_one_b(ranks: int, micros: int, *, eager: bool = False) -> Program:
    """Plan one forward, one backward in turn, once the pipeline is full (Narayanan et al. 2019, PipeDream-Flush).

    Two neighbours then wait for each other's messages once a micro-batch. ``eager``: twice as many forwards ahead give
    these messages the time of an action to arrive (Zhuang et al. 2022, eager-1F1B).
    """
    programs = []
    for rank in range(ranks):
        ahead = min((ranks - 1 - rank) * (1 + eager), micros)
        program = [Action("F", rank, m) for m in range(ahead)]
        for m in range(ahead, micros):
            program += [Action("F", rank, m), Action("B", rank, m - ahead)]
        programs.append([*program, *(Action("B", rank, m) for m in range(micros - ahead, micros))])
    name = "eager_1f1b" if eager else "1f1b"
    return Program(name, micros, homes_of(ranks, 1, style="loop"), tuple(map(tuple, programs)))


def forward_only(homes: tuple[int, ...], micros: int) -> Program:
    """Plan the forwards of an evaluation."""
    ranks = max(homes) + 1
    programs = [
        tuple(Action("F", chunk, m) for chunk, holder in enumerate(homes) if holder == rank for m in range(micros))
        for rank in range(ranks)
    ]
    return Program("forward", micros, homes, tuple(programs))


def by_chunks(homes: tuple[int, ...], micros: int) -> Program:
    """Plan all forwards by chunk, then all backwards (Huang et al. 2019): legal for all ``micros`` and ``homes``."""
    order = forward_only(homes, micros)
    back = [
        [Action("B", a.chunk, a.micro) for a in sorted(p, key=lambda a: (-a.chunk, a.micro))] for p in order.actions
    ]
    programs = (tuple([*p, *b]) for p, b in zip(order.actions, back, strict=True))
    return Program("gpipe", micros, homes, tuple(programs))


# Name in the configuration -> class of torch.distributed.pipelining (None: written above), and how chunks are dealt
# out.
SCHEDULES: dict[str, tuple[str | None, str]] = {
    "gpipe": (None, "loop"),
    "1f1b": (None, "loop"),
    "eager_1f1b": (None, "loop"),
    "interleaved": ("ScheduleInterleaved1F1B", "loop"),
    "breadth_first": ("ScheduleLoopedBFS", "loop"),
    "zero_bubble": ("ScheduleInterleavedZeroBubble", "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "v"),
    "dualpipev": ("ScheduleDualPipeV", "v"),
}


def chunks_and_style(name: str, chunks_per_rank: int) -> tuple[int, str]:
    """Return the chunks per rank under that schedule, and how they are dealt out. Raise PipelineError for a misfit."""
    if name not in SCHEDULES:
        raise PipelineError(f"pipeline.schedule {name!r} is unknown; use one of {', '.join(SCHEDULES)}")
    torch_name, style = SCHEDULES[name]
    if style == "v":
        if chunks_per_rank not in (1, 2):
            raise PipelineError(f"the schedule {name!r} has two chunks per rank, not {chunks_per_rank}")
        return 2, style
    if torch_name is None and chunks_per_rank > 1:
        raise PipelineError(
            f"the schedule {name!r} has one chunk per rank, not {chunks_per_rank}; use 'interleaved' or 'breadth_first'"
        )
    if name in ("interleaved", "breadth_first") and chunks_per_rank < 2:
        raise PipelineError(f"the schedule {name!r} needs pipeline.chunks_per_stage of 2 or more")
    return chunks_per_rank, style


COSTS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def timeline(order: Program, costs: Mapping[str, float] = COSTS, *, hop: float = 0.0) -> list[list[Timed]]:
    """Return when each rank runs what, if a chunk's forward takes ``costs["F"]`` and so on, a message ``hop``.

    Raise PipelineError for an order in which ranks would wait for ever, for each other or for an action of no rank.
    """
    done: dict[Action, float] = {}
    clocks, positions = [0.0] * order.ranks, [0] * order.ranks
    spans: list[list[Timed]] = [[] for _ in range(order.ranks)]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(order.actions):
            while positions[rank] < len(program):
                action = program[positions[rank]]
                wanted = [n for n in order.needs(action) if n.op not in "BI" or n in done]
                backward = action.op in "BI" and action.chunk + 1 < order.chunks
                if any(need not in done for need in wanted) or (backward and len(wanted) < 2):
                    break
                if action.op == "W" and not wanted:
                    break
                far = {need: order.homes[need.chunk] != rank for need in wanted}
                start = max([clocks[rank], *(done[need] + hop * far[need] for need in wanted)])
                clocks[rank] = done[action] = start + costs[action.op]
                spans[rank].append(Timed(action, start, clocks[rank]))
                positions[rank] += 1
                moved = True
    stuck = [f"rank {r} at {p[i]}" for r, (p, i) in enumerate(zip(order.actions, positions, strict=True)) if i < len(p)]
    if stuck:
        raise PipelineError(f"the schedule {order.name!r} cannot go on: {', '.join(stuck)}")
    return spans


def check(order: Program) -> None:
    """Raise PipelineError unless every chunk does everything once, on its rank, in an order that can be executed."""
    counts = Counter(action for program in order.actions for action in program)
    for chunk in range(order.chunks):
        for micro in range(order.micros):
            whole, halves = counts[Action("B", chunk, micro)], [counts[Action(op, chunk, micro)] for op in "IW"]
            good = counts[Action("F", chunk, micro)] == 1 and (whole, *halves) in ((1, 0, 0), (0, 1, 1))
            if not good or any(
                Action("F", chunk, micro) in p for r, p in enumerate(order.actions) if r != order.homes[chunk]
            ):
                raise PipelineError(f"the schedule {order.name!r} runs chunk {chunk} not once on micro-batch {micro}")
    timeline(order)


def bubble(spans: list[list[Timed]]) -> float:
    """Return the share of the ranks' time in which they wait."""
    total = max(span.end for row in spans for span in row) * len(spans)
    return 1.0 - sum(span.end - span.start for row in spans for span in row) / total


def most_alive(program: tuple[Action, ...]) -> int:
    """Return the largest number of (chunk, micro-batch) pairs whose forward is kept at one time."""
    alive = peak = 0
    for action in program:
        alive += {"F": 1, "B": -1, "W": -1}.get(action.op, 0)
        peak = max(peak, alive)
    return peak
