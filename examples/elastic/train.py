"""A plain training loop that may be stopped, and go on with another number of ranks, at any moment.

    deepspeed --elastic_training --min_ranks 2 --max_ranks 4 --num_gpus 4 examples/elastic/train.py --folder ckpt
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 ... examples/elastic/train.py --folder ckpt

Its 300 updates take ten seconds where nobody disturbs them. What makes it so: the elasticity block (one
global batch for many numbers of ranks), the loader that ``initialize`` makes from ``training_data``, and
``take_part``.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import deepspeed
import deepspeed.comm as dist
from deepspeed.elasticity import take_part

CONFIG = {
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": 96,  # samples per update, on any number of ranks: 1 to 4, or 1 to 4 nodes of 8
        "micro_batch_sizes": [2, 3, 12, 24, 48],
        "min_gpus": 1,
        "max_gpus": 32,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 300, "warmup_num_steps": 20}},
    "zero_optimization": {"stage": 3},
    "checkpoint": {"keep_last": 2, "emergency_deadline": 25},
}


class Curve(Dataset[Any]):
    """Samples of a function to learn; the same for the same number."""

    def __len__(self) -> int:
        return 4800

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(number))
        return x, x.square().sum().sin().view(1)


def train(folder: str, updates: int) -> float:
    """Train up to ``updates`` updates in all, from wherever ``folder`` says; the last loss of this rank."""
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
    engine, _, loader, _ = deepspeed.initialize(model=model, config=CONFIG, training_data=Curve())
    state = take_part(engine, folder, every=20)  # loads, saves every 20 updates, and when a signal asks for it
    state["starts"] = state.get("starts", 0) + 1
    last = float("nan")
    while engine.global_steps < updates:
        for x, y in loader:  # the rest of the epoch, after a restart
            loss = nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            last = loss.item()
            if engine.global_steps >= updates:
                break
    if dist.get_rank() == 0:
        print(
            f"{engine.global_steps} updates, {state['starts']} start(s), {dist.get_world_size()} ranks, loss {last:.4f}"
        )
    engine.destroy()
    return last


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    parser.add_argument("--folder", default="ckpt", help="for checkpoints, shared by all ranks")
    parser.add_argument("--updates", type=int, default=300)
    arguments = parser.parse_args()
    train(arguments.folder, arguments.updates)
