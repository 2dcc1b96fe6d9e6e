"""benchmarks/simulator.py: its report on stored recordings is what its two pages show, no constant has seen the
source that it predicts, and a recording is what the engine does today.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SMALLEST = "llm_foundry_mpt#130"  # the smallest model


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str) -> Any:
    """A file of the folder."""
    return importlib.import_module(name)


def test_the_pages_show_the_tables_that_the_report_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert module("simulator").report(write=False, check=True) == 0, capsys.readouterr().err


def test_every_source_that_misses_is_named_with_what_is_missing() -> None:
    simulator = module("simulator")
    *_, groups = simulator.tables()
    wanted, missed = simulator.WANTED, set()
    for group in groups.values():
        errors = simulator.Errors.of(group, simulator.time_of(group[0].row))
        if errors.middle > wanted["median"] or errors.ninth > wanted["ninth"]:
            missed.add(group[0].row["origin"])
        if any("memory_gib" in c.row for c in group):
            assert simulator.Errors.of(group, "memory_gib").middle <= wanted["memory"], group[0].row["table"]
    assert missed <= set(module("simulator_record").published()["missing"])


def test_the_best_published_layout_of_each_sweep_is_among_the_first_three() -> None:
    simulator = module("simulator")
    *_, groups = simulator.tables()
    places = [place for *_, place in simulator.places_of(groups)]
    assert places and max(places) <= 3


def test_a_constant_without_a_source_that_alone_tells_it_is_where_the_fit_began() -> None:
    fit, play, rows = module("simulator_fit"), module("simulator_play"), module("simulator_record").rows_of()
    for origin, found in fit.fits()["without"].items():
        others = {kin for row in rows if row["origin"] != origin for kin in play.lineage(row["machine"])}
        for name, value in found.items():
            if name.partition(".")[0] not in {"all", *others}:
                assert value == pytest.approx(fit.PRIOR[name][0], rel=1e-6), (origin, name)


def test_no_file_of_a_published_machine_has_a_constant_that_is_fitted_for_what_it_is_like() -> None:
    fit, play = module("simulator_fit"), module("simulator_play")
    for row in module("simulator_record").rows_of():
        *like, name = play.lineage(row["machine"])
        fitted = {key.partition(".")[2] for key in fit.PRIOR if key.partition(".")[0] in (*like, "all")}
        own = set(play.constants_of(name)) if like else set()
        assert not own & fitted, name


@pytest.mark.exhaustive
def test_a_recording_is_what_the_engine_does_today() -> None:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "simulator.py"), "record", "--check", SMALLEST]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
