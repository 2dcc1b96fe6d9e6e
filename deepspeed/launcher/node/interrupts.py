"""Signals that end a job, as calls of an ordinary function."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@contextlib.contextmanager
def signals_to(receive: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Within the block every such signal calls ``receive``, which must be safe in a handler; the caller's handlers come
    back after.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # a client's thread: its main thread keeps the signals
        return

    def handler(number: int, frame: FrameType | None) -> None:
        receive(signal.Signals(number))

    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        # Under nohup SIGHUP is ignored, and stays so.
        if number.name != "SIGHUP" or before[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
