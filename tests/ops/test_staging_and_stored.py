"""Staging buffers never deadlock and keep to their count; a tensor on a drive behaves like the plain tensor it stands
for.
"""

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from deepspeed.errors import UsageError
from deepspeed.tier.aio import TransferError
from deepspeed.tier.arena import ALIGN, aligned_empty
from deepspeed.tier.drive import Drive, Stored
from deepspeed.tier.staging import Staging
from tests.harness.offload import file_size_limit
from tests.harness.rows import for_each

LABEL = "zero_optimization.offload_param.nvme_path"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)


class Pending:
    """A transfer that ends when told to, or when waited for; ``order`` hears of every wait."""

    def __init__(self, *, order: list["Pending"] | None = None, error: OSError | None = None) -> None:
        self.ended = False
        self._order = order
        self._error = error

    def wait(self) -> None:
        self.ended = True
        if self._order is not None:
            self._order.append(self)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self.ended


def held_bytes(staging: Staging) -> int:
    """Bytes of the buffers that are free or still being written from."""
    return sum(b.numel() for b in [*staging._free, *(b for b, _ in staging._busy)])


# -- staging -------------------------------------------------------------------------------------------------------


@for_each("nbytes", [0, 1, 4095, 4096, 4097, 100_000])
def test_buffers_are_aligned_and_large_enough(nbytes: int) -> None:
    buffer = Staging(2).take(nbytes)
    assert buffer.dtype == torch.uint8 and buffer.numel() >= nbytes
    assert buffer.data_ptr() % ALIGN == 0 and buffer.numel() % ALIGN == 0


def test_a_buffer_that_came_back_is_the_next_one() -> None:
    staging = Staging(2)
    first = staging.take(8000)
    place = first.data_ptr()
    staging.give(first)
    assert held_bytes(staging) == 8192
    again = staging.take(5000)
    assert again.data_ptr() == place and held_bytes(staging) == 0
    other = staging.take(8000)
    assert other.data_ptr() != place


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    staging = Staging(3)
    buffers = [staging.take(n) for n in (3 * ALIGN, ALIGN, 2 * ALIGN)]
    for buffer in buffers:
        staging.give(buffer)
    assert staging.take(ALIGN + 1).data_ptr() == buffers[2].data_ptr()
    assert staging.take(1).data_ptr() == buffers[1].data_ptr()
    assert staging.take(1).data_ptr() == buffers[0].data_ptr()


def test_a_buffer_under_way_is_waited_for_and_not_duplicated() -> None:
    order: list[Pending] = []
    staging = Staging(2)
    a, b = staging.take(ALIGN), staging.take(ALIGN)
    first, second = Pending(order=order), Pending(order=order)
    staging.give(a, after=first)
    staging.give(b, after=second)
    assert not staging.has_room()
    assert staging.take(ALIGN).data_ptr() == a.data_ptr()
    assert order == [first] and held_bytes(staging) == ALIGN
    second.ended = True
    assert staging.has_room() and staging.take(ALIGN).data_ptr() == b.data_ptr()


def test_taking_beyond_the_count_does_not_hang_and_the_extra_goes_back() -> None:
    staging = Staging(2)
    buffers = [staging.take(ALIGN) for _ in range(5)]
    assert len({b.data_ptr() for b in buffers}) == 5 and not staging.has_room()
    for buffer in buffers:
        staging.give(buffer)
    assert held_bytes(staging) <= 2 * ALIGN and staging.has_room()


def test_small_free_buffers_give_way_to_a_large_one() -> None:
    staging = Staging(2)
    for buffer in [staging.take(ALIGN), staging.take(ALIGN)]:
        staging.give(buffer)
    large = staging.take(10 * ALIGN)
    assert large.numel() >= 10 * ALIGN
    staging.give(large)
    assert held_bytes(staging) <= 11 * ALIGN


def test_a_failed_transfer_surfaces_and_loses_no_buffer() -> None:
    staging = Staging(1)
    buffer = staging.take(ALIGN)
    staging.give(buffer, after=Pending(error=OSError(5, "the disk failed")))
    with pytest.raises(OSError, match="the disk failed"):
        staging.take(ALIGN)
    assert staging.take(ALIGN).data_ptr() == buffer.data_ptr()


def test_settle_waits_for_all_and_raises_the_first_failure() -> None:
    order: list[Pending] = []
    staging = Staging(3)
    transfers = [
        Pending(order=order),
        Pending(order=order, error=OSError(28, "first")),
        Pending(order=order, error=OSError(5, "later")),
    ]
    for transfer in transfers:
        staging.give(staging.take(1), after=transfer)
    with pytest.raises(OSError, match="first"):
        staging.settle()
    assert order == transfers
    staging.clear()
    assert held_bytes(staging) == 0


@given(
    count=st.integers(1, 4),
    actions=st.lists(st.tuples(st.sampled_from("tgwd"), st.integers(1, 5 * ALIGN)), max_size=60),
)
def test_any_sequence_keeps_the_count(count: int, actions: list[tuple[str, int]]) -> None:
    """t: take, g: give back, w: give back after a transfer, d: a transfer ends. Nothing in use is ever handed out."""
    staging = Staging(count)
    out: list[torch.Tensor] = []
    under_way: list[tuple[Pending, int]] = []
    for what, number in actions:
        if what == "t":
            had_room = staging.has_room()
            buffer = staging.take(number)
            assert buffer.numel() >= number and buffer.data_ptr() % ALIGN == 0
            assert buffer.data_ptr() not in {b.data_ptr() for b in out}
            assert all(t.ended for t, place in under_way if place == buffer.data_ptr())
            out.append(buffer)
            assert not had_room or len(out) <= count
        elif out and what in "gw":
            buffer = out.pop(number % len(out))
            transfer = Pending() if what == "w" else None
            if transfer is not None:
                under_way.append((transfer, buffer.data_ptr()))
            staging.give(buffer, after=transfer)
        elif what == "d" and under_way:
            under_way[number % len(under_way)][0].ended = True
        assert len(staging._free) + len(staging._busy) + len(out) <= max(count, len(out) + len(staging._busy))
        assert len(staging._free) + len(staging._busy) <= count or not staging._free
    staging.settle()
    assert all(t.ended for t, _ in under_way)
    for buffer in out:
        staging.give(buffer)
    assert len(staging._free) <= count


# -- stored --------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_drive(tmp_path: Path) -> Iterator[Callable[..., Drive]]:
    made: list[Drive] = []

    def make(**changes: object) -> Drive:
        options = {"staging": 2, "piece_bytes": 1 << 30, **changes}
        made.append(Drive(str(tmp_path), label=LABEL, block_bytes=8192, queue_depth=4, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for drive in made:
        drive.close()


def values_of(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits that compare equal to themselves."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-1000, 1000, (numel,), generator=generator)
    return (whole & 255 if dtype is torch.uint8 else whole).to(dtype)


def straight(numel: int, dtype: torch.dtype, start: int) -> torch.Tensor:
    """Zeros that lie within their page as elements from ``start`` on lie in the file: bytes travel between the two
    directly.
    """
    shift = start * dtype.itemsize % ALIGN
    return (
        aligned_empty(ALIGN + -(-numel * dtype.itemsize // ALIGN) * ALIGN)
        .zero_()[shift : shift + numel * dtype.itemsize]
        .view(dtype)
    )


def play(stored: Stored, *, seed: int, rounds: int) -> None:
    """Random operations on ``stored`` and on a plain tensor; every load must give what the plain one holds."""
    rng = random.Random(seed)
    plain = values_of(stored.numel, stored.dtype, seed)
    stored.put(plain)
    for number in range(rounds):
        lo = rng.randrange(stored.numel)
        hi = rng.randint(lo + 1, stored.numel)
        what = rng.choice(
            ["put", "put", "load", "load", "whole", "ahead", "ahead", "forget", "open", "into", "from", "settle"]
        )
        if what == "put":
            plain[lo:hi] = values_of(hi - lo, stored.dtype, seed + number)
            stored.put(plain[lo:hi].clone(), start=lo)
        elif what == "load":
            out = torch.zeros(hi - lo, dtype=stored.dtype)
            stored.get(out, start=lo).wait()
            assert torch.equal(out, plain[lo:hi]), (number, lo, hi)
        elif what == "whole":
            out = torch.zeros(stored.numel, dtype=stored.dtype)
            stored.get(out).wait()
            assert torch.equal(out, plain), number
        elif what == "ahead":
            stored.read_ahead()
        elif what == "forget":
            stored.forget_ahead()
        elif what == "open":
            write = rng.random() < 0.5
            with stored.open(write=write) as inside:
                assert torch.equal(inside, plain), number
                inside[lo:hi] += 1
                if write:
                    plain[lo:hi] += 1
        elif what == "into":
            out = straight(hi - lo, stored.dtype, lo)
            stored.get(out, start=lo).wait()
            assert torch.equal(out, plain[lo:hi]), (number, lo, hi)
        elif what == "from":
            plain[lo:hi] = values_of(hi - lo, stored.dtype, seed + number)
            stored.put(straight(hi - lo, stored.dtype, lo).copy_(plain[lo:hi]), start=lo, zero_copy=True)
        else:
            stored.settle()
    stored.settle()
    stored.forget_ahead()


@pytest.mark.parametrize("pieces", [1, ALIGN, 3 * ALIGN, 1 << 30])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_is_the_tensor(make_drive: Callable[..., Drive], dtype: torch.dtype, count: int, pieces: int) -> None:
    drive = make_drive(staging=count, piece_bytes=pieces)
    for numel in (1, 37, 5000, 12_345):
        play(Stored(drive, numel, dtype), seed=numel + count, rounds=40)
    assert drive.staging._out == 0, "a buffer was not given back"
    assert len(drive.staging._free) + len(drive.staging._busy) <= count


def test_neighbours_share_buffers_but_no_bytes(make_drive: Callable[..., Drive]) -> None:
    drive = make_drive(staging=1, piece_bytes=2 * ALIGN)
    tensors = [
        (Stored(drive, n, d), values_of(n, d, n))
        for n, d in [(1000, torch.float32), (1, torch.float64), (9999, torch.bfloat16)]
    ]
    for _ in range(3):
        for stored, values in tensors:
            values += 1
            stored.put(values)
            stored.read_ahead()
    for stored, values in reversed(tensors):
        out = torch.zeros_like(values)
        stored.get(out).wait()
        assert torch.equal(out, values)


def test_reading_ahead_starts_what_there_is_room_for(make_drive: Callable[..., Drive]) -> None:
    drive = make_drive(staging=2, piece_bytes=ALIGN)
    numel = 5 * ALIGN // 4
    first, second = Stored(drive, numel, torch.float32), Stored(drive, numel, torch.float32)
    a, b = values_of(numel, torch.float32, 1), values_of(numel, torch.float32, 2)
    first.put(a)
    second.put(b)
    first.settle()
    second.settle()
    drive.staging.settle()
    before = drive.read_bytes
    assert first.read_ahead() and drive.read_bytes == before + 2 * ALIGN
    assert first.read_ahead() and drive.read_bytes == before + 2 * ALIGN, "what is under way is not read twice"
    assert not second.read_ahead()
    out = torch.zeros(numel)
    second.get(out).wait()  # all buffers are out with the other one
    assert torch.equal(out, b)
    first.get(out).wait()
    assert torch.equal(out, a) and drive.read_bytes == before + 2 * numel * 4


def test_a_write_after_reading_ahead_wins(make_drive: Callable[..., Drive]) -> None:
    stored = Stored(make_drive(staging=2), 3000, torch.float32)
    stored.put(torch.zeros(3000))
    stored.settle()
    assert stored.read_ahead()
    stored.put(torch.ones(10), start=1500)
    out = torch.full((3000,), -1.0)
    stored.get(out).wait()
    assert out.sum() == 10 and out[1500:1510].eq(1).all()


def test_values_of_another_dtype_are_converted(make_drive: Callable[..., Drive]) -> None:
    """What moves, and is counted, is in the width that is stored."""
    drive = make_drive()
    stored = Stored(drive, 5000, torch.bfloat16)
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    stored.put(values)
    stored.settle()
    out = torch.zeros(5000, dtype=torch.float32)
    stored.get(out).wait()
    assert torch.equal(out, values.bfloat16().float())
    assert (drive.written_bytes, drive.read_bytes) == (10_000, 10_000)


def test_space_that_was_dropped_is_used_again(make_drive: Callable[..., Drive]) -> None:
    drive = make_drive()
    other = Stored(drive, 10_000, torch.float32)  # with nothing left the arena would be given back whole
    for round_number in range(5):
        kept = [Stored(drive, 10_000, torch.float32) for _ in range(3)]
        for number, stored in enumerate(kept):
            stored.put(torch.full((10_000,), float(round_number * 3 + number)))
        out = torch.zeros(10_000)
        kept[1].get(out).wait()
        assert out.eq(round_number * 3 + 1).all()
        for stored in kept:
            stored.drop()
    assert drive.used_bytes == 4 * 40_960
    other.drop()
    assert drive.used_bytes == 0


@pytest.mark.parametrize("use", ["load", "open", "read_into", "read_ahead", "settle"])
def test_a_failed_write_is_told_whenever_the_values_are_wanted(
    make_drive: Callable[..., Drive], monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    """Not once only: what the drive holds then is not what was stored."""
    drive = make_drive(staging=4)
    stored = Stored(drive, 1000, torch.float32)
    stored.put(torch.ones(1000))
    stored.settle()
    real = drive._engine.write
    monkeypatch.setattr(drive._engine, "write", lambda *a: Failing(real(*a)))
    stored.put(torch.zeros(1000))
    monkeypatch.undo()
    with contextlib.suppress(TransferError):  # the buffer of the failed write may say so as well
        drive.staging.settle()

    def once() -> None:
        if use == "load":
            stored.get(torch.zeros(1000)).wait()
        elif use == "open":
            with stored.open(write=False):
                pass
        elif use == "read_into":
            stored.get(straight(1000, torch.float32, 0)).wait()
        elif use == "settle":
            stored.settle()
        else:
            assert not stored.read_ahead()

    for _ in range(3):
        with pytest.raises(TransferError, match="injected"):
            once()
    with contextlib.suppress(TransferError):
        stored.put(torch.full((1000,), 2.0))
    out = torch.zeros(1000)
    with contextlib.suppress(TransferError):
        stored.get(out).wait()
        assert out.eq(2).all(), "either the rewrite heals it, or it stays lost"
    stored.drop()
    assert drive.staging._out == 0


def test_a_put_that_cannot_start_gives_its_buffer_back(
    make_drive: Callable[..., Drive], monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = make_drive(staging=2)
    stored = Stored(drive, 1000, torch.float32)

    def refuse(*_: object) -> None:
        raise TransferError(5, "injected")

    for name, use in {
        "write": lambda: stored.put(torch.zeros(1000)),
        "read": lambda: stored.get(torch.zeros(1000)).wait(),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(drive._engine, name, refuse)
            with pytest.raises(TransferError, match="injected"):
                use()
        assert drive.staging._out == 0, name


class Failing:
    """A transfer that ends in an error."""

    def __init__(self, transfer: object) -> None:
        self._transfer = transfer

    def wait(self) -> None:
        self._transfer.wait()  # type: ignore[attr-defined]
        raise TransferError(5, "injected")

    def done(self) -> bool:
        return bool(self._transfer.done())  # type: ignore[attr-defined]


# -- the drive -----------------------------------------------------------------------------------------------------


def test_the_arena_has_no_name_and_frees_its_space(make_drive: Callable[..., Drive], tmp_path: Path) -> None:
    drive = make_drive()
    stored = Stored(drive, 100_000, torch.float32)
    stored.put(torch.ones(100_000))
    assert list(tmp_path.iterdir()) == [] and drive.used_bytes == 401_408
    tmp_path.rmdir()  # somebody cleans up under a running job
    out = torch.zeros(100_000)
    stored.put(torch.full((100_000,), 3.0))
    stored.get(out).wait()
    assert out.eq(3).all()
    tmp_path.mkdir()


def test_two_drives_in_one_folder_keep_apart(make_drive: Callable[..., Drive]) -> None:
    pairs = [(Stored(make_drive(), 4000, torch.float32), float(k)) for k in range(4)]
    for stored, number in pairs:
        stored.put(torch.full((4000,), number))
    out = torch.zeros(4000)
    for stored, number in pairs:
        stored.get(out).wait()
        assert out.eq(number).all()


@pytest.mark.parametrize(
    ("kind", "words"), [("missing", "does not exist"), ("file", "is a file"), ("readonly", "no file can be made there")]
)
def test_a_folder_that_cannot_be_used_is_a_sentence(tmp_path: Path, kind: str, words: str) -> None:
    folder = tmp_path / "here"
    if kind == "missing":
        folder = tmp_path / "not" / "there"
    elif kind == "file":
        folder.write_text("a file")
    else:
        folder = Path("/sys/kernel" if os.geteuid() == 0 else "/")
    with pytest.raises(UsageError, match=words) as told:
        Drive(str(folder), label=LABEL, staging=2)
    assert LABEL in str(told.value) and str(folder) in str(told.value)


def test_the_last_part_of_the_path_is_made(tmp_path: Path) -> None:
    drive = Drive(str(tmp_path / "new"), label=LABEL, staging=2)
    assert (tmp_path / "new").is_dir()
    drive.close()
    drive.close()


def test_drives_that_nobody_closes_leak_no_descriptors(make_drive: Callable[..., Drive], tmp_path: Path) -> None:
    def once() -> None:
        drive = Drive(str(tmp_path), label=LABEL, queue_depth=4, staging=2)
        Stored(drive, 5000, torch.float32).put(torch.ones(5000))

    once()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_no_room_shows_when_space_is_reserved(make_drive: Callable[..., Drive], tmp_path: Path) -> None:
    drive = make_drive()
    with file_size_limit(1 << 20):
        small = Stored(drive, 1000, torch.float32)
        small.put(torch.ones(1000))
        with pytest.raises(TransferError, match=f"nvme_path.*{tmp_path}"):
            Stored(drive, 1 << 20, torch.float32)
        out = torch.zeros(1000)
        small.get(out).wait()
        assert out.eq(1).all() and drive.used_bytes == 4096
        small.drop()
        assert drive.used_bytes == 0  # what was refused is not counted as in use


@pytest.mark.parametrize("backend", ["auto", "threads", "libaio", "io_uring"])
def test_every_backend_gives_the_same_bits(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_AIO_BACKEND", backend)
    try:
        drive = Drive(
            str(tmp_path),
            label=LABEL,
            queue_depth=2,
            block_bytes=4096,
            threads=2,
            staging=2,
            piece_bytes=9000,
        )
    except TransferError as error:
        pytest.skip(str(error))
    play(Stored(drive, 7777, torch.float32), seed=5, rounds=60)
    drive.close()


@given(seed=st.integers(0, 10_000), numel=st.integers(1, 9000), count=st.integers(1, 3), pages=st.integers(1, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_histories(make_drive: Callable[..., Drive], seed: int, numel: int, count: int, pages: int) -> None:
    drive = make_drive(staging=count, piece_bytes=pages * ALIGN)
    play(Stored(drive, numel, torch.float32), seed=seed, rounds=25)
    drive.close()
