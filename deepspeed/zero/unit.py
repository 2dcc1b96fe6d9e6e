"""A unit: the parameters that move together, their plan, and one flat buffer per state."""

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.errors import InvalidStateError, UsageError
from deepspeed.mesh.groups import Mesh
from deepspeed.observe import hostmem
from deepspeed.tier.stored import Stored
from deepspeed.zero.layout import FlatLayout, Segment
from deepspeed.zero.local import expose, hide, storage_uses, unmark_zero_parameter
from deepspeed.zero.plan import Spread, Spreads, StateKind, Tier, UnitPlan
from deepspeed.zero.tiers import Tiers

_PIECE_NUMEL = 1 << 24  # that many fp32 numbers at once on their way to a device: 64 MiB


class UnitState(Enum):
    """Which memory of PARAM exists: ABSENT the shard; FETCHING shard and a full buffer being filled; READY both."""

    ABSENT = "absent"
    FETCHING = "fetching"
    READY = "ready"


class GradState(Enum):
    """EMPTY nothing; LOCAL a full-size partial sum of this rank; REDUCED (also) the rest shard; COLLAPSED ready for the step."""

    EMPTY = "empty"
    LOCAL = "local"
    REDUCED = "reduced"
    COLLAPSED = "collapsed"


_LEGAL_UNIT = {
    (UnitState.ABSENT, UnitState.FETCHING),
    (UnitState.FETCHING, UnitState.READY),
    (UnitState.READY, UnitState.ABSENT),
}
_LEGAL_GRAD = {
    (GradState.EMPTY, GradState.LOCAL),
    (GradState.LOCAL, GradState.REDUCED),
    (GradState.REDUCED, GradState.LOCAL),
    (GradState.REDUCED, GradState.COLLAPSED),
    (GradState.EMPTY, GradState.COLLAPSED),
    (GradState.COLLAPSED, GradState.LOCAL),
}


class Fetcher(Protocol):
    """What a unit needs from its runtime to serve a read of a released parameter."""

    def may_fetch_on_demand(self, unit: "Unit") -> bool: ...

    def fetch_on_demand(self, unit: "Unit") -> bool: ...

    def pin(self, unit: "Unit") -> None: ...

    def unpin(self, unit: "Unit") -> None: ...


def owned_range(numel: int, spread: Spreads, mesh: Mesh) -> tuple[int, int]:
    """This rank's [start, stop) of a flat space under ``spread``: cut inner axis first, then outer within the piece."""
    start = 0
    for way, axis in zip(spread, mesh.axes, strict=True):
        if way is Spread.SHARDED:
            numel //= axis.size
            start += numel * axis.index
    return start, start + numel


class Unit:
    """Parameters with one dtype and one plan, in one flat layout.

    ``full`` is the flat compute-dtype buffer every parameter is a view of, for the whole run; under a sharded PARAM its
    storage is shrunk to nothing while released and the values rest in ``shard``. ``master`` is this rank's range of OPTIM in
    fp32 (the very same memory as the parameter when dtypes and ranges agree). ``grad`` is the rest gradient in the
    accumulation dtype, ``partial`` the local sum before reduction.

    A state that rests on a drive is in ``stored``; its tensor here shows the shape and reads as not-a-number. :meth:`values` gives
    the values of any state wherever it rests.
    """

    def __init__(self, index: int, name: str, params: list[nn.Parameter], *, layout: FlatLayout, plan: UnitPlan, mesh: Mesh) -> None:
        self.index = index
        self.name = name
        self.params = params
        self.layout = layout
        self.plan = plan
        self.mesh = mesh
        self.state = UnitState.READY
        self.grad_state = GradState.EMPTY
        self.users = 0
        self.pins = 0
        self.version = 0
        self.fetched_version = 0
        self.fetcher: Fetcher | None = None
        self.full = torch.empty(0)
        self.shard = torch.empty(0)
        self.master: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self.stored: dict[StateKind, Stored] = {}
        self.tiers: Tiers | None = None
        # Sum of the squares of a rest gradient that is on the drive.
        self.grad_square: torch.Tensor | None = None
        self.master_is_param = False
        self._views: list[torch.Tensor] = []
        self._void: torch.Tensor | None = None
        self._own_uses = 0
        self.fired: set[int] = set()
        self.arrived: set[int] = set()
        # Something that autograd cannot announce will read the parameters in backward: they stay until the flush.
        self.kept = False
        self.grad_filled = False
        self.backward_inputs = 0
        self.done: set[int] = set()
        self._done_task = -1
        self._owner: weakref.ref[Any] | None = None
        self.transfer: Any = None

    # -- construction ------------------------------------------------------------------------------------------------
    def adopt(self, values: torch.Tensor, dtype: torch.dtype, *, keep_master: bool, tiers: Tiers | None = None) -> None:
        """Take over ``values`` (flat, full, any floating dtype, on the device): build the buffers and re-point the parameters.

        ``keep_master``: an fp32 copy of the owned OPTIM range is made from the unrounded values (aliased if possible).
        ``tiers`` has the places for states that do not rest on the device.
        """
        self.tiers = tiers
        own = self.range_of(StateKind.PARAM)
        self.full = values.to(dtype) if values.dtype != dtype else values
        self._views = [self.view(self.full, s) for s in self.layout.segments]
        for p, view in zip(self.params, self._views, strict=True):
            expose(p)
            p.data = view
        # With one way on the sharded axis the shard is everything: nothing to gather, nothing to release.
        self.shard = self.full[own[0] : own[1]]
        if self.movable:
            self._rest_param()
        if keep_master and self.plan.optim is not None:
            self._rest_master(values, torch.promote_types(dtype, torch.float32))
        if self.movable:
            self.state = UnitState.READY
            # One each for ``full``, its views and the parameters over it, and one for the question itself.
            self._own_uses = 2 + len(self._views) + len(self.params)
            self.release()

    def _rest_param(self) -> None:
        """Give PARAM its rest place beside the full buffer."""
        stored = None
        if self.plan.param.tier is Tier.NVME:
            assert self.tiers is not None
            stored = self.tiers.store_param(self.shard.numel(), self.shard.dtype)
        if stored is not None:
            stored.put(self.shard)
            self.stored[StateKind.PARAM] = stored
            self.shard = _nothing(self.shard.numel(), self.shard.dtype)
        elif self.plan.param.away and self.device.type != "cpu":
            assert self.tiers is not None
            self.shard = self.tiers.to_host(self.shard, pin=self.tiers.plan.pin_param)
        else:
            self.shard = self.shard.clone()

    def _rest_master(self, values: torch.Tensor, wide: torch.dtype) -> None:
        """Give OPTIM's fp32 weights their rest place."""
        assert self.plan.optim is not None
        start, stop = self.range_of(StateKind.OPTIM)
        if self.plan.optim.tier is Tier.NVME:
            assert self.tiers is not None
            stored = self.tiers.store_optim(stop - start, wide)
            stored.put(values[start:stop])
            self.stored[StateKind.OPTIM] = stored
            self.master = _nothing(stop - start, wide)
            return
        home = self.optim_device
        self.master_is_param = self.shard.dtype == wide and self.shard.device == home and StateKind.PARAM not in self.stored
        if self.master_is_param:
            base, _ = self.range_of(StateKind.PARAM)
            self.master = self.shard[start - base : stop - base]
        elif home == self.device:
            self.master = values[start:stop].to(wide, copy=True)
        else:
            assert self.tiers is not None
            self.master = self.tiers.to_host(values[start:stop].to(wide), pin=self.tiers.plan.pin_optim)

    @property
    def optim_device(self) -> torch.device:
        """Where the update of this unit is computed."""
        away = self.plan.optim is not None and self.plan.optim.away
        return torch.device("cpu") if away else self.device

    @contextlib.contextmanager
    def values(self, kind: StateKind, *, write: bool = False) -> Iterator[torch.Tensor]:
        """This rank's range of a state at rest, wherever that is; what is written to it counts only with ``write``."""
        stored = self.stored.get(kind)
        if stored is None:
            tensor = {StateKind.PARAM: self.shard, StateKind.GRAD: self.grad, StateKind.OPTIM: self.master}[kind]
            assert tensor is not None, f"unit {self.name} holds no {kind.value}"
            yield tensor
        else:
            with stored.open(write=write) as tensor:
                yield tensor

    @property
    def movable(self) -> bool:
        """True when PARAM rests elsewhere than in the full buffer, so that there is something to fetch and release."""
        return self.plan.param.away or any(
            w is Spread.SHARDED and a.size > 1 for w, a in zip(self.plan.param.spread, self.mesh.axes, strict=True)
        )

    @property
    def title(self) -> str:
        """The name for people: every module with parameters in the unit, when it packs several outside a block."""
        homes = list(dict.fromkeys(s.name.rpartition(".")[0] or "root" for s in self.layout.segments))
        return self.name if all(h == self.name or h.startswith(f"{self.name}.") for h in homes) else ", ".join(homes[:8])

    @property
    def whole(self) -> bool:
        """True when every parameter's values are here: not released, and not still arriving."""
        return self.state is UnitState.READY

    @property
    def trainable(self) -> bool:
        return self.plan.grad is not None

    @property
    def device(self) -> torch.device:
        return self.full.device

    def range_of(self, kind: StateKind) -> tuple[int, int]:
        """This rank's flat [start, stop) of a state at rest."""
        plan = {StateKind.PARAM: self.plan.param, StateKind.GRAD: self.plan.grad, StateKind.OPTIM: self.plan.optim}[kind]
        assert plan is not None, f"unit {self.name} has no {kind.value}"
        return owned_range(self.layout.numel, plan.spread, self.mesh)

    @staticmethod
    def view(flat: torch.Tensor, segment: Segment, *, base: int = 0) -> torch.Tensor:
        """The segment's place in ``flat`` (which begins at flat index ``base``), in logical shape."""
        return flat[segment.offset - base : segment.stop - base].view(segment.shape)

    def check_views(self) -> None:
        """Refuse to run on parameters that something has moved away from the flat buffer (``module.half()``, ``.to(device)``)."""
        if self.state is not UnitState.READY or not self.params:
            return
        base, width = self.full.data_ptr(), self.full.element_size()
        for segment, param in zip(self.layout.segments, self.params, strict=True):
            if segment.numel and param.data_ptr() != base + segment.offset * width:
                raise UsageError(
                    f"parameter {segment.name!r} was given other data, moved or cast after deepspeed.initialize (now {param.dtype} on "
                    f"{param.device}); the engine's optimizer would no longer update it. Choose dtype and device before, or through the "
                    "configuration, and write values in place (param.data.copy_(...))"
                )

    @property
    def holds_gradient(self) -> bool:
        """Whether memory or a place on a drive exists for the rest gradient."""
        return self.grad is not None or (StateKind.GRAD in self.stored and self.grad_filled)

    def note_gradient(self, grad: torch.Tensor) -> None:
        """The rest gradient on the drive is now ``grad``."""
        if StateKind.GRAD in self.stored:
            self.grad_square = square_sum(grad)

    # -- state machines ------------------------------------------------------------------------------------------------
    def move(self, state: UnitState) -> None:
        if (self.state, state) not in _LEGAL_UNIT:
            raise InvalidStateError(f"unit {self.name}: parameters cannot go from {self.state.value} to {state.value}")
        self.state = state

    def move_grad(self, state: GradState) -> None:
        if state is self.grad_state:
            return
        if (self.grad_state, state) not in _LEGAL_GRAD and state is not GradState.EMPTY:
            raise InvalidStateError(f"unit {self.name}: gradients cannot go from {self.grad_state.value} to {state.value}")
        self.grad_state = state

    # -- memory ----------------------------------------------------------------------------------------------------------
    def allocate(self) -> None:
        """ABSENT -> FETCHING: give the full buffer its bytes back."""
        self.move(UnitState.FETCHING)
        storage = self.full.untyped_storage()
        storage.resize_(self.layout.numel * self.full.element_size())
        if self.full.device.type == "cpu":
            hostmem.prefer_huge_pages(storage.data_ptr(), storage.nbytes())
        self.fetched_version = self.version

    def ready(self) -> None:
        """FETCHING -> READY: the bytes are there; parameters show their own class again."""
        self.move(UnitState.READY)
        for p, view in zip(self.params, self._views, strict=True):
            expose(p)
            p.data = view

    def release(self) -> None:
        """READY -> ABSENT: free the full buffer; views stay, the storage is resized and never replaced."""
        if not self.movable:
            return
        self.move(UnitState.ABSENT)
        if self._void is None:
            known = self.full.is_floating_point() or self.full.is_complex()
            self._void = torch.full((), math.nan if known else 0, dtype=self.full.dtype, device=self.full.device)
        for p in self.params:
            hide(p, self._void)
        self.full.untyped_storage().resize_(0)

    def read_by_others(self) -> bool:
        """True while views of the full buffer other than the unit's own are alive (while READY): in a backward, ops that will read."""
        return storage_uses(self.full) > self._own_uses

    def all_done(self, position: int, task: int) -> bool:
        """Note that parameter ``position`` got its gradient in graph task ``task``; True when all have, in that one task.

        Autograd finishes a parameter's gradient after its last use in the task, so then no op still reads the weights. Gradients
        from another task (a reentrant checkpoint) prove nothing about this one.
        """
        if task != self._done_task:
            self.done.clear()
            self._done_task = task
        self.done.add(position)
        return len(self.done) == len(self.params)

    def start_gather(self) -> collectives.Transfer:
        """Fill the full buffer: from the tier where the shard rests, then over the axis that PARAM is cut on."""
        cut = [g for way, g in zip(self.plan.param.spread, self.mesh.groups, strict=True) if way is Spread.SHARDED and g.size > 1]
        start, stop = self.range_of(StateKind.PARAM)
        own = self.full[start:stop]
        if StateKind.PARAM in self.stored:
            self.stored[StateKind.PARAM].load(own)
        elif self.shard.device != own.device or not cut:
            own.copy_(self.shard, non_blocking=True)
        else:
            own = self.shard
        return collectives.all_gather(self.full, own, cut[0]) if cut else collectives.Transfer([])

    def read_ahead(self) -> bool:
        """Start reading the shard from its drive for a later fetch; False when it is not there, or no staging buffer is free."""
        stored = self.stored.get(StateKind.PARAM)
        return stored is not None and self.state is UnitState.ABSENT and stored.read_ahead()

    def forget_ahead(self) -> None:
        """What was read ahead will not be fetched."""
        if StateKind.PARAM in self.stored:
            self.stored[StateKind.PARAM].forget_ahead()

    def fetch_whole(self) -> None:
        """Gather at once, without schedule or agreement: for construction and teardown, where every rank does the same."""
        if self.state is UnitState.ABSENT:
            self.allocate()
            self.start_gather().wait()
            self.ready()

    def local_part(self, position: int) -> torch.Tensor:
        """This rank's resting part of one parameter, flat (possibly empty); not-a-number while it rests on a drive."""
        start, stop = self.range_of(StateKind.PARAM)
        lo, hi = self.layout.overlap(self.layout.segments[position], start, stop)
        return self.shard[lo - start : max(lo, hi) - start] if lo < hi else self.shard[:0]

    def absorb(self, position: int) -> None:
        """Make the resting copies (shard, master) of one parameter follow its full values, which are here."""
        segment = self.layout.segments[position]
        values = self.full[segment.offset : segment.stop]
        kinds = [StateKind.PARAM] if self.movable else []
        if self.master is not None and not self.master_is_param:
            kinds.append(StateKind.OPTIM)
        for kind in kinds:
            start, stop = self.range_of(kind)
            lo, hi = self.layout.overlap(segment, start, stop)
            if lo < hi:
                with self.values(kind, write=True) as resting:
                    resting[lo - start : hi - start].copy_(values[lo - segment.offset : hi - segment.offset])

    def publish_part(self, start: int, values: torch.Tensor) -> None:
        """Make PARAM at rest hold ``values`` (any floating dtype), which begin at flat index ``start``."""
        at = start - self.range_of(StateKind.PARAM)[0]
        if StateKind.PARAM in self.stored:
            self.stored[StateKind.PARAM].put(values, start=at)
        else:
            _round_into(self.shard[at : at + values.numel()], values)

    def publish_rest(self, own: torch.Tensor, written: Iterable[tuple[int, int]]) -> None:
        """Round the master into ``own``, PARAM over the range of OPTIM, but for the flat ranges that the update has ``written`` there."""
        assert self.master is not None
        base, stop = self.range_of(StateKind.OPTIM)
        done = base
        for lo, hi in [*sorted(written), (stop, stop)]:
            if done < lo:
                _round_into(own[done - base : lo - base], self.master[done - base : lo - base])
            done = hi

    def forget(self, param: nn.Parameter) -> None:
        """``param`` no longer belongs to this unit."""
        if getattr(param, "_ds_unit", None) is self:
            unmark_zero_parameter(param)

    def strip(self) -> None:
        """Keep the resting parameters only; the unit belongs to nobody and can still be gathered."""
        self.plan = self.plan.frozen()
        self._unstore(StateKind.GRAD, StateKind.OPTIM)
        self.master = self.grad = self.partial = None
        self.grad_filled = False
        self.grad_state = GradState.EMPTY
        self.fetcher = self._owner = None
        self.users = self.pins = 0
        self.kept = False
        if self.state is UnitState.READY:
            self.release()

    def drop(self) -> None:
        """Give every byte back; the unit is dead afterwards."""
        self.params = []
        self._views = []
        self._unstore(*self.stored)
        self.full = self.shard = torch.empty(0)
        self.master = self.grad = self.partial = None
        self.fetcher = None

    def _unstore(self, *kinds: StateKind) -> None:
        for kind in kinds:
            if kind in self.stored:
                self.stored.pop(kind).drop()

    @property
    def idle(self) -> bool:
        return self.users == 0 and self.pins == 0

    # -- the engine side (access.py) ------------------------------------------------------------------------------------
    def set_owner(self, owner: Any) -> None:
        """``owner`` answers for gradients and optimizer state; held weakly, so a unit never keeps an engine alive."""
        self._owner = weakref.ref(owner)

    def has_owner(self) -> bool:
        return self._owner is not None and self._owner() is not None

    def owner(self) -> Any:
        found = self._owner() if self._owner is not None else None
        if found is None:
            raise InvalidStateError(f"unit {self.name} belongs to no living engine")
        return found

    @property
    def order(self) -> int:
        """Position in the one order in which every rank handles several units."""
        return self.index

    def pin(self) -> None:
        """Hold the full values until ``unpin``."""
        if self.fetcher is not None:
            self.fetcher.pin(self)
        else:
            self.fetch_whole()
            self.pins += 1

    def hold_for_backward(self) -> None:
        """Have the full values here until the running backward is over. Collective where they are not."""
        if not self.whole:
            self.pin()
            self.unpin_later()

    def unpin_later(self) -> None:
        """Give a pin back without releasing: the end of the backward does that."""
        self.pins -= 1
        self.kept = True

    def unpin(self) -> None:
        if self.fetcher is not None:
            self.fetcher.unpin(self)
        else:
            self.pins -= 1
            if self.pins == 0 and self.state is UnitState.READY:
                self.release()

    # -- served to released parameters (local.py) -----------------------------------------------------------------------
    def may_fetch_on_demand(self) -> bool:
        return self.fetcher is not None and self.fetcher.may_fetch_on_demand(self)

    def fetch_on_demand(self) -> bool:
        return self.fetcher is not None and self.fetcher.fetch_on_demand(self)


def _round_into(out: torch.Tensor, values: torch.Tensor) -> None:
    """``out.copy_(values)``, with the rounding done where ``out`` is: torch's copy from the host to a device rounds on the host."""
    if out.device == values.device or values.device.type != "cpu" or out.dtype == values.dtype:
        out.copy_(values)
        return
    for lo in range(0, values.numel(), _PIECE_NUMEL):
        piece = slice(lo, lo + _PIECE_NUMEL)
        out[piece].copy_(values[piece].to(out.device))


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64, from a norm in fp32 or wider."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values, dtype=wide).double().square()


def _nothing(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Stands for values that are elsewhere: ``numel`` elements that read as not-a-number and refuse to be written."""
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device="cpu").expand(numel)
