"""What a step does besides computing: where the program waits for the device, and what of its copies is hidden."""

import collections
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parent.parent)
Span = tuple[float, float]


def union(spans: Iterable[Span]) -> float:
    """The length of what the spans cover together."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def waits(step: Callable[[], None]) -> dict[str, Any]:
    """How often one step waits for the device, and where: what torch warns of, and waits for events beside it."""
    import torch

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            events = waits_for_events(step, torch.cuda.Event)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits_of([(w.filename, w.lineno, str(w.message)) for w in seen] + events)


def waits_for_events(step: Callable[[], None], kind: Any) -> list[tuple[str, int, str]]:
    """Each wait of the host for an event of ``kind`` that had not come, in any thread: file, line, what it was."""
    seen: list[tuple[str, int, str]] = []

    def synchronize(event: Any) -> None:
        if not event.query():
            caller = sys._getframe(1)
            seen.append((caller.f_code.co_filename, caller.f_lineno, "synchronizes with an event"))
        real(event)

    real, kind.synchronize = kind.synchronize, synchronize
    try:
        step()
    finally:
        kind.synchronize = real
    return seen


def waits_of(warned: list[tuple[str, int, str]]) -> dict[str, Any]:
    """The figures of torch's warnings (file, line, text)."""
    places = collections.Counter(
        f"{os.path.relpath(file, ROOT) if file.startswith(ROOT) else os.path.basename(file)}:{line}"
        for file, line, text in warned
        if "synchroniz" in text
    )
    return {"waits_per_step": sum(places.values()), "waits": places.most_common(8)}


def overlap(step: Callable[[], None], trace: str = "") -> dict[str, Any]:
    """Two profiled steps; ``trace``: where their trace is to stay."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace or f"{folder}/trace.json")
        prof.export_chrome_trace(str(path))
        return overlap_of(json.loads(path.read_text())["traceEvents"], steps=2)


def overlap_of(events: list[dict[str, Any]], *, steps: int) -> dict[str, Any]:
    """Of a trace's events (microseconds): how busy the device is, and how much of the copies between host and device,
    and of the collectives, runs beside kernels.
    """
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    sent = [e for e in device if "nccl" in e["name"].lower()]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in device if e["cat"] == "kernel" and e not in sent]
    moved = [e for e in device if e["cat"] == "gpu_memcpy" and "DtoD" not in e["name"]]
    found: dict[str, Any] = {"kernels_per_step": len(kernels) // steps}
    every = [(e["ts"], e["ts"] + e["dur"]) for e in device]
    if every:
        length = max(stop for _, stop in every) - min(start for start, _ in every)
        found["gpu_busy"] = round(union(every) / max(length, 1e-9), 3)
    for name, of in (("copies", moved), ("collectives", sent)):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in of]
        if spans:
            hidden = union(kernels) + union(spans) - union(kernels + spans)
            found |= {
                f"{name}_ms": round(union(spans) / 1e3 / steps, 2),
                f"{name}_hidden": round(hidden / union(spans), 3),
            }
    return found
