"""The gradient gate: the engine on several ranks against plain one-process PyTorch.

Every *cell* trains one model for a few optimizer steps and compares, on every rank and at every step, the losses, the
averaged gradients (``safe_get_full_grad`` between backward and step), the gradient norm and the parameters after the
step (``GatheredParameters``). All of it in fp32, where nothing but the order of additions may differ.

An error is ``max|ours - reference| / max(1, max|reference|)`` of one tensor: absolute for values up to 1.

A dtype of the model that changes otherwise than ``ds_config show --dtypes`` says is an error too.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.device import DTYPES
from deepspeed.errors import InvalidStateError
from deepspeed.utils import safe_get_full_grad
from deepspeed.verify import STEPS
from deepspeed.verify.common import Printout, aligned, config_of
from deepspeed.verify.models import SAMPLES, Case, MicroBatch
from deepspeed.verify.ranks import RankPool
from deepspeed.verify.reference import GATE_ADAM, StepRecord, train_reference, trainable
from deepspeed.verify.user_model import case_of

KINDS = ("loss", "grad", "norm", "param")
COLUMNS = ("model", "stage", "bucket", "overlap", "accum", *KINDS)
WIDTHS = (24, 5, 6, 7, 5, 8, 8, 8, 8)
MATRIX_MODELS = ("plain", "used_twice", "tied", "unused", "frozen", "conditional")
MATRIX_ACCUMULATION = (1, 4)
Errors = dict[str, tuple[float, str]]  # by kind the largest error over all steps and tensors, and where it is

# "tiny": one parameter per reduction, nothing kept, nothing fetched ahead. "huge": everything in one bucket and fetched
# ahead; the persistence threshold lies between a bias and a weight of the small models, so both kinds occur.
_BUCKET_KEYS = (
    *("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size"),
    *("param_persistence_threshold", "max_live_parameters", "max_reuse_distance"),
)
BUCKETS: dict[str, dict[str, Any]] = {
    "tiny": dict(zip(_BUCKET_KEYS, (1, 2, 0, 0, 0, 0), strict=True)),
    "huge": dict(zip(_BUCKET_KEYS, (500_000_000, 500_000_000, 500_000_000, 20, 10**9, 10**9), strict=True)),
}
# Keys of a user's configuration that the gate keeps; the rest (optimizer, scheduler, 16-bit modes, logging, batch
# size) either cannot change a gradient or would hide an error of 1e-6 behind rounding.
KEPT_KEYS = (
    *("zero_optimization", "gradient_accumulation_steps", "gradient_clipping", "prescale_gradients"),
    *("gradient_predivide_factor", "activation_checkpointing"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
# With these an engine is built once more, to look at the dtypes.
DTYPE_KEYS = ("bf16", "fp16", "torch_autocast", "data_types")


@dataclass(frozen=True)
class Cell:
    """One run of the gate. ``model`` is a case name, or ``module:build`` of a user; None leaves the user's setting."""

    model: str
    stage: int | None = None
    bucket: str | None = None
    overlap: bool | None = None
    accumulation: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def label(self) -> tuple[str, ...]:
        """The cell as table columns: model, stage, bucket, overlap, accumulation."""
        overlap = None if self.overlap is None else "on" if self.overlap else "off"
        values = (self.stage, self.bucket, overlap, self.accumulation)
        return (self.model, *("-" if value is None else str(value) for value in values))

    def settings(self, case: Case) -> dict[str, Any]:
        """The configuration: the kept keys of ``config`` under the settings the cell states."""
        config = {key: value for key, value in self.config.items() if key in KEPT_KEYS}
        zero = dict(config.get("zero_optimization") or {})
        if self.bucket is not None:
            chosen = BUCKETS[self.bucket]
            zero = {key: value for key, value in zero.items() if key.removeprefix("stage3_") not in chosen} | chosen
        stated = {"stage": self.stage, "overlap_comm": self.overlap}
        zero |= {key: value for key, value in stated.items() if value is not None}
        return {**config, "zero_optimization": zero, **loop_settings(case)}


def loop_settings(case: Case) -> dict[str, Any]:
    """What the loop of ``case`` and the gate's optimizer are in a configuration."""
    named = {"type": "AdamW", "params": {**GATE_ADAM, "betas": list(GATE_ADAM["betas"])}}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        **({"optimizer": named} if case.optimizer is None else {}),
    }


def scaled_error(ours: Tensor, reference: Tensor, scale: float | None = None) -> float:
    """``max|ours - reference| / scale`` (default ``max(1, max|reference|)``), infinite for a wrong shape or a NaN."""
    if ours.shape != reference.shape:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    scale = max(1.0, float(reference.double().abs().max())) if scale is None else scale
    difference = (ours.detach().double().cpu() - reference.double()).abs().max() / scale
    return float(difference) if bool(difference.isfinite()) else float("inf")


def full_gradients(params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Name -> full averaged gradient (fp32); a parameter without one counts as zero. Collective."""
    grads = {name: safe_get_full_grad(param) for name, param in params.items()}
    return {name: torch.zeros(params[name].shape) if grad is None else grad.clone() for name, grad in grads.items()}


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Name -> full parameter values. Collective."""
    named = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: param.detach().clone() for name, param in named.items()}


def _check_step(engine: Any, case: Case, record: StepRecord, step: int, errors: Errors) -> None:
    def note(kind: str, ours: Tensor, reference: Tensor, where: str) -> None:
        errors[kind] = max(errors[kind], (scaled_error(ours, reference), f"{where} step {step}"))

    rank, world = dist.get_rank(), dist.get_world_size()
    for micro in range(case.accumulation):
        place = MicroBatch(step, micro, rank, world)
        losses = case.seeded_loss(engine, place)
        for index, (ours, expected) in enumerate(zip(losses, record.losses[rank, micro], strict=True)):
            note("loss", ours, expected, f"{index} of micro-batch {micro} at")
        case.backward(losses, engine.backward)
        written = case.after_backward(engine.module, place)
        if micro == case.accumulation - 1 and not written:  # what was just written is reduced in the step
            for name, grad in full_gradients(trainable(engine.module)).items():
                note("grad", grad, record.grads[name], f"{name} at")
        engine.step()
    norm = engine.get_global_grad_norm()
    note("norm", torch.tensor(float("nan") if norm is None else float(norm)), torch.tensor(record.grad_norm), "at")
    for name, value in full_parameters(engine.module).items():
        note("param", value, record.params[name], f"{name} after")


def start_engine(case: Case, config: dict[str, Any], model: nn.Module | None = None) -> Any:
    """An engine of ``model``, or of a fresh one. Collective.

    Raises InvalidStateError for a dtype that is neither the one built nor in the table.
    """
    model = (case.build() if model is None else model).train()
    built = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    given = case.optimizer(model) if case.optimizer is not None else None
    engine = deepspeed.initialize(model=model, config=config, optimizer=given)[0]
    policy = engine._config.dtype_policy
    # Kept in fp32, or lowered by autocast, are parameters that the configuration or the model's class lists.
    listed = (["fp32"] if policy.compute else []) + ([policy.low] if engine._config.torch_autocast.enabled else [])
    buffers = {DTYPES[name] for name in [policy.buffers] if name}
    params = buffers | {DTYPES[name] for name in [policy.compute, *listed] if name}
    changed = [
        f"{name} from {built[name]} to {tensor.dtype}"
        for named, allowed in ((model.named_parameters(), params), (model.named_buffers(), buffers))
        for name, tensor in named
        if tensor.dtype not in {built[name], *allowed}
    ]
    if changed:
        raise InvalidStateError(
            f"dtypes changed that the table of ds_config show --dtypes leaves alone: {'; '.join(changed)}"
        )
    return engine


def run_cell(
    cell: Cell,
    *,
    steps: int = STEPS,
    case: Case | None = None,
    prepare: Callable[[Any], None] = lambda engine: None,
    after_step: Callable[[], None] = lambda: None,
) -> Errors:
    """Train the model of the cell, or ``case``, on the ranks of this process group; this rank's errors. Collective."""
    case = case or case_of(cell.model, cell.config)
    case = case if cell.accumulation is None else replace(case, accumulation=cell.accumulation)
    reference = train_reference(case, world=dist.get_world_size(), steps=steps)
    config, errors = cell.settings(case), Errors.fromkeys(KINDS, (0.0, ""))
    engine = start_engine(case, config)
    prepare(engine)
    for step, record in enumerate(reference):
        _check_step(engine, case, record, step, errors)
        after_step()
    engine.destroy()
    if lower := {key: cell.config[key] for key in DTYPE_KEYS if key in cell.config}:
        start_engine(case, config | lower).destroy()
    return errors


def largest(ranks: list[Errors]) -> tuple[float, str, str]:
    """The largest error, its kind, and where it is."""
    (top, where), kind = max((each[kind], kind) for each in ranks for kind in KINDS)
    return top, kind, where


def matrix_cells(models: Iterable[str] = MATRIX_MODELS, config: dict[str, Any] | None = None) -> list[Cell]:
    """stage x bucket x overlap x accumulation x model, in a stable order."""
    axes = product(models, range(4), BUCKETS, (False, True), MATRIX_ACCUMULATION)
    return [Cell(m, stage=s, bucket=b, overlap=o, accumulation=a, config=config or {}) for m, s, b, o, a in axes]


def _cells(options: argparse.Namespace, config: dict[str, Any]) -> list[Cell]:
    model = options.model
    if options.matrix:
        return matrix_cells([model] if model else MATRIX_MODELS, config)
    if config:
        return [Cell(model or "plain", config=config)]
    if model:
        return [Cell(model, stage=stage) for stage in range(4)]
    return [Cell("plain", stage=stage, bucket="huge", overlap=True, accumulation=1) for stage in range(4)]


def run(options: argparse.Namespace, report: Printout) -> int:
    """Run ``ds_verify grads``; raises ValueError (bad input) before any rank is started."""
    config = config_of(options)
    if aside := ", ".join(sorted(key for key in config if key not in KEPT_KEYS)):
        report.say(f"checked in fp32 with AdamW; set aside from the configuration (but for the dtypes): {aside}")
    report.say(f"{aligned(COLUMNS, WIDTHS)}  result")
    cells = _cells(options, config)
    with RankPool(options.ranks, time_limit=options.time_limit) as pool:

        def check(cell: Cell) -> tuple[str, str]:
            results: list[Errors] = pool.run(run_cell, cell, steps=options.steps)
            top, kind, where = largest(results)
            texts = [f"{max(each[kind] for each in results)[0]:.1e}" for kind in KINDS]
            fault = f"largest error {top:.3e} in {kind} {where} ({', '.join(texts)})"
            return f"{aligned(texts, WIDTHS[5:])}  ok", "" if top <= options.tolerance else fault

        for cell in cells:
            report.row(aligned(cell.label(), WIDTHS), check, cell)
    conditions = f"on {options.ranks} ranks, {options.steps} steps each, tolerance {options.tolerance:g}"
    return report.end(f"{len(cells)} cells {conditions}", "all pass")
