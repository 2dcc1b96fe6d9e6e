"""The learning-rate gate: a schedule counts updates: not ranks, not micro-batches, not skipped steps; also after a
resume. Every trace is compared with that of a plain PyTorch optimizer and scheduler.

In rows with overflows two steps of fp16 have infinite gradients: the plain trace stands still there.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.verify.common import Finding, Printout
from deepspeed.verify.models import SAMPLES, MicroBatch as Place, Stack, regression_batch, seeded, squared_error
from deepspeed.verify.ranks import RankPool, scratch

RATE, SKIPPED = 0.1, (2, 5)
RANKS, ACCUMULATION = (1, 2, 4), (1, 4)
STEPS, SAVED = 8, 4
Trace = list[float]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Half of it every two updates."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def plain_trace(skipped: tuple[int, ...]) -> Trace:
    """The rates in force at each step in plain PyTorch, where ``skipped`` steps do nothing."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler, trace = schedule(optimizer), []
    for step in range(STEPS):
        trace.append(optimizer.param_groups[0]["lr"])
        if step not in skipped:
            optimizer.step()
            scheduler.step()
    return trace


def run_trace(stage: int, accumulation: int, skipped: tuple[int, ...], folder: str | None) -> Trace:
    """The rates of an engine on the ranks of this process group; with ``folder`` saved and loaded amid. Collective."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "fp16": {"enabled": bool(skipped), "initial_scale_power": 6, "hysteresis": 1},
    }

    def start() -> Any:
        return deepspeed.initialize(model=seeded(Stack)(), config=config, lr_scheduler=schedule)[0]

    engine, trace = start(), []
    for step in range(STEPS):
        if folder is not None and step == SAVED:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = start()
            engine.load_checkpoint(folder)
        trace.append(engine.get_lr()[0])
        for micro in range(accumulation):
            place = Place(step, micro, dist.get_rank(), dist.get_world_size())
            (loss,) = squared_error(engine, regression_batch(place), place)
            engine.backward(loss * (float("inf") if step in skipped else 1.0))
            engine.step()
    if engine.skipped_steps != len(skipped):
        raise Finding(f"{engine.skipped_steps} steps were skipped, {len(skipped)} had infinite gradients")
    engine.destroy()
    return trace


def run(options: argparse.Namespace, report: Printout) -> int:
    report.say(f"plain PyTorch     {_as_text(plain_trace(()))}")
    report.say(f"steps {SKIPPED} skipped  {_as_text(plain_trace(SKIPPED))}")
    for ranks in RANKS:
        with RankPool(ranks, time_limit=options.time_limit) as pool, scratch() as folder:

            def check(
                stage: int, count: int, what: str, pool: RankPool = pool, folder: str = folder
            ) -> tuple[str, str]:
                skipped = SKIPPED if what == "overflows" else ()
                saved = f"{folder}/{stage}-{count}" if what == "resume" else None
                wrong = [t for t in pool.run(run_trace, stage, count, skipped, saved) if t != plain_trace(skipped)]
                return "equal", "".join(f"{_as_text(trace)}" for trace in wrong[:1])

            for count in ACCUMULATION:
                for what in ("straight", "overflows", "resume"):
                    for stage in range(4) if ranks == 2 else (2,):
                        text = f"{ranks} ranks x accumulation {count}  stage {stage}  {what:<9}"
                        report.row(text, check, stage, count, what)
    return report.end(f"{STEPS} steps each", "all traces equal plain PyTorch")


def _as_text(trace: Trace) -> str:
    return " ".join(f"{rate:g}" for rate in trace)
