"""Rows that keep within ``memory.host_limit``, ``memory.device_limit`` and what there is, or settings that would."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.observe.hostmem import Pool
from deepspeed.zero.memory.budget import MemoryPlan, UnitSize, Widths, gradients_on_drive, memory_plan
from deepspeed.zero.plan import OffloadPlan, StatePlan, Tier, UnitPlan, ZeroPlan

_SPARE = 8  # of the memory there is, one part in so many is left to activations, inputs and the interpreter


@dataclass(frozen=True)
class RankMemory:
    """One rank before anything is built, in bytes: what stays in use, what the model's new places replace; pools."""

    host: int
    device: int
    replaced: int
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Bytes; 0 for no limit. ``host_used`` and ``device_used`` are held already and stay.

    ``source``: what leaves no more than ``host``, where that is no setting; then it moves what can be moved (see
    ``fit``).
    """

    host: int = 0
    device: int = 0
    host_used: int = 0
    device_used: int = 0
    source: str = ""

    def allow(self, plan: MemoryPlan) -> bool:
        """Whether ``plan`` stays below both."""
        return self.allow_host(plan) and (not self.device or plan.device + self.device_used <= self.device)

    def allow_host(self, plan: MemoryPlan) -> bool:
        """Whether there may be as much host memory as ``plan`` needs."""
        return not self.host or plan.host + self.host_used <= self.host

    def broken_by(self, plan: MemoryPlan) -> str:
        """The limit that ``plan`` exceeds, in words."""
        host = f"{self.source} leaves a rank" if self.source else "memory.host_limit is"
        what, limit = ("memory.device_limit is", self.device) if self.allow_host(plan) else (host, self.host)
        return f"{what} {limit / 2**20:,.0f} MiB"


def limits_of(offload: OffloadPlan, ranks: Sequence[RankMemory]) -> Limits:
    """What the configuration allows. Equal on every rank: the fullest one decides."""
    return Limits(offload.host_limit, offload.device_limit, max(r.host for r in ranks), max(r.device for r in ranks))


def limits_present(ranks: Sequence[RankMemory]) -> Limits:
    """What the fullest host has for one rank: its part of the tightest pool, less an eighth. Equal on every rank.

    Ranks that draw on one pool share it evenly, and what their models hold now is theirs to use again.
    """
    sharing: defaultdict[object, list[tuple[RankMemory, Pool]]] = defaultdict(list)
    for member, pool in ((r, p) for r in ranks for p in r.pools):
        sharing[pool.key].append((member, pool))
    rooms = []
    for those in sharing.values():
        room = (min(pool.free for _, pool in those) + sum(rank.replaced for rank, _ in those)) // len(those)
        together = f", which {len(those)} ranks share," if len(those) > 1 else ""
        rooms.append((room - room // _SPARE, max(rank.host for rank, _ in those), those[0][1].name + together))
    room, used, source = min(rooms, default=(0, 0, ""))
    return Limits(max(1, room + used) if rooms else 0, host_used=used, source=source)


@dataclass(frozen=True)
class Fitted:
    """The rows to build, one per unit, where they may go, what they hold; ``moved``: what the user should know."""

    rows: list[UnitPlan]
    offload: OffloadPlan
    memory: MemoryPlan
    moved: str = ""


def fit(
    plan: ZeroPlan, units: Sequence[UnitSize], ways: Sequence[int], widths: Widths, limits: Limits, *, shared: bool
) -> Fitted:
    """The rows of ``units``, with gradients on the drive where host memory has no room for them.

    Where nobody stated how much memory there may be (``limits.source``), sharded parameters go there too, as many as
    have to. Raises DeepSpeedConfigError, with the table and the first settings that would fit, when the limits cannot
    be kept.
    """

    def holding(rows: list[UnitPlan], offload: OffloadPlan) -> MemoryPlan:
        sized = [replace(unit, row=row) for unit, row in zip(units, rows, strict=True)]
        return memory_plan(sized, ways, offload, widths, prefetch=plan.prefetch_numel, shared=shared)

    first = None
    for rows, offload in _movements([unit.row for unit in units], plan, limits, shared=shared):
        memory = holding(rows, offload)
        first = first or memory
        if not limits.allow(memory):
            continue
        if offload is not plan.offload:  # what has room beside the rest stays in memory
            room = (limits.host - limits.host_used - memory.host) // max(unit.width for unit in units)
            offload = replace(offload, host_param_numel=min(room, plan.offload.host_param_numel))
            memory = holding(rows, offload)
        return Fitted(rows, offload, memory, _moved(first, memory, limits))
    smallest = memory
    for advice, other, sizes in _alternatives(rows, offload):
        smallest = holding([gradients_on_drive(row) for row in other], sizes)
        if limits.allow(smallest):
            way_out = f"It fits with {advice}: {_sizes(smallest, limits)}"
            break
    else:
        most = f"With everything that can move on a drive it needs {_sizes(smallest, limits)}"
        way_out = f"{most}: raise the limit or use more ranks"
    overrule = " A memory.host_limit of yours counts instead of what was measured." if limits.source else ""
    raise DeepSpeedConfigError(
        f"{limits.broken_by(memory)}, but a rank of this run would hold {_sizes(memory, limits)}:\n{memory.table()}\n"
        f"{way_out}.{overrule}"
    )


def _movements(
    rows: list[UnitPlan], plan: ZeroPlan, limits: Limits, *, shared: bool
) -> Iterator[tuple[list[UnitPlan], OffloadPlan]]:
    """Rows that need ever less host memory, without another word in the configuration."""
    offload = plan.offload
    yield rows, offload
    rows = [gradients_on_drive(row) for row in rows]
    yield rows, offload
    folder = offload.param_folder or offload.optim_folder
    if limits.source and folder and plan.regular.param.sharded and (shared or plan.regular.param.away):
        rows = [_move(row, "param", Tier.NVME) for row in rows]
        yield rows, replace(offload, param_folder=folder, host_param_numel=0)


def _moved(first: MemoryPlan, now: MemoryPlan, limits: Limits) -> str:
    """What went to the drive because of ``limits``; empty when nothing did, or when the user stated them."""
    if first is now or not limits.source:
        return ""
    before = {line.what: line.drive for line in first.lines}
    more = {line.what: line.drive - before.get(line.what, 0) for line in now.lines}
    parts = [f"{nbytes / 2**20:,.0f} MiB of {what}" for what, nbytes in more.items() if nbytes > 0]
    return (
        f"{limits.broken_by(first)}, so {' and '.join(parts)} rest on the drive instead (state memory.host_limit "
        "to decide yourself)"
    )


def doubt(present: Limits, memory: MemoryPlan) -> str:
    """A warning when what is planned is more than there is; empty otherwise."""
    if present.allow_host(memory):
        return ""
    sizes = _sizes(memory, present)
    return f"{present.broken_by(memory)}, but model states alone will hold {sizes}: the system may end the run"


def _alternatives(rows: list[UnitPlan], offload: OffloadPlan) -> Iterator[tuple[str, list[UnitPlan], OffloadPlan]]:
    """Ever smaller settings, as words, rows and sizes; each includes the ones before it."""
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
    order = list(Tier)
    if kind == "param":
        # What stays whole on every rank stays on the device.
        further = row.param.sharded and order.index(tier) > order.index(row.param.tier)
        return replace(row, param=StatePlan(row.param.spread, tier)) if further else row
    if row.optim is None or row.grad is None or order.index(tier) <= order.index(row.optim.tier):
        return row
    grad = StatePlan(row.grad.spread, max(row.grad.tier, Tier.HOST, key=order.index))
    return replace(row, optim=StatePlan(row.optim.spread, tier), grad=grad)


def _sizes(plan: MemoryPlan, limits: Limits) -> str:
    host, used, device = plan.host + limits.host_used, limits.host_used, plan.device + limits.device_used
    text = f"{host / 2**20:,.0f} MiB of host memory ({used / 2**20:,.0f} in use now)"
    return text if plan.shared else f"{text}, {device / 2**20:,.0f} MiB of the device"
