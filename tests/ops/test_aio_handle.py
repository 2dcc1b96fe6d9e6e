"""``aio_handle``: what is written is what is read, by every call; ``wait`` counts; whatever fails raises and names the
file.
"""

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.accelerator.native.builders import PinMemoryBuilder
from deepspeed.client import aio_handle as handle
from deepspeed.client.aio_handle import FileMismatchError, aio_read, aio_write, deepspeed_memcpy
from deepspeed.ops.aio import aio_handle
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.tier import aio
from tests.harness.aio import MIB
from tests.harness.logs import logged
from tests.harness.offload import file_size_limit

SIZES = (0, 1, 1001, 4096, MIB // 4 + 3)


@pytest.fixture(params=["native", "python"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[aio_handle]:
    """A handle with small blocks; "python" is what there is without a compiler."""
    if request.param == "python":
        monkeypatch.setattr(aio, "try_load", lambda op: None)
    with aio_handle(block_size=64 << 10, queue_depth=8, intra_op_parallelism=2) as opened:
        yield opened


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk, and one on tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs")
    path = Path("/dev/shm") / f"ds_aio_{os.getpid()}"
    path.mkdir()
    yield path
    for each in path.iterdir():
        each.unlink()
    path.rmdir()


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_pair_of_calls(made: aio_handle, folder: Path, count: int, dtype: torch.dtype) -> None:
    name = str(folder / "data")
    values = torch.randint(0, 200, (count,)).to(dtype)
    assert made.write(values, name, validate=True) == 0
    assert os.path.getsize(name) == values.nbytes
    for read in (
        lambda out: made.read(out, name, validate=True) == 0,
        lambda out: made.sync_pread(out, name) == 1,
        lambda out: made.pread(out, name, True, False) == 1,
        lambda out: made.pread(out, name, False, True) == 0 and made.wait() == 1,
        lambda out: made.async_pread(out, name) == 0 and made.wait() == 1,
    ):
        out = torch.zeros_like(values)
        assert read(out)
        assert torch.equal(out, values)
    for write in (
        lambda: made.sync_pwrite(values, name) == 1,
        lambda: made.pwrite(values, name, True, False) == 1,
        lambda: made.pwrite(values, name, False, True) == 0 and made.wait() == 1,
        lambda: made.async_pwrite(values, name) == 0 and made.wait() == 1,
    ):
        os.unlink(name)
        assert write()
        assert Path(name).read_bytes() == values.view(torch.uint8).numpy().tobytes()


def test_more_dimensions_and_views(made: aio_handle, tmp_path: Path) -> None:
    values = torch.arange(1500.0).view(30, 50)
    made.write(values[10:], tmp_path / "part")
    out = torch.zeros(20, 50, requires_grad=True)
    made.read(out, tmp_path / "part")
    assert torch.equal(out, values[10:])
    with pytest.raises(ValueError, match="contiguous"):
        made.sync_pwrite(values.t(), tmp_path / "part")
    made.write(torch.tensor(7.0), tmp_path / "scalar")
    assert made.read(scalar := torch.tensor(0.0), tmp_path / "scalar") == 0
    assert scalar == 7


def test_offsets_leave_the_rest(made: aio_handle, folder: Path) -> None:
    name = folder / "data"
    made.write(torch.zeros(3000), name)
    made.sync_pwrite(torch.ones(1000), name, 4000)
    made.sync_pwrite(torch.full((500,), 2.0), name)
    expected = torch.cat([torch.full((500,), 2.0), torch.zeros(500), torch.ones(1000), torch.zeros(1000)])
    made.read(out := torch.empty(3000), name)
    assert torch.equal(out, expected)
    made.sync_pread(part := torch.empty(700), name, file_offset=1600)
    assert torch.equal(part, expected[400:1100])
    made.sync_pwrite(torch.ones(10), name, 20_000)
    assert name.stat().st_size == 20_040


def test_write_makes_the_file_as_long_as_the_tensor(made: aio_handle, tmp_path: Path) -> None:
    made.write(torch.ones(5000), tmp_path / "data")
    made.write(torch.ones(100), tmp_path / "data")
    assert (tmp_path / "data").stat().st_size == 400
    made.pwrite(torch.ones(10), tmp_path / "data", False, False)
    assert (tmp_path / "data").stat().st_size == 400


def test_wrong_sizes(made: aio_handle, tmp_path: Path) -> None:
    name = tmp_path / "data"
    made.write(torch.ones(100), name)
    with pytest.raises(FileMismatchError, match=r"data has 400 bytes and the tensor 396"):
        made.read(torch.zeros(99), name)
    for call in (made.sync_pread, made.async_pread):
        with pytest.raises(FileMismatchError, match=r"data has 400 bytes; 404 from offset 0"):
            call(torch.zeros(101), name)
        with pytest.raises(FileMismatchError, match=r"400 from offset 4 "):
            call(torch.zeros(100), name, 4)
    with pytest.raises(ValueError, match="negative"):
        made.sync_pwrite(torch.zeros(3), name, -4)
    assert made.wait() == 0
    assert made.sync_pread(torch.zeros(99), name) == 1  # a part is no fault


def test_many_operations_then_one_wait(made: aio_handle, folder: Path) -> None:
    before, count = open_files(), handle._MOST_OPEN + 40
    values = [torch.full((500,), float(i)) for i in range(count)]
    assert not any(made.async_pwrite(each, folder / str(i % 5), i // 5 * 2000) for i, each in enumerate(values))
    assert open_files() <= before + 2 * handle._MOST_OPEN
    assert made.sync_pwrite(torch.ones(5), folder / "between") == 1
    assert made.wait() == count
    assert made.wait() == 0
    assert open_files() <= before
    outs = [torch.zeros(500) for _ in values]
    for i, out in enumerate(outs):
        made.async_pread(out, folder / str(i % 5), i // 5 * 2000)
    assert made.wait() == count
    assert all(torch.equal(out, each) for out, each in zip(outs, values, strict=True))


def test_a_descriptor(made: aio_handle, folder: Path) -> None:
    """By its place and by its keyword, as clients write a tensor in pieces; it stays open, and theirs."""
    values = torch.arange(4096, dtype=torch.float32)
    out = torch.empty_like(values)
    fd = os.open(folder / "data", os.O_CREAT | os.O_RDWR)
    try:
        for start in (2048, 0):
            piece = values[start : start + 2048]
            assert made.async_pwrite(buffer=piece, fd=fd, file_offset=piece.storage_offset() * 4) == 0
        assert made.wait() == 2
        for both in ({}, {"filename": str(folder / "data"), "fd": fd}):
            with pytest.raises(TypeError, match="one of filename and fd"):
                made.async_pwrite(buffer=values, **both)
        os.unlink(folder / "data")  # the descriptor still has the file
        assert made.async_pread(buffer=out[:2048], fd=fd) == made.async_pread(out[2048:], fd=fd, file_offset=8192) == 0
        assert made.wait() == 2 and torch.equal(out, values)
        assert made.sync_pread(out[:16], fd, 8192) == 1 and torch.equal(out[:16], values[2048:2064])
        assert os.fstat(fd).st_size == values.nbytes
    finally:
        os.close(fd)
    with pytest.raises(OSError, match=f"/proc/self/fd/{fd}"):
        made.sync_pwrite(torch.ones(10), fd)


def test_failures_name_the_file(made: aio_handle, tmp_path: Path) -> None:
    before = open_files()
    for call in (made.sync_pread, made.async_pread):
        with pytest.raises(FileNotFoundError, match="nothing"):
            call(torch.zeros(3), tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        made.write(torch.zeros(3), tmp_path / "nowhere" / "data")
    with pytest.raises(IsADirectoryError):
        made.async_pwrite(torch.zeros(3), tmp_path)
    with pytest.raises(OSError, match="/proc/data"):  # nobody may make a file there, whoever runs this
        made.sync_pwrite(torch.zeros(3), "/proc/data")
    assert made.wait() == 0
    assert open_files() <= before


def test_a_full_disk_is_told_by_wait(made: aio_handle, tmp_path: Path) -> None:
    with file_size_limit(MIB), logged() as lines:
        made.async_pwrite(torch.ones(MIB // 4), tmp_path / "fits")
        made.async_pwrite(torch.ones(MIB), tmp_path / "full")
        made.async_pwrite(torch.ones(MIB), tmp_path / "also full")
        with pytest.raises(OSError, match=r"full") as caught:
            made.wait()
        with pytest.raises(OSError, match="full"):
            made.write(torch.ones(MIB), tmp_path / "full")
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "full")
    assert any("also full" in line for line in lines)
    assert made.wait() == 0
    assert (tmp_path / "fits").stat().st_size == MIB
    assert made.sync_pwrite(torch.ones(MIB), tmp_path / "full") == 1


def test_a_failed_write_cuts_nothing_off(made: aio_handle, tmp_path: Path) -> None:
    name = tmp_path / "data"
    name.write_bytes(b"x" * 3 * MIB)
    with file_size_limit(MIB), pytest.raises(OSError, match="data"):
        made.write(torch.ones(MIB // 2), name)
    assert name.stat().st_size == 3 * MIB


def test_validation_sees_another_writer(made: aio_handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = tmp_path / "data"
    made.write(torch.ones(5000), name)
    made.pread(torch.zeros(5000), name, True, True)
    os.truncate(name, 4000)
    monkeypatch.setattr(handle, "_CHECK_BYTES", 1000)
    with pytest.raises((FileMismatchError, OSError), match="data"):
        made.wait()
    with pytest.raises(FileMismatchError, match="from offset 1000 on are not those of the tensor"):
        handle._check_contents(str(name), 0, torch.cat([torch.ones(250), torch.zeros(750)]))


def test_locked_buffers(made: aio_handle, tmp_path: Path) -> None:
    buffer = made.new_cpu_locked_tensor(3000, torch.empty(0, dtype=torch.float16))
    assert (buffer.shape, buffer.dtype, buffer.data_ptr() % made.get_alignment()) == ((3000,), torch.float16, 0)
    made.write(buffer.fill_(3), tmp_path / "data")
    made.read(buffer.zero_(), tmp_path / "data")
    assert torch.all(buffer == 3)
    assert made.is_pinned(buffer) and made.is_pinned(buffer[5:9])
    assert not made.is_pinned(torch.ones(3))
    assert not made.free_cpu_locked_tensor(torch.ones(3))
    assert made.free_cpu_locked_tensor(buffer)
    assert not made.free_cpu_locked_tensor(buffer) and not made.is_pinned(buffer)
    assert torch.all(buffer == 3)
    assert made.new_cpu_locked_tensor(0, buffer).numel() == 0


@pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="the driver locks there")
def test_locked_means_locked(made: aio_handle) -> None:
    def locked_kib() -> int:
        (line,) = (row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmLck"))
        return int(line.split()[1])

    before = locked_kib()
    buffer = made.new_cpu_locked_tensor(MIB, torch.empty(0, dtype=torch.uint8))
    assert not made.is_pinned(buffer) or locked_kib() == before + 1024
    made.close()
    assert locked_kib() == before
    assert buffer.sum() == 0


def test_refused_locking_is_one_line(made: aio_handle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(memory: torch.Tensor) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(handle, "_lock", refuse)
    with logged() as lines:
        buffers = [made.new_cpu_locked_tensor(100, torch.ones(1)) for _ in range(3)]
    assert not any(map(made.is_pinned, buffers))
    assert len(lines) == 1 and "ulimit -l" in lines[0]


def test_closed(made: aio_handle, tmp_path: Path) -> None:
    made.async_pwrite(torch.ones(5000), tmp_path / "data")
    made.close()
    made.close()
    assert (tmp_path / "data").read_bytes() == torch.ones(5000).numpy().tobytes()
    for call in (made.write, made.sync_pwrite, made.async_pwrite, made.sync_pread):
        with pytest.raises(ValueError, match="closed.*data"):
            call(torch.ones(3), str(tmp_path / "data"))
    assert (tmp_path / "data").stat().st_size == 20_000


def test_collected_without_close(tmp_path: Path) -> None:
    before = open_files()
    forgotten = aio_handle()
    for i in range(5):
        forgotten.async_pwrite(torch.full((1000,), float(i)), tmp_path / str(i))
    del forgotten
    gc.collect()
    assert open_files() <= before
    assert all((tmp_path / str(i)).read_bytes() == torch.full((1000,), float(i)).numpy().tobytes() for i in range(5))


def test_settings() -> None:
    with aio_handle() as plain:
        assert (plain.get_block_size(), plain.get_queue_depth(), plain.get_intra_op_parallelism()) == (MIB, 128, 1)
        assert plain.get_single_submit() is False and plain.get_overlap_events() is False
        assert plain.get_alignment() == 4096
    with aio_handle(1000, 4, True, True, 3) as odd:
        assert (odd.get_block_size(), odd.get_queue_depth(), odd.get_thread_count()) == (1000, 4, 3)
        assert odd.get_single_submit() is True and odd.get_overlap_events() is True
    for wrong in ({"block_size": 0}, {"queue_depth": 0}, {"intra_op_parallelism": 0}):
        with pytest.raises(ValueError, match=r"block_size|queue_depth|threads"):
            aio_handle(**wrong)


def test_the_builder_loads_it() -> None:
    for builder in (AsyncIOBuilder(), PinMemoryBuilder()):
        if not builder.is_compatible():
            pytest.skip(builder.why_not())
        module = builder.load()
        assert module.aio_handle is aio_handle
        assert {"aio_read", "aio_write", "deepspeed_memcpy"} <= set(dir(module))


def test_module_functions(tmp_path: Path) -> None:
    values, out = torch.arange(3000.0), torch.zeros(3000)
    assert aio_write(values, str(tmp_path / "data"), MIB, 8, False, False, True) == 0
    assert aio_read(out, str(tmp_path / "data"), MIB, 8, False, False, True) == 0
    assert torch.equal(out, values)
    assert deepspeed_memcpy(target := torch.zeros(30, 100), values) == 0
    assert torch.equal(target.view(-1), values)
