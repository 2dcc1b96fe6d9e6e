"""Constants of a rank's host: its memory, the optimizer by cores, a folder's drive."""

import contextlib
import os
import statistics
from functools import partial
from typing import Any

import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.accelerator.native.spec import CPU_ADAM
from deepspeed.optim.host import adam_step, usable
from deepspeed.tools.bench.io import Load, Target, speed
from deepspeed.tools.simulate.calibrate.clock import Clock, alternating
from deepspeed.tools.simulate.calibrate.device import Effort, Measured

_ADAM_BYTES = 28  # an element: fp32 weight and moments in and out, gradient in


def threads_of(local_ranks: int) -> int:
    """Return the threads of a rank's host work, of ``local_ranks`` ranks: the launcher's share; on the CPU torch's."""
    if get_accelerator().is_synchronized_device():
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def measure_host(clock: Clock, effort: Effort, threads: int, share: float) -> Measured:
    """Measure by the host's ``clock``; ``share``: of this rank's rates, where every device of the node has a rank."""
    findings, before = Measured(), torch.get_num_threads()
    lhs, rhs, out = (torch.ones(effort.array // 8, device="cpu") for _ in range(3))
    tensors = [torch.ones(effort.moments, device="cpu") for _ in range(4)]
    step = partial(adam_step, *tensors, step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    given: list[Any] = [("host_rate", partial(torch.add, lhs, rhs, out=out), 3 * out.nbytes, "a sum of two arrays")]
    if usable(CPU_ADAM, *tensors):
        given.append(("adam_rate", step, _ADAM_BYTES * effort.moments, "this package's AdamW"))
    try:
        torch.set_num_threads(threads)
        seconds = clock.alternating({name: run for name, run, _, _ in given}, effort.rounds)
    finally:
        torch.set_num_threads(before)
    for name, _, nbytes, text in given:
        findings.add(name, share * nbytes / seconds[name], f"{text} by {threads} threads")
    if "adam_rate" in seconds:
        findings.add("adam_rank_rate", findings["adam_rate"] / share, "of one rank, beside the others of this run")
    return findings


def measure_drive(folder: str, effort: Effort, share: float) -> Measured:
    """Measure the IO engine with default settings. Raises UsageError or TransferError where ``folder`` is none."""
    findings, load = Measured(), Load()
    with load.engine() as engine, contextlib.closing(Target(folder, effort.file)) as target:
        runs = {write: partial(speed, target, engine, load, write=write) for write in (True, False)}
        for run in runs.values():
            run()
        rates = alternating(runs, effort.rounds)
    for write, name in ((False, "read"), (True, "write")):
        findings.add(f"drive_{name}_rate", share * 1e9 * rates[write], f"a file of {effort.file:,} bytes in {folder}")
    return findings


def median_of(rows: list[Measured]) -> Measured:
    """Return the median of each constant over the ranks; texts and details are the first rank's."""
    first = rows[0]
    middle = {
        name: (statistics.median(row[name] for row in rows if name in row.constants), text)
        for name, (_, text) in first.constants.items()
    }
    return Measured(middle, first.details)
