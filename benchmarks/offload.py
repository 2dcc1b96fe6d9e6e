"""A step of ZeRO-Offload on the simulated device, beside what bounds it: one row for each model, plan and job.

    PYTHONPATH=. python benchmarks/offload.py                       # the table; docs/offload.md shows stage 3; minutes
    PYTHONPATH=. python benchmarks/offload.py 1B:2:1 7B:3:8         # MODEL:STAGE:RANKS, some rows only
    PYTHONPATH=/other/tree python benchmarks/offload.py             # another tree's, to compare with

H100 SXM on PCIe 5 x16 with 16 cores and their share of the host's memory for each (``--cores 128``: one rank has those
of the whole node). bf16 AdamW, gradient clipping, one sample of 4,096 tokens. *bound* is the largest of three times:
compute; bytes over the bus, 2 a parameter each way; bytes over the memory of the host, 26 a parameter for AdamW
and 2 for the rounded weights.
"""

import argparse
import functools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed.tools.simulate.costs import Machine, load_machine
from deepspeed.tools.simulate.events import COMPUTE
from deepspeed.tools.simulate.models import subject_of
from deepspeed.tools.simulate.run import Outcome, RankJob, TrainingLoop, run_job, simulate

SHAPES = {"1B": (2048, 18), "7B": (4096, 32)}  # width and blocks
ROWS = [f"{model}:{level}:{ranks}" for model in SHAPES for level in (2, 3) for ranks in (1, 8)]
BUS_BYTES, HOST_BYTES = 2, 26 + 2


def config_of(level: int, *, norm: bool = True) -> dict[str, Any]:
    """ZeRO-Offload, all else at its default; without ``norm`` nothing in a step needs that of the gradients."""
    return {
        "gradient_clipping": 1.0 if norm else 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True, "check_grad_overflow": norm},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": level, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }


def machine_of(ranks: int, cores: int) -> Machine:
    """A rank's share of the host is that of ``cores``; eight of 16 share one of 128."""
    machine = load_machine("h100")
    alone = ranks == 1 and cores == 16
    return replace(machine, values=machine.values | {"gpus_per_node": 1}) if alone else machine


class Windows(TrainingLoop):
    """A step of it is a window of so many updates."""

    def __init__(self, updates: int, *what: Any) -> None:
        super().__init__(*what)
        self._updates = updates

    def step(self, number: int) -> None:
        for update in range(self._updates):
            super().step(number * self._updates + update)


def run(
    row: str, cores: int, *, block: dict[str, Any] | None = None, keep: bool = False, norm: bool = True,
    zenflow: dict[str, Any] | None = None,
) -> tuple[Outcome, Machine, int]:  # fmt: skip
    """One row, the machine as the rank finds it, and the number of ranks. ``block``: more of ``offload_optimizer``;
    ``keep``: with every span of the last step. With a block ``zenflow`` the steps of its third window are one.
    """
    model, level, ranks = row.split(":")
    width, blocks = SHAPES[model]
    shape = {"model_type": "gpt2", "n_embd": width, "n_layer": blocks, "n_head": width // 128, "vocab_size": 32000}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(str(shape | {"n_positions": 4096}).replace("'", '"'))
        subject = subject_of(str(path), samples=1, sequence=4096, recompute=False)
    machine = machine_of(int(ranks), cores)
    config = config_of(int(level), norm=norm)
    config["zero_optimization"]["offload_optimizer"] |= block or {}
    if zenflow is None:
        outcome = simulate(subject, config, machine, world=int(ranks), steps=4, keep=keep)
    else:
        config["zero_optimization"]["zenflow"] = zenflow
        job = RankJob(config, machine, int(ranks), keep=keep, steps=3)
        outcome = run_job(job, subject, loop=functools.partial(Windows, zenflow["update_interval"]))
    return outcome, machine.used_by(int(ranks)), int(ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=ROWS, help="MODEL:STAGE:RANKS")
    parser.add_argument("--cores", type=int, choices=(16, 128), default=16)
    parser.add_argument("--unclipped", action="store_true", help="nothing needs the norm")
    parser.add_argument("--zenflow", type=int, metavar="S", help="the host updates every S steps, beside them; a mean")
    parser.add_argument("--early", action="store_true", help="updates begin beside the backward: super_offload")
    parser.add_argument("--delayed", action="store_true", help="the update goes on beside the next step")
    options = parser.parse_args()
    say, block = sys.stdout.write, {"super_offload": True} if options.early else {}
    block |= {"delayed_update": True} if options.delayed else {}
    zenflow = {"update_interval": options.zenflow, "overlap_step": True} if options.zenflow else None
    say("| model, stage, ranks | step | the program waits | places | kernels | bus | host memory | step / bound |\n")
    say("|---|---|---|---|---|---|---|---|\n")
    for row in options.rows:
        outcome, machine, ranks = run(row, options.cores, block=block, norm=not options.unclipped, zenflow=zenflow)
        seconds = outcome.seconds / (options.zenflow or 1)
        mine = outcome.parameters / ranks
        bounds = [outcome.busy[COMPUTE] / (options.zenflow or 1), BUS_BYTES * mine / machine["bus_rate"]]
        bounds.append(HOST_BYTES * mine / machine["adam_rate"])
        kernels, bus, host = (f"{1e3 * seconds:,.0f} ms" for seconds in bounds)
        waits, blocked = sum(outcome.waits.values()), sum(outcome.waited.values())
        say(f"| {row.replace(':', ', ')} | {1e3 * seconds:,.0f} ms | {1e3 * blocked:,.0f} ms | {waits} ")
        say(f"| {kernels} | {bus} | {host} | {seconds / max(bounds):.2f} |\n")
        sys.stdout.flush()
        assert not outcome.unordered, outcome.unordered[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
