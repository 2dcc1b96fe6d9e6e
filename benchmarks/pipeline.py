"""Step times of pipeline schedules beside the times that follow from their programs.

    python benchmarks/pipeline.py [--stages 4] [--micro-batches 8] [--unit 0.1] [--hop 0.05]

Stages compute nothing: a stage waits for ``--unit`` seconds in its forward, in its backward for the inputs and in that
for the weights, so that few cores are enough. Everything else (messages, reductions, the update) is real, over gloo.
Then the same with messages that leave their rank ``--hop`` seconds late, as over a slow link: beside what a step takes
at least, where they are hidden behind the waits as far as the program allows, and what if each held up its sender.
"""

import argparse
import functools
import statistics
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.comm import point_to_point
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.orders import bubble, timeline
from deepspeed.pipe.torch_pipelining import make_order
from deepspeed.tier.transfer import Transfer
from deepspeed.tools.verify.ranks import RankPool

SAMPLES, WIDTH = 4, 256
CASES = (("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1))


def wait(seconds: float) -> None:
    """As exactly as a computation would take: a sleep ends late, by 0.1 ms and more, so the last of it is spun."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 4e-4))
    while time.perf_counter() < end:
        pass


class _Through(torch.autograd.Function):
    """The same values; the backward takes ``seconds``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wait(ctx.seconds)
        return grad, None


class _Late(Transfer):
    """A message that leaves ``seconds`` after it was handed over, while its rank goes on."""

    def __init__(self, send: Any, seconds: float) -> None:
        self._send, self._gone = send, threading.Event()
        threading.Timer(seconds, self._leave).start()

    def _leave(self) -> None:
        self._sent = self._send()
        self._gone.set()

    def wait(self) -> None:
        self._gone.wait()
        self._sent.wait()


class Waits(nn.Module):
    """A layer of three waits: forward, gradient of the input, gradient of the weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        wait(self.seconds)
        return _Through.apply(x, self.seconds) + _Through.apply(self.weight, self.seconds)


def mean_square(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def step_time(
    schedule: str, chunks: int, hop: float, stages: int, micros: int, unit: float, steps: int
) -> tuple[float, float]:
    """Seconds of the best and the median of ``steps`` batches after two others, on this rank."""
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
    batch = (torch.ones(SAMPLES, WIDTH, requires_grad=True), torch.zeros(1))
    times, send = [], point_to_point.send
    if hop:
        point_to_point.send = lambda *message: _Late(functools.partial(send, *message), hop)
    for _ in range(steps + 2):
        start = time.perf_counter()
        engine.train_batch(iter([batch] * micros))
        times.append(time.perf_counter() - start)
    point_to_point.send = send
    engine.destroy()
    return min(times[2:]), statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.1)
    parser.add_argument("--hop", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    stages, micros, unit = options.stages, options.micro_batches, options.unit
    print(f"{stages} stages x {micros} micro-batches, waits of {unit * 1e3:g} ms; best and median of {options.steps}")
    print(f"{'schedule':16} {'bubble':>7} {'theory s':>9} {'best s':>8} {'ratio':>6} {'median':>8} {'ratio':>6}")
    best: dict[str, float] = {}

    def theory(schedule: str, chunks: int, held: float = 0.0, *, hop: float = 0.0) -> tuple[float, float]:
        """Seconds of a step and its bubble; ``held``: by messages, in each action."""
        order = make_order(schedule, stages, micros, chunks_per_rank=chunks)
        costs = {op: n * unit / chunks + (op != "W") * held for op, n in zip("FBIW", (1, 2, 1, 1), strict=True)}
        spans = timeline(order, costs, hop=hop)
        return max(span.end for row in spans for span in row), bubble(spans)

    with RankPool(stages) as pool:
        for schedule, chunks in CASES:
            expected, waits = theory(schedule, chunks)
            times = pool.run(step_time, schedule, chunks, 0.0, stages, micros, unit, options.steps)
            took, middle = (max(column) for column in zip(*times, strict=True))
            name = f"{schedule} {chunks}" if chunks > 1 else schedule
            best[name] = took
            figures = f"{took:8.3f} {took / expected:6.3f} {middle:8.3f} {middle / expected:6.3f}"
            print(f"{name:16} {waits:7.1%} {expected:9.3f} {figures}", flush=True)
        for name in [name for name in best if name.startswith("interleaved")]:
            print(f"{name} takes {best[name] / best['1f1b']:.3f} of 1f1b")
        print(f"messages that take {options.hop * 1e3:g} ms")
        print(f"{'schedule':16} {'no time s':>9} {'bound s':>8} {'held up s':>9} {'best s':>8} {'of bound':>8}")
        for schedule, chunks in CASES[:4]:
            times = pool.run(step_time, schedule, chunks, options.hop, stages, micros, unit, options.steps)
            took, bound = max(t for t, _ in times), theory(schedule, chunks, hop=options.hop)[0]
            plain, held = theory(schedule, chunks)[0], theory(schedule, chunks, options.hop)[0]
            name = f"{schedule} {chunks}" if chunks > 1 else schedule
            print(f"{name:16} {plain:9.3f} {bound:8.3f} {held:9.3f} {took:8.3f} {took / bound:8.3f}", flush=True)


if __name__ == "__main__":
    main()
