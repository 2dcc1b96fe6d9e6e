"""Pipelines whose stages take the same time, on a machine whose links take none: what the formulas are about."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.links import Links
from deepspeed.pipe.orders import chunks_and_style
from deepspeed.tools.simulate.costs import Machine, load_machine
from deepspeed.tools.simulate.models import Subject
from deepspeed.tools.simulate.run import RankJob

WIDTH, TOKENS = 8192, 65536
LAYERS = 3  # of a chunk
ROW = 2 * TOKENS * WIDTH  # bytes of one activation
WEIGHT = WIDTH * WIDTH  # parameters of a layer


class Widen(nn.Module):
    """The first layer: what it is given is small, as tokens are; its gradient is wanted, as that of any other."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_().expand(-1, WIDTH)


class Square(nn.Linear):
    """A product; its forward and both halves of its backward take the same time."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)


class _Free(torch.autograd.Function):
    """A loss that takes no time, and whose gradient takes none."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.shape = output.shape
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(torch.bfloat16).expand(ctx.shape)


def free_loss(output: Tensor, _: Tensor) -> Tensor:
    loss: Tensor = _Free.apply(output)
    return loss


def equal_parts(stages: int, chunks: int, style: str) -> Subject:
    """``LAYERS`` products in every chunk."""
    layers = [LayerSpec(Widen), *(LayerSpec(Square) for _ in range(stages * chunks * LAYERS))]

    def build() -> nn.Module:
        return PipelineModule(layers, num_stages=stages, loss_fn=free_loss, chunks_per_stage=chunks, chunk_style=style)

    def batch(_: nn.Module, __: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(TOKENS, 1, device="sim", dtype=torch.bfloat16), torch.zeros(1, device="sim")

    return Subject("equal parts", build, batch, lambda output, _: output)


def machine() -> Machine:
    h100 = load_machine("h100")
    quick = {name: 1e16 for name in ("node_rate", "network_rate")}
    quick |= {name: 1e-9 for name in ("node_hop_s", "network_hop_s", "launch_s", "agreement_s", "agreement_hop_s")}
    return replace(h100, values=h100.values | quick | {"device_bytes": 1e12})


def job(schedule: str, stages: int, micros: int, *, copies: int = 2, level: int = 1, steps: int = 2) -> RankJob:
    """``copies`` data-parallel ranks of each stage."""
    chunks, _ = chunks_and_style(schedule, 2 if schedule in ("interleaved", "breadth_first") else 1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micros,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": level},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "pipeline": {"stages": stages, "schedule": schedule, "chunks_per_stage": chunks},
    }
    return RankJob(config, machine(), stages * copies, steps=steps)


def without_waits(stages: int) -> Subject:
    """The same, in a process that never waits for a message."""
    Links._wait = lambda *_, **__: None  # type: ignore[method-assign]
    return equal_parts(stages, 1, "loop")
