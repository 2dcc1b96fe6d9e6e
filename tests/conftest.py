"""Fixtures: pools of ranks that live for the whole session (a pool that failed rebuilds itself)."""

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_LOG_LEVEL", "WARNING")

from tests.harness.exhaustive import corner, covering, unmatched
from tests.harness.pool import PatientPool, RankPool

LIMIT_S = 120.0  # of a test without a mark of its own
FOLDERS = ("sim", "fuzz", "dist", "compat", "gpu", "ops", "budget", "pure")  # in the order of a whole run
PATIENCE = 5  # a limit is meant for an idle machine; it ends what hangs, and nothing that is only slow

# The same commit gives the same verdict; HYPOTHESIS_PROFILE=search looks for new counterexamples.
with contextlib.suppress(ImportError):  # the tests of clients and of devices do without it
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, deadline=None)
    settings.register_profile("search", deadline=None, print_blob=True)
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


class StalePatterns(pytest.Item):
    """Fails in the words of its ``patterns``, as a test does: an error in a hook ends a worker without saying why."""

    patterns: tuple[str, ...] = ()

    def runtest(self) -> None:
        pytest.fail("\n    ".join(["tests/harness/exhaustive.py names tests that do not exist:", *self.patterns]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: object) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, None, str]:
        return "tests/harness/exhaustive.py", None, self.name


def _order(items: list[pytest.Item]) -> None:
    """Files whose tests take seconds before those whose tests take milliseconds: these fill what is left over when few
    workers have something to do. Tests of a file stay together, in their order.
    """
    size, place = Counter(item.path for item in items), {name: number for number, name in enumerate(FOLDERS)}
    items.sort(key=lambda item: (place.get(item.path.parent.name, 0), -size[item.path], item.path.name))


def _plain(value: object) -> object:
    """Make what tells one setting of a test from another: its text, or what it is."""
    return repr(value) if isinstance(value, (str, int, float, bool, tuple, list, dict, type(None))) else id(value)


def _mark_beyond_covering(items: list[pytest.Item]) -> None:
    """Leave to ``make test-all`` the rows of parametrized tests of ranks that show no new pair of settings."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        of_ranks = isinstance(item, pytest.Function) and item.path.parent.name == "dist" and hasattr(item, "callspec")
        if of_ranks and item.get_closest_marker("exhaustive") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in tests.values():
        kept = covering([tuple(map(_plain, row.callspec.params.values())) for row in rows])
        for position in set(range(len(rows))) - kept:
            rows[position].add_marker("exhaustive")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the corners of matrices and sets limits; a pattern that no test of a whole run answers to is a failure."""
    for item in items:
        if corner(item.nodeid):
            item.add_marker("exhaustive")
        limit = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(PATIENCE * (limit.args[0] if limit else LIMIT_S)), append=False)
    _mark_beyond_covering(items)
    if config.args == ["tests"]:
        _order(items)
    name = "tests/harness/exhaustive.py::test_every_pattern_names_a_test"
    stale = unmatched(item.nodeid for item in items) if config.args == ["tests"] else set()
    if config.getoption("lf", False):  # only files in which something failed are looked at
        stale = {"those of the run before"} if name in config.cache.get("cache/lastfailed", {}) else set()
    if stale:
        items.insert(0, StalePatterns.from_parent(session, name=name.partition("::")[2], nodeid=name))
        items[0].patterns = tuple(sorted(stale))


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
