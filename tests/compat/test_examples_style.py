"""A script in the style of DeepSpeedExamples: argparse, a configuration file, training_data, collate_fn, getters, leaf
modules.

Needs no client, so it runs everywhere.
"""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
from deepspeed.utils import RepeatingLoader, set_z3_leaf_modules
from tests.compat.common import LR, apart, mean_over_ranks, weights_apart, whole, write_json, zero_block
from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(120)
ROWS, STEPS, ACCUMULATE = 12, 5, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net(x))


class Router(nn.Module):
    """Runs one expert or the other, depending on the data: ranks take different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(), Expert()])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[int(x.sum() > 0)](x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.router = Router()
        self.last = nn.Linear(10, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.router(self.first(x))) - y).square().mean()


class Rows(Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        self.x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(9))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "x": self.x[index], "y": self.x[index].sum(0, keepdim=True).cos()}


def collate(items: list[dict[str, Any]]) -> tuple[list[int], Tensor, Tensor]:
    return [i["index"] for i in items], torch.stack([i["x"] for i in items]), torch.stack([i["y"] for i in items])


def arguments(path: str) -> argparse.Namespace:
    """What the launcher and the user put on the command line."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args(["--deepspeed", "--deepspeed_config", path, "--local_rank", str(dist.get_rank())])


def make() -> Net:
    torch.manual_seed(6)
    return Net()


def script(folder: str, stage: int, leaf: str) -> dict[str, Any]:
    deepspeed.init_distributed()
    config = {
        "train_batch_size": 2 * ACCUMULATE * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 2000,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "optimizer": {"type": "Adam", "params": {"lr": LR, "betas": [0.8, 0.999], "eps": 1e-2, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": LR, "warmup_num_steps": 2}},
        "zero_optimization": zero_block(stage),
    }
    args = arguments(write_json(folder, config))
    net = make()
    if leaf:
        set_z3_leaf_modules(net, ["Router"] if leaf == "name" else [Router])
    estimate_zero2_model_states_mem_needs_all_live(net, num_gpus_per_node=2, num_nodes=1)
    estimate_zero3_model_states_mem_needs_all_live(net, num_gpus_per_node=2, num_nodes=1)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=Rows(), collate_fn=collate
    )
    device = torch.device(get_accelerator().device_name(), engine.local_rank)
    facts = {
        "accumulation": engine.gradient_accumulation_steps() == ACCUMULATE,
        "batch": engine.train_batch_size() == config["train_batch_size"]
        and engine.train_micro_batch_size_per_gpu() == 2,
        "half": not engine.fp16_enabled() and not engine.bfloat16_enabled(),
        "schedule": engine.lr_scheduler is schedule and engine.training_dataloader is loader,
        "leaf": not leaf or net.router._z3_leaf,
        "device": device.type == engine.device.type,
    }
    batches = iter(RepeatingLoader(loader))
    losses, seen = [], []
    for _ in range(STEPS * ACCUMULATE):
        indices, x, y = next(batches)
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        seen.append(indices)
    facts["counters"] = engine.global_steps == STEPS and engine.micro_steps == STEPS * ACCUMULATE
    rates = [group["lr"] for group in optimizer.param_groups]
    facts["rate"] = rates == schedule.get_last_lr() == engine.get_lr() == [LR]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    expected, weights = plain(everyone)
    result = {"facts": facts, "loss": apart(mean_over_ranks(losses), expected), "weights": weights_apart(net, weights)}
    engine.destroy()
    return result


def plain(seen: list[list[list[int]]]) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps over the rows that every rank saw."""
    model, rows = make(), Rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.8, 0.999), eps=1e-2, weight_decay=3e-7)
    losses = []
    for step in range(STEPS):
        for micro in range(step * ACCUMULATE, (step + 1) * ACCUMULATE):
            parts = [model(*collate([rows[i] for i in rank[micro]])[1:]) for rank in seen]
            (torch.stack(parts).mean() / ACCUMULATE).backward()
            losses.append(float(torch.stack(parts).detach().mean()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        # Two steps at the minimum, then the maximum: the logarithmic warmup over two steps.
        optimizer.param_groups[0]["lr"] = LR if step >= 1 else 0.0
    return losses, whole(model)


@pytest.mark.parametrize(("stage", "leaf"), [(0, ""), (1, ""), (2, "class"), (3, ""), (3, "name"), (3, "class")])
@pytest.mark.parametrize("world", [1, 2])
def test_example_script(stage: int, leaf: str, tmp_path: Path, pool: RankPool) -> None:
    for found in pool.run(script, str(tmp_path), stage, leaf, time_limit=60):
        assert all(found["facts"].values()), found["facts"]
        assert found["loss"] < 1e-5 and found["weights"] < 1e-5, found
