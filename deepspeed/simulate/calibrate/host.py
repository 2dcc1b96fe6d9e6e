"""Constants of a rank's host: its memory, the optimizer by cores, a folder's drive."""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deepspeed.bench.io import Load, Target, speed
from deepspeed.device import get_accelerator
from deepspeed.native.spec import CPU_ADAM
from deepspeed.optim.host import adam_step, usable
from deepspeed.simulate.calibrate.clock import Clock, alternating
from deepspeed.simulate.calibrate.device import Effort, Measured

_ADAM_BYTES = 28  # an element: fp32 weight and moments in and out, gradient in


def threads_of(local_ranks: int) -> int:
    """Threads of the host's work in one of so many ranks: as the launcher shares cores out; on the CPU as they are."""
    if get_accelerator().is_synchronized_device():
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def measure_host(clock: Clock, effort: Effort, threads: int, share: float) -> Measured:
    """``clock`` is the host's; ``share``: of what this rank has now, where every device of the node has a rank."""
    findings, before = Measured(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        left, right, out = (torch.ones(effort.array // 8, device="cpu") for _ in range(3))
        seconds = clock.alternating({"add": lambda: torch.add(left, right, out=out)}, effort.rounds)["add"]
        findings.add("host_rate", share * 3 * out.nbytes / seconds, f"a sum of two arrays by {threads} threads")
        _adam(findings, clock, effort, threads, share)
    finally:
        torch.set_num_threads(before)
    return findings


def _adam(findings: Measured, clock: Clock, effort: Effort, threads: int, share: float) -> None:
    tensors = [torch.ones(effort.moments, device="cpu") for _ in range(4)]
    if not usable(CPU_ADAM, *tensors):
        return
    step = partial(adam_step, *tensors, step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    counts = sorted({threads, *(1 << k for k in range(threads.bit_length()) if 1 << k < threads)})

    def with_threads(count: int) -> Callable[[], Any]:
        def run() -> None:
            torch.set_num_threads(count)
            step()

        return run

    seconds = clock.alternating({count: with_threads(count) for count in counts}, effort.rounds)
    rates = {count: _ADAM_BYTES * effort.moments / s for count, s in seconds.items()}
    findings.details["adam"] = [{"threads": count, "bytes_a_second": rate} for count, rate in rates.items()]
    findings.add("adam_rate", share * rates[threads], f"this package's AdamW by {threads} threads")


def measure_drive(folder: str, effort: Effort, share: float) -> Measured:
    """Through the IO engine with its default settings. Raises UsageError or TransferError where ``folder`` is none."""
    findings, load, target = Measured(), Load(), Target(folder, effort.file)
    try:
        with load.engine() as engine:
            for write in (True, False):
                speed(target, engine, load, write=write)
            rates = alternating(
                {write: partial(speed, target, engine, load, write=write) for write in (True, False)}, effort.rounds
            )
    finally:
        target.close()
    for write, name in ((False, "read"), (True, "write")):
        findings.add(f"drive_{name}_rate", share * 1e9 * rates[write], f"a file of {effort.file:,} bytes in {folder}")
    return findings


def median_of(rows: list[Measured]) -> Measured:
    """Of each constant the median over the ranks; texts and details are the first rank's."""
    first = rows[0]
    middle = {
        name: (statistics.median(row[name] for row in rows if name in row.constants), text)
        for name, (_, text) in first.constants.items()
    }
    return Measured(middle, first.details)
