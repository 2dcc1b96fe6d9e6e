"""The gradient gate: the engine on several ranks against plain one-process PyTorch.

Every *cell* trains one model for a few optimizer steps and compares, on every rank and at every step, the losses, the
averaged gradients (``safe_get_full_grad`` between backward and step), the gradient norm and the parameters after the
step (``GatheredParameters``). All of it in fp32, where nothing but the order of additions may differ.

An error is ``max|ours - reference| / max(1, max|reference|)`` of one tensor: absolute for values up to 1.

A dtype of the model that changes otherwise than ``ds_config show --dtypes`` says is an error too, in 16 bits where
asked for.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.config.model.dtypes import dtype_policy
from deepspeed.device import DTYPES
from deepspeed.errors import InvalidStateError
from deepspeed.utils import safe_get_full_grad
from deepspeed.verify.common import Printout, add_model, add_numbers, check_numbers, command, config_of, cut
from deepspeed.verify.models import SAMPLES, Case, Losses, MicroBatch
from deepspeed.verify.ranks import RankFailure, RankPool
from deepspeed.verify.reference import GATE_ADAM, Reference, repeated, train_reference, trainable
from deepspeed.verify.user_model import __doc__ as user_model_text, case_of

TOLERANCE = 1e-6
STEPS = 3
COLUMNS = ("model", "stage", "bucket", "overlap", "accum", "loss", "grad", "norm", "param")
WIDTHS = (24, 5, 6, 7, 5, 8, 8, 8, 8)
MATRIX_MODELS = ("plain", "used_twice", "tied", "unused", "frozen", "conditional")
MATRIX_ACCUMULATION = (1, 4)

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
    "zero_optimization",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "activation_checkpointing",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
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


@dataclass(frozen=True)
class CellResult:
    """The largest errors of one cell over all steps, tensors and ranks; ``failure``: what raised, if anything did."""

    cell: Cell
    errors: tuple[float, ...] = ()  # of losses, gradients, norms, parameters
    worst: str = ""
    failure: str = ""

    def passed(self, tolerance: float = TOLERANCE) -> bool:
        """True when nothing raised and every error is within ``tolerance``."""
        return not self.failure and self.largest() <= tolerance

    def largest(self) -> float:
        """The largest of the four errors."""
        return max(self.errors, default=0.0)


def scaled_error(ours: Tensor, reference: Tensor) -> float:
    """``max|ours - reference| / max(1, max|reference|)``; infinite for a wrong shape, a NaN or an infinity."""
    if ours.shape != reference.shape:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    scale = max(1.0, float(reference.double().abs().max()))
    difference = (ours.detach().double().cpu() - reference.double()).abs().max() / scale
    return float(difference) if bool(difference.isfinite()) else float("inf")


class _Errors:
    """The largest error of each kind, and the tensor that the largest of all belongs to."""

    def __init__(self) -> None:
        self.largest = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "param": 0.0}
        self.worst, self._worst_error = "", 0.0

    def add(self, kind: str, error: float, where: str) -> None:
        self.largest[kind] = max(self.largest[kind], error)
        if error > self._worst_error:
            self.worst, self._worst_error = f"{kind} {where}", error


def cell_config(cell: Cell, case: Case) -> dict[str, Any]:
    """The configuration of one cell: the kept keys of ``cell.config`` under the settings the cell states."""
    config = {key: value for key, value in cell.config.items() if key in KEPT_KEYS}
    zero = dict(config.get("zero_optimization") or {})
    if cell.stage is not None:
        zero["stage"] = cell.stage
    if cell.bucket is not None:
        chosen = BUCKETS[cell.bucket]
        zero = {key: value for key, value in zero.items() if key.removeprefix("stage3_") not in chosen} | chosen
    if cell.overlap is not None:
        zero["overlap_comm"] = cell.overlap
    config.update(
        zero_optimization=zero,
        train_micro_batch_size_per_gpu=SAMPLES,
        gradient_accumulation_steps=case.accumulation,
        gradient_clipping=case.clipping,
        optimizer={"type": "AdamW", "params": {**GATE_ADAM, "betas": list(GATE_ADAM["betas"])}},
    )
    return config


def load_case(cell: Cell) -> Case:
    """The case a cell names, with the cell's accumulation."""
    case = case_of(cell.model, cell.config)
    return case if cell.accumulation is None else replace(case, accumulation=cell.accumulation)


def engine_backward(engine: Any, case: Case, losses: Losses) -> None:
    """Back-propagate as the case says: through the engine or plainly, once or several times over one graph."""
    for loss, keep in repeated(case, losses):
        if case.plain_backward:
            loss.backward(retain_graph=keep)
        else:
            engine.backward(loss, retain_graph=keep)


def full_gradients(params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Name -> full averaged gradient (fp32); a parameter without one counts as zero. Collective."""
    grads = {name: safe_get_full_grad(param) for name, param in params.items()}
    return {name: torch.zeros(params[name].shape) if grad is None else grad.clone() for name, grad in grads.items()}


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Name -> full parameter values. Collective."""
    named = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: param.detach().clone() for name, param in named.items()}


def _check_step(engine: Any, case: Case, reference: Reference, step: int, errors: _Errors) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    record = reference.steps[step]
    params = trainable(engine.module)
    for micro in range(case.accumulation):
        place = MicroBatch(step, micro, rank, world)
        losses = case.seeded_loss(engine, place)
        for index, (ours, expected) in enumerate(zip(losses, record.losses[rank, micro], strict=True)):
            error = scaled_error(ours.detach(), torch.tensor(expected))
            errors.add("loss", error, f"{index} at step {step} micro {micro}")
        engine_backward(engine, case, losses)
        case.write_by_hand(engine.module, place)
        if micro == case.accumulation - 1 and not case.by_hand:  # what was just written is reduced in the step
            for name, grad in full_gradients(params).items():
                errors.add("grad", scaled_error(grad, record.grads[name]), f"{name} at step {step}")
        engine.step()
    norm = engine.get_global_grad_norm()
    ours_norm = torch.tensor(float("nan") if norm is None else float(norm))
    errors.add("norm", scaled_error(ours_norm, torch.tensor(record.grad_norm)), f"at step {step}")
    for name, value in full_parameters(engine.module).items():
        errors.add("param", scaled_error(value, record.params[name]), f"{name} after step {step}")


def start_engine(case: Case, config: dict[str, Any]) -> Any:
    """An engine over the case's model. Collective.

    Raises InvalidStateError for tensors that are neither in the dtype they were built in nor in one that the table of
    dtypes has for their kind.
    """
    model = case.build().train()
    built = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    engine = deepspeed.initialize(model=model, config=config)[0]
    policy = dtype_policy(engine._config)
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


def compare_engine(case: Case, reference: Reference, config: dict[str, Any]) -> tuple[dict[str, float], str]:
    """Train ``case`` with the engine on the ranks of this process group and compare with ``reference``.

    Returns the largest error of each kind ("loss", "grad", "norm", "param") and the name of the worst tensor.
    Collective.
    """
    engine = start_engine(case, config)
    errors = _Errors()
    for step in range(len(reference.steps)):
        _check_step(engine, case, reference, step, errors)
    engine.destroy()
    return errors.largest, errors.worst


def run_cell(cell: Cell, *, steps: int = STEPS) -> CellResult:
    """Run one cell on the ranks of this process group; the result holds this rank's errors. Collective."""
    case = load_case(cell)
    reference = train_reference(case, world=dist.get_world_size(), steps=steps)
    config = cell_config(cell, case)
    largest, worst = compare_engine(case, reference, config)
    if lower := {key: cell.config[key] for key in DTYPE_KEYS if key in cell.config}:
        start_engine(case, config | lower).destroy()
    return CellResult(cell, tuple(largest.values()), worst)


def run_cell_on(pool: RankPool, cell: Cell, *, steps: int = STEPS) -> CellResult:
    """Run one cell on a pool and merge what the ranks measured; an exception or a hang becomes its ``failure``."""
    try:
        results: list[CellResult] = pool.run(run_cell, cell, steps=steps)
    except RankFailure as failure:
        return CellResult(cell, failure=str(failure))
    errors = tuple(max(kind) for kind in zip(*(result.errors for result in results), strict=True))
    return CellResult(cell, errors, max(results, key=CellResult.largest).worst)


def matrix_cells(models: Iterable[str] = MATRIX_MODELS, config: dict[str, Any] | None = None) -> list[Cell]:
    """stage x bucket x overlap x accumulation x model, in a stable order."""
    axes = product(models, range(4), BUCKETS, (False, True), MATRIX_ACCUMULATION)
    return [Cell(m, stage=s, bucket=b, overlap=o, accumulation=a, config=config or {}) for m, s, b, o, a in axes]


# -- the command -------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Add ``grads`` to the commands of ``ds_verify``."""
    text = "compare gradients, norms and parameters with plain one-process PyTorch"
    parser = command(commands, "grads", text, user_model_text)
    matrix = "every combination of stage, bucket, overlap and accumulation"
    parser.add_argument("--matrix", action="store_true", help=matrix)
    add_model(parser, "the configuration to check your model under")
    add_numbers(
        parser,
        ("--ranks", 2, "number of CPU ranks"),
        ("--steps", STEPS, "optimizer steps per cell"),
        ("--tolerance", TOLERANCE, "largest error allowed"),
        ("--time-limit", 120.0, "seconds one cell may take"),
    )


def _cells(options: argparse.Namespace, config: dict[str, Any]) -> list[Cell]:
    model = options.model
    if options.matrix:
        return matrix_cells([model] if model else MATRIX_MODELS, config)
    if config:
        return [Cell(model or "plain", config=config)]
    if model:
        return [Cell(model, stage=stage) for stage in range(4)]
    return [Cell("plain", stage=stage, bucket="huge", overlap=True, accumulation=1) for stage in range(4)]


def _row(values: Sequence[str]) -> str:
    return "  ".join(value.ljust(width) for value, width in zip(values, WIDTHS, strict=False))


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run ``ds_verify grads``; raises ValueError (bad input) before any rank is started."""
    check_numbers(options, "ranks", "steps")
    config, report = config_of(options), Printout(out)
    if aside := ", ".join(sorted(key for key in config if key not in KEPT_KEYS)):
        report.say(f"checked in fp32 with AdamW; set aside from the configuration (but for the dtypes): {aside}")
    report.say(f"{_row(COLUMNS)}  result")
    failed: list[CellResult] = []
    cells = _cells(options, config)
    with RankPool(options.ranks, time_limit=options.time_limit) as pool:
        for cell in cells:
            result = run_cell_on(pool, cell, steps=options.steps)
            passed = result.passed(options.tolerance)
            failed += [] if passed else [result]
            errors = ["-"] * 4 if result.failure else [f"{error:.1e}" for error in result.errors]
            report.say(f"{_row((*cell.label(), *errors))}  {'ERROR' if result.failure else 'ok' if passed else 'FAIL'}")
    for result in failed[:3]:
        account = cut(result.failure) or f"largest error {result.largest():.3e} in {result.worst}"
        report.say(f"\n{' '.join(result.cell.label())}: {account}")
    report.failed = len(failed)
    conditions = f"on {options.ranks} ranks, {options.steps} steps each, tolerance {options.tolerance:g}"
    return report.end(f"{len(cells)} cells {conditions}", "all pass")
