"""The gathers and reductions of one runtime, issued in the one order that all ranks agree on.

A rank asks before it issues collectives (agreement.py says how an answer comes about, by message or by prediction), and
executes what is decided: its own, and as a dummy participant what other ranks need. Decisions that are not issued yet
are pending; after an error a rank issues them all the same, as the others wait in them.
"""

from collections import deque
from collections.abc import Callable

from deepspeed.comm import collectives
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.sync.agreement import PASSING, Agreement, Decision, Kind, Request
from deepspeed.zero.unit import Unit
from deepspeed.zero.window import GradState

_GROUPED = 2  # complete gradients that may wait for the next message before they get one of their own


class CollectiveOrder:
    """Order of one runtime's collectives. ``gather(unit, dummy)`` and ``reduce(unit)`` issue one; ``heard()`` returns
    the error to raise when another rank has failed.
    """

    def __init__(
        self,
        units: list[Unit],
        mesh: Mesh,
        gradients: Gradients,
        agreement: Agreement,
        *,
        gather: Callable[[Unit, bool], object],
        reduce: Callable[[Unit], object],
        heard: Callable[[Kind], Exception],
    ) -> None:
        self._units, self._mesh, self._gradients, self.agreement = units, mesh, gradients, agreement
        self._gather, self._reduce, self._heard = gather, reduce, heard
        # What has been decided and is not issued yet: kind, unit, as a dummy. The mark is of before the first of them.
        self._pending = deque[tuple[Kind, int, bool]]()
        self._mark = 0
        self.stepping = False  # the last decision was the step
        self._complete: list[int] = []  # units whose gradients are complete and wait for the next message
        self._path: list[int] = []  # units used since the last sync point, where divergence is an error
        # Of the interval under way: units that only a dummy has reduced, and whether any other was.
        self._vacant: list[Unit] = []
        self._contributed = False
        # Whether something else communicates between a forward and its backward; the count at the end of a forward.
        self._foreign = self._watchful = False
        self._passed_at: int | None = None
        self._unanswered = False  # the last forward was passed without a message, and no backward has come yet

    # -- asking --------------------------------------------------------------------------------------------------------
    def ask(
        self, kind: Kind, units: tuple[int, ...] = (), *, pending: tuple[int, ...] = (), urgent: bool = True
    ) -> Decision | None:
        """Agree on the next collectives, issue them and those of complete gradients; return the last decision."""
        request = Request(kind, units, pending, () if kind >= Kind.LEAVE else tuple(self._complete))
        if kind >= Kind.LEAVE:
            request = Request(kind, units, pending, (), tuple(self._path), self._marks(pending))
        decision = None
        wanted = units[0] if units and kind < Kind.LEAVE else None
        for decision in self.agreement.ask(request, urgent=urgent):
            self.stepping = decision.kind is Kind.STEP
            self.execute(decision, wanted)
            if decision.kind is Kind.FAILED:
                raise self._heard(kind)
            if decision.kind >= Kind.FLUSH or decision.closes:
                self._path.clear()
            if decision.closes:
                self._close(nothing_reduced=request.marks[-1:] == (True,))
        self._complete = [i for i in self._complete if self._units[i].window.partial is not None]
        return decision

    def _marks(self, pending: tuple[int, ...]) -> tuple[object, ...]:
        """Return further facts that must be equal on all ranks for them to learn from the interval."""
        local = tuple(i for i in self._gradients.pending() if i not in pending)
        void = bool(self._vacant) and not (self._contributed or local or pending)
        # Where clients write gradients by hand a step may need a message at any time: equal nowhere, so no prediction.
        wrote = self._gradients.written and 1 + self._mesh.job.index
        return local, self._foreign, wrote, void

    def _close(self, *, nothing_reduced: bool) -> None:
        """End the interval."""
        if self.agreement.agreed:
            self._watchful |= self._foreign
            if nothing_reduced:  # no rank had a gradient for what was reduced
                self.forget_vacant()
        self._vacant.clear()
        self._contributed = self._foreign = False

    def execute(self, decision: Decision, wanted: int | None = None) -> None:
        """Issue the collectives of ``decision``; ``wanted``: the unit that this rank needs."""
        self._pending += [(Kind.REDUCE, index, False) for index in decision.reduced]
        for position, index in enumerate(decision.units if decision.kind is Kind.GATHER else ()):
            dummy = index != wanted and (position == 0 or wanted not in decision.units)
            self._pending.append((Kind.GATHER, index, dummy))
        self.issue_pending()

    def issue_pending(self, *, after: BaseException | None = None) -> None:
        """Issue all decided collectives; ``after`` an error those that are left, as a dummy participant."""
        if after is not None and self._pending and collectives.noted() != self._mark + 1:
            self._pending.popleft()  # it was issued, and failed later
        while self._pending:
            kind, index, dummy = self._pending[0]
            self._mark = collectives.noted()
            if kind is Kind.REDUCE:
                self._reduce(self._units[index])
            else:
                self._gather(self._units[index], dummy or after is not None)
            self._pending.popleft()

    # -- what happens meanwhile ----------------------------------------------------------------------------------------
    def used(self, unit: Unit) -> None:
        """Record that a module uses ``unit``."""
        if self.agreement.strict:
            self._path.append(unit.index)

    def gradient_complete(self, unit: Unit, *, at_once: bool) -> None:
        """Reduce ``unit`` with the next message, or with its own where that is due, or ``at_once``."""
        if unit.index not in self._complete:
            self._complete.append(unit.index)
        go = at_once or len(self._complete) >= _GROUPED
        while self._complete and go:
            overdue = len(self._complete) > 2 * _GROUPED
            go = self.ask(Kind.REDUCE, (self._complete[0],), urgent=overdue) is not None
            if not go:
                del self._complete[: int(overdue)]  # its turn is over; the flush will reduce it

    def note_reduction(self, unit: Unit) -> None:
        """Note that ``unit`` is about to be reduced, maybe by a rank without a gradient of it."""
        if unit.window.state is GradState.EMPTY:
            self._vacant.append(unit)
        else:
            self._contributed |= bool(unit.window.fired)

    def forward_begins(self) -> None:
        """Note whether anything else has communicated since the end of the last forward: see [Note: agreement]."""
        if self._passed_at is not None:
            self._foreign |= collectives.issued() != self._passed_at + 1
        self._passed_at = None

    def backward_begins(self) -> None:
        """Note that the last forward has its backward."""
        self.forward_begins()
        self._unanswered = False

    def leave_forward(self, *, passing: bool, serves: bool) -> None:
        """End a forward: if it ``serves``, also for ranks that still run parts of it which this one skipped (I7).

        ``passing``: a backward follows, so that no message is needed; but a second forward before any backward may be
        one of many, of an evaluation.
        """
        passing = passing and not (self._watchful or self._unanswered)
        wanted = Decision(Kind.LEAVE, PASSING if passing else ())
        while serves and self.ask(wanted.kind, wanted.units) != wanted:
            pass
        self._passed_at = collectives.issued() if passing else None
        self._unanswered = passing

    def forget_vacant(self) -> None:
        """Drop the sums of zeros that dummy participants have made."""
        self._gradients.land_all()
        for unit in self._vacant:
            unit.window.reset()

    # -- after an error ------------------------------------------------------------------------------------------------
    @property
    def clean(self) -> bool:
        """Tell whether this rank has contributed to no reduction since the last message."""
        return not (self._contributed or self._gradients.pending())

    def ask_until_failed(self) -> None:
        """Issue collectives of other ranks until all take part in the message that this one has failed."""
        while True:
            for decision in self.agreement.ask(Request(Kind.FAILED)):
                self.execute(decision)
                if decision.kind is Kind.FAILED:
                    return

    def restart(self, *, forget_vacant: bool) -> None:
        """Restart after the ranks have met in an error; ``forget_vacant``: none has contributed to a reduction."""
        if forget_vacant:
            self.forget_vacant()
        self._vacant.clear()
        self._contributed = self._foreign = False

    def drop_pending(self) -> None:
        """Drop decided collectives, for which nobody waits any more."""
        self._pending.clear()

    def reset(self, *, keep_gradients: bool) -> None:
        """Forget the forward or backward that an error has ended."""
        self._passed_at, self._unanswered = None, False
        self._complete.clear()
        self._path.clear()
        if not keep_gradients:
            self._vacant.clear()
