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
import math
import random
import sys
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
from deepspeed.config.parse import read_config_source
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.verify.grads import engine_backward, full_parameters
from deepspeed.verify.models import Case, Place
from deepspeed.verify.offload import OffloadCell, case_of, digest, full_states, tier_config
from deepspeed.verify.ranks import RankFailure, RankPool
from deepspeed.verify.user_model import load_user_case

FIELDS = ("loss", "params", "opt", "lr", "rng", "scaler")
STEPS, AT = 20, 10
NEXT = 3  # steps compared after a load on other ranks
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of a loss, relative
Snapshot = dict[str, dict[str, str]]  # field -> name -> digest
_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
_WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 15, "warmup_max_lr": 1e-2}}
# The first scales overflow, so that updates are skipped, and the scale grows again later.
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}}


@dataclass(frozen=True)
class ResumeCell:
    """One row of the report: ``model`` under ``config``, states on ``tier``; ``cut``: micro-batches of an open window
    at the save.
    """

    label: str
    model: str
    config: dict[str, Any]
    accumulation: int = 1
    cut: int = 0
    tier: str | None = None

    def case(self) -> Case:
        """The model and its data."""
        return replace(case_of(OffloadCell(self.model, self.config, self.label)), accumulation=self.accumulation)

    def settings(self, folder: str) -> dict[str, Any]:
        """The configuration; ``folder`` is for states on a drive. The user's own offload blocks stay when ``tier`` is
        None.
        """
        blocks = {k: v for k, v in self.config.get("zero_optimization", {}).items() if k.startswith("offload_")}
        config = tier_config(
            OffloadCell(self.model, self.config, self.label), self.tier or "none", folder, self.accumulation
        )
        if self.tier is None:
            config["zero_optimization"].update(blocks)
        return config


def built_in_cells(stages: tuple[int, ...] = (0, 1, 2, 3)) -> list[ResumeCell]:
    """A small model under every stage and everything that a resume can lose."""
    cells = []
    for stage in stages:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 200}
        base = {"zero_optimization": zero, "optimizer": _ADAMW, "scheduler": _WARMUP}

        def cell(
            label: str, model: str = "plain", *, stage: int = stage, base: Any = base, **changes: Any
        ) -> ResumeCell:
            config = {**base, **changes.pop("config", {})}
            return ResumeCell(f"stage {stage} {label}", model, config, **changes)

        cells += [
            cell("fp32"),
            cell("bf16", config={"bf16": {"enabled": True}}),
            cell("fp16, dynamic scale", config=_FP16),
            cell("dropout", "dropout_checkpointed"),
            cell("open window", accumulation=3, cut=1),
            cell("uneven shards", "odd_shapes"),
            cell("async save", config={"checkpoint": {"async": True}}),
        ]
        if stage:
            cells.append(cell("nvme", tier="nvme"))
    return cells


def user_cells(model: str, config: dict[str, Any]) -> list[ResumeCell]:
    """The user's model under the user's configuration (or, without one, under every stage); with accumulation also cut
    in a window.
    """
    if not config:
        return [
            ResumeCell(f"stage {s}", model, {"zero_optimization": {"stage": s}, "optimizer": _ADAMW}) for s in range(4)
        ]
    config = {"optimizer": _ADAMW, "zero_optimization": {}, **config}
    stage = (config["zero_optimization"] or {}).get("stage", 0)
    config["zero_optimization"] = {**(config["zero_optimization"] or {}), "stage": stage}
    accumulation = config.get("gradient_accumulation_steps", 1)
    accumulation = accumulation if isinstance(accumulation, int) else 1
    cell = ResumeCell(f"stage {stage}", model, config, accumulation=accumulation)
    behind = {**config, "checkpoint": {**(config.get("checkpoint") or {}), "async": True}}
    cells = [cell, replace(cell, label=f"{cell.label} async save", config=behind)]
    return cells + ([replace(cell, label=f"{cell.label} open window", cut=1)] if accumulation > 1 else [])


# -- what an engine holds ----------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """Every bit of a plain value."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {digest(value.cpu())}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(_text(v) for v in value)})"
    return value.hex() if isinstance(value, float) else repr(value)


def _inside(view: Any, value: Any) -> Any:
    """An elementwise slot without the padding between parameters, which nothing depends on."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() != view.stop - view.start:
        return value
    spans = [
        (max(s.offset, view.start) - view.start, min(s.stop, view.stop) - view.start) for s in view.unit.layout.segments
    ]
    return torch.cat([value[lo:hi] for lo, hi in spans if lo < hi] or [value[:0]])


def _optimizer_state(engine: Any) -> dict[str, str]:
    """State of this rank's part of every parameter, and of the groups."""
    optimizer = engine.basic_optimizer
    if optimizer is None:
        return {}
    found = {}
    for view in engine._views:
        with engine.attached(view):
            for slot, value in optimizer.state.get(view.param, {}).items():
                found[f"{slot} of {view.name} from {view.start} on"] = _text(_inside(view, value))
    found |= {f"state[{k!r}]": _text(v) for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"{k} of group {index}": _text(v) for k, v in group.items() if k != "params"}
    return found


def snapshot(engine: Any) -> Snapshot:
    """Digests of all that decides how training goes on, as this rank sees it. Collective."""
    counters = {n: repr(getattr(engine, n)) for n in ("global_steps", "global_samples", "micro_steps", "skipped_steps")}
    params = {name: digest(value.cpu()) for name, value in full_parameters(engine.module).items()}
    buffers = {name: digest(value.cpu()) for name, value in engine.module.named_buffers()}
    whole = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    masters = {f"{name} (fp32 master)": digest(value.cpu()) for name, value in whole.items() if value is not None}
    rates = {"learning rates": _text(engine.get_lr() if engine.basic_optimizer is not None else [])}
    if engine.lr_scheduler is not None and hasattr(engine.lr_scheduler, "state_dict"):
        rates["schedule"] = _text(engine.lr_scheduler.state_dict())
    return {
        "params": params | buffers | masters,
        "opt": _optimizer_state(engine),
        "lr": rates,
        "rng": {
            "torch": digest(torch.get_rng_state()),
            "numpy": hashlib.sha256(
                repr([np.asarray(part).tolist() for part in np.random.get_state()]).encode()
            ).hexdigest()[:16],
            "python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest()[:16],
        },
        "scaler": {
            **counters,
            "loss scale": _text(engine.scaler_state()),
            "gradient norm": _text(engine.get_global_grad_norm()),
        },
    }


def difference(wanted: Snapshot, found: Snapshot) -> str:
    """The first field and name that differ; empty when nothing does."""
    for field in FIELDS:
        ours, theirs = found.get(field, {}), wanted.get(field, {})
        for name in dict.fromkeys((*theirs, *ours)):
            if ours.get(name) != theirs.get(name):
                there, here = (f"{side[name]:.60}" if name in side else "absent" for side in (theirs, ours))
                return f"{field}: {name} ({there} without the interruption, {here} after the load)"
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
    found = snapshot(engine)
    engine.destroy()
    pairs = enumerate(zip(straight, losses, strict=True))
    parted = next((i for i, (a, b) in pairs if a != b and not (math.isnan(a) and math.isnan(b))), -1)
    if parted >= 0:
        return f"loss: number {parted + 1} is {losses[parted]!r}, not {straight[parted]!r}"
    wrong = difference(end, found)
    return f"at the end, {wrong}" if wrong else ""


def train_case(engine: Any, case: Case, numbers: range) -> list[float]:
    """Micro-batches by their number in the run; dropout draws from the running generators."""
    told = []
    for number in numbers:
        place = Place(*divmod(number, case.accumulation), dist.get_rank(), dist.get_world_size())
        losses = case.loss(engine, case.batch(place), place)
        told += [float(loss.detach()) for loss in losses]
        random.random()
        np.random.rand()
        engine_backward(engine, case, losses)
        engine.step()
    return told


def _start(cell: ResumeCell, case: Case, folder: str, seed: int) -> Any:
    model = case.build().train()
    seed_everything(seed + dist.get_rank())
    return deepspeed.initialize(model=model, config=cell.settings(folder))[0]


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
    """Digests of all that does not depend on how it is cut: full tensors, the optimizer's numbers and groups, counters.
    Collective.
    """
    numbers: dict[str, str] = {}
    for view in engine._views:
        state = engine.basic_optimizer.state.get(view.param, {})
        own = {k: v for k, v in state.items() if isinstance(v, (int, float)) or isinstance(v, Tensor) and v.dim() == 0}
        covered = [s for s in view.unit.layout.segments if max(s.offset, view.start) < min(s.stop, view.stop)]
        numbers |= {f"{k} of {s.name}": _text(v) for s in covered for k, v in own.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, numbers)
    merged = {name: text for some in everyone for name, text in some.items()}
    own_view = snapshot(engine)
    groups = {k: v for k, v in own_view["opt"].items() if " of group " in k}
    counters = {k: v for k, v in own_view["scaler"].items()}
    return dict(sorted({**full_states(engine, []), **merged, **groups, **own_view["lr"], **counters}.items()))


def hash_of(state: dict[str, str]) -> str:
    """One short hash of a whole state."""
    return hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest()[:12]


def _next_losses(engine: Any, case: Case, first: int) -> list[float]:
    """Losses of the next steps on samples that are the same on every rank, and so under any number of ranks."""
    told = []
    for step in range(first, first + NEXT):
        for micro in range(case.accumulation):
            losses = case.seeded_loss(engine, Place(step, micro, 0, 1))
            told += [float(loss.detach()) for loss in losses]
            engine_backward(engine, case, losses)
            engine.step()
    return told


def save_on_rank(cell: ResumeCell, folder: str, at: int) -> tuple[dict[str, str], list[float]]:
    """Train ``at`` steps and save; the whole state at the save, and the losses of the steps after it. Collective."""
    case = cell.case()
    engine = _start(cell, case, folder, 5)
    train_case(engine, case, range(at * cell.accumulation))
    engine.save_checkpoint(folder, tag="resume")
    found = whole_state(engine), _next_losses(engine, case, at)
    engine.destroy()
    return found


def load_on_rank(cell: ResumeCell, folder: str, at: int) -> tuple[dict[str, str], list[float]]:
    """Load what ``save_on_rank`` saved on other ranks; the same as it returns. Collective."""
    case = cell.case()
    engine = _start(cell, case, folder, 1000)
    engine.load_checkpoint(folder, tag="resume")
    found = whole_state(engine), _next_losses(engine, case, at)
    engine.destroy()
    return found


# -- the command -------------------------------------------------------------------------------------------------


def check_resume(pool: RankPool, cell: ResumeCell, *, steps: int, at: int, time_limit: float) -> tuple[bool, str]:
    """Whether the cell resumes bit for bit, and the account."""
    with tempfile.TemporaryDirectory(prefix="ds_verify_") as folder:
        try:
            wrong = pool.run(resume_on_rank, cell, folder, steps, at, time_limit=time_limit)
        except RankFailure as failure:
            return False, str(failure)[:4000]
    account = next((f"{text} on rank {rank}" for rank, text in enumerate(wrong) if text), "")
    return not account, account or f"identical: {', '.join(FIELDS)}"


def check_other_ranks(
    save: RankPool, load: RankPool, cell: ResumeCell, *, at: int, time_limit: float
) -> tuple[bool, str]:
    """Whether the state survives a change of the number of ranks, and the account."""
    with tempfile.TemporaryDirectory(prefix="ds_verify_") as folder:
        try:
            before, losses = save.run(save_on_rank, cell, folder, at, time_limit=time_limit)[0]
            after, again = load.run(load_on_rank, cell, folder, at, time_limit=time_limit)[0]
        except RankFailure as failure:
            return False, str(failure)[:4000]
    wrong = next((name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)), None)
    if wrong is not None:
        return False, f"{wrong} is not what was saved"
    text = f"state hash {hash_of(before)} at the save and after the load"
    tolerance = TOLERANCES[_dtype_of(cell)]
    error = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(losses, again, strict=True))
    if not error <= tolerance:
        return False, f"{text}, but losses after it differ by {error:.1e} ({losses} and {again})"
    return True, f"{text}; losses of the next {NEXT} steps differ by {error:.1e}"


def _dtype_of(cell: ResumeCell) -> torch.dtype:
    named = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next(
        (dtype for block, dtype in named.items() if (cell.config.get(block) or {}).get("enabled")), torch.float32
    )


def add_parser(commands: Any) -> None:
    """Add ``resume`` to the subcommands of ``ds_verify``."""
    parser = commands.add_parser(
        "resume",
        help="compare training that is saved and resumed with training in one go, bit for bit",
        description=f"{__doc__}\n{sys.modules['deepspeed.verify.user_model'].__doc__ or ''}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="MODULE:BUILD", help="your own model (see below)")
    parser.add_argument("--config", metavar="FILE", help="the configuration to check it under")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps in all (default {STEPS})")
    parser.add_argument("--at", type=int, default=AT, help=f"steps before the save (default {AT})")
    parser.add_argument("--ranks", type=int, default=2, help="number of CPU ranks (default 2)")
    parser.add_argument("--load-ranks", type=int, metavar="RANKS", help="number of ranks that load (default: as many)")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds one run may take (default 300)")


def _cells(options: argparse.Namespace) -> list[ResumeCell]:
    """The cells to check; raises ValueError for input that cannot be."""
    if options.ranks < 1 or options.load_ranks is not None and options.load_ranks < 1:
        raise ValueError("--ranks and --load-ranks must be at least 1")
    if not 1 <= options.at < options.steps:
        raise ValueError(
            f"--at {options.at}: the save must lie between the first and the last of --steps {options.steps}"
        )
    config = read_config_source(options.config) if options.config else {}
    if options.model is not None:
        load_user_case(options.model, config)
    cells = user_cells(options.model or "plain", config) if options.model or config else built_in_cells()
    for cell in cells:
        load_config(
            cell.settings(tempfile.gettempdir()), world_size=options.ranks
        )  # a fault of it is said before any rank starts
    return cells


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run ``ds_verify resume``; raises ValueError (bad input) before any rank is started."""
    cells = _cells(options)
    others = options.load_ranks not in (None, options.ranks)
    cells = [cell for cell in cells if not (others and (cell.cut or cell.config.get("checkpoint")))]
    width = max(len(cell.label) for cell in cells)
    failed = 0
    with RankPool(options.ranks) as pool, RankPool(options.load_ranks or 1) as load:
        for cell in cells:
            if others:
                fine, account = check_other_ranks(pool, load, cell, at=options.at, time_limit=options.time_limit)
            else:
                fine, account = check_resume(
                    pool, cell, steps=options.steps, at=options.at, time_limit=options.time_limit
                )
            failed += not fine
            out.write(f"{cell.model:<22}  {cell.label:<{width}}  {account if fine else 'FAIL'}\n")
            if not fine:
                out.write(f"    {account}\n")
            out.flush()
    where = f"{options.ranks} ranks" + (f", loaded on {options.load_ranks}" if others else "")
    out.write(
        f"\n{len(cells)} cells on {where}, saved after {options.at} steps: "
        f"{f'{failed} FAIL' if failed else 'all identical'}\n"
    )
    return 1 if failed else 0
