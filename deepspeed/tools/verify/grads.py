"""The engine on several ranks against plain one-process PyTorch, in fp32, where only the order of additions may differ.

An error is ``max|ours - reference| / max(1, max|reference|)`` of one tensor: absolute for values up to 1. A dtype of
the model that changes otherwise than ``ds_config show --dtypes`` says is an error too, in 16 bits where asked for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.accelerator.device import DTYPES
from deepspeed.errors import InvalidStateError, counted
from deepspeed.tools.verify import STEPS
from deepspeed.tools.verify.driver import Driver, RowResult, aligned, config_of
from deepspeed.tools.verify.models import SAMPLES, Case, MicroBatch
from deepspeed.tools.verify.reference import GATE_ADAM, StepRecord, train_reference, trainable
from deepspeed.tools.verify.user_model import case_of
from deepspeed.utils import safe_get_full_grad

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
    *("gradient_predivide_factor", "activation_checkpointing", "expert_parallel"),
    *("sequence_parallel_size", "sequence"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
# With these an engine is built once more, to look at the dtypes.
DTYPE_KEYS = ("bf16", "bfloat16", "fp16", "torch_autocast", "data_types")
_SETTLED = 2  # steps after which everything that will be is compiled


@dataclass(frozen=True)
class Cell:
    """Run of the gate. ``model`` is a case name, or ``module:build`` of a user; None leaves the user's setting."""

    model: str
    stage: int | None = None
    bucket: str | None = None
    overlap: bool | None = None
    accumulation: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def label(self) -> tuple[str, ...]:
        """Return the table columns model, stage, bucket, overlap, accumulation."""
        overlap = {None: None, True: "on", False: "off"}[self.overlap]
        values = (self.stage, self.bucket, overlap, self.accumulation)
        return (self.model, *("-" if value is None else str(value) for value in values))

    def settings(self, case: Case) -> dict[str, Any]:
        """Return the configuration: the kept keys of ``config`` under the settings the cell states."""
        config = {key: value for key, value in self.config.items() if key in KEPT_KEYS}
        zero = dict(config.get("zero_optimization") or {})
        if self.bucket is not None:
            chosen = BUCKETS[self.bucket]
            zero = {key: value for key, value in zero.items() if key.removeprefix("stage3_") not in chosen} | chosen
        stated = {"stage": self.stage, "overlap_comm": self.overlap}
        config["zero_optimization"] = zero | {key: value for key, value in stated.items() if value is not None}
        config["train_micro_batch_size_per_gpu"] = SAMPLES
        config["gradient_accumulation_steps"] = case.accumulation
        config["gradient_clipping"] = case.clipping
        if case.optimizer is None:
            config["optimizer"] = {"type": "AdamW", "params": {**GATE_ADAM, "betas": list(GATE_ADAM["betas"])}}
        return config


# -- comparisons ------------------------------------------------------------------------------------------------------
def scaled_error(ours: Tensor, reference: Tensor, scale: float | None = None) -> float:
    """Return ``max|ours - reference| / scale``, infinite for a wrong shape, a NaN or an infinity.

    Without a ``scale`` it is ``max(1, max|reference|)``.
    """
    if ours.shape != reference.shape:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    scale = max(1.0, float(reference.double().abs().max())) if scale is None else scale
    difference = (ours.detach().double().cpu() - reference.double()).abs().max() / scale
    return float(difference) if bool(difference.isfinite()) else float("inf")


def no_errors() -> Errors:
    """Return errors of 0 for every kind, to begin comparisons with."""
    return dict.fromkeys(KINDS, (0.0, ""))


def compare(
    errors: Errors, kind: str, ours: Mapping[Any, Any], reference: Mapping[Any, Any], when: str, relative: bool = False
) -> None:
    """Note the largest error of tensors or numbers; ``relative`` to the largest element of all in ``reference``."""
    expected = {name: torch.as_tensor(value) for name, value in reference.items()}
    largest = max((float(tensor.abs().max()) for tensor in expected.values() if tensor.numel()), default=1.0) or 1.0
    for name, value in ours.items():
        error = scaled_error(torch.as_tensor(value), expected[name], largest if relative else None)
        errors[kind] = max(errors[kind], (error, f"{name} {when}".strip()))


def judge(ranks: Iterable[Errors], tolerance: float, columns: bool = False) -> RowResult:
    """Judge the largest error of any rank; ``columns`` shows one number for each kind."""
    errors = [max((rank[kind], kind) for rank in ranks) for kind in KINDS]
    (top, where), kind = max(errors)
    texts = [f"{error:.1e}" for (error, _), _ in errors]
    account = f"largest error {top:.3e} in {kind} {where} ({', '.join(texts)})"
    fine = aligned(texts, WIDTHS[5:]) if columns else f"largest error {top:.1e}"
    return RowResult(f"{fine}  ok", "" if top <= tolerance else account)


def full_gradients(params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return name -> full averaged gradient (fp32); a parameter without one counts as zero. Collective."""
    grads = {name: safe_get_full_grad(param) for name, param in params.items()}
    return {name: torch.zeros(params[name].shape) if grad is None else grad.clone() for name, grad in grads.items()}


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> full parameter values. Collective."""
    named = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: param.detach().clone() for name, param in named.items()}


# -- training ---------------------------------------------------------------------------------------------------------
def start_engine(case: Case, config: dict[str, Any], model: nn.Module | None = None) -> Any:
    """Start an engine of ``model``, or of a fresh one. Collective.

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


def _train_step(engine: Any, case: Case, record: StepRecord, step: int, errors: Errors) -> None:
    """Train one step and compare all of it. Collective."""
    rank, world = engine.mesh.data.index, engine.mesh.data.size
    for micro in range(case.accumulation):
        place = MicroBatch(step, micro, rank, world)
        losses = case.seeded_loss(engine, place)
        expected = dict(enumerate(record.losses[rank, micro]))
        compare(errors, "loss", dict(enumerate(losses)), expected, f"of micro-batch {micro} at step {step}")
        case.backward(losses, engine.backward)
        written = case.after_backward(engine.module, place)
        if micro == case.accumulation - 1 and not written:  # what was just written is reduced in the step
            compare(errors, "grad", full_gradients(trainable(engine.module)), record.grads, f"at step {step}")
        engine.step()
    compare_update(engine, record, step, errors)


def compare_update(engine: Any, record: StepRecord, step: int, errors: Errors, relative: bool = False) -> list[str]:
    """Compare the norm and the parameters after a step; return the names of the parameters compared. Collective."""
    norm = engine.get_global_grad_norm()
    ours = {"": float("nan") if norm is None else float(norm)}
    compare(errors, "norm", ours, {"": record.grad_norm}, f"at step {step}", relative)
    params = full_parameters(engine.module)
    compare(errors, "param", params, record.params, f"after step {step}", relative)
    return [*params]


def run_cell(
    cell: Cell,
    steps: int = STEPS,
    *,
    case: Case | None = None,
    prepare: Callable[[Any], None] = lambda engine: None,
    after_step: Callable[[], None] = lambda: None,
) -> Errors:
    """Train the model of the cell, or ``case``, on this process group; return this rank's errors. Collective."""
    case = case or case_of(cell.model, cell.config)
    case = case if cell.accumulation is None else replace(case, accumulation=cell.accumulation)
    config, errors = cell.settings(case), no_errors()
    batches = dist.get_world_size() // config.get("sequence_parallel_size", 1)
    reference = train_reference(case, world=batches, steps=steps)
    engine = start_engine(case, config)
    prepare(engine)
    for step, record in enumerate(reference):
        _train_step(engine, case, record, step, errors)
        after_step()
    engine.destroy()
    lower = {key: value for key, value in cell.config.items() if key in DTYPE_KEYS}
    if lower:
        start_engine(case, config | lower).destroy()
    return errors


# -- the gate ---------------------------------------------------------------------------------------------------------
def matrix_cells(models: Iterable[str] = MATRIX_MODELS, config: dict[str, Any] | None = None) -> list[Cell]:
    """List stage x bucket x overlap x accumulation x model, in a stable order."""
    axes = product(models, range(4), BUCKETS, (False, True), MATRIX_ACCUMULATION)
    return [Cell(m, stage, bucket, overlap, count, config or {}) for m, stage, bucket, overlap, count in axes]


def check_gradients(driver: Driver) -> int:
    """Compare losses, gradients, norms and parameters of every rank and step with plain one-process PyTorch.

    Your own ``build()`` takes no arguments, returns the same model at every call apart from its random weights (the
    gate seeds torch before it), and returns one of

    * ``model``: the gate invents inputs from the first layer (``nn.Linear``, ``nn.Embedding``, ``nn.Conv1d/2d``);
    * ``(model, batch_fn)``: ``batch_fn(step, micro, rank, world)`` returns the inputs of one micro-batch: a dict is
      passed as keywords, a tuple as positional arguments, anything else as the only argument. It must depend on nothing
      but its four arguments;
    * ``(model, batch_fn, loss_fn)``: ``loss_fn(output, batch)`` returns a scalar loss.

    Without ``loss_fn`` the loss is the output's ``loss`` (attribute or key), the output itself when it is a scalar,
    else the mean of its squares.
    """
    options, config = driver.options, config_of(driver.options)
    if options.matrix:
        cells = matrix_cells([options.model] if options.model else MATRIX_MODELS, config)
    elif config:
        cells = [Cell(options.model or "plain", config=config)]
    elif options.model:
        cells = [Cell(options.model, stage=stage) for stage in range(4)]
    else:
        cells = [Cell("plain", stage=stage, bucket="huge", overlap=True, accumulation=1) for stage in range(4)]
    aside = ", ".join(sorted(key for key in config if key not in KEPT_KEYS))
    if aside:
        driver.say(f"checked in fp32 with AdamW; set aside from the configuration (but for the dtypes): {aside}")
    driver.say(f"{aligned(COLUMNS, WIDTHS)}  result")
    judged = partial(judge, tolerance=options.tolerance, columns=True)
    for cell in cells:
        driver.on_ranks(aligned(cell.label(), WIDTHS), options.ranks, judged, run_cell, cell, options.steps)
    conditions = f"on {driver.conditions()}, tolerance {options.tolerance:g}"
    return driver.end(f"{counted(len(cells), 'cell')} {conditions}", "all pass")


# -- compiled blocks --------------------------------------------------------------------------------------------------
class Compiled(NamedTuple):
    """Findings of one rank: the errors, graphs that were compiled, those of them late, and why graphs ended early."""

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
        steps,
        case=case,
        prepare=lambda engine: engine.compile(backend=backend),
        after_step=lambda: graphs.append(counters["stats"]["unique_graphs"]),
    )
    return Compiled(errors, graphs[-1], graphs[-1] - graphs[min(_SETTLED, steps) - 1], (*counters["graph_break"],))


def verdict(ranks: list[Compiled], tolerance: float) -> RowResult:
    """Judge the errors, and whether blocks were compiled whole and once."""
    fine, fault = judge([rank.errors for rank in ranks], tolerance)
    late = max(rank.late for rank in ranks)
    graphs = min(rank.graphs for rank in ranks)
    faults = [fault] if fault else []
    if late:
        faults.append(f"{late} graphs were compiled after step {_SETTLED}")
    faults += [f"a graph ended early: {reason}" for reason in sorted({text for rank in ranks for text in rank.breaks})]
    if not graphs:
        faults.append("nothing was compiled")
    return RowResult(f"{graphs} graphs, 0 breaks, 0 late, {fine}", "; ".join(faults))


def check_compiled(driver: Driver) -> int:
    """Check that blocks compiled by ``engine.compile`` train as plain one-process PyTorch does, and stay whole.

    A row is compared as by ``ds_verify grads``. It fails, too, where a module falls apart into several graphs, or where
    anything is compiled again after the second step; torch's reason is below it. A model whose batches change their
    shape, or which branches on its data, may well compile later: that is about the model, not about sharding.
    """
    options, config = driver.options, config_of(driver.options)
    model = options.model or "plain"
    cells = [Cell(model, stage=stage, accumulation=1) for stage in range(4)]
    if config:
        cells = [Cell(model, config=config)]
    elif not options.model:
        cells += [Cell(name, stage=3, accumulation=2) for name in ("tied", "frozen")]
    backends = torch.compiler.list_backends(exclude_tags=())
    if options.backend not in backends:
        raise ValueError(f"--backend {options.backend!r} is unknown; torch has {', '.join(backends)}")
    judged = partial(verdict, tolerance=options.tolerance)
    for cell in cells:
        model, stage, _, _, accumulation = cell.label()
        text = aligned((model, f"stage {stage}", f"accumulation {accumulation}"), (24, 7, 14))
        driver.on_ranks(text, options.ranks, judged, train_compiled, cell, options.steps, options.backend)
    ending = f"{counted(len(cells), 'cell')} on {driver.conditions()}, {options.backend}"
    return driver.end(ending, "all pass")
