"""What the launchers and the command share: one queue of events for each, and the life line between them.

Over ssh a node writes frames amid its standard error, lines ``\\x1edeepspeed {json}``, for what only the command can
tell others: ``join`` (node 0: its port) and ``verdict``. The command writes lines of JSON to its standard input: events
for the node, and beats, because a cable that is pulled closes no connection. Its end means that the command is gone.
"""

import contextlib
import functools
import json
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepspeed.errors import UsageError

TICK_S = 0.5
FAILURE_GRACE_S = 2.0  # how long survivors of a failed rank may take to end
LOSS_GRACE_S = 1.0  # the same after a lost host, which took the silence limit to be noticed
SIGNAL_GRACE_S = 10.0  # how long all ranks may take after Ctrl-C or SIGTERM; a second signal ends them at once
MARK = b"\x1edeepspeed "
BEAT = ["beat"]
PAUSE = ["pause"]  # the command is suspended: its silence means nothing until the next line

Post = Callable[..., None]
Message = Mapping[str, Any]  # between launchers, with a ``kind``


class EventLoop:
    """Act on one queue of events in one thread, in methods ``_on_KIND``, so that these need no lock.

    Besides posted events there are ``tick`` every ``tick_s`` seconds and ``deadline`` when ``deadline`` has come.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._next_tick = 0.0
        self._signalled = False
        self.tick_s, self.grace_s = TICK_S, SIGNAL_GRACE_S
        self.deadline: float | None = None

    def post(self, kind: str, *values: Any) -> None:
        """Add an event; callable from any thread and from a signal handler."""
        self._events.put((kind, values))

    def handle_next(self) -> None:
        """Wait for the next event, and act on it."""
        wake = self._next_tick if self.deadline is None else min(self._next_tick, self.deadline)
        try:
            kind, values = self._events.get(timeout=max(0.0, wake - time.monotonic()))
        except queue.Empty:
            kind, values = "tick", ()
            if self.deadline == wake:
                kind, self.deadline = "deadline", None
            else:
                self._next_tick = time.monotonic() + self.tick_s
        self._act(kind, *values)

    def _act(self, kind: str, *values: Any) -> None:
        getattr(self, f"_on_{kind}")(*values)

    def _on_signal(self, number: int) -> None:
        """Handle a signal to this process: the first leaves the ranks time, and says so; a second leaves none."""
        again, self._signalled = self._signalled, True
        if not again:
            name, wait = signal.Signals(number).name, f"waiting up to {self.grace_s:g} s for the ranks to end"
            with contextlib.suppress(OSError):
                os.write(2, f"deepspeed: {name} received; {wait}\n".encode())
        self._act("interrupt", number, again)  # now: ranks that the same signal has ended are no failures


@contextlib.contextmanager
def signals_to(receive: Callable[[signal.Signals], None], *more: signal.Signals) -> Iterator[None]:
    """Let signals that end a job, and ``more``, call ``receive`` inside the block; it must be safe in a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a client's thread: its main thread keeps the signals
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *more)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        # Under nohup SIGHUP is ignored, and stays so.
        if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: receive(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _seconds_from(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{variable}={text} is not a number of seconds; unset it for {default:g}")
    return seconds


# Seconds without a sign of life after which a node counts as lost.
silence_limit = functools.partial(_seconds_from, "DS_HOST_TIMEOUT_S", 10.0)
# Seconds that the nodes of one job wait for each other: people and schedulers start them minutes apart.
join_limit = functools.partial(_seconds_from, "DS_JOIN_TIMEOUT_S", 300.0)


def tell_command(message: Message) -> None:
    """Write one frame; does nothing where nobody reads any more."""
    data = MARK + json.dumps(message).encode() + b"\n"
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def watch_command(post: Post) -> None:
    """Post the events that the command sends, from a thread, and ``lost`` when it is gone or silent for too long."""
    limit_s = silence_limit()

    def watch() -> None:
        rest = b""
        wait_s: float | None = limit_s
        with contextlib.suppress(OSError):
            while select.select([0], [], [], wait_s)[0] and (chunk := os.read(0, 65536)):
                *lines, rest = (rest + chunk).split(b"\n")
                for order in map(json.loads, lines):
                    wait_s = None if order == PAUSE else limit_s
                    if order not in (BEAT, PAUSE):
                        post(*order)
        post("lost", f"deepspeed: its command is gone, or has not been heard for {limit_s:g} s\n")

    threading.Thread(target=watch, daemon=True).start()


def watch_output(post: Post) -> None:
    """Post an interrupt from a thread when nobody reads this process's output any more."""
    poll = select.poll()
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            os.fstat(stream)  # one that was closed before this process began says nothing about a reader
            poll.register(stream, 0)  # errors and hang-ups are always reported

    def watch() -> None:
        poll.poll()
        post("interrupt", signal.SIGTERM, True)  # noqa: FBT003

    threading.Thread(target=watch, daemon=True).start()
