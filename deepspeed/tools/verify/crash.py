"""The gate of checkpoints whose save was killed."""

import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import counted
from deepspeed.monitor.log import logger
from deepspeed.tools.verify.driver import Driver, Finding
from deepspeed.tools.verify.ranks import RankFailure, RankPool, scratch
from deepspeed.tools.verify.runs import hash_of, seed_everything, snapshot

_WIDTH = 64
_LIMIT_S = 60.0  # for one life of a job
_MEASURED = 4  # saves that are timed first
_MOURNING_S = 0.2  # at most, between the end of one rank and that of the others
_BEYOND = 1.15  # of a save's duration: the first moments after it count too
_REPORTED_EVERY = 25
_UNFINISHED = re.compile(r"\..+\.saving-.*")

Message = tuple[Any, ...]  # a kind, and what goes with it


@dataclass(frozen=True)
class SavingJob:
    """Job of the ranks. ``tag``: with ``{}`` for the step, or one that is overwritten; ``trap(rank)`` arms a rank.

    Ranks end after ``saves`` saves, or die: ``deaths`` are seconds after the begin of save ``deadly_save``, by rank.
    """

    folder: str
    ranks: int = 2
    stage: int = 2
    background: bool = False
    tag: str = "step{}"
    keep_last: int = 2
    saves: int | None = None
    deaths: tuple[float, ...] = ()
    deadly_save: int = 1
    trap: Callable[[int], None] | None = None


def train_and_save(job: SavingJob, reports: str) -> None:
    """Resume, train and save after every step; report what is known before and after into ``reports``. Collective."""
    rank, wide = dist.get_rank(), 4 * _WIDTH
    seed_everything(7)
    model = nn.Sequential(nn.Linear(_WIDTH, wide), nn.BatchNorm1d(wide), nn.Dropout(0.1), nn.Linear(wide, _WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": job.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
        "checkpoint": {"async": job.background, "keep_last": job.keep_last},
    }
    engine, lines = deepspeed.initialize(model=model, config=config)[0], list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(min(logger.level, logging.WARNING))
    with open(f"{reports}/{rank}", "a", encoding="utf-8", buffering=1) as file:

        def report(*message: Any) -> None:
            file.write(json.dumps([time.monotonic(), rank, message]) + "\n")

        path, _ = engine.load_checkpoint(job.folder)
        report("loaded", engine.global_steps, hash_of(snapshot(engine)), path, lines)
        if job.trap is not None:
            job.trap(rank)
        for number in itertools.count(1) if job.saves is None else range(1, job.saves + 1):
            generator = torch.Generator().manual_seed(1000 * engine.global_steps + rank)
            engine.backward(engine(torch.randn(4, _WIDTH, generator=generator)).square().mean())
            engine.step()
            report("saving", engine.global_steps, hash_of(snapshot(engine)))
            if job.deaths and number == job.deadly_save:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process as SIGKILL does
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, job.deaths[rank]))
            begun = time.monotonic()
            engine.save_checkpoint(job.folder, tag=job.tag.format(engine.global_steps))
            report("saved", engine.global_steps, time.monotonic() - begun)
    engine.destroy()


@dataclass
class Witness:
    """Keep what the jobs have reported so far, and what a resume must therefore find."""

    folder: Path
    background: bool = False
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # by step and rank
    ended: int = 0  # the step of the newest save that is known to have ended
    left: list[str] = field(default_factory=list)  # unfinished saves the last job left
    expected: str | None = None
    skipped: int = 0

    def look(self) -> None:
        """Note the unfinished saves and ``latest`` in the folder between two jobs."""
        self.left = sorted(p.name for p in self.folder.glob(".*") if _UNFINISHED.fullmatch(p.name) and p.is_dir())
        self.skipped += len(self.left)
        latest = self.folder / "latest"
        self.expected = latest.read_text(encoding="utf-8") if latest.is_file() else None

    def hear(self, rank: int, message: Message) -> None:
        """Check one message of a rank. Raises Finding."""
        kind, step, *rest = message
        if kind == "loaded":
            self._loaded(rank, step, *rest)
        elif kind == "saving":
            digest = self.digests.setdefault((step, rank), rest[0])
            if digest != rest[0]:
                raise Finding(f"step {step} on rank {rank} has another state after the resume: {rest[0]}, not {digest}")
        else:  # a call for a background save returns when the one before it has ended
            self.ended = max(self.ended, step - 1 if self.background else step)
            remaining = sorted(set(self.left) & set(os.listdir(self.folder))) if rank == 0 else []
            if remaining:
                raise Finding(f"the next save left {', '.join(remaining)} behind")

    def _loaded(self, rank: int, step: int, state: str, path: str | None, log: list[str]) -> None:
        if step < self.ended:
            raise Finding(f"rank {rank} resumed from step {step}, but the save of step {self.ended} had ended")
        if self.expected is not None and (path is None or Path(path).name != self.expected):
            raise Finding(f"rank {rank} loaded {path or 'nothing'}, but latest names {self.expected}")
        if path is None:
            return
        digest = self.digests.get((step, rank))
        if state != digest:
            raise Finding(f"{path} gave rank {rank} the state {state}, not {digest} of step {step}")
        unnamed = [name for name in self.left if rank == 0 and not any(name in line for line in log)]
        if unnamed:
            raise Finding(f"the log of the resume does not name {', '.join(unnamed)}; it says {log}")


def live(job: SavingJob, witness: Witness) -> list[Message]:
    """Run the job until it ends or some rank dies; return the messages of rank 0. Raises Finding, RankFailure."""
    witness.look()
    with scratch() as reports, RankPool(job.ranks, time_limit=_LIMIT_S) as pool:
        try:
            pool.run(train_and_save, job, reports)
        except RankFailure as failure:
            if "died" not in failure.types.values():
                raise
        lines = [line for file in Path(reports).iterdir() for line in file.read_text().splitlines(keepends=True)]
    messages = sorted(json.loads(line) for line in lines if line.endswith("]\n"))
    for _, rank, message in messages:
        witness.hear(rank, message)
    missing = job.ranks - len({rank for _, rank, _ in messages})
    if missing:
        raise Finding(f"{counted(missing, 'rank')} did not load within {_LIMIT_S:.0f} s")
    return [tuple(message) for _, rank, message in messages if rank == 0]


def kill_once(job: SavingJob, witness: Witness, dice: random.Random, save_s: float) -> None:
    """Kill a job at a random instant of one of its first saves. Raises Finding when its resume was wrong."""
    deadly_save = dice.choice((1, 1, 2, 3))
    delay = dice.uniform(0, _BEYOND * save_s)
    victims = range(job.ranks) if dice.random() < 0.5 else [dice.randrange(job.ranks)]
    mourning = dice.uniform(0, _MOURNING_S)
    deaths = tuple(delay if rank in victims else delay + mourning for rank in range(job.ranks))
    live(replace(job, deaths=deaths, deadly_save=deadly_save), witness)


def check_crashes(driver: Driver) -> int:
    """Kill a job at random instants of its saves; every resume must find a whole checkpoint.

    Ranks train a small model and save after every step. At an instant drawn from the time a save takes (measured first)
    a signal ends one rank or all at once, as SIGKILL does. The next job must load what ``latest`` names, nothing older
    than the last save that had ended, with exactly the state reported before that save; its log must name every
    unfinished save, and its next save must clear them away. Training is deterministic, so a step that is done again
    must have the very state it had before. The checkpoints stay where a resume was wrong.
    """
    options = driver.options
    seed = options.seed
    top = tempfile.mkdtemp(prefix="ds_verify_crash_", dir=options.folder)
    witness = Witness(Path(top), options.background)
    job = SavingJob(top, options.ranks, options.stage, options.background)
    try:
        messages = live(replace(job, background=False, saves=_MEASURED), witness)
        save_s = statistics.median_high(m[2] for m in messages if m[0] == "saved")  # until the checkpoint has its name
        times = f"a save takes {1000 * save_s:.0f} ms; killing one rank or all at random instants of it"
        driver.say(f"{counted(options.ranks, 'rank')}, {times}")
        for number in range(1, options.kills + 1):
            seed = options.seed + number - 1
            dice = random.Random(seed)
            kill_once(replace(job, tag=dice.choice(("step{}", "step{}", "newest"))), witness, dice, save_s)
            if number % _REPORTED_EVERY == 0:
                driver.say(f"{number} kills, {witness.skipped} unfinished saves")
        live(replace(job, saves=0), witness)
    except (Finding, RankFailure) as failure:
        raise Finding(f"kill with --seed {seed}: {failure}\nthe checkpoints are in {top}") from failure
    except BaseException:
        shutil.rmtree(top, ignore_errors=True)
        raise
    shutil.rmtree(top, ignore_errors=True)
    skipped = f"{witness.skipped} unfinished saves skipped"
    driver.say(f"{options.kills} kills: every resume found a whole checkpoint; {skipped}")
    return 0
