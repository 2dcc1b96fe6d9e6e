"""What ``ds_bench access``, ``step`` and ``vs-fsdp2`` train: residual perceptrons, on ranks of this machine."""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.bench.common import check_memory, params_of
from deepspeed.device import Accelerator, get_accelerator, set_accelerator
from deepspeed.errors import DeepSpeedError
from deepspeed.observe.program import CommandLine, count_of
from deepspeed.verify.models import ResidualBlock
from deepspeed.verify.ranks import RankFailure, RankPool

_LAYERS = 8
_TRAINING = 22  # bytes a parameter while it is trained, and read whole
_LIMIT_S = 7 * 86400.0


def add_training(parser: CommandLine, *, params: str, ranks: int) -> None:
    """Options of what trains a model."""
    parser.option("--params", params_of, params, "N", "about, for example 8M or 1e9")
    parser.option("--ranks", count_of, ranks, "N", "processes")
    parser.option("--rows", count_of, 256, "N", "samples of a micro-batch")
    parser.option("--steps", count_of, 10, "N", "timed steps")
    parser.switches(json="one JSON object instead of a table")


def blocks(params: int) -> nn.Sequential:
    """A model of about so many parameters: [rows, width] -> [rows, width]."""
    width = max(1, round(math.sqrt(params / (4 * _LAYERS))))
    return nn.Sequential(*(ResidualBlock(width) for _ in range(_LAYERS)))


def batch_for(model: nn.Module, rows: int, device: torch.device) -> Tensor:
    """A micro-batch in bf16."""
    return torch.randn(rows, model[0].norm.normalized_shape[0], dtype=torch.bfloat16, device=device)  # type: ignore[index]


def engine_for(plan: argparse.Namespace, level: int, **zero: Any) -> tuple[Any, Tensor]:
    """An engine in bf16 with AdamW, which has taken a step, and a micro-batch for it."""
    config = {
        "train_micro_batch_size_per_gpu": plan.rows,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": level, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine = deepspeed.initialize(model=blocks(plan.params), config=config)[0]
    x = batch_for(engine.module, plan.rows, engine.device)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    settle(engine)
    return engine, x


def settle(engine: Any) -> None:
    """Until nothing of the engine is under way."""
    engine.runtime.settle()
    get_accelerator().synchronize()


def timed(work: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> float:
    """Seconds of ``work`` and of what it takes until ``after``."""
    begin = time.perf_counter()
    work()
    after()
    return time.perf_counter() - begin


def _on_cpu(work: Callable[..., Any], plan: argparse.Namespace, *given: Any) -> Any:
    set_accelerator(Accelerator("cpu"))  # whatever there is: several ranks share this machine
    torch.set_num_threads(plan.threads)
    return work(plan, *given)


def on_ranks(work: Callable[..., Any], plan: argparse.Namespace, *given: Any) -> list[Any]:
    """``work(plan, *given)`` on CPU ranks of this machine. Raises UsageError (memory), DeepSpeedError."""
    check_memory(plan.ranks * plan.params * _TRAINING, "--params or --ranks")
    plan.threads = max(1, torch.get_num_threads() // plan.ranks)
    with RankPool(plan.ranks, time_limit=_LIMIT_S) as pool:
        try:
            return pool.run(_on_cpu, work, plan, *given)
        except RankFailure as failure:
            raise DeepSpeedError(str(failure)) from failure
