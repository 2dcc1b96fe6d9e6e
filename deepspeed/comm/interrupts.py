"""What signal handlers raise comes between the engine's operations, never in the middle of one.

Python raises Ctrl-C, and torch the death of a data loader's worker, from a signal handler: wherever the main thread
is, also between the two halves of an exchange with the other ranks, which then take half a message for a whole one, or
in the middle of an update. While an engine lives such a handler is therefore asked again a little later, until the
program is in the client's code or calls the engine. Nothing is recorded for this: where the program is, its stack says.
The client's code that an update calls (its optimizer, a schedule, a monitor) is part of the update.
"""

import _thread
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from deepspeed.comm.hang.stacks import origin, outwards

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What must not be left half done; other parts (monitor/, accelerator/) belong to what calls them, and so do these two.
_PARTS = "engine/ comm/ zero/ tier/ optim/ ops/ pipe/ tensor/ moe/ reallocate/"
_RUNTIME = tuple(_PACKAGE + part for part in _PARTS.split())
_CALLED = (_PACKAGE + "engine/initialize.py", _PACKAGE + "comm/mesh/")
# Not so: a checkpoint has its name when it is whole, and an engine that has loaded half of one says so.
_SAVES = (_PACKAGE + "engine/checkpoint.py", _KEEPER := _PACKAGE + "client/elastic.py")
_ENGINE = _PACKAGE + "engine/engine.py"
_UPDATES = tuple(_PACKAGE + part for part in ("zero/step.py", "zero/update/", "optim/"))
_LOADERS = f"torch{os.sep}utils{os.sep}data{os.sep}"
_DROPPING = (weakref.finalize.__call__.__code__,)
_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.1
_PATIENCE_S = 1.0  # one Ctrl-C may come twice, by way of the terminal and of the launcher

Handler = Callable[[int, FrameType | None], object]


def _inside(frame: FrameType | None) -> bool:
    """Return whether the innermost telling frame is the runtime's, a finalizer's, or the client's amid an update."""
    frames = [*outwards(frame)]
    if any(f.f_code in _DROPPING or f.f_code.co_name == "__del__" for f in frames):
        return True
    for place, caller in enumerate(frames):
        file = caller.f_code.co_filename
        owner = origin(file)
        if owner == "user" or (owner == "torch" and _LOADERS in file) or file.startswith(_SAVES):
            return _updating(frames[place:])
        if file.startswith(_RUNTIME) and not file.startswith(_CALLED):
            return True
    return False


def _updating(frames: list[FrameType]) -> bool:
    for frame in frames:
        file = frame.f_code.co_filename
        if file == _KEEPER:
            return False  # saves behind an update
        if file.startswith(_UPDATES) or (file == _ENGINE and frame.f_code.co_name == "step"):
            return True
    return False


class Postponed:
    """Call ``handler`` of the signal ``number`` when the main thread is not inside the runtime.

    A second Ctrl-C, a second later, comes through at once.
    """

    def __init__(self, number: int, handler: Handler) -> None:
        self.number, self.handler = number, handler
        self.waits, self._since, self._pause_s = False, 0.0, _PAUSE_S
        self._asks = self._asked = self._over = False
        self._lock = threading.Lock()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        asked, self._asked = self._asked, False
        if asked and not self.waits and number == signal.SIGINT:
            return  # the engine was called meanwhile
        now = time.monotonic()
        impatient = self.waits and not asked and number == signal.SIGINT and now - self._since > _PATIENCE_S
        # Put back by the program when the engine had ended, or called by a handler of its own: its author's affair.
        plain = self._over or not self._is_placed()
        if impatient or plain or not _inside(frame):
            self.come_through(frame)
            return
        if not self.waits:
            self.waits, self._since, self._pause_s = True, now, _PAUSE_S
        if not self._asks:
            self._asks = True
            try:
                _thread.start_new_thread(self._ask_again, ())  # takes no lock that the main thread may have
            except RuntimeError:  # no room for a thread; the next call of the engine raises what waits
                self._asks = False

    def come_through(self, frame: FrameType | None = None) -> None:
        """Call the handler, which may raise."""
        self.waits = False
        self.handler(self.number, frame)

    def _ask_again(self) -> None:
        while True:
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
            with self._lock:
                self._asks = False
                if not self.waits or self._over:
                    return
                if self._is_placed():
                    self._asked = True
                    main = threading.main_thread().ident or 0
                    signal.pthread_kill(main, self.number)  # also ends a sleep of the client's
                    return
                self._asks = True  # while the program has a handler of its own, that one must not hear it

    def end(self) -> None:
        """Give the signal back to ``handler``."""
        with self._lock:
            self._over = True
        if self._is_placed():
            signal.signal(self.number, self.handler)

    def _is_placed(self) -> bool:
        handler: object = signal.getsignal(self.number)
        return handler is self


def _raises(number: int, handler: Any) -> bool:
    """Return whether ``handler`` is Python's for Ctrl-C or torch's for workers; any other is its author's affair."""
    if number == signal.SIGINT:
        return handler is signal.default_int_handler
    return getattr(handler, "__module__", None) == "torch.utils.data._utils.signal_handling"


_PLACED: dict[int, Postponed] = {}  # of this process, whose the handlers are


def at_door() -> None:
    """Raise postponed signals as the client calls the engine; postpone handlers that are new (torch's of a worker)."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGCHLD, signal.SIGINT):
        handler, before = signal.getsignal(number), _PLACED.get(number)
        if isinstance(handler, Postponed) and handler is not before:
            handler = handler.handler  # put back by the program when the engine had ended
        if _raises(number, handler):
            placed = Postponed(number, handler)  # type: ignore[arg-type]  # a function, as just seen
            if before is not None:  # replaced by the program
                before.end()
                placed.waits = before.waits
            _PLACED[number] = placed
            signal.signal(number, placed)
    for postponed in _PLACED.values():
        if postponed.waits:
            postponed.come_through()


def give_back() -> None:
    """Restore the handlers as an engine ends; raise postponed signals. Another engine's next call postpones again."""
    if threading.current_thread() is threading.main_thread():
        ended = [*_PLACED.values()]
        _PLACED.clear()
        for postponed in ended:
            postponed.end()
        for postponed in ended:
            if postponed.waits:
                postponed.come_through()
