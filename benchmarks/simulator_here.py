"""Step times of this project's CPU ranks beside what the simulator says of them with this machine's own constants.

    PYTHONPATH=. python benchmarks/simulator.py here [--rounds 5] [--write-docs]

Every round calibrates and trains small GPTs on one and on two gloo ranks with one thread each, in turns; constants and
step times are medians over the rounds. What the device does (on the CPU: what the rank's one thread computes) is
measured in time of the processor, which other programs on the machine do not lengthen; collectives by the clock. A step
is measured both ways: by the clock, and in processor time of a rank with all its threads, which is what the clock would
show if every rank had a core to itself and never waited.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.tools.simulate.calibrate import run as calibration
from deepspeed.tools.simulate.calibrate.device import measure_device
from deepspeed.tools.simulate.costs import Machine, load_machine
from deepspeed.tools.simulate.models import Decoder, Shape, decoder_subject
from deepspeed.tools.simulate.run import simulate
from deepspeed.tools.verify.ranks import RankPool

SAMPLES, SEQUENCE, WARM, STEPS = 4, 128, 4, 8
WORLDS = (1, 2)


class Setup(NamedTuple):
    """What is trained: a GPT of ``blocks`` blocks of ``width``, at a ZeRO stage."""

    width: int
    blocks: int
    zero: int

    def shape(self) -> Shape:
        return Shape(
            width=self.width, blocks=self.blocks, heads=self.width // 64, inner=4 * self.width, vocabulary=2048,
            positions=SEQUENCE, key_heads=self.width // 64,
        )  # fmt: skip

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.zero},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }


SETUPS = [Setup(width, blocks, zero) for width, blocks in ((128, 4), (256, 4)) for zero in (1, 3)]


def step_seconds(setup: Setup) -> list[tuple[float, float]]:
    """On every rank: some steps of real training, by the clock and in time of the processor."""
    torch.manual_seed(0)
    engine = deepspeed.initialize(model=Decoder(setup.shape()), config=setup.config())[0]
    tokens = torch.randint(2048, (SAMPLES, SEQUENCE))
    seconds: list[tuple[float, float]] = []
    for _ in range(WARM + STEPS):
        dist.barrier()
        begin, begin_busy = time.perf_counter(), time.process_time()
        engine.backward(engine(tokens))
        engine.step()
        seconds.append((time.perf_counter() - begin, time.process_time() - begin_busy))
    engine.destroy()
    return seconds[WARM:]


def constants_of(path: str) -> None:
    """On every rank: measure the machine and write its file."""

    def by_processor(*args: Any) -> Any:
        with patch.object(time, "perf_counter", time.thread_time):
            return measure_device(*args)

    with patch.object(calibration, "measure_device", by_processor):
        calibration.calibrate(Path(path))


def _median_machine(paths: list[Path]) -> Machine:
    machines = [load_machine(str(path)) for path in paths]
    values = {name: statistics.median(m[name] for m in machines) for name in machines[0].values}
    return Machine(machines[0].name, values, machines[0].on_host)


def here(rounds: int) -> str:
    """The table, and under it the conditions."""
    measured = defaultdict[tuple[Setup, int], list[tuple[float, float]]](list)
    files = defaultdict[int, list[Path]](list)
    loads: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ds_simulate_") as folder, RankPool(1) as one, RankPool(2) as two:
        pools = {1: one, 2: two}
        for turn in range(rounds):
            for world in WORLDS[:: -1 if turn % 2 else 1]:
                loads.append(os.getloadavg()[0])
                files[world].append(Path(folder) / f"{world}-{turn}.json")
                pools[world].run(constants_of, str(files[world][-1]), time_limit=600)
                for setup in SETUPS:
                    by_rank = pools[world].run(step_seconds, setup, time_limit=600)
                    measured[setup, world] += itertools.chain.from_iterable(by_rank)
        machines = {world: _median_machine(paths) for world, paths in files.items()}
        facts = json.loads(files[2][-1].read_text())["measured"]
    lines = [
        "| width, blocks | stage | ranks | clock | least | processor | simulated | error: clock | error: processor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    errors = []
    for setup in SETUPS:
        for world in WORLDS:
            simulated = _simulated(setup, machines[world], world)
            walls, busy = zip(*measured[setup, world], strict=True)
            middles = statistics.median(walls), statistics.median(busy)
            errors.append([simulated / middle - 1 for middle in middles])
            times = [middles[0], min(walls), middles[1], simulated]
            cells = [f"{setup.width}, {setup.blocks}", setup.zero, world, *(f"{1e3 * t:.1f} ms" for t in times)]
            lines.append(f"| {' | '.join(map(str, [*cells, *(f'{e:+.0%}' for e in errors[-1])]))} |")
    clock, processor = ([abs(pair[i]) for pair in errors] for i in range(2))
    head = (
        f"`benchmarks/simulator.py here`, {facts['date'][:10]}: {facts['device']}, {facts['cores']} cores, "
        f"a thread a rank, torch {facts['torch']}; {rounds} rounds, load average {min(loads):.1f} to {max(loads):.1f}. "
        f"Median error of the clock {statistics.median(clock):.0%}, worst {max(clock):.0%}; of the processor's time "
        f"{statistics.median(processor):.0%}, worst {max(processor):.0%}."
    )
    return "\n".join([head, "", *lines])


def _simulated(setup: Setup, machine: Machine, world: int) -> float:
    subject = decoder_subject("small GPT", setup.shape(), samples=SAMPLES, sequence=SEQUENCE, recompute=False)
    # the model is built whole, as it was on the ranks
    return simulate(subject, setup.config(), machine, world=world, sharded_init=False).seconds
