"""``ds_verify``: check on this machine's CPU that sharded training computes what plain PyTorch computes, wherever
states rest.

    ds_verify grads                                     stage 0-3 on a small built-in model
    ds_verify grads --matrix                            stage x bucket x overlap x accumulation x model
    ds_verify grads --model my_model:build --config ds_config.json     your model under your configuration
    ds_verify offload                                   device, cpu and nvme agree bit for bit on a small built-in model
    ds_verify offload --model my_model:build --config ds_config.json --folder /drive     on yours, on your drive
    ds_verify data --save-n 4 --load-n 3 --workers 2    an epoch resumed on other ranks: no sample twice, none missing
    ds_verify resume --steps 20 --at 10                 saved, ended and loaded training goes on bit for bit
    ds_verify resume --ranks 4 --load-ranks 3           the state survives a change of the number of ranks
    ds_verify crash --kills 200                         killed at random instants of a save: every resume finds a whole
    checkpoint

Exit code: 0 all cells pass, 1 some cell fails, 2 the command or its files are wrong.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from deepspeed.config.parse import read_config_source
from deepspeed.verify import crash, data, resume
from deepspeed.verify.grads import KEPT_KEYS, STEPS, TOLERANCE, Cell, CellResult, matrix_cells, run_cell_on
from deepspeed.verify.offload import STEPS as OFFLOAD_STEPS, built_in_cells, check_cell, user_cell
from deepspeed.verify.ranks import RankPool
from deepspeed.verify.user_model import load_user_case

BAD_INPUT = 2
COLUMNS = ("model", "stage", "bucket", "overlap", "accum", "loss", "grad", "norm", "param", "result")
WIDTHS = (24, 5, 6, 7, 5, 8, 8, 8, 8, 6)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{grads,offload,data,resume,crash}")
    grads = commands.add_parser(
        "grads",
        help="compare gradients, norms and parameters with plain one-process PyTorch",
        description=(sys.modules["deepspeed.verify.user_model"].__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    grads.add_argument(
        "--matrix", action="store_true", help="every combination of stage, bucket, overlap and accumulation"
    )
    grads.add_argument("--model", metavar="MODULE:BUILD", help="your own model; see above for what build() returns")
    grads.add_argument("--config", metavar="FILE", help="the configuration to check your model under")
    grads.add_argument("--ranks", type=int, default=2, help="number of CPU ranks (default 2)")
    grads.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps per cell (default {STEPS})")
    grads.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"largest error allowed (default {TOLERANCE:g})"
    )
    grads.add_argument("--time-limit", type=float, default=120.0, help="seconds one cell may take (default 120)")
    offload = commands.add_parser(
        "offload",
        help="compare training with states on the device, in host memory and on a drive, bit for bit",
        description=(sys.modules["deepspeed.verify.offload"].__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    offload.add_argument(
        "--model", metavar="MODULE:BUILD", help="your own model (see ds_verify grads --help for what build() returns)"
    )
    offload.add_argument(
        "--config", metavar="FILE", help="the configuration to check it under; its offload blocks are replaced"
    )
    offload.add_argument("--folder", metavar="PATH", help="a folder on the drive (default: a temporary one)")
    offload.add_argument("--ranks", type=int, default=2, help="number of CPU ranks (default 2)")
    offload.add_argument(
        "--steps", type=int, default=OFFLOAD_STEPS, help=f"optimizer steps per run (default {OFFLOAD_STEPS})"
    )
    offload.add_argument("--time-limit", type=float, default=300.0, help="seconds one run may take (default 300)")
    data.add_parser(commands)
    resume.add_parser(commands)
    crash.add_parser(commands)
    return parser


def run_offload(options: argparse.Namespace, out: TextIO) -> int:
    """Run ``ds_verify offload``; raises ValueError (bad input) before any rank is started."""
    if options.ranks < 1 or options.steps < 1:
        raise ValueError("--ranks and --steps must be at least 1")
    if options.folder is not None and not os.path.isdir(options.folder):
        raise ValueError(f"--folder {options.folder} is no folder")
    config = read_config_source(options.config) if options.config else {}
    if options.model is not None:
        load_user_case(options.model, config)
    cells = [user_cell(options.model or "plain", config)] if options.model or config else built_in_cells()
    failed = 0
    with RankPool(options.ranks) as pool:
        for cell in cells:
            found = check_cell(pool, cell, steps=options.steps, folder=options.folder, time_limit=options.time_limit)
            for tier, wrong in found.items():
                failed += bool(wrong)
                out.write(
                    f"{cell.model:<24}  {cell.label:<14}  {tier:<4}  "
                    f"{'equal to the last bit' if not wrong else 'FAIL'}\n"
                )
                if wrong:
                    out.write(f"    {_first_account(wrong)}\n")
                out.flush()
    verdict = f"{failed} FAIL" if failed else "all equal"
    out.write(f"\n{len(cells)} configurations on {options.ranks} ranks, {options.steps} steps each: {verdict}\n")
    return 1 if failed else 0


def _cells(options: argparse.Namespace, config: dict[str, Any]) -> list[Cell]:
    if options.model is None:
        if options.matrix:
            return matrix_cells(config=config)
        if config:
            return [Cell("plain", config=config)]
        return [Cell("plain", stage=stage, bucket="huge", overlap=True, accumulation=1) for stage in range(4)]
    if options.matrix:
        return matrix_cells([options.model], config)
    if config:
        return [Cell(options.model, config=config)]
    return [Cell(options.model, stage=stage, config=config) for stage in range(4)]


def _row(values: Sequence[str]) -> str:
    return "  ".join(value.ljust(width) for value, width in zip(values, WIDTHS, strict=True)).rstrip()


def _result_row(result: CellResult, tolerance: float) -> str:
    if result.failure:
        return _row((*result.cell.label(), "-", "-", "-", "-", "ERROR"))
    errors = [f"{value:.1e}" for value in (result.loss_error, result.grad_error, result.norm_error, result.param_error)]
    return _row((*result.cell.label(), *errors, "ok" if result.passed(tolerance) else "FAIL"))


def _first_account(failure: str) -> str:
    """The failing ranks' accounts without the logs."""
    return failure if len(failure) < 4000 else failure[:4000] + "\n[cut]"


def run_grads(options: argparse.Namespace, out: TextIO) -> int:
    """Run ``ds_verify grads``; raises ValueError (bad input) before any rank is started."""
    if options.ranks < 1 or options.steps < 1:
        raise ValueError("--ranks and --steps must be at least 1")
    config = read_config_source(options.config) if options.config else {}
    if options.model is not None:
        load_user_case(options.model, config)
    aside = sorted(key for key in config if key not in KEPT_KEYS)
    if aside:
        out.write(
            f"checked in fp32 with AdamW; set aside from the configuration (but for the dtypes): {', '.join(aside)}\n"
        )
    cells = _cells(options, config)
    out.write(_row(COLUMNS) + "\n")
    failed: list[CellResult] = []
    with RankPool(options.ranks) as pool:
        for cell in cells:
            result = run_cell_on(pool, cell, steps=options.steps, time_limit=options.time_limit)
            out.write(_result_row(result, options.tolerance) + "\n")
            out.flush()
            if not result.passed(options.tolerance):
                failed.append(result)
    for result in failed[:3]:
        what = (
            _first_account(result.failure)
            if result.failure
            else f"largest error {result.largest():.3e} in {result.worst}"
        )
        out.write(f"\n{' '.join(result.cell.label())}: {what}\n")
    verdict = "all pass" if not failed else f"{len(failed)} FAIL"
    out.write(
        f"\n{len(cells)} cells on {options.ranks} ranks, {options.steps} steps each, tolerance "
        f"{options.tolerance:g}: {verdict}\n"
    )
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_verify``; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        parts = {"data": data.run, "resume": resume.run, "crash": crash.run}
        return {"grads": run_grads, "offload": run_offload, **parts}[options.command](options, sys.stdout)
    except ValueError as error:  # DeepSpeedConfigError is one
        sys.stderr.write(f"ds_verify: {error}\n")
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
