"""The compile gate: blocks compiled by ``engine.compile`` train as plain one-process PyTorch does, and stay whole.

Every row trains one model compiled and compares it as ``ds_verify grads`` does. It fails, too, where a compiled module
falls apart into several graphs, or where anything is compiled again after the second step; with torch's reason.

A model whose batches change their shape, or which branches on its data, may well compile later: that is a finding about
the model, not about sharding.
"""

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from deepspeed.verify.common import Printout, aligned, config_of
from deepspeed.verify.grads import Cell, Errors, largest, run_cell
from deepspeed.verify.ranks import RankPool

_SETTLED = 2  # steps after which everything that will be is compiled
_WIDTHS = (24, 7, 14)


@dataclass(frozen=True)
class Compiled:
    """What one rank saw: the errors, graphs that were compiled, those of them late, and why graphs ended early."""

    errors: Errors
    graphs: int
    late: int
    breaks: tuple[str, ...]


def train_compiled(cell: Cell, steps: int, backend: str, case: Any = None) -> Compiled:
    """Train ``cell`` compiled on the ranks of this process group. Collective."""
    torch.compiler.reset()
    counters = import_module("torch._dynamo.utils").counters
    counters.clear()
    graphs: list[int] = []
    errors = run_cell(
        cell,
        steps=steps,
        case=case,
        prepare=lambda engine: engine.compile(backend=backend),
        after_step=lambda: graphs.append(counters["stats"]["unique_graphs"]),
    )
    return Compiled(errors, graphs[-1], graphs[-1] - graphs[min(_SETTLED, steps) - 1], (*counters["graph_break"],))


def _cells(model: str | None, config: dict[str, Any]) -> list[Cell]:
    if config:
        return [Cell(model or "plain", config=config)]
    stages = [Cell(model or "plain", stage=stage, accumulation=1) for stage in range(4)]
    return stages if model else [*stages, *(Cell(name, stage=3, accumulation=2) for name in ("tied", "frozen"))]


def verdict(ranks: list[Compiled], tolerance: float) -> tuple[str, str]:
    """What a row ends with, and what is wrong, if anything."""
    error, kind, where = largest([rank.errors for rank in ranks])
    late, graphs = max(rank.late for rank in ranks), min(rank.graphs for rank in ranks)
    breaks = sorted({reason for rank in ranks for reason in rank.breaks})
    faults = [f"largest error {error:.3e} in {kind} {where}"] if not error <= tolerance else []
    faults += [f"{late} graphs were compiled after step {_SETTLED}"] if late else []
    faults += [f"a graph ended early: {reason}" for reason in breaks]
    faults += ["nothing was compiled"] if not graphs else []
    return f"{graphs} graphs, 0 breaks, 0 late, largest error {error:.1e}  ok", "; ".join(faults)


def run(options: argparse.Namespace, report: Printout) -> int:
    """Run ``ds_verify compile``; raises ValueError (bad input) before any rank is started."""
    cells = _cells(options.model, config_of(options))
    if options.backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise ValueError(f"--backend {options.backend!r} is unknown; torch has {', '.join(known)}")
    with RankPool(options.ranks, time_limit=options.time_limit) as pool:

        def check(cell: Cell) -> tuple[str, str]:
            return verdict(pool.run(train_compiled, cell, options.steps, options.backend), options.tolerance)

        for cell in cells:
            model, stage, _, _, accumulation = cell.label()
            report.row(aligned((model, f"stage {stage}", f"accumulation {accumulation}"), _WIDTHS), check, cell)
    return report.end(
        f"{len(cells)} cells on {options.ranks} ranks, {options.steps} steps each, {options.backend}", "all pass"
    )
