"""Small checkpoints without an engine, for the tests of everything that reads them."""

from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.foreign.rewrite import write_checkpoint
from deepspeed.checkpoint.load.source import Described
from deepspeed.zero.regions import Region

SHAPES = {"emb.weight": (13, 6), "l1.weight": (7, 6), "l1.bias": (7,), "l2.weight": (6, 7), "one": ()}
CONFIG = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


class Memory:
    """A Source whose tensors are in memory."""

    kind = "memory"

    def __init__(self, tensors: dict[tuple[str, str], torch.Tensor], facts: dict[str, Any]) -> None:
        self.path, self.tensors, self.facts = Path("memory"), tensors, facts

    @property
    def entries(self) -> dict[tuple[str, str], Described]:
        return {k: Described(t.dtype, tuple(t.shape)) for k, t in self.tensors.items()}

    def read(self, key: tuple[str, str], out: torch.Tensor, *, start: int = 0, region: Region | None = None) -> None:
        values = self.tensors[key]
        if region is not None:
            values = values[tuple(slice(s, s + n) for s, n in zip(*region, strict=True))]
        out.copy_(values.reshape(-1)[start : start + out.numel()])

    def close(self) -> None:
        pass


def sample(*, seed: int = 1, config: dict[str, Any] | None = None, tied: bool = True) -> Memory:
    """Two groups, frozen weights, a buffer, tied weights, Adam's state."""
    g = torch.Generator().manual_seed(seed)
    tensors = {("buffer", "scale"): torch.rand(6, generator=g), ("buffer", "count"): torch.tensor(3)}
    tensors |= {("param", "frozen.weight"): torch.randn(6, 6, generator=g).bfloat16()}
    for state in ("master", "optim.exp_avg", "optim.exp_avg_sq"):
        tensors |= {(state, name): torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    options = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    names = list(SHAPES)
    facts: dict[str, Any] = {
        "engine": {"global_steps": 3, "global_samples": 12, "micro_steps": 3, "skipped_steps": 1},
        "world": {"size": 2},
        "shared": {"head.weight": "emb.weight"} if tied else {},
        "config": CONFIG if config is None else config,
        "optimizer": {
            "type": "AdamW",
            "groups": [
                {"names": names[:2], "options": options},
                {"names": names[2:], "options": {**options, "weight_decay": 0.0}},
            ],
            "scalars": {name: {"step": torch.tensor(3.0)} for name in names},
        },
        "lr_scheduler": {"last_batch_iteration": 2},
        "loss_scaler": {"dynamic": False, "cur_scale": 1.0, "cur_iter": 3},
        "client_state": {"mine": 5, "values": torch.arange(4)},
    }
    return Memory(tensors, facts)


def checkpoint(folder: Path, *, tag: str = "global_step3", **kwargs: Any) -> Path:
    """A complete checkpoint in ``folder``; its tag's folder."""
    return write_checkpoint(sample(**kwargs), folder, tag)
