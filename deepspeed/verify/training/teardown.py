"""The teardown gate: an engine that was destroyed leaves neither memory nor hooks, and a model of plain PyTorch.

Each row builds, trains and destroys an engine many times at one stage. On every rank the bytes of live tensors after
the last cycle must be at most those after the first, as must be the numbers of open files, threads and process groups;
resident memory must not have grown by more than the share given since a tenth of the cycles was done, and the model
must have the hooks, parameters and classes that it had before. A last row has four engines at once, as reinforcement
learning has: stage 3, stage 2, stage 0, and stage 3 without an optimizer.
"""

import argparse
import gc
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.observe.hostmem import rss_bytes
from deepspeed.observe.program import size
from deepspeed.verify.common import Printout
from deepspeed.verify.grads import Cell, start_engine
from deepspeed.verify.models import MicroBatch, case_named
from deepspeed.verify.ranks import RankPool

_OF_PROCESS = ("/proc/self/fd", "/proc/self/task")
_ON_MODULES = ("forward", "forward_pre", "backward", "backward_pre", "state_dict", "state_dict_pre")


def hooks_of(model: nn.Module) -> int:
    """Hooks on modules and on parameters."""
    on_modules = sum(len(getattr(module, f"_{kind}_hooks")) for module in model.modules() for kind in _ON_MODULES)
    return on_modules + sum(
        len(p._backward_hooks or {}) + len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()
    )


def live_tensor_bytes() -> int:
    """Bytes of all storages that some tensor of this process uses."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class Left(NamedTuple):
    """What a rank has after a cycle: bytes, and numbers of things (none where the system does not say)."""

    live: int
    resident: int
    files: int
    threads: int
    groups: int


def left_now() -> Left:
    """Of this process."""
    gc.collect()
    files, tasks = (sum(1 for _ in place.iterdir()) if place.is_dir() else 0 for place in map(Path, _OF_PROCESS))
    return Left(live_tensor_bytes(), rss_bytes(), files, tasks, dist.get_pg_count())


def run_cycles(stage: int | None, cycles: int) -> tuple[list[Left], str]:
    """What is left after each cycle, None for that of four engines; what is wrong with the model. Collective."""
    if stage is None:
        return [_four_engines() for _ in range(cycles)], ""
    case = case_named("plain")
    left: list[Left] = []
    place = MicroBatch(0, 0, dist.get_rank(), dist.get_world_size())
    for _ in range(cycles):
        model = case.build()
        before = _identity(model)
        engine: Any = start_engine(case, Cell("plain", stage=stage, bucket="huge").settings(case), model)
        engine.backward(case.seeded_loss(engine, place)[0])
        engine.step()
        engine.destroy()
        del engine
        if _identity(model) != before:
            return left, "the model has other hooks or parameters than before"
        case.seeded_loss(model, place)[0].backward()
        if any(p.grad is None or p.grad.shape != p.shape for p in model.parameters()):
            return left, "the model does not train as plain PyTorch afterwards"
        del model
        left.append(left_now())
    return left, ""


def _four_engines() -> Left:
    case = case_named("plain")
    place = MicroBatch(0, 0, dist.get_rank(), dist.get_world_size())
    settings = [Cell("plain", stage=stage, bucket="huge").settings(case) for stage in (3, 2, 0)]
    engines: list[Any] = [start_engine(case, each, case.build()) for each in settings]
    frozen = {name: value for name, value in settings[0].items() if name != "optimizer"}
    engines.append(deepspeed.initialize(model=case.build().eval(), config=frozen)[0])
    losses = [case.seeded_loss(engine, place)[0] for engine in engines]
    for engine, loss in zip(engines[:3], losses[:3], strict=True):
        engine.backward(loss)
        engine.offload_states()
        engine.reload_states()
        engine.step()
    for engine in engines:
        engine.destroy()
    del engines, engine, losses, loss
    return left_now()


def _identity(model: nn.Module) -> Any:
    return hooks_of(model), [(name, id(p), type(p), p.shape) for name, p in model.named_parameters()]


def run(options: argparse.Namespace, report: Printout) -> int:
    with RankPool(options.ranks, time_limit=options.time_limit) as pool:

        def check(stage: int | None) -> tuple[str, str]:
            grown, most, things = 0, 0.0, {"files": 0, "threads": 0, "groups": 0}
            for left, fault in pool.run(run_cycles, stage, options.cycles):
                if fault:
                    return "", fault
                first, last = left[0], left[-1]
                grown = max(grown, last.live - first.live)
                most = max(most, 100 * (last.resident / left[options.cycles // 10].resident - 1))
                things = {n: max(most_of, getattr(last, n) - getattr(first, n)) for n, most_of in things.items()}
            more = ", ".join(f"{name} by {number}" for name, number in things.items())
            text = f"live tensors grew by {size(grown)}, {more}, resident memory by {most:.2f} %"
            bad = grown > 0 or most > options.growth or any(number > 0 for number in things.values())
            return f"{text}  ok", text if bad else ""

        for stage in range(4):
            report.row(f"stage {stage}", check, stage)
        report.row("four engines", check, None)
    return report.end(f"{options.cycles} engines on {options.ranks} ranks each", "nothing is left")
