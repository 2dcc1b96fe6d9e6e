"""How nodes that are started by hand or by pdsh talk: through keys of the rendezvous store, which node 0 binds first.

The store is the one that the ranks use, as under torchrun. Without a port of the user's choice the kernel picks one, so
jobs that start at the same moment cannot collide. Node K writes its messages to ``from/K/0``, ``from/K/1``, ... and
reads those to it from ``to/K/0``, ``to/K/1``, ...; ``news`` counts the former, ``beat/K`` the times it has looked.
"""

import json
import os
import queue
import socket
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore

from deepspeed.errors import UsageError
from deepspeed.launcher.job import Job, encode_world
from deepspeed.launcher.node.hub import SAY_AFTER_S, Hub, Message, join_limit
from deepspeed.launcher.node.links import TICK_S, Post, Silence
from deepspeed.launcher.node.verdict import HostLoss
from deepspeed.observe.log import logger

_CONNECT_S = 2.0
_LISTEN_S = 0.02  # how often node 0 looks for messages in its own store: their ages count from then
_LOOK_S = 0.2  # how often the other nodes look
_FAREWELL_S = 1.0
_KEY = "deepspeed/launcher"


def bind_store(address: str, port: int) -> TCPStore:
    """Start the rendezvous store; ``store.port`` is the port it got. Raises UsageError when the port is taken."""
    try:
        return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"cannot listen on {address}:{port} ({_first_line(error)}); choose another --master_port, or leave it out "
            "to get a free one; --master_addr must be an address of this machine"
        ) from error


def meeting_point(store: TCPStore) -> Message:
    """The message with which node 0 joins."""
    return {"kind": "join", "port": store.port, "run_id": f"deepspeed_{os.getpid()}_{store.port}"}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class HostLink:
    """Node 0's link: the hub is in this process, and hears the other nodes through the store."""

    joined = True

    def __init__(self, job: Job, store: TCPStore, post: Post) -> None:
        self._post = post
        self._store = store
        self._hub = Hub(job.hosts, self._tell, show_traceback=job.world_size > 1)
        self._others = {node: Silence() for node in range(1, len(job.hosts))}
        self._beats = dict.fromkeys(self._others, 0)
        self._sent = dict.fromkeys(self._others, 0)
        self._ticks = 0
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        if self._others:
            store.set(_KEY, encode_world(job.world))
            self._listener.start()
        self.send(meeting_point(store))

    def send(self, message: Message) -> None:
        self._hub.handle(0, message)

    def tick(self) -> None:
        self._ticks += 1
        for node, silence in self._others.items():
            beats = self._store.add(f"{_KEY}/beat/{node}", 0)
            if beats != self._beats[node]:
                self._beats[node] = beats
                silence.broken()
            elif silence.grows():
                how = f"has not been heard for {silence.limit_s:g} s"
                self._hub.lose(node, last_heard=silence.last_heard, how=how)
        self._hub.watch_joining(self._ticks * TICK_S)

    def close(self) -> None:
        self._over.set()
        if self._others:
            self._listener.join()
            end = time.monotonic() + _FAREWELL_S
            # Every node has time to read its last message.
            while self._store.add(f"{_KEY}/left", 0) < len(self._hub.present) - 1 and time.monotonic() < end:
                time.sleep(_LISTEN_S)
        del self._store  # not before the last rank of the last node has ended

    def _tell(self, node: int, message: Message) -> None:
        if node == 0:
            self._post("hub", message)
        else:
            self._store.set(f"{_KEY}/to/{node}/{self._sent[node]}", json.dumps(message))
            self._sent[node] += 1

    def _listen(self) -> None:
        heard = dict.fromkeys(self._others, 0)
        news = 0
        while not self._over.wait(_LISTEN_S):
            before, news = news, self._store.add(f"{_KEY}/news", 0)
            for node in self._others if news != before else ():
                while self._store.check([key := f"{_KEY}/from/{node}/{heard[node]}"]):
                    heard[node] += 1
                    self._hub.handle(node, json.loads(self._store.get(key)))


class StoreLink:
    """The link of every other node; one thread finds the store of node 0 and does all that may wait for it."""

    def __init__(self, job: Job, node: int, post: Post) -> None:
        self._job, self._node, self._post = job, node, post
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._silence = Silence()
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()
        self.joined = False

    def send(self, message: Message) -> None:
        self._outbox.put(message)

    def tick(self) -> None:
        if self.joined and self._silence.grows():
            self._lost(f"has not been heard for {self._silence.limit_s:g} s")

    def close(self) -> None:
        if self.joined:
            self._thread.join(_FAREWELL_S)

    def _lost(self, how: str) -> None:
        self._post("lost", HostLoss(self._job.hosts[0], 0, 0.0, how).describe())

    def _talk(self) -> None:
        try:
            store = self._join()
        except (OSError, RuntimeError, ValueError) as error:
            self._post("refused", _first_line(error))
            return
        self.joined = True
        try:
            self._exchange(store)
        except (OSError, RuntimeError):
            self._lost("closed its connection: its launcher was killed or the host went down")

    def _exchange(self, store: TCPStore) -> None:
        sent = received = 0
        while True:
            try:
                message = self._outbox.get(timeout=_LOOK_S)
            except queue.Empty:
                store.add(f"{_KEY}/beat/{self._node}", 1)
                self._silence.broken()
                while store.check([key := f"{_KEY}/to/{self._node}/{received}"]):
                    received += 1
                    message = json.loads(store.get(key))
                    self._post("hub", message)
                    if message["kind"] == "verdict":
                        store.add(f"{_KEY}/left", 1)
                        return
            else:
                store.set(f"{_KEY}/from/{self._node}/{sent}", json.dumps(message))
                store.add(f"{_KEY}/news", 1)
                sent += 1

    def _join(self) -> TCPStore:
        """Raises UsageError, or what torch raises, when this node cannot take part."""
        address, port, end = self._job.master_addr, self._job.master_port, time.monotonic() + join_limit()
        _await_port(address, port, end)
        left = timedelta(seconds=max(5.0, end - time.monotonic()))
        store = TCPStore(address, port, is_master=False, timeout=left, wait_for_workers=False)
        if store.get(_KEY).decode() != encode_world(self._job.world):
            what = "it was started with other hosts or slots than node 0; give every node the same hostfile and filters"
        elif store.add(f"{_KEY}/claim/{self._node}", 1) > 1:
            what = f"a launcher with --node_rank {self._node} is in this job already; give every node its own"
        else:
            self.send({"kind": "join"})
            return store
        raise UsageError(f"node 0 cannot take this node in: {what}")


def _await_port(address: str, port: int, end: float) -> None:
    """Return when something listens there. Raises UsageError at ``end``, and says after a while what it waits for."""
    started, silent = time.monotonic(), True
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        waited = time.monotonic() - started
        if time.monotonic() > end:
            what = "check --master_addr and --master_port, that the launcher of node 0 runs, and that no firewall is in"
            tried = f"node 0 cannot be reached at {address}:{port} ({reason}), tried for {waited:.0f} s"
            raise UsageError(f"{tried}; {what} between")
        if waited > SAY_AFTER_S and silent:
            silent = False
            logger.info("waiting up to %.0f s for node 0 at %s:%d (%s)", end - started, address, port, reason)
        time.sleep(0.1)
