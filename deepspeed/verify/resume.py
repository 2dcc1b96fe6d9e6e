"""The resume gate: training that was saved, ended and loaded into a new engine must go on as if nothing had happened,
to the last bit.

Every *cell* trains a model for some steps in one go, and again up to the save; then a new engine of a freshly built
model, with other random numbers in all generators, loads and trains the rest. The losses, the parameters, buffers and
fp32 masters, the optimizer's state, learning rates and schedule, random generators, and the loss scale with all
counters are compared after the load and at the end.

With another number of ranks for the load, the state as a whole (full parameters, masters, every optimizer slot,
counters) must have the same hash, and the losses of the next steps on the same samples may differ by the order of
additions only.
"""

import argparse
import hashlib
import json
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.config import load_config
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.verify.common import Printout, add_model, add_numbers, check_numbers, command, config_of
from deepspeed.verify.grads import engine_backward, full_parameters
from deepspeed.verify.models import Case, MicroBatch
from deepspeed.verify.offload import ADAMW, Setup, digest, full_states
from deepspeed.verify.ranks import RankFailure, RankPool

FIELDS = ("loss", "params", "opt", "lr", "rng", "scaler")
STEPS, AT = 20, 10
NEXT = 3  # steps compared after a load on other ranks
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of a loss, relative
Snapshot = dict[str, dict[str, str]]  # field -> name -> digest
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 15, "warmup_max_lr": 1e-2}}
# The first scales overflow, so that updates are skipped, and the scale grows again later.
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}}
# label: case, changes of the configuration, fields of the cell
_VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp32": ("plain", {}, {}),
    "bf16": ("plain", {"bf16": {"enabled": True}}, {}),
    "fp16, dynamic scale": ("plain", _FP16, {}),
    "dropout": ("dropout_checkpointed", {}, {}),
    "open window": ("plain", {}, {"accumulation": 3, "cut": 1}),
    "uneven shards": ("odd_shapes", {}, {}),
    "async save": ("plain", {"checkpoint": {"async": True}}, {}),
    "nvme": ("plain", {}, {"tier": "nvme"}),
}


@dataclass(frozen=True)
class ResumeCell(Setup):
    """States rest on ``tier`` (None: as configured); ``cut``: micro-batches of an open window at the save."""

    accumulation: int = 1
    cut: int = 0
    tier: str | None = None

    def case(self) -> Case:
        """The model and its data."""
        return replace(super().case(), accumulation=self.accumulation)

    def config_in(self, folder: str) -> dict[str, Any]:
        """The configuration; ``folder`` is for states on a drive."""
        config = self.settings(self.tier or "none", folder, self.accumulation)
        if self.tier is None:
            zero = self.config.get("zero_optimization", {})
            config["zero_optimization"].update({k: v for k, v in zero.items() if k.startswith("offload_")})
        return config


def built_in_cells(stages: tuple[int, ...] = (0, 1, 2, 3)) -> list[ResumeCell]:
    """A small model under every stage and everything that a resume can lose."""
    cells = []
    for stage in stages:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 200}
        base = {"zero_optimization": zero, "optimizer": ADAMW, "scheduler": _WARMUP}
        for label, (model, changes, fields) in _VARIANTS.items():
            if stage or label != "nvme":
                cells.append(ResumeCell(f"stage {stage} {label}", model, {**base, **changes}, **fields))
    return cells


def user_cells(model: str, config: dict[str, Any]) -> list[ResumeCell]:
    """The user's model and configuration, also cut in a window; without a configuration, under every stage."""
    if not config:
        configs = [{"zero_optimization": {"stage": stage}, "optimizer": ADAMW} for stage in range(4)]
        return [ResumeCell(f"stage {stage}", model, each) for stage, each in enumerate(configs)]
    zero = {"stage": 0, **(config.get("zero_optimization") or {})}
    config = {"optimizer": ADAMW, **config, "zero_optimization": zero}
    accumulation = config.get("gradient_accumulation_steps", 1)
    accumulation = accumulation if isinstance(accumulation, int) else 1
    cell = ResumeCell(f"stage {zero['stage']}", model, config, accumulation=accumulation)
    behind = {**config, "checkpoint": {**(config.get("checkpoint") or {}), "async": True}}
    cells = [cell, replace(cell, label=f"{cell.label} async save", config=behind)]
    return cells + ([replace(cell, label=f"{cell.label} open window", cut=1)] if accumulation > 1 else [])


# -- what an engine holds ----------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """Every bit of a plain value."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {digest(value)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(_text(v) for v in value)})"
    return value.hex() if isinstance(value, float) else repr(value)


def _inside(view: Any, value: Any) -> Any:
    """An elementwise slot without the padding between parameters, which nothing depends on."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() != view.stop - view.start:
        return value
    segments = view.unit.layout.segments
    spans = [(max(s.offset, view.start) - view.start, min(s.stop, view.stop) - view.start) for s in segments]
    return torch.cat([value[lo:hi] for lo, hi in spans if lo < hi] or [value[:0]])


def _optimizer_state(engine: Any) -> dict[str, str]:
    """State of this rank's part of every parameter, and of the groups."""
    optimizer = engine.basic_optimizer
    if optimizer is None:
        return {}
    texts = {}
    for view in engine._views:
        with engine.attached(view):
            for slot, value in optimizer.state.get(view.param, {}).items():
                texts[f"{slot} of {view.name} from {view.start} on"] = _text(_inside(view, value))
    texts |= {f"state[{k!r}]": _text(v) for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    for index, group in enumerate(optimizer.param_groups):
        texts |= {f"{k} of group {index}": _text(v) for k, v in group.items() if k != "params"}
    return texts


def snapshot(engine: Any) -> Snapshot:
    """Digests of all that decides how training goes on, as this rank sees it. Collective."""
    tensors = {**full_parameters(engine.module), **dict(engine.module.named_buffers())}
    masters = {f"{n} (fp32 master)": safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    rates = {"learning rates": _text(engine.get_lr() if engine.basic_optimizer is not None else [])}
    if engine.lr_scheduler is not None and hasattr(engine.lr_scheduler, "state_dict"):
        rates["schedule"] = _text(engine.lr_scheduler.state_dict())
    arrays = [np.asarray(part).tolist() for part in np.random.get_state()]
    return {
        "params": {name: digest(value) for name, value in (tensors | masters).items() if value is not None},
        "opt": _optimizer_state(engine),
        "lr": rates,
        "rng": {"torch": digest(torch.get_rng_state()), "numpy": hash_of(arrays), "python": hash_of(random.getstate())},
        "scaler": {
            **{name: repr(getattr(engine, name)) for name in _COUNTERS},
            "loss scale": _text(engine.scaler_state()),
            "gradient norm": _text(engine.get_global_grad_norm()),
        },
    }


def hash_of(value: Any) -> str:
    """One short hash of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def difference(wanted: Snapshot, loaded: Snapshot) -> str:
    """The first field and name that differ; empty when nothing does."""
    for field in FIELDS:
        sides = wanted.get(field, {}), loaded.get(field, {})
        for name in dict.fromkeys(name for side in sides for name in side):
            if sides[0].get(name) != sides[1].get(name):
                before, after = (f"{side[name]:.60}" if name in side else "absent" for side in sides)
                return f"{field}: {name} ({before} without the interruption, {after} after the load)"
    return ""


# -- on the ranks ------------------------------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Every generator that a checkpoint restores."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def interrupted(
    start: Callable[[int], Any], train: Callable[[Any, range], list[float]], folder: str, *, cut: int, last: int
) -> str:
    """The first difference between ``last`` micro-batches in one go and with a save and a load after ``cut``; empty
    without one.

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


def train_case(engine: Any, case: Case, numbers: range) -> list[float]:
    """Micro-batches by their number in the run; dropout draws from the running generators."""
    values = []
    for number in numbers:
        place = MicroBatch(*divmod(number, case.accumulation), dist.get_rank(), dist.get_world_size())
        losses = case.loss(engine, case.batch(place), place)
        values += [float(loss.detach()) for loss in losses]
        random.random()
        np.random.rand()
        engine_backward(engine, case, losses)
        engine.step()
    return values


def _start(cell: ResumeCell, case: Case, folder: str, seed: int) -> Any:
    model = case.build().train()
    seed_everything(seed + dist.get_rank())
    return deepspeed.initialize(model=model, config=cell.config_in(folder))[0]


def resume_on_rank(cell: ResumeCell, folder: str, steps: int, at: int) -> str:
    """The first difference of a resumed run, empty when there is none. Collective."""
    case = cell.case()
    return interrupted(
        lambda seed: _start(cell, case, folder, seed),
        lambda engine, numbers: train_case(engine, case, numbers),
        folder,
        cut=at * cell.accumulation + cell.cut,
        last=steps * cell.accumulation,
    )


def whole_state(engine: Any) -> dict[str, str]:
    """Digests of all that does not depend on how it is cut: full tensors, numbers, groups, counters. Collective."""
    numbers: dict[str, str] = {}
    for view in engine._views:
        state = engine.basic_optimizer.state.get(view.param, {})
        plain = {k: v for k, v in state.items() if isinstance(v, (int, float)) or isinstance(v, Tensor) and not v.dim()}
        covered = [s for s in view.unit.layout.segments if max(s.offset, view.start) < min(s.stop, view.stop)]
        numbers |= {f"{k} of {s.name}": _text(v) for s in covered for k, v in plain.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, numbers)
    merged = {name: text for some in everyone for name, text in some.items()}
    mine = snapshot(engine)
    groups = {k: v for k, v in mine["opt"].items() if " of group " in k}
    return dict(sorted({**full_states(engine, []), **merged, **groups, **mine["lr"], **mine["scaler"]}.items()))


def state_on_rank(cell: ResumeCell, folder: str, at: int, *, load: bool) -> tuple[dict[str, str], list[float]]:
    """Train ``at`` steps and save, or load that on other ranks; the whole state then, and the losses of the next steps.

    Those are on samples that are the same on every rank, and so under any number of ranks. Collective.
    """
    case = cell.case()
    engine = _start(cell, case, folder, 1000 if load else 5)
    if load:
        engine.load_checkpoint(folder, tag="resume")
    else:
        train_case(engine, case, range(at * cell.accumulation))
        engine.save_checkpoint(folder, tag="resume")
    state, values = whole_state(engine), []
    for step in range(at, at + NEXT):
        for micro in range(case.accumulation):
            losses = case.seeded_loss(engine, MicroBatch(step, micro, 0, 1))
            values += [float(loss.detach()) for loss in losses]
            engine_backward(engine, case, losses)
            engine.step()
    engine.destroy()
    return state, values


# -- the command -------------------------------------------------------------------------------------------------


def check_resume(pool: RankPool, cell: ResumeCell, folder: str, *, steps: int, at: int) -> tuple[bool, str]:
    """Whether the cell resumes bit for bit, and the account. Raises RankFailure."""
    wrong = pool.run(resume_on_rank, cell, folder, steps, at)
    account = next((f"{text} on rank {rank}" for rank, text in enumerate(wrong) if text), "")
    return not account, account or f"identical: {', '.join(FIELDS)}"


def check_other_ranks(save: RankPool, load: RankPool, cell: ResumeCell, folder: str, *, at: int) -> tuple[bool, str]:
    """Whether the state survives a change of the number of ranks, and the account. Raises RankFailure."""
    before, losses = save.run(state_on_rank, cell, folder, at, load=False)[0]
    after, again = load.run(state_on_rank, cell, folder, at, load=True)[0]
    wrong = next((name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)), None)
    if wrong is not None:
        return False, f"{wrong} is not what was saved"
    text = f"state hash {hash_of(before)} at the save and after the load"
    error = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(losses, again, strict=True))
    if not error <= TOLERANCES[cell.dtype]:
        return False, f"{text}, but losses after it differ by {error:.1e} ({losses} and {again})"
    return True, f"{text}; losses of the next {NEXT} steps differ by {error:.1e}"


def add_parser(commands: Any) -> None:
    """Add ``resume`` to the commands of ``ds_verify``."""
    text = "compare training that is saved and resumed with training in one go, bit for bit"
    parser = command(commands, "resume", text, __doc__)
    add_model(parser, "the configuration to check it under")
    add_numbers(
        parser,
        ("--steps", STEPS, "optimizer steps in all"),
        ("--at", AT, "steps before the save"),
        ("--ranks", 2, "number of CPU ranks"),
        ("--load-ranks", None, "number of ranks that load (default: as many)"),
        ("--time-limit", 300.0, "seconds one run may take"),
    )


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run ``ds_verify resume``; raises ValueError (bad input) before any rank is started."""
    check_numbers(options, "ranks", "load_ranks")
    if not 1 <= options.at < options.steps:
        raise ValueError(
            f"--at {options.at}: the save must lie between the first and the last of --steps {options.steps}"
        )
    config, report = config_of(options), Printout(out)
    given = options.model or config
    cells = user_cells(options.model or "plain", config) if given else built_in_cells()
    for cell in cells:  # a fault of the configuration is reported before any rank starts
        load_config(cell.config_in(tempfile.gettempdir()), world_size=options.ranks)
    others = options.load_ranks not in (None, options.ranks)
    cells = [cell for cell in cells if not (others and (cell.cut or cell.config.get("checkpoint")))]
    width = max(len(cell.label) for cell in cells)
    limit = options.time_limit
    with RankPool(options.ranks, time_limit=limit) as pool, RankPool(options.load_ranks or 1, time_limit=limit) as load:
        for cell in cells:
            with tempfile.TemporaryDirectory(prefix="ds_verify_") as folder:
                try:
                    if others:
                        fine, account = check_other_ranks(pool, load, cell, folder, at=options.at)
                    else:
                        fine, account = check_resume(pool, cell, folder, steps=options.steps, at=options.at)
                except RankFailure as failure:
                    fine, account = False, str(failure)
            report.row(f"{cell.model:<22}  {cell.label:<{width}}", "" if fine else account, fine=account)
    where = f"{options.ranks} ranks" + (f", loaded on {options.load_ranks}" if others else "")
    return report.end(f"{len(cells)} cells on {where}, saved after {options.at} steps", "all identical")
