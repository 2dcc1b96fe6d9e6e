"""``ds_bench ckpt``: how long saving holds training, and how long until a checkpoint has its name, in your folder.

A synthetic model is trained on CPU ranks of this machine with ZeRO-3, bf16 and AdamW, and saved every few steps, in the
background unless ``--sync`` is given. Beside it: a plain copy of the same bytes into memory that is there already. What
is written lies in one folder ``ds_bench_ckpt_*``, which is gone when the command ends or is interrupted; only after
kill -9 it stays.
"""

import argparse
import contextlib
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.monitor.program import size
from deepspeed.tools.bench.common import check_folder, check_memory, spread, titled
from deepspeed.tools.bench.trained import on_ranks, passes, together

_LAYERS = 8
_ROWS = 16  # of a micro-batch
_SAVED = 12  # bytes a parameter: fp32 weight and two moments
_TRAINING = 20  # bytes a parameter while it is trained
_ALLOWED = 1.1  # for what is not tensors
_PROCESS = 64e6  # bytes of a rank beside them
_GLANCE_S = 0.005
_COPIES = 3


class _Watch(threading.Thread):
    """Wait until a checkpoint has its name; ``seconds`` is the time since its save began."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path, self._begin, self._over = path, time.perf_counter(), threading.Event()
        self.start()

    def run(self) -> None:
        while not self._path.is_dir() and not self._over.wait(_GLANCE_S):
            pass
        self.seconds = time.perf_counter() - self._begin

    def end(self) -> float:
        """Return ``seconds``, for a checkpoint that is known to exist."""
        self._over.set()
        self.join()
        return self.seconds


def on_rank(plan: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train and save in a rank; return the measurements."""
    config = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "checkpoint": {"async": plan.background, "keep_last": 1},
    }
    width = max(1, round(math.sqrt(plan.params / _LAYERS)))
    with deepspeed.zero.Init(config_dict_or_path=config):
        layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(width, width, bias=False), nn.GELU())]
        model = nn.Sequential(*layers)
    engine = deepspeed.initialize(model=model, config=config)[0]

    def step() -> None:
        passes(engine, torch.randn(_ROWS, width, dtype=torch.bfloat16))
        engine.step()

    step()  # kernels are built, the optimizer's state is made
    holds, named, quiet, busy = list[float](), list[float](), list[float](), list[float]()
    watch: _Watch | None = None
    path = folder
    comm.barrier()
    begun = time.perf_counter()
    for number in range(1, plan.steps + 1):
        (busy if watch is not None and watch.is_alive() else quiet).append(together(step))
        if number % plan.every:
            continue
        path = folder / f"step{number}"
        last, watch = watch, _Watch(path) if plan.background else None
        holds.append(together(partial(engine.save_checkpoint, folder, tag=path.name)))
        named += [last.end()] if last is not None else []  # a save waits for the one before it
    wall = time.perf_counter() - begun
    engine.wait_for_checkpoint()
    named += [watch.end()] if watch is not None else []
    facts = {
        "params": _LAYERS * width * width,
        "bytes": sum(file.stat().st_size for file in path.iterdir()),
        "wall_s": wall,
        "held_s": spread(holds),
        "named_s": spread(named or holds),
        "step_s": statistics.median(quiet or busy),
        "step_while_saving_s": statistics.median(busy) if busy else None,
        "copy_s": _copy_s(engine),
    }
    engine.destroy()
    return facts


def _copy_s(engine: Any) -> float:
    """Return the seconds of a plain copy of all that a save copies, into memory that exists already."""
    params = [p.detach() for group in engine.basic_optimizer.param_groups for p in group["params"]]
    slots = [v for state in engine.basic_optimizer.state.values() for v in state.values()]
    tensors = [*params, *(v for v in slots if isinstance(v, torch.Tensor) and v.dim())]
    room = [tensor.clone() for tensor in tensors]
    return statistics.median([together(lambda: torch._foreach_copy_(room, tensors)) for _ in range(_COPIES)])


@contextlib.contextmanager
def _place(folder: str, nbytes: float) -> Iterator[str]:
    """Yield a new folder in ``folder``, removed afterwards, also when the process is told to end. Raises UsageError."""
    check_folder(folder, nbytes, "two checkpoints take", "give fewer --params")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        top = tempfile.mkdtemp(prefix="ds_bench_ckpt_", dir=folder)
    except OSError as error:
        raise UsageError(f"no folder can be made in {folder}: {error.strerror}; name one that you may write") from error
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        yield top
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C leaves no half of it
        shutil.rmtree(top, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def measure(plan: argparse.Namespace) -> dict[str, Any]:
    """Return the ranks' measurements. Raises UsageError for wrong input, DeepSpeedError when a save fails."""
    if plan.steps < plan.every:
        raise UsageError(f"--steps {plan.steps} are fewer than --every {plan.every}, so nothing would be saved")
    per_param, room = _TRAINING + _SAVED * (1 + plan.background), 2 * _SAVED * plan.params * _ALLOWED
    check_memory(plan.params * per_param * _ALLOWED + plan.ranks * _PROCESS, "--params or --ranks")
    with _place(plan.folder, room) as top:
        facts = on_ranks(on_rank, plan, Path(top), per_param=0, alike=(DeepSpeedError, OSError))[0]
    rates = {
        "ratio": facts["held_s"]["median"] / facts["copy_s"],
        "share": sum(facts["held_s"]["all"]) / facts["wall_s"],
        "gb_per_s": facts["bytes"] / facts["named_s"]["median"] / 1e9,
    }
    settings = {name: getattr(plan, name) for name in ("ranks", "steps", "every", "background", "threads")}
    return {"folder": os.path.abspath(plan.folder), **settings, **facts, **rates}


def as_text(facts: dict[str, Any], _: argparse.Namespace) -> str:
    holds, named, busy = facts["held_s"], facts["named_s"], facts["step_while_saving_s"]
    rows = [
        ("seconds", "median", "max", ""),
        ("training held by a save", holds["median"], holds["max"], f"(the first {holds['all'][0]:.3f})"),
        ("until the checkpoint has its name", named["median"], named["max"], f"{facts['gb_per_s']:.2f} GB/s"),
        ("a plain copy of the same bytes", facts["copy_s"], "", f"held / it {facts['ratio']:.2f}"),
        ("a step", facts["step_s"], "", "" if busy is None else f"while a save is written {busy:.3f}"),
    ]
    how = "in the background" if facts["background"] else "while training waits"
    head = f"{facts['folder']}: {facts['params']:,} parameters on {facts['ranks']} ranks, ZeRO-3, bf16, AdamW"
    saves = f"{len(holds['all'])} saves of {size(facts['bytes'])}, one after every {facts['every']} steps, {how}"
    share = f"saves held training for {100 * facts['share']:.1f} % of {facts['wall_s']:.1f} s"
    return titled(f"{head}\n{saves}", rows, "", share)
