"""Communication log: count, bytes and latency of the collectives that go through ``deepspeed.comm``.

Bandwidths follow the convention of nccl-tests: algorithm bandwidth is message bytes over time, where the message is the
larger of a call's two sides; bus bandwidth multiplies by the share of it that crosses links.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.device import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.observe.log import logger, rank
from deepspeed.observe.timers import trimmed_mean

# Share of the message that crosses the busiest link, of n ranks: one pass round the ring, or two (an all-reduce).
_ONE_PASS = ("all_gather", "reduce_scatter", "all_to_all")


def bus_factor(op: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, per nccl-tests' PERFORMANCE.md."""
    passes = 2 if op.startswith(("all_reduce", "inference_all_reduce")) else 1
    return passes * (world_size - 1) / world_size if passes == 2 or op.startswith(_ONE_PASS) else 1.0


def size_str(nbytes: int) -> str:
    """``1536`` -> ``1.5 KB``."""
    power = min((max(nbytes, 1).bit_length() - 1) // 10, 3)
    return f"{nbytes / 1024**power:.2f}".rstrip("0").rstrip(".") + f" {('B', 'KB', 'MB', 'GB')[power]}"


class CommsLog:
    """Settings and records of one process; latencies in milliseconds per (op, message bytes)."""

    def __init__(self) -> None:
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self._latencies_ms: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def wants(self, op: str, prof: bool) -> bool:
        """True when a call of ``op`` is to be timed."""
        return self.enabled and (prof or self.prof_all or op in self.prof_ops)

    def named(self, op: str, caller: str | None) -> str:
        """The name under which a call of ``op`` is entered: with ``debug``, each caller has its own."""
        return f"{op} | [Caller Func: {caller or _caller()}]" if self.debug else op

    def record(self, op: str, nbytes: int, latency_ms: float) -> None:
        """Add one call."""
        self._latencies_ms[op][nbytes].append(latency_ms)
        if self.verbose:
            logger.info("comm op %s | %s | %.3f ms", op, size_str(nbytes), latency_ms)

    def reset(self) -> None:
        """Forget all records; settings stay."""
        self._latencies_ms.clear()

    def ops(self) -> list[str]:
        """Names of recorded ops."""
        return sorted(self._latencies_ms)

    def count(self, op: str | None = None) -> int:
        """Recorded calls of ``op``, of all ops by default."""
        names = self.ops() if op is None else [op]
        return sum(len(calls) for name in names for calls in self._latencies_ms.get(name, {}).values())

    def has_data(self) -> bool:
        """True when something was recorded."""
        return self.count() > 0

    def _rows(self, row: Callable[[str, int, list[float]], dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
        """``row`` of every op and message size, with the size."""
        return {
            op: {
                nbytes: row(op, nbytes, calls) | {"msg_size_bytes": nbytes, "msg_size_str": size_str(nbytes)}
                for nbytes, calls in sorted(sizes.items())
            }
            for op, sizes in sorted(self._latencies_ms.items())
        }

    def summary(self, world_size: int) -> dict[str, dict[int, dict[str, Any]]]:
        """Per op and message size: count, total and trimmed mean latency, bandwidths in Gbit/s."""

        def row(op: str, nbytes: int, calls: list[float]) -> dict[str, Any]:
            mean = trimmed_mean(calls)
            gbps = nbytes * 8 / max(mean, 1e-9) / 1e6
            latencies = {"count": len(calls), "total_latency_ms": sum(calls), "avg_latency_ms": mean}
            return latencies | {"tput_avg_gbps": gbps, "busbw_avg_gbps": gbps * bus_factor(op, world_size)}

        return self._rows(row)

    def straggler(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Like ``summary``, against the fastest rank of each call. Collective: the same records on every rank."""

        def row(_op: str, _nbytes: int, calls: list[float]) -> dict[str, Any]:
            fastest = torch.tensor(calls, device=get_accelerator().current_device_name())
            dist.all_reduce(fastest, op=dist.ReduceOp.MIN)
            waits = [max(0.0, mine - least) for mine, least in zip(calls, fastest.tolist(), strict=True)]
            return {
                "count": len(calls),
                "total_comm_lat_ms": float(fastest.sum()),
                "total_straggler_ms": sum(waits),
                "avg_comm_lat_ms": trimmed_mean(fastest.tolist()),
                "avg_straggler_ms": trimmed_mean(waits),
            }

        return self._rows(row)


def _caller() -> str:
    """Name of the innermost function outside ``deepspeed.comm`` that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("deepspeed.comm"):
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else "unknown"


# ``deepspeed.comm.configure`` and ``log_summary`` are functions of the module, without a handle, so the one log they
# share has to live here. Engines write to it when their configuration has a ``comms_logger`` block.
LOG = CommsLog()


def started(name: str, nbytes: int) -> Callable[[], None]:
    """A message of ``nbytes`` sets out: what to call when it has arrived, which enters it under ``name``."""
    start = time.perf_counter()

    def end() -> None:
        get_accelerator().synchronize()
        LOG.record(name, nbytes, (time.perf_counter() - start) * 1e3)

    return end


def begin(op: str, numel: int, dtype: torch.dtype, world_size: int) -> Callable[[], None] | None:
    """An engine issues a collective: what to call when it was waited for, None when the log does not want it."""
    wanted = world_size > 1 and LOG.wants(op, prof=False)
    return started(LOG.named(op, None), numel * dtype.itemsize) if wanted else None


class TimedWork:
    """An asynchronous call in flight; its latency is recorded when it is waited for."""

    def __init__(self, work: Any, end: Callable[[], None]) -> None:
        self._work, self._end = work, end

    def wait(self, *args: Any) -> Any:
        """Wait for the collective, then record it."""
        result = self._work.wait(*args)
        self._end()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Settings of the log; arguments win over the ``comms_logger`` block of ``deepspeed_config`` (dict or parsed)."""
    mapping = isinstance(deepspeed_config, Mapping)
    block = deepspeed_config.get("comms_logger") if mapping else getattr(deepspeed_config, "comms_logger", None)
    stated = {} if block is None else dict(block)
    if isinstance(block, Mapping):
        stated.setdefault("enabled", True)  # a block without the key is a wish for the log
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    stated |= {name: value for name, value in given.items() if value is not None}
    for name in given.keys() & stated.keys():
        setattr(LOG, name, list(stated[name]) if name == "prof_ops" else bool(stated[name]))


_SUMMARY = ("msg_size_str", "count", "total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")
_STRAGGLER = ("msg_size_str", "count", "total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms")


def _table(summary: dict[str, dict[int, dict[str, Any]]], columns: tuple[str, ...]) -> str:
    rows = [(op, *(row[column] for column in columns)) for op, sizes in summary.items() for row in sizes.values()]
    texts = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return "".join("".join(f"{cell:>22}" for cell in row) + "\n" for row in [["op", *columns], *texts])


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Write the tables to rank 0's standard output; with ``return_dict`` also return them on every rank.

    ``show_straggler`` is collective: every rank must call it with the same recorded calls.
    """
    if not dist.is_initialized():
        raise UsageError("log_summary needs a process group; call deepspeed.init_distributed() first.")
    world_size = dist.get_world_size()
    summary = LOG.summary(world_size)
    straggler = LOG.straggler() if show_straggler else None
    if rank() == 0:
        sys.stdout.write(_table(summary, _SUMMARY) + (_table(straggler, _STRAGGLER) if straggler is not None else ""))
    metadata = {"world_size": world_size, "rank": dist.get_rank(), "timestamp": time.time()}
    result = {"summary": summary, "straggler_analysis": straggler, "metadata": metadata}
    return result if return_dict else None


# Name in ``deepspeed.comm``.
LOG_CALLS: dict[str, Callable[..., Any]] = {
    "configure": configure,
    "log_summary": log_summary,
    "reset_log": LOG.reset,
    "has_comm_data": LOG.has_data,
    "get_comm_operation_count": LOG.count,
    "get_logged_comm_ops": LOG.ops,
}
