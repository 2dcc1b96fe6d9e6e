"""From OPTIM to PARAM: rounding, the way to the device, and the gathers over ranks that share the update."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import torch

from deepspeed.comm import collectives
from deepspeed.comm.collectives import AxisGroup, SideStream
from deepspeed.monitor.events import Events
from deepspeed.tier.behind import Turn, Worker
from deepspeed.tier.store import Landing, TierStore, round_into
from deepspeed.tier.transfer import ARRIVED, Several, Transfer
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import Spread, StateKind
from deepspeed.zero.unit import Unit, UnitState


class Publication:
    """Publication of ``units``: PARAM follows OPTIM, unit by unit, in this order on every rank. ``up``: stream of
    copies to the device, beside which the host goes on; ``gathers``: stream of gathers. ``over(unit, piece, transfer)``
    writes newer values into PARAM over OPTIM's range, when the masters have come, or without ``masters`` alone.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        up: SideStream,
        gathers: SideStream,
        events: Events,
        over: Callable[[Unit, torch.Tensor, Transfer], object] | None = None,
        masters: bool = True,
    ) -> None:
        self._units, self._up, self._gathers, self._over, self._masters = units, up, gathers, over, masters
        self._events = events
        self._waiting = deque(unit for unit in units if unit.master is not None)
        self._transfers: list[Transfer] = []
        self._written = defaultdict[Unit, list[tuple[int, int]]](list)
        for unit in units:
            unit.new_version()

    def through(self, unit: Unit | None, written: Sequence[OptimView]) -> None:
        """Publish all units up to ``unit`` (None: no further one): their masters are updated, and their gradients are
        no longer read; the views in ``written`` are rounded already.
        """
        self._note(written)
        while unit in self._waiting:
            self._start(spent=True)

    def leave_out(self, unit: Unit) -> bool:
        """Leave ``unit`` out, for ``leave_to``, and tell whether that was possible: where its publication needs no
        other rank and nothing but memory, and no context of the user's has the old values.
        """
        shown = unit.movable and unit.state is UnitState.READY
        if shown or (unit.on_drive(StateKind.PARAM) and not unit.tiled) or _wider(unit):
            return False
        self._waiting.remove(unit)
        return True

    def leave_to(self, worker: Worker, unit: Unit, update: Callable[[], Sequence[OptimView]]) -> Turn:
        """Let ``worker`` call ``update``, which returns rounded views as for ``through``, and publish ``unit``."""

        def turn() -> Transfer:
            written = [(view.start, view.stop) for view in update()]
            piece = unit.within(StateKind.PARAM, unit.shard, *unit.range_of(StateKind.OPTIM))
            same = unit.master is None or piece.data_ptr() == unit.master.data_ptr()
            return ARRIVED if same else publish_rest(unit, piece, written, up=self._up, spent=True)

        begun = worker.hand_over(turn, place=unit.index, after=unit.pending.until(StateKind.GRAD))
        unit.note_pending(begun, reads=(StateKind.GRAD,), writes=(StateKind.OPTIM, StateKind.PARAM))
        return begun

    def finish(self, written: Sequence[OptimView] | None = None) -> None:
        """Publish all remaining units, after an error too, on the compute stream; ``written``: views of the last."""
        self._note(written or ())
        while self._waiting:
            self._start(spent=written is not None)
        if self._events:
            self._events.note_wait(Several(self._transfers), "publish the update")
        for transfer in self._transfers:
            transfer.wait()
        for unit in self._units:
            if unit.movable and unit.state is UnitState.READY:  # a context of the user's has it: show the new values
                self._gathers.run(unit.start_gather).wait()
                unit.new_version(shown=True)

    def _note(self, written: Sequence[OptimView]) -> None:
        for view in written:
            self._written[view.unit].append((view.start, view.stop))

    def _start(self, *, spent: bool) -> None:
        unit = self._waiting.popleft()
        ranges = self._written[unit] if spent else ()

        def fill(piece: torch.Tensor) -> Transfer:
            transfer = publish_rest(unit, piece, ranges, up=self._up, spent=spent) if self._masters else ARRIVED
            if self._over is not None:
                self._over(unit, piece, transfer)
            return transfer

        self._transfers.append(_publish(unit, fill))


def _wider(unit: Unit) -> list[AxisGroup]:
    """Return the groups over which this rank's updated range is gathered, outer axes first."""
    assert unit.plan.optim is not None
    axes = zip(unit.plan.param.spread, unit.plan.optim.spread, unit.mesh.groups, strict=True)
    cut = [group for p, o, group in axes if p is Spread.REPLICATED and o is Spread.SHARDED]
    return [group for group in reversed(cut) if group.size > 1]


def _publish(unit: Unit, fill: Callable[[torch.Tensor], Transfer]) -> Transfer:
    """Let ``fill`` write this rank's range, then gather over every axis where OPTIM is sharded and PARAM is not."""
    assert unit.master is not None and unit.plan.optim is not None
    start, stop = unit.range_of(StateKind.OPTIM)
    base, _ = unit.range_of(StateKind.PARAM)
    wider = _wider(unit)
    on_drive = unit.on_drive(StateKind.PARAM)
    if on_drive and not wider:
        return ARRIVED if unit.tiled else unit.publish_part(start, unit.master)
    transfer: Transfer = ARRIVED
    with unit.values(StateKind.PARAM, write=True) as resting:
        piece = resting[start - base : stop - base]
        if not unit.tiled and piece.data_ptr() != unit.master.data_ptr():
            transfer = fill(piece)
        for group in wider:
            numel = piece.numel() * group.size
            wide_start = (start - base) // numel * numel
            whole = resting[wide_start : wide_start + numel]
            if whole.device == unit.device:
                transfer.wait()
                transfer = collectives.all_gather(whole, piece, group)
            else:  # host memory travels through the device, which the group's backend knows
                gathered = torch.empty_like(whole, device=unit.device)
                collectives.all_gather(gathered, piece.to(unit.device), group).wait()
                whole.copy_(gathered)
            piece = whole
        if on_drive:
            transfer.wait()
    return transfer


def publish_rest(
    unit: Unit, piece: torch.Tensor, written: Iterable[tuple[int, int]], *, up: SideStream, spent: bool
) -> Transfer:
    """Round the master into ``piece``, PARAM over the range of OPTIM, but for the ``written`` flat ranges. Once the
    gradient is ``spent``, weights from host to device are rounded into its memory, and travel ``up``.
    """
    assert unit.master is not None
    base, stop = unit.range_of(StateKind.OPTIM)
    if spent and piece.device.type != "cpu" == unit.master.device.type:
        source = unit.master if piece.dtype is unit.master.dtype else unit.outbox(spent=True)
        if source is not None:
            if source is not unit.master:
                publish_rest(unit, source, written, up=up, spent=False)
            return up.run(lambda: _climb(unit, source, piece))
    done, transfers = base, []
    for lo, hi in [*sorted(written), (stop, stop)]:
        if done < lo:
            transfers.append(round_into(piece[done - base : lo - base], unit.master[done - base : lo - base]))
        done = hi
    return Several(transfers)


def _climb(unit: Unit, source: torch.Tensor, piece: torch.Tensor) -> Transfer:
    transfer = TierStore(source).get(piece)
    unit.pending.note(Landing(piece.nbytes), reads=(StateKind.OPTIM, StateKind.GRAD), copy=True)
    return transfer
