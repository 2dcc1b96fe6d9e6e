"""The data gate: after a resume on another number of ranks the rest of the epoch holds every remaining sample exactly
once.

Ranks train a tiny model over numbered samples, save in the middle of an epoch and end. Other ranks load and train to
the end of it. The samples that both have seen are counted; workers fetch ahead meanwhile, as in a real run.

Every rank must get equally many samples. Where they do not divide, the last round of the epoch is filled with samples
seen before, as torch's DistributedSampler does; these few are told and not counted.
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


def train_and_save(folder: str, samples: int, batch: int, workers: int, steps: int) -> list[int]:
    """Train ``steps`` steps on the ranks of this process group and save to ``folder``; what this rank saw.
    Collective.
    """
    with _may_have_children():
        engine = _engine(samples, batch, workers)
        seen = _train(engine, steps)
        engine.save_checkpoint(folder)
        engine.destroy()
    return seen


def load_and_train(folder: str, samples: int, batch: int, workers: int) -> list[int]:
    """Load from ``folder`` and train to the end of the epoch; what this rank saw. Collective."""
    with _may_have_children():
        engine = _engine(samples, batch, workers)
        engine.load_checkpoint(folder)
        seen = _train(engine, None)
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
    found = [
        f"{name}: ranks saw {sorted({len(r) for r in run})} samples"
        for name, run in runs.items()
        if len({len(r) for r in run}) > 1
    ]
    if found:
        return found
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
    """Add ``data`` to the subcommands of ``ds_verify``."""
    parser = commands.add_parser(
        "data",
        help="count the samples of an epoch that is saved on some ranks and resumed on others",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--save-n", type=int, default=4, metavar="RANKS", help="ranks that begin the epoch and save (default 4)"
    )
    parser.add_argument(
        "--load-n", type=int, default=3, metavar="RANKS", help="ranks that load and finish it (default 3)"
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each rank's loader (default 2)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples of an epoch (default {SAMPLES})")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"samples of a batch on each rank (default {BATCH})")
    parser.add_argument("--at", type=int, metavar="STEP", help="steps before the save (default: a third of the epoch)")
    parser.add_argument(
        "--time-limit", type=float, default=180.0, help="seconds each of the two runs may take (default 180)"
    )


def _steps(options: argparse.Namespace) -> int:
    """Steps before the save; raises ValueError for numbers that cannot be."""
    for name in ("save_n", "load_n", "samples", "batch"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if options.workers < 0:
        raise ValueError("--workers must not be negative")
    steps = -(-options.samples // (options.save_n * options.batch))
    if options.at is not None and not 0 <= options.at <= steps:
        raise ValueError(
            f"--at {options.at}: an epoch of {options.samples} samples has {steps} steps of {options.save_n} x "
            f"{options.batch}"
        )
    return max(1, steps // 3) if options.at is None else options.at


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run ``ds_verify data``; raises ValueError (bad input) before any rank is started."""
    steps = _steps(options)
    common = (options.samples, options.batch, options.workers)
    with tempfile.TemporaryDirectory(prefix="ds_verify_") as folder:
        try:
            with RankPool(options.save_n) as pool:
                before = pool.run(train_and_save, folder, *common, steps, time_limit=options.time_limit)
            _tell(out, f"{options.save_n} ranks, {options.workers} workers each", before, "saved")
            with RankPool(options.load_n) as pool:
                after = pool.run(load_and_train, folder, *common, time_limit=options.time_limit)
        except RankFailure as failure:
            out.write(f"{failure}\nFAIL\n")
            return 1
    _tell(out, f"{options.load_n} ranks, {options.workers} workers each", after, "end of the epoch")
    left = max(0, options.samples - sum(map(len, before)))
    if extra := padding(left, options.load_n):
        out.write(f"{extra} of these only fill the last round of {options.load_n} ranks\n")
    wrong = faults(before, after, options.samples)
    out.write("\n".join(wrong) + "\nFAIL\n" if wrong else f"{options.samples} samples: no sample twice, none missing\n")
    return 1 if wrong else 0


def _tell(out: TextIO, who: str, seen: list[list[int]], end: str) -> None:
    out.write(f"{who}: {sum(map(len, seen))} samples, then {end}\n")
    out.flush()
