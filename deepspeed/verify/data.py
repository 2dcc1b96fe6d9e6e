"""The data gate: after a resume on other ranks the rest of the epoch holds every remaining sample exactly once.

Ranks train a tiny model over numbered samples, save in the middle of an epoch and end. Other ranks load and train to
the end of it. The samples that both have seen are counted; workers fetch ahead meanwhile, as in a real run.

Every rank must get equally many samples. Where they do not divide, the last round of the epoch is filled with samples
seen before, as torch's DistributedSampler does; these few are mentioned and not counted.
"""

import argparse
import multiprocessing

import torch
from torch import nn
from torch.utils.data import TensorDataset

import deepspeed
from deepspeed.verify.common import Finding, Printout
from deepspeed.verify.ranks import RankPool, scratch

_SHOWN = 8
_WIDTH = 4


def train(folder: str, samples: int, batch: int, workers: int, steps: int | None) -> list[int]:
    """Train ``steps`` steps and save, or (None) load and finish the epoch; the samples seen, in order. Collective."""
    multiprocessing.current_process().daemon = False  # a rank of the pool is one, and may not start workers so
    multiprocessing.set_start_method(None, force=True)  # nor are they to start as ranks do
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine = deepspeed.initialize(model=nn.Linear(_WIDTH, 1), config=config)[0]
    numbered = TensorDataset(torch.randn(samples, _WIDTH), torch.arange(samples))
    loader = engine.training_dataloader = engine.deepspeed_io(numbered, num_local_io_workers=workers)
    if steps is None:
        engine.load_checkpoint(folder)
    seen: list[int] = []
    for step, (rows, numbers) in enumerate(loader if steps != 0 else (), 1):
        seen += numbers.tolist()
        engine.backward(engine(rows).square().mean())
        engine.step()
        if step == steps:
            break
    if steps is not None:
        engine.save_checkpoint(folder)
    engine.destroy()
    return seen


def faults(before: list[list[int]], after: list[list[int]], samples: int) -> list[str]:
    """What is wrong with an epoch of which the saving ranks saw ``before`` and the loading ranks ``after``.

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
        seen[1] = seen[1][: len(seen[1]) - -left % len(after)]  # what fills the last round
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


def run(options: argparse.Namespace, report: Printout) -> int:
    """Run ``ds_verify data``. Raises ValueError (bad input) before any rank is started, Finding, RankFailure."""
    samples, batch, saving, loading = options.samples, options.batch, options.save_n, options.load_n
    steps = -(-samples // (saving * batch))
    if options.at is not None and options.at > steps:
        raise ValueError(f"--at {options.at}: an epoch of {samples} samples has {steps} steps of {saving} x {batch}")
    at = max(1, steps // 3) if options.at is None else options.at
    runs = []
    with scratch() as folder:
        for world, until, end in ((saving, at, "saved"), (loading, None, "end of the epoch")):
            with RankPool(world, time_limit=options.time_limit) as pool:
                runs.append(pool.run(train, folder, samples, batch, options.workers, until))
            count = sum(map(len, runs[-1]))
            report.say(f"{world} ranks, {options.workers} workers each: {count} samples, then {end}")
    if extra := -max(0, samples - sum(map(len, runs[0]))) % loading:
        report.say(f"{extra} of these only fill the last round of {loading} ranks")
    if wrong := faults(runs[0], runs[1], samples):
        raise Finding("\n".join(wrong))
    report.say(f"{samples} samples: no sample twice, none missing")
    return 0
