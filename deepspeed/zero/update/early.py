"""Updates that begin beside the backward, before anybody knows that they will be taken (SuperOffload, Lim et al. 2025).

As soon as a unit's gradient is whole, the thread of the update (``tier.behind``) computes what the step would make of
the unit if it did not clip, and puts that beside masters and moments, which stay as they are. The step takes it in
their place where it would have computed the same: factor, settings of the groups, gradient, masters and moments are
those it was computed with. Else it is forgotten, and the update is an ordinary one. So nothing is ever undone, whoever
looks at a state before the step sees the old one, and no bit of any result depends on it.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.errors import UsageError
from deepspeed.optim.rules import AdamBase
from deepspeed.tier.transfer import ARRIVED, Transfer
from deepspeed.zero.layout import Segment
from deepspeed.zero.optim_view import OptimView, captured_groups
from deepspeed.zero.param import point
from deepspeed.zero.plan import InFlight, StateKind
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.standing import frozen_later
from deepspeed.zero.update.turns import same

if TYPE_CHECKING:
    from deepspeed.zero.runtime import Runtime

_MOMENTS = ("exp_avg", "exp_avg_sq")
Numbers = list[dict[str, Any]]  # the settings of the groups


@dataclass
class _Place:
    """Memory for masters and, view by view, moments of one unit."""

    masters: torch.Tensor
    moments: list[list[torch.Tensor]]


@dataclass
class EarlyUpdate:
    """Update ``unit`` by its gradient times ``factor`` with settings ``groups``, in a ``spare`` place if any."""

    unit: Unit
    optimizer: AdamBase
    groups: Numbers
    factor: float
    spare: list[_Place]
    written: list[OptimView] = field(default_factory=list)  # rounded, on their way to the device
    turn: Transfer = ARRIVED
    _wanted: bool = True
    _place: _Place | None = None  # with the new states

    def __post_init__(self) -> None:
        self._read, self._landed = self._reads(), self.unit.landed

    def _reads(self) -> list[tuple[Any, Any]]:
        """What it is made of, and the versions: a client may hold the optimizer's dicts, and put or write there."""
        slots = [view.kept_by(self.optimizer).get(name) for view in self.unit.views for name in ("step", *_MOMENTS)]
        read = [self.unit.grad, *(view.param for view in self.unit.views), *slots]
        return [(each, getattr(each, "_version", None)) for each in read]

    def _untouched(self) -> bool:
        pairs = zip(self._read, self._reads(), strict=True)
        return all(before is now and version == version_now for (before, version), (now, version_now) in pairs)

    def compute(self) -> Transfer:
        """In the thread. An error changes nothing, and the ordinary update meets what is wrong."""
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
        """Nobody computes it any more, and it is not taken."""
        if (place := self._result()) is not None:
            self.spare.append(place)

    def _result(self) -> _Place | None:
        """What there is; what has not begun need not."""
        self._wanted = False
        with contextlib.suppress(UsageError):  # of another turn
            self.turn.wait()
        return self._place

    def fits(self, groups: Numbers, factor: float, frozen: dict[Unit, list[Segment]]) -> bool:
        """Whether the step's update would be this one, but for what is written until then."""
        return factor == self.factor and not frozen and same(groups, self.groups)

    def finish(self, ordinary: Callable[[], list[OptimView]]) -> list[OptimView]:
        """Let masters and moments be the new ones, or call ``ordinary`` where they are not there; the views rounded."""
        new = self._result()
        if new is None or not self._untouched():
            self.spare += [new] if new is not None else []
            return ordinary()
        states, masters = [view.kept_by(self.optimizer) for view in self.unit.views], self.unit.master
        assert masters is not None
        # by ``data``, which counts versions for itself
        self.spare.append(_Place(masters.data, [[state[name].data for name in _MOMENTS] for state in states]))
        self.unit.rest_in(StateKind.OPTIM, lambda _: new.masters)
        for state, moments in zip(states, new.moments, strict=True):
            for name, moment in zip(_MOMENTS, moments, strict=True):
                point(state[name], moment)
            state["step"] += 1
        return self.written


class Early:
    """Of one engine."""

    def __init__(self, runtime: "Runtime", optimizer: AdamBase) -> None:
        self.factor = 1.0  # what the step multiplies gradients by, unless it clips
        self._runtime, self._optimizer = runtime, optimizer
        self._spare = defaultdict[Any, list[_Place]](list)
        sizes = [unit.master.numel() for unit in runtime.units if unit.master is not None]
        self._left = max([sum(sizes) // InFlight.EARLY, *sizes])  # elements that have no place yet

    def begin(self, unit: Unit) -> None:
        """The last gradient of a window is on its way to where it rests."""
        runtime, optimizer = self._runtime, self._optimizer
        if runtime.worker is None or not self._can(unit) or not (spare := self._places_of(unit)):
            return
        if unit.device.type == "cpu":  # where nothing follows by itself
            runtime.gradients.land(unit)
        update = EarlyUpdate(unit, optimizer, captured_groups(optimizer), self.factor, spare)
        update.turn = runtime.worker.hand_over(update.compute, place=unit.index, after=unit.landed)
        unit.exchange_early(update)

    def _can(self, unit: Unit) -> bool:
        """Whether the host's kernel updates it, from memory, and nobody's code sees that."""
        plan, optimizer = unit.plan, self._optimizer
        if plan.optim is None or not plan.optim.away or plan.visits or unit.tiled or unit.drives:
            return False
        if unit.master_is_param or not unit.views or not optimizer.scales_on_host() or frozen_later(unit.views):
            return False
        for view in unit.views:
            state, group = view.kept_by(optimizer), optimizer.param_groups[view.group]
            tensors = [view.param, *(state.get(name) for name in _MOMENTS)]
            if any(t is None or t.dtype is not torch.float32 or not t.is_contiguous() for t in tensors):
                return False  # before the first update there is nothing
            if any(group.get(key) for key in optimizer.torch_keys):
                return False
        return True

    def _places_of(self, unit: Unit) -> list[_Place]:
        """Those that fit the unit, which its like share; one more where there is room."""
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
