"""Fixtures: pools of ranks that live for the whole session (a pool that failed rebuilds itself)."""

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_LOG_LEVEL", "WARNING")

from tests.harness.covering import leave_rows_out
from tests.harness.pool import PatientPool, RankPool
from tests.harness.warm import Warm

LIMIT_S = 120.0  # of a test without a mark of its own
FOLDERS = ("sim", "fuzz", "dist", "compat", "gpu", "ops", "budget", "pure")  # in the order of a whole run
PATIENCE = 5  # a limit is meant for an idle machine; it ends what hangs, and nothing that is only slow

# The same commit gives the same verdict; HYPOTHESIS_PROFILE=search looks for new counterexamples.
with contextlib.suppress(ImportError):  # the tests of clients and of devices do without it
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=100)
    settings.register_profile("search", deadline=None, max_examples=3000, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def _pool(world: int) -> Iterator[RankPool]:
    with PatientPool(world) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool1() -> Iterator[RankPool]:
    """One rank."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def pool2() -> Iterator[RankPool]:
    """Two ranks."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def pool3() -> Iterator[RankPool]:
    """Three ranks: nothing divides evenly."""
    yield from _pool(3)


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    """Four ranks."""
    yield from _pool(4)


@pytest.fixture(scope="module")
def pool8() -> Iterator[RankPool]:
    """Eight ranks, which do not stay for the tests of other files."""
    yield from _pool(8)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Launchers and scripts that start at once."""
    made = Warm(tmp_path_factory.mktemp("warm"))
    yield made
    made.close()


def _order(items: list[pytest.Item]) -> None:
    """Files whose tests take seconds before those whose tests take milliseconds: these fill what is left over when few
    workers have something to do. Tests of a file stay together, in their order.
    """
    size, place = Counter(item.path for item in items), {name: number for number, name in enumerate(FOLDERS)}
    items.sort(key=lambda item: (place.get(item.path.parent.name, 0), -size[item.path], item.path.name))


def _leave_rows_out(items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in tests.values():
        leave_rows_out(rows)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set limits, and mark the rows that ``make test`` leaves out."""
    for item in items:
        limit = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(PATIENCE * (limit.args[0] if limit else LIMIT_S)), append=False)
    _leave_rows_out(items)
    if config.args == ["tests"]:
        _order(items)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A test of Ctrl-C that lets one out has failed, and the session goes on."""
    try:
        return (yield)
    except KeyboardInterrupt as error:
        if pyfuncitem.get_closest_marker("ctrl_c") is None:
            raise
        raise AssertionError("Ctrl-C came where none was expected") from error


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end: no later collection of garbage looks through it."""
    gc.collect()
    gc.freeze()
