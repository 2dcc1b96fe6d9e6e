"""The gates of runs that must agree to the last bit: resumed ones, and ones whose states are elsewhere."""

import math
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.config import load_config
from deepspeed.errors import counted
from deepspeed.tools.verify import runs
from deepspeed.tools.verify.driver import Driver, RowResult, config_of
from deepspeed.tools.verify.ranks import scratch
from deepspeed.tools.verify.runs import ADAMW, Digests, Setup, snapshot, train_case

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
    """List a small model under every stage and everything that a resume can lose."""
    cells = []
    for stage, variant in product(stages, _VARIANTS):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 200}
        config = {"zero_optimization": zero, "optimizer": ADAMW, "scheduler": _WARMUP, **variant.config}
        if stage or variant.tier is None:  # stage 0 has no states to put on a drive
            cells.append(replace(variant, label=f"stage {stage} {variant.label}", config=config))
    return cells


def user_cells(model: str, config: dict[str, Any]) -> list[Setup]:
    """List the user's model and configuration, also cut in a window; without a configuration, every stage."""
    if not config:
        return [runs.user_setup(model, {}, stage=stage) for stage in range(4)]
    cell = runs.user_setup(model, config, stage=0)
    async_config = {**cell.config, "checkpoint": {**(config.get("checkpoint") or {}), "async": True}}
    cells = [cell, replace(cell, label=f"{cell.label} async save", config=async_config)]
    if cell.case().accumulation > 1:
        cells.append(replace(cell, label=f"{cell.label} open window", cut=1))
    return cells


def difference(wanted: dict[str, Digests], loaded: dict[str, Digests]) -> str:
    """Name the first field and name that differ; empty when nothing does."""
    for field in FIELDS:
        sides = (wanted.get(field, {}), loaded.get(field, {}))
        for name in runs.differing(*sides):
            before, after = (f"{side[name]:.60}" if name in side else "absent" for side in sides)
            return f"{field}: {name} ({before} without the interruption, {after} after the load)"
    return ""


def interrupted(
    start: Callable[[int], Any], train: Callable[[Any, range], list[float]], folder: str, *, cut: int, last: int
) -> str:
    """Name the first difference between ``last`` micro-batches in one go and with a save and a load after ``cut``.

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
    wrong = difference(end, snapshot(engine))
    engine.destroy()
    for number, (a, b) in enumerate(zip(straight, losses, strict=True), 1):
        if a != b and not (math.isnan(a) and math.isnan(b)):
            return f"loss: number {number} is {b!r}, not {a!r}"
    return f"at the end, {wrong}" if wrong else ""


def resume_on_rank(cell: Setup, folder: str, steps: int, at: int) -> str:
    """Name the first difference of a resumed run, empty when there is none. Collective."""
    case = cell.case()
    return interrupted(
        lambda seed: cell.start(case, folder, seed),
        lambda engine, numbers: train_case(engine, case, numbers),
        folder,
        cut=at * case.accumulation + cell.cut,
        last=steps * case.accumulation,
    )


Handed = tuple[Digests, list[float]]  # the whole state at a save or after a load, and the losses that come then


def hand_over(cell: Any, folder: str, load: str | None, save: str | None, at: int, more: int) -> Handed:
    """Train ``at`` updates, or load a checkpoint; save; train ``more`` updates, on samples that are the same under
    every layout. Return the state at the save, and the losses after it. Collective.
    """
    case = cell.case()
    engine = cell.start(case, folder, 5 if load is None else 1000)
    if load is None:
        cell.train(engine, case, range(at))
    else:
        engine.load_checkpoint(folder, tag=load)
    if save is not None:
        engine.save_checkpoint(folder, tag=save)
    state = runs.whole_state(engine)
    losses = cell.train(engine, case, range(at, at + more), alike=True)
    engine.destroy()
    return state, losses


def moved(wanted: Handed, again: Handed, tolerance: float, least: float = 0.0) -> RowResult:
    """Judge whether a load under another layout gave the state that was saved, and about the same losses.

    An error is relative to the loss, or to ``least`` where that is larger.
    """
    names = runs.differing(wanted[0], again[0])
    if names:
        return RowResult("", f"{len(names)} of {len(wanted[0])} names differ, first {names[0]}")
    errors = [abs(a - b) / max(least, abs(a)) for a, b in zip(wanted[1], again[1], strict=True)]
    error = float(torch.tensor(errors, dtype=torch.float64).max())  # NaN where one is; max() may pass over it
    text = f"state hash {runs.hash_of(again[0])} at the save and after the load; "
    text += f"losses of the next {len(again[1])} steps differ by {error:.1e}"
    return RowResult(text, "" if error <= tolerance else f"{text} ({wanted[1]} and {again[1]})")


def _first(texts: Iterable[str], fine: str) -> RowResult:
    """Judge the texts of all ranks, which are empty without a fault."""
    faults = [f"{text} on rank {rank}" for rank, text in enumerate(texts) if text]
    return RowResult(fine, faults[0] if faults else "")


def check_resume(driver: Driver) -> int:
    """Check that training saved, ended and loaded into a new engine goes on as if nothing had happened, bit for bit.

    Every cell trains in one go, and again up to the save; then a new engine of a fresh model, with other random numbers
    in all generators, loads and trains the rest. Losses, parameters, buffers, fp32 masters, the optimizer's state,
    rates and schedule, generators, loss scale and counters are compared after the load and at the end.

    With another number of ranks for the load, the state as a whole must have the same hash, and the losses of the next
    steps on the same samples may differ by the order of additions only.
    """
    options, config = driver.options, config_of(driver.options)
    at, ranks = options.at, options.ranks
    load_ranks = options.load_ranks or ranks
    if at >= options.steps:
        raise ValueError(f"--at {at}: the save must lie between the first and the last of --steps {options.steps}")
    cells = user_cells(options.model or "plain", config) if options.model or config else built_in_cells()
    for cell in cells:  # a fault of the configuration is reported before any rank starts
        load_config(cell.settings(tempfile.gettempdir()), world_size=ranks)
    if load_ranks != ranks:
        cells = [cell for cell in cells if not cell.cut]

    def check(cell: Setup, folder: str) -> RowResult:
        first, second = driver.pools(ranks, load_ranks)
        if load_ranks == ranks:
            texts = first.run(resume_on_rank, cell, folder, options.steps, at)
            return _first(texts, f"identical: {', '.join(FIELDS)}")
        saved = first.run(hand_over, cell, folder, None, "resume", at, NEXT)
        loaded = second.run(hand_over, cell, folder, "resume", None, at, NEXT)
        return moved(saved[0], loaded[0], TOLERANCES[cell.dtype], least=1.0)

    width = max(len(cell.label) for cell in cells)
    for cell in cells:
        with scratch() as folder:
            driver.row(f"{cell.model:<22}  {cell.label:<{width}}", partial(check, cell, folder))
    where = counted(ranks, "rank") + (f", loaded on {load_ranks}" if load_ranks != ranks else "")
    return driver.end(f"{counted(len(cells), 'cell')} on {where}, saved after {counted(at, 'step')}", "all identical")


# -- states elsewhere -------------------------------------------------------------------------------------------------
def train_tier(setup: Setup, tier: str, folder: str, steps: int) -> list[Digests]:
    """Train on the ranks of this process group; return the digests after each step. Collective."""
    case = setup.case()
    engine = replace(setup, tier=tier).start(case, folder, 5)
    digests = []
    for step in range(steps):
        runs.seed_everything(1000 * step + dist.get_rank())  # whatever a tier drew
        losses = setup.train(engine, case, range(step, step + 1))
        digests.append({"the losses": repr(losses), **runs.full_states(engine)})
    engine.destroy()
    return digests


def first_difference(base: list[Digests], other: list[Digests]) -> str:
    """Name step and tensor where two runs part; empty when they agree to the last bit."""
    for step, sides in enumerate(zip(base, other, strict=True), 1):
        for name in runs.differing(*sides):
            return f"{name} differs after step {step}"
    return ""


def check_offload(driver: Driver) -> int:
    """Check that training with states on the device, in host memory and on a drive agrees bit for bit.

    After each step every rank compares the losses, the full parameters, the fp32 masters and all optimizer slots with
    the run without offload; the first tensor that differs is named. Offload blocks of a configuration are replaced.
    """
    options, config = driver.options, config_of(driver.options)
    setups = [runs.user_setup(options.model or "plain", config, stage=3)]
    if not (options.model or config):
        zero = [{"stage": stage, "stage3_param_persistence_threshold": 20} for stage in (1, 2, 3)]
        setups = [
            Setup(f"stage {block['stage']} {dtype}", "plain", {"zero_optimization": block, "optimizer": ADAMW, **more})
            for block, (dtype, more) in product(zero, (("fp32", {}), ("bf16", {"bf16": {"enabled": True}})))
        ]
    for setup in setups:
        load_config(replace(setup, tier="none").settings(""), world_size=1)  # reported before any rank starts
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(scratch())

        def states(setup: Setup, tier: str) -> list[list[Digests]]:
            return driver.pools(options.ranks)[0].run(train_tier, setup, tier, folder, options.steps)

        def check(base: list[list[Digests]], setup: Setup, tier: str) -> RowResult:
            return _first(map(first_difference, base, states(setup, tier)), "equal to the last bit")

        for setup in setups:
            base = states(setup, "none")
            for tier in ("cpu", "nvme"):
                driver.row(f"{setup.model:<24}  {setup.label:<14}  {tier:<4}", partial(check, base, setup, tier))
    return driver.end(f"{counted(len(setups), 'configuration')} on {driver.conditions()}", "all equal")
