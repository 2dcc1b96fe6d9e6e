"""The gate of experts: a model whose experts ranks divide beside one process, and what they send beside the formula."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.collectives import AxisGroup
from deepspeed.moe import spread
from deepspeed.tools.simulate.models import Decoder, Shape
from deepspeed.tools.verify.driver import Driver, RowResult, aligned, config_of, sizes_and_stages
from deepspeed.tools.verify.grads import KINDS, Cell, Errors, judge, run_cell, start_engine
from deepspeed.tools.verify.models import Case, MicroBatch
from deepspeed.tools.verify.user_model import case_of

TOY = "deepspeed.tools.verify.layouts.moe:toy"
WIDTHS = (12, 5, 4, 8, 8, 8, 8)
_COUNT = 8  # bytes of a number of tokens, or of an expert


def toy() -> nn.Module:
    """Make a decoder with eight experts in each of two blocks, of which a token has two."""
    shape = Shape(32, 2, 4, 64, vocabulary=64, positions=16, key_heads=2, gated=True)
    return Decoder(replace(shape, experts=8, choices=2, expert=48, shared=32))


def _to_the_first(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(given) != 3:  # not (tokens, experts, weights): a router
        return given
    index = torch.arange(given[1].shape[1], device=given[1].device).expand_as(given[1])
    return given[0], index, given[2]


def crowded(case: Case) -> Case:
    """Return the case with all tokens at the first experts, whatever the router says."""

    def build() -> nn.Module:
        model = case.build()
        for module in model.modules():
            if hasattr(module, "num_experts"):
                module.register_forward_pre_hook(_to_the_first)
        return model

    return replace(case, build=build)


def train_crowded(cell: Cell, steps: int) -> Errors:
    """Train where most ranks get no token, beside one process. Collective."""
    return run_cell(cell, steps, case=crowded(case_of(cell.model, cell.config)))


def wire_bytes(index: torch.Tensor, ranks: int, experts: int, hidden: torch.Tensor, weights: torch.Tensor) -> int:
    """Return what one exchange of a forward costs the sender, by the formula, the way back of its rows included:
    ``index`` [tokens, k], of which each of ``ranks`` holds ``experts``; a token goes once to a rank.
    """
    goes = torch.zeros(len(index), ranks, dtype=torch.bool).scatter_(1, index // experts, 1)
    of_row = 2 * hidden.shape[1] * hidden.itemsize + index.shape[1] * (weights.itemsize + _COUNT)
    return int(goes.sum()) * of_row + 3 * _COUNT * ranks  # rows, pairs, and whether scores are finite


def count_wire(cell: Cell) -> tuple[int, int]:
    """Return the bytes of one forward's exchanges on this rank, counted and by the formula. Collective."""
    case = case_of(cell.model, cell.config)
    engine = start_engine(case, cell.settings(case))
    counted, formula = list[int](), list[int]()
    plain: Callable[..., torch.Tensor] = spread.through_experts

    def count(op: str, numel: int, dtype: torch.dtype, _: int) -> None:
        if op == "all_to_all":
            counted.append(numel * dtype.itemsize)

    def through(
        hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *, group: AxisGroup, experts: int, **more: Any
    ) -> torch.Tensor:
        formula.append(wire_bytes(index, group.size, experts, hidden, weights))
        return plain(hidden, index, weights, group=group, experts=experts, **more)

    for group in engine.mesh.experts:
        group.ledger.append(count)
    with patch.object(spread, "through_experts", through), torch.no_grad():
        case.seeded_loss(engine, MicroBatch(0, 0, dist.get_rank(), dist.get_world_size()))
    engine.destroy()
    return sum(counted), sum(formula)


def judge_wire(ranks: list[tuple[int, int]]) -> RowResult:
    """Judge the sums over ranks: what one sends another receives, and sends back."""
    counted, formula = (sum(column) for column in zip(*ranks, strict=True))
    fault = "" if counted == formula > 0 else f"the ranks sent {counted:,} bytes, the formula says {formula:,}"
    return RowResult(f"{counted:,} bytes, as the formula says  ok", fault)


def check_experts(driver: Driver) -> int:
    """Compare experts that ranks divide (``expert_parallel``) with plain PyTorch in one process, in fp32.

        ds_verify moe                                                      ZeRO 0-3 on a small decoder of experts
        ds_verify moe --model my_model:build --config ds_config.json      your model under your configuration

    Each rank compares losses, gradients, their norm and the parameters after every step. Then all tokens go to the
    first experts, so that other ranks have none; and the bytes of a forward's exchanges are counted beside the formula.

    The model is one of Transformers, or its experts are stacked and called alike; ``deepspeed.moe.layer.MoE`` divides
    itself, so that there is no whole one to compare with. Without ``autoep_size`` in the configuration every size that
    divides the ranks is tried.
    """
    options, config = driver.options, config_of(driver.options)
    model, block = options.model or TOY, config.get("expert_parallel") or {}
    ep, etp = (block.get(key, 1) for key in ("autoep_size", "expert_tensor_parallel_size"))
    sizes, stages = sizes_and_stages(driver, config, ep if ep * etp > 1 else 0)

    def cell(stage: int | None, ep: int) -> Cell:
        divided = {**block, "enabled": True, "autoep_size": ep}
        return Cell(model, stage=stage, config={**config, "expert_parallel": divided})

    driver.say(f"{aligned(('experts', 'stage', 'ep', *KINDS), WIDTHS)}  result")
    judged = partial(judge, tolerance=options.tolerance, columns=True)
    rows: list[tuple[str, Any, int | None, int]] = [("chosen", run_cell, stage, ep) for stage in stages for ep in sizes]
    rows.append(("the first", train_crowded, *rows[-1][2:]))
    for experts, train, stage, ep in rows:
        label = aligned((experts, "-" if stage is None else stage, ep), WIDTHS)
        driver.on_ranks(label, options.ranks, judged, train, cell(stage, ep), options.steps)
    if etp == 1:
        driver.on_ranks("bytes on the wire", options.ranks, judge_wire, count_wire, cell(stage, ep))
    count = len(rows) + (etp == 1)
    return driver.end(f"{count} rows on {driver.conditions()}, tolerance {options.tolerance:g}", "all pass")
