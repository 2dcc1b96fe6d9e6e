"""File IO: what was written is what is read, by every backend and whatever the alignment."""

import ctypes
import errno
import itertools
import os
import random
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepspeed.tier import aio
from deepspeed.tier.aio import AioEngine, DirectFile, aligned_empty
from tests.harness.aio import KIB, MIB, Make, content, noise
from tests.harness.rows import for_each

# --- the bytes ---


def test_any_range_reads_back(make_engine: Make, file: DirectFile) -> None:
    """Against a model in memory: writes and reads of any offset, length and alignment, over each other."""
    engine, total = make_engine(), 700 * KIB
    pick = random.Random(7)
    model = bytearray(total)
    file.allocate(total)
    for turn in range(150):
        offset, length = (
            pick.randrange(total),
            pick.choice([0, 1, 511, 4095, 4096, 4097, pick.randrange(200 * KIB), 128 * KIB]),
        )
        offset = pick.choice([offset, offset // 4096 * 4096])
        length = min(length, total - offset)
        data = noise(length, seed=turn, shift=pick.choice([0, offset % 4096, pick.randrange(4096)]))
        if turn % 3:
            engine.write(file, offset, data).wait()
            model[offset : offset + length] = bytes(data.numpy())
        else:
            engine.read(file, offset, data).wait()
            assert bytes(data.numpy()) == model[offset : offset + length], (turn, offset, length)
    assert content(file) == model


def test_neighbours_share_blocks(make_engine: Make, file: DirectFile) -> None:
    """Transfers under way at once, packed so that each 4096-block at a border belongs to two of them."""
    engine = make_engine(queue_depth=4)
    pick = random.Random(3)
    sizes = [pick.choice([pick.randrange(1, 9000), 4096, 70_001]) for _ in range(60)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    data = [noise(size, seed=i, shift=start % 4096) for i, (size, start) in enumerate(zip(sizes, starts, strict=True))]
    for turn in range(3):
        for tensor in data:
            tensor.add_(turn)
        for transfer in [engine.write(file, start, tensor) for start, tensor in zip(starts, data, strict=True)]:
            transfer.wait()
        assert content(file) == b"".join(bytes(tensor.numpy()) for tensor in data)
        back = [
            torch.zeros_like(aligned_empty(size + 4096)[start % 4096 :][:size])
            for size, start in zip(sizes, starts, strict=True)
        ]
        back += [aligned_empty(size + 4096)[start % 4096 :][:size] for size, start in zip(sizes, starts, strict=True)]
        for transfer in [engine.read(file, start, tensor) for start, tensor in zip(starts * 2, back, strict=True)]:
            transfer.wait()
        assert all(torch.equal(a, b) for a, b in zip(data * 2, back, strict=True))


def test_other_programs_writes_are_seen(make_engine: Make, file: DirectFile) -> None:
    """Through the page cache in, directly out, and the reverse."""
    engine, there, back = make_engine(), noise(300 * KIB), aligned_empty(300 * KIB)
    for turn in range(5):
        there.add_(1)
        Path(file.path).write_bytes(bytes(there.numpy()))
        engine.read(file, 0, back).wait()
        assert torch.equal(there, back), turn
        back.add_(1)
        engine.write(file, 0, back).wait()
        assert content(file) == bytes(back.numpy()), turn


def test_which_bytes_bypass_the_page_cache(make_engine: Make, file: DirectFile, tmp_path: Path) -> None:
    """Whole blocks, where the memory is aligned as well; seen by giving the two descriptors two files."""
    engine = make_engine()
    if not file.direct or engine.backend == "python":
        pytest.skip("for files with O_DIRECT and native code")
    with DirectFile(tmp_path / "cached", create=True) as other:
        file._plain, other._plain = other._plain, file._plain
        try:
            data = noise(200_000, shift=1000)
            engine.write(file, 1000, data).wait()
            expected = bytes(1000) + bytes(data.numpy())
            directly = 201_000 // 4096 * 4096
            assert content(file) == bytes(4096) + expected[4096:directly]
            assert content(other) == expected[:4096] + bytes(directly - 4096) + expected[directly:]
            engine.write(file, 4096, noise(200_000, shift=1)).wait()
            assert content(file) == bytes(4096) + expected[4096:directly]
        finally:
            file._plain, other._plain = other._plain, file._plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_any_dtype_and_shape(make_engine: Make, file: DirectFile, dtype: torch.dtype) -> None:
    """Also tensors that autograd watches, and a scalar."""
    engine = make_engine()
    there = (torch.randn(33, 129) * 3).to(dtype)
    back = aligned_empty((33, 129), dtype=dtype).requires_grad_(dtype.is_floating_point)
    transfer = engine.write(file, 4096, there)
    assert transfer.nbytes == 33 * 129 * dtype.itemsize
    transfer.wait()
    engine.read(file, 4096, back).wait()
    assert torch.equal(there, back)
    one = torch.zeros((), dtype=dtype)
    engine.read(file, 4096, one).wait()
    assert one == there[0, 0]


def test_nothing_to_move(make_engine: Make, file: DirectFile) -> None:
    """A tensor without elements is a transfer like any other, also behind the end."""
    transfer = make_engine().read(file, 12345, torch.empty(0))
    transfer.wait()
    assert transfer.done() and transfer.nbytes == 0


# --- many at once ---


class _Hasty:
    """A lock behind whose first use another thread waits for all that is under way."""

    def __init__(self, engine: AioEngine) -> None:
        self._engine, self._used = engine, False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if not self._used:
            self._used = True
            for transfer in list(self._engine._under_way):
                transfer.wait()


def test_what_another_thread_has_waited_for_before_it_is_handed_out_is_no_failure(
    make_engine: Make, file: DirectFile
) -> None:
    engine, data = make_engine(), torch.arange(5000, dtype=torch.int16)
    hasty = SimpleNamespace(Lock=lambda: _Hasty(engine), current_thread=threading.current_thread)
    with mock.patch.object(aio, "threading", hasty):
        transfer = engine.write(file, 0, data)
    transfer.wait()
    assert transfer.done()


def test_many_small_ones_from_four_threads(make_engine: Make, file: DirectFile) -> None:
    """200 each, waited for in another order than they were started in."""
    engine, size, each = make_engine(queue_depth=16, block_bytes=4096), 5000, 200
    faults: list[BaseException] = []

    def work(which: int) -> None:
        try:
            pick = random.Random(which)
            data = [torch.full((size,), (which * each + i) % 251, dtype=torch.uint8) for i in range(each)]
            starts = [(which * each + i) * size for i in range(each)]
            writes = [engine.write(file, at, tensor) for at, tensor in zip(starts, data, strict=True)]
            for transfer in pick.sample(writes, each):
                transfer.wait()
            back = [torch.zeros_like(tensor) for tensor in data]
            reads = [engine.read(file, at, tensor) for at, tensor in zip(starts, back, strict=True)]
            for transfer in pick.sample(reads, each):
                transfer.wait()
            assert all(torch.equal(a, b) for a, b in zip(data, back, strict=True))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert not engine._under_way and not file._under_way


def test_one_transfer_many_waiters(make_engine: Make, file: DirectFile) -> None:
    """``wait`` may be called by anybody, as often as they like."""
    transfer = make_engine().write(file, 0, noise(4 * MIB))
    threads = [threading.Thread(target=transfer.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transfer.wait()
    assert transfer.done()


def test_done_without_waiting(make_engine: Make, file: DirectFile) -> None:
    """A transfer needs nobody to wait for it; its tensor is let go of when another one starts."""
    engine, data = make_engine(), noise(MIB)
    held, expected = weakref.ref(data), bytes(data.numpy())
    transfer = engine.write(file, 0, data)
    del data
    assert held() is not None or transfer.done()
    while not transfer.done():
        pass
    engine.read(file, 0, torch.empty(0)).wait()
    assert held() is None
    transfer.wait()
    assert content(file) == expected


# --- files and memory ---


def test_tmpfs(make_engine: Make) -> None:
    """Memory filesystems, with O_DIRECT or not."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    path = f"/dev/shm/ds-aio-test-{os.getpid()}"
    try:
        with DirectFile(path, create=True) as file, make_engine() as engine:
            file.allocate(MIB)
            data, back = noise(700_001), aligned_empty(700_001)
            engine.write(file, 8192, data).wait()
            engine.read(file, 8192, back).wait()
            assert torch.equal(data, back)
    finally:
        os.unlink(path)


def test_missing_paths(tmp_path: Path) -> None:
    """As ``open`` says it."""
    with pytest.raises(FileNotFoundError, match="data"):
        DirectFile(tmp_path / "data")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DirectFile(tmp_path / "nowhere" / "data", create=True)
    with pytest.raises(IsADirectoryError):
        DirectFile(tmp_path)


def test_allocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserves, never shrinks, and makes do with the length where a filesystem cannot reserve: the C library's
    posix_fallocate writes a byte into every block there.
    """
    monkeypatch.setattr(aio.os, "posix_fallocate", lambda *_: pytest.fail("written instead"))
    with DirectFile(tmp_path / "data", create=True) as file:
        for wanted, expected in [(0, 0), (100_000, 100_000), (5, 100_000)]:
            file.allocate(wanted)
            assert file.size == expected
        assert os.stat(file.path).st_blocks * 512 >= 100_000

        def cannot(*arguments: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(aio, "_reserve", cannot)
        file.allocate(200_000)
        assert file.size == 200_000


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    """A program started by this one does not hold the file."""
    with DirectFile(tmp_path / "data", create=True) as file:
        assert not any(os.get_inheritable(fd) for fd in (file._plain, file._direct) if fd >= 0)


SHAPES = [0, 1, 4097, (3, 5), (0, 4), (), 5 * MIB]


@for_each(("shape", "dtype"), itertools.product(SHAPES, (torch.uint8, torch.bfloat16, torch.float64)))
def test_aligned_memory(shape: int | tuple[int, ...], dtype: torch.dtype) -> None:
    """Page boundary, shape and dtype as asked, writable, and the memory outlives the first name of it."""
    tensor = aligned_empty(shape, dtype=dtype)
    assert tensor.shape == torch.Size((shape,) if isinstance(shape, int) else shape) and tensor.dtype is dtype
    assert tensor.is_contiguous() and tensor.data_ptr() % 4096 == 0
    view = tensor.view(-1)[-1:]
    del tensor
    assert bool((view.fill_(1) == 1).all())


def test_c_interface_checks_its_arguments() -> None:
    """Refused with a code, not undefined."""
    library = aio.load(aio.ASYNC_IO)
    library.ds_aio_new.restype = ctypes.c_void_p
    error = ctypes.c_int()
    wrong = [(9, 8, 4096, 1), (3, 0, 4096, 1), (3, 8, 4095, 1), (3, 8, 0, 1), (3, 8, 4096, 0), (-1, 8, 4096, 1)]
    for backend, depth, block, threads in wrong:
        assert not library.ds_aio_new(backend, depth, ctypes.c_int64(block), threads, ctypes.byref(error))
        assert error.value == -errno.EINVAL


def test_without_native_code_the_threads_share_a_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, move = threading.Barrier(2, timeout=60), aio._move
    monkeypatch.setattr(aio, "try_load", lambda op: None)
    monkeypatch.setattr(aio, "_move", lambda *what: (together.wait(), move(*what))[1])
    data, out = noise(8192, seed=1, shift=0), noise(8192, seed=2, shift=0)
    with aio.AioEngine(block_bytes=4096, threads=2) as engine, DirectFile(tmp_path / "f", create=True) as file:
        engine.write(file, 0, data).wait()
        engine.read(file, 0, out).wait()
    assert torch.equal(out, data)
