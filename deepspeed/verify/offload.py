"""The offload gate: states on the device, in host memory and on a drive give the same training to the last bit.

Every *tier* trains the model of a cell for some steps; after each step every rank takes a digest of the losses, the
full parameters, the fp32 masters and all optimizer slots. The first tensor that differs without offload is named.
"""

import argparse
from dataclasses import replace

import torch.distributed as dist

from deepspeed.config import load_config
from deepspeed.verify.common import Printout, config_of
from deepspeed.verify.ranks import RankPool, scratch
from deepspeed.verify.runs import ADAMW, Digests, Setup, full_states, seed_everything, train_case, user_setup


def _built_in(stage: int, dtype: str) -> Setup:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 20}
    config = {"zero_optimization": zero, "bf16": {"enabled": dtype == "bf16"}, "optimizer": ADAMW}
    return Setup(f"stage {stage} {dtype}", "plain", config)


def train_tier(setup: Setup, place: str, steps: int) -> list[Digests]:
    """Train on the ranks of this process group; the digests after each step. Collective."""
    case = setup.case()
    engine = setup.start(case, place, 5)
    digests = []
    for step in range(steps):
        seed_everything(1000 * step + dist.get_rank())  # whatever a tier drew
        losses = train_case(engine, case, range(step * case.accumulation, (step + 1) * case.accumulation))
        digests.append({"the losses": repr(losses), **full_states(engine)})
    engine.destroy()
    return digests


def first_difference(base: list[list[Digests]], other: list[list[Digests]]) -> str:
    """Where two runs part, by rank, step and tensor; empty when they agree to the last bit."""
    for step, _ in enumerate(base[0]):
        for rank, (ours, theirs) in enumerate(zip(other, base, strict=True)):
            for name, wanted in theirs[step].items():
                if ours[step].get(name) != wanted:
                    return f"{name} differs after step {step + 1} on rank {rank}"
    return ""


def run(options: argparse.Namespace, report: Printout) -> int:
    """Run ``ds_verify offload``; raises ValueError (bad input) before any rank is started."""
    config, model = config_of(options), options.model
    given = [user_setup(model or "plain", config, stage=3)] if model or config else []
    setups = given or [_built_in(stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
    for setup in setups:
        load_config(replace(setup, tier="none").settings(""), world_size=1)  # reported before any rank starts
    with scratch() as temporary, RankPool(options.ranks, time_limit=options.time_limit) as pool:

        def states(setup: Setup, tier: str) -> list[list[Digests]]:
            return pool.run(train_tier, replace(setup, tier=tier), options.folder or temporary, options.steps)

        def check(base: list[list[Digests]], setup: Setup, tier: str) -> tuple[str, str]:
            return "equal to the last bit", first_difference(base, states(setup, tier))

        for setup in setups:
            base = states(setup, "none")
            for tier in ("cpu", "nvme"):
                report.row(f"{setup.model:<24}  {setup.label:<14}  {tier:<4}", check, base, setup, tier)
    return report.end(f"{len(setups)} configurations on {options.ranks} ranks, {options.steps} steps each", "all equal")
