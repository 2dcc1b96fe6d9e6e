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
from deepspeed.bench.trained import add_training, engine_for, on_ranks, timed
from deepspeed.observe.program import CommandLine, columns
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state


def on_rank(plan: argparse.Namespace) -> dict[str, Any]:
    """In a rank: median seconds of each way of reading, and the bytes of all gradients."""
    engine, x = engine_for(plan, plan.level)
    params = list(engine.module.parameters())
    numel = sum(p.numel() for p in params)

    def weights() -> None:
        with deepspeed.zero.GatheredParameters(params):
            pass

    whole = torch.empty(-(-numel // plan.ranks) * plan.ranks)
    mine = whole.chunk(plan.ranks)[0].clone()
    ways = {
        "gradients": lambda: [safe_get_full_grad(p) for p in params],
        "fp32 weights": lambda: [safe_get_full_fp32_param(p) for p in params],
        "first moments": lambda: [safe_get_full_optimizer_state(p, "exp_avg") for p in params],
        "weights gathered": weights,
        "all-gather": lambda: comm.all_gather_into_tensor(whole, mine),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "step")}
    for _ in range(plan.steps):
        engine.backward(engine(x).float().square().mean())
        for name, read in ways.items():
            comm.barrier()
            seconds[name].append(timed(read, comm.barrier))
        seconds["step"].append(timed(engine.step, comm.barrier))
    engine.destroy()
    return {"params": numel, "seconds": {name: statistics.median(each) for name, each in seconds.items()}}


def _as_text(facts: dict[str, Any], plan: argparse.Namespace) -> str:
    seconds, once = facts["seconds"], facts["seconds"]["all-gather"]
    rows: list[list[str | float]] = [["seconds", "", "of one all-gather in fp32"]]
    rows += [[name, each, f"{each / once:.2f}"] for name, each in seconds.items()]
    head = f"{facts['params']:,} parameters on {plan.ranks} ranks, ZeRO-{plan.level}, bf16, AdamW"
    return "\n".join([head, "", *columns(rows)])


def run(argv: list[str], *, prog: str) -> str | dict[str, Any]:
    """Measure as the command line says; a table, or facts. Raises UsageError, DeepSpeedError, SystemExit."""
    parser = CommandLine(prog=prog, description=__doc__, allow_abbrev=False)
    add_training(parser, params="8M", ranks=2)
    parser.add_argument("--zero", dest="level", type=int, choices=range(4), default=3, help="its level (default 3)")
    plan = parser.parse_args(argv)
    facts = on_ranks(on_rank, plan)[0]
    return facts if plan.json else _as_text(facts, plan)
