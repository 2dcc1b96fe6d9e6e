"""``ds_bench stream``: what whole weights out of a running engine cost, as an inference server gets them.

    ds_bench stream --params 134M --ranks 2
    ds_bench stream --params 134M --ranks 4 --zero 2 --max-bytes 64M

Timed are engine.stream_weights() to the first rank and to all, beside the least that there is for one rank: every other
rank sends its part in one message. Printed are medians, what the links carried a second, and how many times the least a
stream takes. Where no parameter is sharded nothing travels. CPU ranks of this machine, bf16.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm
from deepspeed.monitor.program import size
from deepspeed.tools.bench.common import titled
from deepspeed.tools.bench.trained import engine_for, on_ranks, together

WAYS = ("to one rank", "to all ranks", "messages to one rank")


def on_rank(plan: argparse.Namespace) -> dict[str, Any]:
    """Run in a rank: return median seconds of each way, and the bytes of all weights."""
    engine, _ = engine_for(plan, plan.level)
    rank, ranks = comm.get_rank(), comm.get_world_size()
    numel = sum(p.numel() for p in engine.module.parameters())
    part = torch.ones(-(-numel // ranks), dtype=torch.bfloat16)

    def stream(dst: int | None) -> Callable[[], Any]:
        return lambda: [None for _ in engine.stream_weights(plan.max_bytes, dst=dst)]

    def messages() -> None:
        for source in range(1, ranks):
            if rank == source:
                comm.send(part, 0)
            elif rank == 0:
                comm.recv(part, source)

    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(plan.steps):
        for name, work in zip(WAYS, (stream(0), stream(None), messages), strict=True):
            seconds[name].append(together(work))
    engine.destroy()
    return {"params": numel, "bytes": 2 * numel, "seconds": {n: statistics.median(v) for n, v in seconds.items()}}


def measure(plan: argparse.Namespace) -> dict[str, Any]:
    """Return the first rank's measurements, and what follows. Raises UsageError, DeepSpeedError."""
    facts = on_ranks(on_rank, plan)[0]
    travels = facts["bytes"] * (plan.ranks - 1) / plan.ranks
    of_least = {name: s / facts["seconds"][WAYS[2]] for name, s in facts["seconds"].items()}
    return {**facts, "bytes_to_one": travels if plan.level == 3 else 0, "bytes_of_messages": travels, "ratio": of_least}


def as_text(facts: dict[str, Any], plan: argparse.Namespace) -> str:
    seconds = facts["seconds"]
    carried = dict(zip(WAYS, (facts["bytes_to_one"], facts["bytes"] if plan.level == 3 else 0), strict=False))
    rows: list[list[str | float]] = [["", "seconds", "bytes that travel", "GB/s", "of the least"]]
    for name in WAYS:
        travels = carried.get(name, facts["bytes_of_messages"])
        rows.append([name, seconds[name], size(travels), travels / seconds[name] / 1e9, f"{facts['ratio'][name]:.2f}"])
    head = f"{facts['params']:,} parameters in bf16 on {plan.ranks} ranks, ZeRO-{plan.level}"
    return titled(f"{head}, buckets of {size(plan.max_bytes)}", rows)
