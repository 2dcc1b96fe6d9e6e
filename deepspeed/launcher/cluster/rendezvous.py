"""How the launchers of one job find each other: node 0 binds the rendezvous store before any rank starts, the others
look for it.

The store is the one that the ranks use, as under torchrun. Without a port of the user's choice the kernel picks one, so
jobs that start at the same moment cannot collide. The store also tells the other launchers where the hub listens.
"""

import hashlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from deepspeed.errors import UsageError
from deepspeed.launcher.cluster.hub import Hub, Message
from deepspeed.launcher.cluster.peers import Connection, HubServer, join_hub, seconds_from, silence_limit
from deepspeed.launcher.job import Job, encode_world
from deepspeed.observe.log import logger

JOIN_LIMIT_S = (
    300.0  # DS_JOIN_TIMEOUT_S changes it; people start nodes by hand, and schedulers start them minutes apart
)
_SAY_AFTER_S = 5.0
_CONNECT_S = 2.0
_KEY = "deepspeed/launcher"

Post = Callable[[str, Any], None]


@dataclass(frozen=True)
class Link:
    """A member's way to the hub, and what the ranks must know; ``close`` ends it after the verdict."""

    port: int
    run_id: str
    send: Callable[[Message], None]
    close: Callable[[], None]


def join_limit() -> float:
    """Seconds that the launchers of one job wait for each other."""
    return seconds_from("DS_JOIN_TIMEOUT_S", JOIN_LIMIT_S)


def bind_store(address: str, port: int) -> TCPStore:
    """Start the rendezvous store; ``store.port`` is the port it got. Raises UsageError when the wanted port is
    taken.
    """
    try:
        return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"cannot listen on {address}:{port} ({_first_line(error)}); "
            "choose another --master_port, or leave it out to get a free one; --master_addr must be an address "
            "of this machine"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def fingerprint(job: Job) -> str:
    """Equal for launchers that were told of the same hosts and slots."""
    return hashlib.sha256(encode_world(job.world).encode()).hexdigest()


def host_job(job: Job, post: Post) -> Link:
    """On node 0: bind the store, create the hub, and join it. Messages arrive as ``post("hub", message)``.

    Raises UsageError when the port is taken.
    """
    store = bind_store(job.master_addr, job.master_port)
    run_id = f"deepspeed_{os.getpid()}_{store.port}"
    several = len(job.hosts) > 1
    server: HubServer | None = None

    def send(node: int, message: Message) -> None:
        if node == 0:
            post("hub", message)
        elif server is not None:
            server.send(node, message)

    hub = Hub(job.hosts, send, show_traceback=job.world_size > 1)
    hub.join(0)
    if several:
        server = HubServer(hub, fingerprint(job), silence_s=silence_limit())
        store.set(_KEY, json.dumps({"run_id": run_id, "hub": server.address}))
        threading.Thread(target=_await_members, args=(hub,), daemon=True).start()

    def close() -> None:
        nonlocal store
        if server is not None:
            server.close()
        del store  # not before the last rank of the last node has ended

    return Link(store.port, run_id, lambda message: hub.handle(0, message), close)


def _await_members(hub: Hub) -> None:
    limit = join_limit()
    time.sleep(min(_SAY_AFTER_S, limit))
    if missing := hub.missing():
        logger.info("waiting up to %g s for the launchers on %s", limit, ", ".join(missing))
    time.sleep(max(0.0, limit - _SAY_AFTER_S))
    if missing := hub.missing():
        hub.give_up(
            f"deepspeed: no launcher on {', '.join(missing)} joined within {limit:g} s; no rank has been started\n"
        )


def seek_job(job: Job, node: int, port: "queue.SimpleQueue[int]", post: Post) -> None:
    """On any other node: find the store and join the hub, in a thread, for ``join_limit`` seconds at most.

    ``port`` delivers the port where it is not in the job. ``post("linked", link)`` on success, ``post("unlinked",
    why)`` otherwise.
    """

    def seek() -> None:
        try:
            link, connection = _seek(job, node, port)
        except (OSError, RuntimeError, ValueError) as error:
            post("unlinked", _first_line(error))
            return
        post("linked", link)
        for message in connection.messages():
            post("hub", message)
        post("hub lost", connection.ending)

    threading.Thread(target=seek, daemon=True).start()


def _seek(job: Job, node: int, port: "queue.SimpleQueue[int]") -> tuple[Link, Connection]:
    end = time.monotonic() + join_limit()
    try:
        number = job.master_port or port.get(timeout=join_limit())
    except queue.Empty:
        raise UsageError(f"node 0 ({job.hosts[0]}) has not named its port within {join_limit():g} s") from None
    _await_port(job.master_addr, number, end)
    left = timedelta(seconds=max(5.0, end - time.monotonic()))
    store = TCPStore(job.master_addr, number, is_master=False, timeout=left, wait_for_workers=False)
    known = json.loads(store.get(_KEY))
    connection = join_hub(job.master_addr, known["hub"], node, fingerprint(job), silence_s=silence_limit())
    return Link(number, known["run_id"], connection.send, connection.leave), connection


def _await_port(address: str, port: int, end: float) -> None:
    """Return when something listens there. Raises UsageError at ``end``, and says after a while what it waits for."""
    started, said = time.monotonic(), False
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        if now > end:
            raise UsageError(
                f"node 0 cannot be reached at {address}:{port} ({reason}), tried for {now - started:.0f} s; "
                "check --master_addr and "
                "--master_port, that the launcher of node 0 runs, and that no firewall is in between"
            )
        if now - started > _SAY_AFTER_S and not said:
            said = True
            logger.info("waiting up to %.0f s for node 0 at %s:%d (%s)", end - started, address, port, reason)
        time.sleep(0.1)
