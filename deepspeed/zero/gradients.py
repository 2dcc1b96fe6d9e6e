"""From autograd's gradients to each unit's rest gradient: pack, reduce, flush.

Each parameter's gradient is packed into its unit's flat ``partial`` the moment autograd has finished it, pre-divided so
that the sum over ranks is the mean, and dropped. Reduction is linear, so it does not matter how often or when a unit is
reduced: every local contribution is reduced exactly once (I4). What rests whole is shown in ``param.grad`` meanwhile.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from deepspeed.comm import collectives
from deepspeed.monitor.events import ISSUE
from deepspeed.tier.drive import Stored
from deepspeed.tier.transfer import ARRIVED, Transfer
from deepspeed.zero.param import (
    gradient_like,
    local_of,
    owners,
    storage_uses,
    take_gradient,
    usual_owners,
    written_gradients,
)
from deepspeed.zero.plan import InFlight, Spread, StateKind, Tier, ZeroPlan
from deepspeed.zero.unit import Unit
from deepspeed.zero.window import GradState


class _Target(NamedTuple):
    """Memory that a reduction writes to, or adds to if ``filled``. ``buffer``: the staging buffer to give back after.

    ``rests``: ``memory`` is the rest gradient; else it is copied there. ``ready``: the values to add to have arrived.
    ``spent``: a reduced local sum, whose memory the next one may take.
    """

    memory: torch.Tensor
    filled: bool
    buffer: torch.Tensor | None = None
    rests: bool = False
    ready: Transfer = ARRIVED
    spent: torch.Tensor | None = None


class Gradients:
    """Gradients of one runtime: local sums, reductions in flight, and views shown in ``.grad``."""

    def __init__(self, units: list[Unit], plan: ZeroPlan, *, accum: torch.dtype, device: torch.device) -> None:
        self._units = units
        axes = max((len(unit.mesh.groups) for unit in units), default=0)
        self._streams = [collectives.SideStream(device) for _ in range(axes)]
        self._out, self._back = collectives.SideStream(device), collectives.SideStream(device)  # of host memory
        self._accum = accum
        self._in_flight = InFlight.REDUCTIONS if plan.overlap else 1
        self._watch, self._alone = plan.watch, usual_owners()
        self._flying: list[tuple[Unit, Transfer, _Target]] = []
        self.scale = 1.0
        # ``final``: the running backward ends the accumulation window; ``hold``: no_sync, the user wants no reduction.
        self.final = True
        self.hold = False
        # Many backwards run as one pass, and after it all that they have summed is reduced at once.
        self._passing = self._reuses = False
        # By (unit, position) the place in the sum that ``.grad`` is: in such a pass, where autograd itself adds further
        # gradients to it, and after a backward without reduction.
        self.adding: dict[tuple[int, int], torch.Tensor] = {}
        # Finite/non-finite probes of each reduced partial, of what, on the device: read only when a step overflows.
        self._probes: list[tuple[Unit, str, torch.Tensor]] = []
        # Rest gradients and their views in the parameters' shapes; and the units whose parameters show those views now.
        self._views: dict[Unit, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._shown: dict[Unit, list[torch.Tensor]] = {}
        self.written = False  # a client has written gradients by hand
        self.clipped_by_client = False  # who has been told that this clips nothing
        # Called with a gradient of the device on its way to the host, on the stream of that.
        self.sent: Callable[[Unit, torch.Tensor], None] = lambda *_: None
        for unit in units:
            if unit.plan.grad is not None and unit.plan.grad.tier is Tier.NVME:
                unit.open_grad(self._accum_dtype(unit))  # a full drive shows before the first step

    def pack(self, unit: Unit, position: int) -> bool:
        """Move the gradient of ``unit.params[position]`` into the unit's partial sum and drop it.

        Returns whether there was a gradient; the caller notes that in the unit's window.
        """
        param, segment = unit.params[position], unit.layout.segments[position]
        grad = take_gradient(param)
        if grad is None:
            return False
        factor = unit.facts.before * self.scale
        partial = unit.window.partial
        if partial is None:
            dtype = self._partial_dtype(unit)
            if len(unit.params) == 1 and owners(grad) == self._alone and _is_whole_sum(unit, grad, dtype):
                unit.window.open(dtype, unit.device, begin=grad.view(-1)).mul_(factor)
                return True
            partial = unit.window.open(dtype, unit.device)
        grad = grad.detach()  # of a backward with create_graph
        target = partial[segment.offset : segment.stop].view(segment.shape)
        if position in unit.window.fired:
            target.add_(grad, alpha=factor)
        elif grad.dtype == target.dtype:
            torch.mul(grad, factor, out=target)
        else:
            target.copy_(grad)
            if factor != 1.0:
                target.mul_(factor)
        # Without a factor further gradients need no call of ours each. Of a DTensor every one is looked at.
        plain = unit.facts.before == self.scale == 1.0 and target.dtype is param.dtype and local_of(param) is param
        if self._passing and plain:
            param.grad = target
            self.adding[unit.index, position] = target
        return True

    def begin_pass(self) -> None:
        """Begin a pass of many backwards, whose gradients are summed locally without reduction."""
        self.withdraw()
        self._passing = self.hold = True
        self._reuses = True  # the memory of sums: it comes at once, in every batch, so the peak has it anyway

    def end_pass(self) -> None:
        """End the pass. Idempotent. A client's hook may have replaced a sum (it counts) or kept it (it stays valid)."""
        self._passing = self.hold = False
        alone = storage_uses(torch.empty(1))
        for unit in self._take_sums():
            if unit.window.partial is not None and storage_uses(unit.window.partial) > alone:
                unit.window.restore(unit.window.partial.clone(), unit.window.fired)

    def _take_sums(self) -> set[Unit]:
        """Take the local sums out of ``.grad``, and return their units."""
        shown = {self._units[index] for index, _ in self.adding}
        while self.adding:
            (index, position), place = self.adding.popitem()
            _take(self._units[index].params[position], place)
        for unit in shown:
            if unit.facts.before != 1.0 and unit.window.partial is not None:
                unit.window.partial.mul_(unit.facts.before)
        return shown

    def _show_sum(self, unit: Unit, partial: torch.Tensor) -> None:
        if unit.facts.before != 1.0:
            partial.div_(unit.facts.before)
        for position in unit.window.fired:
            param = unit.params[position]
            place = gradient_like(param, unit.view(partial, unit.layout.segments[position]))
            self.adding[unit.index, position] = place
            _put(param, place)

    def collect(self) -> bool:
        """Pack gradients that a client or a split backward wrote to ``.grad`` without a hook; tell if there is any."""
        if not self._passing:
            self._take_sums()  # what is packed goes to the same sums
        for unit in self._units:
            if unit.trainable and unit not in self._shown:
                if unit.facts.tie and unit.window.state is GradState.EMPTY and self.reduces_now(unit):
                    # Other stages may have a gradient: all take part.
                    unit.window.open(self._accum_dtype(unit), unit.device)
                for position in written_gradients(unit.params):
                    if (unit.index, position) not in self.adding:
                        self.written = True
                        if self.pack(unit, position):
                            unit.window.note_packed(position)
        return self.any()

    def _partial_dtype(self, unit: Unit) -> torch.dtype:
        return unit.facts.wire or unit.dtype if self.reduces_now(unit) else self._accum_dtype(unit)

    def reduces_now(self, unit: Unit) -> bool:
        """Tell whether gradients of the running backward are reduced at once, or stay PARTIAL for a later one."""
        return not self.hold and (unit.plan.reduce_each_backward or self.final)

    def _accum_dtype(self, unit: Unit) -> torch.dtype:
        """Return the dtype of the rest gradient; float64 parameters keep their precision."""
        return torch.float64 if unit.dtype is torch.float64 else self._accum

    def reduce(self, unit: Unit) -> None:
        """Reduce the unit's sum (zeros without a gradient) onto its rest gradient. Collective, asynchronous."""
        unit.wait(StateKind.GRAD, write=True, copies=False)  # an update may read the last one
        self.withdraw()
        partial = unit.window.take(self._partial_dtype(unit), unit.device).to(unit.facts.wire or unit.dtype)
        if self._watch:
            self._probes += _probes(unit, partial)
        while len(self._flying) >= self._in_flight:
            self._land()
        target = self._rest(unit, contribution=partial.dtype)
        streams, add = self._streams, target.filled
        with unit.events.range(f"reduce {unit.name}", ISSUE, unit):
            transfer = reduce_over_axes(unit, partial, target.memory, streams, accumulate=add, after=target.ready)
        if self._reuses and partial.device.type == "cpu":  # whose pages the system has to clear each time
            target = target._replace(spent=partial)
        self._send(unit, transfer, target)
        unit.window.move(GradState.REDUCED)
        if self._in_flight == 1:
            self._land()

    def _rest(self, unit: Unit, *, contribution: torch.dtype | None = None) -> _Target:
        """Return device memory for the rest gradient; what rests elsewhere is fetched, to be added to and sent back.

        In host memory the only ``contribution`` of a window keeps its dtype, which holds the sum over ranks as it is.
        """
        numel, dtype = unit.open_grad(self._accum_dtype(unit)).tensor.numel(), self._accum_dtype(unit)
        store, filled = unit.rest[StateKind.GRAD], unit.window.fill()
        if not unit.grad_away:
            return _Target(store.tensor, filled, rests=True)
        if filled and any(flying is unit for flying, _, _ in self._flying):
            self._land_all()  # what it must be added to is still on its way there
        # The receivers of gloo add in the dtype of what rests.
        exact = self.final and not filled and all(a.size == 1 or a.backend != "gloo" for a in unit.mesh.sums)
        if contribution is not None and exact and torch.promote_types(contribution, dtype) is dtype:
            dtype = dtype if store.on_drive else contribution
        if isinstance(store, Stored) and unit.device.type == "cpu":
            buffer = store.staging.take(numel * dtype.itemsize)
            target = _Target(buffer[: numel * dtype.itemsize].view(dtype), filled, buffer)
        else:
            target = _Target(torch.empty(numel, dtype=dtype, device=unit.device), filled)
        if store.on_drive:
            if filled:
                store.get(target.memory).wait()
            return target
        if filled:
            target = target._replace(ready=self._back.run(functools.partial(store.get, target.memory)))
        store.hold_as(dtype)
        return target

    def _send(self, unit: Unit, transfer: Transfer, target: _Target) -> None:
        """Track a reduction in flight. A result for host memory follows on its own stream, beside the backward."""

        def leave() -> Transfer:
            transfer.wait()
            unit.send_gradient(target.memory)
            self.sent(unit, target.memory)
            return ARRIVED

        beside = not target.rests and not unit.on_drive(StateKind.GRAD)
        self._flying.append((unit, self._out.run(leave) if beside else transfer, target))

    def _land(self) -> None:
        unit, transfer, target = self._flying.pop(0)
        if unit.events:
            unit.events.note_wait(transfer, f"reduction of {unit.title}")
        transfer.wait()
        if target.spent is not None:
            unit.window.keep_spare(target.spent)
        store = unit.rest[StateKind.GRAD]
        if target.rests or not isinstance(store, Stored):
            return
        unit.note_gradient(target.memory)
        # only a staging buffer stays untouched until it is given back, after the write
        written = store.put(target.memory, zero_copy=target.buffer is not None)
        if target.buffer is not None:
            store.staging.give(target.buffer, after=written)
        else:
            written.wait()

    def land(self, unit: Unit) -> None:
        """Wait until the unit's reduced sum is where it rests."""
        while any(flying is unit for flying, _, _ in self._flying):
            self._land()

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def land_all(self) -> None:
        """Wait for all reductions in flight, until all rest gradients may be read and written in the rest dtype."""
        self._land_all()
        for unit in self._units:
            unit.wait(StateKind.GRAD, write=True)
            if unit.grad_away and not unit.on_drive(StateKind.GRAD):
                unit.widen_gradient(self._accum_dtype(unit))

    def pending(self) -> tuple[int, ...]:
        """Return the indices of units with local gradients that no reduction has taken yet."""
        return tuple(u.index for u in self._units if u.window.partial is not None)

    def after(self, unit: Unit) -> float:
        """Return the factor that turns the unit's rest gradient into the mean."""
        return 1.0 if unit in self._shown else unit.facts.after

    def show(self) -> None:
        """Set ``.grad`` to a view of the gradient that is whole on the device, in the accumulation dtype: of the
        reduced one, or without reduction of this rank's local sum. Where both exist nothing is shown.
        """
        for unit in self._units:
            partial = unit.window.partial
            if not unit.plan.gradient_whole or unit in self._shown or (partial is None) is not unit.window.filled:
                continue
            if partial is not None:
                self._show_sum(unit, partial)
                continue
            self.land_all()
            assert unit.grad is not None
            if unit.facts.after != 1.0:
                unit.grad.mul_(unit.facts.after)
            if unit not in self._views or self._views[unit][0] is not unit.grad:
                parts = zip(unit.params, unit.layout.segments, strict=True)
                self._views[unit] = unit.grad, [gradient_like(p, unit.view(unit.grad, s)) for p, s in parts]
            self._shown[unit] = self._views[unit][1]
            for param, view in zip(unit.params, self._shown[unit], strict=True):
                _put(param, view)

    def settle(self) -> None:
        """Wait for all reductions; take what a client has put in place of a shown ``.grad`` (None: zeros)."""
        self.land_all()
        for unit, views in self._shown.items():
            for param, view in zip(unit.params, views, strict=True):
                if param.grad is not view:
                    _take(param, view)
                    _put(param, view)

    @property
    def showing(self) -> bool:
        """Tell whether some ``.grad`` is a view of a gradient."""
        return bool(self._shown or (self.adding and not self._passing))

    def withdraw(self) -> None:
        """Take the shown gradients out of ``.grad``, so that autograd adds nothing to them there; see ``settle``."""
        if not self.showing:
            return  # asked at every gradient of a backward, whose reductions are under way
        self._take_sums()
        self.land_all()
        while self._shown:
            unit, views = self._shown.popitem()
            for param, view in zip(unit.params, views, strict=True):
                _take(param, view)
            if unit.facts.after != 1.0 and unit.grad is not None:
                unit.grad.div_(unit.facts.after)

    @contextlib.contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Hold inside the context also those gradients that clients see, or have written."""
        shown = self.showing
        self.withdraw()
        self.collect()
        try:
            yield
        finally:
            if shown:
                self.show()

    def collapse(self) -> list[Unit]:
        """Return the trained units for the step, each with a reduced gradient; missing gradients become zeros.

        Gradients in host memory may still be on their way: see ``Unit.pending``.
        """
        self._land_all()
        ready = [unit for unit in self._units if unit.trainable]
        for unit in ready:
            if not unit.window.filled:
                self._zero(unit)
            unit.window.move(GradState.COLLAPSED)
        return ready

    def _zero(self, unit: Unit) -> None:
        unit.wait(StateKind.GRAD, write=True, copies=False)
        target = self._rest(unit)
        target.memory.zero_()
        self._send(unit, ARRIVED, target)
        self._land_all()

    def refill(self, unit: Unit) -> None:
        """Set the unit's reduced gradient to zeros, to be filled with values from a checkpoint."""
        self._zero(unit)
        unit.window.move(GradState.LOCAL)
        unit.window.move(GradState.REDUCED)

    def clear(self, *, collected: bool = False) -> None:
        """Drop every gradient, but keep the rest gradients' buffers. ``collected``: no ``.grad`` is left to drop."""
        self.withdraw()
        self._land_all()
        self._probes.clear()
        for unit in self._units:
            for position in written_gradients(unit.params) if unit.trainable and not collected else ():
                take_gradient(unit.params[position])
            unit.window.reset()

    def close(self) -> None:
        """Free the views of rest gradients, which are all cleared."""
        self._views.clear()

    def any(self) -> bool:
        """Tell whether some unit holds a gradient (local or reduced)."""
        return any(u.window.state is not GradState.EMPTY for u in self._units)

    def bad_units(self) -> list[str]:
        """Return the units whose local gradients on this rank were not finite in this window."""
        return sorted({unit.name for unit, _, probe in self._probes if not torch.isfinite(probe).item()})

    def evidence(self) -> Callable[[], list[str]]:
        """Return a callable that names the parameters whose local gradients were not finite in this window."""
        probes, self._probes = sorted(self._probes, key=lambda entry: entry[0].index), []
        return lambda: [name for _, name, probe in probes if not torch.isfinite(probe).item()]


def _put(param: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Set ``view`` as the ``.grad`` of the parameter."""
    if view.dtype is not param.dtype:
        param.grad_dtype = None  # any
    param.grad = view


def _take(param: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Remove the shown ``view`` from ``.grad``; a replacement by the client (None: zeros) is copied to it."""
    unchanged = param.grad is view
    written = take_gradient(param)
    if not unchanged:
        local_of(view).copy_(torch.zeros_like(local_of(view)) if written is None else written)
    if view.dtype is not param.dtype:
        param.grad_dtype = param.dtype


def _is_whole_sum(unit: Unit, grad: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether ``grad`` can be the local sum itself: a copy of a large table would set the backward's peak."""
    alike = grad.dtype is dtype and grad.is_contiguous() and not grad.requires_grad
    return alike and unit.layout.numel * dtype.itemsize == grad.untyped_storage().nbytes()


def _probes(unit: Unit, partial: torch.Tensor) -> list[tuple[Unit, str, torch.Tensor]]:
    """Return values that are non-finite exactly when an element is. On a device: one for each parameter. On the CPU:
    the sum over the unit or, for fp16, whose sums overflow, its range (maximum less minimum).
    """
    if partial.device.type != "cpu":
        return _probes_of_parameters(unit, partial)
    if partial.dtype is torch.float16:
        low, high = torch.aminmax(partial)
        return [(unit, unit.name, high.float() - low.float())]
    return [(unit, unit.name, partial.sum())]


def _probes_of_parameters(unit: Unit, partial: torch.Tensor) -> list[tuple[Unit, str, torch.Tensor]]:
    """Return each parameter's maximum norm, by one launch; torch refuses that norm of empty ones, left out here."""
    segments = [segment for segment in unit.layout.segments if segment.numel]
    norms = torch._foreach_norm([unit.view(partial, s) for s in segments], math.inf) if segments else ()
    return [(unit, s.name, norm) for s, norm in zip(segments, norms, strict=True)]


def reduce_over_axes(
    unit: Unit,
    partial: torch.Tensor,
    target: torch.Tensor,
    streams: list[collectives.SideStream],
    *,
    accumulate: bool,
    after: Transfer = ARRIVED,
) -> Transfer:
    """Reduce ``partial`` axis by axis, inner first: reduce-scatter where GRAD is sharded, else all-reduce.

    It starts ``after`` that transfer. Each axis has its stream, so that the next unit's sum over the inner axis does
    not wait for this one's over the outer, whose links are slower; the dtype of ``partial`` travels on all of them.
    """
    assert unit.plan.grad is not None
    axes = list(zip(unit.plan.grad.spread, unit.mesh.sums, streams[: len(unit.mesh.sums)], strict=True))
    transfer, piece = after, partial
    for position, (way, group, stream) in enumerate(axes, 1):
        last, numel = position == len(axes), piece.numel() // (group.size if way is Spread.SHARDED else 1)
        # The receivers of gloo add in the dtype that they are given; others in that of the wire.
        dtype = target.dtype if group.backend == "gloo" else partial.dtype
        out = target if last else torch.empty(numel, dtype=dtype, device=partial.device)
        verb: Callable[..., Transfer] = collectives.reduce_scatter if way is Spread.SHARDED else collectives.all_reduce
        call = functools.partial(verb, out=out, group=group, accumulate=accumulate and last)
        transfer = stream.run(functools.partial(_continued, transfer, piece, partial.dtype, call))
        piece = out
    return transfer


def _continued(before: Transfer, piece: torch.Tensor, wire: torch.dtype, call: Callable[..., Transfer]) -> Transfer:
    """Wait for ``before``, which brings ``piece``, then make ``call`` with it."""
    before.wait()
    return call(piece.to(wire))
