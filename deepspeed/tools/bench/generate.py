"""``ds_bench generate``: tokens a second of a model that is trained, beside the same without an engine.

    ds_bench generate --params 134M --ranks 2 --tokens 64

A token is a forward of all blocks whose output is the next input, for --rows sequences at once, without a cache. Three
ways: plain PyTorch on a model that every rank has whole; inside engine.unsharded(), which gathers once; and through the
engine, which gathers for every token under ZeRO-3. Seconds to enter and leave unsharded() are a row of their own. CPU
ranks of this machine, bf16, all generating at once.
"""

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.tools.bench.common import titled
from deepspeed.tools.bench.trained import blocks, engine_for, on_ranks, timed

WAYS = ("plain PyTorch", "in unsharded()", "through the engine")


def on_rank(plan: argparse.Namespace) -> dict[str, Any]:
    """Run in a rank: return median seconds of all tokens each way, and of entering and leaving unsharded()."""
    engine, x = engine_for(plan, plan.level)
    plain = blocks(plan.params).bfloat16().eval()
    engine.eval()

    def generate(model: nn.Module) -> None:
        token: Tensor = x
        for _ in range(plan.tokens):
            token = model(token)

    seconds: dict[str, list[float]] = {name: [] for name in (*WAYS, "around it")}
    with torch.no_grad():
        for _ in range(plan.steps):
            comm.barrier()
            seconds[WAYS[0]].append(timed(lambda: generate(plain)))
            comm.barrier()

            def inside() -> None:
                with engine.unsharded() as module:
                    seconds[WAYS[1]].append(timed(lambda: generate(module)))

            whole = timed(inside)
            seconds["around it"].append(whole - seconds[WAYS[1]][-1])
            comm.barrier()
            seconds[WAYS[2]].append(timed(lambda: generate(engine), comm.barrier))
    engine.destroy()
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(plan: argparse.Namespace) -> dict[str, Any]:
    """Return the slowest rank's measurements. Raises UsageError, DeepSpeedError."""
    ranks = on_ranks(on_rank, plan)
    seconds = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    tokens = {name: plan.tokens * plan.rows / seconds[name] for name in WAYS}
    ratio = {name: tokens[name] / tokens[WAYS[0]] for name in WAYS}
    return {"seconds": seconds, "tokens_per_s": tokens, "ratio": ratio}


def as_text(facts: dict[str, Any], plan: argparse.Namespace) -> str:
    seconds, rates, ratio = facts["seconds"], facts["tokens_per_s"], facts["ratio"]
    rows = [(name, seconds[name], f"{rates[name]:.1f}", f"{ratio[name]:.2f}") for name in WAYS]
    head = f"about {plan.params:,} parameters in bf16 on {plan.ranks} ranks, ZeRO-{plan.level}"
    head, around = f"{head}: {plan.tokens} tokens of {plan.rows} sequences", seconds["around it"]
    columns = ("", "seconds", "tokens/s of a rank", "of plain")
    return titled(head, [columns, *rows, ("unsharded(), in and out", around, "", "")])
