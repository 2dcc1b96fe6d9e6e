"""From OPTIM to PARAM: rounding, the way to the device, and the gathers over ranks that share the update."""

from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from deepspeed.comm import collectives
from deepspeed.comm.collectives import SideStream
from deepspeed.tier.transfer import ARRIVED, Transfer
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.partition import UnitState
from deepspeed.zero.plan import Spread, StateKind
from deepspeed.zero.unit import Unit


class Publication:
    """PARAM of ``units`` follows OPTIM, unit by unit in this order, on every rank. ``up``: the stream of copies to the
    device, beside which the host goes on; ``gathers``: that of gathers.
    """

    def __init__(self, units: Sequence[Unit], *, up: SideStream, gathers: SideStream) -> None:
        self._units, self._up, self._gathers = units, up, gathers
        self._waiting = deque(unit for unit in units if unit.master is not None)
        self._transfers: list[Transfer] = []
        self._written = defaultdict[Unit, list[tuple[int, int]]](list)
        for unit in units:
            unit.new_version()

    def through(self, unit: Unit | None, written: Sequence[OptimView]) -> None:
        """The masters of all units up to ``unit`` (None: none that is complete) are updated, and nobody reads their
        gradients again; the views in ``written`` are rounded already.
        """
        self._note(written)
        while unit in self._waiting:
            self._start(spent=True)

    def finish(self, written: Sequence[OptimView] | None = None) -> None:
        """All that is left, also after an error; what was started has ended on the compute stream. With ``written`` as
        ``through`` the last unit.
        """
        self._note(written or ())
        while self._waiting:
            self._start(spent=written is not None)
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
        self._transfers.append(_publish(unit, ranges, up=self._up, spent=spent))


def _publish(unit: Unit, written: Sequence[tuple[int, int]], *, up: SideStream, spent: bool) -> Transfer:
    """Copy master into this rank's range, then gather over every axis where OPTIM is sharded and PARAM is not."""
    assert unit.master is not None and unit.plan.optim is not None
    start, stop = unit.range_of(StateKind.OPTIM)
    base, _ = unit.range_of(StateKind.PARAM)
    axes = list(zip(unit.plan.param.spread, unit.plan.optim.spread, unit.mesh.groups, strict=True))
    replicated = [group for p, o, group in reversed(axes) if p is Spread.REPLICATED and o is Spread.SHARDED]
    wider = [group for group in replicated if group.size > 1]
    away = unit.on_drive(StateKind.PARAM)
    if away and not wider:
        return ARRIVED if unit.tiled else unit.publish_part(start, unit.master)
    transfer: Transfer = ARRIVED
    with unit.values(StateKind.PARAM, write=True) as resting:
        piece = resting[start - base : stop - base]
        if not unit.tiled and piece.data_ptr() != unit.master.data_ptr():
            transfer = unit.publish_rest(piece, written, up=up, spent=spent)
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
        if away:
            transfer.wait()
    return transfer
