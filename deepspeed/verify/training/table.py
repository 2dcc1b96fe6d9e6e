"""A table of names and ZeRO stages, each row compared with plain PyTorch as ``ds_verify grads`` does."""

import argparse
from collections.abc import Callable, Iterable

from deepspeed.verify.common import Printout
from deepspeed.verify.grads import Errors, largest
from deepspeed.verify.ranks import RankPool


def run_table(
    options: argparse.Namespace, report: Printout, train: Callable[..., Errors], rows: Iterable[tuple[str, int]]
) -> int:
    """``train(name, stage, steps)`` on the ranks for every row; the exit code."""
    with RankPool(options.ranks, time_limit=options.time_limit) as pool:

        def check(name: str, stage: int) -> tuple[str, str]:
            error, kind, where = largest(pool.run(train, name, stage, options.steps))
            fault = f"largest error {error:.3e} in {kind} {where}"
            return f"largest error {error:.1e}  ok", "" if error <= options.tolerance else fault

        for name, stage in rows:
            report.row(f"{name:<32}  stage {stage}", check, name, stage)
    return report.end(f"{options.ranks} ranks, {options.steps} steps each", "all equal to plain PyTorch")
