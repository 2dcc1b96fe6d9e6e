"""How the nodes that ``deepspeed`` starts over ssh talk to it: frames amid their output, orders on their input.

A frame is one line on standard error, ``\\x1edeepspeed {json}``, which may begin amid a line: a progress bar ends with
none. An order is one line of JSON on standard input, whose end means that the command is gone. Both carry the messages
of :mod:`hub`, and beats: a cable that is pulled closes no connection.
"""

import contextlib
import json
import os
import queue
import re
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from deepspeed.launcher.node.hub import Message, silence_limit

MARK = b"\x1edeepspeed "
BEAT: Message = {"kind": "beat"}
PAUSE: Message = {"kind": "pause"}  # the command is suspended: its silence means nothing until the next beat
TICK_S = 0.5
_LINE_END = re.compile(rb"\r?\n|\r(?!\n|\Z)")  # a carriage return at the very end may yet get its newline
_MAX_LINE_BYTES = 1 << 16
_FAREWELL_S = 1.0

Post = Callable[..., None]


class EventLoop:
    """One queue of events and one thread that acts on them, in methods ``_on_KIND``, so that these need no lock.

    Beside what is posted there are ``tick`` every half second and ``deadline`` when ``deadline`` has come.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._next_tick = time.monotonic() + TICK_S
        self.deadline: float | None = None

    def post(self, kind: str, *values: Any) -> None:
        """Add an event; any thread may, and a signal handler."""
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
                self._next_tick = time.monotonic() + TICK_S
        getattr(self, f"_on_{kind}")(*values)


class Silence:
    """Counts ticks without a sign of life. Not seconds: a process that was suspended has heard nobody in that time."""

    def __init__(self) -> None:
        self.limit_s = silence_limit()
        self.last_heard = time.time()
        self._ticks = 0.0

    def broken(self, *, ticks: float = 0.0) -> None:
        """The other side is alive; a negative number of ``ticks`` gives it more time from now on."""
        self._ticks = ticks
        self.last_heard = time.time()

    def grows(self) -> bool:
        """One more tick has passed; whether that is too many."""
        self._ticks += 1
        return self._ticks * TICK_S > self.limit_s


class Link(Protocol):
    """A node's way to the hub, whose messages arrive as events ``hub``; ``lost(why)`` and ``refused(why)`` end it."""

    joined: bool  # whether the hub knows of this node and will answer

    def send(self, message: Message) -> None:
        """Send one message, without waiting for anything."""

    def tick(self) -> None:
        """Show a sign of life, and look for one."""

    def close(self) -> None:
        """Take leave after the verdict."""


class FrameLink:
    """The link over standard input and standard error. Frames leave in a thread: a blocked terminal blocks no node."""

    joined = True

    def __init__(self, post: Post) -> None:
        self._post = post
        self._silence = Silence()
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        for thread in (self._writer, threading.Thread(target=self._read, daemon=True)):
            thread.start()

    def send(self, message: Message) -> None:
        self._outbox.put(message)

    def tick(self) -> None:
        self.send(BEAT)
        if self._silence.grows():
            self._post("lost", f"deepspeed: its command has not been heard for {self._silence.limit_s:g} s\n")

    def close(self) -> None:
        self._outbox.put(None)
        self._writer.join(_FAREWELL_S)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                data = encode_frame(message)
                while data:
                    data = data[os.write(2, data) :]

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(0, 65536):
                *lines, rest = (rest + chunk).split(b"\n")
                for message in map(json.loads, lines):
                    self._silence.broken(ticks=float("-inf") if message == PAUSE else 0.0)
                    if message not in (BEAT, PAUSE):
                        self._post("hub", message)
        self._post("lost", "deepspeed: its command is gone\n")


def watch_output(gone: Callable[[], None]) -> None:
    """Call ``gone`` from a thread when nobody reads this process's output any more."""
    if not hasattr(select, "poll"):
        return
    poll = select.poll()
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            os.fstat(stream)  # one that was closed before this process began says nothing about a reader
            poll.register(stream, 0)  # errors and hang-ups are always reported

    def watch() -> None:
        poll.poll()
        gone()

    threading.Thread(target=watch, daemon=True).start()


def encode_frame(message: Message) -> bytes:
    """One frame, ASCII."""
    return MARK + json.dumps(message).encode() + b"\n"


class FrameReader:
    """Splits one stream of a node into output, with ``prefix`` before every line, and frames.

    A line ends with a newline or, as in progress bars, a carriage return; on a terminal with several writers half a
    line is not shown, unless it is very long.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> tuple[bytes, list[Message]]:
        """Return the lines that are complete, and the frames."""
        data = self._rest + data
        output, frames = [], []
        head, start = b"", 0
        for end in _LINE_END.finditer(data):
            line, start = head + data[start : end.end()], end.end()
            before, mark, text = line.rpartition(MARK)
            frame = _decode(text) if mark else None
            if frame is None:
                output.append(self._prefix + line)
            else:
                frames.append(frame)
            head = b"" if frame is None else before  # the line that the frame came amid goes on
        self._rest = head + data[start:]
        if len(self._rest) > _MAX_LINE_BYTES and MARK[:1] not in self._rest:
            output.append(self.end())
        return b"".join(output), frames

    def end(self) -> bytes:
        """The last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return self._prefix + rest + b"\n" if rest else b""


def _decode(text: bytes) -> Message | None:
    with contextlib.suppress(ValueError):
        message = json.loads(text)
        return message if isinstance(message, dict) and "kind" in message else None
    return None
