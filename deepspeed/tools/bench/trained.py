"""What the commands train: residual perceptrons, on ranks of this machine; and how they take times."""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm
from deepspeed.accelerator.device import Accelerator, get_accelerator, set_accelerator
from deepspeed.errors import DeepSpeedError
from deepspeed.tools.bench.common import check_memory
from deepspeed.tools.verify.models import ResidualBlock
from deepspeed.tools.verify.ranks import RankPool

_LAYERS = 8
_TRAINING = 22  # bytes a parameter while it is trained, and read whole
_LIMIT_S = 7 * 86400.0
_Errors = tuple[type[Exception], ...]


def blocks(params: int) -> nn.Sequential:
    """Return a model of about ``params`` parameters: [rows, width] -> [rows, width]."""
    width = max(1, round(math.sqrt(params / (4 * _LAYERS))))
    return nn.Sequential(*(ResidualBlock(width) for _ in range(_LAYERS)))


def batch_for(model: nn.Module, rows: int, device: torch.device) -> Tensor:
    """Return a micro-batch in bf16."""
    return torch.randn(rows, model[0].norm.normalized_shape[0], dtype=torch.bfloat16, device=device)  # type: ignore[index]


def engine_for(plan: argparse.Namespace, level: int, **zero: Any) -> tuple[Any, Tensor]:
    """Return an engine in bf16 with AdamW, which has taken a step, and a micro-batch for it."""
    config = {
        "train_micro_batch_size_per_gpu": plan.rows,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": level, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine = deepspeed.initialize(model=blocks(plan.params), config=config)[0]
    x = batch_for(engine.module, plan.rows, engine.device)
    passes(engine, x)
    engine.step()
    settle(engine)
    return engine, x


def passes(engine: Any, x: Tensor) -> None:
    """Run a forward and its backward."""
    engine.backward(engine(x).float().square().mean())


def settle(engine: Any) -> None:
    """Wait until nothing of the engine is under way."""
    engine.runtime.update.wait()
    get_accelerator().synchronize()


def timed(work: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> float:
    """Return the seconds of ``work`` and ``after`` together."""
    begin = time.perf_counter()
    work()
    after()
    return time.perf_counter() - begin


def together(work: Callable[[], Any]) -> float:
    """Return the seconds of the slowest rank."""
    comm.barrier()
    return timed(work, comm.barrier)


def _on_cpu(work: Callable[..., Any], plan: argparse.Namespace, alike: _Errors, *given: Any) -> Any:
    set_accelerator(Accelerator("cpu"))  # whatever there is: several ranks share this machine
    torch.set_num_threads(plan.threads)
    try:
        return work(plan, *given)
    except alike as error:
        return str(error)


def on_ranks(
    work: Callable[..., Any], plan: argparse.Namespace, *given: Any, per_param: int = _TRAINING, alike: _Errors = ()
) -> list[Any]:
    """Run ``work(plan, *given)`` on CPU ranks (``per_param``: bytes); errors ``alike`` on all: DeepSpeedError."""
    if per_param:
        check_memory(plan.ranks * plan.params * per_param, "--params or --ranks")
    plan.threads = max(1, torch.get_num_threads() // plan.ranks)
    with RankPool(plan.ranks, time_limit=_LIMIT_S) as pool:
        answers = pool.run(_on_cpu, work, plan, alike, *given)
    if isinstance(answers[0], str):
        raise DeepSpeedError(answers[0])
    return answers
