"""The crash gate: a job is killed at random instants of its saves, and every resume must find a whole checkpoint.

Ranks train a small model and save after every step. At an instant drawn from the time a save takes (measured first) one
rank or all get SIGKILL. The next job resumes: it must load what ``latest`` names, nothing older than the last save that
had ended, with exactly the state that the dead job reported before it saved it; the log must name every unfinished
save; the next save must clear them away. Training is deterministic, so a step that is done again after a resume must
also have the very state it had before.
"""

import argparse
import contextlib
import logging
import os
import random
import re
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.observe.log import logger
from deepspeed.verify.common import Finding, Printout
from deepspeed.verify.ranks import Processes, enter_world
from deepspeed.verify.runs import hash_of, seed_everything, snapshot

_WIDTH = 64
_LIMIT_S = 60.0  # until a job reports what is waited for
_MEASURED = 4  # saves that are timed first
_MOURNING_S = 0.2  # at most, between the end of one rank and that of the others
_BEYOND = 1.15  # of a save's duration: the first moments after it count too
_REPORTED_EVERY = 25
_UNFINISHED = re.compile(r"\..+\.saving-.*")

Message = tuple[Any, ...]


@dataclass(frozen=True)
class SavingJob:
    """What the ranks do. ``tag``: with ``{}`` for the step, or one that is overwritten; ``trap(rank)`` arms a rank."""

    folder: str
    ranks: int = 2
    stage: int = 2
    background: bool = False
    tag: str = "step{}"
    trap: Callable[[int], None] | None = None
    keep_last: int = 2


def _train(job: SavingJob, connection: Connection, rank: int) -> None:
    """In a rank: resume, then train and save for ever."""
    seed_everything(7)
    wide = 4 * _WIDTH
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
    path, _ = engine.load_checkpoint(job.folder)
    connection.send(("loaded", engine.global_steps, hash_of(snapshot(engine)), path, list(lines)))
    if job.trap is not None:
        job.trap(rank)
    while True:
        generator = torch.Generator().manual_seed(1000 * engine.global_steps + rank)
        engine.backward(engine(torch.randn(4, _WIDTH, generator=generator)).square().mean())
        engine.step()
        connection.send(("saving", engine.global_steps, hash_of(snapshot(engine))))
        begun = time.monotonic()
        engine.save_checkpoint(job.folder, tag=job.tag.format(engine.global_steps))
        connection.send(("saved", engine.global_steps, time.monotonic() - begun))


def _rank(rank: int, world: int, meeting: str, port: int, connection: Connection, job: SavingJob) -> None:
    enter_world(rank, world, meeting, port)
    try:
        _train(job, connection, rank)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))


@dataclass
class Witness:
    """What the jobs have reported so far, and what a resume must therefore find."""

    folder: Path
    background: bool = False
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # by step and rank
    ended: int = 0  # the step of the newest save that is known to have ended
    left: list[str] = field(default_factory=list)  # unfinished saves the last job left
    expected: str | None = None
    skipped: int = 0

    def look(self) -> None:
        """Between two jobs: what lies in the folder now."""
        self.left = sorted(p.name for p in self.folder.glob(".*") if _UNFINISHED.fullmatch(p.name) and p.is_dir())
        self.skipped += len(self.left)
        latest = self.folder / "latest"
        self.expected = latest.read_text(encoding="utf-8") if latest.is_file() else None

    def hear(self, rank: int, message: Message) -> None:
        """Check one message. Raises Finding."""
        kind, step, *rest = message
        if kind == "failed":
            raise Finding(f"rank {rank} failed:\n{step}")
        if kind == "loaded":
            self._loaded(rank, step, *rest)
        elif kind == "saving":
            known = self.digests.setdefault((step, rank), rest[0])
            if known != rest[0]:
                raise Finding(f"step {step} on rank {rank} has another state after the resume: {rest[0]}, not {known}")
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
        if state != (known := self.digests.get((step, rank))):
            raise Finding(f"{path} gave rank {rank} the state {state}, not {known} of step {step}")
        unnamed = [name for name in self.left if rank == 0 and not any(name in line for line in log)]
        if unnamed:
            raise Finding(f"the log of the resume does not name {', '.join(unnamed)}; it says {log}")


def live(
    job: SavingJob, witness: Witness, *, until: Callable[..., bool], then: Callable[..., None] = lambda _: None
) -> list[Message]:
    """Run the job until rank 0 sends an ``until``, do ``then`` and kill what is left; rank 0's messages."""
    witness.look()
    heard: list[Message] = []
    met, loaded = False, set[int]()
    with contextlib.closing(Processes(job.ranks, _rank, job)) as life:
        for rank, message in life.messages(_LIMIT_S):
            if message is None or message[0] == "failed" and job.trap is not None:
                continue  # another rank's end
            loaded |= {rank}  # it is the first that a rank reports
            witness.hear(rank, message)
            heard += [message] if rank == 0 else []
            met = met or rank == 0 and until(message)
            if met and len(loaded) == job.ranks:
                break
        if met:
            then(life)
        life.kill()
        for rank, message in life.messages(_LIMIT_S):  # what they reported before they died
            if message is not None and message[0] != "failed":
                witness.hear(rank, message)
    if len(loaded) < job.ranks or not met and job.trap is None:
        raise Finding(f"{job.ranks - len(loaded)} ranks did not load, or none saved, within {_LIMIT_S:.0f} s")
    return heard


def kill_once(job: SavingJob, witness: Witness, dice: random.Random, save_s: float) -> None:
    """One job, killed at a random instant of one of its first saves. Raises Finding when its resume was wrong."""
    target, delay = dice.choice((1, 1, 2, 3)), dice.uniform(0, _BEYOND * save_s)
    victims = range(job.ranks) if dice.random() < 0.5 else [dice.randrange(job.ranks)]
    mourning = dice.uniform(0, _MOURNING_S)
    begun: list[int] = []

    def at_target(message: Message) -> bool:
        begun.extend([message[1]] if message[0] == "saving" else [])
        return len(begun) == target

    def strike(life: Processes) -> None:
        time.sleep(delay)
        life.kill(victims)
        if len(victims) < job.ranks:
            time.sleep(mourning)

    live(job, witness, until=at_target, then=strike)


def run(options: argparse.Namespace, report: Printout) -> int:
    """Run ``ds_verify crash``; 0 when every resume was right. Raises Finding; the checkpoints stay then."""
    top, seed = tempfile.mkdtemp(prefix="ds_verify_crash_", dir=options.folder), options.seed
    witness = Witness(Path(top), options.background)
    job = SavingJob(top, options.ranks, options.stage, options.background)
    try:
        heard = live(replace(job, background=False), witness, until=lambda m: m[0] == "saved" and m[1] >= _MEASURED)
        witness.ended = 0 if job.background else witness.ended
        save_s = statistics.median_high(m[2] for m in heard if m[0] == "saved")  # until the checkpoint has its name
        times = f"a save takes {1000 * save_s:.0f} ms; killing one rank or all at random instants of it"
        report.say(f"{options.ranks} ranks, {times}")
        for number in range(options.kills):
            seed = options.seed + number
            dice = random.Random(seed)
            kill_once(replace(job, tag=dice.choice(("step{}", "step{}", "newest"))), witness, dice, save_s)
            if (number + 1) % _REPORTED_EVERY == 0:
                report.say(f"{number + 1} kills, {witness.skipped} unfinished saves")
        live(job, witness, until=lambda m: m[0] == "loaded")
    except Finding as failure:
        raise Finding(f"kill with --seed {seed}: {failure}\nthe checkpoints are in {top}") from failure
    except BaseException:
        shutil.rmtree(top, ignore_errors=True)
        raise
    shutil.rmtree(top, ignore_errors=True)
    skipped = f"{witness.skipped} unfinished saves skipped"
    report.say(f"{options.kills} kills: every resume found a whole checkpoint; {skipped}")
    return 0
