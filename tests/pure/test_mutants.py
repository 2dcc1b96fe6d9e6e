"""The list of planted faults stays alive: each has its one place in the code, compiles, and names tests that exist."""

import pytest

from tests.harness.exhaustive import corner
from tests.mutants.faults import MUTANTS
from tests.mutants.mutant import ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_fault_still_has_its_place(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    planted = mutant.planted(source)
    assert planted != source
    compile(planted, mutant.file, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_the_tests_of_a_fault_exist(mutant: Mutant) -> None:
    for argument in mutant.tests:
        file, _, function = argument.partition("[")[0].partition("::")
        assert f"def {function or 'test_'}" in (ROOT / file).read_text(), (
            f"mutant {mutant.id} names {argument}, which does not exist"
        )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_fault_is_killed_by_what_make_test_runs(mutant: Mutant) -> None:
    left = [argument for argument in mutant.tests if not corner(argument)]
    assert left, f"{mutant.tests} are left to test-all by tests/harness/exhaustive.py"


def test_ids_are_unique() -> None:
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


def test_a_fault_without_its_place_is_named() -> None:
    lost = Mutant("Z9", "deepspeed/nowhere.py", "a = 1", "a = 2", (), "nothing")
    for source in ("b = 1", "a = 1\na = 1"):
        with pytest.raises(ValueError, match=r"mutant Z9 .* deepspeed/nowhere.py, not once"):
            lost.planted(source)
