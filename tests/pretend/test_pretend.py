"""The engine on a device that has streams, threads' devices and page-locked memory, but no hardware: real values, and a
wait that is missing gives other ones.

The device is process-global, so what is tested runs in processes of its own.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import ROOT
from tests.pretend import native
from tests.pretend.table import GPU_FILES, LATE, ORDERS, PLACES, PLANTED

LIMIT_S = 550  # of a machine that is busy with much else
pytestmark = pytest.mark.timeout(LIMIT_S)
EXHAUSTIVE = pytest.mark.exhaustive
# Places that differ most; ``make test-all`` has all, in 16 bits too.
COVERING = {"0", "3", "2 early", "3 both"}
QUICK_PLANTS = {
    "tier.store:wait: event.synchronize()", "zero.unit:arrive: self._transfer.wait()",
    "comm.collectives:wait: get_accelerator().current_stream().wait_...", "tier.behind:take: self._call().wait()",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    """The library is there: a minute or two of compiling, once for each torch."""
    if why_not := native.reason():
        pytest.skip(why_not)


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "", **more}


def run(folder: Path, *jobs: str, limit_s: int = LIMIT_S) -> dict[str, Any]:
    """What each job of tests/pretend/cases.py answers, from one process."""
    out = folder / "found.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.pretend", str(out), *jobs]
    ended = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=limit_s)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(json.loads(out.read_text()))


def _chosen(request: pytest.FixtureRequest, test: str, name: str) -> list[str]:
    """The values of a parameter of the tests that run now."""
    items = [item for item in request.session.items if item.path == request.path and item.name.startswith(test)]
    return list(dict.fromkeys(item.callspec.params[name] for item in items))  # type: ignore[attr-defined]


# What a test asks of the process without a parameter. First, as one of them wants a device that nobody has asked about.
ALONE = {
    "test_no_thread_asks": "foreign devices",
    "test_a_parameter_without_elements": "empty parameter",
    "test_who_writes_to_masters": "edited masters",
    "test_activations_in_host_memory": "kept activations",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Run the jobs of all tests that run now in one process; faults are planted last."""
    names = [item.name for item in request.session.items if item.path == request.path]
    jobs = [job for test, job in ALONE.items() if any(name.startswith(test) for name in names)]
    trained = _chosen(request, "test_training_is_that", "cell")
    if trained:
        jobs += ["plain", *(f"train {cell}" for cell in trained), *(f"train 0 late {dtype}" for dtype in HALVES)]
    for place, order, dtype in (cell.rsplit(" ", 2) for cell in _chosen(request, "test_updates_beside", "cell")):
        jobs += [f"train {place} {when} {dtype}" for when in ("now", order)]
    jobs += [f"without {call}" for call in _chosen(request, "test_a_wait", "call")]
    return run(tmp_path_factory.mktemp("found"), *dict.fromkeys(jobs), limit_s=3 * LIMIT_S)


HALVES = ("bf16", "fp16")
CELLS = [(place, order, "fp32") for place in PLACES for order in ORDERS]
CELLS += [(place, "late", dtype) for place in PLACES for dtype in HALVES]


@pytest.mark.parametrize(
    "cell",
    [
        " ".join(cell) if cell[0] in COVERING and cell[2] == "fp32" else pytest.param(" ".join(cell), marks=EXHAUSTIVE)
        for cell in CELLS
    ],
)
def test_training_is_that_of_plain_pytorch_however_late_the_device_is(cell: str, found: dict[str, Any]) -> None:
    losses, dtype = found[f"train {cell}"], cell.rpartition(" ")[2]
    assert isinstance(losses, list), losses
    expected = found["plain" if dtype == "fp32" else f"train 0 late {dtype}"]
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_activations_in_host_memory_are_those_of_plain_blocks_however_late(found: dict[str, Any]) -> None:
    sums = found["kept activations"]
    assert isinstance(sums, dict), sums
    assert [order for order, numbers in sums.items() if numbers == sums["plain"]] == ["plain", *ORDERS]


LATE_CELLS = [(place, order, "fp32") for place in LATE for order in ORDERS]
LATE_CELLS += [(place, "late", dtype) for place in LATE for dtype in HALVES]


@pytest.mark.parametrize(
    "cell",
    [
        " ".join(cell) if cell[:2] == ("2 delayed", "late") else pytest.param(" ".join(cell), marks=EXHAUSTIVE)
        for cell in LATE_CELLS
    ],
)
def test_updates_beside_later_steps_change_no_bit_however_late_the_device_is(cell: str, found: dict[str, Any]) -> None:
    place, _, dtype = cell.rsplit(" ", 2)
    losses = found[f"train {cell}"]
    assert isinstance(losses, list), losses
    assert losses == found[f"train {place} now {dtype}"]


@pytest.mark.parametrize(
    "call", [call if call in QUICK_PLANTS else pytest.param(call, marks=EXHAUSTIVE) for call in PLANTED]
)
def test_a_wait_that_is_missing_gives_other_numbers(call: str, found: dict[str, Any]) -> None:
    places = found[f"without {call}"]
    assert isinstance(places, dict), places
    assert set(places.values()) != {"equal"}


def two_ranks(folder: Path, *jobs: str) -> list[dict[str, Any]]:
    """The same on two ranks, each with a device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks = []
    for rank in ("0", "1"):
        command = [sys.executable, "-W", "ignore", "-m", "tests.pretend", str(folder / rank), *jobs]
        environment = _environment(RANK=rank, LOCAL_RANK=rank, **meet)
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for each in ranks:
            _, text = each.communicate(timeout=LIMIT_S)
            assert each.returncode == 0, text[-3000:]
    finally:
        for each in ranks:
            each.kill()
    return [json.loads((folder / rank).read_text()) for rank in ("0", "1")]


@pytest.mark.parametrize("places", [("3",), pytest.param(("0", "2", "2 optimizer", "3 both"), marks=EXHAUSTIVE)])
def test_collectives_that_return_at_once_train_as_plain_pytorch(places: tuple[str, ...], tmp_path: Path) -> None:
    for found in two_ranks(tmp_path, "plain", *(f"train {place} late fp32" for place in places)):
        for place in places:
            assert found[f"train {place} late fp32"] == pytest.approx(found["plain"], rel=1e-5, abs=1e-5), place


def test_a_parameter_without_elements_trains_in_16_bits(found: dict[str, Any]) -> None:
    dtypes = found["empty parameter"]
    assert isinstance(dtypes, dict), dtypes
    for dtype, (losses, without) in dtypes.items():
        assert losses == without, dtype


def test_no_thread_asks_about_a_device_that_is_not_its_own(found: dict[str, Any]) -> None:
    """A real device would make a context for it, half a gigabyte on the first of each machine."""
    assert found["foreign devices"] == []


def test_who_writes_to_masters_does_not_meet_their_copies_to_the_device(found: dict[str, Any]) -> None:
    places = found["edited masters"]
    assert isinstance(places, dict), places
    for place, (late, at_once) in places.items():
        assert late == at_once, place


@pytest.mark.parametrize(
    "files",
    [name if name == "quick" else pytest.param(name, marks=EXHAUSTIVE) for name in GPU_FILES],
)
def test_what_a_real_device_is_tested_for_holds_here(files: str, tmp_path: Path) -> None:
    """The files of tests/gpu; those that need a real one skip themselves."""
    plain = ["-q", "-p", "tests.pretend.plugin", "-p", "no:cacheprovider", "--tb", "short", "--basetemp", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *plain, *GPU_FILES[files]]
    ended = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout[-4000:]
