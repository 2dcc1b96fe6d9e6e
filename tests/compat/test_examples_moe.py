"""A script like the CIFAR example of DeepSpeedExamples with ``--moe``: its arguments, its calls, random images.

Needs no client, so it runs everywhere.
"""

import argparse
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from tests.compat.common import apart, write_json
from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(120)
STEPS, BATCH = 4, 4


class Images(Dataset[tuple[Tensor, int]]):
    """Random images, each brighter in the channel of its class."""

    def __len__(self) -> int:
        return 2 * STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index)) / 4
        image[index % 3] += 0.5
        return image, index % 3


def arguments(line: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--moe", default=False, action="store_true")
    parser.add_argument("--ep-world-size", default=1, type=int)
    parser.add_argument("--num-experts", type=int, nargs="+", default=[1])
    parser.add_argument("--mlp-type", type=str, default="standard")
    parser.add_argument("--top-k", default=1, type=int)
    parser.add_argument("--min-capacity", default=0, type=int)
    parser.add_argument("--noisy-gate-policy", default=None, type=str)
    parser.add_argument("--moe-param-group", default=False, action="store_true")
    return deepspeed.add_config_arguments(parser).parse_args(line)


class Net(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 60), nn.Linear(60, 24)
        self.moe_layer_list = nn.ModuleList(
            MoE(
                hidden_size=24,
                expert=nn.Linear(24, 24),
                num_experts=experts,
                ep_size=args.ep_world_size,
                use_residual=args.mlp_type == "residual",
                k=args.top_k,
                min_capacity=args.min_capacity,
                noisy_gate_policy=args.noisy_gate_policy,
            )
            for experts in args.num_experts
        )
        self.fc4 = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x))).view(-1, 16 * 5 * 5)
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        for layer in self.moe_layer_list:
            x, _, _ = layer(x)
        return self.fc4(x)


def script(folder: str, ep: int, stage: int, line: list[str]) -> list[float]:
    """Train as the example does; return the losses of each optimizer step, averaged over the ranks."""
    deepspeed.init_distributed()
    world = dist.get_world_size()
    config = {
        "train_batch_size": 2 * BATCH,
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.8, 0.999], "eps": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
    }
    path = write_json(folder, config)
    moe = ["--moe", "--ep-world-size", str(ep), "--num-experts", "2", "4", "--moe-param-group", *line]
    args = arguments(["--deepspeed", "--deepspeed_config", path, "--local_rank", str(dist.get_rank()), *moe])
    torch.manual_seed(6)
    net = Net(args)
    parameters = list(filter(lambda p: p.requires_grad, net.parameters()))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "parameters"})
    engine, _, loader, _ = deepspeed.initialize(args=args, model=net, model_parameters=groups, training_data=Images())
    torch.manual_seed(dist.get_rank())  # noise and dropped tokens
    losses = []
    for images, labels in loader:
        loss = F.cross_entropy(engine(images.to(engine.local_rank if torch.cuda.is_available() else "cpu")), labels)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    engine.destroy()
    return losses


RESIDUAL = ["--mlp-type", "residual", "--noisy-gate-policy", "RSample", "--min-capacity", "0"]
ROOMY = ["--top-k", "1", "--min-capacity", str(BATCH)]


@pytest.mark.parametrize("stage", [0, 2])
def test_the_example_loses_alike_with_experts_over_ranks(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    """Dropped tokens and noise are drawn alike, as each rank's router sees the same tokens."""
    one, two = (pool2.run(script, str(tmp_path), ep, stage, RESIDUAL, time_limit=60)[0] for ep in (1, 2))
    assert len(one) == STEPS and apart(one, two) < 1e-5 and one[-1] != one[0]


def test_the_example_over_ranks_equals_one_process(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """One process accumulates over the batches of both ranks; no token is dropped."""
    two = pool2.run(script, str(tmp_path), 2, 1, ROOMY, time_limit=60)[0]
    one = pool1.run(script, str(tmp_path), 1, 1, ROOMY, time_limit=60)[0]
    assert apart([(a + b) / 2 for a, b in zip(one[::2], one[1::2], strict=True)], two) < 1e-5
