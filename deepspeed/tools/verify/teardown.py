"""The gate of what is left of engines that were destroyed."""

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.monitor.hostmem import rss_bytes
from deepspeed.monitor.program import size
from deepspeed.tools.verify.driver import Driver, RowResult
from deepspeed.tools.verify.grads import Cell, start_engine
from deepspeed.tools.verify.models import MicroBatch, case_named

_ON_MODULES = ("forward", "forward_pre", "backward", "backward_pre", "state_dict", "state_dict_pre")
FOUR = (3, 2, 0, None)  # stages of four engines at once; None has no optimizer


def left_now() -> dict[str, int]:
    """Count the bytes of all tensors' storages, resident bytes, and this process's files, threads and groups."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    counts = {name: len([*Path(f"/proc/self/{name}").glob("*")]) for name in ("fd", "task")}
    usage = {"live": sum(storages.values()), "resident": rss_bytes()}
    return usage | {"files": counts["fd"], "threads": counts["task"], "groups": dist.get_pg_count()}


def _identity(model: nn.Module) -> Any:
    """Return the number of hooks, and the parameters with their classes."""
    hooks = sum(len(getattr(module, f"_{kind}_hooks")) for module in model.modules() for kind in _ON_MODULES)
    for param in model.parameters():
        hooks += len(param._backward_hooks or {}) + len(param._post_accumulate_grad_hooks or {})
    return hooks, [(name, id(p), type(p), p.shape) for name, p in model.named_parameters()]


def run_cycles(stages: Sequence[int | None], cycles: int) -> tuple[list[dict[str, int]], str]:
    """Run cycles of engines; return what is left after each, and what is then wrong with a model. Collective."""
    case = case_named("plain")
    place = MicroBatch(0, 0, dist.get_rank(), dist.get_world_size())
    usage: list[dict[str, int]] = []
    for _ in range(cycles):
        models = [case.build() for _ in stages]
        before = [_identity(model) for model in models]
        _train_and_destroy(stages, models, place)
        if [_identity(model) for model in models] != before:
            return usage, "the model has other hooks or parameters than before"
        for model in models:
            case.seeded_loss(model, place)[0].backward()
            if any(p.grad is None or p.grad.shape != p.shape for p in model.parameters()):
                return usage, "the model does not train as plain PyTorch afterwards"
        del models, model
        usage.append(left_now())
    return usage, ""


def _train_and_destroy(stages: Sequence[int | None], models: list[nn.Module], place: MicroBatch) -> None:
    """Train one step of an engine of each model, all of which live at once. Collective."""
    case = case_named("plain")
    engines: list[Any] = []
    for stage, model in zip(stages, models, strict=True):
        settings = Cell("plain", stage=3 if stage is None else stage, bucket="huge").settings(case)
        if stage is None:
            del settings["optimizer"]
        engines.append(start_engine(case, settings, model))
    losses = [case.seeded_loss(engine, place)[0] for engine in engines]
    for engine, loss, stage in zip(engines, losses, stages, strict=True):
        if stage is not None:
            engine.backward(loss)
            engine.offload_states()
            engine.reload_states()
            engine.step()
    for engine in engines:
        engine.destroy()


def judge(answers: list[tuple[list[dict[str, int]], str]], growth: float) -> RowResult:
    """Judge whether anything grew since the first cycle; resident memory may, by ``growth`` percent."""
    faults = [fault for _, fault in answers if fault]
    if faults:
        return RowResult("", faults[0])
    ranks = [usage for usage, _ in answers]
    names = ("live", "files", "threads", "groups")
    grown = {name: max(0, *(usage[-1][name] - usage[0][name] for usage in ranks)) for name in names}
    most = max(0.0, *(100 * (usage[-1]["resident"] / usage[len(usage) // 10]["resident"] - 1) for usage in ranks))
    things = ", ".join(f"{name} by {grown[name]}" for name in names[1:])
    text = f"live tensors grew by {size(grown['live'])}, {things}, resident memory by {most:.2f} %"
    return RowResult(f"{text}  ok", text if any(grown.values()) or most > growth else "")


def check_teardown(driver: Driver) -> int:
    """Check that a destroyed engine leaves neither memory nor hooks, and a model of plain PyTorch.

    Each row builds, trains and destroys an engine many times at one stage. Bytes of live tensors, open files, threads
    and process groups must not have grown since the first cycle, on any rank; resident memory by at most the share
    given since a tenth of the cycles was done. The model must have the hooks, parameters and classes it had before. The
    last row has four engines at once, as reinforcement learning has: stages 3, 2, 0, and 3 without an optimizer.
    """
    options = driver.options
    judged = partial(judge, growth=options.growth)
    rows: dict[str, tuple[int | None, ...]] = {f"stage {stage}": (stage,) for stage in range(4)}
    for text, stages in {**rows, "four engines": FOUR}.items():
        driver.on_ranks(text, options.ranks, judged, run_cycles, stages, options.cycles)
    return driver.end(f"{options.cycles} engines on {options.ranks} ranks each", "nothing is left")
