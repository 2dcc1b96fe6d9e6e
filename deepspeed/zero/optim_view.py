"""What the user's optimizer sees: plain tensors over this rank's master ranges, one per (unit, parameter group).

The optimizer object, its ``param_groups`` list and its group dicts stay the caller's own; only the ``params`` entries
change.
"""

import bisect
import copy
import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.errors import OptimizerConfigError
from deepspeed.optim.host import Scalar
from deepspeed.tier.store import TierStore
from deepspeed.zero.layout import Granularity, Segment
from deepspeed.zero.param import point
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit

_PAGE_NUMEL = 4096  # tiles end where pages do, in any dtype


@dataclass
class OptimView:
    """View by which the optimizer sees flat [start, stop) of ``unit``: ``param``, with ``.grad`` during a step only."""

    unit: Unit
    group: int
    start: int
    stop: int
    param: nn.Parameter
    name: str
    # By name of parameters that were frozen for a while: how many of the updates that the optimizer counts they missed.
    missed: dict[str, int] = field(default_factory=dict)

    @property
    def on_drive(self) -> bool:
        """Tell whether the view's values come into memory for the update only."""
        return self.unit.on_drive(StateKind.OPTIM)

    def within(self, kind: StateKind, flat: torch.Tensor) -> torch.Tensor:
        """Return the view's part of ``flat``, which is this rank's range of a state of the unit."""
        return self.unit.within(kind, flat, self.start, self.stop)

    def kept_by(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state for this view, without triggering the wait that ``optimizer.state`` does."""
        state: dict[str, Any] = vars(optimizer)["state"].get(self.param, {})
        return state

    def output(self, apart: TierStore | None = None) -> torch.Tensor | None:
        """Return the part of PARAM at rest, or on its way there, that the optimizer may round this view's weights into;
        None: rounded afterwards. ``apart``: only on its way there, in the free memory behind a gradient in that place.
        """
        unit, resting = self.unit, self.unit.shard
        if apart is not None:
            casts = unit.device.type != "cpu" and resting.dtype is not self.param.dtype
            box = apart.spare(resting.dtype, keep=True) if casts else None
            return None if box is None else self.within(StateKind.OPTIM, box)
        if unit.master_is_param or unit.on_drive(StateKind.PARAM):
            return None
        if resting.device == self.param.device:
            return self.within(StateKind.PARAM, resting)
        box = unit.outbox(spent=False)
        return None if box is None else self.within(StateKind.OPTIM, box)

    def gradient(self, factor: Scalar, *, source: torch.Tensor | None = None, plain: bool = False) -> torch.Tensor:
        """Return the view's part of the unit's mean gradient times ``factor``, in the view's shape and dtype.

        A gradient in another dtype is converted first: fp16 could not hold it without the loss scale. In the same dtype
        the rest gradient itself is multiplied. ``source`` is that part where the gradient does not rest in memory.
        ``plain``: as it is, for a caller that multiplies it.
        """
        if source is None:
            assert self.unit.grad is not None
            self.unit.wait(StateKind.GRAD)
            source = self.within(StateKind.GRAD, self.unit.grad)
        piece = source.view(self.param.shape)
        if plain:
            return piece
        piece, factor = piece.to(self.param.dtype), factor * self.unit.facts.after
        return piece if isinstance(factor, float) and factor == 1.0 else piece.mul_(factor)


def build_views(units: list[Unit], group_count: int, *, tile_numel: int = 0) -> list[OptimView]:
    """Cut each unit's master range into views (not of group -1); on a drive of at most ``tile_numel`` elements."""
    views: list[OptimView] = []
    for unit in units:
        if unit.master is None:
            continue
        for name, group, lo, hi, shape in _spans(unit, max(_PAGE_NUMEL, tile_numel // _PAGE_NUMEL * _PAGE_NUMEL)):
            if 0 <= group < group_count:
                param = nn.Parameter(unit.within(StateKind.OPTIM, unit.master, lo, hi).view(shape))
                views.append(OptimView(unit, group, lo, hi, param, name))
                unit.add_view(views[-1])
    return views


def _spans(unit: Unit, tile_numel: int) -> Iterator[tuple[str, int, int, int, tuple[int, ...]]]:
    """Yield name, group, flat range and shape of each view: a parameter, or the part here of a group, maybe in tiles.

    Padding inside a group has zero gradients: a longer loop is cheaper than a cut. Tiles end on pages of the range.
    """
    start, stop = unit.range_of(StateKind.OPTIM)
    parts = [(s, *unit.layout.overlap(s, start, stop)) for s in unit.layout.segments]
    parts = [(s, lo, hi) for s, lo, hi in parts if lo < hi]
    if unit.layout.granularity is Granularity.PARAMETER:
        yield from ((s.name, s.group, lo, hi, s.shape) for s, lo, hi in parts)
        return
    for group, members in itertools.groupby(parts, key=lambda part: part[0].group):
        bounds = [bound for _, *both in members for bound in both]
        lo, hi = bounds[0], bounds[-1]
        first_edge = start + ((lo - start) // tile_numel + 1) * tile_numel
        edges = range(first_edge, hi, tile_numel) if unit.on_drive(StateKind.OPTIM) else ()
        for first, last in itertools.pairwise((lo, *edges, hi)):
            yield f"{unit.name}[{group}]", group, first, last, (last - first,)


def copied(value: Any) -> Any:
    """Copy a number, a tensor or another value of a group."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def segments_of(view: OptimView) -> list[Segment]:
    """Return the parameters that a view has a part of, in ascending order."""
    segments = view.unit.layout.segments
    first = bisect.bisect_right(segments, view.start, key=lambda s: s.stop)
    last = bisect.bisect_left(segments, view.stop, key=lambda s: s.offset)
    return [s for s in segments[first:last] if s.numel]


class MasterList(list[nn.Parameter]):
    """Parameters of a group, as masters: access to one waits for an update under way, as ``state`` does."""

    def __init__(self, params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(params)
        self._optimizer = weakref.ref(optimizer)

    def _look(self) -> None:
        if (look := getattr(self._optimizer(), "before_looking", None)) is not None:
            look()

    def __iter__(self) -> Iterator[nn.Parameter]:
        self._look()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._look()
        return super().__getitem__(index)

    def __reduce__(self) -> Any:
        return list, ([*self],)


def attach(optimizer: torch.optim.Optimizer, views: list[OptimView]) -> None:
    """Point the optimizer's groups at the views. Raises OptimizerConfigError when it has already taken steps."""
    initial = check_fresh(optimizer)
    optimizer.state.clear()
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = MasterList([v.param for v in views if v.group == index], optimizer)
    for view in views if initial else ():
        optimizer.state[view.param] = {key: _like(value, view.param) for key, value in initial[view.group].items()}


def check_fresh(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return the state per group that construction has filled (torch's Adagrad): of parameter-sized tensors one element
    (or none, for an empty group). OptimizerConfigError after steps.
    """
    if not optimizer.state:
        return {}
    steps = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
    tensors = (v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.numel())
    if len(steps) != len(optimizer.state) or any(steps) or not all((v == v.reshape(-1)[0]).all() for v in tensors):
        raise OptimizerConfigError(
            f"the {type(optimizer).__name__} passed to initialize() has already taken steps (it holds state for "
            f"{len(optimizer.state)} tensors); pass a fresh optimizer, or load its state through the engine"
        )
    initial: dict[int, dict[str, Any]] = {}
    for index, group in enumerate(optimizer.param_groups):
        if group["params"]:
            param = max(group["params"], key=lambda p: p.numel() * (p.dim() > 0))
            initial[index] = {
                k: v.reshape(-1)[:1]
                if isinstance(v, torch.Tensor) and k != "step" and (v.dim() or not param.dim())
                else v
                for k, v in optimizer.state[param].items()
            }
    return initial


def _like(value: Any, param: nn.Parameter) -> Any:
    """Build an initial slot for ``param``: scalars are copied, a constant tensor's element fills its shape."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return copied(value)
    return torch.full_like(param, value.sum().item(), requires_grad=False)


def move_state(unit: Unit, kind: StateKind, memory: torch.Tensor) -> None:
    """Let a state rest in ``memory``, a copy; the shards that clients see and the optimizer's views follow."""
    unit.rest_in(kind, memory)
    if kind is StateKind.PARAM:
        for segment, param in zip(unit.layout.segments, unit.params, strict=True):
            if hasattr(param, "ds_tensor"):
                param.ds_tensor = unit.part(kind, segment, unit.shard)
    if unit.master is not None and (kind is StateKind.OPTIM or unit.master_is_param):
        for view in unit.views:
            point(view.param, view.within(StateKind.OPTIM, unit.master).view(view.param.shape))
