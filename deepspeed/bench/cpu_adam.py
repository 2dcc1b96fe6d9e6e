"""``ds_bench cpu-adam``: AdamW in host memory by this package's kernel, by torch's fused one, and a loop of the same
memory traffic.

GB/s (10^9 bytes) count 28 bytes an element: weight, gradient and two moments in, weight and moments out, all fp32. The
loop moves the same bytes and computes next to nothing, so it says what the memory gives. Contenders take turns;
medians.
"""

import argparse
import contextlib
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deepspeed.bench.common import CommandLine, check_memory, count_of, params_of, spread
from deepspeed.errors import BuildError
from deepspeed.native.build import load
from deepspeed.native.ops import CPU_ADAM
from deepspeed.native.spec import OpSpec
from deepspeed.optim.host import usable
from deepspeed.optim.named import DeepSpeedCPUAdam

BYTES = 28
ROUNDS = 9
_MOST_THREADS = 4096
OURS, TORCH, LOOP = "ours", "torch fused", "plain loop"
_STREAM = OpSpec("bench_stream", ("cpu/stream.cpp",))
_RESIDENT = 3 * 16  # bytes of memory an element: four tensors of each contender

Contenders = dict[str, Callable[[], float]]


def rate(step: Callable[[], object], numel: int) -> float:
    """GB/s of one update."""
    begin = time.perf_counter()
    step()
    return BYTES * numel / (time.perf_counter() - begin) / 1e9


@contextlib.contextmanager
def contenders(numel: int, threads: int) -> Iterator[tuple[Contenders, str]]:
    """What can be measured here, each call one update, on ``threads`` threads; and why the loop cannot, if so."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        updates = {OURS: _optimizer(DeepSpeedCPUAdam, numel), TORCH: _optimizer(torch.optim.AdamW, numel, fused=True)}
        with ThreadPoolExecutor(threads) as pool:
            try:
                updates[LOOP] = loop([torch.randn(numel) for _ in range(4)], threads, pool)
                yield updates, ""
            except BuildError as error:
                yield updates, str(error)
    finally:
        torch.set_num_threads(before)


def _optimizer(cls: Callable[..., torch.optim.Optimizer], numel: int, **settings: Any) -> Callable[[], float]:
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    optimizer = cls([param], lr=1e-3, weight_decay=0.01, **settings)
    optimizer.step()
    return lambda: rate(optimizer.step, numel)


def loop(buffers: list[torch.Tensor], threads: int, pool: ThreadPoolExecutor) -> Callable[[], float]:
    """Adds the second of four flat tensors to the others. Raises BuildError where there is no compiler."""
    stream = load(_STREAM).ds_stream
    numel = buffers[0].numel()
    each = -(-numel // threads)

    def piece(start: int) -> None:
        stream(ctypes.c_int64(min(each, numel - start)), *(ctypes.c_void_p(b.data_ptr() + 4 * start) for b in buffers))

    return lambda: rate(lambda: list(pool.map(piece, range(0, numel, each))), numel)


def measure(updates: Contenders) -> dict[str, list[float]]:
    """GB/s of every round; within one, contenders take turns."""
    rates: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(ROUNDS):
        for name, update in updates.items():
            rates[name].append(update())
    return rates


def _threads(text: str) -> int:
    """``count_of``, up to what the runtimes below start without crashing. Raises ArgumentTypeError."""
    if (count := count_of(text)) > _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text} are too many; {_MOST_THREADS} at most")
    return count


def run(argv: list[str], *, prog: str) -> str:
    """Measure as the command line says; a table, or JSON. Raises UsageError, SystemExit."""
    threads = torch.get_num_threads()
    parser = CommandLine(prog, __doc__)
    parser.option("--params", params_of, 50_000_000, "N", "elements, for example 8M or 1e9 (default 50M)")
    parser.option("--threads", _threads, threads, "N", f"of every contender (default {threads}, torch's)")
    parser.switches(json="one JSON object instead of a table")
    options = parser.parse_args(argv)
    check_memory(_RESIDENT * options.params, "--params")
    with contenders(options.params, options.threads) as (updates, missing):
        results = {name: spread(values) for name, values in measure(updates).items()}
    ratio = {name: results[OURS]["median"] / row["median"] for name, row in results.items() if name != OURS}
    kernel = "native" if usable(CPU_ADAM, torch.empty(1)) else "none: torch's own code runs (ds_report says why)"
    facts = {"params": options.params, "threads": options.threads, "bytes_per_element": BYTES, "kernel": kernel}
    if options.json:
        return json.dumps({**facts, "unit": "GB/s", "results": results, "ratio": ratio}, indent=1)
    lines = [
        f"AdamW on {options.params:,} fp32 elements, threads {options.threads}, kernel {kernel}",
        "",
        f"{'GB/s':<12} {'median':>8} {'min':>8} {'max':>8} {'ours / it':>10}",
    ]
    for name, row in results.items():
        beside = f"{ratio[name]:.2f}" if name in ratio else ""
        lines.append(f"{name:<12} {row['median']:>8.2f} {row['min']:>8.2f} {row['max']:>8.2f} {beside:>10}".rstrip())
    return "\n".join([*lines, *([f"{LOOP}: left out, {missing}"] if missing else [])])
