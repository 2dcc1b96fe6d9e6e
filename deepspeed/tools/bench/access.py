"""``ds_bench access``: what it costs to read whole gradients, weights and optimizer states of a sharded model.

    ds_bench access --params 134M --ranks 2 --zero 2

Each kind is read tensor by tensor, as deepspeed.utils.safe_get_full_* and deepspeed.zero.GatheredParameters do, beside
one all-gather of as many bytes in one piece. CPU ranks of this machine, bf16, AdamW.
"""

import argparse
import statistics
from typing import Any

import torch

import deepspeed
from deepspeed import comm
from deepspeed.tools.bench.common import titled
from deepspeed.tools.bench.trained import engine_for, on_ranks, passes, together
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state


def on_rank(plan: argparse.Namespace) -> dict[str, Any]:
    """Run in a rank: return the median seconds of each way of reading, and the number of parameters."""
    engine, x = engine_for(plan, plan.level)
    params = list(engine.module.parameters())
    numel = sum(p.numel() for p in params)

    def weights() -> None:
        with deepspeed.zero.GatheredParameters(params):
            pass

    whole = torch.empty(-(-numel // plan.ranks) * plan.ranks)
    shard = whole.chunk(plan.ranks)[0].clone()
    reads = {
        "gradients": lambda: [safe_get_full_grad(p) for p in params],
        "fp32 weights": lambda: [safe_get_full_fp32_param(p) for p in params],
        "first moments": lambda: [safe_get_full_optimizer_state(p, "exp_avg") for p in params],
        "weights gathered": weights,
        "all-gather": lambda: comm.all_gather_into_tensor(whole, shard),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*reads, "step")}
    for _ in range(plan.steps):
        passes(engine, x)
        for name, read in {**reads, "step": engine.step}.items():
            seconds[name].append(together(read))
    engine.destroy()
    return {"params": numel, "seconds": {name: statistics.median(values) for name, values in seconds.items()}}


def measure(plan: argparse.Namespace) -> Any:
    return on_ranks(on_rank, plan)[0]


def as_text(facts: dict[str, Any], plan: argparse.Namespace) -> str:
    seconds, once = facts["seconds"], facts["seconds"]["all-gather"]
    rows = [(name, f"{median:.3g}", f"{median / once:.2f}") for name, median in seconds.items()]
    head = f"{facts['params']:,} parameters on {plan.ranks} ranks, ZeRO-{plan.level}, bf16, AdamW"
    return titled(head, [("seconds", "", "of one all-gather in fp32"), *rows])
