"""One rank of benchmarks/sequences.py, by whatever package ``deepspeed`` is: seconds of a step of a cut sequence."""

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return causal attention of [batch, length, heads, width]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Attention over all ranks' tokens, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention: DistributedAttention | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [batch, part of length, width], further."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        assert self.attention is not None
        x = x + self.out(self.attention(q, k, v, 0).flatten(2))
        return x + self.down(F.gelu(self.up(self.inner_norm(x))))


def main() -> None:
    """Print a line of JSON from the first rank."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    ways = dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": case["batch"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": case["stage"]},
        "sequence_parallel_size": ways,
        "data_parallel_size": 1,
    }
    model = nn.Sequential(*(Block(case["width"], case["heads"]) for _ in range(case["layers"])))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    group = groups._get_sequence_parallel_group()
    assert dist.get_world_size(group) == ways
    for block in model:
        block.attention = DistributedAttention(attend, group, 2, 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(case["batch"], case["length"] // ways, case["width"], generator=generator)
    seconds, busy, losses = [], [], []
    for _ in range(case["steps"]):
        dist.barrier()
        begun, used = time.perf_counter(), time.process_time()
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        busy.append(time.process_time() - used)
        losses.append(float(loss.detach()))
    if dist.get_rank() == 0:
        found = {"step_s": statistics.median(seconds[3:]), "cpu_s": statistics.median(busy[3:])}
        print(json.dumps({**found, "losses": [losses[0], losses[-1]], "package": deepspeed.__file__}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
