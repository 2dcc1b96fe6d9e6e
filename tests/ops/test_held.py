"""A tensor on a drive that is being read by another thread keeps its bytes until it has been read."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed.errors import InvalidStateError
from deepspeed.tier.aio import TransferError
from deepspeed.tier.drive import Drive, Stored
from tests.ops.test_staging_and_stored import LABEL, Pending


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    """Ones on a drive."""
    drive = Drive(str(tmp_path), label=LABEL, staging=2)
    found = Stored(drive, 5000, torch.float32)
    found.put(torch.ones(5000))
    yield found
    drive.close()


def test_a_write_waits_until_what_is_held_has_been_read(stored: Stored) -> None:
    old, new = torch.arange(5000.0), torch.full((5000,), -1.0)
    stored.put(old)
    hurried: list[int] = []
    held = [stored.hold(lambda: hurried.append(1)), stored.hold(lambda: hurried.append(2))]
    writer = threading.Thread(target=stored.put, args=(new,))
    writer.start()
    out = torch.empty(20_000, dtype=torch.uint8)
    for one in held:
        writer.join(0.05)
        assert writer.is_alive()
        one.read(0, out)
        assert torch.equal(out.view(torch.float32), old)
        one.release()
    writer.join(20)
    assert not writer.is_alive() and sorted(hurried) in ([1, 2], [2])
    stored.get(out.view(torch.float32)).wait()
    assert torch.equal(out.view(torch.float32), new)
    stored.put(old)  # nothing is held any more
    stored.drop()


def test_space_that_is_being_read_is_not_given_away(stored: Stored) -> None:
    held = stored.hold(lambda: None)
    dropper = threading.Thread(target=stored.drop)
    dropper.start()
    dropper.join(0.1)
    assert dropper.is_alive()
    held.release()
    dropper.join(20)
    assert not dropper.is_alive()


def put_in_a_thread(stored: Stored, value: float) -> threading.Thread:
    """``value`` everywhere, by a thread that may wait for ever without holding up anything else."""
    writer = threading.Thread(target=stored.put, args=(torch.full((5000,), value),), daemon=True)
    writer.start()
    return writer


def test_a_reader_that_got_lost_holds_nothing(stored: Stored) -> None:
    stored.hold(lambda: None)  # as when an interrupt comes before anybody has it
    writer = put_in_a_thread(stored, 2.0)
    writer.join(20)
    assert not writer.is_alive()
    found = [stored.hold(lambda: None)]
    writer = put_in_a_thread(stored, 3.0)
    writer.join(0.1)
    assert writer.is_alive()
    found.clear()  # it gets lost while somebody waits
    writer.join(20)
    assert not writer.is_alive()
    values = torch.empty(5000)
    stored.get(values).wait()
    assert bool((values == 3.0).all())
    stored.drop()


def test_what_could_not_be_written_is_not_held(stored: Stored) -> None:
    stored._writes.append((Pending(error=TransferError(28, "full")), 0, 5000))  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="full"):
        stored.hold(lambda: None)
    stored.put(torch.ones(5000))  # nobody waits


def test_states_that_nobody_writes_remember_no_earlier_save(stored: Stored) -> None:
    for _ in range(5):
        stored.hold(lambda: None).release()
    assert len(stored._readers) == 1


def test_what_is_read_after_its_release_is_refused(stored: Stored) -> None:
    held = stored.hold(lambda: None)
    held.release()
    with pytest.raises(InvalidStateError, match="let go of it"):
        held.read(0, torch.empty(400, dtype=torch.uint8))
