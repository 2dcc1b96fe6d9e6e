"""Updates that begin beside the backward, before anybody knows that they will be taken (SuperOffload, Lim et al. 2025).

As soon as a unit's gradient is whole, the thread of the update (``tier.behind``) computes what the step would make of
the unit if it did not clip, and puts that beside masters and moments, which stay as they are. The step takes it in
their place where it would have computed the same: factor, settings of the groups, gradient, masters and moments are
those it was computed with. Else it is forgotten, and the update is an ordinary one. So nothing is ever undone, whoever
looks at a state before the step sees the old one, and no bit of any result depends on it.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import OptimizerConfigError, UsageError
from deepspeed.optim.host import Scalar
from deepspeed.optim.rules import AdamBase
from deepspeed.tier.transfer import ARRIVED, Transfer
from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.optim_view import OptimView, move_state
from deepspeed.zero.param import point
from deepspeed.zero.plan import Bytes, StateKind, Tier, UpdateSettings
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.apply import Frozen, Groups, captured_groups, frozen_since
from deepspeed.zero.update.inline import BackgroundUpdate
from deepspeed.zero.update.partial import same
from deepspeed.zero.update.policy import UpdateHost

_SHARE = 3  # of the elements that the host updates, one in so many has a place for new states beside the old ones
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class SpeculativeSettings(UpdateSettings):
    """Settings of ``offload_optimizer.super_offload``, which uses the share ``cores`` of the cores."""

    cores: float

    def check(self, optimizer: Any, mesh: Any) -> None:
        if not isinstance(optimizer, AdamBase):
            raise OptimizerConfigError(
                "zero_optimization.offload_optimizer.super_offload needs this package's AdamW or Adam, not "
                f"{type(optimizer).__name__}; remove it, or use one of these by name in the configuration"
            )

    def memory_beside(self, numels: Sequence[int], *, slots: int) -> list[Bytes]:
        """Implement ``UpdateSettings.memory_beside``: new states beside the old ones."""
        most = max([sum(numels) // _SHARE, *numels], default=0)
        return [Bytes("new optimizer state", Tier.HOST, (4 + slots) * most)]

    def describe(self) -> str:
        return f"updates begin beside the backward, on {self.cores:.0%} of the cores"


def settings_of(config: DeepSpeedConfig) -> SpeculativeSettings | None:
    """Return the settings, where the configuration asks for them, or None."""
    optim = config.zero.offload_optimizer
    return SpeculativeSettings(float(optim.cpuadam_cores_perc)) if optim is not None and optim.super_offload else None


def policy_of(host: UpdateHost, optimizer: Any, settings: SpeculativeSettings, tiers: Tiers) -> "SpeculativeUpdate":
    """Return the policy of an engine with these settings."""
    return SpeculativeUpdate(host, optimizer, cores=settings.cores)


@dataclass
class _Place:
    """Memory for masters and, view by view, moments of one unit."""

    masters: torch.Tensor
    moments: list[list[torch.Tensor]]


@dataclass
class EarlyUpdate(Transfer):
    """Update of ``unit`` that begins before the step, by its gradient times ``factor`` with the settings ``groups``, in
    one of the ``spare`` places, if any. A writer to its inputs waits for it, which forgets it.
    """

    unit: Unit
    optimizer: AdamBase
    groups: Groups
    factor: float
    spare: list[_Place]
    written: list[OptimView] = field(default_factory=list)  # rounded, on their way to the device
    turn: Transfer = ARRIVED
    taken: bool = False  # by a step, which finishes it
    _wanted: bool = True
    _place: _Place | None = None  # with the new states

    def __post_init__(self) -> None:
        self._read, self._landed = self._reads(), self.unit.pending.until(StateKind.GRAD)

    def wait(self) -> None:
        if self.taken:
            self.turn.wait()
        else:
            self.forget()

    def done(self) -> bool:
        return (self.taken or not self._wanted) and self.turn.done()

    def _reads(self) -> list[tuple[Any, Any]]:
        """Return the inputs and their versions: a client may hold the optimizer's dicts, and put or write there."""
        slots = [view.kept_by(self.optimizer).get(name) for view in self.unit.views for name in ("step", *_MOMENTS)]
        read = [self.unit.grad, *(view.param for view in self.unit.views), *slots]
        return [(value, getattr(value, "_version", None)) for value in read]

    def _untouched(self) -> bool:
        pairs = zip(self._read, self._reads(), strict=True)
        return all(before is now and version == version_now for (before, version), (now, version_now) in pairs)

    def compute(self) -> Transfer:
        """Compute in the thread. An error changes nothing, and the ordinary update meets its cause."""
        if self._wanted and self.spare:
            place = self.spare.pop()
            try:
                self._landed.wait()
                for view, moments in zip(self.unit.views, place.moments, strict=True):
                    self._compute(view, place.masters, moments)
                self._place = place
            except Exception:
                self.spare.append(place)
        return ARRIVED

    def _compute(self, view: OptimView, whole: torch.Tensor, moments: list[torch.Tensor]) -> None:
        unit, store = self.unit, self.unit.rest[StateKind.GRAD]
        grad = view.within(StateKind.GRAD, store.tensor).view(view.param.shape)
        masters = view.within(StateKind.OPTIM, whole).view(view.param.shape)
        # elsewhere PARAM itself rests, which the running backward reads
        out = view.output(apart=store) if unit.shard.device.type != "cpu" else None
        self.optimizer.update_beside(
            [view.param.detach(), grad],
            view.kept_by(self.optimizer),
            self.groups[view.group],
            scale=self.factor * unit.facts.after,
            out=out,
            new=[masters, *moments],
        )
        self.written += [] if out is None else [view]

    def forget(self) -> None:
        """Drop the update: it is neither taken nor computed any more."""
        place, self._place = self._result(), None
        if place is not None:
            self.spare.append(place)

    def _result(self) -> _Place | None:
        """Return the new states, if computed; a computation that has not begun is cancelled."""
        self._wanted = False
        with contextlib.suppress(UsageError):  # of another turn
            self.turn.wait()
        return self._place

    def fits(self, groups: Groups, factor: Scalar, frozen: Frozen) -> bool:
        """Tell whether the step's update would be this one, except for writes to its inputs until then."""
        return bool(factor == self.factor) and not frozen and same(groups, self.groups)

    def finish(self, ordinary: Callable[[], list[OptimView]]) -> list[OptimView]:
        """Swap in the new masters and moments, or call ``ordinary`` where they are absent; return rounded views."""
        new, self._place = self._result(), None
        if new is None or not self._untouched():
            self.spare += [new] if new is not None else []
            return ordinary()
        states, masters = [view.kept_by(self.optimizer) for view in self.unit.views], self.unit.master
        assert masters is not None
        # by ``data``, which counts versions for itself
        self.spare.append(_Place(masters.data, [[state[name].data for name in _MOMENTS] for state in states]))
        move_state(self.unit, StateKind.OPTIM, new.masters)
        for state, moments in zip(states, new.moments, strict=True):
            for name, moment in zip(_MOMENTS, moments, strict=True):
                point(state[name], moment)
            state["step"] += 1
        return self.written


class SpeculativeUpdate(BackgroundUpdate):
    """Speculative update of one engine, on the share ``cores`` of the cores."""

    swaps_memory = True

    def __init__(self, host: UpdateHost, optimizer: AdamBase, *, cores: float) -> None:
        super().__init__(host, optimizer)
        optimizer.host_cores = cores
        self._factor = 1.0  # what the step multiplies gradients by, unless it clips
        self._begun: dict[Unit, EarlyUpdate] = {}
        self._spare = defaultdict[Any, list[_Place]](list)
        sizes = [unit.master.numel() for unit in host.units if unit.master is not None]
        self._left = max([sum(sizes) // _SHARE, *sizes], default=0)  # elements that have no place yet

    def begin_backward(self, loss_scale: float) -> None:
        self._factor = 1.0 / loss_scale

    def gradient_ready(self, unit: Unit) -> None:
        """Begin the update of ``unit``, where ``_can`` allows it and a place is free."""
        worker, optimizer = self.host.worker, self.optimizer
        if worker is None or not self._can(unit):
            return
        spare = self._places_of(unit)
        if not spare:
            return
        if unit.device.type == "cpu":  # where nothing follows by itself
            self.host.gradients.land(unit)
        update = EarlyUpdate(unit, optimizer, captured_groups(optimizer), self._factor, spare)
        update.turn = worker.hand_over(update.compute, place=unit.index, after=unit.pending.until(StateKind.GRAD))
        unit.note_pending(update, reads=(StateKind.GRAD, StateKind.OPTIM))
        self._begun[unit] = update
        self.pending = True

    def left_out(self) -> None:
        self._forget_begun()

    def forget(self) -> None:
        self._forget_begun()
        super().forget()

    def close(self) -> None:
        self._forget_begun()
        vars(self.optimizer).pop("host_cores", None)  # its kernels take all of them again
        super().close()

    def _forget_begun(self) -> None:
        while self._begun:
            self._begun.popitem()[1].forget()

    def _update_all(self, views: Sequence[OptimView], factor: Scalar, skip: torch.Tensor | None) -> list[OptimView]:
        self._forget_begun()  # somebody watches the step
        return super()._update_all(views, factor, skip)

    def _part_update(self, views: list[OptimView], groups: Groups, factor: Scalar) -> Callable[[], list[OptimView]]:
        """Return the ordinary update, or the same one begun before the step."""
        ordinary = super()._part_update(views, groups, factor)
        early = self._begun.pop(views[0].unit, None)
        if early is None:
            return ordinary
        if early.fits(groups, factor, frozen_since(views)):
            early.taken = True
            return functools.partial(early.finish, ordinary)
        early.forget()
        return ordinary

    def _can(self, unit: Unit) -> bool:
        """Tell whether the host's kernel updates ``unit``, from memory, unseen by code of the user's."""
        plan, optimizer = unit.plan, self.optimizer
        if plan.optim is None or not plan.optim.away or plan.loads_states or unit.tiled or unit.drives:
            return False
        if unit.master_is_param or not unit.views or not optimizer.scales_on_host() or frozen_since(unit.views):
            return False
        for view in unit.views:
            state, group = view.kept_by(optimizer), optimizer.param_groups[view.group]
            tensors = [view.param, *(state.get(name) for name in _MOMENTS)]
            if view.missed or any(t is None or t.dtype is not torch.float32 or not t.is_contiguous() for t in tensors):
                return False  # before the first update there is nothing
            if any(group.get(key) for key in optimizer.torch_keys):
                return False
        return True

    def _places_of(self, unit: Unit) -> list[_Place]:
        """Return the places that fit the unit, shared by equal units; add one while there is room."""
        assert unit.master is not None
        numel, start = unit.master.numel(), unit.range_of(StateKind.OPTIM)[0]
        shapes = [(view.start - start, tuple(view.param.shape)) for view in unit.views]
        key = (numel, *shapes)
        spare = self._spare[key]
        if numel > self._left or unit.tiers is None:
            return spare
        self._left -= numel
        # masters of parameters in fp32 travel to the device themselves
        pin = unit.tiers.plan.pin_optim and unit.shard.dtype is torch.float32
        masters = unit.tiers.arena.empty(numel, dtype=torch.float32, pin=pin)
        empty = unit.tiers.arena.empty
        spare.append(_Place(masters, [[empty(shape, dtype=torch.float32) for _ in _MOMENTS] for _, shape in shapes]))
        return spare
