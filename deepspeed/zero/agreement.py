"""One order of collectives on every rank, also when ranks take different branches.

[Note: agreement] Before a rank issues gathers or reductions it says so in a message of a few integers, exchanged over a
host-side control group, and every rank executes what all of them said together. If all say the same, all of it is issued. If
they differ (an expert or a vision tower that one rank skips), the smallest request is issued by everybody: a rank that did not
ask is a guest, which gathers and drops the unit, or contributes zeros to the reduction. A rank keeps asking until its own request
was served, and ranks that have reached the end of the model's forward or of backward keep serving until all have, so no rank
can wait for a collective that another one never issues, nor for one of the user's that comes next. (ZeRO invariant I7.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from deepspeed.comm.collectives import AxisGroup, exchange_ints, gather_objects
from deepspeed.errors import DivergenceError


class Kind(IntEnum):
    """Request kinds in order of precedence."""

    REDUCE = 0
    GATHER = 1
    LEAVE = 2
    FLUSH = 3
    STEP = 4


@dataclass(frozen=True)
class Request:
    """``units[0]`` is needed; further ones (gathers only) are wished for. ``pending`` lists units with local gradients (FLUSH, STEP).

    ``reduces`` are reductions that travel with another request, to save a message; they come before it. ``path`` lists the units
    used since the last meeting point; only its digest travels, and only where divergence is an error.
    """

    kind: Kind
    units: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    reduces: tuple[int, ...] = ()
    path: tuple[int, ...] = ()

    @property
    def head(self) -> tuple[Kind, int]:
        """What this rank asks for first; the smallest head of all ranks is served when they differ."""
        if self.reduces:
            return Kind.REDUCE, self.reduces[0]
        return self.kind, self.units[0] if self.units else -1


@dataclass(frozen=True)
class Decision:
    """What every rank does now: first ``reduces``, then ``kind``. For FLUSH and STEP ``units`` is the union of all pending units."""

    kind: Kind
    units: tuple[int, ...]
    reduces: tuple[int, ...] = ()


_ENDS = {
    Kind.LEAVE: "has reached the end of the forward",
    Kind.FLUSH: "has reached the end of the backward",
    Kind.STEP: "has reached the step",
}
_WISHES = 8
_REDUCES = 4
_WORD = 62


class Agreement:
    """The control channel of one runtime. With one rank, or ``mode`` "assume_none", every request is its own decision."""

    def __init__(self, group: AxisGroup | None, mode: str, unit_names: list[str], *, where: Callable[[], str]) -> None:
        self._group = group if group is not None and group.size > 1 and mode != "assume_none" else None
        self._mode = mode
        self._names = unit_names
        self._where = where
        self._words = -(-len(unit_names) // _WORD) if unit_names else 1
        self.rounds = 0

    def decide(self, request: Request) -> Decision:
        """Exchange requests and return the common decision. Collective. Raises DivergenceError in mode "error"."""
        own = Decision(request.kind, request.pending if request.kind >= Kind.FLUSH else request.units, request.reduces)
        if self._group is None:
            return own
        self.rounds += 1
        said = exchange_ints(self._encode(request), self._group)
        if all(row == said[0] for row in said):
            return own
        requests = [self._decode(row) for row in said]
        heads = {r.head for r in requests}
        if self._mode == "error":
            self._refuse(requests, heads, request.path)
        kind, unit = min(heads)
        if kind >= Kind.FLUSH:
            return Decision(kind, tuple(sorted({u for r in requests for u in r.pending})))
        return Decision(kind, () if kind is Kind.LEAVE else (unit,))

    def _encode(self, request: Request) -> list[int]:
        wishes = [*request.units[:_WISHES], *([-1] * (_WISHES - len(request.units)))]
        words = [0] * self._words
        for unit in request.pending:
            words[unit // _WORD] |= 1 << (unit % _WORD)
        reduces = [*request.reduces[:_REDUCES], *([-1] * (_REDUCES - len(request.reduces)))]
        return [int(request.kind), *wishes, *reduces, *words, hash(request.path) >> 1]

    def _decode(self, row: list[int]) -> Request:
        wishes, reduces, words = row[1 : 1 + _WISHES], row[1 + _WISHES : 1 + _WISHES + _REDUCES], row[1 + _WISHES + _REDUCES : -1]
        pending = tuple(word * _WORD + bit for word, bits in enumerate(words) for bit in range(_WORD) if bits >> bit & 1)
        return Request(Kind(row[0]), tuple(u for u in wishes if u >= 0), pending, tuple(u for u in reduces if u >= 0))

    @property
    def strict(self) -> bool:
        """True when ranks must take the same path."""
        return self._mode == "error"

    def _refuse(self, requests: list[Request], heads: set[tuple[Kind, int]], path: tuple[int, ...]) -> None:
        """Raise when the ranks ask for different things, or met having used different modules."""
        assert self._group is not None
        if len(heads) > 1:
            asked = [self._asks(*r.head) for r in requests]
        else:
            paths = gather_objects(path, self._group)
            if all(p == paths[0] for p in paths):
                return
            first = next(i for i in range(max(map(len, paths))) if len({p[i : i + 1] for p in paths}) > 1)
            asked = [f"used {self._names[p[first]]!r}" if first < len(p) else "used nothing more" for p in paths]
        said = "; ".join(f"rank {rank} {what}" for rank, what in zip(self._group.ranks, asked, strict=True))
        raise DivergenceError(
            f"the ranks took different paths ({self._where()}): {said}. zero_optimization.divergence is 'error'; "
            "set it to 'tolerate' to let ranks skip modules"
        )

    def _asks(self, kind: Kind, unit: int) -> str:
        what = {Kind.REDUCE: "reduces the gradients of", Kind.GATHER: "needs"}.get(kind)
        return f"{what} {self._names[unit]!r}" if what else _ENDS[kind]
