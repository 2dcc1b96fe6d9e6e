"""``ds_bench ckpt``: how long saving holds training, and how long until a checkpoint has its name, on the user's own
folder.

A synthetic model is trained on CPU ranks of this machine with ZeRO-3, bf16 and AdamW, and saved every few steps, in the
background unless ``--sync`` is given. Beside it: a plain copy of the same bytes, into fresh memory and into memory that
is there already. What is written lies in one folder ``ds_bench_ckpt_*``, which is gone when the command ends or is
interrupted; only after kill
-9 it stays.
"""

import argparse
import contextlib
import json
import math
import mmap
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.bench.common import check_memory, count_of, params_of, spread
from deepspeed.checkpoint.tool.common import sized
from deepspeed.device import Accelerator, set_accelerator
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.verify.ranks import RankFailure, RankPool

_LAYERS = 8
_ROWS = 16  # of a micro-batch
_SAVED = 12  # bytes a parameter: fp32 weight and two moments
_TRAINING = 20  # bytes a parameter while it is trained
_ALLOWED = 1.1  # for what is not tensors
_PROCESS = 64e6  # bytes of a rank beside them
_GLANCE_S = 0.005
_LIMIT_S = 7 * 86400.0
_COPIES = 3


@dataclass(frozen=True)
class Plan:
    """What the ranks do; ``background``: saves are written while training goes on."""

    params: int
    ranks: int
    steps: int
    every: int
    background: bool
    threads: int


class _Watch(threading.Thread):
    """Waits until a checkpoint has its name; ``seconds`` since ``begin`` then."""

    def __init__(self, path: Path, begin: float) -> None:
        super().__init__(daemon=True)
        self._path, self._begin, self._over = path, begin, threading.Event()
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        while not self._path.is_dir() and not self._over.wait(_GLANCE_S):
            pass
        self.seconds = time.perf_counter() - self._begin

    def end(self) -> float:
        """``seconds``, for a checkpoint that is known to be there."""
        self._over.set()
        self.join()
        return self.seconds


# -- in the ranks --------------------------------------------------------------------------------------------------


def on_rank(plan: Plan, folder: str) -> dict[str, Any] | str:
    """Train and save; what was measured, or the sentence of an error that all ranks have."""
    set_accelerator(Accelerator("cpu"))  # whatever there is: several ranks share this machine
    try:
        return _train(plan, Path(folder))
    except (DeepSpeedError, OSError) as error:
        return str(error)


def _engine(plan: Plan) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "checkpoint": {"async": plan.background, "keep_last": 1},
    }
    width = max(1, round(math.sqrt(plan.params / _LAYERS)))
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(
            *(layer for _ in range(_LAYERS) for layer in (nn.Linear(width, width, bias=False), nn.GELU()))
        )
    return deepspeed.initialize(model=model, config=config)[0], width


def _timed(work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    comm.barrier()
    begin = time.perf_counter()
    work()
    comm.barrier()
    return time.perf_counter() - begin


def _train(plan: Plan, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(plan.threads)
    engine, width = _engine(plan)

    def step() -> None:
        engine.backward(engine(torch.randn(_ROWS, width, dtype=torch.bfloat16)).float().square().mean())
        engine.step()

    step()  # kernels are built, the optimizer's state is made
    held: list[float] = []
    named: list[float] = []
    quiet: list[float] = []
    busy: list[float] = []
    watch: _Watch | None = None
    tag = ""
    comm.barrier()
    begun = time.perf_counter()
    for number in range(1, plan.steps + 1):
        (busy if watch is not None and watch.is_alive() else quiet).append(_timed(step))
        if number % plan.every:
            continue
        tag, begin = f"step{number}", time.perf_counter()
        last, watch = watch, _Watch(folder / tag, begin) if plan.background else None
        held.append(_timed(lambda tag=tag: engine.save_checkpoint(folder, tag=tag)))  # type: ignore[misc]
        if last is not None:
            named.append(last.end())  # a save waits for the one before it
        if not plan.background:
            named.append(held[-1])
    wall = time.perf_counter() - begun
    engine.wait_for_checkpoint()
    if watch is not None:
        named.append(watch.end())
    nbytes = sum(path.stat().st_size for path in (folder / tag).iterdir())
    copies = _copies(engine)
    engine.destroy()
    return {
        "params": _LAYERS * width * width,
        "bytes": nbytes,
        "wall_s": wall,
        "held_s": spread(held),
        "named_s": spread(named),
        "step_s": statistics.median(quiet or busy),
        "step_while_saving_s": statistics.median(busy) if busy else None,
        "copy_s": copies,
    }


def _copies(engine: Any) -> dict[str, float]:
    """Seconds to copy what a save copies, by no other means than a copy."""
    params = [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
    slots = [
        v for p in params for v in engine.basic_optimizer.state[p].values() if isinstance(v, torch.Tensor) and v.dim()
    ]
    tensors = [*(p.detach() for p in params), *slots]
    fresh, there = [], []
    for _ in range(_COPIES):
        kept: list[torch.Tensor] = []

        def copy(kept: list[torch.Tensor] = kept) -> None:
            kept.extend(_fresh(tensors) if not kept else ())
            for to, t in zip(kept, tensors, strict=True):
                to.copy_(t)

        fresh.append(_timed(copy))
        there.append(_timed(copy))
    return {"fresh": statistics.median(fresh), "there": statistics.median(there)}


def _fresh(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Room for ``tensors`` (at least one) in pages that nobody has touched: the allocator would hand out again what was
    freed.
    """
    pages = mmap.mmap(-1, sum(t.nbytes for t in tensors), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    parts = torch.frombuffer(pages, dtype=torch.uint8).split([t.nbytes for t in tensors])
    return [part.view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]


# -- around them ---------------------------------------------------------------------------------------------------


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _place(folder: str, nbytes: float) -> Iterator[str]:
    """A new folder in ``folder``, gone afterwards, also when the process is told to end. Raises UsageError."""
    if not os.path.isdir(folder):
        raise UsageError(f"{folder} is no folder; name one on the drive to be measured")
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise UsageError(
            f"{folder} has {sized(free)} of free space, two checkpoints take {sized(nbytes)}; give fewer --params"
        )
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        top = tempfile.mkdtemp(prefix="ds_bench_ckpt_", dir=folder)
    except OSError as error:
        raise UsageError(f"no folder can be made in {folder}: {error.strerror}; name one that you may write") from error
    try:
        yield top
    finally:
        before[signal.SIGINT] = signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # who presses Ctrl-C twice wants no half of it to stay
        shutil.rmtree(top, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(pool: RankPool) -> None:
    """Start the ranks so that none hears an interrupt at the terminal: it is for this process, which ends them, once
    they are there.
    """
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if "forkserver" in multiprocessing.get_all_start_methods():
            forkserver.ensure_running()  # it and its children go on to ignore the signal
        signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
        pool.start()
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def measure(plan: Plan, folder: str) -> dict[str, Any]:
    """Start the ranks and let them; what they measured. Raises UsageError for wrong input, DeepSpeedError when a save
    fails.
    """
    if plan.steps < plan.every:
        raise UsageError(f"--steps {plan.steps} are fewer than --every {plan.every}, so nothing would be saved")
    each = _TRAINING + _SAVED * (1 + plan.background)
    check_memory(plan.params * each * _ALLOWED + plan.ranks * _PROCESS, "--params or --ranks")
    with _place(folder, 2 * _SAVED * plan.params * _ALLOWED) as top, RankPool(plan.ranks, time_limit=_LIMIT_S) as pool:
        try:
            _start(pool)
            answers = pool.run(on_rank, plan, top)
        except RankFailure as failure:
            raise DeepSpeedError(str(failure)) from failure
        except BaseException:
            pool._kill()  # at once: nobody may write any more when the folder is removed
            raise
    if isinstance(answers[0], str):
        raise DeepSpeedError(answers[0])
    found: dict[str, Any] = answers[0]
    held, named = found["held_s"], found["named_s"]
    return {
        "folder": os.path.abspath(folder),
        **asdict(plan),
        **found,
        "ratio": {way: held["median"] / seconds for way, seconds in found["copy_s"].items()},
        "share": sum(held["all"]) / found["wall_s"],
        "gb_per_s": found["bytes"] / named["median"] / 1e9,
    }


def as_text(found: dict[str, Any]) -> str:
    """What was measured, for people."""
    held, named, copies, ratio = found["held_s"], found["named_s"], found["copy_s"], found["ratio"]
    how = "in the background" if found["background"] else "while training waits"
    saving = found["step_while_saving_s"]
    lines = [
        f"{found['folder']}: {found['params']:,} parameters on {found['ranks']} ranks, ZeRO-3, bf16, AdamW",
        f"{len(held['all'])} saves of {sized(found['bytes'])}, one after every {found['every']} steps, {how}",
        "",
        f"{'seconds':<46} {'median':>8} {'max':>8}",
        f"{'training held by a save':<46} {held['median']:>8.3f} {held['max']:>8.3f}   (the first "
        f"{held['all'][0]:.3f})",
        f"{'until the checkpoint has its name':<46} {named['median']:>8.3f} {named['max']:>8.3f}   "
        f"{found['gb_per_s']:.2f} GB/s",
        f"{'a plain copy of the same bytes, fresh memory':<46} {copies['fresh']:>8.3f} {'':>8}   held / it "
        f"{ratio['fresh']:.2f}",
        f"{'a plain copy into memory that is there':<46} {copies['there']:>8.3f} {'':>8}   held / it "
        f"{ratio['there']:.2f}",
        f"{'a step':<46} {found['step_s']:>8.3f}"
        + (f" {'':>8}   while a save is written {saving:.3f}" if saving is not None else ""),
        "",
        f"saves held training for {100 * found['share']:.1f} % of {found['wall_s']:.1f} s",
    ]
    return "\n".join(lines)


def run(argv: list[str], *, prog: str) -> str:
    """Measure as the command line says; a table, or JSON. Raises UsageError, DeepSpeedError, SystemExit."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, help="where to save: a folder on the drive to be measured")
    parser.add_argument(
        "--params", type=params_of, default=134_000_000, metavar="N", help="about, for example 8M or 1e9 (default 134M)"
    )
    parser.add_argument(
        "--every", type=count_of, default=5, metavar="N", help="steps from one save to the next (default 5)"
    )
    parser.add_argument("--steps", type=count_of, default=20, metavar="N", help="steps in all (default 20)")
    parser.add_argument("--ranks", type=count_of, default=2, metavar="N", help="processes (default 2)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--async", dest="background", action="store_true", default=True, help="save in the background (default)"
    )
    kind.add_argument("--sync", dest="background", action="store_false", help="training waits until a save has ended")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(argv)
    threads = max(1, torch.get_num_threads() // options.ranks)
    plan = Plan(options.params, options.ranks, options.steps, options.every, options.background, threads)
    found = measure(plan, options.folder)
    return json.dumps(found, indent=1) if options.json else as_text(found)
