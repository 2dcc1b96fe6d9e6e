"""How the launchers on the nodes talk to the ``deepspeed`` command through ssh: frames amid the output, orders on
stdin.

A frame is one line on standard error, ``\\x1edeepspeed {json}``, which may begin amid a line: a progress bar ends with
none. Orders are lines on standard input: ``lifeline`` (the first: from now on the end of input means that the command
is gone), ``port N``, ``signal NAME``, ``kill``.
"""

import contextlib
import json
import os
import re
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

MARK = b"\x1edeepspeed "
LIFELINE = "lifeline"
_LINE_END = re.compile(rb"\r?\n|\r(?!\n|\Z)")  # a carriage return at the very end may yet get its newline
_MAX_LINE_BYTES = 1 << 16
_MAX_FRAME_BYTES = 16 << 20
_GREETING_S = 5.0


def encode_frame(content: dict[str, Any]) -> bytes:
    """One frame, ASCII."""
    return MARK + json.dumps(content).encode() + b"\n"


class FrameFilter:
    """Takes the frames out of a byte stream."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the bytes that are output, in order, and the frames that are complete."""
        self._held += data
        output, frames = b"", []
        while (start := self._held.find(MARK)) >= 0:
            end = self._held.find(b"\n", start)
            if end < 0 and len(self._held) - start < _MAX_FRAME_BYTES:
                break
            end = end if end >= 0 else len(self._held)
            frame = _decode(self._held[start + len(MARK) : end])
            output += self._held[:start] if frame is not None else self._held[: end + 1]
            frames += [] if frame is None else [frame]
            self._held = self._held[end + 1 :]
        keep = len(self._held) - start if start >= 0 else _partial_mark(self._held)
        cut = len(self._held) - keep
        output, self._held = output + self._held[:cut], self._held[cut:]
        return output, frames

    def end(self) -> bytes:
        """What was held back in the hope of a frame."""
        held, self._held = self._held, b""
        return held


def _decode(text: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        content = json.loads(text)
        if isinstance(content, dict) and "event" in content:
            return content
    return None


def _partial_mark(data: bytes) -> int:
    """Length of the end of ``data`` that could be the beginning of a mark."""
    return next((size for size in range(len(MARK) - 1, 0, -1) if data.endswith(MARK[:size])), 0)


class LinePrefixer:
    """Puts ``prefix`` before every line; a line ends with a newline or, as in progress bars, a carriage return."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete; with several writers on one terminal half a line is not shown, unless it is very
        long.
        """
        data = self._held + data
        cut = 0
        lines = []
        for end in _LINE_END.finditer(data):
            lines.append(self._prefix + data[cut : end.end()])
            cut = end.end()
        self._held = data[cut:]
        return b"".join(lines) + (self.end() if len(self._held) > _MAX_LINE_BYTES else b"")

    def end(self) -> bytes:
        """The last line, if it had no end."""
        held, self._held = self._held, b""
        return self._prefix + held + b"\n" if held else b""


class RunnerLink:
    """The node's side: reads orders, and notices that nobody reads its output any more.

    ``post("runner", order)`` is called from threads, with ``"kill"`` when the command is gone.
    Without a ``lifeline`` as first line (pdsh gives no input) only the output tells, and no frames are written.
    """

    def __init__(self, post: Callable[[str, Any], None]) -> None:
        self._post = post
        self._greeted = threading.Event()
        self._framed = False
        threading.Thread(target=self._read, daemon=True).start()
        if hasattr(select, "poll"):
            threading.Thread(target=self._watch_output, daemon=True).start()
        self._greeted.wait(_GREETING_S)

    @property
    def framed(self) -> bool:
        """Whether the other side understands frames."""
        return self._framed

    def announce(self, event: str, **content: Any) -> None:
        """Write one frame."""
        if self._framed:
            sys.stderr.flush()
            with contextlib.suppress(OSError):
                data = encode_frame({"event": event, **content})
                while data:
                    data = data[os.write(2, data) :]

    def _read(self) -> None:
        held = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(0, 4096):
                *lines, held = (held + chunk).split(b"\n")
                for line in lines:
                    self._order(line.decode(errors="replace"))
        if self._framed:
            self._post("runner", "kill")
        self._greeted.set()

    def _order(self, line: str) -> None:
        if line == LIFELINE:
            self._framed = True
            self.announce("hello")
            self._greeted.set()
        elif self._framed:
            self._post("runner", line)

    def _watch_output(self) -> None:
        poll = select.poll()
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                os.fstat(stream)  # one that was closed before this process began says nothing about a reader
                poll.register(stream, 0)  # errors and hang-ups are always reported
        if poll.poll():
            self._post("runner", "kill")
