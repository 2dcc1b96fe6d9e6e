"""What it costs to watch an engine: a small job, rounds of it without and with the watch in turn, and what differs."""

import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
Steps = Callable[..., tuple[float, float, float]]
CLOCKS = (time.perf_counter, time.process_time, time.thread_time)


def launch(
    ranks: int, *words: str, folder: str, limit: float | None = None, threads: int = 1
) -> "subprocess.CompletedProcess[str]":
    """A script under the launcher, with so many threads a rank."""
    settings = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE)}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "DS_"))} | settings
    flags = ["--num_gpus", str(ranks), *([] if limit is None else ["--hang_timeout", str(limit)])]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *flags, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def small_job(options: Namespace) -> tuple[Any, Steps]:
    """A stack of layers under stage 3, where most is sent, and what trains it: seconds a step, by ``CLOCKS``."""
    import torch
    from torch import nn

    import deepspeed

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(options.width, options.width), nn.Tanh()) for _ in range(options.layers)]
    config = {"train_micro_batch_size_per_gpu": 32, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=nn.Sequential(*layers), config=config)
    x = torch.randn(32, options.width)

    def steps(count: int = options.steps) -> tuple[float, float, float]:
        torch.distributed.barrier()
        before = [clock() for clock in CLOCKS]
        for _ in range(count):
            engine.backward(engine(x).square().mean())
            engine.step()
        torch.distributed.barrier()
        wall, process, thread = ((clock() - s) / count for clock, s in zip(CLOCKS, before, strict=True))
        return wall, process, thread

    return engine, steps


def compare(rounds: int, without: Steps, watched: Steps, shown: bool) -> float:
    """Train in turn without and with the watch, print what differs; processor milliseconds of a step without."""
    for _ in range(3):
        without()
    off, on = [], []
    for index in range(2 * rounds):
        if index % 4 in (1, 2):  # off, on, on, off: a drift of the machine meets both alike
            on.append(watched())
        else:
            off.append(without())
    steps_ms = list[float]()
    for position, what in enumerate(("clock", "processor", "processor, of the thread that trains")):
        plain, seen = (statistics.median(r[position] for r in kind) * 1e3 for kind in (off, on))
        more = [(b[position] - a[position]) * 1e3 for a, b in zip(off, on, strict=True)]
        error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
        if shown:
            mean = f"differences of neighbours {statistics.mean(more):+.2f} +- {error:.2f} ms"
            print(
                f"{what}: {plain:.2f} ms a step without, {seen:.2f} with: {seen / plain - 1:+.1%}; {mean}", flush=True
            )
        steps_ms.append(plain)
    return steps_ms[1]
