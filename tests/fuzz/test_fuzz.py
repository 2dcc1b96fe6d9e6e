"""Whatever a program does with an engine, within what the documents allow, it trains as plain torch does."""

import pytest

from tests.fuzz.__main__ import difference
from tests.fuzz.draw import draw, features
from tests.harness.covering import cover
from tests.harness.pool import RankPool

SEEDS = range(60)
# ``make test`` runs the cases that together have every feature of all of them.
COVERING = cover([features(draw(seed, 2)) for seed in SEEDS])
AT_ONCE = 20
MORE = {1: 300, 2: 1000, 3: 300, 4: 400}


def _check(pool: RankPool, ranks: int, seed: int) -> None:
    case = draw(seed, ranks)
    if told := difference(pool, case):
        again = f"python -m tests.fuzz --seed {seed} --ranks {ranks}"
        pytest.fail("\n".join([f"{again}   (which looks for a smaller case)", *case.lines(), told]), pytrace=False)


@pytest.mark.parametrize(
    "seed", [seed if seed in COVERING else pytest.param(seed, marks=pytest.mark.exhaustive) for seed in SEEDS]
)
def test_a_drawn_case_trains_as_plain_torch(pool2: RankPool, seed: int) -> None:
    _check(pool2, 2, seed)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "first"), [(n, start) for n, count in MORE.items() for start in range(1000, 1000 + count, AT_ONCE)]
)
def test_many_cases(request: pytest.FixtureRequest, ranks: int, first: int) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    for seed in range(first, first + AT_ONCE):
        _check(pool, ranks, seed)
