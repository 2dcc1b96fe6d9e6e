"""A table of names x ZeRO stages, each row compared with plain PyTorch as ``ds_verify grads`` does."""

import argparse
from collections.abc import Callable, Iterable

from deepspeed.observe.program import CommandLine, count_of
from deepspeed.verify.common import Printout
from deepspeed.verify.grads import TOLERANCE, Errors, largest
from deepspeed.verify.ranks import RankPool


def add_table(parser: CommandLine) -> None:
    """Options of a gate whose rows are names x stages."""
    parser.option("--ranks", count_of, 2, "N", "number of CPU ranks")
    parser.option("--steps", count_of, 3, "N", "optimizer steps of one run")
    parser.option("--time-limit", float, 120.0, "N", "seconds one run may take")
    parser.option("--tolerance", float, TOLERANCE, "N", "largest error allowed")


def run_table(
    options: argparse.Namespace, report: Printout, train: Callable[[str, int, int], Errors], names: Iterable[str]
) -> int:
    """``train(name, stage, steps)`` on the ranks for every name and stage; the exit code."""
    with RankPool(options.ranks, time_limit=options.time_limit) as pool:

        def check(name: str, stage: int) -> tuple[str, str]:
            error, kind, where = largest(pool.run(train, name, stage, options.steps))
            fault = f"largest error {error:.3e} in {kind} {where}"
            return f"largest error {error:.1e}  ok", "" if error <= options.tolerance else fault

        for name in names:
            for stage in range(4):
                report.row(f"{name:<32}  stage {stage}", check, name, stage)
    return report.end(f"{options.ranks} ranks, {options.steps} steps each", "all equal to plain PyTorch")
