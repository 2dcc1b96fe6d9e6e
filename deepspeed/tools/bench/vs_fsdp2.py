"""``ds_bench vs-fsdp2``: the same model trained under ZeRO-3 and by torch's FSDP2, no knobs.

    ds_bench vs-fsdp2 --params 134M --ranks 2

Both compute in bf16 over fp32 weights with AdamW, a unit per block, on CPU ranks of this machine. They take turns, each
in fresh processes. Printed are medians of the steps, samples a second, and the growth of memory.
"""

import argparse
import importlib
import statistics
from typing import Any

import torch

from deepspeed.monitor import hostmem
from deepspeed.monitor.program import size
from deepspeed.tools.bench.common import titled
from deepspeed.tools.bench.trained import batch_for, blocks, engine_for, on_ranks, passes, together

_FSDP = "torch.distributed.fsdp"
CONTENDERS = ("ZeRO-3", "FSDP2")


def _ours(plan: argparse.Namespace) -> Any:
    engine, x = engine_for(plan, 3)

    def step() -> None:
        passes(engine, x)
        engine.step()

    return step


def _theirs(plan: argparse.Namespace) -> Any:
    model = blocks(plan.params)
    fsdp = importlib.import_module(_FSDP)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model:
        fsdp.fully_shard(block, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = batch_for(model, plan.rows, torch.device("cpu"))

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def on_rank(plan: argparse.Namespace, who: str) -> tuple[list[float], int]:
    """Run in a rank: return the seconds of the steps, and the bytes by which its memory grew at most."""
    importlib.import_module(_FSDP)  # its own memory does not count
    before = hostmem.rss_bytes()
    step = _ours(plan) if who == CONTENDERS[0] else _theirs(plan)
    return [together(step) for _ in range(plan.steps)], hostmem.peak_rss_bytes() - before


def measure(plan: argparse.Namespace) -> dict[str, Any]:
    """Return medians over all rounds by contender. Raises UsageError, DeepSpeedError."""
    seconds: dict[str, list[float]] = {who: [] for who in CONTENDERS}
    grew: dict[str, list[int]] = {who: [] for who in CONTENDERS}
    for turn in range(plan.rounds):
        for who in CONTENDERS[:: -1 if turn % 2 else 1]:
            ranks = on_ranks(on_rank, plan, who)
            seconds[who] += ranks[0][0]
            grew[who].append(max(bytes_ for _, bytes_ in ranks))
    return {
        who: {
            "step_s": (median := statistics.median(seconds[who])),
            "samples_per_s": plan.rows * plan.ranks / median,
            "grew_bytes": statistics.median(grew[who]),
        }
        for who in CONTENDERS
    }


def as_text(facts: dict[str, Any], plan: argparse.Namespace) -> str:
    rows: list[list[str | float]] = [["", "seconds a step", "samples/s", "memory grew by"]]
    rows += [[who, f["step_s"], f"{f['samples_per_s']:.1f}", size(f["grew_bytes"])] for who, f in facts.items()]
    ours, theirs = (facts[who] for who in CONTENDERS)
    ratios = [ours[key] / theirs[key] for key in ("step_s", "samples_per_s", "grew_bytes")]
    rows.append(["ours / theirs", *(f"{ratio:.3f}" for ratio in ratios)])
    return titled(f"about {plan.params:,} parameters on {plan.ranks} CPU ranks, bf16, AdamW", rows)
