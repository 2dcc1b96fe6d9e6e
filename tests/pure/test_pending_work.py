"""Who waits for a state of a unit waits for all that writes it, and for all that reads what is to be written."""

from collections.abc import Callable

import pytest

from deepspeed.errors import UsageError
from deepspeed.tier.transfer import PendingWork, Transfer
from deepspeed.zero.plan import StateKind

PARAM, GRAD, OPTIM = StateKind.PARAM, StateKind.GRAD, StateKind.OPTIM


class Work(Transfer):
    """Ends when it is waited for; ``then`` is what happens meanwhile."""

    def __init__(self, then: Callable[[], object] = lambda: None, *, fails: bool = False) -> None:
        self._then, self._fails = then, fails
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        then, self._then = self._then, lambda: None
        then()
        if self._fails:
            raise UsageError("it has failed")

    def done(self) -> bool:
        return self.waits > 0

    def failed(self) -> bool:
        return self._fails


@pytest.mark.parametrize(
    ("kind", "write", "waits"),
    [(PARAM, False, 0), (OPTIM, False, 1), (OPTIM, True, 1), (GRAD, False, 0), (GRAD, True, 1)],
)
def test_a_reader_waits_for_writers_and_a_writer_for_readers(kind: StateKind, write: bool, waits: int) -> None:  # noqa: FBT001
    pending, work = PendingWork(), Work()
    pending.note(work, reads=(GRAD,), writes=(OPTIM,))
    assert pending.until(kind, write=write).done() is (waits == 0)
    pending.wait(kind, write=write)
    assert work.waits == waits


def test_a_copy_that_an_update_begins_is_waited_for_as_well() -> None:
    """The thread of an update notes the copy of the masters while the program waits for the update."""
    pending, copy = PendingWork(), Work()
    pending.note(Work(lambda: pending.note(copy, reads=(OPTIM,), copy=True)), writes=(OPTIM,))
    pending.wait(OPTIM, write=True)
    assert copy.waits == 1


def test_who_is_ordered_behind_copies_waits_for_updates_only() -> None:
    pending, copy, update = PendingWork(), Work(), Work()
    pending.note(copy, writes=(GRAD,), copy=True)
    pending.note(update, writes=(GRAD,))
    pending.wait(GRAD, copies=False)
    assert (copy.waits, update.waits) == (0, 1)


def test_what_has_failed_is_told_at_every_door_until_it_is_forgotten() -> None:
    pending = PendingWork()
    pending.note(Work(fails=True), writes=(OPTIM,))
    for _ in range(2):
        with pytest.raises(UsageError):
            pending.wait(OPTIM)
        pending.note(Work(), writes=(PARAM,))
    pending.forget_ended()
    pending.wait(OPTIM)
