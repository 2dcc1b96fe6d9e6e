"""Writes ``reference_checkpoints.tar.xz``: small checkpoints of DeepSpeed 0.19.8 with what they must be read as.

Run with the interpreter of an environment of its own that has the reference package (benchmarks/README.md says how to
make one), outside of this tree, because both packages are imported as ``deepspeed``:

    cd /tmp && DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 <reference>/bin/python
    <tree>/tests/data/make_reference_checkpoints.py OUT [CASE ...]

Without CASE all cases are written. OUT/reference_checkpoints.tar.xz is made of all that are in OUT; copy it beside this
script. A folder per case: ``saved/`` as the reference wrote it (less its scripts), ``expected.npz`` and
``expected.json``: whole fp32 weights, moments and facts taken from the live engine, not from the files.
"""

import json
import sys
import tarfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_reference_parts import run_case

TAG = "global_step3"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cases() -> dict[str, dict[str, Any]]:
    """Case name -> stage, dtype, ranks, optimizer and additional configuration."""
    found: dict[str, dict[str, Any]] = {}

    def add(stage: int, dtype: str, ranks: int, suffix: str = "", **more: Any) -> None:
        name = f"s{stage}_{dtype}_r{ranks}{suffix}"
        found[name] = {"stage": stage, "dtype": dtype, "ranks": ranks, "optimizer": "adamw", **more}

    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            for ranks in (1, 2):
                add(stage, dtype, ranks, universal=ranks == 2 and stage > 0)
        add(stage, "fp16", 2)
    add(1, "bf16", 4)
    add(2, "fp32", 4, universal=True)
    add(3, "bf16", 4, universal=True)
    add(3, "fp32", 3)
    add(0, "fp32", 2, "_sgd", optimizer="sgd")
    add(0, "bf16", 1, "_sgd", optimizer="sgd")
    add(0, "fp16", 1, "_fused", optimizer="fused")
    add(1, "fp32", 2, "_sgd", optimizer="sgd")
    add(3, "bf16", 2, "_sgd", optimizer="sgd")
    add(1, "bf16", 2, "_wrapper", top={"data_types": {"grad_accum_dtype": "fp32"}}, universal=True)
    add(1, "bf16", 4, "_wrapper", top={"data_types": {"grad_accum_dtype": "fp32"}})
    add(2, "bf16", 2, "_round_robin", zero={"round_robin_gradients": True}, universal=True)
    add(1, "fp32", 2, "_elastic", zero={"elastic_checkpoint": True})
    add(3, "fp32", 2, "_subgroups", zero={"sub_group_size": 40}, universal=True)
    add(2, "fp32", 2, "_excluded", exclude=True)
    add(3, "fp32", 2, "_excluded", exclude=True)
    return found


class Tiny(torch.nn.Module):
    """A tied weight, a frozen layer of the shape of a trained one, a parameter of one element, odd sizes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 7)
        self.base = torch.nn.Linear(7, 7)
        self.body = torch.nn.Linear(7, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.base.requires_grad_(False)
        self.register_buffer("table", torch.linspace(0, 1, 7))
        self.register_buffer("count", torch.tensor(41))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.norm(x + torch.tanh(self.body(self.base(x)))) * self.scale + self.table.to(x.dtype)
        return torch.nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def config_for(case: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1000,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case["stage"], **case.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10},
        },
        **case.get("top", {}),
    }
    if case["optimizer"] == "fused":
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    if case["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    if case["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}
    return config


def optimizer_for(case: dict[str, Any], model: Tiny) -> torch.optim.Optimizer:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in trained.values() if p.dim() != 2], "weight_decay": 0.0},
    ]
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


def worker(case: dict[str, Any], out: Path) -> None:
    """One rank: trains three steps, saves, and (rank 0) writes what must be read back."""
    import deepspeed

    # The reference's CPU backend declines fp16, which torch can compute; only the files matter here.
    device = deepspeed.accelerator.get_accelerator()
    device.is_fp16_supported = lambda: True
    device.supported_dtypes = lambda: list(DTYPES.values())
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    model = Tiny()
    chosen = {"model_parameters": [p for p in model.parameters() if p.requires_grad]}
    if case["optimizer"] != "fused":
        chosen = {"optimizer": optimizer_for(case, model)}
    engine, *_ = deepspeed.initialize(model=model, config=config_for(case), **chosen)
    torch.manual_seed(rank + 1)
    for step in range(3):
        for _ in range(2):
            loss = engine(torch.randint(0, 13, (2, 5)))
            engine.backward(loss * (float("inf") if case["dtype"] == "fp16" and step == 1 else 1.0))
            engine.step()
    client = {
        "epoch": 2,
        "history": [0.5, (1, "x"), None],
        "mask": torch.arange(5),
        "numbers": np.arange(3.0),
        "best": np.float32(1.5),
        "args": Namespace(lr=0.1, dtype=torch.bfloat16, size=torch.Size([2, 3])),
    }
    if case.get("universal"):
        client["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.4}
    engine.save_checkpoint(
        str(out / "saved"), client_state=client, exclude_frozen_parameters=case.get("exclude", False)
    )
    tensors = live_tensors(engine, case)
    if rank == 0:
        np.savez_compressed(out / "expected.npz", **{k: to_numpy(v) for k, v in tensors.items()})
        write_facts(engine, case, out / "expected.json")
    torch.distributed.barrier()


def to_numpy(value: torch.Tensor) -> np.ndarray:
    """bf16 as its bits, which numpy has no type for."""
    value = value.detach().cpu()
    return value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()


def slots_of(case: dict[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if case["optimizer"] == "sgd" else ("exp_avg", "exp_avg_sq")


def live_tensors(engine: Any, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """``state|name`` -> whole tensor, by the documented functions for debugging where they apply. Collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, torch.Tensor] = {f"buffer|{n}": b for n, b in engine.module.named_buffers() if n != "scratch"}
    trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    if case["stage"] == 0:
        found |= unsharded(engine, case, trained)
    else:
        if hasattr(
            engine.optimizer, "_hp_optimizer_states_linked"
        ):  # with fp32 the first link can come before there are any states
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, p in trained.items():
            found[f"master|{name}"] = safe_get_full_fp32_param(p).reshape(shape_of(p)).clone()
            for slot in slots_of(case):
                found[f"optim.{slot}|{name}"] = safe_get_full_optimizer_state(p, slot).reshape(shape_of(p)).clone()
    if case.get("zero", {}).get("round_robin_gradients"):
        found |= in_real_order(found, trained, case)
    for name, p in trained.items():  # a master rounded is the weight; otherwise what was dumped is of another parameter
        assert case["stage"] == 3 or torch.equal(found[f"master|{name}"].to(p.dtype), p.data), name
    for name, p in engine.module.named_parameters():
        if not p.requires_grad and case["stage"] == 3:
            with deepspeed.zero.GatheredParameters([p]):
                found[f"param|{name}"] = p.data.clone()
        elif not p.requires_grad:
            found[f"param|{name}"] = p.data
    return found


def shape_of(p: torch.nn.Parameter) -> torch.Size:
    return getattr(p, "ds_shape", p.shape)


def in_real_order(
    found: dict[str, torch.Tensor], trained: dict[str, torch.nn.Parameter], case: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The functions for debugging look for parameters in their first order, but round_robin_gradients has dealt them
    out to the ranks.
    """
    fixed = {}
    for group in ([n for n, p in trained.items() if p.dim() == 2], [n for n, p in trained.items() if p.dim() != 2]):
        dealt = [group[i] for i in sorted(range(len(group)), key=lambda i: i % case["ranks"])]
        for there, real in zip(group, dealt, strict=True):
            for state in ("master", *(f"optim.{s}" for s in slots_of(case))):
                fixed[f"{state}|{real}"] = found[f"{state}|{there}"].reshape(trained[real].shape)
    return fixed


def unsharded(engine: Any, case: dict[str, Any], trained: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Stage 0: the base optimizer's state of each parameter, in the order in which the groups were made."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    order = [n for n, p in trained.items() if p.dim() == 2] + [n for n, p in trained.items() if p.dim() != 2]
    if case["optimizer"] == "fused":
        order = list(trained)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found = {}
    flat = len(held) != len(order)
    if flat:
        pieces = [(trained[n].shape, trained[n].numel()) for n in order]
        for label, pick in (("master", None), *((f"optim.{s}", s) for s in slots_of(case))):
            whole = torch.cat([(p.data if pick is None else optimizer.state[p][pick]).flatten() for p in held])
            cut = whole[: sum(n for _, n in pieces)].split([n for _, n in pieces])
            found |= {f"{label}|{n}": t.reshape(s) for n, t, (s, _) in zip(order, cut, pieces, strict=True)}
        return found
    for name, p in zip(order, held, strict=True):
        found[f"master|{name}"] = p.data
        for slot in slots_of(case):
            found[f"optim.{slot}|{name}"] = optimizer.state[p][slot]
    return found


def write_facts(engine: Any, case: dict[str, Any], path: Path) -> None:
    scale = getattr(engine.optimizer, "cur_scale", getattr(engine.optimizer, "loss_scale", None))
    facts = {
        "case": case,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "lr": engine.get_lr(),
        "loss_scale": scale,
        "bf16_names": [n for n, b in engine.module.named_buffers() if b.dtype == torch.bfloat16]
        + [n for n, p in engine.module.named_parameters() if not p.requires_grad and p.dtype == torch.bfloat16],
    }
    path.write_text(json.dumps(facts, default=lambda v: v.item(), indent=1))


def main(out: Path, names: list[str]) -> None:
    chosen = {n: c for n, c in cases().items() if not names or n in names}
    for name, case in chosen.items():
        universal = bool(case.get("universal"))
        run_case(out / name, case["ranks"], json.dumps(case), script=__file__, tag=TAG, universal=universal)
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
    with tarfile.open(out / "reference_checkpoints.tar.xz", "w:xz", preset=9) as archive:
        for name in filter(lambda n: (out / n / "expected.json").is_file(), cases()):
            archive.add(out / name, name)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(json.loads(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]).resolve(), sys.argv[2:])
