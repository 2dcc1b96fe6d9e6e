"""What agreeing on the order of collectives costs: time in which the issuing thread waits, messages and bytes per step.

    python benchmarks/agreement.py [--baseline CHECKOUT] [--ranks 2 4 8] [--blocks 24] [--steps 30] [--repeats 3]

Ranks are CPU processes over gloo that train a small stack of many units under stage 3. With a baseline (another
checkout of this repository) the two take turns. Then comes the table of messages and bytes for sizes that no machine
here has.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
WORD_BITS = 62
EVERY_REQUEST = 14  # integers of a request besides its set of units, when all requests were exchanged
MERGED = 5  # integers of a message besides that set: digest and number of steps, twice, and the smallest request


@dataclass(frozen=True)
class Cost:
    """What one rank sends per step: comparisons of all ranks, messages of this rank, their bytes."""

    comparisons: int
    messages: int
    nbytes: int


def by_rows(ranks: int, units: int, comparisons: int) -> Cost:
    """Requests all-gathered as rows of int64 around a ring: what each comparison once was."""
    messages = comparisons * (ranks - 1)
    return Cost(comparisons, messages, messages * 8 * (EVERY_REQUEST + max(1, -(-units // WORD_BITS))))


def by_doubling(ranks: int, units: int, comparisons: int) -> Cost:
    """Digests, the smallest request and the set of units merged over doubling distances: ceil(log2(ranks)) messages,
    equal or not.
    """
    messages = comparisons * (ranks - 1).bit_length()
    return Cost(comparisons, messages, messages * 8 * (MERGED + max(1, -(-units // WORD_BITS))))


def comparisons_by_message(units: int) -> int:
    """Requests of a step without habits: ``units`` equal sharded units in a chain.

    The gathers of two units go with one request, in both directions, and so do two reductions; then the ends of
    forward, backward and step.
    """
    return 3 * (units // 2) + 3


def chain(blocks: int, width: int) -> Any:
    """The model: ``blocks`` equal units, one after the other."""
    import torch

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(blocks)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Chain()


def _train(rank: int, ranks: int, args: argparse.Namespace) -> None:
    """One rank: print what it measured."""
    import torch
    import torch.distributed as dist

    import deepspeed
    from deepspeed.zero.sync import agreement

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=args.port
    )
    torch.set_num_threads(1)
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*given)
            finally:
                spent[0] += time.perf_counter() - start

        return run

    for name in ("exchange_ints", "all_equal", "merge"):  # the first two are a baseline's
        if hasattr(agreement, name):
            setattr(agreement, name, timed(getattr(agreement, name)))
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW"},
    }
    engine = deepspeed.initialize(model=chain(args.blocks, args.width), config=config)[0]
    control = engine.runtime.agreement
    figures = []
    for step in range(args.steps + args.warmup):
        spent[0], rounds, start = 0.0, control.rounds, time.perf_counter()
        engine.backward(engine(torch.full((2, args.width), 0.1 * step)).square().mean())
        engine.step()
        if step >= args.warmup:
            figures.append((1e3 * spent[0], control.rounds - rounds, 1e3 * (time.perf_counter() - start)))
    exposed, messages, total = (statistics.median(column) for column in zip(*figures, strict=True))
    dist.barrier()
    if rank == 0:
        units = sum(unit.movable for unit in engine.runtime.units)
        print(
            json.dumps({"exposed_ms": exposed, "comparisons": messages, "step_ms": total, "units": units}), flush=True
        )
    dist.destroy_process_group()


def _measure(checkout: Path, ranks: int, port: int, args: argparse.Namespace) -> dict[str, float]:
    """One job of ``ranks`` processes that import ``checkout``."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    shape = [
        "--blocks",
        args.blocks,
        "--width",
        args.width,
        "--steps",
        args.steps,
        "--warmup",
        args.warmup,
        "--port",
        port,
    ]
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *map(str, shape), "--ranks", str(ranks)]
    jobs = [
        subprocess.Popen([*command, "--rank", str(r)], env=environment, stdout=subprocess.PIPE, text=True)
        for r in range(ranks)
    ]
    said = [job.communicate(timeout=600)[0] for job in jobs]
    if any(job.returncode for job in jobs):
        raise SystemExit(f"a rank failed: {[job.returncode for job in jobs]}")
    return dict(json.loads(said[0].strip().splitlines()[-1]))


def _compare(args: argparse.Namespace) -> None:
    checkouts = {"this checkout": HERE, **({"baseline": args.baseline.resolve()} if args.baseline else {})}
    print("ranks  what            waits ms/step  comparisons/step  step ms   (medians of the runs)")
    for ranks in args.ranks:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for repeat in range(args.repeats):
            for index, (name, checkout) in enumerate(checkouts.items()):
                found[name].append(_measure(checkout, ranks, 29600 + (repeat * 10 + index) + ranks * 100, args))
        for name, runs in found.items():
            exposed, comparisons, total = (
                statistics.median(r[key] for r in runs) for key in ("exposed_ms", "comparisons", "step_ms")
            )
            print(f"{ranks:>5}  {name:<15} {exposed:>13.2f} {comparisons:>17.0f} {total:>8.1f}")


def _table() -> None:
    print("\nper rank and step, 1 backward: comparisons / messages / bytes")
    print("ranks  units  rows by message          merged by message       merged by habit")
    for ranks in (2, 8, 64, 512, 4096):
        for units in (34, 82):
            rounds = comparisons_by_message(units)
            costs = (by_rows(ranks, units, rounds), by_doubling(ranks, units, rounds), by_doubling(ranks, units, 1))
            print(
                f"{ranks:>5}  {units:>5}  "
                + "  ".join(f"{c.comparisons:>3} {c.messages:>7,} {c.nbytes:>11,}" for c in costs)
            )


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    for name, value in (("blocks", 24), ("width", 32), ("steps", 30), ("warmup", 8), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        _train(args.rank, args.ranks[0], args)
        return
    _compare(args)
    _table()


if __name__ == "__main__":
    main()
