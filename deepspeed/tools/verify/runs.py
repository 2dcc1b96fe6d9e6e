"""Runs that are compared bit for bit: a model under a configuration, and digests of all that decides how it goes on."""

import copy
import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.accelerator.device import map_tensors
from deepspeed.checkpoint.foreign.weights import compute_dtype
from deepspeed.comm.collectives import gather_objects
from deepspeed.monitor.monitor import WRITERS
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import SAMPLES, Case, MicroBatch
from deepspeed.tools.verify.user_model import case_of
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
Digests = dict[str, str]  # name -> equal for equal bits
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@dataclass(frozen=True)
class Setup:
    """Model (a case's name or ``module:build``) under ``config``; one row of a report.

    States rest on ``tier`` ("none", "cpu" or "nvme"; None: as configured). ``cut``: micro-batches of an open window at
    a save.
    """

    label: str
    model: str
    config: dict[str, Any]
    cut: int = 0
    tier: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the model while it trains."""
        return compute_dtype({"config": self.config})

    def case(self) -> Case:
        """Return the model and its data, whose batches are in the dtype of the model."""
        case, dtype = case_of(self.model, self.config), self.dtype

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return case if dtype == torch.float32 else replace(case, batch=lambda at: map_tensors(case.batch(at), cast))

    def settings(self, folder: str) -> dict[str, Any]:
        """Return the configuration without what records a real run; ``folder`` is for states on a drive."""
        config = {"train_micro_batch_size_per_gpu": SAMPLES, **copy.deepcopy(self.config)}
        for key in ("train_batch_size", "memory", "observe", "flops_profiler", *WRITERS):
            config.pop(key, None)
        if not isinstance(config.get("gradient_accumulation_steps"), int):
            config["gradient_accumulation_steps"] = 1
        if self.tier is not None:
            zero = config["zero_optimization"]
            place = {"device": self.tier, "nvme_path": folder}
            zero |= {"offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
            zero.setdefault("sub_group_size", 4096)  # several tiles also in a small model
            if zero["stage"] != 3:
                del zero["offload_param"]
        return config

    def start(self, case: Case, folder: str, seed: int) -> Any:
        """Start an engine of a fresh model. Collective."""
        model = case.build().train()
        seed_everything(seed + dist.get_rank())
        return deepspeed.initialize(model=model, config=self.settings(folder))[0]

    def train(self, engine: Any, case: Case, updates: range, *, alike: bool = False) -> list[float]:
        """Train these updates and return their losses. Collective."""
        numbers = range(updates.start * case.accumulation, updates.stop * case.accumulation)
        return train_case(engine, case, numbers, alike=alike)


def user_setup(model: str, config: dict[str, Any], *, stage: int) -> Setup:
    """Take the user's model and configuration, which may leave the stage and the optimizer open."""
    zero = config.get("zero_optimization")
    zero = {"stage": stage, **(zero if isinstance(zero, dict) else {})}
    zero["stage"] = zero["stage"] or stage
    return Setup(f"stage {zero['stage']}", model, {"optimizer": ADAMW, **config, "zero_optimization": zero})


def seed_everything(seed: int) -> None:
    """Seed every generator that a checkpoint restores."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train_case(engine: Any, case: Case, numbers: Iterable[int], *, alike: bool = False) -> list[float]:
    """Train on these micro-batches; return losses. ``alike``: samples and draws are those of any number of ranks."""
    rank, world = (0, 1) if alike else (dist.get_rank(), dist.get_world_size())
    values = []
    for number in numbers:
        place = MicroBatch(*divmod(number, case.accumulation), rank, world)
        losses = case.seeded_loss(engine, place) if alike else case.loss(engine, case.batch(place), place)
        values += [float(loss.detach()) for loss in losses]
        random.random()
        np.random.rand()
        case.backward(losses, engine.backward)
        engine.step()
    return values


def digest(value: Tensor) -> str:
    """Return a text that is equal for equal bits."""
    content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def hash_of(value: Any) -> str:
    """Return one short hash of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _text(value: Any) -> str:
    """Write every bit of a plain value."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {digest(value)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(_text(v) for v in value)})"
    return value.hex() if isinstance(value, float) else repr(value)


def _params(engine: Any) -> Digests:
    """Digest full parameters and fp32 masters. Collective."""
    masters = {f"{n} (fp32 master)": safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    both = full_parameters(engine.module) | masters
    return {name: digest(value) for name, value in both.items() if value is not None}


def _alike(engine: Any) -> dict[str, Digests]:
    """Digest, by field, what every rank has: options of the groups, rates and schedule, counters."""
    optimizer, schedule = engine.basic_optimizer, engine.lr_scheduler
    groups = optimizer.param_groups if optimizer is not None else []
    options = {f"{k} of group {i}": _text(v) for i, g in enumerate(groups) for k, v in g.items() if k != "params"}
    rates = {"learning rates": _text(engine.get_lr() if optimizer is not None else [])}
    if schedule is not None and hasattr(schedule, "state_dict"):
        rates["schedule"] = _text(schedule.state_dict())
    counters = {name: repr(getattr(engine, name)) for name in _COUNTERS}
    scale = {"loss scale": _text(engine._scaler.state_dict()), "gradient norm": _text(engine.get_global_grad_norm())}
    return {"opt": options, "lr": rates, "scaler": counters | scale}


def _spans(view: Any) -> Iterable[tuple[str, int, int]]:
    """Yield name, begin and end, within ``view``, of the parameters that it has a part of."""
    for s in view.unit.layout.segments:
        if max(s.offset, view.start) < min(s.stop, view.stop):
            yield s.name, max(s.offset, view.start) - view.start, min(s.stop, view.stop) - view.start


def _local_slots(engine: Any) -> Digests:
    """Digest this rank's part of every slot, without the padding between parameters, and what belongs to none."""
    optimizer, texts = engine.basic_optimizer, {}
    for view in engine._views if optimizer is not None else ():
        with engine.runtime.attached(view):
            for slot, value in optimizer.state.get(view.param, {}).items():
                if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == view.stop - view.start:
                    value = torch.cat([value[:0], *(value[begin:end] for _, begin, end in _spans(view))])
                texts[f"{slot} of {view.name} from {view.start} on"] = _text(value)
    state = optimizer.state if optimizer is not None else {}
    return texts | {f"state[{k!r}]": _text(v) for k, v in state.items() if not isinstance(k, Tensor)}


def snapshot(engine: Any) -> dict[str, Digests]:
    """Digest, by field, all that decides how training goes on, as this rank sees it. Collective."""
    arrays = [np.asarray(part).tolist() for part in np.random.get_state()]
    alike = _alike(engine)
    return alike | {
        "params": _params(engine) | {name: digest(value) for name, value in engine.module.named_buffers()},
        "opt": _local_slots(engine) | alike["opt"],
        "rng": {"torch": digest(torch.get_rng_state()), "numpy": hash_of(arrays), "python": hash_of(random.getstate())},
    }


def full_states(engine: Any) -> Digests:
    """Digest every parameter, fp32 master and optimizer slot, whole. Collective."""
    states = [state for key, state in engine.basic_optimizer.state.items() if isinstance(key, Tensor)]
    local = {slot for state in states for slot, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    digests, slots = _params(engine), sorted(set().union(*gather_objects(local, engine.mesh.job)))
    for name, param in engine.module.named_parameters():
        full = {slot: safe_get_full_optimizer_state(param, slot) for slot in slots}
        digests |= {f"{name} ({slot})": digest(value) for slot, value in full.items() if value is not None}
    return digests


def whole_state(engine: Any) -> Digests:
    """Digest ``full_states`` and all else that does not depend on the layout: numbers, groups, counters. Collective."""
    numbers: Digests = {}
    for view in engine._views:
        for slot, value in engine.basic_optimizer.state.get(view.param, {}).items():
            if isinstance(value, (int, float)) or isinstance(value, Tensor) and not value.dim():
                numbers |= {f"{slot} of {name}": _text(value) for name, _, _ in _spans(view)}
    local = {**full_states(engine), **numbers}
    for part in _alike(engine).values():
        local |= part
    state: Digests = {}
    for rank, part in enumerate(gather_objects(local, engine.mesh.job)):
        for name, text in part.items():
            if state.setdefault(name, text) != text:
                state[f"{name} on rank {rank}"] = text
    return dict(sorted(state.items()))


def differing(wanted: Digests, other: Digests) -> list[str]:
    """List the names whose digests differ, in order."""
    return [name for name in dict.fromkeys((*wanted, *other)) if wanted.get(name) != other.get(name)]
