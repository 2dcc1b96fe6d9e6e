"""File IO: what was written is what is read, by every backend and whatever the alignment; a failure has a name, and nothing hangs."""

import contextlib
import ctypes
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deepspeed.errors import BuildError, DeepSpeedError
from deepspeed.observe.log import logger
from deepspeed.tier import aio
from deepspeed.tier.aio import AioEngine, DirectFile, Transfer, TransferError, aligned_empty
from tests.budget.source import ROOT

BACKENDS = ("io_uring", "libaio", "threads", "python")
KIB, MIB = 1 << 10, 1 << 20
Make = Callable[..., AioEngine]


def failed_build(op: object) -> None:
    """In the place of ``load``: no compiler here."""
    raise BuildError("no C++ compiler")


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines of one backend; "python" is what there is without a compiler."""
    engines: list[AioEngine] = []
    if request.param == "python":
        monkeypatch.setattr(aio, "try_load", lambda op: None)

    def engine(**options: int) -> AioEngine:
        backend = "auto" if request.param == "python" else request.param
        try:
            engines.append(AioEngine(backend=backend, **{"queue_depth": 8, "block_bytes": 64 * KIB, "threads": 2, **options}))
        except TransferError as error:
            pytest.skip(str(error))
        assert engines[-1].backend == request.param
        return engines[-1]

    yield engine
    for each in engines:
        each.close()


@pytest.fixture(params=["direct", "plain"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectFile]:
    """An empty file, with and without O_DIRECT."""
    with monkeypatch.context() as patch:
        if request.param == "plain":
            refuse_direct(patch)
        opened = DirectFile(tmp_path / "data", create=True)
    if request.param == "direct" and not opened.direct:
        pytest.skip("this filesystem has no O_DIRECT")
    assert opened.direct == (request.param == "direct")
    with opened:
        yield opened


def refuse_direct(patch: pytest.MonkeyPatch) -> None:
    """A filesystem without O_DIRECT."""
    real = os.open

    def refusing(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, *more)

    patch.setattr(aio.os, "open", refusing)


def noise(nbytes: int, *, seed: int = 0, shift: int = 0) -> torch.Tensor:
    """Random bytes, ``shift`` bytes behind a page boundary."""
    memory = aligned_empty(nbytes + shift)[shift:]
    return memory.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def content(file: DirectFile) -> bytes:
    """The file as another program sees it."""
    return Path(file.path).read_bytes()


def python(script: str, *arguments: str, wrapper: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script that imports this package, with a time limit."""
    return subprocess.run(
        [*wrapper, sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
    )


def usable() -> list[str]:
    """The backends of this machine."""
    found = []
    for name in BACKENDS[:3]:
        with contextlib.suppress(TransferError), AioEngine(backend=name):
            found.append(name)
    return [*found, "python"]


# --- the bytes ---


def test_any_range_reads_back(make: Make, file: DirectFile) -> None:
    """Against a model in memory: writes and reads of any offset, length and alignment, over each other."""
    engine, total = make(), 700 * KIB
    pick = random.Random(7)
    model = bytearray(total)
    file.allocate(total)
    for turn in range(150):
        offset, length = pick.randrange(total), pick.choice([0, 1, 511, 4095, 4096, 4097, pick.randrange(200 * KIB), 128 * KIB])
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


def test_neighbours_share_blocks(make: Make, file: DirectFile) -> None:
    """Transfers under way at once, packed so that each 4096-block at a border belongs to two of them."""
    engine = make(queue_depth=4)
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
        back = [torch.zeros_like(aligned_empty(size + 4096)[start % 4096 :][:size]) for size, start in zip(sizes, starts, strict=True)]
        back += [aligned_empty(size + 4096)[start % 4096 :][:size] for size, start in zip(sizes, starts, strict=True)]
        for transfer in [engine.read(file, start, tensor) for start, tensor in zip(starts * 2, back, strict=True)]:
            transfer.wait()
        assert all(torch.equal(a, b) for a, b in zip(data * 2, back, strict=True))


def test_other_programs_writes_are_seen(make: Make, file: DirectFile) -> None:
    """Through the page cache in, directly out, and the reverse."""
    engine, there, back = make(), noise(300 * KIB), aligned_empty(300 * KIB)
    for turn in range(5):
        there.add_(1)
        Path(file.path).write_bytes(bytes(there.numpy()))
        engine.read(file, 0, back).wait()
        assert torch.equal(there, back), turn
        back.add_(1)
        engine.write(file, 0, back).wait()
        assert content(file) == bytes(back.numpy()), turn


def test_which_bytes_bypass_the_page_cache(make: Make, file: DirectFile, tmp_path: Path) -> None:
    """Whole blocks, where the memory is aligned as well; seen by giving the two descriptors two files."""
    engine = make()
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
def test_any_dtype_and_shape(make: Make, file: DirectFile, dtype: torch.dtype) -> None:
    """Also tensors that autograd watches, and a scalar."""
    engine = make()
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


def test_nothing_to_move(make: Make, file: DirectFile) -> None:
    """A tensor without elements is a transfer like any other, also behind the end."""
    transfer = make().read(file, 12345, torch.empty(0))
    transfer.wait()
    assert transfer.done() and transfer.nbytes == 0


# --- many at once ---


def test_many_small_ones_from_four_threads(make: Make, file: DirectFile) -> None:
    """200 each, waited for in another order than they were started in."""
    engine, size, each = make(queue_depth=16, block_bytes=4096), 5000, 200
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


def test_one_transfer_many_waiters(make: Make, file: DirectFile) -> None:
    """``wait`` may be called by anybody, as often as they like."""
    transfer = make().write(file, 0, noise(4 * MIB))
    threads = [threading.Thread(target=transfer.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transfer.wait()
    assert transfer.done()


def test_done_without_waiting(make: Make, file: DirectFile) -> None:
    """A transfer needs nobody to wait for it; its tensor is let go of when another one starts."""
    engine, data = make(), noise(MIB)
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


# --- failures ---


def test_file_that_ends_too_early(make: Make, file: DirectFile) -> None:
    """Reading past the end names the file; at a block border, in a block, and far behind."""
    engine = make()
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


def test_file_size_limit(make: Make, file: DirectFile) -> None:
    """The kernel stops a write in its middle: the part before the limit is a short write, the rest an error."""
    engine, before = make(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 100, before[1]))  # Python ignores SIGXFSZ
    try:
        transfer = engine.write(file, 0, noise(2 * MIB))
        with pytest.raises(TransferError, match="may not grow that far.*ulimit") as caught:
            transfer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    engine.write(file, 0, noise(2 * MIB)).wait()


def test_disk_that_refuses_direct_transfers(make: Make, file: DirectFile) -> None:
    """EINVAL from the O_DIRECT descriptor, though it could be opened: the page cache takes over, piece by piece."""
    if not file.direct:
        pytest.skip("for files with O_DIRECT")
    own, refusing = file._direct, os.open("/proc/self/oom_score_adj", os.O_RDWR)  # EINVAL for anything but a number
    file._direct = refusing
    data = noise(500_000).fill_(ord("x"))
    make().write(file, 0, data).wait()
    file._direct = own
    os.close(refusing)
    assert content(file) == bytes(data.numpy())


def test_read_only_file(make: Make, tmp_path: Path) -> None:
    """Reading works, writing names the file."""
    (tmp_path / "data").write_bytes(b"a" * 10_000)
    engine = make()
    with DirectFile(tmp_path / "data", writable=False) as file:
        back = aligned_empty(10_000)
        engine.read(file, 0, back).wait()
        assert bytes(back.numpy()) == b"a" * 10_000
        with pytest.raises(TransferError, match="writable=True") as caught:
            engine.write(file, 0, back).wait()
        assert caught.value.filename == str(tmp_path / "data")


def test_disk_that_failed(make: Make, file: DirectFile) -> None:
    """An error of the system is passed on with its own text."""
    own, file._plain = file._plain, os.open(".", os.O_RDONLY)
    transfer = make().read(file, 5, torch.empty(10))
    with pytest.raises(TransferError, match="Is a directory"):
        transfer.wait()
    os.close(file._plain)
    file._plain = own


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(8, 8).t(), torch.zeros(1).expand(9), torch.empty(4, device="meta"), torch.zeros(2, 2).to_sparse()],
    ids=["transposed", "expanded", "meta", "sparse"],
)
def test_other_tensors(make: Make, file: DirectFile, tensor: torch.Tensor) -> None:
    """Only contiguous host tensors have bytes that can be moved as they are."""
    with pytest.raises(ValueError, match="contiguous host tensors"):
        make().write(file, 0, tensor)


def test_negative_offset(make: Make, file: DirectFile) -> None:
    """Said at once."""
    with pytest.raises(ValueError, match="not negative"):
        make().read(file, -4096, torch.empty(4))


# --- the ends of things ---


def test_close_finishes_what_is_under_way(make: Make, file: DirectFile) -> None:
    """Engine first: every byte is in the file, the transfers know it, and nothing more can start."""
    engine, data = make(queue_depth=2), noise(16 * MIB)
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


def test_file_closed_with_transfers_under_way(make: Make, file: DirectFile) -> None:
    """File first: its descriptors outlive its transfers."""
    engine, data = make(queue_depth=2), noise(16 * MIB)
    transfer = engine.write(file, 0, data)
    file.close()
    transfer.wait()
    assert content(file) == bytes(data.numpy())
    with pytest.raises(ValueError, match="closed"):
        engine.read(file, 0, data)


DROPPED = """
import sys, torch
from deepspeed.tier import aio
from deepspeed.tier.aio import *
def start(path, **options):
    file = DirectFile(path, create=True)
    engine = AioEngine(queue_depth=1, block_bytes=4096, **options)
    engine.write(file, 0, aligned_empty(2 << 20).fill_(5))
    engine.write(file, 2 << 20, torch.full((9,), 6, dtype=torch.uint8))
for name in sys.argv[2:]:
    if name == "python":
        aio.try_load = lambda op: None
    start(sys.argv[1] + "/" + name, backend="auto" if name == "python" else name)
kept = AioEngine()
file = DirectFile(sys.argv[1] + "/kept", create=True)
kept.write(file, 0, aligned_empty(2 << 20).fill_(5))
kept.write(file, 2 << 20, torch.full((9,), 6, dtype=torch.uint8))
"""


def test_dropped_engine_finishes(tmp_path: Path) -> None:
    """An engine that nobody closes or waits for ends well when it is collected or the program ends, tensors included."""
    names = usable()
    ran = python(DROPPED, str(tmp_path), *names)
    assert ran.returncode == 0, ran.stderr
    for name in [*names, "kept"]:
        assert (tmp_path / name).read_bytes() == b"\5" * (2 << 20) + b"\6" * 9, name


def test_failure_that_nobody_asked_for(make: Make, file: DirectFile, caplog: pytest.LogCaptureFixture) -> None:
    """Closing the engine logs it."""
    logger.addHandler(caplog.handler)
    try:
        with make() as engine:
            engine.read(file, 7, torch.empty(10))
    finally:
        logger.removeHandler(caplog.handler)
    assert "nobody waited for failed" in caplog.text and file.path in caplog.text


def test_no_descriptor_is_left(make: Make, file: DirectFile) -> None:
    """Engines and files give everything back."""
    make().close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with make() as engine, DirectFile(file.path) as again:
            engine.write(again, 0, torch.zeros(5000)).wait()
    assert len(os.listdir("/proc/self/fd")) == before


FORK = """
import os, sys, torch
from deepspeed.tier import aio
from deepspeed.tier.aio import *
data = aligned_empty(32 << 20)
def attempt(backend):
    engine = AioEngine(backend=backend)
    file = DirectFile(sys.argv[1], create=True)
    transfer = engine.write(file, 0, data)
    transfer._lock.acquire()  # as if a thread were waiting just now
    child = os.fork()
    if child == 0:
        told = 0
        for act in (transfer.wait, lambda: engine.read(file, 0, data)):
            try:
                act()
            except OSError as error:
                told += "forked" in str(error)
        assert transfer.done()
        engine.close()
        with AioEngine() as own:
            own.write(file, 64 << 20, data[:5000]).wait()
        os._exit(told)
    transfer._lock.release()
    transfer.wait()
    engine.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2, backend
for name in sys.argv[2:]:
    if name == "python":
        aio.try_load = lambda op: None
    attempt("auto" if name == "python" else name)
"""


def test_forked_child_gets_an_error(tmp_path: Path) -> None:
    """The engine's threads stay with the parent: the child is told so, at once, and may make its own."""
    ran = python(FORK, str(tmp_path / "data"), *usable())
    assert ran.returncode == 0, ran.stderr


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
    for options in ({"queue_depth": 0}, {"queue_depth": 5000}, {"threads": 0}, {"block_bytes": 1000}, {"block_bytes": 2 << 30}):
        with pytest.raises(ValueError, match="not"):
            AioEngine(**options)
    monkeypatch.setenv("DS_AIO_BACKEND", "posix")
    with pytest.raises(ValueError, match="DS_AIO_BACKEND"):
        AioEngine()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python threads do it, unless the caller insists on a kernel interface."""
    monkeypatch.setattr(aio, "load", failed_build)
    with pytest.raises(BuildError, match="no C"):
        AioEngine(backend="io_uring")


SECCOMP = """
import ctypes, os, struct, sys
from deepspeed.tier.aio import *
AioEngine(backend="threads").close()  # built before the sandbox
libc = ctypes.CDLL(None, use_errno=True)
word = ctypes.c_ulong
def refuse(calls):
    lines = [(0x20, 0, 0, 0)]  # load the number of the system call
    lines += [(0x15, len(calls) - i, 0, number) for i, number in enumerate(calls)]  # equal: to the last line
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | 1)]  # allow; EPERM
    memory = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(memory)))
    if libc.prctl(38, word(1), word(0), word(0), word(0)) or libc.prctl(22, word(2), program, word(0), word(0)):
        os._exit(77)
def attempt(calls, expected):
    refuse(calls)
    with AioEngine() as engine, DirectFile(sys.argv[1], create=True) as file:
        there, back = aligned_empty(300000).fill_(3), aligned_empty(300000)
        engine.write(file, 0, there).wait()
        engine.read(file, 0, back).wait()
        assert bool((there == back).all())
        assert engine.backend in expected, (calls, engine.backend)
    try:
        AioEngine(backend="io_uring")
    except TransferError as error:
        assert "'io_uring' is not to be had here (Operation not permitted)" in str(error), error
        os._exit(0)
for calls, expected in (tuple(eval(case)) for case in sys.argv[2:]):
    child = os.fork()
    if child == 0:
        try:
            attempt(calls, expected)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        sys.exit(code)
"""
SETUP, ENTER, REGISTER, IO_SETUP = 425, 426, 427, {"x86_64": 206, "aarch64": 0}.get(os.uname().machine, 206)


def test_sandbox_without_io_uring(tmp_path: Path) -> None:
    """A seccomp filter like a container's: the next backend takes over, and the loss of io_uring is named where it is asked for."""
    if "io_uring" not in usable():
        pytest.skip("no io_uring to take away")
    next_best = ["libaio" if "libaio" in usable() else "threads"]
    cases = [([SETUP], next_best), ([ENTER], next_best), ([REGISTER], next_best), ([SETUP, IO_SETUP], ["threads"])]
    ran = python(SECCOMP, str(tmp_path / "data"), *map(repr, cases), DS_AIO_BACKEND="")
    if ran.returncode == 77:
        pytest.skip("this process may not install a seccomp filter")
    assert ran.returncode == 0, ran.stderr


# --- files and memory ---


def test_tmpfs(make: Make) -> None:
    """Memory filesystems, with O_DIRECT or not."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    path = f"/dev/shm/ds-aio-test-{os.getpid()}"
    try:
        with DirectFile(path, create=True) as file, make() as engine:
            file.allocate(MIB)
            data, back = noise(700_001), aligned_empty(700_001)
            engine.write(file, 8192, data).wait()
            engine.read(file, 8192, back).wait()
            assert torch.equal(data, back)
    finally:
        os.unlink(path)


FULL = """
import os, sys
from deepspeed.tier.aio import *
data = aligned_empty(4 << 20)
for backend in sys.argv[2:]:
    with AioEngine(backend=backend) as engine, DirectFile(sys.argv[1] + "/" + backend, create=True) as file:
        for act in (lambda: file.allocate(4 << 20), lambda: engine.write(file, 0, data).wait(), lambda: engine.write(file, 3, data).wait()):
            try:
                act()
                print("no error")
            except TransferError as error:
                print(error.errno, file.size <= 1 << 20, error)
        os.truncate(file.path, 0)
        file.allocate(1000)
        os.unlink(file.path)
"""


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_full_disk(tmp_path: Path, kind: str) -> None:
    """A filesystem of 1 MiB: no room is said with the file's name and what to do."""
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}/disk"
    if kind == "ext4":
        image = tmp_path / "image"
        with image.open("wb") as handle:
            handle.truncate(1 * MIB)
        if not shutil.which("mkfs.ext4") or subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], timeout=60).returncode:
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
        assert line.startswith(f"{errno.ENOSPC} True ") and "the filesystem is full; free space" in line, line
        assert f"/disk/{backends[i // 3]}'" in line and ("reserving 4194304 bytes" in line) == (i % 3 == 0)


def test_missing_paths(tmp_path: Path) -> None:
    """As ``open`` says it."""
    with pytest.raises(FileNotFoundError, match="data"):
        DirectFile(tmp_path / "data")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DirectFile(tmp_path / "nowhere" / "data", create=True)
    with pytest.raises(IsADirectoryError):
        DirectFile(tmp_path)


def test_allocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserves, never shrinks, and makes do with the length where a filesystem cannot reserve."""
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


@pytest.mark.parametrize("shape", [0, 1, 4097, (3, 5), (0, 4), (), 5 * MIB])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_aligned_memory(shape: int | tuple[int, ...], dtype: torch.dtype) -> None:
    """Page boundary, shape and dtype as asked, writable, and the memory outlives the first name of it."""
    tensor = aligned_empty(shape, dtype=dtype)
    assert tensor.shape == torch.Size((shape,) if isinstance(shape, int) else shape) and tensor.dtype is dtype
    assert tensor.is_contiguous() and tensor.data_ptr() % 4096 == 0
    view = tensor.view(-1)[-1:]
    del tensor
    assert bool((view.fill_(1) == 1).all())


def test_interrupted_wait(file: DirectFile) -> None:
    """Ctrl-C between the end of the C call and the next line: the next wait still knows the result."""
    with AioEngine() as engine:
        transfer = engine.write(file, 0, noise(MIB))
        real = engine._calls.wait

        class Interrupt(list):  # raises where a signal handler would run: after the value is stored
            def extend(self, values: Iterator[int]) -> None:
                super().extend(values)
                raise KeyboardInterrupt

        transfer._code = Interrupt()
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
        transfer.wait()
        assert isinstance(transfer, Transfer) and real(transfer._ticket[0]) == -errno.EINVAL
    assert not engine._under_way


def test_c_interface_checks_its_arguments() -> None:
    """Refused with a code, not undefined."""
    library = aio.load(aio.ASYNC_IO)
    library.ds_aio_new.restype = ctypes.c_void_p
    error = ctypes.c_int()
    for arguments in [(9, 8, 4096, 1), (3, 0, 4096, 1), (3, 8, 4095, 1), (3, 8, 0, 1), (3, 8, 4096, 0), (-1, 8, 4096, 1)]:
        backend, depth, block, threads = arguments
        assert not library.ds_aio_new(backend, depth, ctypes.c_int64(block), threads, ctypes.byref(error))
        assert error.value == -errno.EINVAL
