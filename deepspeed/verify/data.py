"""The data gate: after a resume on another number of ranks the rest of the epoch holds every remaining sample exactly
once.

Ranks train a tiny model over numbered samples, save in the middle of an epoch and end. Other ranks load and train to
the end of it. The samples that both have seen are counted; workers fetch ahead meanwhile, as in a real run.

Every rank must get equally many samples. Where they do not divide, the last round of the epoch is filled with samples
seen before, as torch's DistributedSampler does; these few are mentioned and not counted.
"""

import argparse
import contextlib
import multiprocessing
import tempfile
from collections.abc import Iterator
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import deepspeed
from deepspeed.verify.common import Printout, add_numbers, check_numbers, command
from deepspeed.verify.ranks import RankFailure, RankPool

SAMPLES = 997  # a prime: no number of ranks divides it
BATCH = 4
_SHOWN = 8
_WIDTH = 4


class NumberedSamples(Dataset[dict[str, Tensor]]):
    """``count`` random rows, each with its number: {"x": [4] fp32, "number": [] int64}."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randn(_WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": row, "number": torch.tensor(index)}


@contextlib.contextmanager
def _may_have_children() -> Iterator[None]:
    """A rank of the pool is a daemon, and daemons may not start worker processes."""
    process = multiprocessing.current_process()
    daemon, process.daemon = process.daemon, False
    try:
        yield
    finally:
        process.daemon = daemon


def _engine(samples: int, batch: int, workers: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine = deepspeed.initialize(model=nn.Linear(_WIDTH, 1), config=config)[0]
    engine.training_dataloader = engine.deepspeed_io(NumberedSamples(samples), num_local_io_workers=workers)
    return engine


def _train(engine: Any, steps: int | None) -> list[int]:
    """Train ``steps`` steps (None: to the end of the epoch); the numbers of the samples, in order."""
    seen: list[int] = []
    if steps == 0:
        return seen
    for step, batch in enumerate(engine.training_dataloader, 1):
        seen += batch["number"].tolist()
        engine.backward(engine(batch["x"]).square().mean())
        engine.step()
        if step == steps:
            break
    return seen


def train(folder: str, samples: int, batch: int, workers: int, steps: int | None) -> list[int]:
    """Train ``steps`` steps and save, or (None) load and train to the end; the samples seen. Collective."""
    with _may_have_children():
        engine = _engine(samples, batch, workers)
        if steps is None:
            engine.load_checkpoint(folder)
        seen = _train(engine, steps)
        if steps is not None:
            engine.save_checkpoint(folder)
        engine.destroy()
    return seen


def padding(rest: int, ranks: int) -> int:
    """Samples that fill the last round when ``rest`` samples are left for ``ranks`` ranks."""
    return -rest % ranks


def faults(before: list[list[int]], after: list[list[int]], samples: int) -> list[str]:
    """What is wrong with an epoch of which the saving ranks saw ``before`` and the loading ranks ``after``; empty when
    nothing is.

    One list of sample numbers for each rank, in the order seen. The padding at the end of the epoch is left out.
    """
    runs = {"save": before, "load": after}
    counts = {name: sorted({len(r) for r in run}) for name, run in runs.items()}
    if uneven := [f"{name}: ranks saw {count} samples" for name, count in counts.items() if len(count) > 1]:
        return uneven
    # in the order of the epoch, in which ranks take turns: padding is at its end
    seen = [
        [(number, f"rank {rank} of the {name}") for turn in zip(*run, strict=True) for rank, number in enumerate(turn)]
        for name, run in runs.items()
    ]
    left = samples - len(seen[0])
    seen[0] = seen[0][:samples]
    if left > 0:
        seen[1] = seen[1][: len(seen[1]) - padding(left, len(after))]
    places: dict[int, list[str]] = {}
    for number, place in [*seen[0], *seen[1]]:
        places.setdefault(number, []).append(place)
    twice = [f"{number} ({', '.join(where)})" for number, where in sorted(places.items()) if len(where) > 1]
    missing = [str(number) for number in range(samples) if number not in places]
    return [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for what, names in (("seen twice", twice), ("missing", missing))
        if names
    ]


def add_parser(commands: Any) -> None:
    """Add ``data`` to the commands of ``ds_verify``."""
    text = "count the samples of an epoch that is saved on some ranks and resumed on others"
    add_numbers(
        command(commands, "data", text, __doc__),
        ("--save-n", 4, "ranks that begin the epoch and save"),
        ("--load-n", 3, "ranks that load and finish it"),
        ("--workers", 2, "worker processes of each rank's loader"),
        ("--samples", SAMPLES, "samples of an epoch"),
        ("--batch", BATCH, "samples of a batch on each rank"),
        ("--at", None, "steps before the save (default: a third of the epoch)"),
        ("--time-limit", 180.0, "seconds each of the two runs may take"),
    )


def _steps(options: argparse.Namespace) -> int:
    """Steps before the save; raises ValueError for numbers that cannot be."""
    check_numbers(options, "save_n", "load_n", "samples", "batch")
    if options.workers < 0:
        raise ValueError("--workers must not be negative")
    steps = -(-options.samples // (options.save_n * options.batch))
    if options.at is not None and not 0 <= options.at <= steps:
        epoch = f"an epoch of {options.samples} samples has {steps} steps of {options.save_n} x {options.batch}"
        raise ValueError(f"--at {options.at}: {epoch}")
    return max(1, steps // 3) if options.at is None else options.at


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run ``ds_verify data``; raises ValueError (bad input) before any rank is started."""
    steps, report = _steps(options), Printout(out)
    runs = []
    with tempfile.TemporaryDirectory(prefix="ds_verify_") as folder, contextlib.ExitStack() as pools:
        first = pools.enter_context(RankPool(options.save_n))
        second = first if options.load_n == options.save_n else pools.enter_context(RankPool(options.load_n))
        for pool, until, end in ((first, steps, "saved"), (second, None, "end of the epoch")):
            arguments = (folder, options.samples, options.batch, options.workers, until)
            try:
                runs.append(pool.run(train, *arguments, time_limit=options.time_limit))
            except RankFailure as failure:
                report.say(f"{failure}\nFAIL")
                return 1
            count = sum(map(len, runs[-1]))
            report.say(f"{pool.world} ranks, {options.workers} workers each: {count} samples, then {end}")
    rest = max(0, options.samples - sum(map(len, runs[0])))
    if extra := padding(rest, options.load_n):
        report.say(f"{extra} of these only fill the last round of {options.load_n} ranks")
    wrong = faults(runs[0], runs[1], options.samples)
    report.say("\n".join([*wrong, "FAIL"]) if wrong else f"{options.samples} samples: no sample twice, none missing")
    return 1 if wrong else 0
