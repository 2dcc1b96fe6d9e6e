"""The offload gate: the same training with states on the device, in host memory and on a drive must agree to the last
bit.

Every *tier* trains the model of a cell for some steps; after each step every rank takes a digest of the losses, the
full parameters, the fp32 masters and all optimizer slots. The first tensor that differs from the run without offload is
named.
"""

import copy
import hashlib
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.config import load_config
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.verify.grads import engine_backward, full_parameters
from deepspeed.verify.models import SAMPLES, Case, Place, case_named
from deepspeed.verify.ranks import RankFailure, RankPool
from deepspeed.verify.user_model import load_user_case

STEPS = 20
TIERS = ("cpu", "nvme")
Digests = list[dict[str, str]]
_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


@dataclass(frozen=True)
class OffloadCell:
    """A model (a case's name or ``module:build``) under ``config``; one row of the report."""

    model: str
    config: dict[str, Any]
    label: str


def built_in_cells() -> list[OffloadCell]:
    """A small model in fp32 and bf16 under each stage that shards."""
    cells = []
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16"):
            zero = {"stage": stage, "stage3_param_persistence_threshold": 20}
            config = {"zero_optimization": zero, "bf16": {"enabled": dtype == "bf16"}, "optimizer": _ADAMW}
            cells.append(OffloadCell("plain", config, f"stage {stage} {dtype}"))
    return cells


def user_cell(model: str, config: dict[str, Any]) -> OffloadCell:
    """The user's model under the user's configuration; without a stage that shards, stage 3."""
    config = copy.deepcopy(config)
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or not zero.get("stage"):
        config["zero_optimization"] = {**(zero if isinstance(zero, dict) else {}), "stage": 3}
    config.setdefault("optimizer", _ADAMW)
    return OffloadCell(model, config, f"stage {config['zero_optimization']['stage']}")


def tier_config(cell: OffloadCell, tier: str, folder: str, accumulation: int) -> dict[str, Any]:
    """The cell's configuration with all that can move resting on ``tier`` ("none", "cpu" or "nvme")."""
    config = copy.deepcopy(cell.config)
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


def digest(value: Tensor) -> str:
    """Equal for equal bits."""
    return hashlib.sha256(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _slot_names(engine: Any) -> list[str]:
    """Keys of tensor slots, the same list on every rank."""
    states = [s for key, s in engine.basic_optimizer.state.items() if isinstance(key, Tensor)]
    mine = sorted({k for s in states for k, v in s.items() if isinstance(v, Tensor) and v.dim() > 0})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sorted({name for names in everyone for name in names})


def full_states(engine: Any, losses: list[float]) -> dict[str, str]:
    """Digests of the losses and of every parameter, fp32 master and optimizer slot, whole. Collective."""
    found = {"the losses": repr(losses)}
    named: dict[str, nn.Parameter] = dict(engine.module.named_parameters())
    found |= {name: digest(value) for name, value in full_parameters(engine.module).items()}
    slots = _slot_names(engine)
    for name, param in named.items():
        master = safe_get_full_fp32_param(param)
        if master is None:
            continue
        found[f"{name} (fp32 master)"] = digest(master)
        for slot in slots:
            value = safe_get_full_optimizer_state(param, slot)
            if value is not None:
                found[f"{name} ({slot})"] = digest(value)
    return found


def case_of(cell: OffloadCell) -> Case:
    """The case of a cell, its batches in the dtype of the model."""
    case = load_user_case(cell.model, cell.config) if ":" in cell.model else case_named(cell.model)
    if not any((cell.config.get(block) or {}).get("enabled") for block in ("bf16", "fp16")):
        return case
    dtype = torch.bfloat16 if (cell.config.get("bf16") or {}).get("enabled") else torch.float16
    batch = case.batch
    return replace(case, batch=lambda place: _cast(batch(place), dtype))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    return type(value)(_cast(v, dtype) for v in value) if isinstance(value, (tuple, list)) else value


def train_tier(cell: OffloadCell, tier: str, folder: str, steps: int) -> Digests:
    """Train on the ranks of this process group; the digests after each step. Collective."""
    case = case_of(cell)
    engine = deepspeed.initialize(
        model=case.build().train(), config=tier_config(cell, tier, folder, case.accumulation)
    )[0]
    found: Digests = []
    for step in range(steps):
        losses = []
        for micro in range(case.accumulation):
            for loss in (now := case.seeded_loss(engine, Place(step, micro, dist.get_rank(), dist.get_world_size()))):
                losses.append(float(loss.detach()))
            engine_backward(engine, case, now)
            engine.step()
        found.append(full_states(engine, losses))
    engine.destroy()
    return found


def first_difference(base: list[Digests], other: list[Digests]) -> str:
    """Where two runs part, by rank, step and tensor; empty when they agree to the last bit."""
    for step, _ in enumerate(base[0]):
        for rank, (ours, theirs) in enumerate(zip(other, base, strict=True)):
            for name, wanted in theirs[step].items():
                if ours[step].get(name) != wanted:
                    return f"{name} differs after step {step + 1} on rank {rank}"
    return ""


def check_cell(
    pool: RankPool, cell: OffloadCell, *, steps: int, folder: str | None, time_limit: float
) -> dict[str, str]:
    """Tier -> what is wrong, empty when it agrees with the run without offload."""
    load_config(
        tier_config(cell, "none", "", 1), world_size=1
    )  # a fault of the configuration is said before any rank starts
    with tempfile.TemporaryDirectory(prefix="ds_verify_") as own:
        place = folder or own
        base = pool.run(train_tier, cell, "none", place, steps, time_limit=time_limit)
        found = {}
        for tier in TIERS:
            try:
                found[tier] = first_difference(
                    base, pool.run(train_tier, cell, tier, place, steps, time_limit=time_limit)
                )
            except RankFailure as failure:
                found[tier] = str(failure)
    return found
