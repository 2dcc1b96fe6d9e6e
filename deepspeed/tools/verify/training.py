"""Gates of what a training loop does around a model: the loop itself, batches, optimizers and learning rates."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.engine.token_weights import IGNORED
from deepspeed.optim.rules import FusedLion
from deepspeed.tools.verify import grads, models
from deepspeed.tools.verify.driver import Driver, Finding, RowResult
from deepspeed.tools.verify.grads import Cell, Errors, run_cell
from deepspeed.tools.verify.models import Case, Losses, MicroBatch, Stack, case_named, regression_batch, seeded
from deepspeed.tools.verify.ranks import scratch
from deepspeed.tools.verify.reference import GATE_ADAM, train_reference, trainable


def _check_named(driver: Driver, train: Callable[..., Errors], names: Iterable[tuple[str, int]]) -> int:
    """Check ``train(name, stage, steps)`` for every name and stage; return the exit code."""
    options = driver.options
    judged = partial(grads.judge, tolerance=options.tolerance)
    for name, stage in names:
        text = f"{name:<32}  stage {stage}"
        driver.on_ranks(text, options.ranks, judged, train, name, stage, options.steps)
    return driver.end(driver.conditions(), "all equal to plain PyTorch")


# -- shapes of the loop -----------------------------------------------------------------------------------------------
def _error(model: nn.Module, place: MicroBatch, part: int = 0) -> Tensor:
    x, y = regression_batch(place._replace(micro=part))
    return F.mse_loss(model(x), y)


def _varying(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    count = 3 - place.step % 3
    return [_error(model, place, part) / count for part in range(count)]


def _two_losses(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    out = model(batch[0])
    return [F.mse_loss(out, batch[1]), out.abs().mean()]


def _submodule(model: Any, batch: Any, place: MicroBatch) -> Losses:
    inner = getattr(model, "module", model)
    return [inner.head(inner.layers[1](inner.inp(batch[0]))).square().mean() + F.mse_loss(model(batch[0]), batch[1])]


def _discarded(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    _error(model, place, 1)
    loss = _error(model, place)
    with torch.no_grad():
        _error(model, place, 2)
    return [loss]


def _penalty(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    x = batch[0].requires_grad_()
    loss = F.mse_loss(model(x), batch[1])
    return [loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()]


def _truncated(model: Any, batch: Any, place: MicroBatch) -> Losses:
    inner = getattr(model, "module", model)
    first = inner.layers[0](inner.inp(batch[0]))
    return [first.square().mean(), F.mse_loss(inner.head(inner.layers[2](first.detach())), batch[1])]


def _plain(losses: Losses, call: Callable[..., Any]) -> None:
    for loss in losses:
        loss.backward()


def _not_synchronized(losses: Losses, call: Callable[..., Any]) -> None:
    owner = getattr(call, "__self__", None)  # the engine; a plain backward has none
    with owner.no_sync() if owner is not None else contextlib.nullcontext():
        for loss in losses[:-1]:
            call(loss)
    call(losses[-1])


def _twice(losses: Losses, call: Callable[..., Any]) -> None:
    call(losses[0], retain_graph=True)
    call(losses[0])


# name: the losses of a micro-batch, and how they are back-propagated where not each by the engine
LOOPS: dict[str, tuple[Callable[..., Losses], Callable[..., Any] | None]] = {
    "engine.backward": (models.squared_error, None),
    "loss.backward": (models.squared_error, _plain),
    "accumulation of varying length": (_varying, _plain),
    "no_sync": (_varying, _not_synchronized),
    "backwards in reverse": (_varying, lambda losses, call: _plain(losses[::-1], call)),
    "sum of two forwards": (lambda model, _, place: [_error(model, place) + _error(model, place, 1)], None),
    "retain_graph": (models.squared_error, _twice),
    "two losses, one graph": (_two_losses, None),
    "two losses, one call": (_two_losses, lambda losses, call: torch.autograd.backward(losses)),
    "non-scalar backward": (
        lambda model, batch, _: [model(batch[0])],
        lambda losses, call: losses[0].backward(torch.ones_like(losses[0])),
    ),
    "submodule outside forward": (_submodule, None),
    "forward thrown away": (_discarded, None),
    "gradient penalty": (_penalty, None),
    "truncated graph": (_truncated, None),
}


def run_loop(name: str, stage: int, steps: int) -> Errors:
    """Train in the loop of this ``name`` on this process group; return this rank's errors. Collective."""
    loss, by = LOOPS[name]
    return run_cell(Cell(name, stage=stage, bucket="tiny"), steps, case=case_named("plain", loss=loss, by=by))


def check_loops(driver: Driver) -> int:
    """Check that any legal PyTorch loop gives the numbers that it gives without sharding.

    Each row is one shape of a loop at one ZeRO stage, compared with plain PyTorch as by ``ds_verify grads``.
    """
    return _check_named(driver, run_loop, product(LOOPS, range(4)))


# -- optimizers -------------------------------------------------------------------------------------------------------
class OfAUser(torch.optim.Optimizer):
    """Divide by the norm of the whole tensor, without declaring it to anybody."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = param.grad + group["weight_decay"] * param
                    param.sub_(group["lr"] * grad / (grad.norm() + 0.1))


# name: the class and its settings, smooth where the method allows it (see [Note: the gate's Adam settings])
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, GATE_ADAM),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "Lion": (FusedLion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "Muon": (torch.optim.Muon, {"lr": 1e-2, "weight_decay": 0.1}),
    "a class of a user": (OfAUser, {"lr": 1e-2, "weight_decay": 0.1}),
}
_AWAY = ", offloaded"


class Matrices(Stack):
    """Train nothing but matrices, which is all that Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.requires_grad = param.ndim == 2


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups: matrices, and all other parameters, if any, with settings of their own."""
    params = list(trainable(model).values())
    rest = [p for p in params if p.ndim != 2]
    matrices = {"params": [p for p in params if p.ndim == 2]}
    return [matrices, {"params": rest, "lr": 3e-3, "weight_decay": 0.0}] if rest else [matrices]


def run_optimizer(name: str, stage: int, steps: int) -> Errors:
    """Train with the optimizer of this ``name`` on this process group; return this rank's errors. Collective."""
    short = name.removesuffix(_AWAY)
    factory, settings = OPTIMIZERS[short]
    model = Matrices if short == "Muon" else Stack
    case = case_named("plain", build=seeded(model), optimizer=lambda model: factory(groups(model), **settings))
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if name != short:
        config["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    return run_cell(Cell("plain", stage=stage, bucket="tiny", config=config), steps=steps, case=case)


def check_optimizers(driver: Driver) -> int:
    """Check that every optimizer gives what it gives without sharding, each group with its own rate and decay.

    Rows are optimizers of torch and a class as a user would write it, at each ZeRO stage, and with states in host
    memory. Matrices are one group; all else has another rate and no decay. Methods that look at whole matrices
    (Adafactor, Muon) or whole tensors (the user's class) must agree, too. Compared as by ``ds_verify grads``.
    """
    offloaded = product([f"{name}{_AWAY}" for name in OPTIMIZERS], range(1, 4))
    return _check_named(driver, run_optimizer, [*product(OPTIMIZERS, range(4)), *offloaded])


# -- splits of a batch ------------------------------------------------------------------------------------------------
BATCH = 8
SPLITS = ((1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8))  # ranks, samples of a micro-batch, accumulation
RAGGED = (3, 1, 2, 2)  # samples of the micro-batches of 2 ranks, in order
LABELS = (4, 1, 3, 0, 2, 4, 1, 3)  # of each sample


class Labelled(models.Tied):
    """Return the mean loss of the labels that count; without one, as torch does, not a number."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _whole_batch(kind: str) -> Case:
    """Return a case of one batch, whose ``loss`` gets the rows of the batch that are to be used."""
    generator = torch.Generator().manual_seed(7)
    whole: dict[str, Any] = {"name": kind, "batch": lambda place: slice(None)}
    if kind == "tokens":
        tokens, labels = torch.randint(models.VOCABULARY, (2, BATCH, models.SEQUENCE), generator=generator)
        for row, count in enumerate(LABELS):
            labels[row, count:] = IGNORED
        return Case(build=seeded(Labelled), loss=lambda m, rows, _: [m(tokens[rows], labels=labels[rows])], **whole)
    x, y = (torch.randn(BATCH, width, generator=generator) for width in (models.IN_FEATURES, models.OUT_FEATURES))
    return Case(build=seeded(Stack), loss=lambda m, rows, _: [F.mse_loss(m(x[rows]), y[rows])], **whole)


def run_split(stage: int, micro: int, steps: int, kind: str) -> Errors:
    """Train an update on this process group; return its errors against the whole batch in one process. Collective."""
    case = _whole_batch(kind)
    (record,) = train_reference(case, world=1, steps=1)
    settings = Cell("plain", stage=stage, bucket="tiny").settings(replace(case, accumulation=steps))
    settings["train_micro_batch_size_per_gpu"] = micro
    settings["normalize"] = "tokens" if kind == "tokens" else "micro_batches"
    engine: Any = grads.start_engine(case, settings)
    world, rank = dist.get_world_size(), dist.get_rank()
    ends = [0, *accumulate(RAGGED if kind == "ragged" else [micro] * world * steps)]
    weights = LABELS if kind == "tokens" else (1,) * BATCH
    total, errors = torch.zeros(()), grads.no_errors()
    for part in range(rank, world * steps, world):
        rows = slice(ends[part], ends[part + 1])
        (loss,) = case.loss(engine, rows, MicroBatch(0, 0, 0, 1))
        share = sum(weights[rows]) / sum(weights)
        total += share * loss.detach() if share else 0.0
        if kind == "ragged":
            engine.backward(loss * share * world, scale_wrt_gas=False)
        else:
            engine.backward(loss)
        if kind != "tokens" and part + world >= world * steps:
            full = grads.full_gradients(trainable(engine.module))
            grads.compare(errors, "grad", full, record.grads, "")
        engine.step()
    grads.compare_update(engine, record, 0, errors)
    engine.destroy()
    dist.all_reduce(total)
    grads.compare(errors, "loss", {"": total}, {"": record.losses[0, 0][0]}, "")
    return errors


def check_splits(driver: Driver) -> int:
    """Check that a global batch gives the same gradient however it is split over ranks and micro-batches.

    They are those of the whole batch in one process. Ragged rows have micro-batches of unequal size; the caller weighs
    each by its count and says ``scale_wrt_gas=False``. In rows of tokens every sample has a count of its own, one
    micro-batch none at all, and ``"normalize": "tokens"`` weighs them: the norm and the parameters after the update are
    compared there.
    """

    def judged(answers: list[Errors]) -> RowResult:
        loss = max(errors["loss"][0] for errors in answers)
        update = max(errors[kind][0] for errors in answers for kind in ("grad", "norm", "param"))
        text = f"error of the loss {loss:.1e}, of the gradients {update:.1e}"
        return RowResult(f"{text}  ok", "" if max(loss, update) <= driver.options.tolerance else text)

    for (ranks, micro, steps), kind, stage in product(SPLITS, ("samples", "tokens", "ragged"), range(4)):
        if kind != "ragged" or len(RAGGED) == ranks * steps:
            text = f"{ranks} ranks x {micro} {kind:<7} x accumulation {steps}  stage {stage}"
            driver.on_ranks(text, ranks, judged, run_split, stage, micro, steps, kind)
    return driver.end(f"a batch of {BATCH} in {len(SPLITS)} splits", "all equal to the whole batch")


# -- learning rates ---------------------------------------------------------------------------------------------------
RATE = 0.1
SKIPPED = (2, 5)
RANKS = (1, 2, 4)
ACCUMULATION = (1, 4)
UPDATES = 8
SAVED = 4
Trace = list[float]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Halve the rate every two updates."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def plain_trace(skipped: tuple[int, ...]) -> Trace:
    """Return the rates in force at each step in plain PyTorch, where ``skipped`` steps do nothing."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler, trace = schedule(optimizer), []
    for step in range(UPDATES):
        trace.append(optimizer.param_groups[0]["lr"])
        if step not in skipped:
            optimizer.step()
            scheduler.step()
    return trace


def run_trace(stage: int, accumulation: int, skipped: tuple[int, ...], folder: str | None) -> Trace:
    """Return the rates of an engine on this process group; with ``folder`` saved and loaded amid. Collective."""
    config = {
        "train_micro_batch_size_per_gpu": models.SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "fp16": {"enabled": bool(skipped), "initial_scale_power": 6, "hysteresis": 1},
    }
    start = partial(deepspeed.initialize, config=config, lr_scheduler=schedule)
    engine, trace = start(model=seeded(Stack)())[0], Trace()
    for step in range(UPDATES):
        if folder is not None and step == SAVED:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = start(model=seeded(Stack)())[0]
            engine.load_checkpoint(folder)
        trace.append(engine.get_lr()[0])
        for micro in range(accumulation):
            place = MicroBatch(step, micro, dist.get_rank(), dist.get_world_size())
            (loss,) = models.squared_error(engine, regression_batch(place), place)
            engine.backward(loss * (float("inf") if step in skipped else 1.0))
            engine.step()
    if engine.skipped_steps != len(skipped):
        raise Finding(f"{engine.skipped_steps} steps were skipped, {len(skipped)} had infinite gradients")
    engine.destroy()
    return trace


def check_rates(driver: Driver) -> int:
    """Check that a schedule of rates counts updates: not ranks, micro-batches or skipped steps; also after a resume.

    Every trace is compared with that of a plain PyTorch optimizer and scheduler, which stand still in the two steps
    whose gradients overflow in fp16.
    """

    def judged(answers: list[Trace], expected: Trace) -> RowResult:
        wrong = [trace for trace in answers if trace != expected]
        return RowResult("equal", _as_text(wrong[0]) if wrong else "")

    driver.say(f"plain PyTorch     {_as_text(plain_trace(()))}")
    driver.say(f"steps {SKIPPED} skipped  {_as_text(plain_trace(SKIPPED))}")
    with scratch() as folder:
        for ranks, count, mode, stage in product(RANKS, ACCUMULATION, ("straight", "overflows", "resume"), range(4)):
            if ranks == 2 or stage == 2:
                skipped = SKIPPED if mode == "overflows" else ()
                saved = f"{folder}/{ranks}-{stage}-{count}" if mode == "resume" else None
                text = f"{ranks} ranks x accumulation {count}  stage {stage}  {mode:<9}"
                judge = partial(judged, expected=plain_trace(skipped))
                driver.on_ranks(text, ranks, judge, run_trace, stage, count, skipped, saved)
    return driver.end(f"{UPDATES} steps each", "all traces equal plain PyTorch")


def _as_text(trace: Trace) -> str:
    return " ".join(f"{rate:g}" for rate in trace)
