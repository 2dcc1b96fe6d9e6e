"""The thread that updates behind the program is on the program's device before it asks anything of it: what a thread
that has chosen no device asks makes a context on device 0, half a gigabyte of every rank's.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from deepspeed.device import NullEvent, NullStream, set_accelerator
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
