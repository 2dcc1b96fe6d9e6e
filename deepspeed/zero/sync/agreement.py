"""One order of collectives on every rank, also when ranks take different branches.

[Note: agreement] A rank *asks* before it issues gathers or reductions, and all execute the same *decisions* (ZeRO
invariant I7). They come *by message*: of requests that differ the smallest one is decided, and ranks that did not ask
for it are dummy participants. Or they come *by prediction*: all ranks predict the same interval between two sync points
from the past that they share. docs/architecture.md, section 6, has the rules.

Why no rank waits for a collective that another one never issues: a rank has executed the interval to its end before it
takes part in a message, so what is decided between two messages is one list everywhere, in one order. In it a rank
waits only for ranks further back, and these go on, because whatever their code does next is in the rest or makes them
execute it. Of the requests in a message the smallest is served, so some rank goes on. The code outside must not wait
for other ranks within an interval (``Runtime.meet`` watches for that).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from deepspeed.comm.collectives import AxisGroup, gather_objects, merge
from deepspeed.errors import DivergenceError
from deepspeed.zero.schedule import IntervalPredictor


class Kind(IntEnum):
    """Kinds of request in order of precedence: an error comes before everything."""

    FAILED = -1
    REDUCE = 0
    GATHER = 1
    LEAVE = 2
    FLUSH = 3
    STEP = 4


@dataclass(frozen=True)
class Request:
    """Request of one rank: ``units[0]`` is needed, further units (gathers only) are wished for.

    ``pending`` lists units with local gradients (FLUSH, STEP). ``reduces`` travel with another request, to save a
    message; they come before it. ``path`` lists the units used since the last sync point, where divergence is an error;
    ``marks``: other facts that must be equal to learn from the interval. Of both a digest travels.
    """

    kind: Kind
    units: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    reduces: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    marks: tuple[object, ...] = ()

    @property
    def head(self) -> tuple[Kind, int]:
        """Return this rank's first wish; the smallest head of all ranks is served when they differ."""
        if self.reduces:
            return Kind.REDUCE, self.reduces[0]
        return self.kind, self.units[0] if self.units else -1

    @property
    def whole(self) -> "Decision":
        """Return the decision when all ranks make this request."""
        return Decision(self.kind, self.pending if self.kind >= Kind.FLUSH else self.units, self.reduces)


@dataclass(frozen=True)
class Decision:
    """Next work of all ranks: first ``reduces``, then ``kind``. In a FLUSH or STEP ``units`` are all pending ones."""

    kind: Kind
    units: tuple[int, ...]
    reduces: tuple[int, ...] = ()

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """Return all units whose gradients are reduced, in order."""
        units = self.units if self.kind in (Kind.REDUCE, Kind.FLUSH, Kind.STEP) else ()
        return tuple(dict.fromkeys((*self.reduces, *units)))

    def serves(self, request: Request, *, urgent: bool) -> bool:
        """Tell whether ``request`` is served; without ``urgent``, only if its rank is ready for all reductions."""
        ready = set(self.reduced) <= set(request.reduces)
        if request.kind is Kind.REDUCE:
            return request.units[0] in self.reduced if urgent else self.kind is Kind.REDUCE and ready
        if self.kind is not request.kind:
            return False
        if self.kind is Kind.GATHER:
            return (self.units == request.units and ready) or (urgent and request.units[0] in self.units)
        return set(request.pending) <= set(self.units) if self.kind is Kind.STEP else self.units == request.units

    @cached_property
    def closes(self) -> bool:
        """Tell whether this is a sync point, ending an interval: an error, a backward's end or a lone forward's end."""
        return self.kind in (Kind.FAILED, Kind.FLUSH) or (self.kind is Kind.LEAVE and not self.units)


# ``Request.units`` at the end of a forward that may be passed without a message, because its backward follows.
PASSING = (0,)
_ASKS = {
    Kind.REDUCE: "reduces the gradients of {name}",
    Kind.GATHER: "needs {name}",
    Kind.LEAVE: "has reached the end of the forward",
    Kind.FLUSH: "has reached the end of the backward",
    Kind.STEP: "has reached the step",
    Kind.FAILED: "has failed",
}
_APART = "where after the last steps all ranks would take the next"
_ALIKE = "All ranks must take as many micro-batches a step; load a checkpoint, as the others may have updated"
_WORD, _KIND = 62, 1 << 32  # units in one number of a message; what the kinds of requests lie apart in another


class Agreement:
    """Control channel of one runtime. With one rank, or ``mode`` "assume_none", a request is its own decision."""

    def __init__(
        self,
        group: AxisGroup | None,
        mode: str,
        unit_names: list[str],
        *,
        where: Callable[[], str],
        title: Callable[[int], str] = "rank {}".format,
        doubt: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Set up the channel. ``where`` and ``title`` (of a rank) are words for an error. The message that replaces a
        predicted step is sent inside ``doubt(text)``: the others may be in that step, where no message reaches them.
        """
        self._group = group if group is not None and group.size > 1 and mode != "assume_none" else None
        self._names = unit_names
        self._where, self._title, self._doubt = where, title, doubt
        self._words = max(1, -(-len(unit_names) // _WORD))
        self._predictor = IntervalPredictor()
        self._rest: list[Decision] = []  # of the interval that is predicted, last one first
        self._done: list[Decision] = []
        self._predicted = self._strayed = self._left_out = False
        self._steps = 0  # executed, by message or by prediction
        self.apart = False  # some ranks have taken a step that others have not, so none can serve another
        self.strict = mode == "error"  # ranks must take the same path
        self.agreed = True  # the last message found all ranks equal
        self.rounds = self.mismatches = 0
        self._asked = Kind.STEP, -1

    @property
    def speaks(self) -> bool:
        """Tell whether the ranks send each other messages."""
        return self._group is not None

    def ask(self, request: Request, *, urgent: bool = True) -> Iterator[Decision]:
        """Yield the decisions that all ranks execute; repeat until served. Collective. DivergenceError in mode "error".

        Without ``urgent`` at most the next predicted decision: there may be none, and the request is dropped.
        """
        if self._group is None:
            yield request.whole
            return
        count = self._reach(request, urgent=urgent)
        if count is None:
            yield self._message(request)
            return
        for _ in range(count):
            decision = self._rest.pop()
            self._note(decision)
            self._strayed |= urgent and not decision.serves(request, urgent=True)
            yield decision

    def _reach(self, request: Request, *, urgent: bool) -> int | None:
        """Count the predicted decisions to execute for ``request``; None where a message has to be sent."""
        if not self._rest:
            return None
        if not urgent:
            return int(self._rest[-1].serves(request, urgent=False))
        count = 0
        for decision in reversed(self._rest):
            if decision.serves(request, urgent=True):
                return count + 1
            if decision.kind is Kind.STEP:  # no dummy can take it, nor who has gradients that it does not reduce
                break
            count += 1
        if request.kind is Kind.REDUCE:
            return 0
        if count == 0:  # all others may do so, too
            self._rest.clear()
            self._strayed = self._left_out = True
        return count or None

    def _message(self, request: Request) -> Decision:
        """Compare requests and return the common decision: the smallest if they differ, with all pending units."""
        assert self._group is not None
        r, marks = request, (*request.marks, self._strayed)
        digest = hash((int(r.kind), r.units, r.pending, r.reduces, r.path, marks)) >> 2 & (1 << 61) - 1
        kind, unit = self._asked = request.head
        words = [0] * self._words
        for index in request.pending:
            words[index // _WORD] |= 1 << (index % _WORD)
        numbers = [digest, -digest, -(kind * _KIND + unit + 1), self._steps, -self._steps]
        doubtful, self._left_out = self._left_out and kind is not Kind.FAILED, False
        try:
            with self._doubt(f"{self._where()}: {self._asks(kind, unit)} {_APART}") if doubtful else nullcontext():
                (most, least, smallest, late, early), words = merge(numbers, words, self._group)
        except RuntimeError as error:
            if not doubtful:
                raise
            self.apart = True
            raise DivergenceError(
                f"{self._where()}: this rank {self._asks(kind, unit)} {_APART}, and they have not come: {_ALIKE}"
            ) from error
        if late != -early:
            self._part(request)
        self.agreed = most == -least
        self.rounds += 1
        self.mismatches += not self.agreed
        self._strayed |= not self.agreed
        decision = request.whole
        if not self.agreed:
            kind, unit = Kind(-smallest // _KIND), -smallest % _KIND - 1
            if self.strict and kind is not Kind.FAILED:
                self._refuse(request)
            pending = (_WORD * i + bit for i, word in enumerate(words) for bit in range(_WORD) if word >> bit & 1)
            decision = Decision(kind, tuple(pending) if kind >= Kind.FLUSH else (unit,) if unit >= 0 else ())
        self._note(decision)
        self._strayed |= decision.kind is Kind.FAILED
        if decision.closes:
            self._close()
        return decision

    def _note(self, decision: Decision) -> None:
        self._done.append(decision)
        self._steps += decision.kind is Kind.STEP

    def waits_for(self) -> str:
        """Describe the message under way, for a watch."""
        return f"an agreement of the ranks (it {self._asks(*self._asked)})"

    def _asks(self, kind: Kind, unit: int) -> str:
        return _ASKS[kind].format(name=repr(self._names[unit]) if unit >= 0 else "the next units")

    def _part(self, request: Request) -> None:
        """Raise on all ranks: some have taken a predicted step in whose place others have done something else."""
        assert self._group is not None
        self.apart = True
        gathered = gather_objects((self._steps, *request.head), self._group)
        ranks = "; ".join(
            f"{self._title(rank)} {self._asks(kind, unit)} after {steps} steps"
            for rank, (steps, kind, unit) in zip(self._group.ranks, gathered, strict=True)
        )
        raise DivergenceError(f"the ranks have taken different numbers of steps ({self._where()}): {ranks}. {_ALIKE}")

    def _close(self) -> None:
        """End the interval; predict the next one."""
        self._predictor.close(None if self._strayed else tuple(self._done), predicted=self._predicted)
        self._rest = list(self._predictor.forecast()[:-1])[::-1]
        self._predicted, self._strayed = bool(self._rest), False
        self._done.clear()

    def _refuse(self, request: Request) -> None:
        """Raise when the ranks ask for different things, or met having used different modules."""
        assert self._group is not None
        heads, paths = zip(*gather_objects((request.head, request.path), self._group), strict=True)
        if len(set(heads)) > 1:
            asked = [self._asks(kind, unit) for kind, unit in heads]
        else:
            if all(p == paths[0] for p in paths):
                return
            first = next(i for i in range(max(map(len, paths))) if len({p[i : i + 1] for p in paths}) > 1)
            asked = [f"used {self._names[p[first]]!r}" if first < len(p) else "used nothing more" for p in paths]
        self._close()
        ranks = "; ".join(f"{self._title(rank)} {text}" for rank, text in zip(self._group.ranks, asked, strict=True))
        raise DivergenceError(
            f"the ranks took different paths ({self._where()}): {ranks}. zero_optimization.divergence is 'error'; "
            "set it to 'tolerate' to let ranks skip modules"
        )
