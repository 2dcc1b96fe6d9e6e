"""Host memory of an engine: exact sizes, page-locked or a warning, used again only when no copy uses it, given back."""

import contextlib
import ctypes
import gc
import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from deepspeed.accelerator.device import Accelerator
from deepspeed.monitor.hostmem import rss_bytes
from deepspeed.monitor.log import logger, warning_once
from deepspeed.tier.arena import ALIGN, Arena, _Slab, aligned_empty
from deepspeed.tier.staging import Staging

MIB = 1 << 20


def held_bytes(arena: Arena) -> int:
    """What the arena has taken from the system, in use or not."""
    return sum(slab.nbytes for slab in arena._slabs.values())


class Locks:
    """In the place of a device: what is page-locked now, and how often the program has waited for it."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.waits = 0
        self.refuse = 0  # so many requests from now on

    def lock(self, _: object, address: int, nbytes: int) -> str:
        if self.refuse:
            self.refuse -= 1
            return "the limit is reached"
        assert address % ALIGN == 0 == nbytes % ALIGN and not self.covers(address)
        torch.frombuffer(_memory(address, nbytes), dtype=torch.uint8)[::ALIGN].sum()  # it is there
        self.now[address] = nbytes
        return ""

    def unlock(self, _: object, address: int) -> None:
        nbytes = self.now.pop(address)
        bytes(_memory(address, nbytes)[::ALIGN])  # and still there

    def wait(self, _: object) -> None:
        self.waits += 1

    def covers(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in self.now.items())


def _memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address)


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Locks]:
    made = Locks()
    monkeypatch.setattr(Accelerator, "lock_memory", lambda *args: made.lock(*args))
    monkeypatch.setattr(Accelerator, "unlock_memory", lambda *args: made.unlock(*args))
    monkeypatch.setattr(Accelerator, "synchronize", lambda self: made.wait(self))
    warning_once.cache_clear()
    yield made
    gc.collect(1)  # what a test made is young
    warning_once.cache_clear()


@pytest.mark.parametrize("pin", [False, True])
def test_a_tensor_takes_its_pages_and_nothing_more(locks: Locks, pin: bool) -> None:  # noqa: FBT001
    arena, taken, pages = Arena(pins=True), list[torch.Tensor](), 0
    for nbytes in (1, ALIGN, ALIGN + 1, 3 * MIB, 5 * MIB + 1):
        taken.append(arena.empty(nbytes, pin=pin))
        tensor = taken[-1]
        pages += -(-nbytes // ALIGN) * ALIGN
        assert tensor.nbytes == tensor.untyped_storage().nbytes() == nbytes and tensor.data_ptr() % ALIGN == 0
        assert held_bytes(arena) == pages and sum(locks.now.values()) == (pages if pin else 0)
        assert not tensor.any()


def test_shapes_and_dtypes_and_without_an_accelerator_nothing_is_locked(locks: Locks) -> None:
    tensor = Arena().empty((3, 5), dtype=torch.float32, pin=True)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == ((3, 5), torch.float32, True)
    assert tuple(Arena().empty((0, 5)).shape) == (0, 5)
    assert not locks.now


def test_memory_is_used_again_after_a_wait_for_the_device(locks: Locks) -> None:
    arena = Arena(pins=True)
    first = arena.empty(MIB, pin=True)
    address = first.data_ptr()
    view = first[4:8]
    del first
    other = arena.empty(MIB, pin=True)
    assert other.data_ptr() != address and locks.waits == 0  # a view has it
    del view
    again = arena.empty(MIB, pin=True)
    assert again.data_ptr() == address and locks.waits == 1
    assert held_bytes(arena) == 2 * MIB


def test_what_is_too_small_gives_its_place(locks: Locks) -> None:
    arena = Arena(pins=True)
    for size in range(1, 9):
        arena.empty(size * MIB, pin=True)  # ends at once
    assert held_bytes(arena) == 8 * MIB == sum(locks.now.values())


def test_parts_of_what_is_free_serve_smaller_ones_and_are_joined_again(locks: Locks) -> None:
    arena = Arena(pins=True)
    arena.empty(4 * MIB, pin=True)
    parts = [arena.empty(MIB, pin=True) for _ in range(4)]
    assert held_bytes(arena) == 4 * MIB and len({p.data_ptr() for p in parts}) == 4
    del parts[1], parts[1], parts[0], parts[0]
    arena.empty(4 * MIB, pin=True)
    assert held_bytes(arena) == 4 * MIB


def test_closing_gives_back_what_is_free_and_the_rest_with_its_last_user(locks: Locks) -> None:
    arena = Arena(pins=True)
    kept, dropped = arena.empty(MIB, pin=True), arena.empty(2 * MIB, pin=True)
    del dropped
    arena.close()
    gc.collect()
    assert list(locks.now.values()) == [MIB] and locks.waits  # a copy may have been under way
    assert not kept.any()
    del kept
    assert not locks.now
    arena.empty(MIB, pin=True)  # may still be asked, and keeps nothing
    assert not locks.now and held_bytes(arena) == 0


def test_a_refusal_is_said_once_and_does_not_end_pinning(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, **_: said.append(text))
    locks.refuse = 2
    staging = Staging(3, arena=Arena(pins=True), pin=True)
    buffers = [staging.take(MIB) for _ in range(3)]
    assert [locks.covers(b.data_ptr()) for b in buffers] == [False, False, True]
    assert len(said) == 1 and "page-locked" in said[0] and "the limit is reached" in said[0]


def test_a_device_that_cannot_register_memory_says_so() -> None:
    assert "cannot register" in Accelerator("cpu").lock_memory(0, ALIGN)


def test_an_error_of_the_driver_is_told_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime keeps its last error for the next launch, whoever makes it."""

    pending: list[int] = []

    def register(*_: int) -> int:
        pending.append(2)
        return 2

    def launch(*_: object, device: str) -> None:
        raise RuntimeError(f"error {pending.pop()}")

    runtime = SimpleNamespace(cudaHostRegister=register, cudaGetErrorString="error {}".format)
    monkeypatch.setattr(Accelerator, "_module", SimpleNamespace(cudart=lambda: runtime))
    monkeypatch.setattr(torch, "zeros", launch)
    assert "error 2" in Accelerator("cuda").lock_memory(0, ALIGN) and not pending


def test_the_end_of_a_parents_memory_unlocks_and_unmaps_nothing_in_a_forked_child(locks: Locks) -> None:
    """It does not have that memory, and may have got other memory at the same addresses."""
    tensor = Arena(pins=True, keep=False).empty(MIB, pin=True)
    address = tensor.data_ptr()
    if (child := os.fork()) == 0:
        system = ctypes.CDLL(None)
        system.mmap.restype, fixed = ctypes.c_void_p, 0x100000  # MAP_FIXED_NOREPLACE: nothing is there
        system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        new = system.mmap(address, MIB, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0)
        del tensor
        os._exit(0 if locks.now and new == address and not any(_memory(address, MIB).raw) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locks.now


def test_what_ends_during_the_wait_is_not_given_away_after_it(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a save gives buffers back at any time, whose copies began after the wait."""
    arena = Arena(pins=True)
    late = [arena.empty(MIB, pin=True)]
    address = late[0].data_ptr()
    arena.empty(MIB // 2, pin=True)  # ends at once
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "synchronize", lambda _: late.clear())
        other = arena.empty(MIB, pin=True)
    assert other.data_ptr() != address
    assert arena.empty(MIB, pin=True).data_ptr() == address and locks.waits == 1  # after a wait of its own


def test_memory_is_unlocked_on_the_device_of_its_engine(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last tensor may end in a thread that has chosen no device, and so stands on the first."""
    entered: list[int] = []
    monkeypatch.setattr(Accelerator, "current_device", lambda _: 3)
    tensor = Arena(pins=True, keep=False).empty(MIB, pin=True)
    monkeypatch.setattr(Accelerator, "current_device", lambda _: 0)
    monkeypatch.setattr(Accelerator, "device", lambda _, index: contextlib.nullcontext(entered.append(index)))
    del tensor
    assert entered == [3] and not locks.now


def test_memory_that_is_full_is_not_looked_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has thousands of states."""
    looks, room_for = [0], _Slab.room_for

    def counted(slab: _Slab, nbytes: int) -> tuple[int, int] | None:
        looks[0] += 1
        return room_for(slab, nbytes)

    monkeypatch.setattr(_Slab, "room_for", counted)
    arena = Arena()
    out = [arena.empty(ALIGN) for _ in range(200)]
    assert looks[0] == len(out)


def test_memory_goes_back_to_the_system() -> None:
    before = rss_bytes()
    arena = Arena()
    arena.empty(64 * MIB).fill_(1)
    assert rss_bytes() - before > 60 * MIB
    arena.close()
    assert rss_bytes() - before < 8 * MIB
    aligned_empty(64 * MIB).fill_(1)
    assert rss_bytes() - before < 8 * MIB


@given(actions=st.lists(st.tuples(st.booleans(), st.integers(1, 9 * ALIGN)), max_size=60))
def test_any_sequence_hands_nothing_out_twice(actions: list[tuple[bool, int]]) -> None:
    arena, out = Arena(), list[torch.Tensor]()
    for number, (takes, nbytes) in enumerate(actions):
        if takes or not out:
            tensor = arena.empty(nbytes)
            out.append(tensor.fill_(number % 251))
            tensor.number = number % 251  # type: ignore[attr-defined]
        else:
            out.pop(nbytes % len(out))
        assert all(bool((t == t.number).all()) for t in out)  # type: ignore[attr-defined]
        used = sum(-(-t.nbytes // ALIGN) * ALIGN for t in out)
        assert held_bytes(arena) >= used
