"""One rank's error as a matter of all: how the others hear of it, and whether this one can go on with them.

[Note: failures] A rank that raises keeps its word first: whatever has been decided or predicted it issues as a dummy
participant, so that nobody waits for it in a collective. Then it takes part in the next message with ``Kind.FAILED``,
which comes before all other requests, and every rank gives up the batch: the others with a ``RankFailedError``. All are
at the same place afterwards, with nothing in flight. docs/architecture.md has the states.
"""

import contextlib
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from deepspeed.comm import collectives
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.hang.watch import ended_ranks
from deepspeed.comm.mesh.groups import Mesh, drop_note, leave_note
from deepspeed.errors import CheckpointError, DivergenceError, RankFailedError, UsageError
from deepspeed.monitor.log import logger
from deepspeed.tier.behind import Worker
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.sync.order import CollectiveOrder

_LOUD_AFTER_S = 2.0
_PATIENCE_S = 10.0
_DOUBT_S = 300.0  # longer than ranks that do the same are apart
_ALIKE_S = 10.0  # within which ranks that send each other no messages are to have failed, too


class RankOutOfMemoryError(RankFailedError, torch.OutOfMemoryError):
    """Error of another rank that ran out of memory: handlers of a rank's own catch it, and all skip the batch."""


class RankState(NamedTuple):
    """Report of a rank when one has failed. ``clean``: it has contributed to no reduction since the last message."""

    where: str
    text: str | None
    in_forward: bool
    torn: bool
    clean: bool
    memory: bool


class Aftermath(NamedTuple):
    """State after an error. ``window``: earlier micro-batches stay. ``torn``: why parameters are of two steps."""

    window: bool = False
    torn: str = ""


class Standing(Enum):
    """Standing of a rank to the others. TOGETHER: all are at the same place. UNTOLD: it has failed where ranks send
    each other no messages, and has not seen yet whether all did. BROKEN: it cannot go on with them.
    """

    TOGETHER = "together"
    UNTOLD = "untold"
    BROKEN = "broken"


class Host(Protocol):
    """Protocol of the runtime, as far as ``Failures`` needs it."""

    mesh: Mesh
    worker: Worker | None
    order: CollectiveOrder
    gradients: Gradients

    def reset(self, *, keep_gradients: bool = False) -> None: ...
    def may_owe(self, *, in_forward: bool) -> bool: ...
    def where(self) -> str: ...
    def place(self) -> str: ...


class Failures:
    """Failures of one runtime. ``standing`` goes from TOGETHER to UNTOLD and back, or to BROKEN, where it stays."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.standing = Standing.TOGETHER
        self._why = ""  # of a standing other than TOGETHER
        self._known: BaseException | None = None  # the others know of this error
        self._half_updated = False  # the last error came when others may have updated their parameters
        self._untold = self._losses = 0  # so far: each has a name of its own in the store

    @property
    def broken(self) -> str:
        """Return why this rank cannot go on with the others, or ""."""
        return self._why if self.standing is Standing.BROKEN else ""

    def break_off(self, why: str) -> None:
        """Note that this rank cannot go on with the others."""
        self.standing, self._why = Standing.BROKEN, why

    def note_known(self, error: BaseException) -> None:
        """Note that all ranks have heard of ``error``, which is about to be raised."""
        self._known = error

    def note_half_updated(self, error: BaseException) -> None:
        """Note that ``error`` ended this rank's update; other ranks that do not know of it have made theirs."""
        self._half_updated = error is not self._known

    # -- on the rank that fails ----------------------------------------------------------------------------------------
    def handle(self, error: BaseException, *, in_forward: bool) -> Aftermath:
        """Reset after ``error``, and tell the other ranks of it, if they do not know: [Note: failures].

        Raises RankFailedError in place of an error that only says that another rank is gone.
        """
        host = self._host
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # what the batch has allocated is room for what is pending
        ended = collectives.is_of_backend(error.__cause__ or error)  # the connections to others
        lost = ended or host.order.agreement.apart
        reported = error is self._known
        try:
            where = host.where()
            host.reset(keep_gradients=in_forward)
            if not lost and not reported and isinstance(error, Exception):
                self.lose_batch(error)
                lost = self.standing is Standing.BROKEN
            after = Aftermath(in_forward) if lost else self._tell(error, where, in_forward=in_forward)
            if not after.window:  # of which dummies may have reduced something
                host.gradients.clear()
        except Exception as second:
            logger.error("after %s the other ranks cannot be told: %s", collectives.describe(error), second)
            lost, after = True, Aftermath()
        host.order.drop_pending()
        self._known = None  # it keeps alive what its frames hold
        if lost and host.mesh.job.size > 1:
            self.break_off(collectives.describe(error))
            leave_note(host.mesh, "broken off", about="alive")  # before connections say that this rank is gone
            gone = break_off_all(host.mesh)
            if ended and not reported:
                self._raise_cause(error, gone)
        return after

    def _raise_cause(self, error: BaseException, gone: set[int]) -> None:
        """Raise RankFailedError with the reasons of ranks that have left some, or names of those ``gone`` without."""
        mesh = self._host.mesh
        notes = leave_note(mesh, "")
        notes.pop(mesh.zero.ranks[mesh.zero.index], None)
        if notes:
            causes = "; ".join(f"{mesh.title(rank)} failed: {text}" for rank, text in notes.items())
            raise RankFailedError(f"{causes}; this rank cannot go on without it") from error
        waits = gone and not ended_ranks()  # whose last words are shown when the script ends
        alive = leave_note(mesh, "", about="alive", wait_s=_LOUD_AFTER_S) if waits else {}
        if alive and (ended := ", ".join(map(mesh.title, sorted(gone - alive.keys())))):
            text = "its process has ended or is out of reach, and this rank cannot go on without it"
            raise RankFailedError(f"{ended} does not answer any more: {text}") from error

    def lose_batch(self, error: Exception) -> None:
        """Handle a batch that is lost on this rank. Ranks that share its layers or sequences mostly lose it, too;
        others may wait in a collective for this rank, where no message reaches them: that wait is ended, for good.
        """
        mesh = self._host.mesh
        text, ended = collectives.describe(error), collectives.is_of_backend(error.__cause__ or error)
        self._losses += 1
        about, wait_s = f"lost{self._losses}", 0.0 if ended else _ALIKE_S
        sharers = [group for group in (mesh.tp, mesh.sp) if group.size > 1 and not group.alike]
        notes = [leave_note(mesh, text, about=about, wait_s=wait_s, among=group) for group in sharers]
        if ended or any(len(some) < group.size for some, group in zip(notes, sharers, strict=True)):
            logger.error("this rank has lost a batch (%s) and others have not: they cannot go on with it", text)
            self.break_off(text)
            if not ended or not leave_note(mesh, ""):  # notes say what this one's error follows from
                leave_note(mesh, text)
            for group in sharers:
                collectives.break_off(group)

    def _tell(self, error: BaseException, where: str, *, in_forward: bool) -> Aftermath:
        host, mesh = self._host, self._host.mesh
        if isinstance(error, RankFailedError):
            return Aftermath(error.window, str(error) if error.torn else "")
        if isinstance(error, DivergenceError) or error is self._known:
            return Aftermath()
        if mesh.zero.size == 1 or not isinstance(error, Exception) or not host.may_owe(in_forward=in_forward):
            return Aftermath(in_forward)
        text = collectives.describe(error)
        if mesh.control is None or not host.order.agreement.speaks:
            self.standing, self._why = Standing.UNTOLD, text
            return Aftermath(in_forward)
        leave_note(mesh, text)
        with patience(mesh, text):
            host.order.issue_pending(after=error)
            host.order.ask_until_failed()
            states = self.share(error, where, in_forward=in_forward, group=mesh.control)
            drop_note(mesh)
        alone = any(state.text is None for state in states.values())
        torn = error_of(states, mesh).torn and alone
        return Aftermath(all(state.in_forward for state in states.values()), text if torn else "")

    def rejoin(self) -> None:
        """Find out after an error, where ranks send no messages, whether all have failed at the same place."""
        if self.standing is not Standing.UNTOLD:
            return
        mesh, place, text = self._host.mesh, self._host.place(), self._why
        self.standing = Standing.TOGETHER
        self._untold += 1
        notes = leave_note(mesh, place, about=f"failed{self._untold}", wait_s=_ALIKE_S, among=mesh.zero)
        if len(notes) < mesh.zero.size or set(notes.values()) != {place}:
            self.break_off(text)
            leave_note(mesh, text)
            break_off_all(mesh)

    # -- on all ranks ------------------------------------------------------------------------------------------------
    def heard(self, *, in_forward: bool) -> RankFailedError:
        """Return the error that this rank raises where another one has failed. Collective."""
        mesh = self._host.mesh
        assert mesh.control is not None
        return error_of(self.share(None, self._host.where(), in_forward=in_forward, group=mesh.control), mesh)

    def share(
        self, error: BaseException | None, where: str, *, in_forward: bool, group: AxisGroup
    ) -> dict[int, RankState]:
        """Exchange the state of every rank after a failure. Collective."""
        host = self._host
        text = None if error is None else collectives.describe(error)
        memory = isinstance(error, torch.OutOfMemoryError)
        torn = self._half_updated or (host.worker is not None and host.worker.failure is not None)
        local = RankState(where, text, in_forward, torn, host.order.clean, memory)
        states = dict(zip(group.ranks, collectives.gather_objects(local, group), strict=True))
        host.order.restart(forget_vacant=all(state.in_forward and state.clean for state in states.values()))
        self._half_updated = False
        return states

    def check(self) -> None:
        """Raise UsageError where this rank cannot go on with the others."""
        self.rejoin()
        if self.standing is Standing.BROKEN:
            raise UsageError(
                f"this rank failed alone ({self._why}) and the others may be waiting for it: it cannot go on "
                "with them. Start the job again; under zero_optimization.divergence 'assume_none' ranks that skip a "
                "batch must all skip it, at the same place, or use 'tolerate'"
            )


def error_of(states: dict[int, RankState], mesh: Mesh) -> RankFailedError:
    """Build the error that ranks raise that have not failed themselves."""
    failed = {rank: state for rank, state in states.items() if state.text is not None}
    causes = "; ".join(f"{mesh.title(rank)} failed ({s.where}): {s.text}" for rank, s in failed.items())
    torn = any(s.torn for s in failed.values())
    advice = (
        "the others have taken that step, so the parameters are of two steps: load a checkpoint"
        if torn
        else "the batch is given up on all ranks. To skip such batches catch this as that rank catches its own"
    )
    error = (RankOutOfMemoryError if any(s.memory for s in failed.values()) else RankFailedError)(f"{causes}; {advice}")
    error.torn, error.window = torn, all(s.in_forward for s in states.values())
    return error


@contextlib.contextmanager
def serving(worker: Worker | None) -> Iterator[None]:
    """Let this rank, inside, serve the others, who give up as well, even if its update has failed."""
    if worker is not None:
        worker.serves = True
    try:
        yield
    finally:
        if worker is not None:
            worker.serves = False


@contextlib.contextmanager
def doubt(mesh: Mesh, text: str) -> Iterator[None]:
    """Wait with ``patience`` for others that may do as this rank does; ``text`` is for those that do not."""
    leave_note(mesh, text)
    with patience(mesh, text, seconds=_DOUBT_S):
        yield
    drop_note(mesh)


@contextlib.contextmanager
def patience(mesh: Mesh, text: str, *, seconds: float | None = None) -> Iterator[None]:
    """Say in the log that this rank waits, and after a while end the waits inside by an error of the backend.

    The other ranks may be where no message reaches them; this rank's error must be seen all the same.
    """
    ended = threading.Event()

    def watch() -> None:
        if ended.wait(_LOUD_AFTER_S):
            return
        state = "has failed" if seconds is None else "does what the others may not do"
        logger.error("this rank %s (%s) and waits for the others, to tell them", state, text)
        if not ended.wait(_PATIENCE_S if seconds is None else seconds):
            break_off_all(mesh)

    watcher = threading.Thread(target=watch, name="ds-failure", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def break_off_all(mesh: Mesh) -> set[int]:
    """End every wait on the groups of ``mesh``, for good: first on the hosts', which go on to end their own. Return the
    ranks whose connections were gone.
    """
    groups = (mesh.control, *mesh.groups, mesh.pp, mesh.tp, mesh.sp, mesh.host, *mesh.made)
    apart = {group.pg: group for group in sorted(filter(None, groups), key=lambda group: group.backend != "gloo")}
    return set().union(*map(collectives.break_off, apart.values()))


@dataclass
class Shared:
    """Values to gather: ``mine`` is set by this rank; ``all`` holds every rank's, in rank order, after the body."""

    mine: Any = None
    all: Sequence[Any] = ()


@contextlib.contextmanager
def together(mesh: Mesh, action: str) -> Iterator[Shared]:
    """Run the body on every rank of the job; raise an error of one on all, with rank and ``action``. Collective.

    Other ranks get a CheckpointError: what ranks do together here is to save and to load.
    """
    shared, error = Shared(), None
    try:
        yield shared
    except Exception as failure:  # whatever it is, the other ranks wait for the answer
        error = failure
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    local = (None, shared.mine) if error is None else ((kind, str(error)), None)
    bad, shared.all = zip(*collectives.gather_objects(local, mesh.talk), strict=True)
    if isinstance(error, CheckpointError):
        raise error
    for rank, (kind, text) in ((rank, fault) for rank, fault in zip(mesh.job.ranks, bad, strict=True) if fault):
        raise kind(f"{action} failed on {mesh.title(rank)}: {text}") from error
