"""The resume gate: training that was saved and loaded into a new engine goes on as without that, to the last bit.

Every *cell* trains a model for some steps in one go, and again up to the save; then a new engine of a freshly built
model, with other random numbers in all generators, loads and trains the rest. The losses, the parameters, buffers and
fp32 masters, the optimizer's state, learning rates and schedule, random generators, and the loss scale with all
counters are compared after the load and at the end.

With another number of ranks for the load, the state as a whole (full parameters, masters, every optimizer slot,
counters) must have the same hash, and the next losses may differ by the order of additions only.
"""

import argparse
import contextlib
import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from deepspeed.config import load_config
from deepspeed.verify.common import Printout, config_of
from deepspeed.verify.ranks import RankPool, scratch
from deepspeed.verify.runs import ADAMW, Digests, Setup, hash_of, snapshot, train_case, user_setup, whole_state

FIELDS = ("loss", "params", "opt", "lr", "rng", "scaler")
NEXT = 3  # steps compared after a load on other ranks
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of a loss, relative
_WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 15, "warmup_max_lr": 1e-2}}
# The first scales overflow, so that updates are skipped, and the scale grows again later.
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}}
_VARIANTS = (  # what differs from training the plain case in fp32; the configuration is what a cell adds to the usual
    Setup("fp32", "plain", {}),
    Setup("bf16", "plain", {"bf16": {"enabled": True}}),
    Setup("fp16, dynamic scale", "plain", _FP16),
    Setup("dropout", "dropout_checkpointed", {}),
    Setup("open window", "plain", {"gradient_accumulation_steps": 3}, cut=1),
    Setup("uneven shards", "odd_shapes", {}),
    Setup("async save", "plain", {"checkpoint": {"async": True}}),
    Setup("nvme", "plain", {}, tier="nvme"),
)


def built_in_cells(stages: tuple[int, ...] = (0, 1, 2, 3)) -> list[Setup]:
    """A small model under every stage and everything that a resume can lose."""
    cells = []
    for stage, each in product(stages, _VARIANTS):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 200}
        config = {"zero_optimization": zero, "optimizer": ADAMW, "scheduler": _WARMUP, **each.config}
        if stage or each.tier is None:  # stage 0 has no states to put on a drive
            cells.append(replace(each, label=f"stage {stage} {each.label}", config=config))
    return cells


def user_cells(model: str, config: dict[str, Any]) -> list[Setup]:
    """The user's model and configuration, also cut in a window; without a configuration, under every stage."""
    if not config:
        return [user_setup(model, {}, stage=stage) for stage in range(4)]
    cell = user_setup(model, config, stage=0)
    behind = {**cell.config, "checkpoint": {**(config.get("checkpoint") or {}), "async": True}}
    cells = [cell, replace(cell, label=f"{cell.label} async save", config=behind)]
    window = cell.case().accumulation > 1
    return cells + ([replace(cell, label=f"{cell.label} open window", cut=1)] if window else [])


def difference(wanted: dict[str, Digests], loaded: dict[str, Digests]) -> str:
    """The first field and name that differ; empty when nothing does."""
    for field in FIELDS:
        sides = wanted.get(field, {}), loaded.get(field, {})
        for name in dict.fromkeys(name for side in sides for name in side):
            if sides[0].get(name) != sides[1].get(name):
                before, after = (f"{side[name]:.60}" if name in side else "absent" for side in sides)
                return f"{field}: {name} ({before} without the interruption, {after} after the load)"
    return ""


def interrupted(
    start: Callable[[int], Any], train: Callable[[Any, range], list[float]], folder: str, *, cut: int, last: int
) -> str:
    """The first difference between ``last`` micro-batches in one go and with a save and load after ``cut``, or "".

    ``start(seed)`` makes an engine of a fresh model and seeds every generator; ``train(engine, numbers)`` returns
    losses. Collective.
    """
    engine = start(5)
    straight = train(engine, range(last))
    end = snapshot(engine)
    engine.destroy()
    engine = start(5)
    losses = train(engine, range(cut))
    engine.save_checkpoint(folder, tag="resume")
    saved = snapshot(engine)
    if engine._config.checkpoint.in_background:
        train(engine, range(cut, last))  # must not reach what is being written
    engine.destroy()
    engine = start(1000)
    engine.load_checkpoint(folder, tag="resume")
    wrong = difference(saved, snapshot(engine))
    if wrong:
        engine.destroy()
        return f"right after the load, {wrong}"
    losses += train(engine, range(cut, last))
    resumed = snapshot(engine)
    engine.destroy()
    for number, (a, b) in enumerate(zip(straight, losses, strict=True), 1):
        if a != b and not (math.isnan(a) and math.isnan(b)):
            return f"loss: number {number} is {b!r}, not {a!r}"
    wrong = difference(end, resumed)
    return f"at the end, {wrong}" if wrong else ""


def resume_on_rank(cell: Setup, folder: str, steps: int, at: int) -> str:
    """The first difference of a resumed run, empty when there is none. Collective."""
    case = cell.case()
    return interrupted(
        lambda seed: cell.start(case, folder, seed),
        lambda engine, numbers: train_case(engine, case, numbers),
        folder,
        cut=at * case.accumulation + cell.cut,
        last=steps * case.accumulation,
    )


def state_on_rank(cell: Setup, folder: str, at: int, *, load: bool) -> tuple[Digests, list[float]]:
    """Train ``at`` steps and save, or load that on other ranks; the whole state then, and the losses of the next steps.

    Those are on samples that are the same on every rank, and so under any number of ranks. Collective.
    """
    case = cell.case()
    engine = cell.start(case, folder, 1000 if load else 5)
    if load:
        engine.load_checkpoint(folder, tag="resume")
    else:
        train_case(engine, case, range(at * case.accumulation))
        engine.save_checkpoint(folder, tag="resume")
    state = whole_state(engine)
    losses = train_case(engine, case, range(at * case.accumulation, (at + NEXT) * case.accumulation), alike=True)
    engine.destroy()
    return state, losses


def _check(pools: Sequence[RankPool], cell: Setup, folder: str, *, steps: int, at: int) -> tuple[str, str]:
    """What is fine, and what differs after a resume, if anything does; of ``pools`` the last one loads."""
    if len(pools) == 1:
        wrong = pools[0].run(resume_on_rank, cell, folder, steps, at)
        faults = [f"{text} on rank {rank}" for rank, text in enumerate(wrong) if text]
        return f"identical: {', '.join(FIELDS)}", "".join(faults[:1])
    (before, losses), (after, again) = (
        pool.run(state_on_rank, cell, folder, at, load=load)[0] for load, pool in enumerate(pools)
    )
    differing = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    if differing:
        return "", f"{differing[0]} is not what was saved"
    text = f"state hash {hash_of(before)} at the save and after the load"
    error = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(losses, again, strict=True))
    if not error <= TOLERANCES[cell.dtype]:
        return "", f"{text}, but losses after it differ by {error:.1e} ({losses} and {again})"
    return f"{text}; losses of the next {NEXT} steps differ by {error:.1e}", ""


def run(options: argparse.Namespace, report: Printout) -> int:
    """Run ``ds_verify resume``; raises ValueError (bad input) before any rank is started."""
    steps, at, ranks, model = options.steps, options.at, options.ranks, options.model
    if at >= steps:
        raise ValueError(f"--at {at}: the save must lie between the first and the last of --steps {steps}")
    config = config_of(options)
    cells = user_cells(model or "plain", config) if model or config else built_in_cells()
    for cell in cells:  # a fault of the configuration is reported before any rank starts
        load_config(cell.settings(tempfile.gettempdir()), world_size=ranks)
    others = [options.load_ranks] if options.load_ranks not in (None, ranks) else []
    cells = [cell for cell in cells if not (others and (cell.cut or cell.config.get("checkpoint")))]
    width = max(len(cell.label) for cell in cells)
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(RankPool(n, time_limit=options.time_limit)) for n in (ranks, *others)]
        for cell in cells:
            with scratch() as folder:
                check = functools.partial(_check, pools, cell, folder, steps=steps, at=at)
                report.row(f"{cell.model:<22}  {cell.label:<{width}}", check)
    where = f"{ranks} ranks" + "".join(f", loaded on {n}" for n in others)
    return report.end(f"{len(cells)} cells on {where}, saved after {at} steps", "all identical")
