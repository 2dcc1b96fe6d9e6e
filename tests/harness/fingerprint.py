"""What a user could observe of a training run, as one plain dict: two configurations act alike exactly when their dicts
are equal.

Values that merely echo the configuration (``engine.steps_per_print()``) are left out on purpose: they would make every
key look alive. Times and memory sizes are masked.
"""

import contextlib
import gc
import hashlib
import io
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.accelerator.device import Accelerator, NullEvent, get_accelerator
from deepspeed.checkpoint.save.writer import RankFile
from deepspeed.client import activation
from deepspeed.client.comm import comms_log
from deepspeed.client.data_loader import RepeatingLoader
from deepspeed.client.elastic import SaveKeeper
from deepspeed.monitor import log
from deepspeed.monitor.log import logger
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import HIDDEN, IN_FEATURES, OUT_FEATURES, Stack
from deepspeed.zero.unit import UnitState
from tests.harness import pipes
from tests.harness.experts import TwoStacks
from tests.harness.faults import modules_replaced
from tests.harness.logs import logged

FEW, MORE = 2, 4  # updates of a run, and of one whose effect shows only then
_NAP_S = 0.2  # of a rank that is slow
SAMPLES = 9  # not a multiple of ranks x micro batch, so that the last batch of an epoch is short
WORKDIR = "<work>"  # stands for a fresh folder in configuration values
_NUMBERS = re.compile(r"-?\d+\.\d+(e[-+]?\d+)?")

Fingerprint = dict[str, Any]


class ProbeModel(Stack):
    """Blocks of small and larger parameters, a floating buffer, and one module that only some inputs use."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.register_buffer("shift", torch.full((HIDDEN,), 0.1003))
        self.side = nn.Linear(HIDDEN, HIDDEN)
        self.seen: list[Any] = []  # (dtype, units gathered) at every forward of a block
        self.states: Callable[[], tuple[str, ...]] = tuple
        self.skip_side = False
        self.through: Callable[..., Any] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Any:
        self.seen.append(str(x.dtype))
        x = self.inp(x.to(self.inp.weight.dtype)) + self.shift.to(self.inp.weight.dtype)
        for layer in self.layers:
            x = self.through(layer, x)
            self.seen.append((str(x.dtype), *self.states()))
        if not self.skip_side:
            x = x + self.side(x)
        return self.head(x.to(self.head.weight.dtype))

    def generate(self, x: Tensor, max_new_tokens: int = 2) -> Tensor:
        for _ in range(max_new_tokens):
            x = torch.cat([x, self(x)[:, :1].to(x.dtype)], 1)[:, 1:]
        return x


def _build() -> ProbeModel:
    torch.manual_seed(1234)
    return ProbeModel().train()


def _dataset() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(99)
    return [
        (torch.randn(IN_FEATURES, generator=generator), torch.randn(OUT_FEATURES, generator=generator))
        for _ in range(SAMPLES)
    ]


def _digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].detach().double().numpy().tobytes())
    return total.hexdigest()[:16]


class _Watch:
    """Everything about one run that lies outside the engine object: log lines, collectives, waits for the device,
    process settings.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sent: list[Any] = []
        self.waits = 0
        self.copies = self.emptied = 0
        self.services: list[Any] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        def wait(_accelerator: Accelerator, _index: Any = None) -> None:
            self.waits += 1

        def event(_accelerator: Accelerator, **_options: Any) -> NullEvent:
            self.waits += 1  # somebody measures the device's time
            return NullEvent()

        def empty(_accelerator: Accelerator) -> None:
            self.emptied += 1

        for once in (log._log_once, log.warning_once):
            once.cache_clear()
        names = ("torch.utils.tensorboard", "wandb", "comet_ml")
        services: Any = {name: _Service(name, self.services) for name in names}
        clock = mock.patch.multiple(Accelerator, synchronize=wait, Event=event, empty_cache=empty)
        comms_log.LOG.__init__()  # type: ignore[misc]
        try:
            with logged(set_level=logging.INFO) as self.lines, clock, modules_replaced(services):
                yield
        finally:
            comms_log.LOG.__init__()  # type: ignore[misc]

    def follow(self, engine: Any) -> None:
        for group in {id(g): g for g in (engine.mesh.zero, *engine.mesh.groups)}.values():
            group.ledger.append(lambda op, numel, dtype, size: self.sent.append((op, numel, str(dtype), size)))


def _say_unit(unit: Any) -> Any:
    plan = [
        None if s is None else ("".join(w.value for w in s.spread), s.tier.value)
        for s in (unit.plan.param, unit.plan.grad, unit.plan.optim)
    ]
    return unit.name, unit.movable, [(s.name, s.numel) for s in unit.layout.segments], plan, unit.layout.numel


def _say_optimizer(optimizer: Any) -> Any:
    groups = [{k: str(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    slots = sorted(
        {
            (name, str(value.dtype), value.device.type)
            for state in optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
    )
    return type(optimizer).__name__, groups, slots, [len(g["params"]) for g in optimizer.param_groups]


def _say_files(folder: Path) -> Any:
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = re.sub(r"\d{5,}.*", "#", str(path.relative_to(folder)))
        text = path.read_text().splitlines() if path.suffix in (".csv", ".txt") else path.stat().st_size > 0
        found[name] = text
    return found


# The kinds of run, and the steps whose gradients are infinite in each.
SCENARIOS: dict[str, tuple[int, ...]] = {
    "train": (),
    "longer": (),  # the same with more updates
    "slow": (),  # one rank takes its time
    "overflow": (1, 2),
    "apart": (0, 2),  # a clean step between two bad ones
    "uncast": (),  # inputs stay fp32, whatever the model is
    "diverge": (),  # the last rank skips a module
    "recompute": (),  # blocks run under deepspeed.checkpointing, configured from the same configuration
    "rewrite": (),  # values are written in place, as they are, in a read-only context
    "save": (),  # consolidated weights are written
    "checkpoint": (),  # checkpoints are saved under tags that differ between ranks, and one is loaded
    "odd client": (),  # a checkpoint with client state that needs pickle
    "generate": (),  # and generates
    "experts": (),  # two layers of experts are added
    "pipeline": (),  # a PipelineModule of two stages
}
_OF_MORE = ("longer", "slow", "overflow", "apart", "diverge")


def run(config: dict[str, Any], scenario: str) -> Fingerprint:
    """Train the probe model for a few steps with ``config``; what could be seen on this rank. Collective."""
    watch, out = _Watch(), {}
    gc_before, printed = gc.isenabled(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, watch.listening():
        work = _placed(config, folder)
        with contextlib.redirect_stdout(printed):
            try:
                out |= _train(work, scenario, watch, Path(folder))
            except Exception as error:
                out["error"] = f"{type(error).__name__}: {_NUMBERS.sub('#', str(error)).replace(folder, WORKDIR)}"
        out["files"] = _say_files(Path(folder))
        out["comm log"] = {op: comms_log.LOG.count(op) for op in comms_log.LOG.ops()}
        out["level afterwards"], out["collection afterwards"] = logger.level, gc.isenabled() == gc_before
        out["log"] = [_NUMBERS.sub("#", line.replace(folder, WORKDIR)) for line in watch.lines]
    out["printed"] = _NUMBERS.sub("#", printed.getvalue())
    out["waits"], out["sent"], out["copies"] = watch.waits, watch.sent, watch.copies
    out["services"] = [[part.replace(folder, WORKDIR) for part in call] for call in watch.services]
    return _exact(out)


def _exact(value: Any) -> Any:
    """``value`` with floats as text, so that NaN equals NaN, and with lists for tuples."""
    if isinstance(value, dict):
        return {k: _exact(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(v) for v in value]
    return repr(value) if isinstance(value, float) else value


def _placed(value: Any, folder: str) -> Any:
    """A copy of ``value`` with the folder filled in."""
    if isinstance(value, dict):
        return {k: _placed(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_placed(v, folder) for v in value]
    return value.replace(WORKDIR, folder) if isinstance(value, str) else value


def _train(config: dict[str, Any], scenario: str, watch: _Watch, folder: Path) -> Fingerprint:
    torch.manual_seed(0)
    if scenario == "pipeline":
        return _pipeline(config)
    model = _build()
    if scenario == "experts":
        model.layers.extend([TwoStacks(HIDDEN), TwoStacks(HIDDEN)])
        model.config = SimpleNamespace(base_model_ep_plan={"layers.*.experts": "ep_dispatch_experts"})  # type: ignore[assignment]
    engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=_dataset())
    out: Fingerprint = {}
    try:
        watch.follow(engine)
        out |= _start(engine, loader)
        model.skip_side = scenario == "diverge" and dist.get_rank() == dist.get_world_size() - 1
        model.states = lambda: tuple(u.state.value for u in engine.runtime.units if u.movable)
        with _recomputing(model, config, watch) if scenario == "recompute" else contextlib.nullcontext():
            out["steps"] = _steps(engine, RepeatingLoader(loader), scenario)
        out |= _end(engine, model)
        if scenario == "rewrite":
            with torch.no_grad(), deepspeed.zero.GatheredParameters(model.head.weight):
                model.head.weight.add_(0)
        if scenario == "generate":
            rounds, x = engine.runtime.agreement.rounds, torch.ones(2, IN_FEATURES, dtype=model.head.weight.dtype)
            tokens = engine.generate(x, max_new_tokens=2)
            out["generated"] = _digest({"": tokens}), engine.runtime.agreement.rounds - rounds, type(engine).__name__
            out["emptied"] = watch.emptied
        if scenario == "save":
            out["saved"] = engine.save_16bit_model(folder)
        if scenario in ("checkpoint", "odd client"):
            out |= _checkpoints(engine, folder, odd=scenario == "odd client")
    finally:
        engine.destroy()
    return out


def _pipeline(config: dict[str, Any]) -> Fingerprint:
    specs = [LayerSpec(pipes.Embed, 1), LayerSpec(nn.Linear, pipes.WIDTH, pipes.WIDTH), LayerSpec(pipes.Block, 2)]
    specs += [*(LayerSpec(nn.LayerNorm, pipes.WIDTH) for _ in range(3)), LayerSpec(pipes.Head, 3)]
    engine = pipes.start(PipelineModule(specs, num_stages=2, loss_fn=pipes.cross_entropy), config)
    events: list[str] = []

    def note(module: nn.Module, _: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: events.append(f"backward {module}"))

    for module in engine.module.modules():
        if isinstance(module, pipes.Embed):
            module.register_forward_pre_hook(lambda module, _: events.append(f"forward {module}"))
            module.register_forward_hook(note)
    try:
        losses = [float(engine.train_batch(pipes.batches(0, micros=4))) for _ in range(FEW)]
        return {"losses": losses, "events": events, "cut": engine.module.partitions()}
    finally:
        engine.destroy()


def _checkpoints(engine: Any, folder: Path, *, odd: bool) -> Fingerprint:
    place: list[Any] = [str(folder)]
    dist.broadcast_object_list(place)
    limits: list[int] = []
    with mock.patch.object(RankFile, "limit", lambda _, rate: limits.append(rate)):
        for index in range(3):
            engine.save_checkpoint(
                place[0], f"t{index}" if odd else f"t{index}-{dist.get_rank()}", {"odd": {1}.union} if odd else {}
            )
    out: Fingerprint = {"limits": limits, "busy": engine._checkpoints.saver.running}
    torch.manual_seed(77)
    list(engine.training_dataloader)
    _, client = engine.load_checkpoint(place[0])
    out |= {"random": torch.rand(1).item(), "data": str(engine.training_dataloader.state_dict())}
    dist.barrier()
    out |= {"client": sorted(client), "kept": sorted(p.name for p in Path(place[0]).rglob("*"))}
    keeper = SaveKeeper(engine, place[0], every=0, state={})
    out["emergency"] = keeper.deadline_s
    keeper.close()
    dist.barrier()  # the folder is the first rank's, and goes with its run
    return out


def _start(engine: Any, loader: Any) -> Fingerprint:
    return {
        "batch": [
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            len(loader),
        ],
        "units": [_say_unit(u) for u in engine.runtime.units],
        "parameters": {n: (str(p.dtype), list(p.shape)) for n, p in engine.module.named_parameters()},
        "buffers": {n: (str(b.dtype), b.float().tolist()) for n, b in engine.module.named_buffers()},
        "masters": [str(u.master.dtype) if u.master is not None else None for u in engine.runtime.units],
        "axes": [group.size for group in engine.mesh.groups],
        "experts": [group.ranks for group in engine.mesh.experts],
        "level": logger.level,
        "collection": gc.isenabled(),
        "scheduler": type(engine.lr_scheduler).__name__,
        "timers": type(engine.timers).__name__,
    }


def _steps(engine: Any, batches: Iterator[Any], scenario: str) -> list[Any]:
    seen = []
    for step in range(MORE if scenario in _OF_MORE else FEW):
        losses = []
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = next(batches)
            time.sleep(_NAP_S if scenario == "slow" and dist.get_rank() == 1 else 0)
            losses.append(_micro(engine, x, y, bad=step in SCENARIOS[scenario], cast=scenario != "uncast"))
        seen.append(
            {
                "losses": losses,
                "lr": engine.get_lr(),
                "momentum": engine.get_mom(),
                "scale": engine.loss_scale(),
                "norm": engine.get_global_grad_norm(),
                "steps": [
                    engine.global_steps,
                    engine.micro_steps,
                    engine.skipped_steps,
                    engine.global_samples,
                    engine.was_step_applied(),
                ],
            }
        )
    return seen


def _micro(engine: Any, x: Tensor, y: Tensor, *, bad: bool, cast: bool) -> Any:
    dtype = next(p.dtype for p in engine.module.parameters())
    loss = F.mse_loss(engine(x.to(dtype) if cast else x).float(), y)
    value = float(loss.detach())
    engine.backward(loss * float("inf") if bad else loss)
    engine.step()
    return value, len(x)


def _end(engine: Any, model: ProbeModel) -> Fingerprint:
    counters = engine.runtime.counts
    out = {
        "gathers": [counters.gathers, counters.gathered_numel, counters.reductions, counters.dummy_collectives],
        "in forward": model.seen[:],
        "at rest": [u.state is UnitState.ABSENT for u in engine.runtime.units],
        "gradients": [str(u.grad.dtype) if u.grad is not None else None for u in engine.runtime.units],
        "optimizer": _say_optimizer(engine.basic_optimizer) if engine.basic_optimizer is not None else None,
    }
    model.seen.clear()
    return out | {"weights": _digest(full_parameters(engine.module))}


class _Service:
    """Stands for the modules of metric services, whose packages may be missing: every call is written down, and the
    answer is itself.
    """

    def __init__(self, name: str, calls: list[Any]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, name: str) -> Callable[..., "_Service"]:
        def called(*args: Any, **kwargs: Any) -> "_Service":
            self._calls.append((self._name, name, repr(args), repr(kwargs)))
            return self

        return called


class _PretendDevice:
    """The accelerator of this process under another name: what activation checkpointing does on a device can be seen
    without one.
    """

    def device_name(self) -> str:
        return "pretended"

    def __getattr__(self, name: str) -> Any:
        return getattr(get_accelerator(), name)


@contextlib.contextmanager
def _recomputing(model: ProbeModel, config: dict[str, Any], watch: _Watch) -> Iterator[None]:
    """The blocks run under ``deepspeed.checkpointing``; copies of activations to the host are counted in place of
    made.
    """

    def counted() -> Any:
        watch.copies += 1
        return contextlib.nullcontext()

    with (
        mock.patch.object(activation, "get_accelerator", _PretendDevice),
        mock.patch.object(activation, "_settings", activation._Settings()),
        mock.patch.object(activation, "_offloading", counted),
    ):
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
        model.through = lambda layer, x: deepspeed.checkpointing.checkpoint(layer, x)
        yield


def run_all(runs: list[tuple[dict[str, Any], str]]) -> list[Fingerprint]:
    """The fingerprints of many runs, one after the other. Collective."""
    found = []
    for config, scenario in runs:
        found.append(run(config, scenario))
        dist.barrier()
    return found
