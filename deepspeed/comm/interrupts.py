"""What signal handlers raise comes between the engine's operations, never in the middle of one.

Python raises Ctrl-C, and torch the death of a data loader's worker, from a signal handler: wherever the main thread
is, also between the two halves of an exchange with the other ranks, which then take half a message for a whole one, or
in the middle of an update. While an engine lives such a handler is therefore asked again a little later, until the
program is in the client's code or calls the engine. Nothing is recorded for this: where the program is, its stack says.
"""

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from deepspeed.comm.hang.stacks import origin, outwards

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What must not be left half done. Saving is not among it: a checkpoint has its name when it is whole.
_RUNTIME = tuple(
    _PACKAGE + part
    for part in ("engine", "comm/", "zero/", "tier/", "optim/", "ops/", "precision/", "pipe/", "tensor/", "moe/")
)
_LOADERS = f"torch{os.sep}utils{os.sep}data{os.sep}"
_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.1
_PATIENCE_S = 1.0  # one Ctrl-C may come twice, by way of the terminal and of the launcher

Handler = Callable[[int, FrameType | None], object]


def _inside(frame: FrameType | None) -> bool:
    """Whether the innermost frame that is neither torch's nor Python's is one of the runtime."""
    for each in outwards(frame):
        file = each.f_code.co_filename
        whose = origin(file)
        if whose == "user" or (whose == "torch" and _LOADERS in file):
            return False
        if whose == "deepspeed":
            return file.startswith(_RUNTIME)
    return False


class Postponed:
    """``handler`` of the signal ``number``, called when the main thread is not inside the runtime.

    A second Ctrl-C, a second later, comes through at once.
    """

    def __init__(self, number: int, handler: Handler) -> None:
        self.number, self.handler = number, handler
        self.waits, self._since, self._pause_s = False, 0.0, _PAUSE_S
        self._asks = self._asked = self._over = False
        self._thread, self._lock = threading.get_ident(), threading.Lock()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        asked, self._asked = self._asked, False
        if asked and not self.waits and number == signal.SIGINT:
            return  # the engine was called meanwhile
        now = time.monotonic()
        impatient = self.waits and not asked and number == signal.SIGINT and now - self._since > _PATIENCE_S
        if impatient or not _inside(frame):
            self.come_through(frame)
            return
        if not self.waits:
            self.waits, self._since, self._pause_s = True, now, _PAUSE_S
        if not self._asks:
            self._asks = True
            _thread.start_new_thread(self._ask_again, ())  # takes no lock that the main thread may have

    def come_through(self, frame: FrameType | None = None) -> None:
        """Call the handler, which may raise."""
        self.waits = False
        self.handler(self.number, frame)

    def _ask_again(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
        with self._lock:
            self._asks = False
            if self.waits and not self._over:
                self._asked = True
                signal.pthread_kill(self._thread, self.number)  # also ends a sleep of the client's

    def end(self) -> None:
        """Give the signal back to ``handler``."""
        with self._lock:
            self._over = True
        handler: object = signal.getsignal(self.number)
        if handler is self:
            signal.signal(self.number, self.handler)


def _raises(number: int, handler: Any) -> bool:
    """Whether ``handler`` is Python's for Ctrl-C or torch's for workers; any other is its author's affair."""
    if number == signal.SIGINT:
        return handler is signal.default_int_handler
    return getattr(handler, "__module__", None) == "torch.utils.data._utils.signal_handling"


_PLACED: dict[int, Postponed] = {}  # of this process, whose the handlers are


def at_door() -> None:
    """The client calls the engine: what has waited is raised, and handlers that are new (torch's comes with the first
    worker) are postponed from now on.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGCHLD, signal.SIGINT):
        if _raises(number, handler := signal.getsignal(number)):
            _PLACED[number] = Postponed(number, handler)  # type: ignore[arg-type]  # a function, as just seen
            signal.signal(number, _PLACED[number])
    for each in _PLACED.values():
        if each.waits:
            each.come_through()


def give_back() -> None:
    """An engine has ended; what has waited is raised. If another lives, its next call postpones the handlers again."""
    if threading.current_thread() is threading.main_thread():
        ended = [*_PLACED.values()]
        _PLACED.clear()
        for each in ended:
            each.end()
        for each in ended:
            if each.waits:
                each.come_through()
