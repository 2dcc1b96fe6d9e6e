"""Fixtures of the client tests."""

import pytest

from tests.harness.pool import RankPool


@pytest.fixture
def pool(world: int, request: pytest.FixtureRequest) -> RankPool:
    """As many ranks as a row of the test says with ``world``."""
    found: RankPool = request.getfixturevalue(f"pool{world}")
    return found
