"""Constants of what connects the ranks: collectives inside a node and between nodes, and the programs' messages."""

import math
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deepspeed.accelerator.device import Accelerator
from deepspeed.comm.collectives import AxisGroup, all_gather, all_reduce, merge, reduce_scatter, sum_in_place
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.tools.simulate.calibrate.clock import alternating, line, wall
from deepspeed.tools.simulate.calibrate.device import MIB, Effort, Measured
from deepspeed.tools.simulate.costs import Machine

_OPS = ("all_gather", "reduce_scatter", "all_reduce")
_MESSAGES = 20


def measure_links(
    accelerator: Accelerator, mesh: Mesh, effort: Effort, *, local_ranks: int, assumed: Machine, kernel_s: float
) -> Measured:
    """Measure groups of ``mesh``, whose first axis is the node; ``assumed`` has what they do not tell. Collective."""
    findings = Measured()
    if mesh.job.size == 1:
        return findings
    nodes = -(-mesh.job.size // local_ranks)
    if local_ranks > 1:
        _ring(findings, accelerator, mesh.groups[0], effort, name="node", links=1.0, kernel_s=kernel_s)
    if nodes > 1:
        members = Counter(rank // local_ranks for rank in mesh.job.ranks)
        links = min(members.values()) / (1 + assumed["network_crowding"] * math.log2(nodes / 2))
        _ring(findings, accelerator, mesh.job, effort, name="network", links=links, kernel_s=kernel_s)
    if mesh.control is not None:
        exchange = partial(merge, [0] * 4, [], mesh.control)
        wall(exchange, _MESSAGES)
        seconds = statistics.median(wall(exchange, _MESSAGES) for _ in range(effort.rounds))
        rounds = (mesh.control.size - 1).bit_length()
        hops = (nodes - 1).bit_length() * assumed["agreement_hop_s"]
        findings.add(
            "agreement_s", max((seconds - hops) / rounds, 1e-7), f"four numbers of {mesh.control.size} ranks over gloo"
        )
    return findings


def _ring(
    findings: Measured, accelerator: Accelerator, group: AxisGroup, effort: Effort, *, name: str, links: float,
    kernel_s: float,
) -> None:  # fmt: skip
    """Fit a ring's rate and latency for gathers and reductions; ``links``: devices whose links its bytes take."""
    cases = {(op, nbytes): _turn(accelerator, group, op, nbytes) for nbytes in effort.collectives for op in _OPS}
    for run in cases.values():
        run()
    seconds = alternating(cases, effort.rounds)
    findings.note(f"collectives_{name}", seconds)
    # an all-reduce may take another way than a ring; it is written down and not fitted
    points = [(nbytes, s) for (op, nbytes), s in seconds.items() if op != "all_reduce"]
    around = (group.size - 1) / group.size
    start, slope = line([nbytes * around for nbytes, _ in points], [s for _, s in points])
    text = f"line through gathers and reductions over {group.size} ranks with {group.backend}"
    findings.add(f"{name}_hop_s", max((start - kernel_s) / (group.size - 1), 1e-9), text)
    findings.add(f"{name}_rate", 1 / slope / links, text)


def _turn(accelerator: Accelerator, group: AxisGroup, op: str, nbytes: int) -> Callable[[], float]:
    """Return a timer of one ``op`` that moves ``nbytes`` in all; ranks begin together and run it equally often."""
    device = accelerator.current_device_name()
    numel = max(1, nbytes // 4 // group.size) * group.size
    full, part = torch.zeros(numel, device=device), torch.zeros(numel // group.size, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: all_gather(full, part, group).wait(),
        "reduce_scatter": lambda: reduce_scatter(full, part, group, accumulate=False).wait(),
        "all_reduce": lambda: all_reduce(full, full, group, accumulate=False).wait(),
    }
    times = max(1, min(20, 16 * MIB // nbytes))

    def run() -> float:
        sum_in_place(torch.zeros(1, device=device), group)
        accelerator.synchronize()

        def all_of_them() -> None:
            for _ in range(times):
                calls[op]()
            accelerator.synchronize()

        return wall(all_of_them, 1) / times

    return run
