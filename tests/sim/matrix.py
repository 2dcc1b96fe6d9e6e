"""Every configuration of the table on the simulated device, in a process of its own: the device is there to stay.

python -m tests.sim.matrix OUT.json [--only NAME ...]
"""

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import time
from typing import Any

_CPU = {"device": "cpu", "pin_memory": True}
_DRIVE = {"device": "nvme", "nvme_path": "/nowhere", "pin_memory": True}
# else the first billion of parameters stays in host memory
_DRIVE_ALL = {**_DRIVE, "max_in_cpu": 0}


def _config(
    stage: int, *, accumulation: int = 1, dtype: str = "bf16", clip: float = 1.0, **zero: Any
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
    }


CASES: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": _config(stage) for stage in range(4)},
    **{f"stage{stage}-accumulated": _config(stage, accumulation=2) for stage in (1, 2, 3)},
    "stage3-unclipped": _config(3, clip=0.0),
    "stage3-fp16": _config(3, dtype="fp16"),
    "stage3-fp32": _config(3, dtype="fp32"),
    "mics": _config(3, mics_shard_size=4),
    "hpz": _config(3, zero_hpz_partition_size=2),
    "no-overlap": _config(3, overlap_comm=False),
    "no-prefetch": _config(3, stage3_prefetch_bucket_size=0),
    "recomputed": _config(3),
    "optimizer-on-host": _config(3, offload_optimizer=_CPU),
    "optimizer-on-host-accumulated": _config(3, accumulation=2, offload_optimizer=_CPU),
    "stage2-optimizer-on-host": _config(2, offload_optimizer=_CPU),
    "parameters-on-host": _config(3, offload_param=_CPU),
    "both-on-host": _config(3, offload_optimizer=_CPU, offload_param=_CPU),
    "half-on-host": _config(3, offload_optimizer={**_CPU, "ratio": 0.5}),
    "optimizer-on-drive": _config(3, offload_optimizer=_DRIVE),
    "both-on-drive": _config(3, offload_optimizer=_DRIVE, offload_param=_DRIVE_ALL),
    # a block that only some steps run: what was fetched for it early is not used
    "skipping": _config(3),
    "skipping-on-drive": _config(3, offload_optimizer=_DRIVE, offload_param=_DRIVE_ALL),
    # the user holds gathered parameters over a step
    "held": _config(3),
    "hpz-parameters-on-host": _config(3, zero_hpz_partition_size=2, offload_param=_CPU),
    "hpz-accumulated": _config(3, accumulation=2, zero_hpz_partition_size=2),
    "stage1-optimizer-on-drive": _config(1, offload_optimizer=_DRIVE),
}
WORLD = 8
_LINE = re.compile(r":[0-9]+ ")


def _skipping(subject: Any) -> Any:
    """Batches of a model that leaves its middle block out of the last step."""

    def batch(model: Any, step: int) -> Any:
        if step == 2:
            block = model.blocks[1]
            block.forward = lambda x, angles: x
            model.blocks[1].__class__ = type("Absent", (type(block),), {"__call__": lambda self, x, angles: x})
        return subject.batch(model, step)

    return batch


def _holding(subject: Any) -> Any:
    """Batches of a loop whose second step is inside a context that has the first block's parameters gathered."""
    import deepspeed

    held = contextlib.ExitStack()

    def batch(model: Any, step: int) -> Any:
        if step == 1:
            held.enter_context(deepspeed.zero.GatheredParameters(list(model.blocks[0].parameters())))
        held.close() if step == 2 else None
        return subject.batch(model, step)

    return batch


def run(name: str) -> dict[str, Any]:
    """Two steps of one configuration, as facts."""
    from deepspeed.simulate.costs import load_machine
    from deepspeed.simulate.models import Shape, decoder_subject
    from deepspeed.simulate.run import simulate

    begin = time.perf_counter()
    shape = Shape(width=512, blocks=3, heads=4, inner=2048, vocabulary=4096, positions=256, key_heads=4)
    subject = decoder_subject(name, shape, samples=1, sequence=128, recompute=name == "recomputed")
    kind = name.partition("-")[0]
    if kind in ("skipping", "held"):
        subject = dataclasses.replace(subject, batch=_skipping(subject) if kind == "skipping" else _holding(subject))
    steps = 3 if kind in ("skipping", "held") else 2
    outcome = simulate(subject, CASES[name], load_machine("h100"), world=WORLD, steps=steps)
    return {
        "parameters": outcome.parameters,
        "states": outcome.states,
        "at_peak": outcome.at_peak,
        "host": outcome.host,
        "left": outcome.left,
        "waits": sorted({f"{what}: {_LINE.sub(' ', where.partition(' <- ')[0])}" for what, where in outcome.waits}),
        "times": sum(outcome.waits.values()),
        "unordered": [str(problem) for problem in outcome.unordered],
        "took": time.perf_counter() - begin,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    options = parser.parse_args()
    facts = {}
    for name in options.only:
        facts[name] = run(name)
    with open(options.out, "w") as file:
        json.dump(facts, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
