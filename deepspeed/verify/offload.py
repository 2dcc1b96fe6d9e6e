"""The offload gate: the same training with states on the device, in host memory and on a drive must agree to the last
bit.

Every *tier* trains the model of a cell for some steps; after each step every rank takes a digest of the losses, the
full parameters, the fp32 masters and all optimizer slots. The first tensor that differs from the run without offload is
named.
"""

import argparse
import copy
import hashlib
from dataclasses import dataclass, replace
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.config import load_config
from deepspeed.data.move import map_tensors
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.verify.common import Printout, add_model, add_numbers, check_numbers, command, config_of, folder_of
from deepspeed.verify.grads import engine_backward, full_parameters
from deepspeed.verify.models import SAMPLES, Case, MicroBatch
from deepspeed.verify.ranks import RankFailure, RankPool
from deepspeed.verify.user_model import case_of

STEPS = 20
TIERS = ("cpu", "nvme")
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
Digests = list[dict[str, str]]


@dataclass(frozen=True)
class Setup:
    """A model (a case's name or ``module:build``) under ``config``; one row of a report."""

    label: str
    model: str
    config: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """Of the model while it trains."""
        named = {"bf16": torch.bfloat16, "fp16": torch.float16}
        chosen = [dtype for block, dtype in named.items() if (self.config.get(block) or {}).get("enabled")]
        return chosen[0] if chosen else torch.float32

    def case(self) -> Case:
        """The model and its data, whose batches are in the dtype of the model."""
        case, dtype = case_of(self.model, self.config), self.dtype
        return case if dtype == torch.float32 else replace(case, batch=lambda place: _cast(case.batch(place), dtype))

    def settings(self, tier: str, folder: str, accumulation: int) -> dict[str, Any]:
        """The configuration with all that can move resting on ``tier`` ("none", "cpu" or "nvme")."""
        config = copy.deepcopy(self.config)
        for key in ("train_batch_size", "memory"):
            config.pop(key, None)
        config.setdefault("train_micro_batch_size_per_gpu", SAMPLES)
        config["gradient_accumulation_steps"] = accumulation
        zero = config["zero_optimization"]
        for block in ("offload_optimizer", "offload_param"):
            zero.pop(block, None)
            if tier != "none" and (block == "offload_optimizer" or zero["stage"] == 3):
                zero[block] = {"device": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
        if tier == "nvme":
            zero.setdefault("sub_group_size", 4096)  # several tiles also in a small model
            if "offload_param" in zero:
                zero["offload_param"]["max_in_cpu"] = 0
        return config


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def built_in_setups() -> list[Setup]:
    """A small model in fp32 and bf16 under each stage that shards."""
    setups = []
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16"):
            zero = {"stage": stage, "stage3_param_persistence_threshold": 20}
            config = {"zero_optimization": zero, "bf16": {"enabled": dtype == "bf16"}, "optimizer": ADAMW}
            setups.append(Setup(f"stage {stage} {dtype}", "plain", config))
    return setups


def user_setup(model: str, config: dict[str, Any]) -> Setup:
    """The user's model under the user's configuration; without a stage that shards, stage 3."""
    config = {"optimizer": ADAMW, **copy.deepcopy(config)}
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or not zero.get("stage"):
        config["zero_optimization"] = {**(zero if isinstance(zero, dict) else {}), "stage": 3}
    return Setup(f"stage {config['zero_optimization']['stage']}", model, config)


def digest(value: Tensor) -> str:
    """Equal for equal bits."""
    content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def full_states(engine: Any, losses: list[float]) -> dict[str, str]:
    """Digests of the losses and of every parameter, fp32 master and optimizer slot, whole. Collective."""
    digests = {"the losses": repr(losses)}
    digests |= {name: digest(value) for name, value in full_parameters(engine.module).items()}
    states = [state for key, state in engine.basic_optimizer.state.items() if isinstance(key, Tensor)]
    mine = {slot for state in states for slot, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name, param in engine.module.named_parameters():
        if (master := safe_get_full_fp32_param(param)) is None:
            continue
        digests[f"{name} (fp32 master)"] = digest(master)
        for slot in sorted(set().union(*everyone)):
            if (value := safe_get_full_optimizer_state(param, slot)) is not None:
                digests[f"{name} ({slot})"] = digest(value)
    return digests


def train_tier(setup: Setup, tier: str, folder: str, steps: int) -> Digests:
    """Train on the ranks of this process group; the digests after each step. Collective."""
    case = setup.case()
    config = setup.settings(tier, folder, case.accumulation)
    engine = deepspeed.initialize(model=case.build().train(), config=config)[0]
    digests: Digests = []
    for step in range(steps):
        losses: list[float] = []
        for micro in range(case.accumulation):
            values = case.seeded_loss(engine, MicroBatch(step, micro, dist.get_rank(), dist.get_world_size()))
            losses += [float(loss.detach()) for loss in values]
            engine_backward(engine, case, values)
            engine.step()
        digests.append(full_states(engine, losses))
    engine.destroy()
    return digests


def first_difference(base: list[Digests], other: list[Digests]) -> str:
    """Where two runs part, by rank, step and tensor; empty when they agree to the last bit."""
    for step, _ in enumerate(base[0]):
        for rank, (ours, theirs) in enumerate(zip(other, base, strict=True)):
            for name, wanted in theirs[step].items():
                if ours[step].get(name) != wanted:
                    return f"{name} differs after step {step + 1} on rank {rank}"
    return ""


def add_parser(commands: Any) -> None:
    """Add ``offload`` to the commands of ``ds_verify``."""
    text = "compare training with states on the device, in host memory and on a drive, bit for bit"
    parser = command(commands, "offload", text, __doc__)
    add_model(parser, "the configuration to check it under; its offload blocks are replaced")
    parser.add_argument("--folder", metavar="PATH", help="a folder on the drive (default: a temporary one)")
    add_numbers(parser, ("--ranks", 2, "number of CPU ranks"), ("--steps", STEPS, "optimizer steps per run"))
    add_numbers(parser, ("--time-limit", 300.0, "seconds one run may take"))


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run ``ds_verify offload``; raises ValueError (bad input) before any rank is started."""
    check_numbers(options, "ranks", "steps")
    config, report = config_of(options), Printout(out)
    given = options.model or config
    setups = [user_setup(options.model or "plain", config)] if given else built_in_setups()
    for setup in setups:
        load_config(setup.settings("none", "", 1), world_size=1)  # a fault of it is reported before any rank starts
    with folder_of(options) as folder, RankPool(options.ranks, time_limit=options.time_limit) as pool:
        for setup in setups:
            base = pool.run(train_tier, setup, "none", folder, options.steps)
            for tier in TIERS:
                try:
                    fault = first_difference(base, pool.run(train_tier, setup, tier, folder, options.steps))
                except RankFailure as failure:
                    fault = str(failure)
                report.row(f"{setup.model:<24}  {setup.label:<14}  {tier:<4}", fault, fine="equal to the last bit")
    return report.end(f"{len(setups)} configurations on {options.ranks} ranks, {options.steps} steps each", "all equal")
