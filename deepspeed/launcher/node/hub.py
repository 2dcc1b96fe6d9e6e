"""How the launchers of a job talk: through queues of the rendezvous store, which that of node 0 binds first.

The store is the one that the ranks use, as under torchrun. Without a port of the user's choice the kernel picks one, so
jobs that start at the same moment cannot collide. Node 0 has the ``Hub``, which hears all nodes and decides; every
other node has a ``Spoke``. Messages are dictionaries with a ``kind``:

    node -> hub   join, beat, failed, signal (number, immediate), report (ends, now)     queue ``up``, with the node
    hub -> node   go (port, run_id), stop (signal, grace), verdict (status, text)        queue ``down/NODE``

A job ends in one way: the hub tells everyone to stop (unless all ranks returned 0), waits for the report of every node
that is still there, decides which failure came first, and tells the verdict to all.
"""

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store, TCPStore

from deepspeed.comm.channel import GONE, Channel, Heard, SteadyClock
from deepspeed.errors import UsageError
from deepspeed.launcher.job import Job, encode_world
from deepspeed.launcher.node.loop import FAILURE_GRACE_S, LOSS_GRACE_S, TICK_S, Message, Post, join_limit, silence_limit
from deepspeed.launcher.node.verdict import RankEnd, Verdict, interrupted, judge, lost, preempted
from deepspeed.monitor.log import logger

SAY_AFTER_S = 5.0
_CONNECT_S = 2.0
_LISTEN_S = 0.02  # how often node 0 looks for messages of others: the ages of what they report count from then
_LOOK_S = 0.2  # how often the other nodes look
_FAREWELL_S = 1.0
_KEY = "deepspeed/launcher"


def bind_store(address: str, port: int) -> TCPStore:
    """Start the rendezvous store; ``store.port`` is the port it got. Raises UsageError when the port is taken."""
    try:
        return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    except (RuntimeError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"cannot listen on {address}:{port} ({why}); choose another --master_port, or leave it out to get a free "
            "one; --master_addr must be an address of this machine"
        ) from error


class Hub:
    """Coordinate the job at node 0; ``present`` are the nodes that take part and are not lost.

    Belongs to the thread that calls it, and ``tick`` every ``tick_s`` seconds. Answers to node 0 are events ``hub``.
    ``port``: that of the store.
    """

    joined = True

    def __init__(
        self, job: Job, store: Store, post: Post, *, port: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job, self._channel, self._post, self._port = job, Channel(store, _KEY), post, port
        self._heard = dict.fromkeys(range(1, len(job.hosts)), time.time())
        self._started = self._stopped = self._decided = False
        self._cause: Verdict | None = None  # set when something other than a rank or a host ended the job
        self._ends: dict[int, list[RankEnd]] = {}
        self._losses: list[tuple[float, Verdict]] = []
        self.tick_s = _LISTEN_S if self._heard else TICK_S
        self._clock, self._logged = SteadyClock(2 * self.tick_s, clock), False
        self._beats = Heard(self._clock)
        self.present: set[int] = set()
        self._limit_s = silence_limit()
        self._channel.put("world", encode_world(job.world))
        self.send({"kind": "join"})

    def send(self, message: Message) -> None:
        """Handle a message of node 0 itself."""
        self.handle(0, message)

    def tick(self) -> None:
        """Read the messages of other nodes, and count how long each has been silent or awaited."""
        while self._heard and (heard := self._channel.pop("up")) is not None:
            node, message = heard
            self._heard[node] = time.time()
            self.handle(node, message)
        for node, heard_at in self._heard.items():
            if self._beats.hear(node, heard_at) > self._limit_s:
                self.lose(node, f"has not been heard for {self._limit_s:g} s")
        waited_s = self._clock()
        missing = [host for node, host in enumerate(self._job.hosts) if node not in self.present]
        if missing and not self._started and not self._stopped:
            limit, hosts = join_limit(), ", ".join(missing)
            if waited_s >= SAY_AFTER_S and not self._logged:
                self._logged = True
                logger.info("waiting up to %g s for the launchers on %s", limit, hosts)
            if waited_s >= limit:
                text = f"deepspeed: no launcher on {hosts} joined within {limit:g} s; no rank has been started\n"
                self._end(Verdict(1, text), signal.SIGTERM, 0.0)

    def handle(self, node: int, message: Message) -> None:
        """Act on one message of a node."""
        kind = message["kind"]
        if kind == "join" and not self._stopped:
            self.present.add(node)
            if len(self.present) == len(self._job.hosts):
                self._started = True
                self._tell({"kind": "go", "port": self._port, "run_id": f"deepspeed_{os.getpid()}_{self._port}"})
        elif kind == "join":
            self._tell({"kind": "verdict", "status": 1, "text": "deepspeed: the job has ended already\n"}, {node})
        elif kind == "failed":
            self._stop(signal.SIGTERM, FAILURE_GRACE_S)
        elif kind == "signal":
            number, grace_s = message["number"], 0.0 if message["immediate"] else self._job.signal_grace
            self._end(interrupted(number), number, grace_s)
        elif kind == "report":
            host, ahead_s = self._job.hosts[node] if self._heard else "", time.time() - message["now"]
            self._ends[node] = [RankEnd(**end).on_another_clock(ahead_s, host=host) for end in message["ends"]]
            self._decide_when_all_have_reported()

    def lose(self, node: int, how: str) -> None:
        """Drop node ``node``, which is gone without having taken leave; ignored once the verdict is out."""
        if self._decided or node not in self.present:
            return
        self.present.remove(node)
        if node not in self._ends:  # otherwise it had said all before it went
            self._losses.append((self._heard[node], lost(self._job.hosts[node], node, how)))
            self._stop(signal.SIGTERM, LOSS_GRACE_S)
        self._decide_when_all_have_reported()

    def _end(self, cause: Verdict, number: int, grace_s: float) -> None:
        """End the job with ``cause``, which is no rank's failure, unless it is ending already."""
        if not self._stopped:
            self._cause = cause
        self._stop(number, grace_s, again=grace_s == 0.0)

    def _stop(self, number: int, grace_s: float, *, again: bool = False) -> None:
        if not self._stopped or again:
            self._stopped = True
            self._tell({"kind": "stop", "signal": number, "grace": grace_s})

    def _decide_when_all_have_reported(self) -> None:
        if not self._decided and self.present <= self._ends.keys():
            self._decided = True
            ends = [end for node in sorted(self._ends) for end in self._ends[node]]
            verdict = judge(ends, self._losses, show_traceback=self._job.world_size > 1)
            if self._cause is not None and verdict != preempted():
                verdict = self._cause
            self._tell({"kind": "verdict", "status": verdict.status, "text": verdict.text})

    def _tell(self, message: Message, nodes: set[int] | None = None) -> None:
        for node in sorted(self.present if nodes is None else nodes):
            if node == 0:
                self._post("hub", message)
            else:
                self._channel.push(f"down/{node}", message)

    def close(self) -> None:
        """Give every node time to read its last message; then drop the store, after the last rank of the last node."""
        end = time.monotonic() + _FAREWELL_S
        while self._channel.add("left") < len(self.present) - 1 and time.monotonic() < end:
            time.sleep(_LISTEN_S)
        del self._channel


class Spoke:
    """Connect another node to the hub; one thread finds the store of node 0 and does all calls that may block on it.

    Messages of the hub are events ``hub``; ``lost(text)`` and ``refused(why)`` end it.
    """

    tick_s = TICK_S

    def __init__(self, job: Job, node: int, post: Post) -> None:
        self._job, self._node, self._post = job, node, post
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._silent, self._limit_s, self._join_s = Heard(SteadyClock(2 * TICK_S)), silence_limit(), join_limit()
        self._answers = 0  # of the hub's store
        self.port: queue.SimpleQueue[int] = queue.SimpleQueue()  # of node 0, as soon as it is known
        self.joined = False  # whether the hub knows of this node and will answer
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue one message, without waiting."""
        self._outbox.put(message)

    def tick(self) -> None:
        """Count silent time; report the hub as lost when it exceeds the limit."""
        if self._silent.hear(0, self._answers) > self._limit_s and self.joined:
            self._lost(f"has not been heard for {self._limit_s:g} s")

    def close(self) -> None:
        """Wait shortly, after the verdict, for the thread that tells the hub that this node leaves."""
        if self.joined:
            self._thread.join(_FAREWELL_S)

    def _lost(self, how: str) -> None:
        self._post("lost", lost(self._job.hosts[0], 0, how).text)

    def _talk(self) -> None:
        try:
            channel = self._join()
            self.joined = True
            self._exchange(channel)
        except queue.Empty:
            self._post("refused", f"no launcher on {self._job.hosts[0]} joined within {self._join_s:g} s")
        except (OSError, *GONE) as error:
            if self.joined:
                self._lost("closed its connection: its launcher was killed or the host went down")
            else:
                self._post("refused", str(error).partition("\n")[0])

    def _exchange(self, channel: Channel) -> None:
        message: Message = {"kind": "join"}
        while True:
            channel.push("up", [self._node, message])
            while (order := channel.pop(f"down/{self._node}")) is not None:
                self._post("hub", order)
                if order["kind"] == "verdict":
                    channel.add("left", 1)
                    return
            self._answers += 1
            try:
                message = self._outbox.get(timeout=_LOOK_S)
            except queue.Empty:
                message = {"kind": "beat"}

    def _join(self) -> Channel:
        """Join the job; return its channel. UsageError, or torch's error, if it cannot; queue.Empty without a port."""
        end = time.monotonic() + self._join_s
        address, port = self._job.master_addr, self.port.get(timeout=self._join_s)
        await_port(address, port, end - time.monotonic())
        remaining = timedelta(seconds=max(5.0, end - time.monotonic()))
        store = TCPStore(address, port, is_master=False, timeout=remaining, wait_for_workers=False)
        channel = Channel(store, _KEY)
        channel.wait("world", seconds=remaining.total_seconds())
        if channel.get("world") != encode_world(self._job.world):
            why = "it was started with other hosts or slots than node 0; give every node the same hostfile and filters"
        elif channel.add(f"claim/{self._node}", 1) > 1:
            why = f"a launcher with --node_rank {self._node} is in this job already; give every node its own"
        else:
            return channel
        raise UsageError(f"node 0 cannot take this node in: {why}")


def await_port(address: str, port: int, limit_s: float) -> None:
    """Wait until ``port`` accepts connections; log after a while what is awaited. Raises UsageError at the limit."""
    started, silent = time.monotonic(), True
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
            return
        except OSError as error:
            failure = f"node 0 cannot be reached at {address}:{port} ({error.strerror or error})"
        waited = time.monotonic() - started
        if waited > limit_s:
            check = "--master_addr and --master_port, the launcher of node 0, and the firewalls between"
            raise UsageError(f"{failure}, tried for {waited:.0f} s; check {check}")
        if silent and waited > SAY_AFTER_S:
            silent = False
            logger.info("%s yet; trying for up to %.0f s", failure, limit_s)
        time.sleep(0.1)
