"""The thread that updates behind the program is on the program's device before it asks anything of it: what a thread
that has chosen no device asks makes a context on device 0, half a gigabyte of every rank's.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed.accelerator.device import NullEvent, NullStream, set_accelerator
from deepspeed.errors import UsageError
from deepspeed.tier.behind import Worker
from deepspeed.tier.transfer import ARRIVED, Transfer
from tests.harness.devices import TwoDevices


class _PerThread(TwoDevices):
    """As the drivers have it: every thread begins on device 0, and chooses for itself."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    def current_device(self) -> int:
        return getattr(self._of_thread, "index", 0)

    def set_device(self, device_index: int) -> None:
        super().set_device(device_index)
        self._of_thread.index = device_index

    @contextlib.contextmanager
    def device(self, device_index: Any = None) -> Iterator[None]:
        before = self.current_device()
        self._of_thread.index = device_index
        yield
        self._of_thread.index = before

    def Event(self, **_: Any) -> NullEvent:
        return NullEvent()

    def urgent_stream(self) -> NullStream:
        return NullStream()

    def current_stream(self, _: Any = None) -> NullStream:
        return NullStream()

    def stream(self, _: Any) -> Any:
        return contextlib.nullcontext()


class _Data(Transfer):
    """Says on which device it was asked whether it has come."""

    def __init__(self, accelerator: _PerThread) -> None:
        self.nbytes, self.accelerator, self.asked = 0, accelerator, list[tuple[str, int]]()

    def wait(self) -> None:
        """It has come."""

    def done(self) -> bool:
        self.asked.append((threading.current_thread().name, self.accelerator.current_device()))
        return True


def test_the_thread_of_updates_is_on_its_device_before_it_asks_for_data() -> None:
    accelerator = _PerThread()
    set_accelerator(accelerator)
    try:
        accelerator.set_device(1)
        data, worker = _Data(accelerator), Worker(torch.device("cuda", 1))
        for _ in range(2):  # what a turn puts back, it puts back to that, too
            worker.hand_over(lambda: ARRIVED, after=data).wait()
        worker.forget()
    finally:
        set_accelerator(None)
    assert data.asked and set(data.asked) == {("deepspeed-update", 1)}


def test_of_the_cpu_there_is_nothing_to_choose() -> None:
    worker, took = Worker(torch.device("cpu")), list[str]()

    def call() -> Transfer:
        took.append(threading.current_thread().name)
        return ARRIVED

    worker.hand_over(call).wait()
    worker.forget()
    assert took == ["deepspeed-update"]


class _Gate(NullEvent):
    """An event whose record takes until it is let through; ``Event()`` of the accelerator below makes nothing else."""

    closed = threading.Event()
    reached = threading.Event()

    def record(self, stream: Any = None) -> None:
        if threading.current_thread().name == "deepspeed-update":
            _Gate.reached.set()
            assert _Gate.closed.wait(30)


class _WithGates(_PerThread):
    def Event(self, **_: Any) -> NullEvent:
        return _Gate()


class _Held:
    """What a call keeps alive."""


def test_a_turn_has_ended_when_its_call_has_and_not_before() -> None:
    """A real thread, held up in the call: whoever asks is told no, and whoever waits goes on waiting."""
    worker, begun, gate, order = Worker(torch.device("cpu")), threading.Event(), threading.Event(), list[str]()

    def call() -> Transfer:
        begun.set()
        assert gate.wait(30)
        order.append("the call has ended")
        return ARRIVED

    turn = worker.hand_over(call)
    assert begun.wait(30) and not turn.done()

    def wait() -> None:
        turn.wait()
        order.append("the wait has ended")

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and not turn.done() and not order
    gate.set()
    waiting.join(30)
    worker.forget()
    assert turn.done() and order == ["the call has ended", "the wait has ended"]


def test_a_turn_has_ended_when_what_it_launched_has_its_event_and_nothing_is_kept_alive() -> None:
    accelerator, held = _WithGates(), _Held()
    gone = weakref.ref(held)
    set_accelerator(accelerator)
    _Gate.closed.clear()
    _Gate.reached.clear()
    try:
        worker = Worker(torch.device("cuda", 0))

        def call(kept: _Held = held) -> Transfer:
            return ARRIVED

        turn = worker.hand_over(call)
        del held, call
        assert _Gate.reached.wait(30) and not turn.done()  # the event that others wait for is not recorded yet
        _Gate.closed.set()
        turn.wait()
        assert turn.done() and gone() is None
        worker.forget()
    finally:
        _Gate.closed.set()
        set_accelerator(None)


def test_a_turn_that_fails_has_ended_too_and_the_next_is_not_taken() -> None:
    worker, took = Worker(torch.device("cpu")), list[int]()

    def fail() -> Transfer:
        raise OSError("planted")

    def call() -> Transfer:
        took.append(1)
        return ARRIVED

    first, second = worker.hand_over(fail), worker.hand_over(call)
    for turn in (first, second):
        with pytest.raises(UsageError, match="an update that went on behind the program has failed .*planted"):
            turn.wait()
        assert turn.done()
    worker.forget()
    assert not took
