"""``ds_bench cpu-adam``: AdamW in host memory by this package's kernel, by torch's fused one, and a loop of the same
memory traffic.

GB/s (10^9 bytes) count 28 bytes an element: weight, gradient and two moments in, weight and moments out, all fp32. The
loop moves the same bytes and computes next to nothing, so it says what the memory gives. Contenders take turns;
medians.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deepspeed.bench.common import CommandLine, check_memory, columns, count_of, params_of, spread
from deepspeed.errors import BuildError
from deepspeed.native.build import load
from deepspeed.native.spec import CPU_ADAM, OpSpec
from deepspeed.optim.host import usable
from deepspeed.optim.rules import DeepSpeedCPUAdam

BYTES = 28
ROUNDS = 9
_MOST_THREADS = 4096
OURS, TORCH, LOOP = "ours", "torch fused", "plain loop"
_STREAM = OpSpec("bench_stream", ("cpu/stream.cpp",))
_RESIDENT = 3 * 16  # bytes of memory an element: four tensors of each contender


def rate(step: Callable[[], object], numel: int) -> float:
    """GB/s of one update."""
    begin = time.perf_counter()
    step()
    return BYTES * numel / (time.perf_counter() - begin) / 1e9


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


def measure(numel: int, threads: int) -> tuple[dict[str, list[float]], str]:
    """GB/s of every round on ``threads`` threads; and why the loop cannot be measured here, if so."""
    before, missing = torch.get_num_threads(), ""
    torch.set_num_threads(threads)
    try:
        updates = {OURS: _optimizer(DeepSpeedCPUAdam, numel), TORCH: _optimizer(torch.optim.AdamW, numel, fused=True)}
        with ThreadPoolExecutor(threads) as pool:
            try:
                updates[LOOP] = loop([torch.randn(numel) for _ in range(4)], threads, pool)
            except BuildError as error:
                missing = f"{LOOP}: left out, {error}"
            rounds = [{name: update() for name, update in updates.items()} for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(before)
    return {name: [each[name] for each in rounds] for name in updates}, missing


def _threads(text: str) -> int:
    """``count_of``, up to what the runtimes below start without crashing. Raises ArgumentTypeError."""
    if (count := count_of(text)) > _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text} are too many; {_MOST_THREADS} at most")
    return count


def run(argv: list[str], *, prog: str) -> str | dict[str, Any]:
    """Measure as the command line says; a table, or facts. Raises UsageError, SystemExit."""
    parser = CommandLine(prog=prog, description=__doc__, allow_abbrev=False)
    parser.option("--params", params_of, "50M", "N", "elements, for example 8M or 1e9")
    parser.option("--threads", _threads, torch.get_num_threads(), "N", "of every contender")
    parser.switches(json="one JSON object instead of a table")
    options = parser.parse_args(argv)
    check_memory(_RESIDENT * options.params, "--params")
    rates, missing = measure(options.params, options.threads)
    results = {name: spread(values) for name, values in rates.items()}
    ratio = {name: results[OURS]["median"] / row["median"] for name, row in results.items() if name != OURS}
    kernel = "native" if usable(CPU_ADAM, torch.empty(1)) else "none: torch's own code runs (ds_report says why)"
    if options.json:
        facts = {"params": options.params, "threads": options.threads, "bytes_per_element": BYTES, "kernel": kernel}
        return {**facts, "unit": "GB/s", "results": results, "ratio": ratio}
    rows = [["GB/s", "median", "min", "max", "ours / it"]]
    for name, row in results.items():
        beside = f"{ratio[name]:.2f}" if name in ratio else ""
        rows.append([name, *(f"{row[key]:.2f}" for key in ("median", "min", "max")), beside])
    title = f"AdamW on {options.params:,} fp32 elements, threads {options.threads}, kernel {kernel}"
    return "\n".join([title, "", *columns(rows), *([missing] if missing else [])])
