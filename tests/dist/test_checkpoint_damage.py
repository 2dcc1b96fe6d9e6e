"""A checkpoint is whole or refused: whatever is damaged, missing or forged is named, on every rank, and nothing of it
is executed.
"""

import itertools
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.manifest import _head
from deepspeed.checkpoint.load.reader import OwnSource, open_checkpoint, read_manifest
from deepspeed.checkpoint.load.source import whole
from deepspeed.errors import CheckpointError
from deepspeed.tools.verify.models import HIDDEN, IN_FEATURES, OUT_FEATURES, Stack
from tests.harness.patience import too_long
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start

TAG = "good"


class Odd:
    """Client state that only pickle can store."""


class Net(Stack):
    """With a buffer, and of any depth."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__(depth=depth)
        self.register_buffer("shift", torch.full((HIDDEN,), 0.5))


def engine_of(depth: int = 1, **checkpoint: Any) -> Any:
    torch.manual_seed(3)
    return start(Net(depth).train(), make_config(3, checkpoint={"client_files": True, **checkpoint}))


def train(engine: Any, seed: int) -> None:
    x = torch.randn(4, IN_FEATURES, generator=torch.Generator().manual_seed(seed + 100 * dist.get_rank()))
    engine.backward(engine(x).square().mean())
    engine.step()


def state(engine: Any) -> list[torch.Tensor]:
    """Copies of everything this rank trains with."""
    found = [b.clone() for b in engine.module.buffers()] + [torch.tensor(engine.global_steps), torch.get_rng_state()]
    for group in engine.basic_optimizer.param_groups:
        for p in group["params"]:
            found += [
                p.detach().clone(),
                *(torch.as_tensor(v).clone() for _, v in sorted(engine.basic_optimizer.state.get(p, {}).items())),
            ]
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def save(folder: str, pickled: bool) -> None:  # noqa: FBT001
    engine = engine_of(allow_pickle=pickled)
    train(engine, 1)
    odd = {"odd": Odd()} if pickled else {}
    engine.save_checkpoint(folder, tag=TAG, client_state={"note": torch.arange(5), **odd})
    engine.destroy()


@pytest.fixture(scope="module")
def original(pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    pool2.run(save, str(folder), False)
    return folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """A folder of checkpoints of one's own."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


# -- every region of every file ----------------------------------------------------------------------------------


def regions(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """(file, byte, what must be named): a byte of every box: in turn first, middle, last and padding."""
    turn = itertools.cycle(range(4))
    for entry in read_manifest(folder).entries.values():
        for box in entry.boxes:
            nbytes = (box.hi - box.lo) * entry.dtype.itemsize
            places = box.offset, box.offset + nbytes // 2, box.offset + nbytes - 1, box.offset + box.extent - 1
            yield folder / box.file, places[next(turn)], f"{entry.state} of {entry.name}"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ (1 << at % 8)]))


def load_every_damage(folder: str) -> tuple[list[str], int]:
    """What went wrong, and how many bytes were flipped in turn."""
    engine, bad, count = engine_of(), list[str](), 0
    first = dist.get_rank() == 0
    for path, at, name in regions(Path(folder, TAG)):
        before = state(engine)
        if first:
            flip(path, at)
        dist.barrier()
        said = outcome(lambda: engine.load_checkpoint(folder))
        if "CheckpointError" not in said or name not in said or path.name not in said:
            bad.append(f"byte {at} of {path.name} in {name}: {said!r}")
        if not same(before, state(engine)) and not engine._checks.torn:
            bad.append(f"byte {at} of {path.name} in {name}: the engine has changed and would train on")
        if engine._checks.torn and "half way" not in outcome(lambda: train(engine, 2)):
            bad.append(f"byte {at} of {path.name} in {name}: it is torn and trains on")
        dist.barrier()
        if first:
            flip(path, at)
        dist.barrier()
        count += 1
    engine.load_checkpoint(folder)
    restored = state(engine)
    train(engine, 2)
    engine.destroy()
    return bad if not same(restored, state(engine)) else [*bad, "it does not train after a whole checkpoint"], count


def test_a_flipped_byte_anywhere_in_the_data_is_refused_with_the_tensors_name(pool2: RankPool, copy: Path) -> None:
    found = pool2.run(load_every_damage, str(copy), time_limit=100)
    assert [bad for bad, _ in found] == [[], []] and found[0][1] > 25


# -- files ---------------------------------------------------------------------------------------------------------


def load(folder: str, depth: int, allow_pickle: bool, tag: str | None = None) -> str:  # noqa: FBT001
    """What a load says; "" when all is well. An engine that was refused trains as if nothing had been."""
    engine = engine_of(depth, allow_pickle=allow_pickle)
    before = state(engine)
    said = outcome(lambda: engine.load_checkpoint(folder, tag))
    if said and not same(before, state(engine)):
        said += " CHANGED"
    train(engine, 2)
    engine.destroy()
    return said


def refused(
    pool: RankPool, folder: Path, *words: str, depth: int = 1, allow_pickle: bool = False, tag: str | None = None
) -> None:
    for said in pool.run(load, str(folder), depth, allow_pickle, tag):
        assert "CheckpointError" in said and "CHANGED" not in said and all(w in said for w in words), said


def be_link(path: Path) -> None:
    other = path.parent.parent / "other"
    other.write_bytes(bytes(path.stat().st_size))
    path.unlink()
    path.symlink_to(other)


# on every rank; more files that cannot be read: tests/pure/test_chunk_files.py
FILE_FAULTS: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "cut": lambda p: os.truncate(p, p.stat().st_size - 4096),
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
    "a link to other bytes": be_link,
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_file_that_is_not_what_was_saved_is_refused_on_every_rank(pool2: RankPool, copy: Path, fault: str) -> None:
    FILE_FAULTS[fault](copy / TAG / "rank_00001.bin")
    refused(pool2, copy, "rank_00001.bin", " of ")


def test_a_link_to_the_same_bytes_is_as_good_as_a_file(original: Path, copy: Path) -> None:
    path = copy / TAG / "rank_00000.bin"
    path.rename(copy / "store")
    path.symlink_to(copy / "store")
    source, wanted = open_checkpoint(copy / TAG), open_checkpoint(original / TAG)
    assert source.entries.keys() == wanted.entries.keys() and len(source.entries) > 20
    assert all(torch.equal(whole(source, key), whole(wanted, key)) for key in source.entries)


def load_alone(folder: str, depth: int, **options: Any) -> str:
    """What a load says; the engine is not used any more."""
    engine = engine_of(depth)
    before = state(engine)
    said = outcome(lambda: engine.load_checkpoint(folder, **options))
    changed = not same(before, state(engine))
    engine.destroy()
    return said + " CHANGED" * changed


def test_a_checkpoint_without_some_of_the_weights_is_refused_with_names(pool2: RankPool, copy: Path) -> None:
    """The model has one more layer, of which no optimizer state is missed."""
    for said in pool2.run(load_alone, str(copy), 2, load_optimizer_states=False):
        assert "CheckpointError" in said and "layers.1.up.weight" in said and "CHANGED" not in said, said


# -- nothing is executed -----------------------------------------------------------------------------------------


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = str(sentinel)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.sentinel,)


@pytest.mark.parametrize("how", [pickle.dumps, "torch"])
@pytest.mark.parametrize("name", ["rank_00000.bin", "rank_00001.bin", "manifest.json", "../latest"])
def test_a_pickle_in_place_of_a_file_is_refused_unread(
    pool2: RankPool, copy: Path, name: str, how: Any, tmp_path: Path
) -> None:
    path = copy / TAG / name
    evil = Evil(tmp_path / "sentinel")
    path.write_bytes(pickle.dumps(evil)) if how is pickle.dumps else torch.save(evil, path)
    refused(pool2, copy, path.name)
    assert not (tmp_path / "sentinel").exists()


def test_a_pickle_of_the_right_length_is_refused_unread(pool2: RankPool, copy: Path, tmp_path: Path) -> None:
    path = copy / TAG / "rank_00000.bin"
    content = pickle.dumps(Evil(tmp_path / "sentinel"))
    path.write_bytes(content + path.read_bytes()[len(content) :])
    for said in pool2.run(load_alone, str(copy), 1):  # it may have changed, as what is torn trains no further
        assert "CheckpointError" in said and "rank_00000.bin" in said
    assert not (tmp_path / "sentinel").exists()


def test_a_pickle_among_the_files_for_other_programs_is_never_read(pool2: RankPool, copy: Path, tmp_path: Path) -> None:
    stubs = list((copy / TAG).glob("*_states.pt"))
    for path in stubs:
        torch.save(Evil(tmp_path / "sentinel"), path)
    assert stubs and pool2.run(load, str(copy), 1, True) == ["", ""]
    assert not (tmp_path / "sentinel").exists()


def test_a_folder_that_pretends_to_be_of_the_reference_executes_nothing(
    pool2: RankPool, copy: Path, tmp_path: Path
) -> None:
    for path in (copy / TAG).glob("*_states.pt"):
        torch.save({"module": Evil(tmp_path / "sentinel")}, path)
    (copy / TAG / "manifest.json").unlink()
    refused(pool2, copy)
    assert not (tmp_path / "sentinel").exists()


def test_pickled_client_state_needs_consent_and_its_checksum(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(save, str(tmp_path / "ck"), True)
    assert pool2.run(load, str(tmp_path / "ck"), 1, True) == ["", ""]
    refused(pool2, tmp_path / "ck", "odd", "allow_pickle")
    paths = list((tmp_path / "ck" / TAG).glob("pickled_client_state_*.pt"))
    for path in paths:
        torch.save({"client_state/odd": Evil(tmp_path / "sentinel")}, path)
    refused(pool2, tmp_path / "ck", "pickled_client_state", "not unpickled", allow_pickle=True)
    for path in paths:
        path.unlink()
    refused(pool2, tmp_path / "ck", "pickled_client_state", "missing", allow_pickle=True)
    assert not (tmp_path / "sentinel").exists()


# -- manifests that somebody made --------------------------------------------------------------------------------


def forge(folder: Path, change: Callable[[dict[str, Any]], Any], *, version: int = 1) -> None:
    """A manifest with a right checksum and other contents."""
    path = folder / "manifest.json"
    text = json.loads(b"{" + path.read_bytes().partition(b"\n")[2])
    change(text)
    body = json.dumps(text).encode()[1:]
    path.write_bytes(_head(crc32c(body)).replace(b'"version":1', b'"version":%d' % version) + body)


def box(text: dict[str, Any], name: str = "inp.weight") -> list[Any]:
    return entry(text, name)["boxes"][0]  # type: ignore[no-any-return]


def entry(text: dict[str, Any], name: str = "inp.weight") -> dict[str, Any]:
    return next(t for t in text["tensors"] if t["name"] == name and t["state"] == "master")


def part(text: dict[str, Any], start: list[int], shape: list[int], *, hi: int = 1) -> None:
    found = box(text)
    found[3:5] = [0, hi]
    found[6:] = [start, shape]


HUGE = 10**18
# places outside the folder, and places and dtypes that cannot be: tests/pure/test_manifest.py
FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no name": lambda t: box(t).__setitem__(0, ""),
    "a name with a zero": lambda t: t["files"].__setitem__("a\0b", 1),
    "a file upwards": lambda t: t["files"].__setitem__("../../x", 1),
    "an absolute file": lambda t: t["files"].__setitem__("/etc/passwd", 1),
    "a file that is not listed": lambda t: t["files"].pop("rank_00000.bin"),
    "another length": lambda t: t["files"].__setitem__("rank_00000.bin", 4096),
    "overlapping boxes": lambda t: entry(t)["boxes"].append(list(box(t))),
    "a gap": lambda t: entry(t)["boxes"].pop(),
    "an offset beyond the file": lambda t: box(t).__setitem__(1, HUGE),
    "an extent beyond the file": lambda t: box(t).__setitem__(2, HUGE),
    "elements beyond the extent": lambda t: box(t).__setitem__(4, HUGE),
    "elements backwards": lambda t: box(t).__setitem__(3, HUGE),
    "a huge shape": lambda t: entry(t).__setitem__("shape", [HUGE]),
    "a huge shape of many sizes": lambda t: entry(t).__setitem__("shape", [HUGE] * 40),
    "an empty huge shape": lambda t: entry(t).update(shape=[0, HUGE, HUGE], boxes=[]),
    "a negative shape": lambda t: entry(t).__setitem__("shape", [-1]),
    "a shape of words": lambda t: entry(t).__setitem__("shape", ["a"]),
    "a part with very many rows": lambda t: (
        entry(t).__setitem__("shape", [10**9, 10**6]),
        part(t, [0, 0], [10**9, 1]),
    ),
    "a part outside of the tensor": lambda t: part(t, [HIDDEN, 0], [HIDDEN, 1]),
    "a part with fewer sizes": lambda t: part(t, [0], [1]),
    "a part smaller than its elements": lambda t: part(t, [0, 0], [1, 1], hi=2),
    "no dtype": lambda t: entry(t).__setitem__("dtype", "nn"),
    "the same tensor twice": lambda t: t["tensors"].append(entry(t)),
    "no tensors": lambda t: t.pop("tensors"),
    "facts that are no object": lambda t: t.__setitem__("facts", []),
    "very deep facts": lambda t: t.__setitem__("facts", nested(300)),  # which no Python's stack refuses
    "ranks that are no list": lambda t: t["facts"].__setitem__("ranks", 7),
    "an optimizer that is a word": lambda t: t["facts"].__setitem__("optimizer", "adam"),
    "client state of an unknown kind": lambda t: t["facts"]["ranks"][0].__setitem__(
        "client_state", {"$": "os.system", "v": "x"}
    ),
    "client state of a tensor that is not there": lambda t: t["facts"]["ranks"][0].__setitem__(
        "client_state", {"$": "tensor", "v": "x"}
    ),
}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"client_state": value}
    return {"ranks": [value]}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_manifest_that_contradicts_itself_or_the_folder_is_refused_at_once(copy: Path, forgery: str) -> None:
    forge(copy / TAG, FORGERIES[forgery])
    begun = time.monotonic()
    with pytest.raises(CheckpointError):
        source = OwnSource(copy / TAG)
        assert source.facts
        [whole(source, key) for key in source.entries]
    assert not too_long(begun, 5)


def test_nesting_beyond_what_json_can_read_is_refused(copy: Path) -> None:
    body = b'"facts":' + b"[" * 200_000 + b"]" * 200_000 + b',"files":{},"tensors":[]}\n'
    (copy / TAG / "manifest.json").write_bytes(_head(crc32c(body)) + body)
    with pytest.raises(CheckpointError, match="manifest"):
        OwnSource(copy / TAG)


def test_a_forged_manifest_is_refused_on_every_rank(pool2: RankPool, copy: Path) -> None:
    forge(copy / TAG, FORGERIES["overlapping boxes"])
    refused(pool2, copy, "several places", "inp.weight")


def test_an_honest_forgery_is_read(copy: Path) -> None:
    """The forger itself breaks nothing."""
    forge(copy / TAG, lambda t: None)
    source = OwnSource(copy / TAG)
    assert whole(source, ("master", "head.weight")).shape == (OUT_FEATURES, HIDDEN)


# -- latest --------------------------------------------------------------------------------------------------------


def test_a_latest_that_names_no_checkpoint_is_refused_on_every_rank(pool2: RankPool, copy: Path) -> None:
    (copy / "latest").write_bytes(b"gone")
    refused(pool2, copy, "gone", "latest", f"complete ones here: {TAG}")
    (copy / "latest").unlink()
    (copy / "latest").mkdir()
    refused(pool2, copy, "latest", "tag=")
    refused(pool2, copy, "cannot be a folder name", tag="../x")
    refused(pool2, copy, "nowhere is not there", tag="nowhere")
