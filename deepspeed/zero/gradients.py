"""From autograd's gradients to each unit's rest gradient: pack, reduce, flush.

Each parameter's gradient is packed into its unit's flat ``partial`` the moment autograd has finished it, pre-divided so that the
sum over ranks is the mean, and dropped. Reduction is linear, so it does not matter how often or when a unit is reduced: every
local contribution is reduced exactly once. (Invariant I4.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepspeed.comm import collectives
from deepspeed.zero.plan import Spread, StateKind, Tier
from deepspeed.zero.streams import SideTransfer, Streams
from deepspeed.zero.unit import GradState, Unit, square_sum

_IN_FLIGHT = 2  # reductions whose full-size buffers may be alive at once


@dataclass(frozen=True)
class GradientPolicy:
    """Dtypes and factors: ``accum`` of the rest gradient, ``comm`` on the wire (None: the parameter's own);
    every local gradient is multiplied by ``before`` when packed and the reduced result by ``after``."""

    accum: torch.dtype
    comm: torch.dtype | None
    before: float
    after: float
    overlap: bool
    watch: bool


@dataclass(frozen=True)
class _Target:
    """Where a reduction puts its result; ``filled``: there is something to add to; ``buffer``: the staging buffer it lies in."""

    memory: torch.Tensor
    filled: bool
    buffer: torch.Tensor | None = None


class Gradients:
    """The gradient side of one runtime."""

    def __init__(self, units: list[Unit], streams: Streams, policy: GradientPolicy) -> None:
        self._units = units
        self._streams = streams
        self.policy = policy
        self._flying: list[tuple[Unit, SideTransfer, _Target]] = []
        self.scale = 1.0
        # ``final``: the running backward ends the accumulation window; ``hold``: the user asked not to reduce (no_sync).
        self.final = True
        self.hold = False
        # One finite/non-finite probe per reduced partial, on the device: read only when a step overflows.
        self._probes: list[tuple[int, torch.Tensor]] = []
        for unit in units:
            if unit.tiers is not None and unit.plan.grad is not None and unit.plan.grad.tier is Tier.NVME:
                start, stop = unit.range_of(StateKind.GRAD)
                unit.stored[StateKind.GRAD] = unit.tiers.store_grad(stop - start, self._accum_dtype(unit))

    # -- local side --------------------------------------------------------------------------------------------------------
    def pack(self, unit: Unit, position: int) -> None:
        """Move the gradient of ``unit.params[position]`` into the unit's partial sum and drop it."""
        param, segment = unit.params[position], unit.layout.segments[position]
        grad = param.grad
        if grad is None:
            return
        param.grad = None
        if grad.is_sparse:
            grad = grad.to_dense()
        target = unit.view(self._partial(unit), segment)
        factor = self.policy.before * self.scale
        if position in unit.fired:
            target.add_(grad, alpha=factor)
        elif grad.dtype == target.dtype:
            torch.mul(grad, factor, out=target)
        else:
            target.copy_(grad)
            if factor != 1.0:
                target.mul_(factor)
        unit.fired.add(position)
        unit.arrived.add(position)

    def _partial(self, unit: Unit) -> torch.Tensor:
        if unit.partial is None:
            dtype = self._wire_dtype(unit) if self.reduces_now(unit) else self._accum_dtype(unit)
            unit.partial = collectives.fresh(unit.layout.numel, dtype, unit.device)
            for start, stop in unit.layout.gaps:
                unit.partial[start:stop].zero_()
            unit.fired.clear()
        unit.move_grad(GradState.LOCAL)
        return unit.partial

    def reduces_now(self, unit: Unit) -> bool:
        """Whether contributions of the running backward travel at once, or stay PARTIAL for a later one."""
        return not self.hold and (unit.plan.reduce_each_backward or self.final)

    def _wire_dtype(self, unit: Unit) -> torch.dtype:
        return self.policy.comm or unit.full.dtype

    def _accum_dtype(self, unit: Unit) -> torch.dtype:
        """The policy's, but float64 parameters keep their precision."""
        return torch.float64 if unit.full.dtype is torch.float64 else self.policy.accum

    def complete(self, unit: Unit) -> bool:
        """Every parameter of the unit has contributed in the running backward.

        What earlier backwards left in the partial sum does not count: with it, the first gradient of the window's last backward
        would send the unit off, and the others would need a second reduction.
        """
        return len(unit.arrived) == len(unit.params)

    # -- reduction -----------------------------------------------------------------------------------------------------------
    def reduce(self, unit: Unit) -> None:
        """Reduce the unit's partial sum (zeros where nothing fired) onto its rest gradient. Collective, asynchronous."""
        partial = self._finish_partial(unit)
        unit.partial = None
        unit.fired.clear()
        unit.arrived.clear()
        if partial.dtype != self._wire_dtype(unit):
            partial = partial.to(self._wire_dtype(unit))
        if self.policy.watch:
            self._probes.append((unit.index, _probe(partial)))
        while len(self._flying) >= (_IN_FLIGHT if self.policy.overlap else 1):
            self._land()
        target = self._rest(unit)
        transfer = self._streams.reduce(lambda: reduce_over_axes(unit, partial, target.memory, accumulate=target.filled))
        self._flying.append((unit, transfer, target))
        unit.move_grad(GradState.REDUCED)
        if not self.policy.overlap:
            self._land()

    def _finish_partial(self, unit: Unit) -> torch.Tensor:
        partial = self._partial(unit)
        for position, segment in enumerate(unit.layout.segments):
            if position not in unit.fired:
                partial[segment.offset : segment.stop].zero_()
        return partial

    def _rest(self, unit: Unit) -> "_Target":
        """Device memory for the rest gradient.

        What rests on the device is that memory itself. What rests elsewhere comes, is added to, and goes back when it has landed.
        """
        assert unit.plan.grad is not None
        start, stop = unit.range_of(StateKind.GRAD)
        dtype, filled = self._accum_dtype(unit), unit.grad_filled
        unit.grad_filled = True
        elsewhere = unit.plan.grad.tier is Tier.NVME or unit.optim_device != unit.device
        if filled and elsewhere and any(flying is unit for flying, _, _ in self._flying):
            self.land_all()  # what it must be added to is still on its way there
        if unit.plan.grad.tier is Tier.NVME:
            return self._rest_on_drive(unit, stop - start, dtype, filled=filled)
        if unit.grad is None:
            home = unit.optim_device
            if home == unit.device:
                unit.grad = collectives.fresh(stop - start, dtype, home)
            else:
                assert unit.tiers is not None
                unit.grad = unit.tiers.host_empty(stop - start, dtype, pin=unit.tiers.plan.pin_optim)
        if unit.grad.device == unit.device:
            return _Target(unit.grad, filled)
        return _Target(unit.grad.to(unit.device) if filled else torch.empty(stop - start, dtype=dtype, device=unit.device), filled)

    def _rest_on_drive(self, unit: Unit, numel: int, dtype: torch.dtype, *, filled: bool) -> "_Target":
        stored = unit.stored[StateKind.GRAD]
        if unit.device.type == "cpu":
            buffer = stored.staging.take(numel * dtype.itemsize)
            target = _Target(buffer[: numel * dtype.itemsize].view(dtype), filled, buffer)
        else:
            target = _Target(torch.empty(numel, dtype=dtype, device=unit.device), filled)
        if filled:
            stored.load(target.memory)
        return target

    def _land(self) -> None:
        unit, transfer, target = self._flying.pop(0)
        transfer.wait()
        stored = unit.stored.get(StateKind.GRAD)
        if stored is not None:
            unit.grad_square = square_sum(target.memory)
            if target.buffer is not None:
                stored.staging.give(target.buffer, after=stored.write_from(target.memory, start=0))
            else:
                stored.put(target.memory)
        elif unit.grad is not None and target.memory is not unit.grad:
            unit.grad.copy_(target.memory)

    def land_all(self) -> None:
        """Wait for every reduction in flight."""
        while self._flying:
            self._land()

    def pending(self) -> tuple[int, ...]:
        """Units with local contributions that no reduction has taken yet."""
        return tuple(u.index for u in self._units if u.partial is not None)

    # -- end of the window ---------------------------------------------------------------------------------------------------
    def collapse(self) -> list[Unit]:
        """All units that hold a gradient at the step, every one of them reduced; missing gradients become zeros."""
        self.land_all()
        ready = []
        for unit in self._units:
            if not unit.trainable:
                continue
            if not unit.grad_filled:
                target = self._rest(unit)
                target.memory.zero_()
                self._flying.append((unit, SideTransfer(collectives.Transfer([]), self._streams, None), target))
                self._land()
            unit.move_grad(GradState.COLLAPSED)
            ready.append(unit)
        return ready

    def refill(self, unit: Unit) -> None:
        """Give the unit a reduced gradient of zeros, whose values a checkpoint has."""
        target = self._rest(unit)
        target.memory.zero_()
        self._flying.append((unit, SideTransfer(collectives.Transfer([]), self._streams, None), target))
        self._land()
        unit.move_grad(GradState.LOCAL)
        unit.move_grad(GradState.REDUCED)

    def take_partial(self, unit: Unit, partial: torch.Tensor, positions: set[int]) -> None:
        """Make ``partial`` (flat, zero in the gaps) this rank's sum of the parameters at ``positions`` that no reduction has taken yet."""
        unit.partial = partial
        unit.fired = positions
        unit.move_grad(GradState.LOCAL)

    def clear(self) -> None:
        """Drop every gradient; buffers of the rest gradients are kept for the next window."""
        self.land_all()
        self._probes.clear()
        for unit in self._units:
            unit.partial = None
            unit.fired.clear()
            unit.arrived.clear()
            unit.grad_filled = False
            unit.move_grad(GradState.EMPTY)

    def any(self) -> bool:
        """True when some unit holds a gradient (local or reduced)."""
        return any(u.grad_state is not GradState.EMPTY for u in self._units)

    def bad_units(self) -> list[str]:
        """Units whose local (not yet reduced) gradients on this rank were not finite in this window."""
        return sorted({self._units[index].name for index, probe in self._probes if not torch.isfinite(probe).item()})


def _probe(partial: torch.Tensor) -> torch.Tensor:
    """A value that is non-finite exactly when an element is: one cheap pass, read only after an overflow.

    A plain sum is cheapest, but fp16 sums overflow on their own; there the extremes tell.
    """
    if partial.dtype is torch.float16:
        low, high = torch.aminmax(partial)
        return high.float() - low.float()
    return partial.sum()


def reduce_over_axes(unit: Unit, partial: torch.Tensor, target: torch.Tensor, *, accumulate: bool) -> collectives.Transfer:
    """Reduce ``partial`` axis by axis, inner first: scatter where GRAD is sharded, all-reduce where it is replicated."""
    assert unit.plan.grad is not None
    ways = list(zip(unit.plan.grad.spread, unit.mesh.groups, strict=True))
    for way, group in ways[:-1]:
        piece = torch.empty(partial.numel() // (group.size if way is Spread.SHARDED else 1), dtype=target.dtype, device=partial.device)
        _one_axis(partial, piece, way, group, accumulate=False).wait()
        partial = piece
    way, group = ways[-1]
    return _one_axis(partial, target, way, group, accumulate=accumulate)


def _one_axis(
    partial: torch.Tensor, out: torch.Tensor, way: Spread, group: collectives.AxisGroup, *, accumulate: bool
) -> collectives.Transfer:
    verb: Callable[..., collectives.Transfer] = collectives.reduce_scatter if way is Spread.SHARDED else collectives.all_reduce
    return verb(partial, out, group, accumulate=accumulate)
