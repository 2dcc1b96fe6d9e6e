"""``ds_bench cpu-adam``: AdamW in host memory by this package's kernel and torch's, beside a loop of that traffic.

GB/s (10^9 bytes) count 28 bytes an element: weight, gradient and two moments in, weight and moments out, all fp32. The
loop moves the same bytes and computes next to nothing: what the memory gives. Contenders take turns.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deepspeed.accelerator.native.build import load
from deepspeed.accelerator.native.spec import CPU_ADAM, OpSpec
from deepspeed.errors import BuildError
from deepspeed.optim.host import usable
from deepspeed.optim.rules import DeepSpeedCPUAdam
from deepspeed.tools.bench.common import check_memory, spread, titled

BYTES = 28
ROUNDS = 9
OURS, TORCH, LOOP = "ours", "torch fused", "plain loop"
_STREAM = OpSpec("bench_stream", ("cpu/stream.cpp",))
_RESIDENT = 3 * 16  # bytes of memory an element: four tensors of each contender


def rate(step: Callable[[], object], numel: int) -> float:
    """Return the GB/s of one update."""
    begin = time.perf_counter()
    step()
    return BYTES * numel / (time.perf_counter() - begin) / 1e9


def _optimizer(cls: Callable[..., torch.optim.Optimizer], numel: int, **settings: Any) -> Callable[[], object]:
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    step = cls([param], lr=1e-3, weight_decay=0.01, **settings).step
    step()
    return step


def loop(buffers: list[torch.Tensor], threads: int, pool: ThreadPoolExecutor) -> Callable[[], object]:
    """Return a loop of Adam's memory traffic over four flat tensors. Raises BuildError where there is no compiler."""
    stream = load(_STREAM).ds_stream
    numel = buffers[0].numel()
    chunk = -(-numel // threads)

    def piece(start: int) -> None:
        stream(ctypes.c_int64(min(chunk, numel - start)), *(ctypes.c_void_p(b.data_ptr() + 4 * start) for b in buffers))

    return lambda: list(pool.map(piece, range(0, numel, chunk)))


def rates_of(numel: int, threads: int) -> tuple[dict[str, list[float]], str]:
    """Return GB/s of every round on ``threads`` threads; and why the loop cannot be measured here, if so."""
    before, missing = torch.get_num_threads(), ""
    torch.set_num_threads(threads)
    try:
        updates = {OURS: _optimizer(DeepSpeedCPUAdam, numel), TORCH: _optimizer(torch.optim.AdamW, numel, fused=True)}
        with ThreadPoolExecutor(threads) as pool:
            try:
                updates[LOOP] = loop([torch.randn(numel) for _ in range(4)], threads, pool)
            except BuildError as error:
                missing = f"{LOOP}: left out, {error}"
            rounds = [{name: rate(update, numel) for name, update in updates.items()} for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(before)
    return {name: [rates[name] for rates in rounds] for name in updates}, missing


def measure(plan: argparse.Namespace) -> dict[str, Any]:
    """Return rates by contender, and their ratios; ``plan.missing`` tells what was not measured. Raises UsageError."""
    check_memory(_RESIDENT * plan.params, "--params")
    plan.threads = plan.threads or torch.get_num_threads()
    rates, plan.missing = rates_of(plan.params, plan.threads)
    results = {name: spread(values) for name, values in rates.items()}
    ratio = {name: results[OURS]["median"] / row["median"] for name, row in results.items() if name != OURS}
    kernel = "native" if usable(CPU_ADAM, torch.empty(1)) else "none: torch's own code runs (ds_report says why)"
    facts = {"params": plan.params, "threads": plan.threads, "bytes_per_element": BYTES, "kernel": kernel}
    return {**facts, "unit": "GB/s", "results": results, "ratio": ratio}


def as_text(facts: dict[str, Any], plan: argparse.Namespace) -> str:
    rows: list[list[str | float]] = [["GB/s", "median", "min", "max", "ours / it"]]
    for name, row in facts["results"].items():
        rows.append([name, row["median"], row["min"], row["max"], facts["ratio"].get(name, "")])
    title = f"AdamW on {plan.params:,} fp32 elements, threads {plan.threads}, kernel {facts['kernel']}"
    return titled(title, rows, *filter(None, [plan.missing]))
