"""The verbs of ZeRO over units: enter, leave, prefetch, pin, reduce, flush, reset, publish.

One runtime per engine; hooks (hooks.py) only call these verbs, and every verb is idempotent. Which collectives run, and
in which order, is agreed between the ranks (order.py); what to fetch early comes from the recorded schedule; how and
when units are updated is the policy's (update/).
"""

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.comm import collectives
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.errors import UsageError
from deepspeed.monitor import hostmem
from deepspeed.monitor.events import FLUSH, NEED, Events
from deepspeed.tier.behind import Worker
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import InFlight, StateKind, Tier, ZeroPlan
from deepspeed.zero.schedule import Schedule
from deepspeed.zero.sync.agreement import Agreement, Kind
from deepspeed.zero.sync.failures import Failures, doubt, serving
from deepspeed.zero.sync.order import CollectiveOrder
from deepspeed.zero.unit import Unit, UnitState
from deepspeed.zero.update.policy import UpdatePolicy
from deepspeed.zero.update.publish import Publication


@dataclass
class CollectiveCounts:
    """Counts since construction, for tests and benchmarks."""

    gathers: int = 0
    gathered_numel: int = 0
    reductions: int = 0
    dummy_collectives: int = 0


class Runtime:
    """Runtime of one engine's units: owns schedule, gradients, collectives and the update policy."""

    def __init__(
        self, units: list[Unit], plan: ZeroPlan, mesh: Mesh, *, accum: torch.dtype, device: torch.device
    ) -> None:
        self.units, self.plan, self.mesh, self.device = units, plan, mesh, device
        self.events = Events()
        self._stream, self.up = collectives.SideStream(device), collectives.SideStream(device)
        self.worker, self.schedule = _worker(units, device), Schedule()
        self.gradients = Gradients(units, plan, accum=accum, device=device)
        words: dict[str, Any] = {"where": self.where, "title": mesh.title, "doubt": functools.partial(doubt, mesh)}
        self.agreement = Agreement(mesh.control, plan.divergence, [u.title for u in units], **words)
        self.order = CollectiveOrder(
            units, mesh, self.gradients, self.agreement, gather=self._gather, reduce=self._reduce, heard=self._heard
        )
        self.failures = Failures(self)
        self.update = UpdatePolicy(self)
        self.counts = CollectiveCounts()
        self.steps = self.depth = self.flushes = 0  # steps: updates so far, with the one under way
        self.in_backward = self.in_one_pass = False
        # The engine, while it lives; and its optimizer.
        self.client: Callable[[], Any] = lambda: None
        self.optimizer: torch.optim.Optimizer | None = None
        # Set by the engine: is the running backward the last one of the accumulation window?
        self.window_ends: Callable[[], bool] = lambda: True
        # Called once when a backward begins; the engine checks loss scaling and sets factors there, and returns why no
        # parameter may get a gradient: the backward may be one of inputs alone.
        self.on_backward: Callable[[], str | None] = lambda: None
        self._forbidden: str | None = None
        self.before_update: Callable[[], None] = lambda: None  # masters, slots or PARAM at rest will be written
        self._numels = [u.layout.numel if u.movable else 0 for u in units]
        movable = sorted(n for n in self._numels if n)
        # Two typical units ahead hide a gather; more would only hold memory. The next comes early whatever its size.
        self._window = min(plan.prefetch_numel, 2 * movable[len(movable) // 2]) if movable and plan.overlap else 0
        self._reads_ahead = any(u.on_drive(StateKind.PARAM) for u in units)
        self._on_demand: list[list[Unit]] = []
        self._repeated = frozenset[Unit]()  # held, so that what runs meanwhile needs to ask nobody for them
        self._trains = any(u.trainable for u in units)
        saves_memory = device.type == "cpu" and any(u.drives for u in units)  # the heap gives back what it keeps
        self._trim: Callable[[], object] = hostmem.HeapTrimmer().trim if saves_memory else lambda: None
        self.second_order = False  # the last backward keeps a graph: its units stay until one that does not
        for unit in units:
            unit.keep_by(weakref.ref(self), self.events)

    @property
    def after(self) -> float:
        """Return the factor that turns a reduced gradient into the mean."""
        return self.gradients.after(self.units[0]) if self.units else 1.0

    @contextlib.contextmanager
    def attached(self, view: OptimView, *, write: bool = False, publish: bool = False) -> Iterator[dict[str, Any]]:
        """Hold states of ``view`` that rest on a drive in memory inside the context; yields its optimizer state."""
        view.unit.wait(StateKind.OPTIM, write=True)
        state = view.kept_by(self.optimizer) if self.optimizer is not None else {}
        if write:
            self.before_update()
        with self.update.attached(view, write=write, publish=publish):
            yield state

    def train_by(self, optimizer: torch.optim.Optimizer, update: UpdatePolicy) -> None:
        """Set ``optimizer``, which updates the units, and the policy ``update``, which says when and how."""
        self.optimizer, self.update = optimizer, update
        self.gradients.sent = update.gradient_sent

    def enter(self, units: Iterable[Unit], *, recompute: bool) -> None:
        """Begin a module's forward: count it as a user of ``units``, unless ``recompute``, and gather them."""
        if not recompute:
            if self.depth == 0:
                self.order.forward_begins()
                for unit in self.units:
                    if unit.whole:
                        unit.buffer.bring_back(sample=True)
                phase = "train" if torch.is_grad_enabled() else "eval"
                if phase == "eval" or self.schedule.phase is None:
                    self.schedule.begin(phase)
            self.depth += 1
            self._on_demand.append([])
            for unit in units:  # counted first, so that leave() balances also when need() raises
                unit.add_user()
        self.need(units)

    def leave(self, units: Iterable[Unit], *, keep: bool = False) -> None:
        """End a module's forward. ``keep``: its backward was not predictable, so its units stay until the flush."""
        for unit in [*units, *(self._on_demand.pop() if self._on_demand else [])]:
            unit.drop_user(keep=keep)
            if unit.movable and not (self.in_backward or unit.kept) and unit.state is UnitState.READY and unit.idle:
                if not self._stays(unit):
                    unit.release()
                elif unit.borrowed:  # the next one who borrows it is to ask, and to be noted
                    unit.buffer.hide()
        self.depth -= 1
        if self.depth == 0 and self.schedule.phase == "eval":
            self.schedule.end()
            self._forget_ahead()

    def meet(self, *, passing: bool = False) -> int:
        """End the model's outermost forward: serve ranks that still run parts of it which this one skipped (I7).

        ``passing``: a backward follows. The returned number of pins tells whether all ranks end the same user context.
        """
        if self.in_one_pass:
            return 0
        passing = passing and torch.is_grad_enabled() and self._trains
        self.order.leave_forward(passing=passing, serves=not self.depth and any(self._numels))
        return sum(u.pins for u in self.units)

    def borrowed(self) -> list[Unit]:
        """Return units that the running module has read without owning them; its backward will read them too."""
        return list(self._on_demand[-1]) if self._on_demand else []

    def _stays(self, unit: Unit) -> bool:
        """Tell whether an idle unit is needed again within the distance the user allows, and memory has room."""
        if not self.schedule.needed_within(unit.index, self._numels, self.plan.reuse_numel):
            return False
        live = sum(n for n, u in zip(self._numels, self.units, strict=True) if u.state is not UnitState.ABSENT)
        return live <= self.plan.live_numel

    def need(self, units: Iterable[Unit]) -> None:
        """Make ``units`` READY now, and start fetching those that the schedule predicts. Collective."""
        units = [unit for unit in units if unit not in self._repeated]
        if self.events:
            self.events.begin(NEED, units)
        movable = [u for u in units if u.movable]
        for unit in units if len(movable) < len(units) else ():
            unit.wait(StateKind.PARAM)
        indices = {u.index for u in movable}
        for unit in movable:
            self.schedule.use(unit.index)
            self.order.used(unit)
        for unit in movable:
            if unit.state is not UnitState.ABSENT and unit.fetched_version != unit.version:
                self._discard(unit)  # a forecast from before the last step must never serve stale weights (I6)
            while unit.state is UnitState.ABSENT:
                absent = [u.index for u in movable if u is not unit and u.state is UnitState.ABSENT]
                self.order.ask(Kind.GATHER, (unit.index, *dict.fromkeys([*absent, *self._ahead(indices)])))
        for unit in movable:
            unit.wait(StateKind.PARAM)
        ahead = self._ahead(indices) if movable else []
        if ahead:
            self.order.ask(Kind.GATHER, tuple(ahead), urgent=False)
        if not self._reads_ahead or not movable:
            return
        # Start to read the next shards from their drive. Local: what another rank reads ahead does not matter.
        for index in self.schedule.ahead([0] * len(self.units), window_numel=0, most=InFlight.READS):
            unit = self.units[index]
            if unit.on_drive(StateKind.PARAM) and unit.state is UnitState.ABSENT and not unit.read_ahead():
                return

    def _ahead(self, besides: Collection[int]) -> list[int]:
        """Return units to prefetch; none while the next is here or arriving, so that several share one message."""
        forecast = self.schedule.ahead(self._numels, window_numel=self._window, besides=besides) if self._window else []
        if forecast and self.units[forecast[0]].state is not UnitState.ABSENT:
            return []
        return [i for i in forecast if self.units[i].movable and self.units[i].state is UnitState.ABSENT]

    def _gather(self, unit: Unit, dummy: bool) -> None:
        self.counts.gathers += 1
        self.counts.gathered_numel += unit.layout.numel
        if unit.state is not UnitState.ABSENT:
            # Another rank lost this unit earlier than we did: serve it, and leave alone what may be edited here.
            unit.wait(StateKind.PARAM)
            self.counts.dummy_collectives += 1
            self._stream.run(functools.partial(unit.start_gather, torch.empty_like(unit.buffer.full))).wait()
            return
        unit.fetch(self._stream.run)
        if dummy:
            self.counts.dummy_collectives += 1
            self._discard(unit)

    def _discard(self, unit: Unit) -> None:
        unit.wait(StateKind.PARAM)
        unit.release()

    def _discard_idle(self, units: list[Unit]) -> None:
        for unit in units:
            if unit.movable and unit.idle and unit.state is not UnitState.ABSENT:
                self._discard(unit)

    def may_fetch_on_demand(self) -> bool:
        """Tell whether a module of this runtime runs, so that all ranks are at the same place in the same code."""
        return self.depth > 0 or self.in_backward

    def fetch_on_demand(self, unit: Unit) -> bool:
        """Gather ``unit``, read inside a forward while released, until the running module ends; False outside."""
        if not self.may_fetch_on_demand():
            return False
        self.need([unit])
        if self._on_demand and not self.in_backward:
            unit.add_user(borrows=True)
            self._on_demand[-1].append(unit)
        return True

    @contextlib.contextmanager
    def repeated(self, units: Iterable[Unit]) -> Iterator[None]:
        """Let modules of ``units`` run inside any number of times as one use of each: ranks may differ in the number.

        Collective where a unit is absent. Outside of any forward and backward nothing is held.
        """
        users = [unit for unit in units if unit.movable and (unit.users or self.fetch_on_demand(unit))]
        before, self._repeated = self._repeated, self._repeated.union(users)
        for unit in users:
            unit.add_user()
        try:
            yield
        finally:
            self._repeated = before
            for unit in users:
                unit.drop_user()

    def begin_backward(self) -> None:
        """Begin a backward, when its first gradient has reached the model. Idempotent."""
        if not self.in_backward:
            self.order.backward_begins()
            for unit in (u for u in self.units if not u.movable):  # a graph from before the update may be used again
                unit.wait(StateKind.PARAM)
            self._forbidden = self.on_backward()
            self.gradients.withdraw()
            self.in_backward = True
            self.gradients.final = self.window_ends()

    def gradient_ready(self, unit: Unit, position: int, *, task: int) -> None:
        """Pack the gradient of one parameter, which autograd has finished in graph task ``task``; reduce if due."""
        if self._forbidden is not None:
            raise UsageError(self._forbidden)
        if (unit.index, position) in self.gradients.adding:
            return  # it is where it belongs, and its unit stays
        packed = self.gradients.pack(unit, position)
        done = unit.window.note_ready(position, task, packed=packed)
        # whatever earlier backwards have left of it
        if len(unit.window.arrived) == len(unit.params) and self.gradients.reduces_now(unit):
            self.order.gradient_complete(unit, at_once=not unit.movable or not self.plan.overlap)
        if done:
            self.backward_done(unit)

    def _reduce(self, unit: Unit) -> None:
        self.counts.reductions += 1
        if not unit.window.fired:
            self.counts.dummy_collectives += 1
        self.order.note_reduction(unit)
        self.gradients.reduce(unit)
        if self.in_backward and self.gradients.final:
            self.update.gradient_ready(unit)

    def backward_done(self, unit: Unit) -> None:
        """Release the unit's parameters, as no further backward of its modules is predicted."""
        free = unit.movable and not (unit.kept or self.second_order) and unit.state is UnitState.READY and unit.idle
        # Ops that do not differentiate the weights (``weight.detach()``) may read them later: then the flush releases.
        if free and not unit.buffer.read_by_others():
            unit.release()

    def flush(self) -> None:
        """End a backward (or a pipeline's): reduce what is left, release all units. Idempotent (I4)."""
        with self.events.span(FLUSH) if self.events else contextlib.nullcontext():
            self._flush()

    def _flush(self) -> None:
        self.flushes += 1
        if self.in_one_pass:
            self._end_backward()
            return
        self.gradients.collect()
        while True:
            pending = tuple(i for i in self.gradients.pending() if self.gradients.reduces_now(self.units[i]))
            decision = self.order.ask(Kind.FLUSH, pending=pending)
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
        """Run many forwards and backwards, as of a pipeline's schedule, as one: units stay, gradients are summed here.

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
        """Bring all ranks to the step, reduce what is still local, and return the units with COLLAPSED gradients.

        Also return the error that this rank alone has met once all ranks were at the step, where the others go on.
        """
        if self.depth or self.in_backward:
            raise UsageError("step() was called inside a forward or backward; call it after backward() has returned")
        self.update.begin_step()
        self.gradients.final, self.gradients.hold = True, False
        self.gradients.withdraw()
        self.gradients.collect()
        try:
            while True:
                self.order.stepping = False
                decision = self.order.ask(Kind.STEP, pending=self.gradients.pending())
                if decision is not None and decision.kind is Kind.STEP:
                    return self.gradients.collapse(), None
        except Exception as error:
            if not self.order.stepping:
                raise
            with serving(self.worker):
                self.order.issue_pending(after=error)
            return [unit for unit in self.units if unit.trainable], error

    def publication(self, units: list[Unit], **how: Any) -> Publication:
        """Return the publication by which PARAM of ``units`` follows OPTIM, which changes."""
        self._trim()
        self._discard_idle(units)
        return Publication(units, up=self.up, gathers=self._stream, events=self.events, **how)

    def publish(self, units: list[Unit]) -> None:
        """Bring PARAM of ``units`` in line with OPTIM after a change. Collective."""
        self.update.wait()
        self.publication(units).finish()

    def reset(self, *, keep_gradients: bool = False) -> None:
        """Reset after an error: wait for work in flight, release units, drop gradients (I8). Local; see ``Failures``.

        ``keep_gradients``: the error came in a forward, which adds none; those of earlier micro-batches stay.
        """
        self.depth, self.in_backward = 0, False
        self._on_demand.clear()
        self.order.reset(keep_gradients=keep_gradients)
        self.schedule.abandon()
        self._forget_ahead()
        if not keep_gradients:
            self.gradients.clear()
        for unit in self.units:
            unit.abandon()
        self._discard_idle(self.units)

    # -- what an error of one rank needs to know ---------------------------------------------------------------------
    def _heard(self, kind: Kind) -> Exception:
        """Return the error to raise where another rank has failed while this one asked for ``kind``. Collective."""
        return self.failures.heard(in_forward=not self.in_backward and kind < Kind.FLUSH)

    def may_owe(self, *, in_forward: bool) -> bool:
        """Tell whether other ranks may wait for this one behind the place where it has failed."""
        return not in_forward or any(self._numels) or (self._trains and torch.is_grad_enabled())

    def where(self) -> str:
        """Describe the place in training, in words."""
        return f"step {self.steps}, {'backward' if self.in_backward else 'forward'}"

    def place(self) -> str:
        """Describe the place in the order of collectives, equal on ranks that have done the same."""
        return f"{self.counts.gathers} gathers, {self.counts.reductions} reductions, {self.steps} steps"


def _worker(units: list[Unit], device: torch.device) -> Worker | None:
    """Return the worker for offloaded updates; None where the host would only alternate with it, except in tests."""
    tiers = {u.plan.optim.tier for u in units if u.plan.optim is not None} - {Tier.DEVICE}
    background = device.type != "cpu" or "DEEPSPEED_UPDATE_BEHIND" in os.environ
    return Worker(device) if background and tiers else None
