"""What ranks tell each other of their pace, beside the training: a thread of each writes to the job's store, over a
connection of its own, and that of rank 0 reads it, looks for slow ranks and writes the record of the run.
"""

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm.channel import GONE, Channel
from deepspeed.monitor import hostmem
from deepspeed.monitor.log import logger
from deepspeed.monitor.pace import Pace, PaceSpread, RankPace, SlowRank, slow_ranks
from deepspeed.monitor.runfile import RunFile
from deepspeed.profiling.timeline.spans import SAMPLED, StepSpans

BEAT_S = 1.0
_MANY_RANKS = 128  # of which each tells half as often
_LAST_S = 2.0  # how long the first rank waits at the end for what the others have last written
_PENDING = 64  # updates that wait for the thread; of more that a device has not passed, the oldest are left out
_RANKS_S = 60.0  # between two lines of all ranks in the record

Facts = dict[str, Any]


class Board:
    """Thread of one rank. ``channel`` None: alone. ``file``: on the first. ``factor``, ``steps``: of ``slow_ranks``."""

    def __init__(
        self,
        channel: Channel | None,
        *,
        rank: int,
        ranks: int,
        file: RunFile | None,
        factor: float,
        steps: int,
        drive_bytes: Callable[[], int],
    ) -> None:
        self._channel, self._rank, self._ranks, self.file = channel, rank, ranks, file
        self._factor, self._steps, self._drive_bytes = factor, steps, drive_bytes
        self._pace, self._last_step = Pace(steps), 0
        self._pending = deque[tuple[StepSpans, Facts]]()
        self._lock = threading.RLock()  # of the file and what is pending
        self._over = threading.Event()
        self._named: set[int] = set()
        self.slow = deque[SlowRank]()  # named since somebody has last looked, for the monitor
        self._ranks_s, self._memory, self._state = time.monotonic(), Facts(), Facts()
        self._device, self._steps_of = get_accelerator().current_device(), dict[int, int]()
        self._beat_s = BEAT_S * (1 + (ranks > _MANY_RANKS))
        self._facts = {"host": socket.gethostname(), "pid": os.getpid()}
        self._owner, self._complained = os.getpid(), False
        self._thread = threading.Thread(target=self._run, name="deepspeed-observe", daemon=True)
        self._thread.start()

    def put(self, step: StepSpans, facts: Facts) -> None:
        """Queue an update that is over; ``facts``: other facts about it."""
        self._pending.append((step, facts))  # without the lock, under which the thread writes to disk
        if len(self._pending) > _PENDING:  # of many short updates in a beat none is lost
            with self._lock:
                self._take_in()
                while len(self._pending) > _PENDING:
                    self._pending.popleft()

    def write(self, kind: str, **facts: Any) -> None:
        """Write a line of the record, on the first rank."""
        if self.file is not None:
            with self._lock:
                self.file.write(kind, **facts)

    def close(self, *, wait: bool = True, error: str = "") -> None:
        """Send this rank's last state and end the record; ``wait`` for the device. ``error``: what ended the run."""
        if self._over.is_set() or os.getpid() != self._owner:
            return
        self._over.set()
        self._thread.join(_LAST_S)
        end = time.monotonic() + _LAST_S
        with contextlib.suppress(*GONE, OSError):
            self._look(last=wait)
            while self.file is not None and self._behind() and time.monotonic() < end:
                time.sleep(0.01)
                self._look(last=wait)
        if self.file is not None:
            self.write("ranks", **self._state)
            self.file.close(error)
            self._complain()

    def _run(self) -> None:
        get_accelerator().set_device(self._device)  # a new thread stands on the first one
        while not self._over.wait(self._beat_s):
            try:
                self._look()
            except (*GONE, OSError) as error:
                logger.debug("the record of the run waits: %s", error)
            self._complain()

    def _complain(self) -> None:
        """Warn once if the record cannot be written; outside the lock, which listeners to warnings take."""
        if self.file is not None and (fault := self.file.fault) is not None and not self._complained:
            self._complained = True
            logger.warning("observe.run cannot be written: %s; the run goes on, and its record has gaps", fault)

    def _look(self, *, last: bool = False) -> None:
        self._memory = self._measure()
        self._take_in(last=last)
        local = {
            **{"rank": self._rank, "step": self._last_step, "steps": self._pace.steps},
            **{"work": self._pace.work, "wait": self._pace.wait, "memory": self._memory},
            **self._facts,
        }
        if self._channel is not None:
            self._channel.put(f"pace/{self._rank}", local)
        if self._rank == 0:
            others = self._channel.of("pace", range(1, self._ranks)) if self._channel is not None else {}
            self._judge({0: local} | others)

    def _take_in(self, *, last: bool = False) -> None:
        """Sum up the updates that are over."""
        with self._lock:
            while self._pending and (last or self._pending[0][0].known()):
                step, facts = self._pending.popleft()
                if last and not step.known():
                    get_accelerator().synchronize()
                times = step.summary()
                self._last_step = step.number
                if step.noted:
                    self._pace.add(times["total_ms"] - times["wait_ms"], times["wait_ms"])
                if self.file is not None:
                    sampled = {name: times.pop(name) for name in SAMPLED if name in times}
                    self.file.step(times, {"step": step.number, **facts, "memory": self._memory}, sampled)

    def _measure(self) -> Facts:
        """Return the bytes of this rank, per tier."""
        accelerator, memory = get_accelerator(), {"host": hostmem.rss_bytes(), "drive": self._drive_bytes()}
        if accelerator.device_name() != "cpu":
            memory |= {"device": accelerator.memory_allocated(), "device_peak": accelerator.max_memory_allocated()}
        return memory

    def _judge(self, states: dict[int, Facts]) -> None:
        """Warn of slow ranks, once each, and publish how fast each rank is."""
        self._steps_of = {rank: int(state["step"]) for rank, state in states.items()}
        paces = {
            rank: RankPace(rank, s["step"], s["steps"], PaceSpread(*s["work"]), PaceSpread(*s["wait"]), s["host"])
            for rank, s in states.items()
        }
        slow = slow_ranks(paces, ranks=self._ranks, factor=self._factor, steps=self._steps)
        for item in slow:
            if item.pace.rank not in self._named:
                self._named.add(item.pace.rank)
                self.slow.append(item)
                logger.warning("%s", item.text())
                self.write("slow", rank=item.pace.rank, times=item.times, median_ms=item.median_ms, text=item.text())
        if self.file is None:
            return
        self._state = {"ranks": [*states.values()], "slow": {str(s.pace.rank): s.times for s in slow}}
        with self._lock:
            self.file.ranks({"time": time.time(), "of": self._ranks, **self._state})
        if time.monotonic() - self._ranks_s > _RANKS_S:
            self._ranks_s = time.monotonic()
            self.write("ranks", **self._state)

    def _behind(self) -> bool:
        """Return whether another rank has reported fewer updates than this rank's last."""
        return len(self._steps_of) < self._ranks or min(self._steps_of.values()) < self._last_step
