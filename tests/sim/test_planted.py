"""Races of every kind that streams, copies, collectives and allocators make possible are seen, and no other is."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.sim.planted import NOT_IN_BRUTE_FORCE, PROGRAMS
from tests.sim.test_matrix import LIMIT_S, ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("planted") / "found.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.sim.planted", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(json.loads(out.read_text()))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_planted_race_is_seen_and_the_same_program_in_order_is_not(found: dict[str, Any], name: str) -> None:
    (planted, pairs), (ordered, none) = found[name]
    assert planted, "the race is not seen"
    assert not ordered, "\n".join(ordered)
    assert none == 0 and (pairs > 0 or name in NOT_IN_BRUTE_FORCE)
