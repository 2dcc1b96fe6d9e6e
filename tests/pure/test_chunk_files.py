"""Chunk files: what was appended is what is read, by whole pieces that were checked; whatever is wrong has a name and
leaves nothing.
"""

import errno
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.format import checksum, files
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.files import ChunkReader, ChunkWriter, Wanted
from deepspeed.checkpoint.format.manifest import Box
from deepspeed.errors import CheckpointError
from deepspeed.tier import aio
from deepspeed.zero.regions import Span
from tests.harness.patience import too_long

PIECE = files.PIECE_BYTES
SIZES = (0, 1, 63, 64, 65, 4095, 4096, 4097, 0, 100_000)
SPAN = Span(3, 7)
Wrote = tuple[list[torch.Tensor], list[Box]]


def drawn(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def written(folder: Path, sizes: tuple[int, ...], file: str = "a.bin") -> Wrote:
    values = [drawn(size, index) for index, size in enumerate(sizes)]
    with ChunkWriter(folder / file) as writer:
        for each in values:
            writer.append(each, SPAN)
        return values, writer.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces and buffers of a few pages: many of them in little time."""
    monkeypatch.setattr(files, "PIECE_BYTES", 8192)
    monkeypatch.setattr(files, "_BUFFER_BYTES", 16384)
    return 8192


@pytest.fixture(params=["native", "python", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On a disk, with and without native code; and on a filesystem without O_DIRECT."""
    if request.param == "python":
        monkeypatch.setattr(checksum, "_native", lambda: None)
        monkeypatch.setattr(aio, "try_load", lambda op: None)
    if request.param == "memory":
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no filesystem in memory")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as inside:
            yield Path(inside)
    else:
        yield tmp_path


def read(folder: Path, place: Box, nbytes: int, start: int = 0) -> torch.Tensor:
    """So many bytes of ``layer.w``, which is in ``place``."""
    out = torch.full((nbytes,), 3, dtype=torch.uint8)
    with closing(ChunkReader(folder)) as reader:
        reader.read_many([Wanted(place, start, out, "layer.w")])
    return out


def forget(path: Path) -> None:
    """Out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


# --- what is written ---


@pytest.mark.parametrize("cached", [True, False])
def test_what_was_appended_is_read(folder: Path, *, cached: bool) -> None:
    values, places = written(folder, SIZES)
    (folder / "a.bin").read_bytes() if cached else forget(folder / "a.bin")
    outs = [torch.full_like(each, 3) for each in values]
    with closing(ChunkReader(folder)) as reader:
        reader.read_many([Wanted(place, 0, out, "w") for place, out in zip(places, outs, strict=True)])
    assert all(map(torch.equal, outs, values))


def test_every_byte_belongs_to_one_box_and_one_checksum(folder: Path) -> None:
    values, places = written(folder, SIZES)
    content = (folder / "a.bin").read_bytes()
    assert len(content) % 4096 == 0 and len(content) - sum(SIZES) < 4096 + 64 * len(SIZES)
    assert [p.offset for p in places] == [sum(p.extent for p in places[:i]) for i in range(len(places))]
    assert sum(p.extent for p in places) == len(content)
    for each, place in zip(values, places, strict=True):
        lies = content[place.offset : place.offset + place.extent]
        assert place.offset % 64 == 0 and lies == bytes(each.tolist()).ljust(place.extent, b"\0")
        assert place.crcs == tuple(crc32c(lies[at : at + PIECE]) for at in range(0, place.extent, PIECE))


@pytest.mark.parametrize("nbytes", [PIECE - 4097, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 64])
def test_boxes_about_the_size_of_a_piece(tmp_path: Path, nbytes: int) -> None:
    values, places = written(tmp_path, (100, nbytes, 5))
    assert all(len(place.crcs) == -(-place.extent // PIECE) for place in places)
    assert torch.equal(read(tmp_path, places[1], nbytes), values[1])


def test_an_empty_file_and_an_empty_box(tmp_path: Path) -> None:
    assert written(tmp_path, ()) == ([], []) and (tmp_path / "a.bin").stat().st_size == 0
    _, places = written(tmp_path, (0,), "b.bin")
    assert places == [Box("b.bin", 0, 0, 3, 7, ())] and (tmp_path / "b.bin").stat().st_size == 0


def test_a_box_may_come_in_parts_of_any_dtype(folder: Path, small_pieces: int) -> None:
    parts = [drawn(40).view(torch.float32), drawn(30_002).view(torch.bfloat16)]
    parts += [torch.tensor([True]), torch.empty(0, dtype=torch.int64)]
    with ChunkWriter(folder / "a.bin") as writer:
        writer.append(drawn(10), SPAN)
        writer.append(iter(parts), SPAN)
        places = writer.close()
    with ChunkWriter(folder / "b.bin") as writer:
        writer.append(drawn(10), SPAN)
        writer.append(torch.cat([part.view(torch.uint8) for part in parts]), SPAN)
        assert [replace(place, file="a.bin") for place in writer.close()] == places
    assert (folder / "a.bin").read_bytes() == (folder / "b.bin").read_bytes()


def test_values_may_change_as_soon_as_they_were_added(tmp_path: Path, small_pieces: int) -> None:
    buffer, expected = torch.empty(5000, dtype=torch.uint8), []

    def parts() -> Iterator[torch.Tensor]:
        for index in range(50):
            expected.append(buffer.copy_(drawn(5000, index)).clone())
            yield buffer
            buffer.zero_()

    with ChunkWriter(tmp_path / "a.bin") as writer:
        writer.append(parts(), SPAN)
        (place,) = writer.close()
    assert torch.equal(read(tmp_path, place, 250_000), torch.cat(expected))


@pytest.mark.parametrize("expect", [1, 100_000, 10_000_000])
def test_room_that_was_reserved_is_a_guess(tmp_path: Path, expect: int) -> None:
    with ChunkWriter(tmp_path / "a.bin", expect_bytes=expect) as writer:
        writer.append(drawn(100_000), SPAN)
        writer.close()
    assert (tmp_path / "a.bin").stat().st_size == writer.nbytes == 102_400


def test_a_rate_may_be_lifted(tmp_path: Path, small_pieces: int) -> None:
    """That it is kept, tests/dist/test_checkpoint_background.py shows."""
    begin = time.monotonic()
    with ChunkWriter(tmp_path / "b.bin", rate_bytes=1) as writer:
        writer.append(drawn(16384), SPAN)
        writer.rate_bytes = 0
        writer.append(drawn(16384), SPAN)
        writer.close()
    assert not too_long(begin, 30)  # at the rate more than four hours


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    written(tmp_path, (10,))
    before = (tmp_path / "a.bin").read_bytes()
    with pytest.raises(CheckpointError, match="a.bin cannot be written: File exists"):
        ChunkWriter(tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == before


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ChunkWriter(tmp_path / "a.bin") as writer:
        writer.append(drawn(10_000_000), SPAN)
        raise KeyError
    assert not list(tmp_path.iterdir())
    writer.abort()
    for wrong in (writer.close, lambda: writer.append(drawn(1), SPAN)):
        with pytest.raises(ValueError, match="a.bin"):
            wrong()


def test_a_tensor_with_gaps_is_written_in_its_logical_order(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "a.bin") as writer:
        writer.append(torch.arange(16).view(4, 4).t(), SPAN)
    content = torch.frombuffer(bytearray((tmp_path / "a.bin").read_bytes()[:128]), dtype=torch.int64)
    assert torch.equal(content.view(4, 4), torch.arange(16).view(4, 4).t())


@pytest.mark.parametrize("expect", [0, 32 << 20])
@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_no_more_room_is_said_with_advice_and_leaves_no_file(
    tmp_path: Path, expect: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_AIO_BACKEND", backend)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, hard))  # Python ignores SIGXFSZ
    try:
        message = "a.bin cannot be written: File too large; files may not grow that far"
        with (
            pytest.raises(CheckpointError, match=message),
            ChunkWriter(tmp_path / "a.bin", expect_bytes=expect) as writer,
        ):
            for _ in range(8):
                writer.append(torch.ones(1 << 20), SPAN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_writing_is_named(tmp_path: Path, small_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(transfer: aio.FileTransfer) -> int:
        return -errno.ENOSPC

    message = "a.bin cannot be written: No space left on device; the filesystem is full"
    with pytest.raises(CheckpointError, match=message), ChunkWriter(tmp_path / "a.bin") as writer:
        monkeypatch.setattr(aio.FileTransfer, "settle", full)
        writer.append(drawn(1_000_000), SPAN)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


# --- what is read ---


def test_any_range_of_a_box_and_of_many(folder: Path, small_pieces: int) -> None:
    values, places = written(folder, (70_000, 100, 5, 8192, 30_000, 64))
    wanted, expected = [], []
    for seed in range(200):
        index = seed % len(values)
        generator = torch.Generator().manual_seed(seed)
        lo, hi = torch.randint(0, values[index].numel() + 1, (2,), generator=generator).sort().values.tolist()
        wanted.append(Wanted(places[index], lo, torch.full((hi - lo,), 9, dtype=torch.uint8), f"w{index}"))
        expected.append(values[index][lo:hi])
    with closing(ChunkReader(folder)) as reader:
        reader.read_many(wanted)
        assert all(torch.equal(out, right) for (_, _, out, _), right in zip(wanted, expected, strict=True))
        for each in wanted[:20]:
            each[2].zero_()
            reader.read_many([each])
        assert all(torch.equal(out, right) for (_, _, out, _), right in zip(wanted, expected, strict=True))


def test_only_the_pieces_of_the_range_are_read(
    tmp_path: Path, small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (place,) = written(tmp_path, (100 * small_pieces,))
    asked: list[tuple[int, int]] = []
    real = os.preadv

    def noted(fd: int, buffers: list[memoryview], offset: int) -> int:
        asked.append((offset, len(buffers[0])))
        return real(fd, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", noted)
    read(tmp_path, place, small_pieces, 10 * small_pieces + 5)
    assert asked == [(10 * small_pieces, small_pieces), (11 * small_pieces, small_pieces)]


def test_a_piece_that_several_want_parts_of_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, (place,) = written(tmp_path, (5000,))
    count, real = [0], ChunkReader._load

    def load(reader: ChunkReader, *rest: object) -> torch.Tensor:
        count[0] += 1
        return real(reader, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ChunkReader, "_load", load)
    outs = [torch.empty(100, dtype=torch.uint8) for _ in range(50)]
    with closing(ChunkReader(tmp_path)) as reader:
        reader.read_many([Wanted(place, 100 * i, out, "w") for i, out in enumerate(outs)][::-1])
    assert count == [1] and torch.equal(torch.cat(outs), values[0])


def test_many_files_are_read_with_few_open(tmp_path: Path) -> None:
    wrote = [written(tmp_path, (100, 200), f"{index}.bin") for index in range(70)]
    outs = [torch.empty(200, dtype=torch.uint8) for _ in wrote]
    with closing(ChunkReader(tmp_path)) as reader:
        before = len(os.listdir("/proc/self/fd"))
        reader.read_many([Wanted(places[1], 0, out, "w") for (_, places), out in zip(wrote, outs, strict=True)])
        assert len(os.listdir("/proc/self/fd")) - before <= 3 * files._OPEN_FILES
    assert all(torch.equal(out, values[1]) for out, (values, _) in zip(outs, wrote, strict=True))
    assert len(os.listdir("/proc/self/fd")) <= before


# --- what is wrong ---


def test_a_flipped_byte_anywhere_is_refused_by_the_name_of_its_tensor(folder: Path, small_pieces: int) -> None:
    values, places = written(folder, (100, 20_000, 64, 0, 5000, 1))
    path = folder / "a.bin"
    content = bytearray(path.read_bytes())
    with closing(ChunkReader(folder)) as reader:
        for at in [*range(0, len(content), 211), len(content) - 1]:
            content[at] ^= 1
            path.write_bytes(content)
            outs = [torch.full_like(each, 0) for each in values]
            hit = next(i for i, place in enumerate(places) if place.offset <= at < place.offset + place.extent)
            with pytest.raises(CheckpointError, match=f"a.bin is damaged between bytes .* where tensor {hit} lies"):
                reader.read_many(
                    [Wanted(p, 0, out, f"tensor {i}") for i, (p, out) in enumerate(zip(places, outs, strict=True))]
                )
            assert all(torch.equal(out, v) for out, v in list(zip(outs, values, strict=True))[:hit])
            assert not bool(outs[hit][places[hit].extent // 8192 * 8192 :].any()) or at < places[hit].offset + 8192
            content[at] ^= 1
        path.write_bytes(content)
        reader.read_many([Wanted(p, 0, v, "whole again") for p, v in zip(places, values, strict=True)])


def test_no_byte_of_a_damaged_piece_is_handed_over(tmp_path: Path) -> None:
    _, (place,) = written(tmp_path, (3 * PIECE,))
    with (tmp_path / "a.bin").open("r+b") as file:
        file.seek(PIECE + 17)
        file.write(b"\0\1\2\3")
    out = torch.zeros(3 * PIECE, dtype=torch.uint8)
    with closing(ChunkReader(tmp_path)) as reader:
        with pytest.raises(CheckpointError, match=f"between bytes {PIECE} and {2 * PIECE}"):
            reader.read_many([Wanted(place, 0, out, "w")])
        assert not out[PIECE:].any()
        reader.read_many([Wanted(place, 2 * PIECE, out[:PIECE], "w")])  # the reader goes on


CUT = "a.bin is cut: it has {} bytes, layer.w lies up to byte 102400"
NO_FILE = "layer.w lies, cannot be read: .*; it is not a regular file"
Harm = Callable[[Path], object]
HARMS: dict[str, tuple[Harm, str]] = {
    "empty": (lambda path: path.write_bytes(b""), CUT.format(0)),
    "cut": (lambda path: os.truncate(path, 102_399), CUT.format(102399)),
    "missing": (Path.unlink, "a.bin, where layer.w lies, cannot be read: No such file or directory; it is missing"),
    "a folder": (Path.mkdir, NO_FILE),
    "a pipe": (os.mkfifo, NO_FILE),
}


@pytest.mark.parametrize("harm", HARMS)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, harm: str) -> None:
    _, (place,) = written(tmp_path, (100_000,))
    act, message = HARMS[harm]
    if harm in ("a folder", "a pipe"):
        (tmp_path / "a.bin").unlink()
    act(tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, place, 100_000)


def test_a_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (place,) = written(tmp_path, (100,))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.os, "open", refuse)  # the superuser may read everything
    with pytest.raises(CheckpointError, match="layer.w lies, cannot be read: Permission denied; this user"):
        read(tmp_path, place, 100)


def test_a_file_that_shrinks_while_it_is_open_is_refused(tmp_path: Path) -> None:
    values, (place,) = written(tmp_path, (100_000,))
    with closing(ChunkReader(tmp_path)) as reader:
        reader.read_many([Wanted(place, 0, values[0], "w")])
        os.truncate(tmp_path / "a.bin", 8192)
        with pytest.raises(CheckpointError, match="a.bin"):
            reader.read_many([Wanted(place, 0, values[0], "w")])


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = torch.zeros(1 << 20, dtype=torch.uint8)
    with ChunkWriter(tmp_path / "a.bin") as writer:
        writer.append((values for _ in range(160)), SPAN)
        (place,) = writer.close()
    with closing(ChunkReader(tmp_path)) as reader:
        for lo in range(0, 160 << 20, 1 << 20):
            reader.read_many([Wanted(place, lo, values, "w")])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 90 << 10
