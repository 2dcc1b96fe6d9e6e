"""Client state comes back as it was on every rank, and checkpoints have the names, and the number, that were asked
for.
"""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.tools.verify.models import Stack, case_named
from deepspeed.tools.verify.runs import snapshot
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, start, train_step


def folders_in(folder: str) -> list[str]:
    return sorted(p.name for p in Path(folder).iterdir() if p.is_dir())


# -- client state ------------------------------------------------------------------------------------------------


def client_state(folder: str) -> bool:
    """Plain state of every kind comes back as it was, each rank its own."""
    rank = here(0).rank
    state = {
        "none": None,
        "numbers": (1, 2.5, float("inf"), True),
        "text": "caf\u00e9",
        "bytes": bytes(range(256)) * 9,
        "nested": {"list": [1, {"set": {3, 4}}], 7: "int key"},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "namespace": Namespace(a=1, path=Path("/x/y")),
        "dtype": torch.bfloat16,
        "tensor": torch.randn(2, 3, generator=torch.Generator().manual_seed(rank)),
        "rank": rank,
    }
    engine = start(Stack(), make_config(3))
    engine.save_checkpoint(folder, client_state=state)
    found = engine.load_checkpoint(folder)[1]
    engine.destroy()
    tensors = (
        torch.equal(found.pop("tensor"), state.pop("tensor")),
        np.array_equal(found.pop("array"), state.pop("array")),
    )
    return all(tensors) and all(found[key] == value and type(found[key]) is type(value) for key, value in state.items())


def test_client_state_of_every_rank_comes_back(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(client_state, str(tmp_path)) == [True, True]


def one_rank_cannot(folder: str) -> tuple[str, bool]:
    """One rank's client state cannot be stored: every rank hears of it, nothing is published, and training goes on."""
    case = case_named("plain")
    engine = start(case.build(), make_config(2))
    state = {"when": range(3) if here(0).rank == 1 else None}
    said = outcome(lambda: engine.save_checkpoint(folder, client_state=state))
    train_step(engine, case, 0)
    engine.save_checkpoint(folder)
    engine.destroy()
    return said, folders_in(folder) == ["global_step1"]


def test_one_ranks_client_state_stops_all(pool2: RankPool, tmp_path: Path) -> None:
    for said, clean in pool2.run(one_rank_cannot, str(tmp_path)):
        assert "PlainStateError" in said and "client_state/when" in said and clean


# -- tags and folders --------------------------------------------------------------------------------------------


def tags(folder: str) -> list[Any]:
    """Names, ``latest``, wrong tags and empty folders."""
    case, place = case_named("plain"), Path(folder)
    engine = start(case.build(), make_config(2))
    nothing = engine.load_checkpoint(folder)
    with logged() as said:
        absent = engine.load_checkpoint(folder + "/absent")
    for step in range(2):
        train_step(engine, case, step)
    engine.save_checkpoint(folder)
    engine.save_checkpoint(folder, tag="kept", save_latest=False)
    latest = (place / "latest").read_text()
    path = engine.load_checkpoint(folder)[0]
    named = engine.load_checkpoint(folder, tag="kept")[0]
    wrong = outcome(lambda: engine.load_checkpoint(folder, tag="global_step7"))
    inside = outcome(lambda: engine.load_checkpoint(folder + "/kept"))
    inside += outcome(lambda: engine.load_checkpoint(folder + "/latest"))
    bad = [outcome(lambda tag=tag: engine.save_checkpoint(folder, tag=tag)) for tag in ("a/b", ".hidden", "latest")]
    empty = outcome(lambda: engine.save_checkpoint(""))
    engine.save_checkpoint(folder, tag=5, save_latest=False)  # epochs make tags that are numbers
    assert engine.load_checkpoint(folder, tag=5)[0] == str(place / "5")
    not_a_dict = outcome(lambda: engine.save_checkpoint(folder, client_state=[1]))
    engine.destroy()
    return [nothing, (absent, said), latest, path, named, wrong, inside, bad, empty, not_a_dict]


def test_tags_and_folders(pool2: RankPool, tmp_path: Path) -> None:
    found = pool2.run(tags, str(tmp_path))
    assert f"there is no folder {tmp_path}/absent; nothing was loaded" in found[0][1][1][0]
    for nothing, (absent, _), latest, path, named, wrong, inside, bad, empty, not_a_dict in found:
        assert nothing == absent == (None, None)
        assert (
            f"the folder around it, {tmp_path}, with tag='kept'" in inside
            and f"{tmp_path}/latest is a file; name the folder" in inside
        )
        assert latest == "global_step2" and path == str(tmp_path / "global_step2") and named == str(tmp_path / "kept")
        assert "CheckpointError" in wrong and "global_step7" in wrong and "kept" in wrong
        assert all("cannot be a folder name" in text for text in bad)
        assert "ValueError" in empty and "UsageError" in not_a_dict


def differing_tags(folder: str, mode: str) -> tuple[str, list[str], list[str]]:
    """Every rank passes a tag of its own."""
    engine = start(Stack(), make_config(1, checkpoint={"tag_validation": mode}))
    with logged(logging.WARNING) as told:
        said = outcome(lambda: engine.save_checkpoint(folder, tag=f"tag{here(0).rank}"))
    engine.destroy()
    return said, told, folders_in(folder)


@pytest.mark.parametrize("mode", ["FAIL", "WARN", "IGNORE"])
def test_differing_tags(pool2: RankPool, tmp_path: Path, mode: str) -> None:
    for said, told, there in pool2.run(differing_tags, str(tmp_path), mode):
        assert ("different tags" in said) is (mode == "FAIL")
        assert any("different tags" in text for text in told) is (mode == "WARN")
        assert there == ([] if mode == "FAIL" else ["tag0"])


def many_saves(folder: str) -> tuple[list[str], str, bool]:
    """Only the newest stay; the same tag twice is replaced."""
    case = case_named("plain")
    engine = start(case.build(), make_config(3, checkpoint={"keep_last": 2}))
    for step in range(3):
        train_step(engine, case, step)
        engine.save_checkpoint(folder)
    engine.save_checkpoint(folder, tag="twice", save_latest=False)
    first = snapshot(engine)["params"]
    train_step(engine, case, 3)
    engine.save_checkpoint(folder, tag="twice")
    second = snapshot(engine)["params"]
    train_step(engine, case, 4)
    engine.load_checkpoint(folder, tag="twice")
    again = snapshot(engine)["params"]
    engine.destroy()
    return folders_in(folder), (Path(folder) / "latest").read_text(), again == second != first


def test_keep_last_and_the_same_tag_twice(pool2: RankPool, tmp_path: Path) -> None:
    for there, latest, replaced in pool2.run(many_saves, str(tmp_path)):
        assert there == ["global_step3", "twice"] and latest == "twice" and replaced
