"""What one rank's model states will hold, per tier, before any of it exists; rows that keep within limits. Pure.

Counted are parameters, gradients and optimizer state at rest, units gathered at once, the buffers between memory and
drives, and communicators of the device. Not counted are activations, the model's inputs, and what the process held
before. The widths are those of mixed-precision training (Rajbhandari et al. 2020).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.monitor.hostmem import Pool
from deepspeed.monitor.program import size
from deepspeed.zero.layout import round_up
from deepspeed.zero.plan import InFlight, OffloadPlan, Spread, StatePlan, Tier, UnitPlan, ZeroPlan

_PAGE = 4096  # what a state in host memory beside a device is rounded up to, as ``tier.arena`` does
_COMMUNICATOR = 400 << 20  # taken to be the device memory of one of NCCL's: 300 to 500 MiB with its own settings
_SPARE = 8  # of the memory there is, one part in so many is left to activations, inputs and the interpreter


@dataclass(frozen=True)
class UnitSize:
    """Size of one unit: elements, bytes an element at rest, its row; ``largest``: elements that one tile must hold;
    ``shapes``: offset and shape of its parameters; ``dims``: ranks on each axis, where they are not the plan's.
    """

    numel: int
    width: int
    row: UnitPlan
    largest: int = 0
    shapes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    dims: tuple[int, ...] = ()


@dataclass(frozen=True)
class Widths:
    """Bytes an element: summed gradients, optimizer slots together, gradients on their way (0: as the parameter).
    ``window``: whether there are several micro-batches to an update.
    """

    accumulate: int = 4
    slots: int = 8
    wire: int = 0
    window: bool = True


@dataclass(frozen=True)
class Line:
    """Row of the table, in bytes."""

    what: str
    device: int = 0
    host: int = 0
    drive: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Table of one rank's memory. ``shared``: device and host are the same memory, as on machines without an
    accelerator. ``pages``: bytes on the host of states in the arena (``tier.arena``), all but an optimizer's slots.
    """

    lines: tuple[Line, ...]
    shared: bool
    pages: int = 0

    @property
    def device(self) -> int:
        """Return bytes on the device; zero where it is the host."""
        return 0 if self.shared else sum(line.device for line in self.lines)

    @property
    def host(self) -> int:
        """Return bytes in host memory."""
        return sum(line.host + (line.device if self.shared else 0) for line in self.lines)

    @property
    def drive(self) -> int:
        """Return bytes on drives."""
        return sum(line.drive for line in self.lines)

    def table(self) -> str:
        """Return the plan as text."""
        shown = [("model states of one rank", "device", "host", "drive")]
        lines = [Line(x.what, 0, x.host + x.device, x.drive) if self.shared else x for x in self.lines]
        for line in (*lines, Line("together", self.device, self.host, self.drive)):
            a, b, c = (size(n) if n else "-" for n in (line.device, line.host, line.drive))
            shown.append((line.what, a, b, c))
        return "\n".join(f"{a:<38}{b:>14}{c:>14}{d:>14}" for a, b, c, d in shown)


def memory_plan(
    units: Sequence[UnitSize], dims: Sequence[int], offload: OffloadPlan, widths: Widths, *, prefetch: int,
    shared: bool, communicators: int = 0,
) -> MemoryPlan:  # fmt: skip
    """Compute one rank's plan. ``dims``: ranks on each axis; ``prefetch``: elements gathered ahead."""
    table: Counter[tuple[str, Tier]] = Counter()
    host_left, pages = offload.host_param_numel, 0

    def add(label: str, tier: Tier, nbytes: int, *, paged: bool = True) -> None:
        nonlocal pages
        if paged and tier is Tier.HOST and not shared:
            nbytes = round_up(nbytes, _PAGE)
            pages += nbytes
        table[label, tier] += nbytes

    for unit in units:
        numel, tier = _share(unit, unit.row.param, dims), unit.row.param.tier
        if tier is Tier.NVME and numel <= host_left:
            tier, host_left = Tier.HOST, host_left - numel
        add("parameters", tier, numel * unit.width)
        grad, optim = unit.row.grad, unit.row.optim
        if grad is not None and optim is not None:
            for _ in range(offload.update.gradient_copies if optim.away else 1):  # the last ones while new ones come
                add("gradients", grad.tier, _share(unit, grad, dims) * widths.accumulate)
            numel = _share(unit, optim, dims)
            masters = not _is_its_own_master(unit, tier, optim, offload, shared=shared)
            add("optimizer state", optim.tier, 4 * numel * masters)
            parts = prod(n for way, n in zip(optim.spread, unit.dims or dims, strict=True) if way is Spread.SHARDED)
            needed = offload.update.memory_of(unit.shapes, numel, parts=parts, slots=widths.slots, shared=shared)
            for label, tier, nbytes, paged in needed if optim.away else ():
                add(label, tier, nbytes, paged=paged)
            if unit.row.loads_states and not shared:  # the slots are in the arena, too
                for _ in range(widths.slots // 4):
                    add("optimizer state", optim.tier, 4 * numel)
            else:
                table["optimizer state", optim.tier] += widths.slots * numel
        table["copies for asynchronous saves", Tier.HOST] += _saved_at_once(unit, dims, offload, widths)
    table["units gathered at once", Tier.DEVICE] = _gathered(units, dims, prefetch)
    table["gradients on their way", Tier.DEVICE] = _sent_gradients(units, dims, widths, shared=shared)
    visits = [_share(u, u.row.optim, dims) for u in units if u.row.optim and u.row.loads_states and not shared]
    table["optimizer state on a visit", Tier.DEVICE] = InFlight.LOADED * (4 + widths.slots) * max(visits, default=0)
    hosted = [_share(u, u.row.optim, dims) for u in units if u.row.optim is not None and u.row.optim.away]
    for label, tier, nbytes, _ in offload.update.memory_beside(hosted, slots=widths.slots):
        table[label, tier] += nbytes
    table["staging buffers", Tier.HOST] = _staging(units, dims, offload, widths)
    table[f"communicators: {communicators}, assumed", Tier.DEVICE] = communicators * _COMMUNICATOR
    return MemoryPlan(_lines(table), shared, pages)


def _lines(table: Counter[tuple[str, Tier]]) -> tuple[Line, ...]:
    names = dict.fromkeys(label for (label, _), nbytes in table.items() if nbytes)
    return tuple(Line(label, *(table[label, tier] for tier in Tier)) for label in names)


def _is_its_own_master(unit: UnitSize, tier: Tier, optim: StatePlan, offload: OffloadPlan, *, shared: bool) -> bool:
    """Tell whether the parameter needs no master beside it, as an fp32 one that rests on the device."""
    if unit.width < 4 or (offload.update.masters_apart and optim.away):
        return False
    return Tier.NVME not in (tier, optim.tier) if shared else tier is optim.tier is Tier.DEVICE


def _saved_at_once(unit: UnitSize, dims: Sequence[int], offload: OffloadPlan, widths: Widths) -> int:
    """Return the bytes of a rank's copies for an asynchronous save; each byte of a unit is one rank's to write."""
    optim = unit.row.optim
    if not offload.save_copies or (optim or unit.row.param).tier is Tier.NVME:
        return 0
    return -(-unit.numel // prod(unit.dims or dims)) * (unit.width if optim is None else 4 + widths.slots)


def _sent_gradients(units: Sequence[UnitSize], dims: Sequence[int], widths: Widths, *, shared: bool) -> int:
    """Return the bytes of local sums before they are reduced, of a few units or all that wait for the window; and of
    reduced ones on their way to where they rest.
    """
    trained = [(u, u.row.grad) for u in units if u.row.grad is not None]
    together = InFlight.REDUCTIONS + 1
    waiting = sum(u.numel * widths.accumulate for u, _ in trained if widths.window and not u.row.reduce_each_backward)
    sent = [(u.numel, widths.wire or u.width) for u, _ in trained]
    largest = max((numel * width for numel, width in sent), default=0)
    cast = max((numel * width for numel, width in sent if width != widths.accumulate), default=0)
    offloaded = max((_share(u, grad, dims) for u, grad in trained if grad.away and not shared), default=0)
    return (waiting + cast if waiting else together * largest) + together * offloaded * widths.accumulate


def _gathered(units: Sequence[UnitSize], dims: Sequence[int], prefetch: int) -> int:
    """Return the bytes of the units that are whole at once."""
    moving = [u for u in units if u.row.param.away or _share(u, u.row.param, dims) < u.numel]
    if not moving:
        return 0
    moving.sort(key=lambda u: -u.numel * u.width)
    after = moving[1].numel if prefetch and len(moving) > 1 else 0  # the next unit comes early whatever its size
    ahead = max(after, min(prefetch, InFlight.UNITS * moving[len(moving) // 2].numel)) * moving[0].width
    return moving[0].numel * moving[0].width + ahead


def _share(unit: UnitSize, state: StatePlan, dims: Sequence[int]) -> int:
    """Return the elements of one rank."""
    axes = zip(state.spread, unit.dims or dims, strict=True)
    return -(-unit.numel // prod(n for way, n in axes if way is Spread.SHARDED))


def _staging(units: Sequence[UnitSize], dims: Sequence[int], offload: OffloadPlan, widths: Widths) -> int:
    """Return the bytes of buffers between memory and the drives."""

    def largest(kind: str, width: int = 1) -> int:
        """Return one rank's largest such state on a drive, in elements or, with ``width`` 0, in bytes."""
        states = ((u, getattr(u.row, kind)) for u in units)
        on_drive = [(u, s) for u, s in states if s is not None and s.tier is Tier.NVME]
        return max((_share(u, s, dims) * (width or u.width) for u, s in on_drive), default=0)

    piece = min(largest("param", 0), offload.param_piece_numel * units[0].width if units else 0)
    total = min(offload.param_buffers, InFlight.READS + 1) * piece
    grads = largest("grad")
    if tiles := largest("optim"):
        itemsize = 4 + widths.slots + (widths.accumulate if grads else 0)
        whole = max(u.largest for u in units if u.row.optim is not None)
        total += offload.optim_buffers * max(whole, min(tiles, offload.tile_numel)) * itemsize
    return total + InFlight.GRADIENT_BUFFERS * grads * widths.accumulate


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank before the build, in bytes: what stays in use, what new places replace; and its pools."""

    host: int
    device: int
    replaced: int
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Limits in bytes; 0 for none. ``host_used`` and ``device_used`` are held already and stay.

    ``source``: names what limits ``host``, where no setting does; then ``fit`` moves what can be moved.
    """

    host: int = 0
    device: int = 0
    host_used: int = 0
    device_used: int = 0
    source: str = ""

    def allow(self, plan: MemoryPlan) -> bool:
        """Tell whether ``plan`` stays below both limits."""
        return self.allow_host(plan) and (not self.device or plan.device + self.device_used <= self.device)

    def allow_host(self, plan: MemoryPlan) -> bool:
        """Tell whether there may be as much host memory as ``plan`` needs."""
        return not self.host or plan.host + self.host_used <= self.host

    def broken_by(self, plan: MemoryPlan) -> str:
        """Describe the limit that ``plan`` exceeds."""
        host = f"{self.source} leaves a rank" if self.source else "memory.host_limit is"
        phrase, limit = ("memory.device_limit is", self.device) if self.allow_host(plan) else (host, self.host)
        return f"{phrase} {limit / 2**20:,.0f} MiB"

    def with_used(self, plan: MemoryPlan) -> str:
        """Describe the memory that a rank would hold with ``plan``."""
        host, device = plan.host + self.host_used, plan.device + self.device_used
        text = f"{host / 2**20:,.0f} MiB of host memory ({self.host_used / 2**20:,.0f} in use now)"
        return text if plan.shared else f"{text}, {device / 2**20:,.0f} MiB of the device"

    def doubt(self, plan: MemoryPlan) -> str:
        """Return a warning when the plan needs more memory than is present; empty otherwise."""
        sizes = f"but model states alone will hold {self.with_used(plan)}: the system may end the run"
        return "" if self.allow_host(plan) else f"{self.broken_by(plan)}, {sizes}"


def limits_of(offload: OffloadPlan, ranks: Sequence[RankMemory]) -> Limits:
    """Return the configured limits, with the use of the fullest rank. Equal on every rank."""
    return Limits(offload.host_limit, offload.device_limit, max(r.host for r in ranks), max(r.device for r in ranks))


def limits_present(ranks: Sequence[RankMemory]) -> Limits:
    """Return one rank's part of the tightest memory pool, less an eighth, on the fullest host. Equal on every rank.

    Ranks that draw on one pool share it evenly, and what their models hold now is theirs to use again.
    """
    sharing: defaultdict[object, list[tuple[RankMemory, Pool]]] = defaultdict(list)
    for member, pool in ((r, p) for r in ranks for p in r.pools):
        sharing[pool.key].append((member, pool))
    rooms = []
    for members in sharing.values():
        room = (min(pool.free for _, pool in members) + sum(rank.replaced for rank, _ in members)) // len(members)
        together = f", which {len(members)} ranks share," if len(members) > 1 else ""
        rooms.append((room - room // _SPARE, max(rank.host for rank, _ in members), members[0][1].name + together))
    room, used, source = min(rooms, default=(0, 0, ""))
    return Limits(max(1, room + used) if rooms else 0, host_used=used, source=source)


@dataclass(frozen=True)
class Fitted:
    """Rows to build, one per unit, with their places and memory; ``moved``: a message to the user."""

    rows: list[UnitPlan]
    offload: OffloadPlan
    memory: MemoryPlan
    moved: str = ""


def fit(
    plan: ZeroPlan, units: Sequence[UnitSize], dims: Sequence[int], widths: Widths, limits: Limits, *, shared: bool,
    communicators: int = 0,
) -> Fitted:  # fmt: skip
    """Choose the rows of ``units``, with gradients on the drive where host memory has no room for them.

    Where nobody stated how much memory there may be (``limits.source``), sharded parameters go there too, as many as
    have to. Raises DeepSpeedConfigError, with the table and settings that would fit, where the limits cannot be kept.
    """

    def holding(rows: list[UnitPlan], offload: OffloadPlan) -> MemoryPlan:
        sized = [replace(unit, row=row) for unit, row in zip(units, rows, strict=True)]
        counted: Any = {"prefetch": plan.prefetch_numel, "shared": shared, "communicators": communicators}
        return memory_plan(sized, dims, offload, widths, **counted)

    # Rows that need ever less host memory, without another word in the configuration.
    offload, rows = plan.offload, [gradients_on_drive(unit.row) for unit in units]
    movements = [([unit.row for unit in units], offload), (rows, offload)]
    folder = offload.param_folder or offload.optim_folder
    if limits.source and folder and plan.regular.param.sharded and (shared or plan.regular.param.away):
        on_drive = replace(offload, param_folder=folder, host_param_numel=0)
        movements.append(([_move(row, "param", Tier.NVME) for row in rows], on_drive))
    plans: list[MemoryPlan] = []
    for rows, offload in movements:
        plans.append(memory := holding(rows, offload))
        if not limits.allow(memory):
            continue
        if offload is not plan.offload:  # what has room beside the rest stays in memory
            room = (limits.host - limits.host_used - memory.host) // max(unit.width for unit in units)
            offload = replace(offload, host_param_numel=min(room, plan.offload.host_param_numel))
            memory = holding(rows, offload)
        # who has stated a limit knows what it leads to
        return Fitted(rows, offload, memory, _moved(plans[0], memory, limits) if plans[1:] and limits.source else "")
    smallest = memory
    for advice, other, sizes in _alternatives(rows, offload):
        smallest = holding([gradients_on_drive(row) for row in other], sizes)
        if limits.allow(smallest):
            way_out = f"It fits with {advice}: {limits.with_used(smallest)}"
            break
    else:
        most = f"With everything that can move on a drive it needs {limits.with_used(smallest)}"
        way_out = f"{most}: raise the limit or use more ranks"
    overrule = " A memory.host_limit of yours counts instead of what was measured." if limits.source else ""
    raise DeepSpeedConfigError(
        f"{limits.broken_by(memory)}, but a rank of this run would hold {limits.with_used(memory)}:\n{memory.table()}\n"
        f"{way_out}.{overrule}"
    )


def _moved(first: MemoryPlan, now: MemoryPlan, limits: Limits) -> str:
    """Describe the states that went to the drive because of ``limits``."""
    before = {line.what: line.drive for line in first.lines}
    more = {line.what: line.drive - before.get(line.what, 0) for line in now.lines}
    parts = [f"{nbytes / 2**20:,.0f} MiB of {label}" for label, nbytes in more.items() if nbytes > 0]
    on_drive = f"{' and '.join(parts)} rest on the drive instead (state memory.host_limit to decide yourself)"
    return f"{limits.broken_by(first)}, so {on_drive}"


def _alternatives(rows: list[UnitPlan], offload: OffloadPlan) -> Iterator[tuple[str, list[UnitPlan], OffloadPlan]]:
    """Yield ever smaller settings, as words, rows and sizes; each includes the ones before it."""
    steps: list[str] = []
    for tier, name in ((Tier.HOST, "cpu"), (Tier.NVME, "nvme")):
        for kind in ("optimizer", "param"):
            moved = [_move(row, kind, tier) for row in rows]
            if moved == rows:
                continue
            rows = moved
            step = f'zero_optimization.offload_{kind}.device "{name}"'
            if kind == "param" and tier is Tier.NVME:
                offload = replace(offload, host_param_numel=0)
                step += " with max_in_cpu 0"
            steps = [s for s in steps if f"offload_{kind}." not in s] + [step]
            yield " and ".join(steps), rows, offload
    if offload.host_param_numel and any(row.param.tier is Tier.NVME for row in rows):
        offload = replace(offload, host_param_numel=0)
        steps.append("zero_optimization.offload_param.max_in_cpu 0")
        yield " and ".join(steps), rows, offload
    offload = replace(offload, tile_numel=min(offload.tile_numel, 1 << 20), optim_buffers=2, param_buffers=2)
    steps.append(f"sub_group_size {offload.tile_numel} and buffer_count 2")
    yield " and ".join(steps), rows, offload


def _move(row: UnitPlan, kind: str, tier: Tier) -> UnitPlan:
    def at_least(state: StatePlan, tier: Tier) -> StatePlan:
        return replace(state, tier=max(state.tier, tier, key=list(Tier).index))

    if kind == "param":  # what stays whole on every rank stays on the device
        return replace(row, param=at_least(row.param, tier)) if row.param.sharded else row
    if row.optim is None or row.grad is None:
        return row
    return replace(row, optim=at_least(row.optim, tier), grad=at_least(row.grad, Tier.HOST))


def gradients_on_drive(row: UnitPlan) -> UnitPlan:
    """Return the row with gradients on the drive if the optimizer state rests there."""
    if row.optim is None or row.grad is None or row.optim.tier is not Tier.NVME:
        return row
    return replace(row, grad=replace(row.grad, tier=Tier.NVME))
