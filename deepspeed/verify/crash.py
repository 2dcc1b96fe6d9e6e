"""The crash gate: a job is killed at random instants of its saves, and every resume must find a whole checkpoint.

Ranks train a small model and save after every step. At an instant drawn from the time a save takes (measured first) one
rank or all get SIGKILL. The next job resumes: it must load what ``latest`` names, nothing older than the last save that
had ended, with exactly the state that the dead job told before it saved it; the log must name every unfinished save;
the next save must clear them away. Training is deterministic, so a step that is done again after a resume must also
have the very state it had before.
"""

import argparse
import hashlib
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.observe.log import logger
from deepspeed.verify.ranks import _context, _enter_world, _free_port

KILLS = 200
_WIDTH = 64
_LIMIT_S = 60.0  # until a job tells what is waited for
_MEASURED = 4  # saves that are timed first
_MOURNING_S = 0.2  # at most, between the end of one rank and that of the others
_BEYOND = 1.15  # of a save's duration: the first moments after it count too
_TOLD_EVERY = 25
_UNFINISHED = re.compile(r"\..+\.saving-.*")

Message = tuple[Any, ...]


@dataclass(frozen=True)
class Job:
    """What the ranks do. ``tag``: with ``{}`` for the step, or one that is overwritten; ``trap(rank)`` arms a rank
    before it trains.
    """

    folder: str
    ranks: int = 2
    stage: int = 2
    background: bool = False
    tag: str = "step{}"
    trap: Callable[[int], None] | None = None
    keep_last: int | None = 2


class CrashFailure(Exception):
    """A job or a resume that did not do what it must."""


# -- in the ranks --------------------------------------------------------------------------------------------------


def _engine(job: Job) -> Any:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(_WIDTH, 4 * _WIDTH), nn.BatchNorm1d(4 * _WIDTH), nn.Dropout(0.1), nn.Linear(4 * _WIDTH, _WIDTH)
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": job.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
        "checkpoint": {"async": job.background, **({} if job.keep_last is None else {"keep_last": job.keep_last})},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def digest(engine: Any) -> str:
    """Of everything this rank holds that decides how training goes on, taken from the optimizer and the module
    themselves.
    """
    total = hashlib.sha256(repr((engine.global_steps, engine.lr_scheduler.state_dict())).encode())

    def add(name: str, value: Tensor) -> None:
        total.update(name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    for index, param in enumerate(p for group in engine.basic_optimizer.param_groups for p in group["params"]):
        add(f"{index}", param)
        for slot, value in sorted(engine.basic_optimizer.state.get(param, {}).items()):
            add(f"{index}.{slot}", torch.as_tensor(value))
    for name, buffer in engine.module.named_buffers():
        add(name, buffer)
    add("rng", torch.get_rng_state())
    return total.hexdigest()[:16]


def _step(engine: Any) -> None:
    generator = torch.Generator().manual_seed(1000 * engine.global_steps + dist.get_rank())
    engine.backward(engine(torch.randn(4, _WIDTH, generator=generator)).square().mean())
    engine.step()


def _train(rank: int, job: Job, told: Connection) -> None:
    """Resume, then train and save for ever."""
    engine, lines = _engine(job), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(min(logger.level, logging.WARNING))
    path, _ = engine.load_checkpoint(job.folder)
    told.send(("loaded", engine.global_steps, digest(engine), path, list(lines)))
    if job.trap is not None:
        job.trap(rank)
    while True:
        _step(engine)
        told.send(("saving", engine.global_steps, digest(engine)))
        begun = time.monotonic()
        engine.save_checkpoint(job.folder, tag=job.tag.format(engine.global_steps))
        told.send(("saved", engine.global_steps, time.monotonic() - begun))


def _rank(rank: int, job: Job, meeting: str, port: int, told: Connection) -> None:
    os.setsid()  # an interrupt at the terminal is for the parent, which ends its ranks itself
    _enter_world(rank, job.ranks, meeting, port)
    try:
        _train(rank, job, told)
    except BaseException:
        told.send(("failed", traceback.format_exc()))


# -- around them ---------------------------------------------------------------------------------------------------


class Life:
    """One run of the ranks, from their start until somebody kills them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._meeting = tempfile.TemporaryDirectory(prefix="ds_verify_")
        self._processes: list[BaseProcess] = []
        self._told: dict[Any, int] = {}
        port = _free_port()
        context: Any = _context()
        for rank in range(job.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, job, self._meeting.name, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._told[ours] = rank

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(range(self.job.ranks))
        for connection in self._told:
            connection.close()
        self._meeting.cleanup()

    def kill(self, ranks: Any) -> None:
        """SIGKILL to these ranks; returns when they are gone."""
        for rank in ranks:
            self._processes[rank].kill()
        for rank in ranks:
            self._processes[rank].join()

    def told(self, seconds: float = _LIMIT_S) -> Iterator[tuple[int, Message]]:
        """(rank, message) as they come, until every rank is gone or so long has passed."""
        end = time.monotonic() + seconds
        while self._told and (left := end - time.monotonic()) > 0:
            for connection in wait(list(self._told), timeout=left):
                assert isinstance(connection, Connection)
                try:
                    yield self._told[connection], connection.recv()
                except (EOFError, ConnectionResetError):
                    del self._told[connection]


@dataclass
class Witness:
    """What the jobs have told so far, and what a resume must therefore find."""

    folder: Path
    background: bool = False
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # by step and rank
    ended: int = 0  # the step of the newest save that is known to have ended
    left: list[str] = field(default_factory=list)  # unfinished saves the last job left
    expected: str | None = None
    skipped: int = 0

    def look(self) -> None:
        """Between two jobs: what lies in the folder now."""
        names = [p.name for p in self.folder.iterdir()] if self.folder.is_dir() else []
        self.left = sorted(n for n in names if _UNFINISHED.fullmatch(n) and (self.folder / n).is_dir())
        self.skipped += len(self.left)
        latest = self.folder / "latest"
        self.expected = latest.read_text(encoding="utf-8") if latest.is_file() else None

    def hear(self, rank: int, message: Message) -> None:
        """Check one message. Raises CrashFailure."""
        kind, step, *rest = message
        if kind == "failed":
            raise CrashFailure(f"rank {rank} failed:\n{step}")
        if kind == "loaded":
            self._loaded(rank, step, *rest)
        elif kind == "saving":
            known = self.digests.setdefault((step, rank), rest[0])
            if known != rest[0]:
                raise CrashFailure(
                    f"step {step} on rank {rank} has another state after the resume: {rest[0]}, not {known}"
                )
        elif kind == "saved":
            # A call for a background save returns when the one before it has ended.
            self.ended = max(self.ended, step - 1 if self.background else step)
            still = sorted(set(self.left) & set(os.listdir(self.folder))) if rank == 0 else []
            if still:
                raise CrashFailure(f"the next save left {', '.join(still)} behind")

    def _loaded(self, rank: int, step: int, found: str, path: str | None, log: list[str]) -> None:
        if step < self.ended:
            raise CrashFailure(f"rank {rank} resumed from step {step}, but the save of step {self.ended} had ended")
        if path is None:
            if self.expected is not None:
                raise CrashFailure(f"rank {rank} found nothing, though latest names {self.expected}")
            return
        if self.expected is not None and Path(path).name != self.expected:
            raise CrashFailure(f"rank {rank} loaded {path}, but latest names {self.expected}")
        if found != self.digests.get((step, rank)):
            raise CrashFailure(
                f"{path} gave rank {rank} the state {found}, not {self.digests.get((step, rank))} of step {step}"
            )
        unsaid = [name for name in self.left if rank == 0 and not any(name in line for line in log)]
        if unsaid:
            raise CrashFailure(f"the log of the resume does not name {', '.join(unsaid)}; it says {log}")


def live(
    job: Job, witness: Witness, *, until: Callable[[Message], bool], then: Callable[[Life], None] = lambda life: None
) -> list[Message]:
    """Run the job until rank 0 says something that is ``until``, then do ``then`` to it and kill what is left; rank 0's
    messages.

    The ranks may also end by themselves (a trap). Raises CrashFailure.
    """
    witness.look()
    heard: list[Message] = []
    met, loaded = False, set[int]()
    with Life(job) as life:
        for rank, message in life.told():
            if message[0] == "loaded":
                loaded.add(rank)
            if message[0] == "failed" and job.trap is not None:
                continue  # another rank's end
            witness.hear(rank, message)
            heard += [message] if rank == 0 else []
            met = met or rank == 0 and until(message)
            if met and len(loaded) == job.ranks:
                break
        if met:
            then(life)
        life.kill(range(job.ranks))
        for rank, message in life.told():  # what they said before they died
            if message[0] != "failed":
                witness.hear(rank, message)
    if len(loaded) < job.ranks or not met and job.trap is None:
        raise CrashFailure(f"{job.ranks - len(loaded)} ranks did not load, or none saved, within {_LIMIT_S:.0f} s")
    return heard


def measure(job: Job, witness: Witness) -> float:
    """Seconds that a save takes: from its call until the checkpoint has its name."""
    heard = live(replace(job, background=False), witness, until=lambda m: m[0] == "saved" and m[1] >= _MEASURED)
    witness.ended = 0 if job.background else witness.ended
    times = sorted(m[2] for m in heard if m[0] == "saved")
    return float(times[len(times) // 2])


def kill_once(job: Job, witness: Witness, *, dice: random.Random, save_s: float) -> None:
    """One job, killed at a random instant of one of its first saves. Raises CrashFailure when its resume was wrong."""
    target, delay = dice.choice((1, 1, 2, 3)), dice.uniform(0, _BEYOND * save_s)
    victims = range(job.ranks) if dice.random() < 0.5 else [dice.randrange(job.ranks)]
    mourning = dice.uniform(0, _MOURNING_S)
    begun: list[int] = []

    def at_target(message: Message) -> bool:
        begun.extend([message[1]] if message[0] == "saving" else [])
        return len(begun) == target

    def strike(life: Life) -> None:
        time.sleep(delay)
        life.kill(victims)
        if len(victims) < job.ranks:
            time.sleep(mourning)

    live(job, witness, until=at_target, then=strike)


def add_parser(commands: Any) -> None:
    """Add ``crash`` to the commands of ``ds_verify``."""
    parser = commands.add_parser(
        "crash",
        help="kill a job at random instants of its saves; every resume must find a whole checkpoint",
        description=sys.modules[__name__].__doc__ or "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=KILLS, help=f"how often (default {KILLS})")
    parser.add_argument("--ranks", type=int, default=2, help="number of CPU ranks (default 2)")
    parser.add_argument(
        "--stage", type=int, choices=range(4), default=3, help="how states are spread over the ranks (default 3)"
    )
    parser.add_argument(
        "--folder",
        metavar="PATH",
        help="where to save, for example on the filesystem in question (default: a temporary one)",
    )
    parser.add_argument(
        "--async", dest="background", action="store_true", help="save in the background (checkpoint.async)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first kill; kill n has seed + n (default 0)")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run ``ds_verify crash``; 0 when every resume was right. Raises ValueError (bad input) before any rank is
    started.
    """
    if options.kills < 1 or options.ranks < 1:
        raise ValueError("--kills and --ranks must be at least 1")
    if options.folder is not None and not os.path.isdir(options.folder):
        raise ValueError(f"--folder {options.folder} is no folder")
    top = Path(tempfile.mkdtemp(prefix="ds_verify_crash_", dir=options.folder))
    witness = Witness(top, options.background)
    job = Job(str(top), options.ranks, options.stage, options.background)
    seed = options.seed
    try:
        save_s = measure(job, witness)
        out.write(
            f"{options.ranks} ranks, a save takes {1000 * save_s:.0f} ms; killing one rank or all at random "
            "instants of it\n"
        )
        for number in range(options.kills):
            seed = options.seed + number
            dice = random.Random(seed)
            varied = replace(job, tag=dice.choice(("step{}", "step{}", "newest")))
            kill_once(varied, witness, dice=dice, save_s=save_s)
            if (number + 1) % _TOLD_EVERY == 0:
                out.write(f"{number + 1} kills, {witness.skipped} unfinished saves\n")
                out.flush()
        live(job, witness, until=lambda m: m[0] == "loaded")
    except CrashFailure as failure:
        out.write(f"kill with --seed {seed}: {failure}\nthe checkpoints are in {top}\nFAIL\n")
        return 1
    shutil.rmtree(top, ignore_errors=True)
    out.write(
        f"{options.kills} kills: every resume found a whole checkpoint; {witness.skipped} unfinished saves skipped\n"
    )
    return 0
