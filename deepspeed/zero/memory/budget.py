"""What one rank's model states will hold, per tier, before any of it exists. Pure: numbers in, a table out.

Counted are parameters, gradients and optimizer state at rest, units gathered at once, and the buffers between memory
and drives. Not counted are activations, the model's inputs, and what the process held before. The widths are those of
mixed-precision training (Rajbhandari et al. 2020): w bytes a parameter in the compute dtype, a in the accumulation
dtype, 4 in the master, 4 a slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from deepspeed.zero.plan import InFlight, OffloadPlan, Spread, Spreads, StatePlan, Tier, UnitPlan


@dataclass(frozen=True)
class UnitSize:
    """One unit as the plan sees it: elements, bytes an element at rest, its row; ``largest``: elements that one tile
    must hold.
    """

    numel: int
    width: int
    row: UnitPlan
    largest: int = 0


@dataclass(frozen=True)
class Widths:
    """Bytes an element: accumulated gradients, optimizer slots together; ``wire`` of gradients on their way, 0: as the
    parameter.
    """

    accumulate: int = 4
    slots: int = 8
    wire: int = 0


@dataclass(frozen=True)
class Line:
    """One row of the table, in bytes."""

    what: str
    device: int = 0
    host: int = 0
    drive: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """The table. On machines without an accelerator ``shared`` says that device and host are the same memory."""

    lines: tuple[Line, ...]
    shared: bool

    @property
    def device(self) -> int:
        """Bytes on the device; zero where it is the host."""
        return 0 if self.shared else sum(line.device for line in self.lines)

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return sum(line.host + (line.device if self.shared else 0) for line in self.lines)

    @property
    def drive(self) -> int:
        """Bytes on drives."""
        return sum(line.drive for line in self.lines)

    def table(self) -> str:
        """The plan for people, in MiB."""
        shown = [("model states of one rank", "device", "host", "drive")]
        for line in (*self.lines, Line("together", 0 if self.shared else self.device, self.host, self.drive)):
            device, host = (
                (0, line.host + line.device) if self.shared and line.what != "together" else (line.device, line.host)
            )
            a, b, c = (f"{n / 2**20:,.0f} MiB" if n else "-" for n in (device, host, line.drive))
            shown.append((line.what, a, b, c))
        return "\n".join(f"{a:<38}{b:>14}{c:>14}{d:>14}" for a, b, c, d in shown)


def memory_plan(
    units: Sequence[UnitSize], ways: Sequence[int], offload: OffloadPlan, widths: Widths, *, prefetch: int, shared: bool
) -> MemoryPlan:
    """The plan of one rank. ``ways``: ranks on each mesh axis; ``prefetch``: elements that may be gathered ahead."""
    sums = _Sums()
    host_left = offload.host_param_numel
    for unit in units:
        rest, host_left = _param(sums, unit, ways, host_left)
        if unit.row.grad is not None and unit.row.optim is not None:
            sums.add(
                "gradients", unit.row.grad.tier, _share(unit.numel, unit.row.grad.spread, ways) * widths.accumulate
            )
            _optim(sums, unit, ways, widths, rest=rest, shared=shared)
    moving = sorted((u for u in units if _movable(u, ways)), key=lambda u: -u.numel * u.width)
    if moving:
        after = moving[1].numel if prefetch and len(moving) > 1 else 0  # the next unit comes early whatever its size
        ahead = max(after, min(prefetch, InFlight.UNITS * moving[len(moving) // 2].numel)) * moving[0].width
        sums.add("units gathered at once", Tier.DEVICE, moving[0].numel * moving[0].width + ahead)
    sums.add(
        "gradients on their way",
        Tier.DEVICE,
        _travelling(units, widths) + (0 if shared else _landing(units, ways, widths)),
    )
    sums.add("staging buffers", Tier.HOST, _staging(units, ways, offload, widths))
    if offload.save_copies:
        sums.add("copies for asynchronous saves", Tier.HOST, sum(_saved_copy(u, prod(ways), widths) for u in units))
    return MemoryPlan(tuple(sums.lines()), shared)


class _Sums:
    """Bytes per purpose and tier."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Tier, int]] = {}

    def add(self, what: str, tier: Tier, nbytes: int) -> None:
        row = self._found.setdefault(what, dict.fromkeys(Tier, 0))
        row[tier] += nbytes

    def lines(self) -> list[Line]:
        return [
            Line(what, row[Tier.DEVICE], row[Tier.HOST], row[Tier.NVME])
            for what, row in self._found.items()
            if any(row.values())
        ]


def _share(numel: int, spread: Spreads, ways: Sequence[int]) -> int:
    """Elements of one rank."""
    return -(-numel // prod(n for way, n in zip(spread, ways, strict=True) if way is Spread.SHARDED))


def _movable(unit: UnitSize, ways: Sequence[int]) -> bool:
    return unit.row.param.away or _share(unit.numel, unit.row.param.spread, ways) < unit.numel


def _param(sums: _Sums, unit: UnitSize, ways: Sequence[int], host_left: int) -> tuple[Tier, int]:
    """Add the resting parameters; returns where they rest and what is left of the elements that may stay in host
    memory.
    """
    own = _share(unit.numel, unit.row.param.spread, ways)
    tier = unit.row.param.tier
    if tier is Tier.NVME and own <= host_left:
        tier, host_left = Tier.HOST, host_left - own
    sums.add("parameters", tier, own * unit.width)
    return tier, host_left


def _optim(sums: _Sums, unit: UnitSize, ways: Sequence[int], widths: Widths, *, rest: Tier, shared: bool) -> None:
    optim = unit.row.optim
    assert optim is not None
    # An fp32 parameter that rests in the same memory is its own master.
    same = unit.width >= 4 and Tier.NVME not in (rest, optim.tier) and (rest is optim.tier or shared)
    sums.add(
        "optimizer state", optim.tier, _share(unit.numel, optim.spread, ways) * (widths.slots + (0 if same else 4))
    )


def _travelling(units: Sequence[UnitSize], widths: Widths) -> int:
    """Local sums before they are reduced: a few units of them, or all where they wait for the end of the window."""
    trained = [u for u in units if u.row.grad is not None]
    waiting = sum(u.numel * widths.accumulate for u in trained if not u.row.reduce_each_backward)
    if waiting:
        return waiting
    return (InFlight.REDUCTIONS + 1) * max((u.numel * (widths.wire or u.width) for u in trained), default=0)


def _saved_copy(unit: UnitSize, ranks: int, widths: Widths) -> int:
    """What this rank writes of a unit into a checkpoint, each byte being written by one rank; from a drive it is not
    copied first.
    """
    optim = unit.row.optim
    if (optim or unit.row.param).tier is Tier.NVME:
        return 0
    return -(-unit.numel // ranks) * (4 + widths.slots if optim is not None else unit.width)


def _landing(units: Sequence[UnitSize], ways: Sequence[int], widths: Widths) -> int:
    """Reduced gradients on the device that go elsewhere next."""
    away = [_share(u.numel, u.row.grad.spread, ways) for u in units if u.row.grad is not None and u.row.grad.away]
    return (InFlight.REDUCTIONS + 1) * max(away, default=0) * widths.accumulate


def _staging(units: Sequence[UnitSize], ways: Sequence[int], offload: OffloadPlan, widths: Widths) -> int:
    """Buffers between memory and the drives."""
    total = 0
    shards = [_share(u.numel, u.row.param.spread, ways) * u.width for u in units if u.row.param.tier is Tier.NVME]
    if shards:
        piece = min(max(shards), offload.param_piece_numel * units[0].width)
        total += min(offload.param_buffers, InFlight.READS + 1) * piece
    tiles = [
        _share(u.numel, u.row.optim.spread, ways)
        for u in units
        if u.row.optim is not None and u.row.optim.tier is Tier.NVME
    ]
    grads = [
        _share(u.numel, u.row.grad.spread, ways)
        for u in units
        if u.row.grad is not None and u.row.grad.tier is Tier.NVME
    ]
    if tiles:
        each = 4 + widths.slots + (widths.accumulate if grads else 0)
        whole = max(u.largest for u in units if u.row.optim is not None)
        total += offload.optim_buffers * max(whole, min(max(tiles), offload.tile_numel)) * each
    return total + InFlight.GRADIENT_BUFFERS * max(grads, default=0) * widths.accumulate


def gradients_on_drive(row: UnitPlan) -> UnitPlan:
    """The row with gradients resting where the optimizer state does."""
    if row.optim is None or row.grad is None or row.optim.tier is not Tier.NVME:
        return row
    return replace(row, grad=StatePlan(row.grad.spread, Tier.NVME))
