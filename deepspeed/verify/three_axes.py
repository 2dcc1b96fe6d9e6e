"""The gate of layouts: pipeline stages, tensor-parallel parts and data-parallel ranks beside ZeRO, against one process.

    ds_verify 3d                                          ZeRO 0-3 on 2 x 2 x 2 ranks, three schedules in turn
    ds_verify 3d --matrix                                 data x pipeline x tensor in {1, 2}, ZeRO 0-3, three schedules
    ds_verify 3d --pp 4 --tp 2 --zero 3 --schedule zbv    one layout; the other ranks are data parallel
    ds_verify 3d --checkpoints                            saved at one layout and loaded at four others, and back
    ds_verify 3d --model my_model:build --config ds_config.json     your model, cut by its layers or its blocks

Every *cell* trains for a few updates and compares, on every rank, the mean loss, the averaged gradients
(``safe_get_full_grad`` before the update), their norm, and the parameters after the update (``GatheredParameters``)
with plain one-process PyTorch. All of it in fp32, where nothing but the order of additions may differ. An error of a
loss or norm is relative to it, one of a tensor to the largest element of all tensors of its kind.

A layout that ``initialize`` refuses is shown with the reason that it gives, and counted apart.

With ``--checkpoints`` a run saved at one layout is loaded at others and saved there again, and that is loaded at the
first: the state as a whole (full parameters, masters, every optimizer slot, counters) must have the same hash, and the
losses of the next updates on the same samples must be equal to the tolerance.
"""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.comm.collectives import gather_objects
from deepspeed.errors import DeepSpeedConfigError, NotYetError, PipelineError, UsageError
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.orders import chunks_and_style
from deepspeed.pipe.plain import cut_model
from deepspeed.verify.common import Printout, aligned, config_of
from deepspeed.verify.grads import KEPT_KEYS, full_gradients, full_parameters, loop_settings, scaled_error
from deepspeed.verify.models import Case, LayerStack, MicroBatch
from deepspeed.verify.ranks import RankPool, scratch
from deepspeed.verify.reference import StepRecord, train_reference, trainable
from deepspeed.verify.runs import Digests, hash_of, whole_state
from deepspeed.verify.schedule import usual_chunks
from deepspeed.verify.user_model import case_of

CLIP = 0.5
KINDS = ("loss", "grad", "norm", "param")
MATRIX_SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
COLUMNS, WIDTHS = ("dp", "pp", "tp", "zero", "schedule", *KINDS), (2, 2, 2, 4, 13, 8, 8, 8, 8)
REFUSALS = (DeepSpeedConfigError, NotYetError, PipelineError, UsageError)
SAVED_AT, LOADED_AT = (2, 2, 2), ((1, 1, 1), (4, 2, 1), (2, 1, 4), (1, 4, 2))  # data x pipeline x tensor
BEFORE, NEXT, WINDOW = 2, 2, 8  # updates before a save, after a load; micro-batches of one, over all ranks


@dataclass(frozen=True)
class GridCell:
    """One run of the gate: a layout, a level of ZeRO, a schedule and how many chunks it has on a stage.

    ``model``: a case's name or ``module:build``; ``config``: the user's, of which the cell keeps some keys.
    """

    dp: int
    pp: int
    tp: int
    zero: int
    schedule: str = "1f1b"
    chunks: int = 1
    model: str = "decoder"
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.dp * self.pp * self.tp

    @property
    def micros(self) -> int:
        """Micro-batches of a data-parallel rank in one update: enough for every schedule to show its own order."""
        return max(4, 2 * self.pp)

    def label(self) -> tuple[str, ...]:
        """The cell as table columns."""
        return (*map(str, (self.dp, self.pp, self.tp, self.zero)), self.schedule)

    def case(self) -> Case:
        """The model and its data, without dropout, whose numbers no two layouts draw alike."""
        case = case_of(self.model, {"gradient_clipping": CLIP} | self.config)
        return replace(case, build=lambda: _without_dropout(case.build()), accumulation=self.micros)

    def settings(self, case: Case) -> dict[str, Any]:
        kept = {key: value for key, value in self.config.items() if key in KEPT_KEYS}
        zero = {"param_persistence_threshold": 20, "reduce_bucket_size": 400, **(kept.get("zero_optimization") or {})}
        pipeline = {"schedule": self.schedule, "chunks_per_stage": self.chunks}
        return {
            **kept,
            "zero_optimization": {**zero, "stage": self.zero},
            **loop_settings(case),
            "tensor_parallel": {**(self.config.get("tensor_parallel") or {}), "autotp_size": self.tp},
            "pipeline": {**(self.config.get("pipeline") or {}), **pipeline},
        }

    def start(self, case: Case) -> Any:
        """An engine of a fresh model, which is cut by its layers or else by its blocks. Collective."""
        model = case.build()
        chunks, style = chunks_and_style(self.schedule, self.chunks)
        how: dict[str, Any] = {"chunks_per_stage": chunks, "chunk_style": style, "partition_method": "uniform"}
        how["loss_fn"] = lambda output, batch: case.loss(lambda *_, **__: output, batch, MicroBatch(0, 0, 0, 1))[0]  # type: ignore[arg-type]
        layers = model.layers if isinstance(model, LayerStack) else model if isinstance(model, nn.Sequential) else None
        piped = cut_model(model, self.pp, **how) if layers is None else PipelineModule(layers, self.pp, **how)
        return deepspeed.initialize(model=piped, config=self.settings(case))[0]


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def matrix_cells(ranks: int = 8, **same: Any) -> list[GridCell]:
    """data x pipeline x tensor in {1, 2}, as far as ``ranks`` go, x ZeRO x schedule; small layouts first."""
    layouts = sorted(product((1, 2), repeat=3), key=lambda sizes: (sizes[0] * sizes[1] * sizes[2], sizes))
    cells = (
        GridCell(dp, pp, tp, level, name, usual_chunks(name), **same)
        for (dp, pp, tp), level, name in product(layouts, range(4), MATRIX_SCHEDULES)
    )
    return [cell for cell in cells if cell.ranks <= ranks]


def _largest(tensors: Iterable[Tensor]) -> float:
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=1.0) or 1.0


def _gradients_before(engine: Any, update: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """What ``update()`` returns, and the averaged gradients between its last backward and the step. Collective."""
    taken, flush = dict[str, Tensor](), engine.runtime.flush

    def flush_and_look() -> None:
        flush()
        taken.update(full_gradients(trainable(engine.module)))

    engine.runtime.flush = flush_and_look
    try:
        return update(), taken
    finally:
        del engine.runtime.flush


def run_cell(cell: GridCell, records: list[StepRecord]) -> tuple[dict[str, tuple[float, str]], list[str]] | str:
    """Train on these ranks: the largest error of each kind, and the names compared; or why it is refused."""
    case, errors, names = cell.case(), dict.fromkeys(KINDS, (0.0, "")), list[str]()
    try:
        engine = cell.start(case)
    except REFUSALS as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    for step, record in enumerate(records):

        def note(kind: str, ours: Any, reference: Any, scale: float, where: str = "", step: int = step) -> None:
            error = scaled_error(torch.as_tensor(ours), torch.as_tensor(reference), scale)
            errors[kind] = max(errors[kind], (error, f"{where} step {step}".strip()))

        places = [MicroBatch(step, micro, engine.mesh.data.index, cell.dp) for micro in range(cell.micros)]
        batches = iter([(batch, batch) for batch in map(case.batch, places)])
        loss, grads = _gradients_before(engine, lambda: engine.train_batch(batches))  # noqa: B023 - called at once
        expected = float(torch.stack([one for losses in record.losses.values() for one in losses]).double().mean())
        note("loss", float(loss), expected, abs(expected) or 1.0)
        note("norm", engine.get_global_grad_norm(), record.grad_norm, record.grad_norm or 1.0)
        for name, grad in grads.items():
            note("grad", grad, record.grads[name], _largest(record.grads.values()), name)
        params = full_parameters(engine.module)
        for name, value in params.items():
            note("param", value, record.params[name], _largest(record.params.values()), name)
        names = [*params]
    engine.destroy()
    return errors, names


def _train(engine: Any, case: Case, updates: range) -> list[float]:
    """Losses of updates from the same samples under every layout: each data-parallel rank takes its part of them."""
    losses, index = [], engine.mesh.data.index
    for step in updates:
        mine = range(index * case.accumulation, (index + 1) * case.accumulation)
        batches = [case.batch(MicroBatch(step, micro, 0, 1)) for micro in mine]
        losses.append(float(engine.train_batch(iter([(batch, batch) for batch in batches]))))
    return losses


def visit(cell: GridCell, folder: str, load: str | None, save: str | None) -> tuple[Digests, list[float]]:
    """Load checkpoint ``load``, or train; save as ``save``; the whole state then, and the next losses. Collective."""
    case = replace(cell.case(), accumulation=WINDOW // cell.dp)
    engine = cell.start(case)
    if load is None:
        _train(engine, case, range(BEFORE))
    else:
        engine.load_checkpoint(folder, tag=load)
    if save is not None:
        engine.save_checkpoint(folder, tag=save)
    state: Digests = {}
    for rank, part in enumerate(gather_objects(whole_state(engine), engine.mesh.job)):
        for name, text in part.items():
            if state.setdefault(name, text) != text:
                state[f"{name} on rank {rank}"] = text
    losses = _train(engine, case, range(BEFORE, BEFORE + NEXT))
    engine.destroy()
    return state, losses


def moved(wanted: tuple[Digests, list[float]], again: tuple[Digests, list[float]], tolerance: float) -> tuple[str, str]:
    """What is fine after a load, and what is not."""
    (before, losses), (after, others) = wanted, again
    differing = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    if differing:
        return "", f"{len(differing)} of {len(before)} names differ, first {differing[0]}"
    error = max(abs(a - b) / abs(a) for a, b in zip(losses, others, strict=True))
    text = f"state hash {hash_of(after)}, next {NEXT} losses differ by {error:.1e}"
    return (text, "") if error <= tolerance else ("", text)


def _layout(options: argparse.Namespace, pp: int, tp: int) -> tuple[int, int, int]:
    """Data, pipeline and tensor-parallel ranks. Raises ValueError where they do not multiply."""
    if options.ranks % (pp * tp):
        raise ValueError(
            f"--ranks {options.ranks} cannot be cut into {pp} pipeline stages x {tp} tensor-parallel ranks; use a "
            f"multiple of {pp * tp}"
        )
    return options.ranks // (pp * tp), pp, tp


def _cells(options: argparse.Namespace, same: dict[str, Any]) -> list[GridCell]:
    asked = {name: getattr(options, name) for name in ("pp", "tp", "zero", "schedule", "chunks")}
    if options.matrix:
        if given := [f"--{name}" for name, value in asked.items() if value is not None]:
            raise ValueError(f"--matrix goes through all of them; leave {', '.join(given)} out")
        return matrix_cells(options.ranks, **same)
    levels = range(4) if options.zero is None else [options.zero]
    if all(value is None for value in asked.values()):
        sizes = _layout(options, 2, 2)
        names = [MATRIX_SCHEDULES[level % 3] for level in levels]
    else:
        sizes = _layout(options, options.pp or 1, options.tp or 1)
        names = [options.schedule or "1f1b"] * len(levels)
    return [
        GridCell(*sizes, level, name, options.chunks or usual_chunks(name), **same)
        for level, name in zip(levels, names, strict=True)
    ]


class Pools(contextlib.ExitStack):
    """The pools of the numbers of ranks that are in use."""

    def __init__(self, time_limit: float) -> None:
        super().__init__()
        self._limit, self._pools = time_limit, dict[int, RankPool]()

    def of(self, ranks: int, *, alone: bool = False) -> RankPool:
        """That of so many ranks; ``alone``: the others end."""
        if alone and ranks not in self._pools:
            self.close()
            self._pools.clear()
        if ranks not in self._pools:
            self._pools[ranks] = self.enter_context(RankPool(ranks, time_limit=self._limit))
        return self._pools[ranks]


def compare_layouts(options: argparse.Namespace, cells: list[GridCell], pools: Pools, report: Printout) -> int:
    """Every cell against one process; the exit code."""
    refused: list[str] = []

    @functools.cache
    def reference(ways: int, micros: int) -> list[StepRecord]:
        case = replace(cells[0].case(), accumulation=micros)
        return train_reference(case, world=ways, steps=options.steps)

    def check(cell: GridCell) -> tuple[str, str]:
        records = reference(cell.dp, cell.micros)
        answers = pools.of(cell.ranks, alone=True).run(run_cell, cell, records)
        if reason := next((answer for answer in answers if isinstance(answer, str)), ""):
            refused.append(reason)
            trains = next((f"rank {rank} trains" for rank, each in enumerate(answers) if not isinstance(each, str)), "")
            return f"{aligned([''] * 4, WIDTHS[5:])}  unsupported: {reason}", trains
        compared = set().union(*(names for _, names in answers))
        if left := [name for name in records[0].params if name not in compared]:
            return "", f"no rank has {left[0]}"
        errors = {kind: max(each[kind] for each, _ in answers) for kind in KINDS}
        (top, where), kind = max((error, kind) for kind, error in errors.items())
        texts = [f"{error:.1e}" for error, _ in errors.values()]
        fault = f"largest error {top:.3e} in {kind} {where} ({', '.join(texts)})"
        return f"{aligned(texts, WIDTHS[5:])}  ok", "" if top <= options.tolerance else fault

    report.say(f"{aligned(COLUMNS, WIDTHS)}  result")
    for cell in cells:
        report.row(aligned(cell.label(), WIDTHS), check, cell)
    conditions = f"{options.steps} updates each, tolerance {options.tolerance:g}"
    compared = f"{len(cells) - len(refused)} of {len(cells)} layouts compared, {len(refused)} unsupported; {conditions}"
    code = report.end(compared, "all pass")
    if len(refused) == len(cells):
        raise ValueError(f"no layout is supported: {refused[0]}")
    return code


def _checkpoints(options: argparse.Namespace, same: dict[str, Any], pools: Pools, report: Printout) -> int:
    """One run, saved, loaded elsewhere and back; the exit code."""
    schedule = options.schedule or "1f1b"
    chunks = options.chunks or usual_chunks(schedule)
    count = 0
    for level in range(4) if options.zero is None else [options.zero]:
        home = GridCell(*SAVED_AT, level, schedule, chunks, **same)
        with scratch() as folder:
            saved = pools.of(home.ranks).run(visit, home, folder, None, "home")[0]
            report.say(f"saved at {_named(home)}: state hash {hash_of(saved[0])}, next losses {saved[1]}")

            def check(cell: GridCell, load: str, save: str | None) -> tuple[str, str]:
                answers = pools.of(cell.ranks).run(visit, cell, folder, load, save)
                texts = [moved(saved, answer, options.tolerance) for answer in answers]  # noqa: B023 - called in this turn
                return next((text for text in texts if text[1]), texts[0])

            for number, sizes in enumerate(LOADED_AT):
                other = GridCell(
                    *sizes, level if options.zero is not None else (level + number) % 4, schedule, chunks, **same
                )
                report.row(f"    loaded at {_named(other)}", check, other, "home", str(number))
                report.row("        and back", check, home, str(number), None)
                count += 2
    return report.end(f"{count} loads", "same state, same losses")


def _named(cell: GridCell) -> str:
    return f"data {cell.dp} x pipeline {cell.pp} x tensor {cell.tp}, ZeRO {cell.zero}"


def run(options: argparse.Namespace, report: Printout) -> int:
    """Run ``ds_verify 3d``; raises ValueError (bad input) before any rank is started."""
    same = {"model": options.model or "decoder", "config": config_of(options)}
    with Pools(options.time_limit) as pools:
        if options.checkpoints:
            return _checkpoints(options, same, pools, report)
        return compare_layouts(options, _cells(options, same), pools, report)
