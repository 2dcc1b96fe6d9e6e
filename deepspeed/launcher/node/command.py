"""A node's side of its life line, where a ``deepspeed`` command elsewhere started it and reads its output.

Over ssh the node writes frames amid its standard error, lines ``\\x1edeepspeed {json}``, for what only the command can
tell others: ``join`` (node 0: its port) and ``verdict``. The command writes lines of JSON to its standard input: events
for the node, and beats, because a cable that is pulled closes no connection. Its end means that the command is gone.
"""

import contextlib
import json
import os
import select
import threading
from collections.abc import Callable

from deepspeed.launcher.node.loop import Message, Post, silence_limit

MARK = b"\x1edeepspeed "
BEAT = ["beat"]
PAUSE = ["pause"]  # the command is suspended: its silence means nothing until the next line


def encode_frame(message: Message) -> bytes:
    """One frame, ASCII."""
    return MARK + json.dumps(message).encode() + b"\n"


def tell_command(message: Message) -> None:
    """Write one frame; nothing happens where nobody reads any more."""
    data = encode_frame(message)
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


def watch_output(gone: Callable[[], None]) -> None:
    """Call ``gone`` from a thread when nobody reads this process's output any more."""
    poll = select.poll()
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            os.fstat(stream)  # one that was closed before this process began says nothing about a reader
            poll.register(stream, 0)  # errors and hang-ups are always reported

    def watch() -> None:
        poll.poll()
        gone()

    threading.Thread(target=watch, daemon=True).start()
