"""What one rank's error is to the others: the words in which they hear of it, and how long one waits to say them.

[Note: failures] A rank that raises keeps its word first: whatever has been decided or foretold it issues as a guest, so
that nobody waits for it in a collective. Then it takes part in the next message with ``Kind.FAILED``, which comes
before all other requests, and every rank gives up the batch: the others with a ``RankFailedError``. All are at the same
place afterwards, with nothing in flight. docs/architecture.md, section 6.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from deepspeed.comm import collectives
from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import RankFailedError, UsageError
from deepspeed.mesh.groups import Mesh, drop_note, leave_note
from deepspeed.observe.log import logger
from deepspeed.tier.behind import Worker

_LOUD_AFTER_S = 2.0
_PATIENCE_S = 10.0
_DOUBT_S = 300.0  # longer than ranks that do the same are apart


class RankOutOfMemoryError(RankFailedError, torch.OutOfMemoryError):
    """Another rank ran out of memory: what catches one's own such error catches this, and all skip the batch."""


class RankState(NamedTuple):
    """What a rank says when one has failed. ``clean``: it has contributed to no reduction since the last message."""

    where: str
    text: str | None
    in_forward: bool
    torn: bool
    clean: bool
    memory: bool


class Aftermath(NamedTuple):
    """``window``: what earlier micro-batches have accumulated stays. ``torn``: why the parameters are of two steps."""

    window: bool = False
    torn: str = ""


def error_of(states: dict[int, RankState], mesh: Mesh) -> RankFailedError:
    """What the ranks that have not failed raise."""
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


def settle_together(
    worker: Worker | None,
    settle: Callable[[], object],
    mesh: Mesh,
    *,
    groups: Sequence[AxisGroup] = (),
    once: tuple[object, ...] = (),
) -> None:
    """Wait, by ``settle``, for updates behind the program. Collective over the ``groups``, one after the other (none:
    all ranks): what has failed on one rank is a UsageError on all, which names it, so that none waits in what follows.
    ``once``: what for, beginning with the number of the update; where that is known to be there nobody is asked again.
    """
    if worker is not None and once and worker.agreed.get(once[1:]) == once[0]:
        return
    fault: Exception | None = None
    try:
        settle()
        if worker is not None:
            worker.check()
    except Exception as error:  # also of what comes home behind an update
        fault = error
    named = fault
    for group in groups or (mesh.job,):
        for rank, text in collectives.failures(named, group).items():
            named = named or UsageError(f"on {mesh.title(rank)}: {text}")
    if named is None:
        if worker is not None and once:
            worker.agreed[once[1:]] = once[0]
        return
    if worker is None:
        raise named
    worker.announced, worker.failure = True, worker.failure or named
    worker.check()  # raises


@contextlib.contextmanager
def serving(worker: Worker | None) -> Iterator[None]:
    """Inside, the failure of an update keeps this rank from nothing that the others, who give up as well, wait for."""
    if worker is not None:
        worker.serves = True
    try:
        yield
    finally:
        if worker is not None:
            worker.serves = False


@contextlib.contextmanager
def doubt(mesh: Mesh, text: str) -> Iterator[None]:
    """``patience``, of a rank that may be right, as others may do the same; ``text`` is for those that do not."""
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


def break_off_all(mesh: Mesh) -> None:
    """End every wait on the groups of ``mesh``, for good: first of the hosts, which go on to end their own."""
    groups = (mesh.control, *mesh.groups, mesh.pp, mesh.tp, mesh.host, *mesh.made)
    for group in sorted(filter(None, groups), key=lambda group: group.backend != "gloo"):
        collectives.break_off(group)
