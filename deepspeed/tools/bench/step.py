"""``ds_bench step``: how much of the optimizer's update a training step hides.

    ds_bench step --params 134M --offload
    ds_bench step --params 1e9 --ranks 1 --offload

The same steps are taken twice: as they come, and with a wait for everything after the backward and after the update.
What a step takes longer than its forward and backward alone is the exposed update. With one rank on the accelerator
of this machine, if there is one; with more on the CPU.
"""

import argparse
import statistics
from typing import Any

from deepspeed import comm
from deepspeed.accelerator.device import get_accelerator
from deepspeed.tools.bench.common import titled
from deepspeed.tools.bench.trained import engine_for, on_ranks, passes, settle, timed


def on_rank(plan: argparse.Namespace) -> dict[str, Any]:
    """Run in a rank: return the seconds of a step, of its passes and of its update, and the exposed seconds."""
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if plan.offload else {}
    engine, x = engine_for(plan, plan.level, **offload)

    def wait() -> None:
        settle(engine)
        comm.barrier()

    def free() -> None:
        for _ in range(plan.steps):
            passes(engine, x)
            engine.step()

    wait()
    whole = timed(free, wait) / plan.steps
    alone, update = list[float](), list[float]()
    for _ in range(plan.steps):
        alone.append(timed(lambda: passes(engine, x), wait))
        update.append(timed(engine.step, wait))
    params = sum(p.numel() for p in engine.module.parameters())
    where = get_accelerator().device_name()
    engine.destroy()
    seconds = {"step": whole, "forward and backward": statistics.median(alone), "update": statistics.median(update)}
    exposed = max(0.0, whole - seconds["forward and backward"])
    return {"params": params, "device": where, "seconds": seconds, "exposed": exposed}


def measure(plan: argparse.Namespace) -> Any:
    alone = plan.ranks == 1 and get_accelerator().device_name() != "cpu"
    return on_rank(plan) if alone else on_ranks(on_rank, plan)[0]


def as_text(facts: dict[str, Any], plan: argparse.Namespace) -> str:
    seconds, exposed = facts["seconds"], facts["exposed"]
    rows = [
        ("seconds", "", ""),
        ("a step, as it comes", seconds["step"], ""),
        ("its forward and backward", seconds["forward and backward"], ""),
        ("an update with nothing beside it", seconds["update"], ""),
        ("what is seen of it in a step", exposed, f"{100 * exposed / seconds['update']:.0f} %"),
    ]
    where = "states in host memory" if plan.offload else "states on the device"
    ranks = f"{plan.ranks} ranks ({facts['device']})"
    return titled(f"{facts['params']:,} parameters on {ranks}, ZeRO-{plan.level}, bf16, AdamW, {where}", rows)
