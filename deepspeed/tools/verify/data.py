"""The gate of an epoch that is saved on some ranks and resumed on others."""

import multiprocessing

import torch
from torch import nn
from torch.utils.data import TensorDataset

import deepspeed
from deepspeed.tools.verify.driver import Driver, Finding
from deepspeed.tools.verify.ranks import scratch

_SHOWN = 8
_WIDTH = 4


def train(folder: str, samples: int, batch: int, workers: int, steps: int | None) -> list[int]:
    """Train ``steps`` steps and save, or (None) load and finish the epoch; return the samples in order. Collective."""
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
    """Name the faults of an epoch of which the saving ranks saw ``before`` and the loading ranks ``after``.

    One list of sample numbers for each rank, in the order seen. The padding at the end of the epoch is left out.
    """
    runs = {"save": before, "load": after}
    counts = {name: sorted({len(r) for r in run}) for name, run in runs.items()}
    uneven = [f"{name}: ranks saw {count} samples" for name, count in counts.items() if len(count) > 1]
    if uneven:
        return uneven
    # in the order of the epoch, in which ranks take turns: padding is at its end
    seen = [
        [(number, f"rank {rank} of the {name}") for turn in zip(*run, strict=True) for rank, number in enumerate(turn)]
        for name, run in runs.items()
    ]
    remaining = samples - len(seen[0])
    seen[0] = seen[0][:samples]
    if remaining > 0:
        seen[1] = seen[1][: len(seen[1]) - -remaining % len(after)]  # what fills the last round
    places: dict[int, list[str]] = {}
    for number, place in [*seen[0], *seen[1]]:
        places.setdefault(number, []).append(place)
    twice = [f"{number} ({', '.join(where)})" for number, where in sorted(places.items()) if len(where) > 1]
    missing = [str(number) for number in range(samples) if number not in places]
    return [
        f"{len(names)} {fault}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for fault, names in (("seen twice", twice), ("missing", missing))
        if names
    ]


def check_data(driver: Driver) -> int:
    """Check that an epoch resumed on another number of ranks has every remaining sample exactly once.

    Ranks train a tiny model over numbered samples and save in the middle of an epoch; others load and finish it, while
    workers fetch ahead. Every rank must get equally many samples. Where they do not divide, the last round is filled
    with samples seen before, as torch's DistributedSampler does; these few are mentioned and not counted.
    """
    options = driver.options
    samples, workers = options.samples, options.workers
    steps = -(-samples // (options.save_n * options.batch))
    if options.epoch_at is not None and options.epoch_at > steps:
        size = f"{options.save_n} x {options.batch}"
        raise ValueError(f"--at {options.epoch_at}: an epoch of {samples} samples has {steps} steps of {size}")
    at = max(1, steps // 3) if options.epoch_at is None else options.epoch_at
    runs = []
    with scratch() as folder:
        for world, until, end in ((options.save_n, at, "saved"), (options.load_n, None, "end of the epoch")):
            runs.append(driver.pools(world)[0].run(train, folder, samples, options.batch, workers, until))
            count = sum(map(len, runs[-1]))
            driver.say(f"{world} ranks, {workers} workers each: {count} samples, then {end}")
    extra = -max(0, samples - sum(map(len, runs[0]))) % options.load_n
    if extra:
        driver.say(f"{extra} of these only fill the last round of {options.load_n} ranks")
    wrong = faults(runs[0], runs[1], samples)
    if wrong:
        raise Finding("\n".join(wrong))
    driver.say(f"{samples} samples: no sample twice, none missing")
    return 0
