"""The verbs of ZeRO over units: enter, leave, prefetch, pin, reduce, flush, reset, publish.

One runtime per engine; hooks (hooks.py) only call these verbs, and every verb is idempotent. Which collectives run, and
in which order, is agreed between the ranks (agreement.py); what to fetch early comes from the recorded schedule.
"""

import contextlib
import functools
import os
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from deepspeed.comm import collectives
from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import DivergenceError, RankFailedError, UsageError
from deepspeed.mesh.groups import Mesh, drop_note, leave_note
from deepspeed.observe import hostmem
from deepspeed.observe.log import logger
from deepspeed.tier.behind import Worker
from deepspeed.zero.agreement import PASSING, Agreement, Decision, Kind, Request
from deepspeed.zero.failures import Aftermath, RankState, break_off_all, doubt, error_of, patience, serving
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.optim_view import OptimTiles, OptimView
from deepspeed.zero.partition import GradState, UnitState
from deepspeed.zero.plan import InFlight, StateKind, Tier, ZeroPlan
from deepspeed.zero.publish import Publication
from deepspeed.zero.schedule import Schedule
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.delayed import Delayed
from deepspeed.zero.update.early import Early
from deepspeed.zero.update.visits import Visits

_ALIKE_S = 10.0  # within which ranks that send each other no messages are to have failed, too
_TRAVEL_TOGETHER = 2  # complete gradients that may wait for the next message before they get one of their own


class Runtime:
    """Owns schedule, agreement and gradients of one engine's units, weights' streams, and policies of the update."""

    tiles: OptimTiles | None = None
    visits: Visits | None = None
    delayed: Delayed | None = None
    early: Early | None = None
    watch_gradients: Callable[[list[Unit]], None] | None = None  # called before each update; collective

    def __init__(
        self, units: list[Unit], plan: ZeroPlan, mesh: Mesh, *, accum: torch.dtype, device: torch.device
    ) -> None:
        self.units, self.plan, self.mesh, self.device = units, plan, mesh, device
        self._stream, self.up = collectives.SideStream(device), collectives.SideStream(device)
        self.worker, self.schedule = _worker(units, device), Schedule()
        self.gradients = Gradients(units, plan, accum=accum, device=device)
        words: dict[str, Any] = {"where": self._where, "title": mesh.title, "doubt": functools.partial(doubt, mesh)}
        self.agreement = Agreement(mesh.control, plan.divergence, [u.title for u in units], **words)
        # What happened since construction, for tests and benchmarks.
        self.gathers = self.gathered_numel = self.reductions = self.guest_collectives = 0
        self.steps = self.depth = self.flushes = 0
        self.in_backward = self.in_one_pass = False
        # The engine, while it lives; and its optimizer.
        self.client: Callable[[], Any] = lambda: None
        self.optimizer: torch.optim.Optimizer | None = None
        self.catch_up: Callable[[], None] = lambda: None  # publish what is delayed; collective then
        # Set by the engine: is the running backward the last one of the accumulation window?
        self.window_ends: Callable[[], bool] = lambda: True
        # Called once when a backward begins; the engine checks loss scaling and sets factors there.
        self.on_backward: Callable[[], None] = lambda: None
        self.before_update: Callable[[], None] = lambda: None  # masters, slots or PARAM at rest will be written
        self._numels = [u.layout.numel if u.movable else 0 for u in units]
        movable = sorted(n for n in self._numels if n)
        # Two typical units ahead hide a gather; more would only hold memory. The next comes early whatever its size.
        self._window = min(plan.prefetch_numel, 2 * movable[len(movable) // 2]) if movable and plan.overlap else 0
        self._nothing = [0] * len(units)
        self._reads_ahead = any(u.on_drive(StateKind.PARAM) for u in units)
        self._on_demand: list[list[Unit]] = []
        # What has been decided and is not issued yet: kind, unit, as a guest. The mark is of before the first of them.
        self._owed: deque[tuple[Kind, int, bool]] = deque()
        self._mark = 0
        self._stepping = False  # the last decision was the step
        # The error that the others know already; whether it came when they may have updated their parameters.
        self.known: BaseException | None = None
        self.half_updated = False
        self.broken = ""  # why this rank cannot go on with the others
        self._apart, self._alone, self._losses = "", 0, 0
        # Units whose gradients are complete and wait to be reduced with the next message.
        self._complete: list[int] = []
        self._path: list[int] = []
        # Of the interval under way: units that only a guest has reduced, and whether any other was.
        self._vacant: list[Unit] = []
        self._contributed = False
        # Whether something else communicates between a forward and its backward; the count at the end of a forward.
        self._foreign = self._watchful = False
        self._passed_at: int | None = None
        # The last forward has been passed without a message, and no backward has come yet.
        self._unanswered = False
        self._trains = any(u.trainable for u in units)
        saves_memory = device.type == "cpu" and any(u.drives for u in units)  # the heap gives back what it keeps
        self._trim: Callable[[], object] = hostmem.HeapTrimmer().trim if saves_memory else lambda: None
        self.second_order = False  # the last backward keeps a graph: its units stay until one that does not
        for unit in units:
            unit.keep_by(weakref.ref(self))

    @property
    def after(self) -> float:
        """What a reduced gradient has still to be multiplied by to be the mean."""
        return self.gradients.after(self.units[0]) if self.units else 1.0

    @contextlib.contextmanager
    def attached(self, view: OptimView, *, write: bool = False, publish: bool = False) -> Iterator[dict[str, Any]]:
        """Inside, optimizer state of ``view`` that rests on a drive is in memory; what the optimizer keeps for it."""
        view.unit.settle_states()
        tiles, state = self.tiles, self.optimizer.state.get(view.param, {}) if self.optimizer is not None else {}
        if write:
            self.before_update()
        with tiles.attached(view, write=write, publish=publish) if tiles is not None else contextlib.nullcontext():
            yield state

    def enter(self, units: Iterable[Unit], *, recompute: bool) -> None:
        """A module that needs ``units`` is about to run."""
        if not recompute:
            if self.depth == 0:
                self._look_back()
                for unit in self.units:
                    unit.check_views(sample=True)
                phase = "train" if torch.is_grad_enabled() else "eval"
                if phase == "eval" or self.schedule.phase is None:
                    self.schedule.begin(phase)
            self.depth += 1
            self._on_demand.append([])
            for unit in units:  # counted first, so that leave() balances also when need() raises
                unit.add_user()
        self.need(units)

    def leave(self, units: Iterable[Unit], *, keep: bool = False) -> None:
        """That module has run. ``keep``: its backward could not be foreseen, so its units stay until the flush."""
        for unit in [*units, *(self._on_demand.pop() if self._on_demand else [])]:
            unit.drop_user(keep=keep)
            if unit.movable and unit.idle and unit.state is UnitState.READY and not (self.in_backward or unit.kept):
                if not self._stays(unit):
                    unit.release()
                elif unit.borrowed:  # the next one who borrows it is to ask, and to be noted
                    unit.cover()
        self.depth -= 1
        if self.depth == 0 and self.schedule.phase == "eval":
            self.schedule.end()
            self._forget_ahead()

    def meet(self, *, passing: bool = False) -> int:
        """The model's outermost forward has ended: serve ranks that still run parts of it which this one skipped (I7).

        A user's context ends so too; the pins tell whether all end the same one. ``passing``: a backward follows.
        """
        if self.in_one_pass:
            return 0
        # A second forward before any backward may be one of many, of an evaluation that keeps gradients on.
        passing = passing and torch.is_grad_enabled() and self._trains and not (self._watchful or self._unanswered)
        wanted = Decision(Kind.LEAVE, PASSING if passing else ())
        while not self.depth and any(self._numels) and self._ask(wanted.kind, wanted.units) != wanted:
            pass
        self._passed_at = collectives.issued() if passing else None
        self._unanswered = passing
        return sum(u.pins for u in self.units)

    def _look_back(self) -> None:
        """Note whether anything else has communicated since the end of the last forward: see [Note: agreement]."""
        if self._passed_at is not None:
            self._foreign |= collectives.issued() != self._passed_at + 1
        self._passed_at = None

    def borrowed(self) -> list[Unit]:
        """Units the running module has read without owning them; its backward will read them too."""
        return list(self._on_demand[-1]) if self._on_demand else []

    def _stays(self, unit: Unit) -> bool:
        """Whether an idle unit is needed again next (or within the distance the user allows), and there is room."""
        if not self.schedule.needed_within(unit.index, self._numels, self.plan.reuse_numel):
            return False
        live = sum(n for n, u in zip(self._numels, self.units, strict=True) if u.state is not UnitState.ABSENT)
        return live <= self.plan.live_numel

    def need(self, units: Iterable[Unit]) -> None:
        """Make ``units`` READY now, and start fetching what the schedule foresees. Collective with the other ranks."""
        units = list(units)
        movable = [u for u in units if u.movable]
        for unit in units if len(movable) < len(units) else ():
            unit.settle()
        indices = {u.index for u in movable}
        for unit in movable:
            self.schedule.use(unit.index)
            if self.agreement.strict:
                self._path.append(unit.index)
        for unit in movable:
            if unit.state is not UnitState.ABSENT and unit.fetched_version != unit.version:
                self._discard(unit)  # a forecast from before the last step must never serve stale weights (I6)
            while unit.state is UnitState.ABSENT:
                others = [u.index for u in movable if u is not unit and u.state is UnitState.ABSENT]
                self._ask(Kind.GATHER, (unit.index, *dict.fromkeys([*others, *self._ahead(indices)])))
        for unit in movable:
            unit.arrive()
        ahead = self._ahead(indices) if movable else []
        if ahead:
            self._ask(Kind.GATHER, tuple(ahead), urgent=False)
        if not self._reads_ahead or not movable:
            return
        # Start to read the next shards from their drive. Local: what another rank reads ahead does not matter.
        for index in self.schedule.ahead(self._nothing, window_numel=0, most=InFlight.READS):
            unit = self.units[index]
            if unit.on_drive(StateKind.PARAM) and unit.state is UnitState.ABSENT and not unit.read_ahead():
                return

    def _ahead(self, besides: Collection[int]) -> list[int]:
        """Units to fetch early; none while the next one is here or on its way, so that several share one message."""
        others = self.schedule.ahead(self._numels, window_numel=self._window, besides=besides) if self._window else []
        if others and self.units[others[0]].state is not UnitState.ABSENT:
            return []
        return [i for i in others if self.units[i].movable and self.units[i].state is UnitState.ABSENT]

    def _ask(
        self, kind: Kind, units: tuple[int, ...] = (), *, pending: tuple[int, ...] = (), urgent: bool = True
    ) -> Decision | None:
        """Agree with all ranks on the next collectives and execute them, complete gradients too; the last decision."""
        request = Request(kind, units, pending, () if kind >= Kind.LEAVE else tuple(self._complete))
        if kind >= Kind.LEAVE:
            local = tuple(i for i in self.gradients.pending() if i not in pending)
            void = bool(self._vacant) and not (self._contributed or local or pending)
            # Where clients write gradients by hand a step may need a message at any time: equal nowhere, so no habit.
            wrote = self.gradients.written and 1 + self.mesh.job.index
            request = Request(kind, units, pending, (), tuple(self._path), (local, self._foreign, wrote, void))
        decision = None
        wanted = units[0] if units and kind < Kind.LEAVE else None
        for decision in self.agreement.ask(request, urgent=urgent):
            self._stepping = decision.kind is Kind.STEP
            self._execute(decision, wanted)
            if decision.kind is Kind.FAILED:
                assert self.mesh.control is not None
                in_forward = not self.in_backward and kind < Kind.FLUSH
                raise error_of(
                    self.share(None, self._where(), in_forward=in_forward, group=self.mesh.control), self.mesh
                )
            if decision.kind >= Kind.FLUSH or decision.closes:
                self._path.clear()
            if decision.closes:
                if self.agreement.agreed:
                    self._watchful |= self._foreign
                    if request.marks[-1:] == (True,):  # no rank had a gradient for what was reduced
                        self._forget_vacant()
                self._vacant.clear()
                self._contributed = self._foreign = False
        self._complete = [i for i in self._complete if self.units[i].partial is not None]
        return decision

    def _execute(self, decision: Decision, wanted: int | None = None) -> None:
        self._owed += [(Kind.REDUCE, index, False) for index in decision.reduced]
        for position, index in enumerate(decision.units if decision.kind is Kind.GATHER else ()):
            guest = index != wanted and (position == 0 or wanted not in decision.units)
            self._owed.append((Kind.GATHER, index, guest))
        self._pay()

    def _pay(self, *, after: BaseException | None = None) -> None:
        """Issue what has been decided; ``after`` an error, as a guest, what that has left."""
        if after is not None and self._owed and collectives.noted() != self._mark + 1:
            self._owed.popleft()  # it was issued, and failed later
        while self._owed:
            kind, index, alone = self._owed[0]
            self._mark = collectives.noted()
            if kind is Kind.REDUCE:
                self._reduce(self.units[index])
            else:
                self._gather(self.units[index], guest=alone or after is not None)
            self._owed.popleft()

    def _gather(self, unit: Unit, *, guest: bool) -> None:
        self.gathers += 1
        self.gathered_numel += unit.layout.numel
        if unit.state is not UnitState.ABSENT:
            # Another rank lost this unit earlier than we did: serve it, and leave alone what may be edited here.
            unit.arrive()
            self.guest_collectives += 1
            self._stream.run(functools.partial(unit.start_gather, torch.empty_like(unit.full))).wait()
            return
        unit.fetch(self._stream.run)
        if guest:
            self.guest_collectives += 1
            self._discard(unit)

    def _forget_vacant(self) -> None:
        """Drop the sums of zeros that guests have made."""
        self.gradients.land_all()
        for unit in self._vacant:
            unit.clear_grad()

    def _discard(self, unit: Unit) -> None:
        unit.arrive()
        unit.release()

    def _discard_idle(self, units: list[Unit]) -> None:
        for unit in units:
            if unit.movable and unit.idle and unit.state is not UnitState.ABSENT:
                self._discard(unit)

    def may_fetch_on_demand(self) -> bool:
        """True while a module of this runtime runs, so that every rank is at the same place in the same code."""
        return self.depth > 0 or self.in_backward

    def fetch_on_demand(self, unit: Unit) -> bool:
        """A released parameter is read inside a forward: gather its unit until the running module is done."""
        if not self.may_fetch_on_demand():
            return False
        self.need([unit])
        if self._on_demand and not self.in_backward:
            unit.add_user(borrows=True)
            self._on_demand[-1].append(unit)
        return True

    def begin_backward(self) -> None:
        """The first gradient of a backward has reached the model."""
        if not self.in_backward:
            self._look_back()
            self._unanswered = False
            for unit in (u for u in self.units if not u.movable):  # a graph from before the update may be used again
                unit.settle()
            self.on_backward()
            self.gradients.withdraw()
            self.in_backward = True
            self.gradients.final = self.window_ends()

    def gradient_ready(self, unit: Unit, position: int, *, task: int) -> None:
        """Autograd has finished the gradient of one parameter in graph task ``task``."""
        if (unit.index, position) in self.gradients.adding:
            return  # it is where it belongs, and its unit stays
        self.gradients.pack(unit, position)
        # whatever earlier backwards have left of it
        if len(unit.arrived) == len(unit.params) and self.gradients.reduces_now(unit):
            if unit.index not in self._complete:
                self._complete.append(unit.index)
            go = not unit.movable or not self.plan.overlap or len(self._complete) >= _TRAVEL_TOGETHER
            while self._complete and go:
                overdue = len(self._complete) > 2 * _TRAVEL_TOGETHER
                go = self._ask(Kind.REDUCE, (self._complete[0],), urgent=overdue) is not None
                if not go:
                    del self._complete[: int(overdue)]  # its turn is over; the flush will reduce it
        if unit.all_done(position, task):
            self.backward_done(unit)

    def _reduce(self, unit: Unit) -> None:
        self.reductions += 1
        if not unit.fired:
            self.guest_collectives += 1
        if unit.grad_state is GradState.EMPTY:
            self._vacant.append(unit)
        else:
            self._contributed |= bool(unit.fired)
        self.gradients.reduce(unit)
        last = self.in_backward and self.gradients.final
        if last and self.tiles is not None:
            self.tiles.read_ahead()
        if last and self.early is not None:
            self.early.begin(unit)

    def backward_done(self, unit: Unit) -> None:
        """No further backward of this unit's modules is foreseen: release its parameters."""
        free = unit.movable and unit.idle and not unit.kept and unit.state is UnitState.READY and not self.second_order
        # Ops that do not differentiate the weights (``weight.detach()``) may read them later: then the flush releases.
        if free and not unit.read_by_others():
            unit.release()

    def flush(self) -> None:
        """End of a backward (or of a pipeline's): reduce what is left, release everything. Idempotent (I4)."""
        self.flushes += 1
        if self.in_one_pass:
            self._end_backward()
            return
        self.gradients.collect()
        while True:
            pending = tuple(u.index for u in self.units if u.partial is not None and self.gradients.reduces_now(u))
            decision = self._ask(Kind.FLUSH, pending=pending)
            if decision is not None and decision.kind is Kind.FLUSH:
                break
        if self.schedule.phase == "train":
            self.schedule.end()
        self._forget_ahead()
        self._end_backward()
        if not self.second_order:
            self._discard_idle(self.units)
        self.second_order = False
        self._trim()
        if self.gradients.final or self.gradients.hold:
            self.gradients.show()

    def _end_backward(self) -> None:
        self.in_backward = False
        for unit in self.units:
            unit.end_backward(keep=self.second_order)

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Many forwards and backwards, as of a pipeline's schedule, as one: all units stay, gradients are summed here.

        Inside nothing waits for other ranks. Collective at the begin and, without gradients, at the end; the gradients
        are for ``flush`` after it.
        """
        with contextlib.ExitStack() as pins:
            for unit in self.units:
                unit.pin()
                pins.callback(unit.unpin)
            self.in_one_pass = True
            self.gradients.begin_pass()
            try:
                yield
            finally:
                self.in_one_pass = False
                self.gradients.end_pass()
        if not torch.is_grad_enabled():
            self.meet()

    def _forget_ahead(self) -> None:
        for unit in self.units if self._reads_ahead else ():
            unit.rest[StateKind.PARAM].forget_ahead()

    def gather_gradients(self) -> tuple[list[Unit], Exception | None]:
        """Bring every rank to the step; reduce what is still local; the units with their COLLAPSED gradients.

        And what has gone wrong on this rank alone once all are there, where the others go on.
        """
        if self.depth or self.in_backward:
            raise UsageError("step() was called inside a forward or backward; call it after backward() has returned")
        self.settle(stepping=True)
        self.gradients.final, self.gradients.hold = True, False
        self.gradients.withdraw()
        self.gradients.collect()
        try:
            while True:
                self._stepping = False
                decision = self._ask(Kind.STEP, pending=self.gradients.pending())
                if decision is not None and decision.kind is Kind.STEP:
                    return self.gradients.collapse(), None
        except Exception as error:
            if not self._stepping:
                raise
            with serving(self.worker):
                self._pay(after=error)
            return [unit for unit in self.units if unit.trainable], error

    def settle(self, *, stepping: bool = False) -> None:
        """Until no update is under way in another thread (see ``Unit.settle``). UsageError where one has failed."""
        if self.worker is not None and self.worker.busy and not self.worker.inside():
            for unit in self.units:
                unit.settle_states(stepping=stepping)
            self.worker.busy = False

    def forget_updates(self) -> None:
        """Whatever they have come to: everything is written anew."""
        if self.worker is not None:
            self.worker.forget()
            for unit in self.units:
                unit.forget_update()

    def publication(self, units: list[Unit], **how: Any) -> Publication:
        """PARAM of ``units`` follows OPTIM, which changes."""
        self._trim()
        self._discard_idle(units)
        return Publication(units, up=self.up, gathers=self._stream, **how)

    def publish(self, units: list[Unit]) -> None:
        """After a change: bring PARAM of ``units`` in line with OPTIM. Collective."""
        self.settle()
        self.publication(units).finish()

    def reset(self, *, keep_gradients: bool = False) -> None:
        """After an error: wait for work in flight, release units, drop gradients (I8). Local; ``fail`` tells others.

        ``keep_gradients``: the error came in a forward, which adds none; those of earlier micro-batches stay.
        """
        self.depth, self._passed_at, self._unanswered, self.in_backward = 0, None, False, False
        for noted in (self._on_demand, self._complete, self._path):
            noted.clear()
        self.schedule.abandon()
        self._forget_ahead()
        if not keep_gradients:
            self._vacant.clear()
            self.gradients.clear()
        for unit in self.units:
            unit.abandon()
        self._discard_idle(self.units)

    def fail(self, error: BaseException, *, in_forward: bool) -> Aftermath:
        """Reset after ``error``, and have the other ranks know of it, if they do not: [Note: failures].

        Raises RankFailedError in place of an error that only says that another rank is gone.
        """
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # what the batch has allocated is room for what is owed
        ended = collectives.is_of_backend(error.__cause__ or error)  # the connections to others
        lost, known = ended or self.agreement.apart, error is self.known
        try:
            where = self._where()
            self.reset(keep_gradients=in_forward)
            if not lost and not known and isinstance(error, Exception):
                self.lose(error)
                lost = bool(self.broken)
            after = Aftermath(in_forward) if lost else self._tell(error, where, in_forward=in_forward)
            if not after.window:  # of which guests may have reduced something
                self.gradients.clear()
        except Exception as second:
            logger.error("after %s the other ranks cannot be told: %s", collectives.describe(error), second)
            lost, after = True, Aftermath()
        self._owed.clear()
        self.known = None  # it keeps alive what its frames hold
        if lost and self.mesh.job.size > 1:
            self.broken = collectives.describe(error)
            break_off_all(self.mesh)
            notes = leave_note(self.mesh, "")
            notes.pop(self.mesh.zero.ranks[self.mesh.zero.index], None)
            if notes and ended and not known:
                causes = "; ".join(f"{self.mesh.title(rank)} failed: {text}" for rank, text in notes.items())
                raise RankFailedError(f"{causes}; this rank cannot go on without it") from error
        return after

    def lose(self, error: Exception) -> None:
        """A batch is lost here. Ranks that share its layers mostly lose it, too; those that do not may wait in one for
        this rank, where no message reaches them: that is ended, for good.
        """
        text, ended, tp = collectives.describe(error), collectives.is_of_backend(error.__cause__ or error), self.mesh.tp
        self._losses += 1
        about, wait_s = f"lost{self._losses}", 0.0 if ended else _ALIKE_S
        alone = len(leave_note(self.mesh, text, about=about, wait_s=wait_s, among=tp)) < tp.size
        if ended or (alone and tp.size > 1 and not tp.alike):
            logger.error("this rank has lost a batch (%s) and others have not: they cannot go on with it", text)
            self.broken = text
            if not ended or not leave_note(self.mesh, ""):  # notes say what this one's error follows from
                leave_note(self.mesh, text)
            collectives.break_off(tp)

    def _tell(self, error: BaseException, where: str, *, in_forward: bool) -> Aftermath:
        if isinstance(error, RankFailedError):
            return Aftermath(error.window, str(error) if error.torn else "")
        if isinstance(error, DivergenceError) or error is self.known:
            return Aftermath()
        owes = not in_forward or any(self._numels) or (self._trains and torch.is_grad_enabled())
        if self.mesh.zero.size == 1 or not owes or not isinstance(error, Exception):
            return Aftermath(in_forward)
        text = collectives.describe(error)
        if self.mesh.control is None or not self.agreement.speaks:
            self._apart = text
            return Aftermath(in_forward)
        leave_note(self.mesh, text)
        with patience(self.mesh, text):
            self._pay(after=error)
            while True:
                for decision in self.agreement.ask(Request(Kind.FAILED)):
                    self._execute(decision)
                    if decision.kind is Kind.FAILED:
                        states = self.share(error, where, in_forward=in_forward, group=self.mesh.control)
                        drop_note(self.mesh)
                        alone = any(s.text is None for s in states.values())
                        torn = error_of(states, self.mesh).torn and alone
                        return Aftermath(all(s.in_forward for s in states.values()), text if torn else "")

    def share(
        self, error: BaseException | None, where: str, *, in_forward: bool, group: AxisGroup
    ) -> dict[int, RankState]:
        """What every rank says about a failure. Collective."""
        text = None if error is None else collectives.describe(error)
        clean = not (self._contributed or self.gradients.pending())
        memory = isinstance(error, torch.OutOfMemoryError)
        torn = self.half_updated or (self.worker is not None and self.worker.failure is not None)
        mine = RankState(where, text, in_forward, torn, clean, memory)
        states = dict(zip(group.ranks, collectives.gather_objects(mine, group), strict=True))
        if all(s.in_forward and s.clean for s in states.values()):
            self._forget_vacant()
        self._vacant.clear()
        self._contributed = self._foreign = self.half_updated = False
        return states

    def rejoin(self) -> None:
        """Where ranks send no messages: after an error see whether all have failed at the same place."""
        if not self._apart:
            return
        text, self._apart = self._apart, ""
        self._alone += 1
        place = f"{self.gathers} gathers, {self.reductions} reductions, {self.steps} steps"
        notes = leave_note(self.mesh, place, about=f"failed{self._alone}", wait_s=_ALIKE_S, among=self.mesh.zero)
        if len(notes) < self.mesh.zero.size or set(notes.values()) != {place}:
            self.broken = text
            leave_note(self.mesh, text)
            break_off_all(self.mesh)

    def _where(self) -> str:
        return f"step {self.steps}, {'backward' if self.in_backward else 'forward'}"


def _worker(units: list[Unit], device: torch.device) -> Worker | None:
    """Who updates what rests elsewhere. None where the host would only take turns with itself, but for tests."""
    tiers = {u.plan.optim.tier for u in units if u.plan.optim is not None} - {Tier.DEVICE}
    behind = device.type != "cpu" or "DEEPSPEED_UPDATE_BEHIND" in os.environ
    return Worker(device) if behind and tiers else None
