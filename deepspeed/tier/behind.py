"""A thread of the program's own, for work that may go on beside it: kernels called by ctypes leave it the interpreter.

[Note: behind] The program hands over a call and goes on with a ``Turn``. What a turn writes and reads nobody else
touches until somebody has waited for it: a wait of the host until the call has returned, and one of the stream that
asks for what the call has put on streams. Of those whose data have come the one in the first ``place`` is taken: the
next forward needs it first. Gradients come in the other order, beside a backward that the program is far ahead of.
"""

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.tier.transfer import ARRIVED, Transfer


class Turn(Transfer):
    """Call handed to the worker, for data that come with ``after``. ``wait`` raises UsageError if this call, or one
    made before, has failed, and in a forked process, where nobody makes it.
    """

    _event: Any = None

    def __init__(self, worker: "Worker", call: Callable[[], Transfer], place: int, after: Transfer) -> None:
        self.place, self.after = place, after
        self._worker, self._call, self._pid = worker, call, os.getpid()
        self._home, self._begin = get_accelerator().current_stream(), get_accelerator().Event()
        self._begin.record(self._home)
        self._ended = threading.Event()

    def take(self) -> None:
        """Make the call in the worker's thread, on its stream, behind the work launched before it was handed over."""
        accelerator, worker = get_accelerator(), self._worker
        try:
            if worker.failure is None:
                with torch.no_grad(), accelerator.stream(worker.stream):
                    worker.stream.wait_event(self._begin)
                    self._call().wait()
                    event = accelerator.Event()
                    event.record(worker.stream)
                    self._event = event
        except BaseException as error:  # the program hears of it when it waits
            worker.failure = error
        finally:
            del self._call  # with all that it keeps alive
            self._ended.set()

    def wait(self) -> None:
        if self._worker.inside():
            return
        if not self.done() and os.getpid() != self._pid:
            raise UsageError("a forked process cannot read what its parent is updating; fork before step()")
        self._until_ended()
        self._worker.check()
        if self._event is not None:  # else it was never taken, and why is forgotten
            for stream in (self._home, get_accelerator().current_stream()):
                stream.wait_event(self._event)

    def _until_ended(self) -> None:
        self._ended.wait()

    def done(self) -> bool:
        return self._ended.is_set()

    def failed(self) -> bool:
        return self.done() and self._worker.failure is not None


class Worker:
    """Make the calls of a program whose tensors are on ``device``, in a thread that begins with the first of them and
    ends with this object. After one has failed (``failure``) none is made, until ``forget``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.failure: BaseException | None = None
        self._turns = _Waiting()
        self._ident: int | None = None
        self._close: Callable[[], object] = lambda: None
        self._last: Turn | None = None
        self.announced = False  # the other ranks have heard of a failure
        self.serves = False  # a failure keeps nobody from what other ranks wait for

    @functools.cached_property
    def stream(self) -> Any:
        """Return the stream on which the calls launch their work."""
        return get_accelerator().urgent_stream()

    def inside(self) -> bool:
        return threading.get_ident() == self._ident

    def hand_over(self, call: Callable[[], Transfer], *, place: int = 0, after: Transfer = ARRIVED) -> Turn:
        """Queue ``call``, whose transfer ``stream`` waits for, and return its turn: see [Note: behind]."""
        turn = Turn(self, call, place, after)
        self._pass(turn)
        self._last = turn
        return turn

    def _pass(self, turn: Turn) -> None:
        if self._ident is None:
            given = (self._turns, self.device.index)
            thread = Thread(target=_take_turns, args=given, name="deepspeed-update", daemon=True)
            thread.start()
            self._ident = thread.ident
            self._close = weakref.finalize(self, _end, self._turns, thread)
        self._turns.put(turn)

    def check(self) -> None:
        """Raise UsageError where a call has failed, unless the worker still ``serves`` other ranks."""
        if self.failure is not None and not self.serves:
            text = f"{type(self.failure).__name__}: {self.failure}"
            raise UsageError(
                f"an update that went on behind the program has failed ({text}), so parameters and optimizer state are "
                "of two steps; load a checkpoint, or start again from one"
            ) from self.failure

    def fail_everywhere(self, error: Exception) -> None:
        """Note that all ranks know of a failed call on one of them, by ``error``; raise as ``check`` does."""
        self.announced, self.failure = True, self.failure or error
        self.check()

    def forget(self) -> None:
        """End the thread, when it has done all that was handed over, and forget how that ended."""
        with contextlib.suppress(UsageError):
            if self._last is not None:
                self._last.wait()
        self._close()
        self.failure = self._last = self._ident = None
        self._turns, self.announced = _Waiting(), False


class _Waiting:
    """Queue of the turns that wait to be taken."""

    def __init__(self) -> None:
        self._waiting: list[Turn | None] = []
        self._changed = threading.Condition()

    def put(self, turn: Turn | None) -> None:
        """Add a turn; None says that no others will come."""
        with self._changed:
            self._waiting.append(turn)
            self._changed.notify()

    def take(self) -> Turn | None:
        """Wait for the next turn and return it; None when all have been taken and the end has come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            turns = [turn for turn in self._waiting if turn is not None]
            if turns:
                self._waiting.remove(turn := next_of(turns))
                return turn
        return None


def next_of(turns: Sequence[Turn]) -> Turn:
    """Return the ready turn with the lowest ``place``; if none is ready that with the highest, whose data come next."""
    ready = [turn for turn in turns if _ready(turn)]
    return min(ready, key=lambda turn: turn.place) if ready else max(turns, key=lambda turn: turn.place)


def _ready(turn: Turn) -> bool:
    try:
        return turn.after.done()
    except Exception:  # of a device that has failed: the call meets it, too, and the program hears of that
        return True


def _take_turns(turns: _Waiting, device: int | None) -> None:
    if device is not None:  # to ask on a device that nobody has chosen makes a context there
        get_accelerator().set_device(device)
    while (turn := turns.take()) is not None:
        turn.take()
        del turn  # what it keeps alive, this worker too, must not wait for the next one


def _end(turns: _Waiting, thread: Thread) -> None:
    turns.put(None)
    if thread is not threading.current_thread():  # at the end of the process its memory must not go under a kernel
        thread.join()
