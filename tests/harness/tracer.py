"""Which functions of the package an act passes through: a profiler that keeps the way from file to file."""

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import deepspeed

ROOT = os.path.dirname(os.path.abspath(deepspeed.__file__)) + os.sep


class Step(NamedTuple):
    """A function of the package: its file below the package, and its name without what it is nested in."""

    file: str
    function: str


class Call(NamedTuple):
    """A call of a function, and the functions of the package it was reached through, outermost first, itself last."""

    step: Step
    via: tuple[Step, ...]


def _step(frame: FrameType) -> Step | None:
    path = frame.f_code.co_filename
    return Step(path[len(ROOT) :], frame.f_code.co_name) if path.startswith(ROOT) else None


class Tracer:
    """Records calls between ``start()`` and ``stop()``, in this thread and in those that begin meanwhile."""

    def __init__(self, functions: set[str]) -> None:
        self._functions = functions
        self.calls: list[Call] = []

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name not in self._functions or not (step := _step(frame)):
            return
        via = [step]
        outer = frame.f_back
        while outer is not None:
            if passed := _step(outer):
                via.append(passed)
            outer = outer.f_back
        self.calls.append(Call(step, tuple(reversed(via))))

    def start(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def of(self, act: Callable[[], object]) -> list[Call]:
        """The calls that ``act`` makes."""
        self.start()
        try:
            act()
        finally:
            self.stop()
        return self.calls


def missing(page: list[Step], calls: list[Call]) -> str:
    """Why ``calls`` do not go the way of ``page``, or an empty text.

    They do when the functions of the page are called in its order, each reached, from the first of them that it is
    called by, through files of the page only.
    """
    files = {step.file for step in page}
    at = 0
    for step in page:
        while at < len(calls) and calls[at].step != step:
            at += 1
        if at == len(calls):
            return f"{step.file} {step.function} is not called, or not in this place"
        via = calls[at].via
        first = next(index for index, passed in enumerate(via) if passed in page)
        inside = via[first:]
        if other := [passed for passed in inside if passed.file not in files]:
            return f"{step.file} {step.function} is reached through {other}, which the page leaves out"
        at += 1
    return ""
