"""File IO that goes wrong: a failure has a name, nothing hangs, and what is dropped or cut short ends well."""

import ctypes
import errno
import os
import shutil
import struct
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
import torch

from deepspeed.errors import BuildError, DeepSpeedError
from deepspeed.tier import aio
from deepspeed.tier.aio import AioEngine, DirectFile, FileTransfer, TransferError, aligned_empty
from tests.harness.aio import MIB, Make, content, in_a_child, noise, python, usable
from tests.harness.logs import logged
from tests.harness.offload import file_size_limit

# --- failures ---


def test_file_that_ends_too_early(make_engine: Make, file: DirectFile) -> None:
    """Reading past the end names the file; at a block border, in a block, and far behind."""
    engine = make_engine()
    engine.write(file, 0, noise(100_000)).wait()
    for offset, length in [(0, 100_001), (0, 200_000), (98_304, 4096), (99_999, 2), (1 << 40, 10)]:
        transfer = engine.read(file, offset, aligned_empty(length))
        for _ in range(2):
            with pytest.raises(TransferError, match="the file ends before that") as caught:
                transfer.wait()
        assert caught.value.errno == errno.ENODATA and caught.value.filename == file.path
        assert f"reading {length} bytes at offset {offset}:" in str(caught.value)
        assert isinstance(caught.value, OSError) and isinstance(caught.value, DeepSpeedError)
    engine.read(file, 0, aligned_empty(100_000)).wait()


def test_file_size_limit(make_engine: Make, file: DirectFile) -> None:
    """The kernel stops a write in its middle: the part before the limit is a short write, the rest an error."""
    engine = make_engine()
    with file_size_limit(MIB + 100):  # Python ignores SIGXFSZ
        transfer = engine.write(file, 0, noise(2 * MIB))
        with pytest.raises(TransferError, match="may not grow that far.*ulimit") as caught:
            transfer.wait()
    assert caught.value.errno == errno.EFBIG
    engine.write(file, 0, noise(2 * MIB)).wait()


def test_disk_that_refuses_direct_transfers(make_engine: Make, file: DirectFile) -> None:
    """EINVAL from the O_DIRECT descriptor, though it could be opened: the page cache takes over, piece by piece."""
    if not file.direct:
        pytest.skip("for files with O_DIRECT")
    own, refusing = file._direct, os.open("/proc/self/oom_score_adj", os.O_RDWR)  # EINVAL for anything but a number
    file._direct = refusing
    data = noise(500_000).fill_(ord("x"))
    make_engine().write(file, 0, data).wait()
    file._direct = own
    os.close(refusing)
    assert content(file) == bytes(data.numpy())


def test_read_only_file(make_engine: Make, tmp_path: Path) -> None:
    """Reading works, writing names the file."""
    (tmp_path / "data").write_bytes(b"a" * 10_000)
    engine = make_engine()
    with DirectFile(tmp_path / "data", writable=False) as file:
        back = aligned_empty(10_000)
        engine.read(file, 0, back).wait()
        assert bytes(back.numpy()) == b"a" * 10_000
        with pytest.raises(TransferError, match="writable=True") as caught:
            engine.write(file, 0, back).wait()
        assert caught.value.filename == str(tmp_path / "data")


def test_disk_that_failed(make_engine: Make, file: DirectFile) -> None:
    """An error of the system is passed on with its own text."""
    own, file._plain = file._plain, os.open(".", os.O_RDONLY)
    transfer = make_engine().read(file, 5, torch.empty(10))
    with pytest.raises(TransferError, match="Is a directory"):
        transfer.wait()
    os.close(file._plain)
    file._plain = own


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(8, 8).t(), torch.zeros(1).expand(9), torch.empty(4, device="meta"), torch.zeros(2, 2).to_sparse()],
    ids=["transposed", "expanded", "meta", "sparse"],
)
def test_other_tensors(make_engine: Make, file: DirectFile, tensor: torch.Tensor) -> None:
    """Only contiguous host tensors have bytes that can be moved as they are."""
    with pytest.raises(ValueError, match="contiguous host tensors"):
        make_engine().write(file, 0, tensor)


def test_negative_offset(make_engine: Make, file: DirectFile) -> None:
    """Said at once."""
    with pytest.raises(ValueError, match="not negative"):
        make_engine().read(file, -4096, torch.empty(4))


FULL = """
import os, sys
from deepspeed.tier.aio import *
data = aligned_empty(4 << 20)
for backend in sys.argv[2:]:
    with AioEngine(backend=backend) as engine, DirectFile(sys.argv[1] + "/" + backend, create=True) as file:
        for act in (
            lambda: file.allocate(4 << 20),
            lambda: engine.write(file, 0, data).wait(),
            lambda: engine.write(file, 3, data).wait(),
        ):
            try:
                act()
                print("no error")
            except TransferError as error:
                print(error.errno, file.size <= 1 << 20, error)
        os.truncate(file.path, 0)
        file.allocate(1000)
        os.unlink(file.path)
"""


@pytest.mark.in_make_test("tmpfs")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_full_disk(tmp_path: Path, kind: str) -> None:
    """A filesystem of 1 MiB: no room is said with the file's name and what to do."""
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}/disk"
    if kind == "ext4":
        image = tmp_path / "image"
        with image.open("wb") as handle:
            handle.truncate(1 * MIB)
        if (
            not shutil.which("mkfs.ext4")
            or subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], timeout=60).returncode
        ):
            pytest.skip("needs mkfs.ext4")
        mount = f"mount -o loop {image} {tmp_path}/disk"
    wrapper = ("unshare", "-m", "sh", "-c", f'{mount} || exit 77; exec "$@"', "sh")
    if not shutil.which("unshare") or subprocess.run([*wrapper, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("this process may not mount")
    backends = usable()[:-1]
    ran = python(FULL, f"{tmp_path}/disk", *backends, wrapper=wrapper)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == 3 * len(backends)
    for i, line in enumerate(lines):
        assert line.startswith(f"{errno.ENOSPC} ") and "the filesystem is full; free space" in line, line
        # What could not be reserved is given back. Pieces of a write that failed may lie anywhere.
        assert " True " in line[:12] or i % 3, line
        assert f"/disk/{backends[i // 3]}'" in line and ("reserving 4194304 bytes" in line) == (i % 3 == 0)


# --- the ends of things ---


def test_close_finishes_what_is_under_way(make_engine: Make, file: DirectFile) -> None:
    """Engine first: every byte is in the file, the transfers know it, and nothing more can start."""
    engine, data = make_engine(queue_depth=2), noise(16 * MIB)
    transfers = [engine.write(file, at * MIB, data[at * MIB : (at + 1) * MIB]) for at in range(16)]
    engine.close()
    engine.close()
    assert all(transfer.done() for transfer in transfers)
    for transfer in transfers:
        transfer.wait()
    assert content(file) == bytes(data.numpy())
    with pytest.raises(ValueError, match="AioEngine is closed"):
        engine.read(file, 0, data)
    assert not engine._under_way and not file._under_way


def test_file_closed_with_transfers_under_way(make_engine: Make, file: DirectFile) -> None:
    """File first: its descriptors outlive its transfers."""
    engine, data = make_engine(queue_depth=2), noise(16 * MIB)
    transfer = engine.write(file, 0, data)
    file.close()
    transfer.wait()
    assert content(file) == bytes(data.numpy())
    with pytest.raises(ValueError, match="closed"):
        engine.read(file, 0, data)


DROPPED = """
import gc, sys, threading, torch
from deepspeed.ops.aio import aio_handle
from deepspeed.tier import aio
from deepspeed.tier.aio import *
def start(path, **options):
    file = DirectFile(path, create=True)
    engine = AioEngine(queue_depth=1, block_bytes=4096, **options)
    engine.write(file, 0, aligned_empty(2 << 20).fill_(5))
    engine.write(file, 2 << 20, torch.full((9,), 6, dtype=torch.uint8))
native = aio.try_load
for name in sys.argv[2:]:
    if name == "python":
        aio.try_load = lambda op: None
    start(sys.argv[1] + "/" + name, backend="auto" if name == "python" else name)
kept = AioEngine()
file = DirectFile(sys.argv[1] + "/kept", create=True)
kept.write(file, 0, aligned_empty(2 << 20).fill_(5))
kept.write(file, 2 << 20, torch.full((9,), 6, dtype=torch.uint8))
move, begun, collect = aio._move, threading.Event(), [gc.collect]
def collect_and_move(*args):
    begun.wait()
    if collect:
        collect.pop()()
    return move(*args)
aio._move = collect_and_move
gc.disable()  # nobody but its own thread collects the next one
start(sys.argv[1] + "/collected")
aio.try_load = native
handle = aio_handle(block_size=4096)
for number in range(20):
    handle.async_pwrite(torch.full((100_000,), float(number)), f"{sys.argv[1]}/{number}")
begun.set()
"""


def test_dropped_engine_finishes(tmp_path: Path) -> None:
    """An engine that nobody closes or waits for ends well when it is collected or the program ends, tensors included;
    also when its own thread collects it, which cannot wait for itself, and an ``aio_handle`` with much to do.
    """
    names = usable()
    ran = python(DROPPED, str(tmp_path), *names)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    for name in [*names, "kept", "collected"]:
        assert (tmp_path / name).read_bytes() == b"\5" * (2 << 20) + b"\6" * 9, name
    assert [(tmp_path / str(number)).stat().st_size for number in range(20)] == [400_000] * 20


def test_failure_that_nobody_asked_for(make_engine: Make, file: DirectFile) -> None:
    """Closing the engine logs it."""
    with logged() as lines, make_engine() as engine:
        engine.read(file, 7, torch.empty(10))
    assert any("nobody waited for failed" in line and file.path in line for line in lines)


def test_no_descriptor_is_left(make_engine: Make, file: DirectFile) -> None:
    """Engines and files give everything back."""
    make_engine().close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with make_engine() as engine, DirectFile(file.path) as again:
            engine.write(again, 0, torch.zeros(5000)).wait()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_forked_child_gets_an_error(make_engine: Make, tmp_path: Path) -> None:
    """The engine's threads stay with the parent: the child is told so, at once, and may make its own."""
    engine, data = make_engine(), aligned_empty(32 * MIB)
    with DirectFile(tmp_path / "data", create=True) as file:
        transfer = engine.write(file, 0, data)

        def use() -> None:
            for act in (transfer.wait, lambda: engine.read(file, 0, data)):
                with pytest.raises(OSError, match="forked"):
                    act()
            assert transfer.done()
            engine.close()
            with AioEngine() as own:
                own.write(file, 64 * MIB, data[:5000]).wait()

        with transfer._lock:  # as if a thread were waiting just now
            assert in_a_child(use) == 0
        transfer.wait()


class Interrupt(list[int]):
    """Raises where a signal handler would run: after the value is stored."""

    def extend(self, values: Iterable[int]) -> None:
        super().extend(values)
        raise KeyboardInterrupt


def test_interrupted_wait(file: DirectFile) -> None:
    """Ctrl-C between the end of the C call and the next line: the next wait still knows the result."""
    with AioEngine() as engine:
        transfer = engine.write(file, 0, noise(MIB))
        assert isinstance(transfer, FileTransfer)
        transfer._code = Interrupt()
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
        transfer.wait()
        assert engine._calls.wait(transfer._ticket[0]) == -errno.EINVAL  # waited for already
    assert not engine._under_way


# --- choosing ---


@pytest.mark.parametrize("name", ["io_uring", "libaio", "threads"])
def test_environment_chooses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """DS_AIO_BACKEND counts where the caller leaves the choice."""
    monkeypatch.setenv("DS_AIO_BACKEND", name)
    try:
        with AioEngine() as engine, AioEngine(backend="threads") as other:
            assert (engine.backend, other.backend) == (name, "threads")
    except TransferError as error:
        pytest.skip(str(error))


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names what is allowed."""
    wrong = [("queue_depth", 0), ("queue_depth", 5000), ("threads", 0), ("block_bytes", 0), ("block_bytes", 2 << 30)]
    for name, value in wrong:
        with pytest.raises(ValueError, match="not"):
            AioEngine(**{name: value})
    monkeypatch.setenv("DS_AIO_BACKEND", "posix")
    with pytest.raises(ValueError, match="DS_AIO_BACKEND"):
        AioEngine()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python threads do it, unless the caller insists on a kernel interface."""

    def failed_build(op: object) -> None:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(aio, "load", failed_build)
    with pytest.raises(BuildError, match="no C"):
        AioEngine(backend="io_uring")


SETUP, ENTER, REGISTER, IO_SETUP = 425, 426, 427, {"x86_64": 206, "aarch64": 0}.get(os.uname().machine, 206)
NO_FILTER = 77


def refuse(calls: Collection[int]) -> None:
    """A seccomp filter like a container's: these system calls are not permitted to this process."""
    lines = [(0x20, 0, 0, 0)]  # load the number of the system call
    lines += [(0x15, len(calls) - i, 0, number) for i, number in enumerate(calls)]  # equal: to the last line
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | 1)]  # allow; EPERM
    memory = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(memory)))
    libc, word = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong
    if libc.prctl(38, word(1), word(0), word(0), word(0)) or libc.prctl(22, word(2), program, word(0), word(0)):
        os._exit(NO_FILTER)


@pytest.mark.parametrize("calls", [[SETUP], [ENTER], [REGISTER], [SETUP, IO_SETUP]])
def test_sandbox_without_io_uring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """The next backend takes over, and the loss of io_uring is named where it is asked for."""
    if "io_uring" not in usable():
        pytest.skip("no io_uring to take away")
    expected = "libaio" if "libaio" in usable() and IO_SETUP not in calls else "threads"
    monkeypatch.delenv("DS_AIO_BACKEND", raising=False)

    def attempt() -> None:
        refuse(calls)
        with AioEngine() as engine, DirectFile(tmp_path / "data", create=True) as file:
            there, back = noise(300_000), aligned_empty(300_000)
            engine.write(file, 0, there).wait()
            engine.read(file, 0, back).wait()
            assert torch.equal(there, back) and engine.backend == expected
        with pytest.raises(TransferError, match=r"'io_uring' is not to be had here \(Operation not permitted\)"):
            AioEngine(backend="io_uring")

    status = in_a_child(attempt)
    if status == NO_FILTER:
        pytest.skip("this process may not install a seccomp filter")
    assert status == 0
