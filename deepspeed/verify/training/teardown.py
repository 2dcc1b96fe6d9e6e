"""The teardown gate: an engine that was destroyed leaves neither memory nor hooks, and a model of plain PyTorch.

Each row builds, trains and destroys an engine many times at one stage. On every rank the bytes of live tensors after
the last cycle must be at most those after the first, resident memory must not have grown by more than the share given
since a tenth of the cycles was done, and the model must have the hooks, parameters and classes that it had before.
"""

import argparse
import gc
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.observe.hostmem import rss_bytes
from deepspeed.observe.program import CommandLine, count_of, number_of, positive_of, size
from deepspeed.verify.common import Printout
from deepspeed.verify.grads import Cell, start_engine
from deepspeed.verify.models import MicroBatch, case_named
from deepspeed.verify.ranks import RankPool

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


def run_cycles(stage: int, cycles: int) -> tuple[list[int], list[int], str]:
    """Live and resident bytes after each cycle; what is wrong with the model, if anything. Collective."""
    case = case_named("plain")
    live: list[int] = []
    resident: list[int] = []
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
            return live, resident, "the model has other hooks or parameters than before"
        case.seeded_loss(model, place)[0].backward()
        if any(p.grad is None or p.grad.shape != p.shape for p in model.parameters()):
            return live, resident, "the model does not train as plain PyTorch afterwards"
        del model
        live.append(live_tensor_bytes())
        resident.append(rss_bytes())
    return live, resident, ""


def _identity(model: nn.Module) -> Any:
    return hooks_of(model), [(name, id(p), type(p), p.shape) for name, p in model.named_parameters()]


def add_options(parser: CommandLine) -> None:
    parser.option("--cycles", count_of, 50, "N", "engines that are made and destroyed in a row")
    parser.option("--ranks", count_of, 2, "N", "number of CPU ranks")
    parser.option("--growth", number_of, 1.0, "PERCENT", "by how much resident memory may grow")
    parser.option("--time-limit", positive_of, 300.0, "N", "seconds one row may take")


def run(options: argparse.Namespace, report: Printout) -> int:
    with RankPool(options.ranks, time_limit=options.time_limit) as pool:

        def check(stage: int) -> tuple[str, str]:
            grown, most = 0, 0.0
            for live, resident, fault in pool.run(run_cycles, stage, options.cycles):
                if fault:
                    return "", fault
                grown = max(grown, live[-1] - live[0])
                most = max(most, 100 * (resident[-1] / resident[options.cycles // 10] - 1))
            text = f"live tensors grew by {size(grown)}, resident memory by {most:.2f} %"
            return f"{text}  ok", text if grown > 0 or most > options.growth else ""

        for stage in range(4):
            report.row(f"stage {stage}", check, stage)
    return report.end(f"{options.cycles} engines on {options.ranks} ranks each", "nothing is left")
