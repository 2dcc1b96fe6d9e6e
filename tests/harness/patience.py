"""Limits in seconds that mean the same on a busy machine as on an idle one."""

import os
import time

SAMPLE_S = 0.1


def slowdown() -> float:
    """How many times longer than on an idle machine a process takes now: a short loop, or by the last minute's load; at
    least 1.
    """
    wall, processor = time.perf_counter(), time.thread_time()
    while time.thread_time() - processor < SAMPLE_S:
        pass
    measured = (time.perf_counter() - wall) / (time.thread_time() - processor)
    return max(1.0, measured, _load())


def _load() -> float:
    """How many processes have wanted each core in the last minute."""
    return os.getloadavg()[0] / len(os.sched_getaffinity(0))


def too_long(begun: float, seconds: float) -> bool:
    """Whether more than ``seconds`` of an idle machine have passed since the time ``begun`` of ``time.monotonic``.

    Of a load there may have been more meanwhile than the last minute's mean, or than there is now.
    """
    taken = time.monotonic() - begun
    return taken > seconds and taken > seconds * max(slowdown(), 2 * _load())
