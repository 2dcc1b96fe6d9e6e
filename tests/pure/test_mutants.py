"""The list of planted faults stays alive: each has its one place in the code, compiles, and names tests that exist."""

from importlib import import_module

from tests.harness.rows import for_each
from tests.mutants.faults import MUTANTS
from tests.mutants.mutant import ROOT, Mutant


@for_each("mutant", MUTANTS)
def test_a_fault_still_has_its_place(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    planted = mutant.planted(source)
    assert planted != source
    compile(planted, mutant.file, "exec")


def _runs(argument: str) -> bool:
    """Whether ``make test`` runs this file, test or row. Raises AttributeError where there is no such test."""
    path, _, test = argument.partition("::")
    function, _, row = test.partition("[")
    module = import_module(path.removesuffix(".py").replace("/", "."))
    marks = getattr(getattr(module, function), "pytestmark", []) if function else []
    return not any(
        mark.name == "exhaustive" or (mark.name == "in_make_test" and row and row[:-1] not in mark.args)
        for mark in marks
    )


@for_each("mutant", MUTANTS)
def test_the_tests_of_a_fault_exist_and_make_test_runs_one(mutant: Mutant) -> None:
    assert any([_runs(argument) for argument in mutant.tests]), f"{mutant.tests} are left to test-all"


def test_ids_are_unique() -> None:
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
