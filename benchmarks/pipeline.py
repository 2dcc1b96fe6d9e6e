"""Step times of pipeline schedules beside the times that follow from their programs.

    python benchmarks/pipeline.py [--stages 4] [--micro-batches 8] [--unit 0.05] [--steps 3]

Stages compute nothing: a stage waits for ``--unit`` seconds in its forward, in its backward for the inputs and in that
for the weights, so that few cores are enough. Everything else (messages, reductions, the update) is real, over gloo.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.orders import bubble, timeline
from deepspeed.pipe.torch_pipelining import make_order
from deepspeed.verify.ranks import RankPool

WIDTH, SAMPLES = 256, 4
CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1))


class _Through(torch.autograd.Function):
    """The same values; the backward takes ``seconds``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Waits(nn.Module):
    """A layer of three waits: forward, gradient of the input, gradient of the weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(WIDTH)), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return _Through.apply(x, self.seconds) + _Through.apply(self.weight, self.seconds)


def mean_square(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def step_time(schedule: str, chunks: int, stages: int, micros: int, unit: float, steps: int) -> float:
    """Seconds of the best of ``steps`` batches after two others, on this rank."""
    layers = [LayerSpec(Waits, unit / chunks) for _ in range(stages * chunks)]
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": micros,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"schedule": schedule, "chunks_per_stage": chunks},
    }
    module = PipelineModule(layers, num_stages=stages, loss_fn=mean_square, partition_method="uniform")
    engine = deepspeed.initialize(model=module, config=config)[0]
    batch = (torch.ones(SAMPLES, WIDTH, requires_grad=True), torch.zeros(SAMPLES, WIDTH))
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        engine.train_batch(iter([batch] * micros))
        times.append(time.perf_counter() - start)
    engine.destroy()
    return min(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print(f"{options.stages} stages x {options.micro_batches} micro-batches, waits of {options.unit * 1e3:g} ms")
    print(f"{'schedule':16} {'bubble':>7} {'theory s':>9} {'step s':>8} {'ratio':>6}")
    with RankPool(options.stages) as pool:
        for schedule, chunks in CASES:
            order = make_order(schedule, options.stages, options.micro_batches, chunks_per_rank=chunks)
            spans = timeline(order, {op: n * options.unit / chunks for op, n in zip("FBIW", (1, 2, 1, 1), strict=True)})
            theory = max(span.end for row in spans for span in row)
            sizes = (options.stages, options.micro_batches, options.unit, options.steps)
            took = max(pool.run(step_time, schedule, chunks, *sizes))
            name = f"{schedule} {chunks}" if chunks > 1 else schedule
            print(f"{name:16} {bubble(spans):7.1%} {theory:9.3f} {took:8.3f} {took / theory:6.3f}", flush=True)


if __name__ == "__main__":
    main()
