"""Rows that keep the promise of ``memory.host_limit`` and ``memory.device_limit``, or an error with settings that would."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.budget import MemoryPlan, UnitSize, Widths, gradients_on_drive, memory_plan
from deepspeed.zero.plan import OffloadPlan, StatePlan, Tier, UnitPlan, ZeroPlan


@dataclass(frozen=True)
class Limits:
    """Bytes; 0 for no limit. ``host_used`` and ``device_used`` are held already and stay."""

    host: int = 0
    device: int = 0
    host_used: int = 0
    device_used: int = 0

    def allow(self, plan: MemoryPlan) -> bool:
        """Whether ``plan`` stays below both."""
        host_fits = not self.host or plan.host + self.host_used <= self.host
        return host_fits and (not self.device or plan.device + self.device_used <= self.device)


@dataclass(frozen=True)
class Fitted:
    """The rows to build, one per unit, and what they hold."""

    rows: list[UnitPlan]
    memory: MemoryPlan


def fit(plan: ZeroPlan, units: Sequence[UnitSize], ways: Sequence[int], widths: Widths, limits: Limits, *, shared: bool) -> Fitted:
    """The rows of ``units``, with gradients on the drive where host memory has no room for them.

    Raises DeepSpeedConfigError, with the table and the first settings that would fit, when the limits cannot be kept.
    """

    def holding(rows: list[UnitPlan], offload: OffloadPlan) -> MemoryPlan:
        sized = [replace(unit, row=row) for unit, row in zip(units, rows, strict=True)]
        return memory_plan(sized, ways, offload, widths, prefetch=plan.prefetch_numel, shared=shared)

    rows = [unit.row for unit in units]
    found = Fitted(rows, holding(rows, plan.offload))
    if limits.allow(found.memory):
        return found
    rows = [gradients_on_drive(row) for row in rows]
    found = Fitted(rows, holding(rows, plan.offload))
    if limits.allow(found.memory):
        return found
    smallest = found.memory
    for advice, other, offload in _alternatives(rows, plan):
        smallest = holding([gradients_on_drive(row) for row in other], offload)
        if limits.allow(smallest):
            raise DeepSpeedConfigError(f"{_excess(found.memory, limits)}It fits with {advice}: {_sizes(smallest, limits)}.")
    least = f"With everything that can move on a drive it needs {_sizes(smallest, limits)}"
    raise DeepSpeedConfigError(f"{_excess(found.memory, limits)}{least}: raise the limit or use more ranks.")


def _alternatives(rows: list[UnitPlan], plan: ZeroPlan) -> Iterator[tuple[str, list[UnitPlan], OffloadPlan]]:
    """Ever smaller settings, as words, rows and sizes; each includes the ones before it."""
    steps: list[str] = []
    offload = plan.offload
    for tier, name in ((Tier.HOST, "cpu"), (Tier.NVME, "nvme")):
        for kind in ("optimizer", "param"):
            if kind == "param" and not plan.regular.param.sharded:
                continue
            moved = [_move(row, kind, tier) for row in rows]
            if moved == rows:
                continue
            rows = moved
            said = f'zero_optimization.offload_{kind}.device "{name}"'
            if kind == "param" and tier is Tier.NVME:
                offload = replace(offload, host_param_numel=0)
                said += " with max_in_cpu 0"
            steps = [s for s in steps if f"offload_{kind}." not in s] + [said]
            yield " and ".join(steps), rows, offload
    if offload.host_param_numel and any(row.param.tier is Tier.NVME for row in rows):
        offload = replace(offload, host_param_numel=0)
        steps.append("zero_optimization.offload_param.max_in_cpu 0")
        yield " and ".join(steps), rows, offload
    offload = replace(offload, tile_numel=min(offload.tile_numel, 1 << 20), optim_buffers=2, param_buffers=2)
    steps.append("sub_group_size 1048576 and buffer_count 2")
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


def _excess(plan: MemoryPlan, limits: Limits) -> str:
    over_host = limits.host and plan.host + limits.host_used > limits.host
    key, limit = ("memory.host_limit", limits.host) if over_host else ("memory.device_limit", limits.device)
    return f"{key} is {limit / 2**20:,.0f} MiB, but a rank of this run would hold {_sizes(plan, limits)}:\n{plan.table()}\n"


def _sizes(plan: MemoryPlan, limits: Limits) -> str:
    host = f"{(plan.host + limits.host_used) / 2**20:,.0f} MiB of host memory ({limits.host_used / 2**20:,.0f} in use now)"
    return host if plan.shared else f"{host}, {(plan.device + limits.device_used) / 2**20:,.0f} MiB of the device"
