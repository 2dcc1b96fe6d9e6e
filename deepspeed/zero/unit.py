"""A unit: the parameters that move together, their plan, and one flat buffer per state."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.observe import hostmem
from deepspeed.observe.timers import profiled
from deepspeed.tier.store import TierStore, settled
from deepspeed.tier.transfer import ARRIVED, Transfer
from deepspeed.zero.layout import FlatLayout, Segment
from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.param import expose, hide, keep_view, point, requiring, storage_uses, unmark_zero_parameter
from deepspeed.zero.partition import GradState, Keeper, UnitFacts, UnitState, check_move, owned_range, square_sum
from deepspeed.zero.plan import Spread, StateKind, UnitPlan


class Unit:
    """Parameters with one dtype and one plan, in one flat layout. Attributes are written by methods of this class only.

    ``full`` is the flat compute-dtype buffer under all parameters, without bytes while released; ``partial`` the local
    sum of gradients before reduction. ``rest`` says where each state rests; ``shard``, ``master`` (fp32, the very
    memory of the parameter when dtypes and ranges agree) and ``grad`` are its tensors, NaN for what is on a drive.
    """

    def __init__(
        self, index: int, name: str, params: list[nn.Parameter], *, layout: FlatLayout, plan: UnitPlan, facts: UnitFacts
    ) -> None:
        self.index = index  # also the position in the one order in which every rank handles several units
        self.name, self.params, self.layout, self.plan = name, params, layout, plan
        self.facts, self.mesh = facts, facts.mesh
        # PARAM rests elsewhere than in the full buffer, so that there is something to fetch and release.
        self.movable = plan.param.away or bool(facts.sharing(plan.param.spread))
        self.state = UnitState.READY
        self.grad_state = GradState.EMPTY
        self.users = self.pins = self.version = self.fetched_version = self._unused = self._bare = 0
        self.full = torch.empty(0)
        self.partial: torch.Tensor | None = None
        self.rest: dict[StateKind, TierStore] = {}
        self.views: list[Any] = []  # the OptimViews of it
        self.tiers: Tiers | None = None
        self.grad_square: torch.Tensor | None = None  # of a rest gradient that is not on the device
        # The last copy between host memory of GRAD or OPTIM and the device: the program waits for it before it reads
        # what comes down, and before it writes.
        self.landed = ARRIVED
        self._updating = ARRIVED  # the last update in another thread, of masters, slots and PARAM at rest
        self._delayed = ARRIVED  # that of masters and slots alone
        self._bring_home: Callable[[], object] = lambda: None  # what of masters and slots is elsewhere between steps
        self._early: Any = None  # one that the next step may take (EarlyUpdate)
        self.master_is_param = False
        self.tiled = False  # the update goes tile by tile, as it must on a drive, and writes PARAM at rest in passing
        # Positions whose gradients are in ``partial`` (of these, those of the running backward: ``arrived``), and that
        self.fired, self.trained = set[int](), set[int]()  # required one in some backward of the window
        self.absorbed: dict[int, int] = {}  # torch's version of a parameter as its masters have followed it
        self.arrived: set[int] = set()
        self.kept = False  # something that autograd cannot announce will read the parameters: they stay until the flush
        self.grad_filled = self._lent = False
        self.borrowed = False  # modules that do not own the parameters read them, too
        self._done, self._done_task = set[int](), -1
        self._keeper: Callable[[], Keeper | None] = lambda: None
        self._transfer = ARRIVED
        self._views: list[torch.Tensor] = []
        self._void: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None  # memory of a local sum, for the next one

    def adopt(self, values: torch.Tensor, dtype: torch.dtype, *, keep_master: bool, tiers: Tiers | None = None) -> None:
        """Take over ``values`` (flat, full, any floating dtype, on the device): build buffers and re-point parameters.

        ``keep_master``: with the owned OPTIM range, unrounded, in fp32. ``tiers``: places besides the device.
        """
        self.tiers = tiers
        self._spread(values.to(dtype))
        self._expose()
        start, stop = self.range_of(StateKind.PARAM)
        # With one way on the sharded axis the shard is everything: nothing to gather, nothing to release.
        self.rest[StateKind.PARAM] = TierStore(self.full[start:stop])
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
            # What the unit itself holds of the storage: the buffer, its views and the parameters over it.
            self._unused = storage_uses(self.full)
            self.release()

    def _spread(self, full: torch.Tensor) -> None:
        self.full, self._views = full, [self.view(full, s) for s in self.layout.segments]
        self._bare = storage_uses(full)

    def _expose(self) -> None:
        for p, view in zip(self.params, self._views, strict=True):
            expose(p, view)

    def _place(self, kind: StateKind, dtype: torch.dtype) -> TierStore | None:
        """A place for that state besides the device; None for the device itself."""
        start, stop = self.range_of(kind)
        return self.tiers.place(kind, self.plan.of(kind).tier, stop - start, dtype) if self.tiers is not None else None

    def _alias_master(self) -> None:
        within = self.within(StateKind.PARAM, self.shard, *self.range_of(StateKind.OPTIM))
        self.rest[StateKind.OPTIM] = TierStore(within)

    def open_grad(self, dtype: torch.dtype) -> TierStore:
        """The place of the rest gradient, made where there is none."""
        if StateKind.GRAD not in self.rest:
            start, stop = self.range_of(StateKind.GRAD)
            place = self._place(StateKind.GRAD, dtype)
            self.rest[StateKind.GRAD] = place or TierStore(collectives.fresh(stop - start, dtype, self.device))
        return self.rest[StateKind.GRAD]

    def add_view(self, view: Any) -> None:
        """``view`` is part of what an optimizer sees of this unit."""
        self.views.append(view)

    def update_in_tiles(self) -> None:
        """From here on the update goes tile by tile."""
        self.tiled = True

    @property
    def shard(self) -> torch.Tensor:
        """PARAM at rest."""
        return self.rest[StateKind.PARAM].tensor

    @property
    def master(self) -> torch.Tensor | None:
        """The fp32 weights at rest; None where nothing is optimised."""
        store = self.rest.get(StateKind.OPTIM)
        return None if store is None else store.tensor

    @property
    def grad(self) -> torch.Tensor | None:
        """The rest gradient; None before the first one."""
        store = self.rest.get(StateKind.GRAD)
        return None if store is None else store.tensor

    @property
    def grad_away(self) -> bool:
        """Whether the rest gradient is not on the device."""
        return self.on_drive(StateKind.GRAD) or (self.grad is not None and self.grad.device != self.device)

    def on_drive(self, kind: StateKind) -> bool:
        """Whether that state rests on a drive."""
        return kind in self.rest and self.rest[kind].on_drive

    @property
    def drives(self) -> bool:
        """Whether anything of the unit rests on a drive."""
        return any(store.on_drive for store in self.rest.values())

    def values(self, kind: StateKind, *, write: bool = False) -> contextlib.AbstractContextManager[torch.Tensor]:
        """This rank's range of a state at rest, wherever that is; what is written to it counts only with ``write``."""
        if kind is StateKind.OPTIM:
            self.settle_states()
        self.settle()
        if write and (keeper := self.keeper) is not None:
            keeper.before_update()
        if kind is StateKind.GRAD or write:
            self.landed.wait()
        return self.rest[kind].open(write=write)

    @property
    def title(self) -> str:
        """The name for people: every module with parameters in the unit, when it packs several outside a block."""
        homes = list(dict.fromkeys(s.name.rpartition(".")[0] or "root" for s in self.layout.segments))
        inside = all(h == self.name or h.startswith(f"{self.name}.") for h in homes)
        return self.name if inside else ", ".join(homes[:8])

    # Every parameter's values are here: not released, and not still arriving.
    whole = property(lambda self: self.state is UnitState.READY)
    trainable = property(lambda self: self.plan.grad is not None)
    idle = property(lambda self: self.users == 0 and self.pins == 0)

    @property
    def device(self) -> torch.device:
        return self.full.device

    def range_of(self, kind: StateKind) -> tuple[int, int]:
        """This rank's flat [start, stop) of a state at rest."""
        return owned_range(self.layout.numel, self.plan.of(kind).spread, self.mesh)

    @staticmethod
    def view(flat: torch.Tensor, segment: Segment, *, base: int = 0) -> torch.Tensor:
        """The segment's place in ``flat`` (which begins at flat index ``base``), in logical shape."""
        return flat[segment.offset - base : segment.stop - base].view(segment.shape)

    def within(self, kind: StateKind, flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Of ``flat``, this rank's range of a state, the flat indices [start, stop)."""
        base, _ = self.range_of(kind)
        return flat[start - base : stop - base]

    def part(self, kind: StateKind, segment: Segment, flat: torch.Tensor) -> torch.Tensor:
        """Of ``flat``, this rank's range of a state, what belongs to ``segment`` (possibly nothing)."""
        lo, hi = self.layout.overlap(segment, *self.range_of(kind))
        return self.within(kind, flat, lo, hi) if lo < hi else flat[:0]

    def check_views(self, *, sample: bool = False) -> bool:
        """Whether a parameter (``sample``: the last) has left the flat buffer: frozen ones return, others raise."""
        first = len(self.params) - 1 if sample else 0
        pairs = zip(self.layout.segments[first:], self.params[first:], strict=True) if self.whole and first >= 0 else ()
        return any([keep_view(param, self.full, segment) for segment, param in pairs if segment.numel])

    def note_gradient(self, grad: torch.Tensor) -> None:
        """The rest gradient is now ``grad``; of one not on the device the norm is kept: the host need not read it."""
        if self.grad_away:
            self.grad_square = self._weighted_square(grad)

    def send_gradient(self, grad: torch.Tensor) -> None:
        """The rest gradient in host memory will be ``grad``, of the device, when ``landed``."""
        self.note_gradient(grad)
        self.landed = self.rest[StateKind.GRAD].put(grad)

    def note_landing(self, copies: Transfer) -> None:
        """From what the host has of the unit ``copies`` go to the device; the last ones have been waited for."""
        self.landed = copies

    def widen_gradient(self, dtype: torch.dtype) -> None:
        """Let the rest gradient in host memory, which has landed, be of ``dtype``."""
        if self.grad is not None and self.grad.dtype is not dtype:
            self.settle()
            values = self.grad.to(dtype)
            self.rest[StateKind.GRAD].hold_as(dtype)
            self.grad.copy_(values)

    def gradient_square(self) -> torch.Tensor:
        """This rank's part of the squared norm of the mean gradient; what several ranks hold counts once in all."""
        assert self.plan.grad is not None and self.grad is not None
        copies = 1
        for way, axis in zip(self.plan.grad.spread, self.mesh.groups, strict=True):
            copies *= axis.size if way is Spread.REPLICATED else 1
        kept = self.grad_square if self.grad_away else None
        return (self._weighted_square(self.grad) if kept is None else kept) * self.facts.after**2 / copies

    def _weighted_square(self, grad: torch.Tensor) -> torch.Tensor:
        square = square_sum(grad)
        for segment in self.layout.segments:
            if segment.norm_weight != 1.0 and (part := self.part(StateKind.GRAD, segment, grad)).numel():
                square = square - square_sum(part) * (1.0 - segment.norm_weight)
        return square

    def open_partial(self, dtype: torch.dtype, *, begin: torch.Tensor | None = None) -> torch.Tensor:
        """The full-size local sum; where there is none, made of ``begin`` or of zeros. EMPTY or REDUCED -> LOCAL."""
        if self.partial is None:
            if begin is None:
                begin, self._spare = self._spare, None
                if begin is None or begin.dtype is not dtype:
                    begin = collectives.fresh(self.layout.numel, dtype, self.device)
            self.partial = begin
            for start, stop in self.layout.gaps:
                self.partial[start:stop].zero_()
            self.fired.clear()
        self.move_grad(GradState.LOCAL)
        return self.partial

    def keep_spare(self, partial: torch.Tensor) -> None:
        """A local sum has been reduced: let the next one have its memory."""
        self._spare = partial

    def note_packed(self, position: int) -> None:
        """The gradient of one parameter is in the local sum."""
        self.fired.add(position)
        self.arrived.add(position)

    def take_partial(self, dtype: torch.dtype) -> torch.Tensor:
        """Give the local sum away, zeros where nothing fired; where there is none, one of ``dtype``."""
        partial = self.open_partial(dtype)
        segments, fired = self.layout.segments, [*sorted(self.fired), len(self.params)]
        for before, position in zip([-1, *fired], fired, strict=False):  # what lies between two that fired is one piece
            if position - before > 1:
                partial[segments[before + 1].offset : segments[position - 1].stop].zero_()
        self.partial = None
        self.fired.clear()
        self.arrived.clear()
        return partial

    def restore_partial(self, partial: torch.Tensor, positions: set[int]) -> None:
        """Make ``partial`` (flat, zero in the gaps) the sum of the parameters at ``positions`` that waits here."""
        self.partial, self.fired = partial, positions
        self.move_grad(GradState.LOCAL)

    def fill_grad(self) -> bool:
        """The rest gradient will hold something; whether it did."""
        filled, self.grad_filled = self.grad_filled, True
        return filled

    def clear_grad(self) -> None:
        """Drop the gradient; its memory stays for the next window."""
        self.exchange_early(None)
        self.partial = None
        for noted in (self.fired, self.arrived, self.trained):
            noted.clear()
        self.grad_filled = False
        self.move_grad(GradState.EMPTY)

    def move_grad(self, state: GradState) -> None:
        check_move(self.name, self.grad_state, state)
        self.grad_state = state

    def _move(self, state: UnitState) -> None:
        check_move(self.name, self.state, state)
        self.state = state

    def fetch(self, start: Callable[[Callable[[], Transfer]], Transfer]) -> None:
        """ABSENT -> FETCHING (ABSENT after an error): make room and gather, with ``start(self.start_gather)``."""
        if self.full.numel() != self.layout.numel:
            self._spread(self.full.new_empty(self.layout.numel))
        storage = self.full.untyped_storage()
        storage.resize_(self.layout.numel * self.full.element_size())
        self._move(UnitState.FETCHING)
        if self.full.device.type == "cpu":
            hostmem.prefer_huge_pages(storage.data_ptr(), storage.nbytes())
        self.fetched_version = self.version
        try:
            self._transfer = start(self.start_gather)
        except BaseException:
            self.arrive()
            self.release()  # nothing has arrived
            raise

    def arrive(self) -> None:
        """FETCHING -> READY, when everything is here; parameters show their own class again."""
        if self.state is UnitState.FETCHING:
            self._transfer.wait()
            self._transfer = ARRIVED
            self._move(UnitState.READY)
            self._expose()

    def release(self) -> None:
        """READY -> ABSENT: the storage keeps no bytes, or is left to whom it was lent and the next fetch makes one."""
        if not self.movable:
            return
        self._move(UnitState.ABSENT)
        self._hide()
        storage = self.full.untyped_storage()
        # Numpy or another process may hold it: then its bytes must stay where they are.
        fixed = not storage.resizable() or (self.device.type == "cpu" and storage.is_shared())
        if fixed or (self._lent and storage_uses(self.full) > self._bare):
            self.full, self._views = self.full.new_empty(0), []
        self.full.untyped_storage().resize_(0)
        self._lent = False

    def _hide(self) -> None:
        if self._void is None:
            known = self.full.is_floating_point() or self.full.is_complex()
            self._void = torch.full((), math.nan if known else 0, dtype=self.full.dtype, device=self.full.device)
        for p in self.params:
            hide(p, self._void)

    def update_behind(self, update: Transfer) -> None:
        """Masters, slots and PARAM at rest, and so parameters that are never released, are there when ``update`` is."""
        self._updating = update
        if not self.movable:
            self.cover(update)

    def cover(self, until: Transfer = ARRIVED) -> None:
        """READY -> FETCHING: whoever reads a parameter asks from now on, and waits ``until`` it may be read."""
        self._move(UnitState.FETCHING)
        self._transfer = until
        self._hide()

    def exchange_early(self, update: Any, *, taken: bool = False) -> Any:
        """The update that has begun before its step, for another; it is forgotten, unless it is ``taken``."""
        before, self._early = self._early, update
        if before is not None and not taken:
            before.forget()
        return before

    def settle(self, *, stepping: bool = False) -> None:
        """Wait for an update in another thread, but forget what only a step takes. UsageError where it has failed."""
        if not stepping:
            self.exchange_early(None)
        self._updating.wait()
        if not self.movable:
            self.arrive()

    def delay_update(self, update: Transfer = ARRIVED, *, home: Callable[[], object] | None = None) -> None:
        """Masters and slots alone are there when ``update`` is, and after ``home``, from now on, if that is given."""
        self._delayed, self._bring_home = update, home or self._bring_home

    def settle_states(self, *, stepping: bool = False) -> None:
        """The same of masters and slots, until the program may read them; if it is not ``stepping``, write to them."""
        self.settle(stepping=stepping)
        self._delayed.wait()
        if not stepping:
            self._bring_home()
            self.landed.wait()

    def forget_update(self) -> None:
        """It has ended, it does not matter how."""
        self._updating = self._delayed = ARRIVED
        self._transfer = self._transfer if self.movable else ARRIVED
        self.settle()

    def read_by_others(self) -> bool:
        """True while others than the unit hold views of the full buffer (while READY): in a backward, ops that read."""
        return storage_uses(self.full) > self._unused

    def start_gather(self, full: torch.Tensor | None = None) -> Transfer:
        """Fill ``full`` (None: the unit's): from the tier where the shard rests, then over the axis PARAM is cut on."""
        self._updating.wait()
        full = self.full if full is None else full
        cut = self.facts.sharing(self.plan.param.spread)
        start, stop = self.range_of(StateKind.PARAM)
        piece, rest = full[start:stop], self.rest[StateKind.PARAM]
        with profiled(f"gather {self.name}"):
            if cut and not rest.on_drive and rest.tensor.device == piece.device:
                return collectives.all_gather(full, rest.tensor, cut[0])
            rest.get(piece).wait()
            return collectives.all_gather(full, piece, cut[0]) if cut else ARRIVED

    def read_ahead(self) -> bool:
        """Start reading the shard from its drive for a later fetch; False if it is not there yet, or no buffer free."""
        return self.state is UnitState.ABSENT and self.updated and self.rest[StateKind.PARAM].read_ahead()

    def fetch_whole(self) -> None:
        """Gather at once, without schedule or agreement: for construction and teardown, the same on every rank."""
        if self.state is UnitState.ABSENT:
            self.fetch(lambda gather: gather())
            self.arrive()

    def add_user(self, *, borrows: bool = False) -> None:
        """A module that needs the unit runs, until ``drop_user``; ``borrows``: without owning it."""
        self.users += 1
        self.borrowed |= borrows

    def drop_user(self, *, keep: bool = False) -> None:
        """``keep``: the parameters stay until the flush."""
        self.users -= 1
        self.kept = self.kept or keep

    def pin(self, *, lend: bool = False) -> None:
        """Hold the full values until ``unpin``. ``lend``: who reads them outside a forward may keep what is read."""
        if (keeper := self.keeper) is not None:
            keeper.need([self])
        else:
            self.fetch_whole()
        self.pins += 1
        self._lent = self._lent or (lend and not self.may_fetch_on_demand())

    def unpin(self) -> None:
        """The counterpart of ``pin``."""
        self.pins -= 1
        if self.idle and self.state is UnitState.READY:
            self.release()

    def hold_for_backward(self) -> None:
        """Have the full values here until the running backward is over. Collective where they are not."""
        if not self.whole:
            self.pin()
            self.pins -= 1
            self.kept = True

    def all_done(self, position: int, task: int) -> bool:
        """Note that parameter ``position`` got its gradient in graph task ``task``; True when all have, in that one.
        Autograd finishes a gradient after the parameter's last use in that task, so no op still reads the weights.
        """
        self._done, self._done_task = self._done if task == self._done_task else set(), task
        self._done.add(position)
        return len(self._done) == len(self.params)

    def end_backward(self, *, keep: bool) -> None:
        """The backward is over. ``keep``: it left a graph that will read what was kept."""
        self._done.clear()
        self.arrived.clear()
        self.trained.update(requiring(self.params) if self.trainable else ())
        self.kept = self.kept and keep

    def abandon(self) -> None:
        """After an error: nobody uses the unit."""
        self.users, self.kept = 0, False
        self._done.clear()
        self.arrived.clear()

    def absorb(self, position: int) -> None:
        """Make resting copies of a parameter follow its values, which are here; masters that round to these stay."""
        segment = self.layout.segments[position]
        kinds = [StateKind.PARAM] if self.movable else []
        if self.master is not None and not self.master_is_param:
            kinds.append(StateKind.OPTIM)
        for kind in kinds:
            lo, hi = self.layout.overlap(segment, *self.range_of(kind))
            if lo < hi:
                with torch.no_grad(), self.values(kind, write=True) as resting:
                    part = self.within(kind, resting, lo, hi)
                    values = self.full[lo:hi].to(part.device)
                    if kind is StateKind.OPTIM:
                        values = torch.where(part.to(values.dtype) == values, part, values)
                    part.copy_(values)
        self.absorbed[position] = self.params[position]._version
        self.new_version(shown=True)

    def new_version(self, *, shown: bool = False) -> None:
        """PARAM at rest changes: what was gathered before is old, unless it is ``shown`` in the full buffer already."""
        self.version += 1
        self.fetched_version = self.version if shown else self.fetched_version

    def publish_part(self, start: int, values: torch.Tensor) -> Transfer:
        """Put ``values`` (any floating dtype; untouched until the end) into PARAM at rest from flat index ``start``."""
        return self.rest[StateKind.PARAM].put(values, start=start - self.range_of(StateKind.PARAM)[0], lent=True)

    def outbox(self, *, spent: bool) -> torch.Tensor | None:
        """Host memory for PARAM over the range of OPTIM on its way to the device: of the rest gradient, which is needed
        until it is ``spent``. None where there is no room, or no need, as nothing is rounded; and for tiles, which
        publish PARAM from their own buffers.
        """
        store, dtype = self.rest.get(StateKind.GRAD), self.shard.dtype
        rounds = self.master is not None and self.master.dtype is not dtype and not self.tiled
        if not rounds or store is None or store.on_drive or not self.grad_away:
            return None
        self.landed.wait()
        return store.spare(dtype, keep=not spent)

    def leave_device(
        self, kind: StateKind, home: Callable[[torch.Tensor], torch.Tensor], back: contextlib.ExitStack
    ) -> None:
        """Let a state that rests on an accelerator rest in ``home`` of its memory, until ``back`` is closed."""
        store = self.rest.get(kind)
        if store is None or store.on_drive or (device := store.tensor.device).type == "cpu":
            return
        if kind is StateKind.GRAD and not self.grad_filled:
            self.drop_rest(kind)  # only memory; the next reduction makes it again
            return
        self.rest_in(kind, home)
        back.callback(self.rest_in, kind, lambda tensor: tensor.to(device))

    def rest_in(self, kind: StateKind, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let a state, if it is still there, rest in ``copy`` of its memory; what looks at it follows."""
        if kind not in self.rest:
            return
        self.rest[kind] = TierStore(copy(self.rest[kind].tensor))
        if kind is StateKind.PARAM:
            for segment, param in zip(self.layout.segments, self.params, strict=True):
                if hasattr(param, "ds_tensor"):
                    param.ds_tensor = self.part(kind, segment, self.shard)
            if self.master_is_param:
                self._alias_master()
        if self.master is not None and (kind is StateKind.OPTIM or self.master_is_param):
            for view in self.views:
                values = self.within(StateKind.OPTIM, self.master, view.start, view.stop)
                point(view.param, values.view(view.param.shape))

    def drop_rest(self, *kinds: StateKind) -> None:
        """Give the places of these states back."""
        for kind in kinds:
            if (store := self.rest.pop(kind, None)) is not None and store.on_drive:
                store.drop()

    def exchange_gradient_store(self, store: TierStore | None) -> TierStore | None:
        """The place of the rest gradient, if there is one, for ``store`` (None: one that is made when it is needed)."""
        given = self.rest.pop(StateKind.GRAD, None)
        if store is not None:
            self.rest[StateKind.GRAD] = store
        return given

    def forget(self, param: nn.Parameter) -> None:
        """``param`` no longer belongs to this unit."""
        if getattr(param, "_ds_unit", None) is self:
            unmark_zero_parameter(param)

    def strip(self) -> None:
        """Keep the resting parameters only; the unit belongs to nobody and can still be gathered."""
        self.plan = self.plan.frozen()
        self.drop_rest(StateKind.GRAD, StateKind.OPTIM)
        self.clear_grad()
        self.abandon()
        self.views, self.pins, self._spare, self._keeper = [], 0, None, lambda: None
        self.master_is_param, self.tiled, self._bring_home = False, False, lambda: None
        if self.state is UnitState.READY:
            self.release()

    def drop(self) -> None:
        """Give every byte back; the unit is dead afterwards."""
        self.params, self.views, self._views = [], [], []
        self.drop_rest(*self.rest)
        self.full = torch.empty(0)
        self.rest[StateKind.PARAM] = TierStore(self.full)
        self.partial, self._spare, self._keeper = None, None, lambda: None

    def keep_by(self, keeper: Callable[[], Keeper | None]) -> None:
        """``keeper()`` gathers the unit from now on; a weak reference to a runtime, which a unit never keeps alive."""
        self._keeper = keeper

    keeper = property(lambda self: self._keeper(), doc="Who gathers the unit; None when nobody does any more.")
    updated = property(lambda self: self._updating.done(), doc="Whether no update is under way in another thread.")

    def may_fetch_on_demand(self) -> bool:
        return (keeper := self.keeper) is not None and keeper.may_fetch_on_demand()

    def fetch_on_demand(self) -> bool:
        return (keeper := self.keeper) is not None and keeper.fetch_on_demand(self)
