"""Communication log: count, bytes and latency of the collectives that go through ``deepspeed.comm``.

Bandwidths follow the convention of nccl-tests: algorithm bandwidth is message bytes over time, where the message is the
larger of a call's two sides; bus bandwidth multiplies by the share of it that crosses links.
"""

import atexit
import functools
import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm.collectives import require_group
from deepspeed.comm.hang.stacks import outwards, unit_of
from deepspeed.errors import nearest_hint
from deepspeed.monitor.log import logger, rank
from deepspeed.monitor.timers import trimmed_mean

Rows = dict[str, dict[int, dict[str, Any]]]  # by op and message bytes
# How often a message goes round the ring, per nccl-tests' PERFORMANCE.md; other ops cross a link once.
_PASSES = {"all_reduce": 2, "inference_all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
_PASSES |= {"gather": 1, "scatter": 1}
_DEEP = 14  # frames between a collective and the unit that it is for
# Operations of deepspeed.comm and of engines.
KNOWN_OPS = frozenset(
    (
        *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_reduce", "all_reduce_coalesced"),
        *("all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "inference_all_reduce", "irecv"),
        *("isend", "merge", "monitored_barrier", "receive", "recv", "reduce", "reduce_scatter"),
        *("reduce_scatter_tensor", "scatter", "send"),
    )
)


def size_str(nbytes: int) -> str:
    """Format a size: ``1536`` -> ``1.5 KB``."""
    power = min((max(nbytes, 1).bit_length() - 1) // 10, 3)
    return f"{nbytes / 1024**power:.2f}".rstrip("0").rstrip(".") + f" {('B', 'KB', 'MB', 'GB')[power]}"


class CommsLog:
    """Settings and records of one process; latencies in milliseconds per (op, message bytes)."""

    def __init__(self) -> None:
        self.enabled = self.verbose = self.debug = False
        self.prof_all, self.prof_ops = True, list[str]()
        self.shown = 0  # calls in the last summary
        self._latencies_ms: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._ranks: dict[tuple[str, int], list[int]] = defaultdict(list)  # in the group of each call

    def start_profiling_comms(self) -> None:
        """Record every call from now on."""
        self.enabled, self.prof_all = True, True

    def stop_profiling_comms(self) -> None:
        """Record only calls that ask for it, and ``prof_ops``, from now on."""
        self.prof_all = False

    def wants(self, op: str, prof: bool) -> bool:
        """Tell whether a call of ``op`` is to be timed."""
        return self.enabled and (prof or self.prof_all or op in self.prof_ops)

    def started(
        self, op: str, nbytes: int, caller: str | None = None, *, ranks: int | None = None
    ) -> Callable[[], None]:
        """Start timing a message of ``nbytes``; the result, called on arrival, records it (``debug``: by caller)."""
        name = f"{op} | [Caller Func: {caller or _caller()}]" if self.debug else op
        start = time.perf_counter()

        def end() -> None:
            get_accelerator().synchronize()
            self.record(name, nbytes, (time.perf_counter() - start) * 1e3, ranks)

        return end

    def record(self, op: str, nbytes: int, latency_ms: float, ranks: int | None = None) -> None:
        """Record one call among ``ranks``; log it if ``verbose``."""
        self._latencies_ms[op][nbytes].append(latency_ms)
        if ranks is not None:
            self._ranks[op, nbytes].append(ranks)
        if self.verbose:
            logger.info("comm op %s | %s | %.3f ms", op, size_str(nbytes), latency_ms)

    def reset(self) -> None:
        """Drop all records; settings stay."""
        self._latencies_ms.clear()
        self._ranks.clear()

    def ops(self) -> list[str]:
        """Return the names of recorded ops."""
        return sorted(self._latencies_ms)

    def count(self, op: str | None = None) -> int:
        """Count recorded calls of ``op``, of all ops by default."""
        names = self.ops() if op is None else [op]
        return sum(len(calls) for name in names for calls in self._latencies_ms.get(name, {}).values())

    def get_operation_summary(self, op_name: str) -> dict[int, dict[str, Any]]:
        """Return the part of ``summary`` about one op, by message bytes; empty without a record."""
        return self.summary(dist.get_world_size() if dist.is_initialized() else 1).get(op_name, {})

    def rows(self, row: Callable[[str, int, list[float]], dict[str, Any]]) -> Rows:
        """Make a row for every op and message size, in order: size and count, then the result of ``row``."""
        table: Rows = defaultdict(dict)
        for op, sizes in sorted(self._latencies_ms.items()):
            for nbytes, calls in sorted(sizes.items()):
                size = {"msg_size_bytes": nbytes, "msg_size_str": size_str(nbytes), "count": len(calls)}
                table[op][nbytes] = size | row(op, nbytes, calls)
        return dict(table)

    def summary(self, world_size: int) -> Rows:
        """Return per op and message size: count, total and trimmed mean latency, bandwidths in Gbit/s."""

        def row(op: str, nbytes: int, calls: list[float]) -> dict[str, Any]:
            mean = trimmed_mean(calls)
            gbps = nbytes * 8 / max(mean, 1e-9) / 1e6
            passes = next((passes for start, passes in _PASSES.items() if op.startswith(start)), None)
            sizes = self._ranks.get((op, nbytes)) or [world_size]
            share = 1.0 if passes is None else passes * sum((n - 1) / n for n in sizes) / len(sizes)
            bandwidths = {"tput_avg_gbps": gbps, "busbw_avg_gbps": gbps * share}
            return {"total_latency_ms": sum(calls), "avg_latency_ms": mean} | bandwidths

        return self.rows(row)


class _Stragglers:
    """Rows of the straggler table: latency of the last rank at each call, waits beyond; ``late``: how often last."""

    def __init__(self, common: set[tuple[str, int]]) -> None:
        self._common, self.late, self.calls = common, [0] * dist.get_world_size(), 0

    def row(self, op: str, nbytes: int, calls: list[float]) -> dict[str, Any]:
        """Return a row. Collective where the ranks have made the same calls; other calls are not compared."""
        if (op, nbytes) not in self._common:
            return _against(calls, calls)
        local = torch.tensor(calls, device=get_accelerator().current_device_name(), dtype=torch.float32)
        gathered = [torch.empty_like(local) for _ in self.late]
        dist.all_gather(gathered, local)
        latencies = torch.stack(gathered).cpu()
        for rank_number in latencies.argmin(0).tolist():
            self.late[rank_number] += 1
        self.calls += len(calls)
        return _against(local.tolist(), latencies.amin(0).tolist())

    def verdict(self) -> str:
        """Describe how often each rank came last, the latest first; empty when no calls were compared."""
        order = sorted(range(len(self.late)), key=lambda r: -self.late[r])
        shares = ", ".join(f"rank {r} {self.late[r]}" for r in order[:8])
        return f"calls to which a rank came last, of {self.calls}: {shares}\n" if self.calls else ""


def _in_common() -> set[tuple[str, int]]:
    """Return the ops and sizes of which every rank has recorded the same number of calls. Collective."""
    rows = LOG.rows(lambda *_: {})
    local = {(op, nbytes): row["count"] for op, sizes in rows.items() for nbytes, row in sizes.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return {key for key, count in local.items() if all(other.get(key) == count for other in gathered)}


def _against(calls: list[float], fastest: list[float]) -> dict[str, Any]:
    least = torch.tensor(fastest, device="cpu", dtype=torch.float32)
    waits = [max(0.0, latency - best) for latency, best in zip(calls, fastest, strict=True)]
    totals = {"total_comm_lat_ms": float(least.sum()), "total_straggler_ms": sum(waits)}
    return totals | {"avg_comm_lat_ms": trimmed_mean(fastest), "avg_straggler_ms": trimmed_mean(waits)}


def _unit_and_caller() -> str:
    """Return the caller and, for a collective of an engine, the unit it is for."""
    for frame in itertools.islice(outwards(sys._getframe(1)), _DEEP):
        names, file = frame.f_code.co_varnames, frame.f_code.co_filename
        if ("unit" in names or file.endswith("unit.py")) and (title := unit_of(frame)):
            return f"{_caller()}, unit {title}"
    return _caller()


def _caller() -> str:
    """Return the name of the innermost running function outside ``deepspeed.comm`` and this folder."""
    ours = ("deepspeed.comm", "deepspeed.client.comm")
    outside = (f for f in outwards(sys._getframe()) if not str(f.f_globals.get("__name__", "")).startswith(ours))
    return next(outside).f_code.co_name


# ``deepspeed.comm.configure`` and ``log_summary`` are functions of the module, without a handle, so the one log they
# share has to live here. Engines write to it when their configuration has a ``comms_logger`` block.
LOG = CommsLog()


def begin(op: str, numel: int, dtype: torch.dtype, world_size: int) -> Callable[[], None] | None:
    """Start the clock of an engine's collective; call the result after the wait. None when the log does not want it."""
    wanted = world_size > 1 and LOG.wants(op, prof=False)
    caller = _unit_and_caller() if wanted and LOG.debug else None
    return LOG.started(op, numel * dtype.itemsize, caller, ranks=world_size) if wanted else None


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure the log; arguments win over the ``comms_logger`` block of ``deepspeed_config`` (dict or parsed)."""
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    block: Any = None
    if isinstance(deepspeed_config, Mapping):
        block = deepspeed_config.get("comms_logger")
    elif "comms_logger" in getattr(deepspeed_config, "model_fields_set", ()):
        parsed = deepspeed_config.comms_logger
        block = {k: v for k, v in parsed if k != "enabled" or k in parsed.model_fields_set}
    stated = {} if block is None else {"enabled": True, **block}  # a block without the key is a wish for the log
    stated |= {name: value for name, value in given.items() if value is not None}
    for name in () if stated.get("prof_ops") is None else stated["prof_ops"]:
        if name not in KNOWN_OPS:
            hint = nearest_hint(str(name), KNOWN_OPS) or "."
            text = "comms_logger.prof_ops names %r, which no call has unless it is given as log_name%s"
            logger.warning(text, name, hint)
    if block is not None and stated["enabled"]:
        _summarize_at_end()
    for name in given.keys() & stated.keys():
        setattr(LOG, name, list(stated[name]) if name == "prof_ops" else bool(stated[name]))


@functools.cache
def _summarize_at_end() -> None:
    """Register rank 0's table for the end of the program, unless all of it has been shown."""

    def summarize() -> None:
        if rank() == 0 and LOG.count() > LOG.shown:
            logger.info("comms_logger, rank 0:\n%s", _table(LOG.summary(int(os.environ.get("WORLD_SIZE", "1")))))

    atexit.register(summarize)


def _table(rows: Rows) -> str:
    lines: list[dict[str, Any]] = [{"op": op} | row for op, sizes in rows.items() for row in sizes.values()]
    texts = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in line.values()] for line in lines]
    return "".join("".join(f"{text:>22}" for text in line) + "\n" for line in [*map(list, lines[:1]), *texts])


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Write the tables to rank 0's standard output; with ``return_dict`` also return them on every rank.

    ``show_straggler`` is collective; compared are the ops and sizes of which all ranks have made the same calls.
    """
    require_group("log_summary")
    world_size = dist.get_world_size()
    summary, LOG.shown = LOG.summary(world_size), LOG.count()
    stragglers = _Stragglers(_in_common()) if show_straggler else None
    straggler = LOG.rows(stragglers.row) if stragglers else None
    if rank() == 0:
        sys.stdout.write(_table(summary) + _table(straggler or {}) + (stragglers.verdict() if stragglers else ""))
    metadata = {"world_size": world_size, "rank": dist.get_rank(), "timestamp": time.time()}
    result = {"summary": summary, "straggler_analysis": straggler, "metadata": metadata}
    return result if return_dict else None


# Name in ``deepspeed.comm``.
LOG_CALLS: dict[str, Callable[..., Any]] = {
    "configure": configure,
    "log_summary": log_summary,
    "reset_log": LOG.reset,
    "has_comm_data": lambda: LOG.count() > 0,
    "get_comm_operation_count": LOG.count,
    "get_logged_comm_ops": LOG.ops,
}
