"""``ds_simulate --calibrate``: a whole machine's file from what the ranks measure, or none."""

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed.errors import UsageError
from deepspeed.tools.simulate.calibrate import clock, run
from deepspeed.tools.simulate.calibrate.device import Effort
from deepspeed.tools.simulate.costs import CONSTANTS, load_machine
from tests.harness.pool import RankPool

QUICK = Effort(
    sides=(32, 64), sequences=(32,), heads=2, array=1 << 16, copies=(4096, 1 << 16), collectives=(4096, 1 << 16),
    moments=1 << 14, file=1 << 20, rounds=1,
)  # fmt: skip
LINKS = ("node_rate", "node_hop_s", "agreement_s")
DRIVES = ("drive_read_rate", "drive_write_rate")
ELSEWHERE = ("network_rate", "network_hop_s", "network_crowding", "agreement_hop_s", "contention")


def _calibrated(path: str, folder: str | None, *, ranks: int) -> dict[str, Any] | None:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    with mock.patch.object(clock, "_HOST_TURN_S", 0.002):  # what is measured so is rough, and it is not looked at
        return run.calibrate(Path(path), folder=folder, effort=QUICK)


def _refused(path: str, folder: str | None) -> str:
    with pytest.raises(UsageError) as error:
        run.calibrate(Path(path), folder=folder, effort=QUICK)
    return str(error.value)


def _interrupted(path: str, failure: type[BaseException]) -> list[str]:
    with mock.patch.object(run, "_measure", side_effect=failure), pytest.raises(failure):
        run.calibrate(Path(path), effort=QUICK)
    return os.listdir(Path(path).parent)


@pytest.mark.exhaustive
def test_two_ranks_write_one_whole_file(pool2: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    first, second = pool2.run(_calibrated, str(path), str(tmp_path), ranks=2)
    assert second is None and json.loads(path.read_text()) == json.loads(json.dumps(first))
    assert os.listdir(tmp_path) == ["mine.json"]
    machine = load_machine(str(path))
    assert set(machine.values) == set(CONSTANTS) and machine.on_host and machine["gpus_per_node"] == 2
    sources = {name: source for name, (_, source) in first["constants"].items()}
    for name in CONSTANTS:
        assert sources[name].startswith("assumed: not measured" if name in ELSEWHERE else "measured 2"), name
    measured = first["measured"]
    assert measured["ranks"] == 2 and measured["backend"] == "gloo" and measured["date"][:2] == "20"
    ops = {row["case"][0] for row in measured["details"]["collectives_node"]}
    assert ops == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {"products", "attention", "memory", "copies"} <= set(measured["details"])


@pytest.mark.exhaustive
def test_one_rank_says_what_it_cannot_know(pool1: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    (document,) = pool1.run(_calibrated, str(path), None, ranks=1)
    for name in (*LINKS, *DRIVES, *ELSEWHERE):
        assert document["constants"][name] == [load_machine("h100")[name], "assumed: not measured in this run; h100's"]
    pool1.run(_calibrated, str(path), None, ranks=1)  # over a machine's file another may be written


def test_ranks_on_several_nodes_measure_the_network(pool4: RankPool, tmp_path: Path) -> None:
    """Four ranks that take themselves for two nodes of two."""
    path = tmp_path / "mine.json"
    document = pool4.run(_calibrated, str(path), None, ranks=2)[0]
    for name in ("node_rate", "network_rate", "network_hop_s"):
        assert document["constants"][name][1].startswith("measured"), name
    assert document["constants"]["gpus_per_node"][0] == 2
    assert "over 4 ranks" in document["constants"]["network_rate"][1]
    assert document["measured"]["details"]["collectives_network"]


@pytest.mark.parametrize(
    ("name", "folder", "expected"),
    [
        ("no/such/mine.json", None, "there is no folder .*no/such"),
        ("", None, "this is a folder"),
        ("config.json", None, "is there and is no machine's file; give another name"),
        ("mine.json", "no/drive", "the folder no/drive does not exist"),
        ("/proc/mine.json", None, "no file can be made in /proc"),
    ],
)
def test_what_cannot_be_written_or_measured_is_every_rank_s_sentence(
    pool2: RankPool, tmp_path: Path, name: str, folder: str | None, expected: str
) -> None:
    (tmp_path / "config.json").write_text('{"train_batch_size": 1}')
    for text in pool2.run(_refused, str(tmp_path / name), folder):
        assert re.search(expected, text), text
    assert os.listdir(tmp_path) == ["config.json"]
    assert (tmp_path / "config.json").read_text() == '{"train_batch_size": 1}'


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_calibration_leaves_nothing(
    pool1: RankPool, tmp_path: Path, failure: type[BaseException]
) -> None:
    assert pool1.run(_interrupted, str(tmp_path / "mine.json"), failure) == [[]]
