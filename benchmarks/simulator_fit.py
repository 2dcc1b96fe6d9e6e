"""The constants that bring predictions closest to published steps, with every source and with each left out in turn.

Gauss-Newton on log(predicted / published) over the logarithms of the constants. Rows that are off by more than ``EDGE``
pull no harder than that (Huber), every table has the same weight whatever its number of rows, and a spring holds each
constant to what is assumed of it, so that what no row tells stays there.
"""

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from simulator_play import lineage, log_error
from simulator_record import DATA, by, is_recorded, rows_of

FITS = DATA / "fits.json"
EDGE, STEP, ROUNDS = 0.2, 0.03, 3
SPRING = 0.1  # so much of an error of all rows of a table weighs as much as a constant that is 2.7 times off
# What is fitted, "file.constant" of the machine's file that has it: where the fit begins, what its spring pulls to, and
# why. ``old_attention`` is the share of the kernel of 2023 that the mpt tables were measured with.
PRIOR: dict[str, tuple[float, str]] = {
    "a100.matmul_share": (
        0.80,
        "0.87 of the best product (stas00/ml-engineering), less what clocks lose in long runs",
    ),
    "h100.matmul_share": (0.72, "0.80 of the best product, likewise"),
    "a100.matmul_half": (150.0, "two or three stages of a tile's pipeline"),
    "h100.matmul_half": (150.0, "as a100"),
    "all.contention": (0.15, "NCCL's 16 to 24 of 108 processors"),
    "all.fusion": (0.6, "of what fused kernels could save"),
    "a100.attention_share": (0.58, "FlashAttention-2 (Dao 2023): about 180 TFLOP/s forward and backward, causal"),
    "h100.attention_share": (0.33, "FlashAttention-2 in Shah et al. 2024: 335 forward, 322 backward, of 989"),
    "a100.old_attention": (0.30, "triton-lang/triton #1917: 122 and 81 TFLOP/s at 16,384"),
    "h100.old_attention": (0.16, "a100's times what FlashAttention-2 gains from one to the other, 1.7"),
    "selene_a100.network_crowding": (0.2, "a fat tree of full width"),
    "internevo_a100.network_crowding": (0.3, "middle of what is published"),
    "azure_ndm_a100_v4.network_crowding": (0.3, "middle of what is published"),
    "h100_hbm2e.network_crowding": (0.3, "middle of what is published"),
    "polaris.adam_rate": (18e9, "as a100"),
    "polaris.adam_rank_rate": (45e9, "as a100"),
    "polaris.pageable_rate": (8e9, "as a100"),
    "polaris.network_rate": (5.5e9, "two 100 Gb/s ports for 4 devices"),
}
Constants = dict[str, float]


@functools.cache
def fits() -> dict[str, Any]:
    """``all``: the constants with every source; ``without``: with all but one, by its name."""
    found: dict[str, Any] = json.loads(FITS.read_text())
    return found


def fit(rows: Sequence[dict[str, Any]], start: Constants, prior: Constants, *, rounds: int = ROUNDS) -> Constants:
    """The constants for these rows."""
    values = dict(start)
    for _ in range(rounds):
        values = solve(values, prior, weights_of(rows), *linearized(rows, values))
    return values


def weights_of(rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Of every table the same in all."""
    tables = by("table", rows)
    return torch.tensor([1 / math.sqrt(len(tables[row["table"]])) for row in rows], dtype=torch.float64)


# Of a row: what its prediction does not depend on.
MEASURED = frozenset(
    {"id", "source", "rate", "seconds", "layer_s", "forward_s", "backward_s", "update_s", "memory_gib"}
)


def linearized(rows: Sequence[dict[str, Any]], at: Constants) -> tuple[torch.Tensor, torch.Tensor]:
    """Log errors of rows, and what they change by with the logarithm of each constant. Rows of one set-up are played
    once, and again only for the constants that their machine has.
    """
    same: dict[str, tuple[float, list[float]]] = {}

    def of(row: dict[str, Any]) -> tuple[float, list[float]]:
        named = {"all", *lineage(row["machine"])}
        base = log_error(row, at)
        moved = [
            (log_error(row, at | {name: value * math.exp(STEP)}) - base) / STEP
            if name.partition(".")[0] in named
            else 0.0
            for name, value in at.items()
        ]
        return base + math.log(_measured(row)), moved

    for row in rows:
        key = _key(row)
        same[key] = same.get(key) or of(row)
    errors = [same[_key(row)][0] - math.log(_measured(row)) for row in rows]
    slopes = [same[_key(row)][1] for row in rows]
    return torch.tensor(errors, dtype=torch.float64), torch.tensor(slopes, dtype=torch.float64)


def _key(row: dict[str, Any]) -> str:
    return json.dumps(
        {name: value for name, value in row.items() if name not in MEASURED} | {"layer": "layer_s" in row}
    )


def _measured(row: dict[str, Any]) -> float:
    return float(row["layer_s" if "layer_s" in row else "seconds"])


def solve(
    at: Constants, prior: Constants, weights: torch.Tensor, errors: torch.Tensor, slopes: torch.Tensor
) -> Constants:
    """Least squares of the linear problem; the weights of outliers are found by doing it again."""
    move = torch.zeros(len(at), dtype=torch.float64)
    spring = torch.tensor([math.log(at[name] / prior[name]) for name in at], dtype=torch.float64)
    for _ in range(20):
        left = errors + slopes @ move
        robust = weights * torch.clamp(EDGE / left.abs().clamp(min=1e-9), max=1.0).sqrt()
        system = torch.cat([slopes * robust[:, None], torch.eye(len(at), dtype=torch.float64) * SPRING])
        wanted = torch.cat([-errors * robust, -spring * SPRING])
        move = torch.linalg.lstsq(system, wanted[:, None]).solution[:, 0]
    return {name: value * math.exp(float(step)) for (name, value), step in zip(at.items(), move, strict=True)}


def fit_all() -> None:
    """Fit with all sources and without each; write ``data/fits.json``."""
    rows = [row for row in rows_of() if is_recorded(row)]
    prior = {name: value for name, (value, _) in PRIOR.items()}
    everything = fit(rows, prior, prior)
    print(json.dumps(everything, indent=1), flush=True)
    found = {"all": everything, "without": left_out(rows, everything, prior)}
    FITS.write_text(json.dumps(found, indent=1) + "\n")


def left_out(rows: Sequence[dict[str, Any]], everything: Constants, prior: Constants) -> dict[str, Constants]:
    """The constants without each source: one step from the fit of all, whose slopes all share, and one of its own."""
    errors, slopes = linearized(rows, everything)
    found = {}
    for origin in by("origin", rows):
        places = [place for place, row in enumerate(rows) if row["origin"] != origin]
        rest = [rows[place] for place in places]
        start = solve(everything, prior, weights_of(rest), errors[places], slopes[places])
        found[origin] = fit(rest, start, prior, rounds=1)
    return found
