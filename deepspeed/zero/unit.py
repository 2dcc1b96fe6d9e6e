"""A unit: the parameters that move together, their plan, and one flat buffer per state."""

import contextlib
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.errors import InvalidStateError
from deepspeed.monitor.events import ISSUE, Events
from deepspeed.tier.store import Landing, TierStore, settled
from deepspeed.tier.transfer import ARRIVED, PendingWork, Transfer
from deepspeed.zero.buffer import ParameterBuffer
from deepspeed.zero.layout import FlatLayout, Segment
from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.module.attributes import unmark_zero_parameter
from deepspeed.zero.partition import UnitFacts, owned_range, square_sum
from deepspeed.zero.plan import Spread, StateKind, UnitPlan
from deepspeed.zero.window import GradientWindow


class UnitState(Enum):
    """Memory of PARAM: ABSENT the shard only; FETCHING shard and a buffer that is being filled; READY both."""

    ABSENT = "absent"
    FETCHING = "fetching"
    READY = "ready"


_NEXT = {
    UnitState.ABSENT: UnitState.FETCHING,
    UnitState.FETCHING: UnitState.READY,
    UnitState.READY: UnitState.ABSENT,
}


class Keeper(Protocol):
    """Protocol of an owner that gathers units and serves reads of released parameters: runtime or ``zero.Init``."""

    in_backward: bool

    def may_fetch_on_demand(self) -> bool: ...
    def fetch_on_demand(self, unit: "Unit") -> bool: ...
    def need(self, units: Iterable["Unit"]) -> None: ...
    def meet(self) -> int: ...
    @property
    def before_update(self) -> Callable[[], None]: ...


class Unit:
    """Parameters with one dtype and one plan, in one flat layout. Attributes are written by methods of this class only.

    ``buffer`` has the whole values of the parameters, ``window`` the gradients until their reduction. ``rest`` says
    where each state rests; ``shard``, ``master`` (fp32, the very memory of the parameter when dtypes and ranges agree)
    and ``grad`` are its tensors, NaN for a state on a drive.
    """

    def __init__(
        self, index: int, name: str, params: list[nn.Parameter], *, layout: FlatLayout, plan: UnitPlan, facts: UnitFacts
    ) -> None:
        self.index = index  # also the position in the one order in which every rank handles several units
        self.name, self.params, self.layout, self.plan = name, params, layout, plan
        self.facts, self.mesh = facts, facts.mesh
        self.trainable = plan.grad is not None
        # PARAM rests elsewhere than in the full buffer, so that there is something to fetch and release.
        self.movable = plan.param.away or bool(facts.sharing(plan.param.spread))
        self.state = UnitState.READY
        self.users = self.pins = self.version = self.fetched_version = 0
        self.buffer = ParameterBuffer(params, layout)
        self.window = GradientWindow(name, params, layout)
        self.dtype, self.device = self.buffer.full.dtype, self.buffer.full.device
        self.rest: dict[StateKind, TierStore] = {}
        self.views: list[Any] = []  # the OptimViews of it
        self.tiers: Tiers | None = None
        self.pending = PendingWork()  # what goes on behind the program
        self._ranges: dict[StateKind, tuple[int, int]] = {}
        self.master_is_param = False
        self.tiled = False  # the update goes tile by tile, as it must on a drive, and writes PARAM at rest in passing
        self.absorbed: dict[int, int] = {}  # torch's version of a parameter as its masters have followed it
        self.kept = False  # something that autograd cannot announce will read the parameters: they stay until the flush
        self.borrowed = False  # modules that do not own the parameters read them, too
        self._keeper: Callable[[], Keeper | None] = lambda: None
        self.events = Events()
        self._transfer = ARRIVED

    def adopt(self, values: torch.Tensor, dtype: torch.dtype, *, keep_master: bool, tiers: Tiers | None = None) -> None:
        """Take over ``values`` (flat, full, any floating dtype, on the device): build buffers and re-point parameters.

        ``keep_master``: with the owned OPTIM range, unrounded, in fp32. ``tiers``: places besides the device.
        """
        self.tiers = tiers
        self.buffer.hold(values.to(dtype))
        self.buffer.expose()
        self.dtype, self.device = dtype, values.device
        start, stop = self.range_of(StateKind.PARAM)
        # With one way on the sharded axis the shard is everything: nothing to gather, nothing to release.
        self.rest[StateKind.PARAM] = TierStore(self.buffer.full[start:stop])
        if self.movable:
            self.rest[StateKind.PARAM] = settled(self._place(StateKind.PARAM, dtype), self.shard, dtype)
        if keep_master and self.plan.optim is not None:
            start, stop = self.range_of(StateKind.OPTIM)
            wide = torch.promote_types(dtype, torch.float32)
            place, shard = self._place(StateKind.OPTIM, wide), self.rest[StateKind.PARAM]
            same = not shard.on_drive and (shard.tensor.dtype, shard.tensor.device) == (wide, self.device)
            self.master_is_param = place is None and same
            if self.master_is_param:
                self._alias_master()
            else:
                self.rest[StateKind.OPTIM] = settled(place, values[start:stop], wide)
                self.tiled = self.on_drive(StateKind.OPTIM)
        if self.movable:
            self.buffer.note_own_uses()
            self.release()

    def _place(self, kind: StateKind, dtype: torch.dtype) -> TierStore | None:
        """Return a place for that state besides the device; None for the device itself."""
        start, stop = self.range_of(kind)
        return self.tiers.place(kind, self.plan.of(kind).tier, stop - start, dtype) if self.tiers is not None else None

    def _alias_master(self) -> None:
        within = self.within(StateKind.PARAM, self.shard, *self.range_of(StateKind.OPTIM))
        self.rest[StateKind.OPTIM] = TierStore(within)

    def open_grad(self, dtype: torch.dtype) -> TierStore:
        """Return the place of the rest gradient, made on the first call."""
        if StateKind.GRAD not in self.rest:
            start, stop = self.range_of(StateKind.GRAD)
            place = self._place(StateKind.GRAD, dtype)
            self.rest[StateKind.GRAD] = place or TierStore(collectives.fresh(stop - start, dtype, self.device))
        return self.rest[StateKind.GRAD]

    def add_view(self, view: Any) -> None:
        """Add ``view`` to the views by which an optimizer sees this unit."""
        self.views.append(view)

    def update_in_tiles(self) -> None:
        """Note that from now on the update goes tile by tile."""
        self.tiled = True

    @property
    def shard(self) -> torch.Tensor:
        """Return PARAM at rest."""
        return self.rest[StateKind.PARAM].tensor

    @property
    def master(self) -> torch.Tensor | None:
        """Return the fp32 master weights at rest; None where nothing is optimised."""
        store = self.rest.get(StateKind.OPTIM)
        return None if store is None else store.tensor

    @property
    def grad(self) -> torch.Tensor | None:
        """Return the rest gradient; None before the first one."""
        store = self.rest.get(StateKind.GRAD)
        return None if store is None else store.tensor

    @property
    def grad_away(self) -> bool:
        """Tell whether the rest gradient is not on the device."""
        return self.on_drive(StateKind.GRAD) or (self.grad is not None and self.grad.device != self.device)

    def on_drive(self, kind: StateKind) -> bool:
        """Tell whether that state rests on a drive."""
        return kind in self.rest and self.rest[kind].on_drive

    @property
    def drives(self) -> bool:
        """Tell whether any state of the unit rests on a drive."""
        return any(store.on_drive for store in self.rest.values())

    def values(self, kind: StateKind, *, write: bool = False) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Return a context manager over this rank's range of a state on any tier; only ``write`` keeps changes."""
        if kind is not StateKind.PARAM:
            self.wait(StateKind.PARAM)
        self.wait(kind, write=write)
        if write and (keeper := self.keeper) is not None:
            keeper.before_update()
        return self.rest[kind].open(write=write)

    @property
    def title(self) -> str:
        """Return the name for messages: all modules with parameters in the unit when it packs several (at most 8)."""
        homes = list(dict.fromkeys(s.name.rpartition(".")[0] or "root" for s in self.layout.segments))
        inside = all(h == self.name or h.startswith(f"{self.name}.") for h in homes)
        return self.name if inside else ", ".join(homes[:8])

    @property
    def whole(self) -> bool:
        """Tell whether all values may be read without waiting: neither released, still arriving nor hidden."""
        return self.state is UnitState.READY and not self.buffer.hidden

    @property
    def idle(self) -> bool:
        """Tell whether nobody uses the values."""
        return self.users == 0 and self.pins == 0

    def range_of(self, kind: StateKind) -> tuple[int, int]:
        """Return this rank's flat [start, stop) of a state at rest."""
        if kind not in self._ranges:
            self._ranges[kind] = owned_range(self.layout.numel, self.plan.of(kind).spread, self.mesh)
        return self._ranges[kind]

    @staticmethod
    def view(flat: torch.Tensor, segment: Segment, *, base: int = 0) -> torch.Tensor:
        """Return the view of the segment in ``flat`` (which begins at flat index ``base``), in logical shape."""
        return flat[segment.offset - base : segment.stop - base].view(segment.shape)

    def within(self, kind: StateKind, flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the flat indices [start, stop) of ``flat``, which is this rank's range of a state."""
        base, _ = self.range_of(kind)
        return flat[start - base : stop - base]

    def part(self, kind: StateKind, segment: Segment, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of ``segment`` (possibly empty) in ``flat``, which is this rank's range of a state."""
        lo, hi = self.layout.overlap(segment, *self.range_of(kind))
        return self.within(kind, flat, lo, hi) if lo < hi else flat[:0]

    def note_gradient(self, grad: torch.Tensor) -> None:
        """Keep the squared norm of ``grad``, the new rest gradient, if it is off the device: saves reading it again."""
        if self.grad_away:
            self.window.square = self._weighted_square(grad)

    def send_gradient(self, grad: torch.Tensor) -> None:
        """Copy ``grad``, of the device, to the rest gradient in host memory."""
        self.note_gradient(grad)
        self.pending.note(self.rest[StateKind.GRAD].put(grad), writes=(StateKind.GRAD,), copy=True)

    def widen_gradient(self, dtype: torch.dtype) -> None:
        """Convert the rest gradient in host memory, which has landed, to ``dtype``."""
        if self.grad is not None and self.grad.dtype is not dtype:
            self.wait(StateKind.GRAD, write=True)
            values = self.grad.to(dtype)
            self.rest[StateKind.GRAD].hold_as(dtype)
            self.grad.copy_(values)

    def gradient_square(self) -> torch.Tensor:
        """Return this rank's part of the mean gradient's squared norm; replicas on several ranks count once in all."""
        assert self.plan.grad is not None and self.grad is not None
        copies = 1
        for way, axis in zip(self.plan.grad.spread, self.mesh.groups, strict=True):
            copies *= axis.size if way is Spread.REPLICATED else 1
        kept = self.window.square if self.grad_away else None
        return (self._weighted_square(self.grad) if kept is None else kept) * self.facts.after**2 / copies

    def _weighted_square(self, grad: torch.Tensor) -> torch.Tensor:
        square = square_sum(grad)
        for segment in self.layout.segments:
            if segment.norm_weight != 1.0 and (part := self.part(StateKind.GRAD, segment, grad)).numel():
                square = square - square_sum(part) * (1.0 - segment.norm_weight)
        return square

    def _move(self, state: UnitState) -> None:
        if state is not _NEXT[self.state]:
            raise InvalidStateError(f"unit {self.name}: parameters cannot go from {self.state.value} to {state.value}")
        self.state = state

    def fetch(self, start: Callable[[Callable[[], Transfer]], Transfer]) -> None:
        """Start a fetch, ABSENT -> FETCHING (ABSENT after an error): allocate, then ``start(self.start_gather)``."""
        self.buffer.fill()
        self._move(UnitState.FETCHING)
        self.fetched_version = self.version
        try:
            self._transfer = start(self.start_gather)
        except BaseException:
            self._finish_fetch()
            self.release()  # nothing has arrived
            raise

    def _finish_fetch(self) -> None:
        """Finish a fetch, FETCHING -> READY, when all values are here; parameters show their own class again."""
        if self.state is UnitState.FETCHING:
            if self.events:
                self.events.note_wait(self._transfer, f"gather of {self.title}")
            self._transfer.wait()
            self._transfer = ARRIVED
            self._move(UnitState.READY)
            self.buffer.expose()
        elif self.buffer.hidden:
            self.buffer.expose()

    def release(self) -> None:
        """Release the unit: READY -> ABSENT."""
        if self.movable:
            self._move(UnitState.ABSENT)
            self.buffer.empty()

    # -- the door ------------------------------------------------------------------------------------------------------
    def wait(self, kind: StateKind, *, write: bool = False, copies: bool = True) -> None:
        """Wait until ``kind`` may be read or, with ``write``, written. UsageError where an update has failed.

        PARAM that is being gathered is READY then. ``copies`` False: streams order the caller's work behind copies, so
        that only updates are waited for.
        """
        self.pending.wait(kind, write=write, copies=copies)
        if kind is StateKind.PARAM:
            self._finish_fetch()

    def note_pending(
        self, work: Transfer, *, reads: tuple[StateKind, ...] = (), writes: tuple[StateKind, ...] = ()
    ) -> None:
        """Note that ``work``, an update, goes on behind the program: it reads and writes these states until it ends."""
        self.pending.note(work, reads, writes)
        if StateKind.PARAM in writes and not self.movable:
            self.buffer.hide()

    def forget_pending(self) -> None:
        """Forget pending work that has ended, with or without an error."""
        self.pending.forget_ended()
        if not self.movable:
            self._finish_fetch()

    def start_gather(self, full: torch.Tensor | None = None) -> Transfer:
        """Fill ``full`` (None: the unit's) from the shard's tier, then all-gather over the axis PARAM is cut on."""
        self.pending.wait(StateKind.PARAM)
        full = self.buffer.full if full is None else full
        cut = self.facts.sharing(self.plan.param.spread)
        start, stop = self.range_of(StateKind.PARAM)
        piece, rest = full[start:stop], self.rest[StateKind.PARAM]
        with self.events.range(f"gather {self.name}", ISSUE, self):
            if cut and not rest.on_drive and rest.tensor.device == piece.device:
                return collectives.all_gather(full, rest.tensor, cut[0])
            rest.get(piece).wait()
            if not rest.on_drive and rest.tensor.device != piece.device:  # who writes PARAM waits for the copy
                self.pending.note(Landing(piece.nbytes), reads=(StateKind.PARAM,), copy=True)
            return collectives.all_gather(full, piece, cut[0]) if cut else ARRIVED

    def read_ahead(self) -> bool:
        """Start reading the shard from its drive for a later fetch; False if it is not there yet, or no buffer free."""
        updated = self.pending.until(StateKind.PARAM).done()
        return self.state is UnitState.ABSENT and updated and self.rest[StateKind.PARAM].read_ahead()

    def fetch_whole(self) -> None:
        """Gather at once, without schedule or agreement: for construction and teardown, the same on every rank."""
        if self.state is UnitState.ABSENT:
            self.fetch(lambda gather: gather())
            self.wait(StateKind.PARAM)

    def add_user(self, *, borrows: bool = False) -> None:
        """Count a running module as user of the unit, until ``drop_user``; ``borrows``: without owning it."""
        self.users += 1
        self.borrowed |= borrows

    def drop_user(self, *, keep: bool = False) -> None:
        """Take back one ``add_user``. ``keep``: the parameters stay until the flush."""
        self.users -= 1
        self.kept = self.kept or keep

    def pin(self, *, lend: bool = False) -> None:
        """Hold the full values until ``unpin``. ``lend``: a reader outside a forward may keep tensors that it reads."""
        if (keeper := self.keeper) is not None:
            keeper.need([self])
        else:
            self.fetch_whole()
        self.pins += 1
        self.buffer.lent = self.buffer.lent or (lend and not self.may_fetch_on_demand())

    def unpin(self) -> None:
        """Take back one ``pin``; the last one releases an idle unit, but none that a running backward may read."""
        self.pins -= 1
        keeper = self.keeper
        if self.idle and self.state is UnitState.READY and not (keeper is not None and keeper.in_backward):
            self.release()

    def hold_for_backward(self) -> None:
        """Keep the full values until the running backward is over. Collective where they are absent."""
        if not self.whole:
            self.pin()
            self.pins -= 1
            self.kept = True

    def end_backward(self, *, keep: bool) -> None:
        """End a backward. ``keep``: it left a graph that will read the kept parameters again."""
        if self.trainable:
            self.window.note_required()
        self.window.end_pass()
        self.kept = self.kept and keep

    def abandon(self) -> None:
        """Drop all users of the unit after an error."""
        self.users, self.kept = 0, False
        self.window.end_pass()

    def absorb(self, position: int) -> None:
        """Copy a parameter's values, which are here, to its states at rest; masters that round to them stay."""
        segment = self.layout.segments[position]
        kinds = [StateKind.PARAM] if self.movable else []
        if self.master is not None and not self.master_is_param:
            kinds.append(StateKind.OPTIM)
        for kind in kinds:
            lo, hi = self.layout.overlap(segment, *self.range_of(kind))
            if lo < hi:
                with torch.no_grad(), self.values(kind, write=True) as resting:
                    part = self.within(kind, resting, lo, hi)
                    values = self.buffer.full[lo:hi].to(part.device)
                    if kind is StateKind.OPTIM:
                        values = torch.where(part.to(values.dtype) == values, part, values)
                    part.copy_(values)
        self.absorbed[position] = self.params[position]._version
        self.new_version(shown=True)

    def new_version(self, *, shown: bool = False) -> None:
        """Note that PARAM at rest changes: older gathers are stale, unless ``full`` shows the change (``shown``)."""
        self.version += 1
        self.fetched_version = self.version if shown else self.fetched_version

    def publish_part(self, start: int, values: torch.Tensor) -> Transfer:
        """Put ``values`` (any floating dtype; untouched until the end) into PARAM at rest from flat index ``start``."""
        return self.rest[StateKind.PARAM].put(values, start=start - self.range_of(StateKind.PARAM)[0], zero_copy=True)

    def outbox(self, *, spent: bool) -> torch.Tensor | None:
        """Return host memory for PARAM over the range of OPTIM on its way to the device: that of the rest gradient,
        which is needed until ``spent``. None without room, or where nothing is rounded; and for tiles, which publish
        PARAM from their own buffers.
        """
        store, dtype = self.rest.get(StateKind.GRAD), self.shard.dtype
        rounds = self.master is not None and self.master.dtype is not dtype and not self.tiled
        if not rounds or store is None or store.on_drive or not self.grad_away:
            return None
        self.wait(StateKind.GRAD, write=True)
        return store.spare(dtype, keep=not spent)

    def rest_in(self, kind: StateKind, memory: torch.Tensor) -> None:
        """Let a state rest in ``memory``, which holds it; views of the state do not follow: see ``move_state``."""
        self.rest[kind] = TierStore(memory)
        if kind is StateKind.PARAM and self.master_is_param:
            self._alias_master()

    def drop_rest(self, *kinds: StateKind) -> None:
        """Free the places where these states rest."""
        for kind in kinds:
            if (store := self.rest.pop(kind, None)) is not None and store.on_drive:
                store.drop()

    def exchange_gradient_store(self, store: TierStore | None) -> TierStore | None:
        """Set ``store`` as the rest gradient's place (None: made when needed); return the old place, if any."""
        given = self.rest.pop(StateKind.GRAD, None)
        if store is not None:
            self.rest[StateKind.GRAD] = store
        return given

    def forget(self, param: nn.Parameter) -> None:
        """Unmark ``param``, which no longer belongs to this unit."""
        if getattr(param, "_ds_unit", None) is self:
            unmark_zero_parameter(param)

    def strip(self) -> None:
        """Keep the resting parameters only; the unit belongs to nobody and can still be gathered."""
        self.plan, self.trainable = self.plan.frozen(), False
        self.drop_rest(StateKind.GRAD, StateKind.OPTIM)
        self.window.reset()
        self.window.drop()
        self.abandon()
        self.views, self.pins = [], 0
        self.keep_by(lambda: None)
        self.master_is_param, self.tiled, self.pending = False, False, PendingWork()
        if self.state is UnitState.READY:
            self.release()

    def drop(self) -> None:
        """Give every byte back; the unit is dead afterwards."""
        self.params, self.views = [], []
        self.drop_rest(*self.rest)
        self.pending = PendingWork()
        self.buffer.drop()
        self.window.drop()
        self.rest[StateKind.PARAM] = TierStore(self.buffer.full)
        self.keep_by(lambda: None)

    def keep_by(self, keeper: Callable[[], Keeper | None], events: Events | None = None) -> None:
        """Set ``keeper``, which returns the unit's owner; a weak reference, as no unit keeps a runtime alive. Tell the
        owner's ``events``.
        """
        self._keeper, self.events = keeper, Events() if events is None else events

    keeper = property(lambda self: self._keeper(), doc="Who gathers the unit; None when nobody does any more.")

    def may_fetch_on_demand(self) -> bool:
        keeper = self.keeper
        return keeper is not None and keeper.may_fetch_on_demand()

    def fetch_on_demand(self) -> bool:
        keeper = self.keeper
        return keeper is not None and keeper.fetch_on_demand(self)
