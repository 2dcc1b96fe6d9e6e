"""Mutation proof of the checker of order: each wait and event of the package is needed, and its loss is seen.

Over two thirds of the statements that order are seen by a case of the matrix; why the others cannot be is in unseen.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim import mutants
from tests.sim.test_matrix import ROOT
from tests.sim.unseen import OUTSIDE, SEEN, UNSEEN

LIMIT_S = 5400  # twenty minutes of one core, three times that beside other tests
# Both directions of a side stream, a collective, and one of publishing, of reducing over axes and of drives.
FEW = [
    *(call for call in SEEN if call.startswith("comm.collectives:")),
    "zero.update.publish:finish: transfer.wait()",
    "zero.gradients:_continued: before.wait()",
    "zero.step:take_step: runtime.before_update()",
    "checkpoint.save.content:arrive: self._event.synchronize()",
    "tier.arena:_reclaim: get_accelerator().synchronize()",
    "tier.drive:_load: piece.transfer.wait()",
]


def run(out: Path, *options: str) -> dict[str, tuple[str, str, list[str]]]:
    """Call -> (case that sees its loss or "", how, cases that reach it)."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.sim.mutants", "--json", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return dict(json.loads(out.read_text()))


def test_every_call_that_orders_is_in_one_of_the_lists() -> None:
    """A new one is a question: which case sees its loss?"""
    every = [call for module in mutants.MODULES for call in mutants.calls(module)]
    assert sorted(every) == sorted([*SEEN, *UNSEEN])
    assert not mutants.unlisted()
    assert all(mutants.modules_of(beginning) for beginning in OUTSIDE)


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_few_are_seen_by_the_case_that_is_named(tmp_path: Path) -> None:
    results = run(tmp_path / "few.json", "--quick", *FEW)
    assert {call: case for call, (case, _, _) in results.items()} == {call: SEEN[call] for call in FEW}


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 60)
def test_each_is_seen_or_cannot_be(tmp_path: Path) -> None:
    results = run(tmp_path / "all.json")
    assert {call: case for call, (case, _, _) in results.items() if case} == SEEN
    assert {call for call, (case, _, _) in results.items() if not case} == set(UNSEEN)
    never = {call for call, (_, _, reached) in results.items() if not reached}
    assert never == {call for call, reason in UNSEEN.items() if reason.startswith("not reached: ")}
