"""The gate of layouts: pipeline stages, tensor-parallel parts and data-parallel ranks beside ZeRO, and one process."""

import functools
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, NotYetError, PipelineError, UsageError
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.orders import chunks_and_style
from deepspeed.pipe.plain import cut_model
from deepspeed.tools.verify.driver import Driver, RowResult, aligned, config_of
from deepspeed.tools.verify.grads import KINDS, Cell, Errors, compare, compare_update, full_gradients, judge, no_errors
from deepspeed.tools.verify.layouts.schedule import usual_chunks
from deepspeed.tools.verify.models import Case, LayerStack, MicroBatch
from deepspeed.tools.verify.ranks import RankPool, scratch
from deepspeed.tools.verify.reference import StepRecord, train_reference, trainable
from deepspeed.tools.verify.resume import Handed, hand_over, moved
from deepspeed.tools.verify.runs import hash_of
from deepspeed.tools.verify.user_model import case_of

CLIP = 0.5
MATRIX_SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
WIDTHS = (2, 2, 2, 4, 13, 8, 8, 8, 8)
REFUSALS = (DeepSpeedConfigError, NotYetError, PipelineError, UsageError)
SAVED_AT = (2, 2, 2)  # data x pipeline x tensor
LOADED_AT = ((1, 1, 1), (4, 2, 1), (2, 1, 4), (1, 4, 2))
BEFORE = 2  # updates before a save
NEXT = 2  # updates after a save or a load
WINDOW = 8  # micro-batches of an update over all ranks, where layouts follow each other


@dataclass(frozen=True)
class GridCell:
    """Run of the gate: a layout, a level of ZeRO, a schedule and how many chunks it has on a stage.

    ``model``: a case's name or ``module:build``; ``config``: the user's, of which the cell keeps some keys. ``window``:
    micro-batches of an update over all data-parallel ranks, by default as many as show a schedule's order.
    """

    dp: int
    pp: int
    tp: int
    zero: int
    schedule: str = "1f1b"
    chunks: int = 1
    model: str = "decoder"
    config: dict[str, Any] = field(default_factory=dict)
    window: int | None = None

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def micros(self) -> int:
        """Return the micro-batches of a data-parallel rank in one update."""
        return max(4, 2 * self.pp) if self.window is None else self.window // self.dp

    def label(self) -> tuple[str, ...]:
        """Return the cell as table columns."""
        return (*map(str, (self.dp, self.pp, self.tp, self.zero)), self.schedule)

    def text(self) -> str:
        return f"data {self.dp} x pipeline {self.pp} x tensor {self.tp}, ZeRO {self.zero}"

    def case(self) -> Case:
        """Return the model and its data, without dropout, whose numbers no two layouts draw alike."""
        case = case_of(self.model, {"gradient_clipping": CLIP} | self.config)

        def build() -> nn.Module:
            model = case.build()
            for module in model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.p = 0.0
            return model

        return replace(case, build=build, accumulation=self.micros)

    def settings(self, case: Case) -> dict[str, Any]:
        """Return the configuration: the keys of ``config`` that all gates keep, and the layout."""
        given = {name: self.config.get(name) or {} for name in ("zero_optimization", "tensor_parallel", "pipeline")}
        zero = {"param_persistence_threshold": 20, "reduce_bucket_size": 400, **given["zero_optimization"]}
        config = Cell(self.model, stage=self.zero, config={**self.config, "zero_optimization": zero}).settings(case)
        pipeline = {"schedule": self.schedule, "chunks_per_stage": self.chunks}
        config["tensor_parallel"] = {**given["tensor_parallel"], "autotp_size": self.tp}
        config["pipeline"] = {**given["pipeline"], **pipeline}
        return config

    def start(self, case: Case, folder: str = "", seed: int = 0) -> Any:
        """Start an engine of a fresh model, which is cut by its layers or else by its blocks. Collective."""
        model = case.build()

        def loss_of(output: Any, batch: Any) -> Tensor:
            return case.loss(lambda *_, **__: output, batch, MicroBatch(0, 0, 0, 1))[0]  # type: ignore[arg-type]

        chunks, style = chunks_and_style(self.schedule, self.chunks)
        how: dict[str, Any] = {"chunks_per_stage": chunks, "chunk_style": style, "partition_method": "uniform"}
        if isinstance(model, (LayerStack, nn.Sequential)):
            layers = model.layers if isinstance(model, LayerStack) else model
            piped = PipelineModule(layers, self.pp, loss_fn=loss_of, **how)
        else:
            piped = cut_model(model, self.pp, loss_fn=loss_of, **how)
        return deepspeed.initialize(model=piped, config=self.settings(case))[0]

    def train(self, engine: Any, case: Case, updates: range, *, alike: bool = True) -> list[float]:
        """Return losses of the same samples under every layout: each data-parallel rank takes its part. Collective."""
        first = engine.mesh.data.index * case.accumulation
        local = range(first, first + case.accumulation)
        return [train_batch(engine, case, [MicroBatch(step, micro, 0, 1) for micro in local]) for step in updates]


def train_batch(engine: Any, case: Case, places: list[MicroBatch]) -> float:
    """Train one update; return its loss. Collective."""
    batches = [case.batch(place) for place in places]
    return float(engine.train_batch(iter([(batch, batch) for batch in batches])))


def matrix_cells(ranks: int = 8, **same: Any) -> list[GridCell]:
    """List data x pipeline x tensor in {1, 2}, as far as ``ranks`` go, x ZeRO x schedule; small layouts first."""
    layouts = sorted(product((1, 2), repeat=3), key=lambda sizes: (sizes[0] * sizes[1] * sizes[2], sizes))
    cells = (
        GridCell(dp, pp, tp, level, name, usual_chunks(name), **same)
        for (dp, pp, tp), level, name in product(layouts, range(4), MATRIX_SCHEDULES)
    )
    return [cell for cell in cells if cell.ranks <= ranks]


def run_cell(cell: GridCell, records: list[StepRecord]) -> tuple[Errors, list[str]] | str:
    """Train on the ranks of this process group. Collective.

    Return the errors, and the names of the parameters compared on this rank; or why the layout is refused.
    """
    case = cell.case()
    errors = no_errors()
    names: list[str] = []
    try:
        engine = cell.start(case)
    except REFUSALS as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    flush = engine.runtime.flush
    grads: dict[str, Tensor] = {}

    def flush_and_look() -> None:
        """Take the averaged gradients between the last backward and the step."""
        flush()
        grads.update(full_gradients(trainable(engine.module)))

    for step, record in enumerate(records):
        places = [MicroBatch(step, micro, engine.mesh.data.index, cell.dp) for micro in range(cell.micros)]
        engine.runtime.flush = flush_and_look
        loss = train_batch(engine, case, places)
        del engine.runtime.flush
        losses = torch.stack([one for losses in record.losses.values() for one in losses])
        compare(errors, "grad", grads, record.grads, f"step {step}", relative=True)
        compare(errors, "loss", {"": loss}, {"": losses.double().mean()}, f"step {step}", relative=True)
        names = compare_update(engine, record, step, errors, relative=True)
    engine.destroy()
    return errors, names


# -- the command ------------------------------------------------------------------------------------------------------
def _cells(driver: Driver, **same: Any) -> list[GridCell]:
    """List the layouts that the options ask for. Raises ValueError where they do not multiply."""
    options = driver.options
    given = [name for name in ("pp", "tp", "zero", "schedule", "chunks") if getattr(options, name) is not None]
    if options.matrix:
        if given:
            names = ", ".join(f"--{name}" for name in given)
            raise ValueError(f"--matrix goes through all of them; leave {names} out")
        return matrix_cells(options.ranks, **same)
    pp, tp = (options.pp or 1, options.tp or 1) if given else (2, 2)
    if options.ranks % (pp * tp):
        raise ValueError(
            f"--ranks {options.ranks} cannot be cut into {pp} pipeline stages x {tp} tensor-parallel ranks; use a "
            f"multiple of {pp * tp}"
        )
    cells = []
    for level in range(4) if options.zero is None else [options.zero]:
        schedule = (options.schedule or "1f1b") if given else MATRIX_SCHEDULES[level % 3]
        chunks = options.chunks or usual_chunks(schedule)
        cells.append(GridCell(options.ranks // (pp * tp), pp, tp, level, schedule, chunks, **same))
    return cells


def compare_layouts(driver: Driver, cells: list[GridCell]) -> int:
    """Compare every cell with one process; return the exit code."""
    options = driver.options
    refused: list[str] = []

    @functools.cache
    def reference(world: int, micros: int) -> list[StepRecord]:
        return train_reference(replace(cells[0].case(), accumulation=micros), world=world, steps=options.steps)

    def check(cell: GridCell) -> RowResult:
        records = reference(cell.dp, cell.micros)
        answers = driver.pools(cell.ranks)[0].run(run_cell, cell, records)
        reasons = [answer for answer in answers if isinstance(answer, str)]
        if reasons:
            refused.append(reasons[0])
            training = [f"rank {rank} trains" for rank, answer in enumerate(answers) if not isinstance(answer, str)]
            return RowResult(f"{aligned([''] * 4, WIDTHS[5:])}  unsupported: {reasons[0]}", "".join(training[:1]))
        compared = set().union(*(names for _, names in answers))
        missing = [name for name in records[0].params if name not in compared]
        if missing:
            return RowResult("", f"no rank has {missing[0]}")
        return judge([errors for errors, _ in answers], options.tolerance, columns=True)

    driver.say(f"{aligned(('dp', 'pp', 'tp', 'zero', 'schedule', *KINDS), WIDTHS)}  result")
    for cell in cells:
        driver.row(aligned(cell.label(), WIDTHS), functools.partial(check, cell))
    compared = f"{len(cells) - len(refused)} of {len(cells)} layouts compared, {len(refused)} unsupported"
    code = driver.end(f"{compared}; {options.steps} updates each, tolerance {options.tolerance:g}", "all pass")
    if len(refused) == len(cells):
        raise ValueError(f"no layout is supported: {refused[0]}")
    return code


def visit(cell: GridCell, folder: str, load: str | None, save: str | None) -> Handed:
    """Load or train, and save; return the whole state then, and the next losses. Collective."""
    return hand_over(replace(cell, window=WINDOW), folder, load, save, BEFORE, NEXT)


def _check_checkpoints(driver: Driver, **same: Any) -> int:
    """Save one run, load it elsewhere and back; return the exit code."""
    options = driver.options
    schedule = options.schedule or "1f1b"
    kind: dict[str, Any] = {"schedule": schedule, "chunks": options.chunks or usual_chunks(schedule), **same}
    levels = range(4) if options.zero is None else [options.zero]
    for level in levels:
        source = GridCell(*SAVED_AT, level, **kind)
        with scratch() as folder:
            saved = driver.pools(source.ranks)[0].run(visit, source, folder, None, "home")[0]
            driver.say(f"saved at {source.text()}: state hash {hash_of(saved[0])}, next losses {saved[1]}")

            def check(pool: RankPool, cell: GridCell, load: str, save: str | None) -> RowResult:
                answers = pool.run(visit, cell, folder, load, save)
                verdicts = [moved(saved, answer, options.tolerance) for answer in answers]  # noqa: B023
                return next((verdict for verdict in verdicts if verdict.fault), verdicts[0])

            for number, sizes in enumerate(LOADED_AT):
                other = GridCell(*sizes, level if len(levels) == 1 else (level + number) % 4, **kind)
                first, second = driver.pools(other.ranks, source.ranks)
                reshard = functools.partial(check, first, other, "home", str(number))
                back = functools.partial(check, second, source, str(number), None)
                driver.row(f"    loaded at {other.text()}", reshard)
                driver.row("        and back", back)
    return driver.end(f"{2 * len(levels) * len(LOADED_AT)} loads", "same state, same losses")


def check_layouts(driver: Driver) -> int:
    """Compare pipeline stages, tensor-parallel parts and data-parallel ranks beside ZeRO with one process.

        ds_verify 3d                                          ZeRO 0-3 on 2 x 2 x 2 ranks, three schedules in turn
        ds_verify 3d --matrix                                 data x pipeline x tensor in {1, 2}, ZeRO 0-3, schedules
        ds_verify 3d --pp 4 --tp 2 --zero 3 --schedule zbv    one layout; the other ranks are data parallel
        ds_verify 3d --checkpoints                            saved at one layout and loaded at four others, and back
        ds_verify 3d --model my_model:build --config ds_config.json     your model, cut by its layers or its blocks

    Every rank compares the mean loss, the averaged gradients, their norm and the parameters after each update with
    plain PyTorch, in fp32. Errors of a loss or norm are relative to it, of a tensor to the largest element of its kind.
    A layout that ``initialize`` refuses is shown with its reason, and counted apart.

    With ``--checkpoints`` the state as a whole (full parameters, masters, every optimizer slot, counters) must have the
    same hash after each load, and the losses of the next updates on the same samples must be equal to the tolerance.
    """
    same = {"model": driver.options.model or "decoder", "config": config_of(driver.options)}
    if driver.options.checkpoints:
        return _check_checkpoints(driver, **same)
    return compare_layouts(driver, _cells(driver, **same))
