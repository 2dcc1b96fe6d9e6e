"""Times of things that are done again and again, and the straight lines through them."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from deepspeed.accelerator.device import Accelerator

ROUNDS = 9
_TURN_S = 0.01  # of one thing before the next has its turn
_HOST_TURN_S = 0.05  # on the host, which others use in slices of milliseconds, and whose share is what it gives
_MOST = 200  # runs that a program may launch ahead of the device without waiting
_AHEAD_S = 0.005  # that a device is kept busy while it is given short kernels
_LEAST = 1e-9  # constants are positive
Name = TypeVar("Name", bound=Hashable)


class Clock:
    """Time work on the current device without the program's own time: the device has something long to do while it is
    given the work. On the CPU work is done when it is called.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ballast: list[torch.Tensor] = []
        self._times = 0
        self._turn_s, self._most = _HOST_TURN_S, round(_HOST_TURN_S / 1e-6)
        if not accelerator.is_synchronized_device():
            self._turn_s, self._most = _TURN_S, _MOST
            self._ballast = [torch.ones(4096, 4096, device=accelerator.current_device_name()) for _ in range(3)]
            once = min(self._timed(self._press, 1) for _ in range(3))
            self._times = max(1, round(_AHEAD_S / once))

    def _press(self) -> None:
        torch.mm(self._ballast[0], self._ballast[1], out=self._ballast[2])

    def _timed(self, run: Callable[[], Any], times: int) -> float:
        start, stop = (self._accelerator.Event(enable_timing=True) for _ in range(2))
        for _ in range(self._times):
            self._press()
        start.record()
        for _ in range(times):
            run()
        stop.record()
        self._accelerator.synchronize()
        return float(start.elapsed_time(stop)) / 1e3 / times

    def alternating(self, cases: Mapping[Any, Callable[[], Any]], rounds: int = ROUNDS) -> dict[Any, float]:
        """Return the seconds of one run of each case: the median of ``rounds``, in which the cases take turns, every
        other round backwards, so that a machine that is busy for a while is so for all of them.
        """
        times = {}
        for name, run in cases.items():
            run()  # the first one makes what the others find
            times[name] = max(1, min(self._most, int(self._turn_s / max(self._timed(run, 1), _LEAST))))
        return alternating({name: self._turn(run, times[name]) for name, run in cases.items()}, rounds)

    def _turn(self, run: Callable[[], Any], times: int) -> Callable[[], float]:
        return lambda: self._timed(run, times)


def alternating(cases: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, float]:
    """Return the median of ``rounds`` values of each case; the cases take turns."""
    findings: dict[Name, list[float]] = {name: [] for name in cases}
    for index in range(rounds):
        for name in list(cases)[:: -1 if index % 2 else 1]:
            findings[name].append(cases[name]())
    return {name: statistics.median(values) for name, values in findings.items()}


def wall(run: Callable[[], Any], times: int) -> float:
    """Return the program's seconds for one of ``times`` runs."""
    begin = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - begin) / times


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit (a, b) of ``seconds = a + b size``, both positive, with the least squares of relative errors."""
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    slope, start = np.polyfit(x, y, 1, w=1 / y) if len({*sizes}) > 1 else (0.0, y.mean())
    if start <= 0:  # through the origin then
        slope, start = np.sum(x / y) / np.sum((x / y) ** 2), _LEAST
    return float(start), max(float(slope), _LEAST / max(sizes))
