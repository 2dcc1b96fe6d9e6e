"""What one rank's model states will hold, per tier, before any of it exists. Pure: numbers in, a table out.

Counted are parameters, gradients and optimizer state at rest, units gathered at once, and the buffers between memory
and drives. Not counted are activations, the model's inputs, and what the process held before. The widths are those of
mixed-precision training (Rajbhandari et al. 2020): w bytes a parameter in the compute dtype, a in the accumulation
dtype, 4 in the master, 4 a slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from deepspeed.zero.plan import InFlight, OffloadPlan, Spread, StateKind, StatePlan, Tier, UnitPlan


@dataclass(frozen=True)
class UnitSize:
    """One unit: elements, bytes an element at rest, its row; ``largest``: elements that one tile must hold."""

    numel: int
    width: int
    row: UnitPlan
    largest: int = 0


@dataclass(frozen=True)
class Widths:
    """Bytes an element: summed gradients, optimizer slots together, gradients on their way (0: as the parameter)."""

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
        lines = [Line(x.what, 0, x.host + x.device, x.drive) if self.shared else x for x in self.lines]
        for line in (*lines, Line("together", self.device, self.host, self.drive)):
            a, b, c = (f"{n / 2**20:,.0f} MiB" if n else "-" for n in (line.device, line.host, line.drive))
            shown.append((line.what, a, b, c))
        return "\n".join(f"{a:<38}{b:>14}{c:>14}{d:>14}" for a, b, c, d in shown)


def memory_plan(
    units: Sequence[UnitSize], ways: Sequence[int], offload: OffloadPlan, widths: Widths, *, prefetch: int, shared: bool
) -> MemoryPlan:
    """The plan of one rank. ``ways``: ranks on each mesh axis; ``prefetch``: elements that may be gathered ahead."""
    table: dict[str, dict[Tier, int]] = {}

    def add(what: str, tier: Tier, nbytes: int) -> None:
        row = table.setdefault(what, dict.fromkeys(Tier, 0))
        row[tier] += nbytes

    host_left = offload.host_param_numel
    for unit in units:
        numel, tier = _share(unit.numel, unit.row.param, ways), unit.row.param.tier
        if tier is Tier.NVME and numel <= host_left:
            tier, host_left = Tier.HOST, host_left - numel
        add("parameters", tier, numel * unit.width)
        grad, optim = unit.row.grad, unit.row.optim
        if grad is not None and optim is not None:
            add("gradients", grad.tier, _share(unit.numel, grad, ways) * widths.accumulate)
            # An fp32 parameter that rests in the same memory is its own master.
            same = unit.width >= 4 and Tier.NVME not in (tier, optim.tier) and (tier is optim.tier or shared)
            add("optimizer state", optim.tier, _share(unit.numel, optim, ways) * (widths.slots + (0 if same else 4)))
    moving = sorted((u for u in units if _movable(u, ways)), key=lambda u: -u.numel * u.width)
    if moving:
        after = moving[1].numel if prefetch and len(moving) > 1 else 0  # the next unit comes early whatever its size
        ahead = max(after, min(prefetch, InFlight.UNITS * moving[len(moving) // 2].numel)) * moving[0].width
        add("units gathered at once", Tier.DEVICE, moving[0].numel * moving[0].width + ahead)
    add("gradients on their way", Tier.DEVICE, _travelling(units, ways, widths, shared=shared))
    add("staging buffers", Tier.HOST, _staging(units, ways, offload, widths))
    if offload.save_copies:
        add("copies for asynchronous saves", Tier.HOST, sum(_saved_copy(u, prod(ways), widths) for u in units))
    lines = (Line(what, row[Tier.DEVICE], row[Tier.HOST], row[Tier.NVME]) for what, row in table.items())
    return MemoryPlan(tuple(line for line in lines if line.device or line.host or line.drive), shared)


def _share(numel: int, state: StatePlan, ways: Sequence[int]) -> int:
    """Elements of one rank."""
    return -(-numel // prod(n for way, n in zip(state.spread, ways, strict=True) if way is Spread.SHARDED))


def _movable(unit: UnitSize, ways: Sequence[int]) -> bool:
    return unit.row.param.away or _share(unit.numel, unit.row.param, ways) < unit.numel


def _travelling(units: Sequence[UnitSize], ways: Sequence[int], widths: Widths, *, shared: bool) -> int:
    """Local sums before they are reduced, a few units or all that wait for the window; and reduced ones going off."""
    trained = [(u, u.row.grad) for u in units if u.row.grad is not None]
    together = InFlight.REDUCTIONS + 1
    waiting = sum(u.numel * widths.accumulate for u, _ in trained if not u.row.reduce_each_backward)
    largest = max((u.numel * (widths.wire or u.width) for u, _ in trained), default=0)
    away = max((_share(u.numel, grad, ways) for u, grad in trained if grad.away and not shared), default=0)
    return (waiting or together * largest) + together * away * widths.accumulate


def _saved_copy(unit: UnitSize, ranks: int, widths: Widths) -> int:
    """What this rank writes of a unit into a checkpoint, each byte once; what is on a drive is not copied first."""
    optim = unit.row.optim
    if (optim or unit.row.param).tier is Tier.NVME:
        return 0
    return -(-unit.numel // ranks) * (4 + widths.slots if optim is not None else unit.width)


def _staging(units: Sequence[UnitSize], ways: Sequence[int], offload: OffloadPlan, widths: Widths) -> int:
    """Buffers between memory and the drives."""

    def shares(kind: StateKind) -> list[tuple[UnitSize, int]]:
        states = ((u, getattr(u.row, kind.value)) for u in units)
        return [(u, _share(u.numel, s, ways)) for u, s in states if s is not None and s.tier is Tier.NVME]

    total = 0
    if shards := [numel * u.width for u, numel in shares(StateKind.PARAM)]:
        piece = min(max(shards), offload.param_piece_numel * units[0].width)
        total += min(offload.param_buffers, InFlight.READS + 1) * piece
    grads = [numel for _, numel in shares(StateKind.GRAD)]
    if tiles := [numel for _, numel in shares(StateKind.OPTIM)]:
        each = 4 + widths.slots + (widths.accumulate if grads else 0)
        whole = max(u.largest for u in units if u.row.optim is not None)
        total += offload.optim_buffers * max(whole, min(max(tiles), offload.tile_numel)) * each
    return total + InFlight.GRADIENT_BUFFERS * max(grads, default=0) * widths.accumulate


def gradients_on_drive(row: UnitPlan) -> UnitPlan:
    """The row with gradients resting where the optimizer state does."""
    if row.optim is None or row.grad is None or row.optim.tier is not Tier.NVME:
        return row
    return replace(row, grad=StatePlan(row.grad.spread, Tier.NVME))
