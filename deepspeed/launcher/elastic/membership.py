"""Who takes part in the next round of an elastic job: torch's rendezvous, and what it leaves open.

torch's ``DynamicRendezvousHandler`` finds the nodes. Around it: how many ranks each node runs (the largest allowed
number that is there), a store of their own for the ranks of each round, newcomers wait for a checkpoint, and a node of
which nothing is heard ends the round, also where its ranks' connections do not break (``beats``).

[Note: how nodes part] A node whose ranks have all returned 0 says so (``ended/NODE``) and goes on watching: the job
ends well when all have, and while one has not, a failure elsewhere starts the ranks of all again. A node that ends the
job otherwise closes the rendezvous first, so that no other begins a round meanwhile, and then says how; the first
verdict is that of all. Each node's last word is ``left/NODE``; the one with the store waits for those of the others.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from deepspeed.comm.channel import Channel
from deepspeed.errors import UsageError
from deepspeed.launcher.elastic.beats import BEAT_S, Beats, beat
from deepspeed.launcher.elastic.sizes import Elastic, share_ranks, too_few
from deepspeed.launcher.node.loop import join_limit, silence_limit
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, Verdict
from deepspeed.monitor.log import logger

_RUN = "deepspeed_elastic"
_JOIN_S = 5.0  # what a node that lives takes at most for its part of joining
_LAST_CALL_S = 3  # how long a round waits for more nodes once it has enough
JOIN = "a checkpoint was saved, and more ranks can take part"  # a reason to end a round
ASKED = "signal "  # with its number, 0 where ranks know of it: all ranks are to save and end; the same
_OVER, _CRASHES, _SAVED, _VERDICT = "over", "crashes", "saved", "verdict"


def _answer(channel: Channel, key: str) -> Any:
    """Wait for another node's value of ``key`` and return it. Raises DistStoreError after the limit."""
    if not channel.wait(key, seconds=silence_limit() + _JOIN_S):
        raise DistStoreError(key)
    return channel.get(key)


@dataclass(frozen=True)
class Round:
    """Start of all ranks. ``world``: host -> its devices, in node order; ``number`` counts from 0."""

    number: int
    node: int
    world: dict[str, tuple[int, ...]]
    address: str
    port: int


class Membership(RendezvousHandler):
    """Take part, for one node, in the rendezvous and the shared state of the job; used by the thread of its agent.

    ``devices``: all devices of the node. ``note``: the file in which a rank leaves the newest checkpoint's name.
    """

    # Of the round that this node is in; they come together, with the first one.
    round: Round
    _channel: Channel
    _beats: Beats

    def __init__(
        self, store: Store, limits: Elastic, *, host: str, address: str, devices: tuple[int, ...], note: str
    ) -> None:
        self._limits, self._host, self._address, self._note = limits, host, address, note
        self._devices, self._lost = devices, set[int]()
        self._job = Channel(store, "deepspeed/elastic")
        # A node may be lost while torch waits for what it has to say. Others then meet again without it.
        store.set_timeout(timedelta(seconds=silence_limit() + _JOIN_S))
        beat_s = max(1, round(silence_limit() / 3))
        # Else it would hand out one store for all rounds, with what the ranks of earlier ones have left in it.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._inner = DynamicRendezvousHandler.from_backend(
            _RUN,
            store,
            C10dRendezvousBackend(store, _RUN),
            limits.min_nodes,
            limits.max_nodes,
            local_addr=address,
            timeout=RendezvousTimeout(join=timedelta(seconds=join_limit()), last_call=timedelta(seconds=_LAST_CALL_S)),
            keep_alive_interval=beat_s,
            keep_alive_max_attempt=3,
        )
        self._server: TCPStore | None = None  # of the ranks of this round
        self._takes_part = False  # in a round, this or an earlier one
        self.set_ranks: Callable[[int], None] = lambda ranks: None  # the agent's number of ranks
        self._note_seen = ""
        self._wanted_since: int | None = None  # checkpoints of this round when somebody began to wait

    def get_backend(self) -> str:
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Close the rendezvous, so that no round begins any more, unless this node is outside the job."""
        if not self.outside:
            with contextlib.suppress(RendezvousError):  # the store is gone: what is asked of it next raises
                self._inner.set_closed()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self.outside or self._inner.shutdown()

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round, with an allowed number of ranks. Raises UsageError when there is none in time."""
        end, logged = time.monotonic() + join_limit(), ""
        if self._takes_part:
            self._checkpoints()  # what the round before saved last is not the next one's
        while True:
            try:
                info = self._inner.next_rendezvous()
                start = self._divide(info)
            except RendezvousTimeoutError:
                raise UsageError(self._nobody()) from None
            except DistStoreError:
                start = "a node was lost while it joined"
            if isinstance(start, Round):
                break
            if time.monotonic() > end:
                raise UsageError(f"{start}; no more came within {join_limit():g} s")
            if start != logged:  # every try takes a second or two
                logger.info("%s; waiting up to %g s for more", start, join_limit())
            logged = start
            time.sleep(BEAT_S)
        self.round, self._channel = start, Channel(info.store, "deepspeed")
        self._wanted_since = 0 if self._lost else None  # its first save may come before the first look
        if self._takes_part:
            self._beats.stop()
        self._beats = Beats(self._channel, start.node, tuple(start.world))
        self._beats.start()
        self._takes_part = True
        self.set_ranks(len(start.world[list(start.world)[start.node]]))
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(start.address, start.port))

    def num_nodes_waiting(self) -> int:
        """Return 1 when all ranks have to start anew: this round is over, or a node joins after a save; else 0."""
        saved = self._checkpoints()
        if self._wanted_since is not None and saved > self._wanted_since:
            self._lost = set()  # what was lost is tried again
            self.end_round(JOIN)
        if self.over:
            return 1
        if not self._lost and self._inner.num_nodes_waiting() == 0:
            self._wanted_since = None
            return 0
        if self._wanted_since is None:
            self._wanted_since = saved
        return 0

    @property
    def over(self) -> str:
        """Return why this round has ended, on some node; empty while it goes on."""
        return str(self._channel.get(_OVER) or "") if self._takes_part else ""

    def end_round(self, why: str) -> str:
        """End this round on all nodes; return the reason that was given first."""
        return str(self._channel.claim(_OVER, why))

    def end_well(self) -> bool:
        """Record that all ranks of this node have returned 0; tell whether those of all other nodes have as well."""
        self._channel.put(f"ended/{self.round.node}")
        return self._channel.has(*(f"ended/{node}" for node in range(len(self.round.world))))

    def lose(self, local_ranks: list[int]) -> None:
        """Leave out the devices of these ranks until the next checkpoint, but never all of the node."""
        devices = self.round.world[list(self.round.world)[self.round.node]]
        self._lost |= {devices[local] for local in local_ranks}
        if self._lost >= set(self._devices):
            self._lost = set()

    def count_crash(self) -> int:
        """Count failed rounds in a row, this one included, without a checkpoint in between."""
        self._checkpoints()  # one may have been saved since the last look
        if self._job.add(f"crashed/{self.round.number}", 1) == 1:
            self._job.add(_CRASHES, 1)
        return self._job.add(_CRASHES)

    def leave_ends(self, ends: list[dict[str, Any]]) -> None:
        """Publish how this node's ranks of the round have ended."""
        self._channel.put(f"ends/{self.round.node}", ends)

    def ends(self, wait_s: float) -> dict[str, tuple[float, list[dict[str, Any]]]]:
        """Return host -> (seconds its clock is behind, ends of its ranks), for the nodes that report in time."""
        reports, until = dict[str, tuple[float, list[dict[str, Any]]]](), time.monotonic() + wait_s
        for node, host in enumerate(self.round.world):
            if self._awaited(f"ends/{node}", until, node):
                reports[host] = self._beats.ahead_s(node), self._channel.get(f"ends/{node}")
        return reports

    @property
    def saved(self) -> str:
        """Return the newest checkpoint of the job; empty while there is none."""
        return str(self._job.get(_SAVED) or "")

    @property
    def outside(self) -> bool:
        """Tell whether a job runs in which this node has had no part yet: its failures do not concern the job."""
        return not self._takes_part and self._job.add("rounds") > 0

    def agree_on(self, verdict: Verdict) -> Verdict:
        """Publish ``verdict`` unless another node came first; return the first one, which holds for all nodes."""
        if self.outside:
            return verdict
        return Verdict(*self._job.claim(_VERDICT, astuple(verdict)))

    def agreed(self, wait_s: float, stop: Callable[[], bool]) -> Verdict:
        """Wait for the verdict of the node that ended the job; a lost-host verdict after ``wait_s`` or ``stop()``."""
        if not self._job.wait(_VERDICT, seconds=wait_s, stop=stop):
            return Verdict(LOST_HOST_STATUS, "deepspeed: another node has ended the job, and not said how\n")
        return Verdict(*self._job.get(_VERDICT))

    def leave(self, wait_s: float, stop: Callable[[], bool]) -> bool:
        """Publish this node's last word; wait for others' of the round, until ``stop()``; tell if any may listen."""
        if not self._takes_part:
            return self._limits.max_nodes > 1
        self._channel.put(f"left/{self.round.node}")
        until = time.monotonic() + wait_s
        for node in range(len(self.round.world)):
            self._awaited(f"left/{node}", until, node, stop)
        self._beats.stop()
        return self._limits.max_nodes > 1

    def _awaited(self, key: str, until: float, node: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait for ``key`` of ``node`` until the time ``until``, its loss or ``stop()``; tell whether it is set."""
        lost = self._beats.silent
        return self._channel.wait(key, seconds=until - time.monotonic(), stop=lambda: node in lost or stop())

    def _nobody(self) -> str:
        """Explain why no round has begun in time."""
        limit = f"within {join_limit():g} s (DS_JOIN_TIMEOUT_S)"
        if self.outside:
            return f"the job that runs has saved no checkpoint {limit}, at which it would take this node in; try again"
        least = f"{self._limits.min_nodes} node(s) (--min_elastic_nodes)"
        return f"fewer than {least} came together {limit}; start more in that time"

    def _divide(self, info: RendezvousInfo) -> Round | str:
        """Divide the ranks over the nodes: return the round, or why it cannot be. All nodes get the same result."""
        channel, nodes = Channel(info.store, "deepspeed"), range(info.world_size)
        remaining = [d for d in self._devices if d not in self._lost]
        beat(channel, info.rank)
        channel.put(f"slots/{info.rank}", [self._host, remaining, self._devices])
        replies = [_answer(channel, f"slots/{node}") for node in nodes]
        for whole in (1, 2):  # with the devices that are not lost, or else with all
            size = self._limits.largest(sum(len(reply[whole]) for reply in replies), info.world_size)
            if size:
                break
        else:
            return too_few(self._limits, sum(len(reply[2]) for reply in replies), info.world_size)
        if whole == 2:
            self._lost = set()
        shares = share_ranks([len(reply[whole]) for reply in replies], size)
        if info.rank == 0:
            self._server = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
            number = self._job.add("rounds", 1) - 1
            channel.put("start", [number, self._address, self._server.port])
        number, address, port = _answer(channel, "start")
        names = [reply[0] for reply in replies]
        unique = names if len(set(names)) == len(names) else [f"{name}#{node}" for node, name in enumerate(names)]
        world = {name: tuple(reply[whole][:share]) for name, reply, share in zip(unique, replies, shares, strict=True)}
        return Round(number, info.rank, world, address, port)

    def _checkpoints(self) -> int:
        """Count the checkpoints that this round has saved; publish a new one noted by a rank of this node."""
        try:
            with open(self._note, encoding="utf-8") as file:
                newest = f"{os.fstat(file.fileno()).st_mtime_ns} {file.read()}"
        except OSError:
            newest = ""
        if newest and newest != self._note_seen:
            self._note_seen = newest
            self._job.put(_SAVED, newest.partition(" ")[2])
            self._job.put(_CRASHES, 0)
            self._channel.add("checkpoints", 1)
        return self._channel.add("checkpoints")
