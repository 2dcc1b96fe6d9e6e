"""A checkpoint has its name when it is whole, never before; what died on the way is skipped, said, and cleared away."""

import copy
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.save import client_files, writer
from deepspeed.checkpoint.save.writer import join_facts
from deepspeed.errors import CheckpointError


def whole(save_dir: Path, tag: str) -> Path:
    folder = folders.begin(save_dir, tag)
    (folder / "manifest.json").write_text(tag)
    final = folders.publish(folder, tag)
    newest = max((path.stat().st_mtime_ns for path in save_dir.glob("*/manifest.json")), default=0)
    os.utime(final / "manifest.json", ns=(newest, newest + 1))  # the filesystem's clock may stand still for 10 ms
    return final


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("tag", ["", "a/b", "..", ".x", "latest", "a\0b", "step\n", " step"])
def test_tags_that_are_no_folder_names_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="tag"):
        folders.check_tag(tag)


def test_a_save_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    folder = folders.begin(tmp_path / "new" / "dir", "t")
    assert folders.complete_tags(folder.parent) == [] and folders.unfinished(folder.parent) == [folder]
    (folder / "manifest.json").write_text("x")
    assert folders.publish(folder, "t") == folder.parent / "t"
    assert folders.unfinished(folder.parent) == [] and [p.name for p in folders.complete_tags(folder.parent)] == ["t"]


def test_a_checkpoint_of_the_same_tag_is_replaced(tmp_path: Path) -> None:
    whole(tmp_path, "t").joinpath("old").write_text("")
    whole(tmp_path, "t")
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["manifest.json"]


def test_a_reader_that_comes_between_the_two_renames_disturbs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(tmp_path, "t").joinpath("old").write_text("")
    real, readers = os.rename, [folders.repair]

    def rename(source: Path, target: Path) -> None:
        real(source, target)
        if ".replaced-" in str(target) and readers:
            readers.pop()(tmp_path)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(folders, "_swap", lambda *_: False)
    whole(tmp_path, "t")
    assert not readers and [p.name for p in tmp_path.iterdir()] == ["t"]
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["manifest.json"]


def test_a_replacement_that_died_between_two_renames_gives_the_old_one_back(tmp_path: Path) -> None:
    os.rename(whole(tmp_path, "t"), tmp_path / ".t.replaced-abc123")
    folders.write_latest(tmp_path, "t")
    assert folders.find_checkpoint(tmp_path) == tmp_path / "t"


def test_a_tag_that_is_overwritten_has_its_name_at_every_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(tmp_path, "t")
    (tmp_path / "other").mkdir()
    if not folders._swap(tmp_path / "t", tmp_path / "other"):
        pytest.skip("this filesystem does not exchange names")
    assert folders._swap(tmp_path / "t", tmp_path / "other")
    (tmp_path / "other").rmdir()
    monkeypatch.delattr(os, "rename")  # the one step is the exchange
    whole(tmp_path, "t").joinpath("new").write_text("")
    assert [p.name for p in tmp_path.iterdir()] == ["t"] and (tmp_path / "t" / "new").exists()


@pytest.mark.parametrize("layout", ["manifest.json", "mp_rank_00_model_states.pt"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()], ids=["EIO", "Ctrl-C"])
def test_a_replacement_that_fails_leaves_the_old_one_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, error: BaseException
) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / layout).write_text("old")
    new, real = folders.begin(tmp_path, "t"), os.rename

    def rename(source: Path, target: Path) -> None:
        if source == new:
            raise error
        real(source, target)

    monkeypatch.setattr(folders, "_swap", lambda *_: False)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(type(error)):
        folders.publish(new, "t")
    assert (tmp_path / "t" / layout).read_text() == "old"
    assert sorted(tmp_path.iterdir()) == sorted([new, tmp_path / "t"])


def test_a_checkpoint_in_deepspeeds_layout_gets_its_name_back_too(tmp_path: Path) -> None:
    folder = tmp_path / ".t.replaced-abc123"
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").write_text("")
    folders.begin(tmp_path, "u")
    assert folders.find_checkpoint(tmp_path, "t") == tmp_path / "t"


def test_half_of_what_was_replaced_is_never_taken_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".t.replaced-abc123"
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").write_text("")
    monkeypatch.setattr(folders.shutil, "rmtree", lambda *_, **__: None)  # it dies at the first file
    folders.discard(folder)
    folders.repair(tmp_path)
    assert not (tmp_path / "t").exists()


def test_readers_outlive_a_checkpoint_that_goes_while_they_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag in ("a", "b"):
        whole(tmp_path, tag)
    folders.write_latest(tmp_path, "b")
    real = folders.is_complete

    def is_complete(folder: Path) -> bool:
        whole_now = real(folder)
        if folder.name == "a" and whole_now:
            (folder / "manifest.json").unlink()
        return whole_now

    monkeypatch.setattr(folders, "is_complete", is_complete)
    assert [p.name for p in folders.complete_tags(tmp_path)] == ["b", "a"]
    assert folders.find_checkpoint(tmp_path) == tmp_path / "b"


def test_what_a_dead_process_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    """Names without a time of birth are known too."""
    mine, old = folders.begin(tmp_path, "t"), tmp_path / f".t.saving-{folders._host()}-{os.getpid()}-abc123"
    ended = f"-{dead_pid()}-"
    dead = [tmp_path / path.name.replace(f"-{os.getpid()}-", ended) for path in (mine, old)]
    other = tmp_path / ".t.saving-another.host-1-abc"
    for path in (old, *dead, other):
        path.mkdir()
    assert {mine, old, *dead} <= set(folders.unfinished(tmp_path))
    again = folders.begin(tmp_path, "u")
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in (mine, old, other, again))


def test_a_tag_decides_before_latest_and_latest_before_the_newest_complete_one(tmp_path: Path) -> None:
    assert folders.find_checkpoint(tmp_path) is None and folders.find_checkpoint(tmp_path / "missing") is None
    for tag in ("c", "b", "a"):
        whole(tmp_path, tag)
    folders.begin(tmp_path, "later")
    assert folders.find_checkpoint(tmp_path) == tmp_path / "a"
    folders.write_latest(tmp_path, "b")
    assert folders.find_checkpoint(tmp_path) == tmp_path / "b"
    assert folders.find_checkpoint(tmp_path, "c") == tmp_path / "c"


@pytest.mark.parametrize("content", [b"", b"\n", bytes(12)])
def test_a_latest_whose_content_is_lost_is_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match="latest is empty, and there is no complete checkpoint here; remove it"):
        folders.find_checkpoint(tmp_path)
    whole(tmp_path, "z")
    whole(tmp_path, "a")
    assert folders.find_checkpoint(tmp_path) == tmp_path / "a"


def test_a_tags_own_folder_is_refused_with_the_folder_and_tag_to_pass(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"the folder around it, {tmp_path}, with tag='t'"):
        folders.find_checkpoint(whole(tmp_path, "t"))


def test_a_named_checkpoint_that_is_not_there_lists_the_others(tmp_path: Path) -> None:
    whole(tmp_path, "good")
    (tmp_path / "half").mkdir()
    with pytest.raises(CheckpointError, match="gone is not there; complete ones here: good"):
        folders.find_checkpoint(tmp_path, "gone")
    folders.write_latest(tmp_path, "half")
    with pytest.raises(CheckpointError, match="half, which .*latest names, is not a complete checkpoint"):
        folders.find_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"../../etc", b"\xff\xfe", b"a/b"])
def test_a_latest_that_names_no_folder_is_refused(tmp_path: Path, content: bytes) -> None:
    whole(tmp_path, "good")
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError):
        folders.find_checkpoint(tmp_path)


def test_pruning_keeps_the_newest_and_what_latest_names(tmp_path: Path) -> None:
    for tag in ("a", "b", "c", "d"):
        whole(tmp_path, tag)
    folders.write_latest(tmp_path, "a")
    assert folders.prune(tmp_path, 2) == ["b"]
    assert sorted(p.name for p in folders.complete_tags(tmp_path)) == ["a", "c", "d"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest"
    folders.write_atomically(path, b"old")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="space"):
        folders.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["latest"]


# -- many ranks and parameters -----------------------------------------------------------------------------------------


def test_numbers_of_many_parameters_are_joined_in_linear_time() -> None:
    rows = {f"layers.{i}.weight": {"step": {"dtype": "float32", "bytes": "AACAPw=="}} for i in range(40_000)}
    begun = time.process_time()
    joined = join_facts([{"common": common, "rank": {"scalars": dict(rows)}} for common in ({"optimizer": {}}, {})])
    assert [len(row["names"]) for row in joined["optimizer"]["scalars"]] == [40_000]
    assert time.process_time() - begun < 3.0


@pytest.mark.parametrize(
    ("second", "names", "schedule"),
    [([{"lr": 1}], [["a0", "b0"], ["a1"]], {"rates": 2}), ([{"lr": 2}], [["a0"], ["a1"], ["b0"]], None)],
)
def test_groups_of_stages_are_one_list_where_options_agree(second: Any, names: Any, schedule: Any) -> None:
    ranks: list[dict[str, Any]] = []
    for letter, options in (("a", [{"lr": 1}, {"lr": 2}]), ("b", second)):
        groups = [{"names": [f"{letter}{i}"], "options": each} for i, each in enumerate(options)]
        common: dict[str, Any] = {"shared": {}, "extra_state": {}, "groups": [group["names"] for group in groups]}
        common |= {"lr_scheduler": {"rates": 2}, "optimizer": {"groups": copy.deepcopy(groups)}} if not ranks else {}
        ranks.append({"common": common, "rank": {"stage": {"groups": groups}}})
    facts = join_facts(ranks)
    assert [group["names"] for group in facts["optimizer"]["groups"]] == names
    assert facts["lr_scheduler"] == schedule


def test_waiting_for_many_ranks_leaves_the_interpreter_to_training(tmp_path: Path) -> None:
    for rank in range(1000):
        (tmp_path / f"rank_{rank:05d}.bin").touch()
    stop = threading.Event()
    timer = threading.Timer(2.0, stop.set)
    timer.start()
    begun = time.thread_time()
    with pytest.raises(CheckpointError):
        writer.wait_for_ranks(tmp_path, 1000, stop)
    timer.join()
    assert time.thread_time() - begun < 0.5


def test_a_process_that_ends_waits_a_minute_at_most_for_a_rank_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (writer._PATIENCE_S, writer._LAST_PATIENCE_S) == (600, 60)
    monkeypatch.setattr(writer, "_LAST_PATIENCE_S", 0.2)
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    with pytest.raises(CheckpointError, match="have written nothing"):
        writer.wait_for_ranks(tmp_path, 2, threading.Event())


def test_stand_ins_of_a_thousand_ranks_take_the_room_of_one(tmp_path: Path) -> None:
    facts = {"world": {"size": 1000}, "engine": {}, "shared": {}}
    client_files.write_client_files(
        tmp_path, {}, facts, client_state={"text": "x" * 100_000}, level=3, whole=False, bf16=True
    )
    files = list(tmp_path.iterdir())
    assert len(files) == 2000
    assert len({p.stat().st_ino for p in files}) == 2
    last = torch.load(tmp_path / "zero_pp_rank_999_mp_rank_00_model_states.pt", weights_only=True)
    assert last["text"] == "x" * 100_000
