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

from deepspeed.comm.collectives import AxisGroup, exchange_ints
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
    """``units[0]`` is needed; further ones (gathers only) are wished for. ``pending`` lists units with local gradients (FLUSH, STEP)."""

    kind: Kind
    units: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What every rank does now. For FLUSH and STEP ``units`` is the union of all ranks' pending units."""

    kind: Kind
    units: tuple[int, ...]


_ENDS = {
    Kind.LEAVE: "has reached the end of the forward",
    Kind.FLUSH: "has reached the end of the backward",
    Kind.STEP: "has reached the step",
}
_WISHES = 8
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
        own = Decision(request.kind, request.pending if request.kind >= Kind.FLUSH else request.units)
        if self._group is None:
            return own
        self.rounds += 1
        said = exchange_ints(self._encode(request), self._group)
        if all(row == said[0] for row in said):
            return own
        requests = [self._decode(row) for row in said]
        kind = min(r.kind for r in requests)
        heads = {(r.kind, r.units[:1]) for r in requests}
        if len(heads) > 1 and self._mode == "error":
            raise DivergenceError(self._report(requests))
        if kind >= Kind.FLUSH:
            return Decision(kind, tuple(sorted({u for r in requests for u in r.pending})))
        if kind is Kind.LEAVE:
            return Decision(kind, ())
        return Decision(kind, (min(r.units[0] for r in requests if r.kind is kind),))

    def _encode(self, request: Request) -> list[int]:
        wishes = [*request.units[:_WISHES], *([-1] * (_WISHES - len(request.units)))]
        words = [0] * self._words
        for unit in request.pending:
            words[unit // _WORD] |= 1 << (unit % _WORD)
        return [int(request.kind), *wishes, *words]

    def _decode(self, row: list[int]) -> Request:
        units = tuple(u for u in row[1 : 1 + _WISHES] if u >= 0)
        pending = tuple(word * _WORD + bit for word, bits in enumerate(row[1 + _WISHES :]) for bit in range(_WORD) if bits >> bit & 1)
        return Request(Kind(row[0]), units, pending)

    def _report(self, requests: list[Request]) -> str:
        ranks = self._group.ranks if self._group is not None else (0,)
        parts = []
        for rank, r in zip(ranks, requests, strict=True):
            what = {Kind.REDUCE: "reduces the gradients of", Kind.GATHER: "needs"}.get(r.kind)
            place = f"{what} {self._names[r.units[0]]!r}" if what else _ENDS[r.kind]
            parts.append(f"rank {rank} {place}")
        return (
            f"the ranks took different paths ({self._where()}): {'; '.join(parts)}. zero_optimization.divergence is 'error'; "
            "set it to 'tolerate' to let ranks skip modules"
        )
