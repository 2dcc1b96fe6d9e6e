"""One order of collectives on every rank, also when ranks take different branches.

[Note: agreement] A rank *asks* before it issues gathers or reductions, and every rank executes the same *decisions* in the same
order (ZeRO invariant I7). There are two ways to a decision.

*By message.* The ranks compare a digest of what they ask for; if it is equal everywhere, all of it is executed. If not, they
exchange the requests and the smallest one is executed by everybody: a rank that did not ask for it is a guest, which gathers and
drops the unit, or contributes zeros to the reduction. A rank asks again until it was served, and one that has reached the end of
the model's forward, of backward, or the step serves the others until all have.

*By habit.* The decisions between two closing messages (the end of a backward; of a forward that has none) are an interval. All
ranks executed the same ones, so all know the same past; if it repeats, all foretell the same next interval (schedule.Habits), and
its decisions are executed when they come up, without messages. What a rank asks for is looked up in the rest of the interval: all
before it is executed as a guest. If it is not there, the rank executes the whole rest as a guest, and then asks by message, where
it meets the others at the latest at their closing message. An interval in which a rank did so, or in which a message found ranks
unequal, is not learnt from.

Why no rank waits for a collective that another one never issues: before each message a rank has executed the interval to its end,
so the decisions between two messages are the same list everywhere, in the same order. Within the list a rank waits only for ranks
that are further back in it; each of those goes on, because whatever its code does next either is in the rest, or makes it execute
the rest: further reads, the end of the forward, of the backward. Messages pair off one by one; of the requests in one, the smallest
is served, and its rank goes on, so some rank always does. What an error on one rank leaves of an interval stays to be executed.

What the proof needs of the code outside: it does not wait for another rank in between. The end of a forward is no message by habit
in training, so code between it and the backward that does (a collective of the user's, another engine) has to be seen: the runtime
watches for it (``Request.foreign``), and from then on that place is a closing message, as it is in evaluation. The step is none
either where every step followed its backward: a rank that then leaves one out alone is not waited for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from deepspeed.comm.collectives import AxisGroup, all_equal, exchange_ints, gather_objects
from deepspeed.errors import DivergenceError
from deepspeed.zero.schedule import Habits


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

    ``reduces`` are reductions that travel with another request, to save a message; they come before it. Of the rest only the digest
    travels: ``path``, the units used since the last meeting point (where divergence is an error), and what else must be equal for
    the next interval to be foretold: ``local``, units whose gradients stay on their rank; ``foreign``, whether others' collectives
    were seen after a forward; ``void``, whether nothing but zeros was reduced.
    """

    kind: Kind
    units: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    reduces: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    local: tuple[int, ...] = ()
    foreign: bool = False
    void: bool = False

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

    @property
    def reduced(self) -> tuple[int, ...]:
        """All units whose gradients are reduced, in order."""
        return self.reduces if self.kind in (Kind.GATHER, Kind.LEAVE) else tuple(dict.fromkeys((*self.reduces, *self.units)))

    def serves(self, request: Request, *, urgent: bool) -> bool:
        """Whether a rank with this request is served; if it is not ``urgent``, only by all of what it is ready for."""
        if request.kind is Kind.REDUCE:
            return request.units[0] in self.reduced if urgent else self.kind is Kind.REDUCE and set(self.reduced) <= set(request.reduces)
        if self.kind is not request.kind:
            return False
        if self.kind is Kind.GATHER:
            whole = self.units == request.units and set(self.reduces) <= set(request.reduces)
            return whole or (urgent and request.units[0] in self.units)
        return set(request.pending) <= set(self.units) if self.kind is Kind.STEP else self.units == request.units

    @property
    def closes(self) -> bool:
        """Whether it ends an interval: the end of a backward, and of a forward of which nothing is to follow by habit."""
        return self.kind is Kind.FLUSH or (self.kind is Kind.LEAVE and not self.units)


# ``Request.units`` at the end of a forward that may be passed without a message, because its backward follows.
PASSING = (0,)
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
        self._habits: Habits[Decision] = Habits()
        self._rest: list[Decision] = []  # of the interval that is foretold, last one first
        self._done: list[Decision] = []
        self._foretold = self._strayed = False
        # Seen between a forward and its backward: collectives of others.
        self.foreign = False
        # The last message found all ranks equal.
        self.agreed = True
        self.rounds = self.mismatches = 0

    def ask(self, request: Request, *, urgent: bool = True) -> Iterator[Decision]:
        """What all ranks execute now; repeat until served. Collective. Raises DivergenceError in mode "error".

        Without ``urgent`` nothing is waited for by habit: there may be nothing to execute, and the request is dropped.
        """
        if self._group is None:
            yield _whole(request)
            return
        count = self._reach(request, urgent=urgent)
        if count is None:
            yield self._message(request)
            return
        for _ in range(count):
            decision = self._rest.pop()
            self._done.append(decision)
            self._strayed |= urgent and not decision.serves(request, urgent=True)
            yield decision

    def _reach(self, request: Request, *, urgent: bool) -> int | None:
        """How many decisions to execute by habit for ``request``; None where a message has to be sent."""
        if not self._rest:
            return None
        if not urgent:
            return int(self._rest[-1].serves(request, urgent=False))
        count = 0
        for decision in reversed(self._rest):
            if decision.kind is Kind.STEP is not request.kind:  # no guest can take it
                break
            if decision.serves(request, urgent=True):
                return count + 1
            count += 1
        if request.kind is Kind.REDUCE:
            return 0
        if count == 0:
            self._rest.clear()
            self._strayed = True
        return count or None

    def _message(self, request: Request) -> Decision:
        """Compare requests, exchange them if they differ, and return the common decision."""
        assert self._group is not None
        self.rounds += 1
        self.agreed = all_equal(self._digest(request), self._group)
        if self.agreed:
            decision = _whole(request)
            if request.foreign and not self.foreign:
                self.foreign = self._strayed = True
                self._habits = Habits()
        else:
            self.mismatches += 1
            decision = self._smallest(request)
        self._strayed |= not self.agreed
        self._done.append(decision)
        if decision.closes:
            self._close()
        return decision

    def _digest(self, request: Request) -> int:
        r = request
        flags = (self._strayed, r.foreign, r.void)
        return hash((int(r.kind), r.units, r.pending, r.reduces, r.path, r.local, flags)) >> 2 & (1 << 61) - 1

    def _smallest(self, request: Request) -> Decision:
        assert self._group is not None
        said = exchange_ints(self._encode(request), self._group)
        requests = [self._decode(row) for row in said]
        heads = {r.head for r in requests}
        if self._mode == "error":
            try:
                self._refuse(requests, heads, request.path)
            except DivergenceError:
                self._strayed = True
                self._close()
                raise
        if all(row == said[0] for row in said):
            return _whole(request)
        kind, unit = min(heads)
        if kind >= Kind.FLUSH:
            return Decision(kind, tuple(sorted({u for r in requests for u in r.pending})))
        return Decision(kind, (unit,) if unit >= 0 else ())

    def _close(self) -> None:
        """End the interval; foretell the next one."""
        self._habits.close(None if self._strayed else tuple(self._done), foretold=self._foretold)
        self._rest = list(self._habits.forecast()[:-1])[::-1]
        self._foretold, self._strayed = bool(self._rest), False
        self._done.clear()

    def _encode(self, request: Request) -> list[int]:
        wishes = [*request.units[:_WISHES], *([-1] * (_WISHES - len(request.units)))]
        words = [0] * self._words
        for unit in request.pending:
            words[unit // _WORD] |= 1 << (unit % _WORD)
        reduces = [*request.reduces[:_REDUCES], *([-1] * (_REDUCES - len(request.reduces)))]
        return [int(request.kind), *wishes, *reduces, *words]

    def _decode(self, row: list[int]) -> Request:
        wishes, reduces, words = row[1 : 1 + _WISHES], row[1 + _WISHES : 1 + _WISHES + _REDUCES], row[1 + _WISHES + _REDUCES :]
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


def _whole(request: Request) -> Decision:
    """What is done when all ranks ask for the same."""
    return Decision(request.kind, request.pending if request.kind >= Kind.FLUSH else request.units, request.reduces)
