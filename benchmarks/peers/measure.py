"""The measuring loop that all peers share: one rank, warm-up steps, timed steps, one JSON line from rank 0."""

import argparse
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models import CUTS, WORKLOADS, Cut, Workload, make_batch

Step = Callable[[Tensor, Tensor], Tensor]
"""Inputs and targets -> the loss; runs forward, backward and the optimizer."""


def memory_mib(field: str) -> float:
    """A memory figure of this process from /proc/self/status (VmRSS, VmHWM), in MiB."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")
    return int(match.group(1)) / 1024


def run(name: str, build: Callable[[argparse.Namespace, Workload], Step], *, framework: str) -> None:
    """Measure one peer in this process and print a JSON line on rank 0.

    The base is the resident memory once torch, the framework and the process group exist, before any model does.
    """
    args = parse_arguments(name)
    torch.set_num_threads(args.threads)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world, workload = dist.get_rank(), dist.get_world_size(), WORKLOADS[args.model]
    cut = CUTS.get(args.variant, Cut())
    base = memory_mib("VmRSS")
    started = time.perf_counter()
    step = build(args, workload)
    setup_seconds, built = time.perf_counter() - started, memory_mib("VmHWM")
    seconds, processor, losses = [], [], []
    for index in range(args.warmup + args.steps):
        inputs, targets = make_batch(workload, cut.data_rank(rank, world), index)
        dist.barrier()
        started, busy = time.perf_counter(), time.process_time()
        loss = step(inputs, targets)
        processor.append(time.process_time() - busy)
        dist.barrier()  # a step ends when the slower rank has ended it
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    figures = torch.tensor(
        [base, built, memory_mib("VmHWM"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    )
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    first_loss, busy_seconds = torch.tensor(losses[0]), torch.tensor(processor)
    dist.all_reduce(first_loss)
    dist.all_reduce(busy_seconds)
    if rank == 0:
        row = {
            "peer": name,
            "variant": args.variant,
            "level": args.level,
            "model": args.model,
            "framework": framework,
            "torch": torch.__version__,
            "world": world,
            "tokens_per_step": workload.tokens * cut.data_ways(world),
            "setup_s": round(setup_seconds, 3),
            "step_s": [round(value, 4) for value in seconds[args.warmup :]],
            "warmup_s": [round(value, 4) for value in seconds[: args.warmup]],
            "cpu_s": [round(value, 4) for value in busy_seconds.tolist()[args.warmup :]],
            "first_loss": round(first_loss.item() / world, 4),
            "last_loss_rank0": round(losses[-1], 4),
            **dict(
                zip(
                    ("base_mib", "built_mib", "hwm_mib", "maxrss_mib"),
                    (round(v, 1) for v in figures.tolist()),
                    strict=True,
                )
            ),
        }
        sys.stdout.write("RESULT " + json.dumps(row) + "\n")
        sys.stdout.flush()
    dist.barrier()
    if not args.keep_group:
        dist.destroy_process_group()
        os._exit(0)  # frameworks' exit handlers are no part of the measurement, and some print


def parse_arguments(name: str) -> argparse.Namespace:
    """The command line of a peer."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="tiny")
    parser.add_argument("--level", type=int, default=3, choices=range(4), help="ZeRO stage, where the peer knows one")
    parser.add_argument("--variant", default="default", help="a named choice of settings of this peer")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock counts")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank")
    parser.add_argument("--keep-group", action="store_true", help="end through the interpreter's normal exit")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1, help="set by some launchers")
    return parser.parse_args()
