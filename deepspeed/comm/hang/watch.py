"""Watches over a job that may stand still: says so and why, and ends it where that is asked for.

Every rank has two threads. One looks, a few times a second, whether this rank comes further: whether it has begun or
ended a collective, of ours or of the user's, begun to read or write a file of ours, or got a batch of its loader. The
other writes what it sees to the job's store, under this rank's name. A rank that has waited too long for others reads
what all have written; if no rank has come further for that long, it asks all for a report, compares them
(``explain``), and after a minute says once what it found; after ``hang_timeout``, where that is set, it has all ranks
end. Without it the watch looks every two seconds and listens to no collective, so that it costs next to nothing.
Nothing of this is a collective. A rank that is silent is stopped, or in native code that keeps the interpreter.
"""

import atexit
import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from deepspeed.comm.channel import GONE, Heard, SteadyClock, job_channel
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.hang.explain import LEFT, RAISED, RUNS, SILENT, RankReport, explain
from deepspeed.comm.hang.ledger import Ledger, torch_numbers
from deepspeed.comm.hang.stacks import DEVICE_WAITS, LOADER, WATCHERS, Failure, Spot, failure_of, process_state, spots
from deepspeed.errors import DeepSpeedConfigError, JobHungError
from deepspeed.monitor.log import log_dist, logger
from deepspeed.tier.aio import AioEngine

VARIABLE, NOTICE = "DS_HANG_TIMEOUT", "DS_HANG_NOTICE"
_NOTICE_S = 60.0
_BEAT_S, _NOTICE_BEAT_S = 0.5, 2.0
_GAP_S = 1.0  # between two looks what at most counts as standing still
_MANY_RANKS = 128  # of which each writes half as often
_LEADER_S = 5.0  # of silence, after which another rank takes the place of one that reads the others' reports
_MOST_LEADER_S = 30.0  # the same, of one that beats, as its claim may have been left behind
_ALONE_S = 3.0  # how much longer a rank waits whose store does not answer
_REPORTS_S = 2.0  # how long ranks may take to write a report
_LAST_S = 2.0  # how long the words of a job that ends may take
_CALLS = 5
_NO_ANSWER = "does not answer"
_BLIND_LOOKS = 20  # more than while a group is made


def seconds_of(variable: str, otherwise: float | None, least: float = 1e-9) -> float | None:
    """Return the seconds that a variable names, or ``otherwise``. Raise DeepSpeedConfigError below ``least``."""
    text = os.environ.get(variable)
    if not text:
        return otherwise
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= least:
            return seconds
    raise DeepSpeedConfigError(f"{variable}={text!r} must be a positive number of seconds; unset it, or correct it.")


def _start_of(pid: int) -> str:
    """Return when a process of this machine began, which tells it from a later one of the same number; or ""."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]
    return ""


class HangWatch:
    """Watch of one process over one job: ``start``, ``follow`` engines, ``stop``.

    It reports after ``notice_s`` seconds that the job stands still, and ends it after ``limit_s``; None: it does not.
    """

    def __init__(self, limit_s: float | None, name: str, notice_s: float | None = None) -> None:
        self._rank, self._size, self.ends = dist.get_rank(), dist.get_world_size(), limit_s is not None
        self._limit_s = math.inf if limit_s is None else limit_s
        self._first_s = self._due_s = min(self._limit_s, notice_s or math.inf)  # the next that is due
        often = _BEAT_S if self.ends else _NOTICE_BEAT_S
        self._beat_s = min(self._first_s / 10, often * (1 + (self._size > _MANY_RANKS)))
        self._alone_s = _ALONE_S if self.ends else 10 * self._beat_s  # a busy machine needs some for one exchange
        self._channel, self.ledger = job_channel(name).apart(), Ledger()
        self._thread, self._host = threading.get_ident(), socket.gethostname()
        self._engine: Callable[[], Any] = lambda: None
        self._stopped = threading.Event()
        self._last: tuple[Any, ...] = ()
        self._spot = Spot()
        # Since when no collective has begun or ended; how long one wait lasts; since when the store has not answered.
        self._still_s = self._waited_s = self._silent_store_s = 0.0
        self._last_words = threading.Lock()
        self._owner = os.getpid()
        self._birth = _start_of(self._owner)
        self._beats, self._answered, self._announced = 0, "", ""
        self._left = set[int]()  # ranks whose watch is known to have ended
        # When the claim of another that leads, and its beat, were last new.
        self._heard = Heard(SteadyClock(2 * self._beat_s))
        self._blind_looks = 0  # in a row, as torch counts no collectives
        self._threads = [
            threading.Thread(target=run, name=f"{WATCHERS}-{role}", daemon=True)
            for role, run in (("look", self._look), ("talk", self._talk))
        ]

    @property
    def ended(self) -> bool:
        """Return whether ``stop`` was called."""
        return self._stopped.is_set()

    def start(self) -> None:
        """Start the threads; ``stop`` has to be called before the interpreter ends."""
        self._pulse()  # a rank that is stopped before its first beat has begun all the same
        for thread in self._threads:
            thread.start()

    def ended_ranks(self) -> list[RankReport]:
        """Return the last words of ranks whose watch has ended. Raise RuntimeError where the store is gone."""
        others = (rank for rank in range(self._size) if rank != self._rank)
        return [RankReport.from_values(values) for values in self._channel.of("left", others).values()]

    def stop(self, why: str = "its script has ended") -> None:
        """End the watch of this rank, and leave its last report in the store, for ranks that come to wait for it."""
        if self._stopped.is_set() or os.getpid() != self._owner:  # a fork has neither the threads nor the connection
            return
        self._stopped.set()
        for thread in self._threads:
            thread.join(_LAST_S)
        if not any(thread.is_alive() for thread in self._threads):
            with contextlib.suppress(*GONE):
                self._channel.put(f"left/{self._rank}", asdict(self._report(reason=why)))
            del self._channel  # and its connection

    def follow(self, engine: Any) -> None:
        """Listen to the collectives of an engine (its ``mesh`` names the groups); name its modules and steps."""
        self._engine, self._thread, mesh = weakref.ref(engine), threading.get_ident(), engine.mesh
        if not self.ends:
            return
        names = ("job", "data", "zero", "tp", "pp", "sp", "host", "control", "reducing")
        named = {group.pg.group_name: group for group in mesh.made if group.pg}  # a ring has no other name
        named |= {name: getattr(mesh, name) for name in names}
        named |= {f"axis {i}": group for i, group in enumerate(mesh.groups)}
        named |= {f"ep {group.size}": group for group in mesh.experts}
        groups = {id(group): (group, name) for name, group in named.items() if isinstance(group, AxisGroup)}
        for group, name in groups.values():
            group.ledger.append(self.ledger.listener(name))

    def _look(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._beat_s):
            now = time.monotonic()
            # Of a long gap little counts, as the whole job may have been suspended; a busy machine makes shorter ones.
            passed, before = min(now - before, max(2 * self._beat_s, min(_GAP_S, self._first_s / 2))), now
            progress: tuple[Any, ...] = torch_numbers(), self.ledger.events, AioEngine.begun, self.ledger.waiting
            moved, self._last = progress != self._last or progress[0] is None, progress
            self._tell_of_blindness(counted=progress[0] is not None)
            spot = Spot() if moved else self._glance()
            same = spot.kind != "" and spot.mark == self._spot.mark
            moved |= spot.kind == self._spot.kind == LOADER and not same  # another batch has come
            self._waited_s = self._waited_s + passed if same else 0.0
            self._still_s = 0.0 if moved else self._still_s + passed
            self._due_s = self._first_s if moved else self._due_s
            self._spot = spot
            self._beats += 1
            self._silent_store_s += passed
            if self._waits_too_long(self._alone_s) and self._silent_store_s > self._alone_s:
                self._end_alone()

    def _tell_of_blindness(self, *, counted: bool) -> None:
        """Warn once that with this backend no job is ever known to stand still."""
        self._blind_looks = 0 if counted else self._blind_looks + 1
        if self._blind_looks == _BLIND_LOOKS and self.ends:
            reason = f"the backend {dist.get_backend()!r} does not count its collectives"
            logger.warning("hang_timeout has no effect: %s, so whether this job comes further is not known", reason)

    def _glance(self, modules: dict[int, str] | None = None, *, whole: bool = False) -> Spot:
        """Return this rank's place; an empty one where its stack cannot be read, as it moves meanwhile."""
        try:
            return spots(self._thread, modules or {}, whole=whole, busy=self.ledger.waiting is not None)
        except Exception as error:  # whatever objects are met on a stack, a watch must not end
            logger.debug("a stack could not be read: %s", error)
            return Spot()

    def _waits_too_long(self, more_s: float = 0.0) -> bool:
        return min(self._waited_s, self._still_s) >= self._due_s + more_s

    def _talk(self) -> None:
        while not self._stopped.wait(self._beat_s):
            try:
                self._exchange()
            except dist.DistNetworkError:  # for good: each further call would only have torch print a trace
                return
            except GONE:
                continue
            except Exception as error:  # else this rank falls silent, and is ended as one that cannot end by itself
                logger.debug("the watch over jobs that stand still goes on after %r", error)
            self._silent_store_s = 0.0

    def _pulse(self) -> None:
        last = self.ledger.entries[-1].text() if self.ledger.entries else ""
        pulse = {"beat": self._beats, "still": self._still_s, "host": self._host, "pid": os.getpid(), "last": last}
        self._channel.put(f"pulse/{self._rank}", pulse | {"start": self._birth})

    def _heed(self) -> None:
        """Write this rank's pulse to the store, and obey the order of the leading rank."""
        self._pulse()
        order = self._channel.get("order") or {"kind": ""}
        if order["kind"] == "end":
            self._end(order["silent"])
        elif order["kind"] == "announced" and order["turn"] != self._announced:
            self._announced = order["turn"]
            self._due_s = self._limit_s  # only the end is due, until this rank moves
        elif order["kind"] == "report" and order["turn"] != self._answered:
            self._channel.put(f"report/{order['turn']}/{self._rank}", asdict(self._report()))
            self._answered = order["turn"]

    def _exchange(self) -> None:
        self._heed()
        if self._waits_too_long():
            self._alarm()

    def _failure(self, modules: dict[int, str], *, ends: bool) -> Failure:
        """Return the error of this rank; none if it cannot be read, as its class may be the user's."""
        try:
            return failure_of(self._thread, modules, ends=ends)
        except Exception as error:  # as in ``_glance``
            logger.debug("an error could not be read: %s", type(error).__name__)
            return Failure()

    def _report(self, *, reason: str = "") -> RankReport:
        """Return this rank's report about itself; ``reason``: why its watch ends."""
        named = () if (engine := self._engine()) is None else engine.module.named_modules()
        modules = {id(module): name or type(module).__name__ for name, module in named}
        spot = Spot(ends=True) if reason else self._glance(modules, whole=True)
        failure = self._failure(modules, ends=spot.ends)
        state, text, entry = spot.kind or RUNS, spot.waits, self.ledger.waiting
        if reason or (spot.ends and state == RUNS):
            threads = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
            kept = f", and its process is kept by the threads {', '.join(threads)}" if threads else ""
            state, text = LEFT, reason or f"its script has ended{kept}"
        if (text == "wait" or DEVICE_WAITS.search(text)) and entry is not None:
            text = entry.text().partition(",")[0]
        if failure.text:
            state = RAISED
        return RankReport(
            *(self._rank, self._host, os.getpid(), state, text, spot.unit),
            module=(failure.module if state == RAISED else "") or spot.module,
            line=(failure.line if state == RAISED else "") or spot.line,
            group=spot.group,
            call=spot.call,
            step=getattr(getattr(engine, "runtime", None), "steps", None),
            still_s=self._still_s,
            error=failure.text,
            trace=failure.trace,
            stack=spot.stack,
            numbers=torch_numbers() or {},
            calls=tuple(entry.text() for entry in list(self.ledger.entries)[-_CALLS:]),
        )

    def _alarm(self) -> None:
        """Look whether any rank makes progress, as this one waits too long, if no other rank leads; else report."""
        candidate = [self._rank, self._beats]
        claim = self._channel.claim("leader", candidate)
        if claim != candidate:
            if self._lives(claim):
                return
            if self._channel.swap("leader", claim, candidate) != candidate:  # that rank has stopped, too
                return
        # Few of the alarms that come to nothing, as others work, ask before they know; it leaves more time to answer.
        count = self._channel.add("alarms", 1)
        asked = self._ask() if count & (count - 1) == 0 else None
        first = self._pulses()
        self._pause(max(2.5 * self._beat_s, 2 * _BEAT_S if self._limit_s >= 2 else 0.0))
        second = self._pulses()
        peers = set(second) - {self._rank}
        silent = {r for r in peers if second[r].get("beat") == first[r].get("beat")}
        ended = {r for r in silent if self._channel.has(f"left/{r}")}
        moved = bool(ended - self._left) or any(second[r]["still"] < self._due_s for r in peers - silent)
        self._left = ended  # who has ended since the last look has come further
        text, processes = ("", []) if moved or not self._waits_too_long() else self._judge(second, silent, asked)
        if not text or self._stopped.is_set() or not self._waits_too_long():  # what it waited for has come meanwhile
            self._channel.swap("leader", candidate, None)
            return
        if self._due_s < self._limit_s:
            logger.warning("%s", text.rstrip())
            self._due_s, self._announced = self._limit_s, self._answered
            self._channel.put("order", {"kind": "announced", "turn": self._announced})
            self._channel.swap("leader", candidate, None)
            return
        ends = [*candidate, "ends"]
        if self._channel.swap("leader", candidate, ends) != ends:
            return  # this rank was so slow that another leads
        self._say(text)
        self._channel.put("order", {"kind": "end", "silent": processes})
        self._end(processes)

    def _lives(self, claim: list[Any]) -> bool:
        """Return whether the rank that made ``claim`` may still finish with it, as it beats on."""
        leader = claim[0]
        claimed_s = self._heard.hear("claim", claim)
        silent_s = self._heard.hear("beat", [claim, self._beat_of(leader)])
        return leader != self._rank and silent_s < _LEADER_S and claimed_s < _MOST_LEADER_S

    def _beat_of(self, rank: int) -> int:
        """Return the beat that ``rank`` has last written; -1 before the first."""
        pulse = self._channel.get(f"pulse/{rank}")
        return int(pulse["beat"]) if pulse else -1

    def _pause(self, seconds: float) -> None:
        """Wait, and heed orders meanwhile: others could take a silent leading rank for a stopped one."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0 and not self._stopped.is_set():
            time.sleep(min(left_s, self._beat_s))
            self._heed()

    def _pulses(self) -> dict[int, dict[str, Any]]:
        """Return the last pulse of every rank; {} for a rank that has written none."""
        pulses = {}
        for rank in range(self._size):
            pulses[rank] = self._channel.get(f"pulse/{rank}") or {}
            self._silent_store_s = 0.0
        return pulses

    def _ask(self) -> tuple[str, float]:
        """Ask all ranks for reports; return the name of the turn, and until when to wait for the answers."""
        self._answered = turn = f"{self._rank}.{self._beats}"
        self._channel.put("order", {"kind": "report", "turn": turn})
        return turn, time.monotonic() + _REPORTS_S + 2 * self._beat_s

    def _judge(
        self, pulses: dict[int, dict[str, Any]], silent: set[int], asked_for: tuple[str, float] | None = None
    ) -> tuple[str, list[list[Any]]]:
        """Return why the job stands still, and the processes that cannot end by themselves: host, id, start."""
        turn, end = asked_for or self._ask()
        reports = {self._rank: self._report()}
        reports |= {rank: self._of_silent(rank, pulses[rank]) for rank in silent}
        # Whose interpreter is only slow to let its watch run may answer yet.
        asked = {r for r in range(self._size) if r not in reports or reports[r].what.startswith(_NO_ANSWER)}
        in_time = True
        while asked and in_time:
            # Where the store is slow that time is over; who has answered is heard.
            in_time = time.monotonic() < end and not self.ended
            for rank, values in self._channel.of(f"report/{turn}", [*asked]).items():
                reports[rank] = RankReport.from_values(values)
                asked.remove(rank)
                silent.discard(rank)
            self._silent_store_s = 0.0
            self._pause(self._beat_s / 5)
        reports = {rank: self._of_silent(rank, pulses[rank]) for rank in asked} | reports
        silent |= asked
        # One that beats again ends by itself, as it is told to.
        stopped = {r for r in silent if pulses[r] and self._beat_of(r) == pulses[r]["beat"]}
        gone = [[p["host"], p["pid"], p["start"]] for r, p in pulses.items() if r in stopped]
        return explain([*reports.values()], self._due_s, ends=self._due_s == self._limit_s), gone

    def _of_silent(self, rank: int, pulse: dict[str, Any]) -> RankReport:
        if (last_words := self._channel.get(f"left/{rank}")) is not None:
            return RankReport.from_values(last_words)
        if not pulse:
            return RankReport(rank, state=SILENT, what="has not begun: it never came to where the watch starts")
        state = process_state(pulse["pid"]) if pulse["host"] == self._host else _NO_ANSWER
        if state == "runs or sleeps":
            state = f"{_NO_ANSWER}: native code keeps its interpreter"
        last = f"; its last collective: {pulse['last']}" if pulse["last"] else ""
        return RankReport(rank, pulse["host"], pulse["pid"], SILENT, state + last, still_s=pulse["still"])

    def _say(self, text: str) -> None:
        """Write ``text`` to standard error and to the launcher, which shows it again after all else."""
        self._last_words.acquire()  # for good: the other thread could write over what the launcher reads
        threading.Thread(target=_end_soon, name=f"{WATCHERS}-end", daemon=True).start()  # a user's hook may wait
        error = JobHungError(text)
        sys.excepthook(JobHungError, error, None)

    def _end_alone(self) -> None:
        """Report, and end the job where that is due, without asking anybody: the store does not answer."""
        ends = self._due_s == self._limit_s
        text = explain([self._report()], self._due_s, ends=ends) + (
            "  The job's store does not answer: the process that keeps it (rank 0, if no launcher does) is stopped or "
            "has ended\n"
        )
        if ends:
            self._say(text)
            self._end([])
        logger.warning("%s", text.rstrip())
        self._due_s = self._limit_s

    def _end(self, silent: list[list[Any]]) -> None:
        """End this process without destructors, which could wait; kill the ``silent`` ones of this machine."""
        threading.Thread(target=_end_soon, name=f"{WATCHERS}-end", daemon=True).start()
        for host, pid, start in silent:
            if host == self._host and pid != os.getpid() and _start_of(pid) == start:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(JobHungError.exit_status)


def _end_soon() -> None:
    time.sleep(_LAST_S)
    os._exit(JobHungError.exit_status)


# The watches of this process, oldest first: a process has one, whoever asks for it, because ranks end as processes.
_WATCHES: list[HangWatch] = []
# Engines that want it; one that the launcher wants lasts until the process ends.
_USERS: list[object] = []


def _living() -> HangWatch | None:
    return next((hang_watch for hang_watch in _WATCHES if not hang_watch.ended), None)


def ended_ranks() -> list[RankReport]:
    """Return the last words of ranks that have ended, as far as this process watches them."""
    with contextlib.suppress(*GONE):
        return guard.ended_ranks() if (guard := _living()) is not None else []
    return []


def follow(engine: Any) -> None:
    """Let the watch of this process, if there is one, follow an engine."""
    if (guard := _living()) is not None:
        guard.follow(engine)


def heard(group: AxisGroup, name: str) -> AxisGroup:
    """Return a group that is no engine's, whose collectives the watch of this process reports as those on ``name``."""
    if (guard := _living()) is not None and guard.ends:
        group.ledger.append(guard.ledger.listener(name))
    return group


def watch(configured: float | None = None) -> HangWatch | None:
    """Return this process's watch, started if there is none: one that ends the job if launcher or configuration
    ask for it, else, among several ranks, one that only says that a job stands still (DS_HANG_NOTICE=0: none).

    Every rank of the job has to call it alike. Raise DeepSpeedConfigError for a variable that is no number.
    """
    limit_s, notice_s = seconds_of(VARIABLE, configured), seconds_of(NOTICE, _NOTICE_S, least=0.0)
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    if limit_s is None and (not notice_s or dist.get_world_size() == 1):
        return None
    if (living := _living()) is not None:
        if living.ends or limit_s is None:
            return living
        living.stop("a watch that ends the job takes its place")
    begun = HangWatch(limit_s, f"deepspeed/hang/{len(_WATCHES)}", notice_s)
    _WATCHES.append(begun)
    begun.start()
    atexit.register(begun.stop)
    if limit_s is not None:
        log_dist(f"the job ends when no rank makes progress for {limit_s:g} s (hang_timeout)")
    return begun


@contextlib.contextmanager
def watched(configured: float | None) -> Iterator[None]:
    """Run ``watch`` for as long as an engine lives."""
    guard = watch(configured)
    if guard is None:
        yield
        return
    _USERS.append(user := object())
    try:
        yield
    finally:
        _USERS.remove(user)
        if not _USERS and guard.ends and not os.environ.get(VARIABLE):
            guard.stop("its engine has been destroyed")
