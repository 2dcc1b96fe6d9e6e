"""One noun for work under way: collectives, copies and file IO answer the same three questions."""

import contextlib

import pytest
import torch

from deepspeed.comm.collectives import Collective, SideTransfer
from deepspeed.errors import UsageError
from deepspeed.tier.aio import FileTransfer
from deepspeed.tier.drive import Stored
from deepspeed.tier.store import TierStore
from deepspeed.tier.transfer import ARRIVED, PendingWork, Several, Transfer
from deepspeed.zero.plan import StateKind


class Slow(Transfer):
    """Ends when it is waited for."""

    def __init__(self, nbytes: int, error: OSError | None = None) -> None:
        self.nbytes, self.error, self.ended = nbytes, error, False

    def wait(self) -> None:
        self.ended = True
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.ended


def test_what_has_arrived_costs_nothing() -> None:
    ARRIVED.wait()
    assert ARRIVED.done() and ARRIVED.nbytes == 0


def test_several_end_with_the_last_one_and_tell_its_failure() -> None:
    first, second = Slow(3), Slow(4, OSError("the drive is gone"))
    both = Several([first, ARRIVED, second])
    assert both.nbytes == 7 and not both.done()
    first.wait()
    assert not both.done()
    try:
        both.wait()
        told = ""
    except OSError as error:
        told = str(error)
    assert told == "the drive is gone" and both.done()


def test_all_are_waited_for_though_one_fails() -> None:
    """What they read from must not be used again before."""
    failing, slow = Slow(1, OSError("no space")), Slow(1)
    try:
        Several([failing, slow]).wait()
        raised = False
    except OSError:
        raised = True
    assert raised and slow.ended


def test_several_have_failed_when_one_has_and_all_have_ended() -> None:
    """So that whoever keeps what is under way does not forget it before its error has been raised."""

    class Torn(Slow):
        def wait(self) -> None:
            self.ended = True
            raise UsageError("an update has failed")

        def failed(self) -> bool:
            return self.ended

    torn, slow = Torn(1), Slow(1)
    both, work, kind = Several([torn, slow]), PendingWork(), StateKind.PARAM
    work.note(both, writes=(kind,))
    with contextlib.suppress(UsageError):
        torn.wait()
    assert not both.failed() and not both.done()
    slow.wait()
    assert both.failed()
    work.note(Slow(1), reads=(kind,))
    with pytest.raises(UsageError, match="has failed"):
        work.wait(kind)


def test_a_collective_finishes_once_and_keeps_its_price() -> None:
    calls: list[str] = []
    full = torch.zeros(8)
    transfer = Collective([], full, then=(lambda: calls.append("end"), lambda: calls.append("finish")))
    assert transfer.nbytes == 32 and transfer.done()
    transfer.wait()
    transfer.wait()
    assert calls == ["end", "finish"] and transfer.nbytes == 32


def test_everything_under_way_is_a_transfer_and_every_place_a_store() -> None:
    assert all(issubclass(kind, Transfer) for kind in (Collective, FileTransfer, SideTransfer, Several))
    assert issubclass(Stored, TierStore)


def test_memory_is_a_store() -> None:
    store = TierStore(torch.arange(10.0))
    store.put(torch.full((3,), 7.0, dtype=torch.bfloat16), start=4).wait()
    out = torch.zeros(5)
    store.get(out, start=3).wait()
    assert out.tolist() == [3.0, 7.0, 7.0, 7.0, 7.0]
    with store.open(write=True) as inside:
        inside[0] = -1.0
    assert store.tensor[0] == -1.0 and not store.read_ahead()
    assert store.beside(16).tensor.nbytes == 16
