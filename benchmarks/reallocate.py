"""Weights from a training layout to a generation layout: one planned exchange of bytes, beside whole weights streamed
to every rank (of which each would keep its part).

    OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --standalone --nproc-per-node 4 benchmarks/reallocate.py
    [--model 33.7m] [--rounds 7] [--max-bytes 64MB]
    PYTHONPATH=. python benchmarks/reallocate.py --plan    the planner alone, at the size of real jobs, without ranks

The ways take turns; medians and ranges, on the slowest rank, in milliseconds. Bytes are those of the plan, which
tests/dist/test_reallocate.py holds to what is sent.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from models import ADAMW, WORKLOADS, build_model

import deepspeed
from deepspeed.reallocate import ParameterReallocation, plan_reallocation
from deepspeed.reallocate.moves import GlobalShape
from deepspeed.tools.bench.trained import together
from deepspeed.zero.regions import Region, Span

TENSOR_PARALLEL = {
    "layer_specs": [
        {"patterns": [r".*\.qkv\.weight"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
        {"patterns": [r".*\.(project|down)\.weight"], "partition_type": "row"},
    ],
    "lm_head_patterns": ["head"],
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZeRO-3 to tensor parallel 2": ({"level": 3}, {"tp": 2}),
    "ZeRO-3 to tensor parallel 4": ({"level": 3}, {"tp": 4}),
    "ZeRO-1 to tensor parallel 2": ({"level": 1}, {"tp": 2}),
    "tensor parallel 2 with ZeRO-1 to ZeRO-3": ({"level": 1, "tp": 2}, {"level": 3}),
    "half of the ranks, ZeRO-3, to the other half, tensor parallel": (
        {"level": 3, "half": 0}, {"tp": 2, "half": 1},
    ),
}  # fmt: skip


def engine_of(args: argparse.Namespace, *, level: int = 0, tp: int = 1, half: int | None = None) -> Any:
    """An engine in bf16; one of ZeRO-0 has no optimizer. None on ranks of the other half."""
    adamw = {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": level},
        **({"optimizer": adamw} if level else {}),
        **({"tensor_parallel": {"autotp_size": tp, "partition_config": TENSOR_PARALLEL}} if tp > 1 else {}),
    }
    how: dict[str, Any] = {}
    if half is not None:
        world = dist.get_world_size()
        groups = [dist.new_group(list(range(i * world // 2, (i + 1) * world // 2))) for i in (0, 1)]
        how["mpu"] = SimpleNamespace(get_data_parallel_group=lambda: groups[half])
        if dist.get_rank() * 2 // world != half:
            return None
    return deepspeed.initialize(model=build_model(WORKLOADS[args.model]), config=config, **how)[0]


def measure(args: argparse.Namespace, name: str) -> None:
    """One line of the table."""
    source, target = (engine_of(args, **side) for side in CASES[name])
    begin = time.perf_counter()
    there = ParameterReallocation(source, target, max_bytes=args.max_bytes)
    planned = 1e3 * (time.perf_counter() - begin)
    ways: dict[str, Callable[[], Any]] = {"exchange": there.run}
    if CASES[name][0].get("half") is None:  # a stream reaches the ranks of its engine
        ways["stream"] = lambda: [None for _ in source.stream_weights(args.max_bytes)]
    took: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(args.rounds + 1):
        for way, work in ways.items():
            found = 1e3 * together(work)  # of the slowest rank
            if turn:
                took[way].append(found)
    plan = there.plan
    ratio = f"{plan.bytes_moved / plan.lower_bound:.2f} of the lower bound" if plan.lower_bound else "nothing to move"
    if dist.get_rank() == 0:
        texts = [f"{way} {median(t):.0f} ms ({min(t):.0f} to {max(t):.0f})" for way, t in took.items()]
        print(
            f"{name}: {plan.bytes_moved / 1e6:.1f} MB, {ratio}; most sent {max(plan.sent.values()) / 1e6:.1f}, "
            f"received {max(plan.received.values()) / 1e6:.1f} MB; planned in {planned:.0f} ms; {'; '.join(texts)}",
            flush=True,
        )
    for engine in (source, target):
        if engine is not None:
            engine.destroy()


def planner_alone() -> None:
    """A decoder of 7 billion parameters in bf16, blocks as flat shards, to tensor-parallel parts."""
    width, inner, layers, words = 4096, 11008, 32, 32_000
    blocks = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
    blocks |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner), "norm": (2 * width,)}
    shapes = {f"{i}.{n}": s for i in range(layers) for n, s in blocks.items()} | {"embed": (words, width)}
    for ranks, tp in ((8, 8), (64, 8)):
        resting: dict[int, dict[str, list[Span]]] = {rank: {} for rank in range(ranks)}
        needed: dict[int, dict[str, list[Span]]] = {rank: {} for rank in range(ranks)}
        for i in [*range(layers), "embed"]:
            unit = [name for name in shapes if name.partition(".")[0] == str(i)]
            sizes = [torch.Size(shapes[name]).numel() for name in unit]
            each, base = -(-sum(sizes) // ranks), 0
            for name, numel in zip(unit, sizes, strict=True):
                for rank in range(base // each, min(ranks, -(-(base + numel) // each))):
                    lo, hi = max(0, rank * each - base), min(numel, (rank + 1) * each - base)
                    resting[rank][name] = [Span(lo, hi)]
                base += numel
        for rank, (name, shape) in ((r, pair) for r in range(ranks) for pair in shapes.items()):
            dim = 1 if name.endswith((".o", ".down")) else 0
            part = tuple(n // tp if d == dim else n for d, n in enumerate(shape))
            start = tuple(n // tp * (rank % tp) if d == dim else 0 for d, n in enumerate(shape))
            needed[rank][name] = [Span(0, torch.Size(part).numel(), Region(start, part))]
        widths = {name: GlobalShape(shape, 2) for name, shape in shapes.items()}
        begin = time.process_time()
        plan = plan_reallocation(widths, resting, needed, nodes={rank: rank // 8 for rank in range(ranks)})
        print(
            f"7B, ZeRO-3 on {ranks} ranks to tensor parallel {tp}: planned in {time.process_time() - begin:.1f} s, "
            f"{len(plan.transfers)} transfers, {plan.bytes_moved / 1e9:.1f} GB, "
            f"{plan.bytes_moved / plan.lower_bound:.2f} of the lower bound; "
            f"most sent {max(plan.sent.values()) / 1e9:.2f} GB, received {max(plan.received.values()) / 1e9:.2f} GB"
        )


def main() -> None:
    """All cases, or the planner alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="33.7m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-bytes", default="64MB")
    parser.add_argument("--plan", action="store_true")
    args = parser.parse_args()
    if args.plan:
        planner_alone()
        return
    deepspeed.init_distributed(verbose=False)
    for name in CASES:
        measure(args, name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
