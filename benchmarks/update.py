"""The update of bf16 weights in one pass (the optimizer's kernel also writes the rounded weights) and in two, on one
rank.

    OMP_NUM_THREADS=2 PYTHONPATH=. python benchmarks/update.py [--model 134m] [--rounds 15] [--offload none cpu nvme]
    [--cpu-time]

The steps of one engine take turns: kernel with output, kernel and then a cast. Medians of ``engine.step()`` in
milliseconds, on the wall's clock or, for a machine that is not idle and with one thread, on the thread's own.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from statistics import median

from models import ADAMW, WORKLOADS, build_model, make_batch

import deepspeed
from deepspeed.optim.base import GroupStep


@contextlib.contextmanager
def two_passes() -> Iterator[None]:
    """No optimizer writes the rounded weights itself."""
    real = GroupStep.writing_outputs
    GroupStep.writing_outputs = lambda self, outputs: real(self, {})
    try:
        yield
    finally:
        GroupStep.writing_outputs = real


WAYS = {"two passes": two_passes, "one pass": contextlib.nullcontext}


def measure(args: argparse.Namespace, offload: str) -> dict[str, list[float]]:
    """Milliseconds of ``engine.step()`` for each way."""
    workload = WORKLOADS[args.model]
    place = {"device": offload, "nvme_path": args.folder} if offload == "nvme" else {"device": offload}
    config = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.level, **({} if offload == "none" else {"offload_optimizer": place})},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
    }
    model = build_model(workload)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    clock = time.thread_time if args.cpu_time else time.perf_counter
    for index in range(2 * (args.rounds + 1)):
        # pairs in turned order: neither way always follows the other
        name = list(WAYS)[(index + index // 2) % 2]
        engine.backward(engine(*make_batch(workload, 0, index)))
        with WAYS[name]():
            begin = clock()
            engine.step()
            if index >= 2:
                found[name].append(1e3 * (clock() - begin))
    engine.destroy()
    return found


def main() -> None:
    """Measure each place of the optimizer's state, print medians, ranges and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="134m")
    parser.add_argument("--level", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--offload", nargs="+", default=["none", "cpu"], choices=["none", "cpu", "nvme"])
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--folder", default="/tmp", help="where nvme offload puts its files")
    args = parser.parse_args()
    for offload in args.offload:
        found = measure(args, offload)
        two, one = (median(found[name]) for name in WAYS)
        parts = [f"{name} {median(v):8.1f} ms ({min(v):.1f} to {max(v):.1f})" for name, v in found.items()]
        pairs = median(b / a for a, b in zip(*found.values(), strict=True))
        print(f"offload_optimizer {offload:<5} {'   '.join(parts)}   one / two {one / two:.3f} (of pairs {pairs:.3f})")


if __name__ == "__main__":
    main()
