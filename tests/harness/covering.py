"""Which rows of a parametrized test ``make test`` runs; the others are marked ``exhaustive``."""

from collections.abc import Hashable, Sequence, Set
from itertools import combinations

import pytest


def leave_rows_out(rows: Sequence[pytest.Function]) -> None:
    """Mark rows of one parametrized test as ``exhaustive``: those that its mark ``in_make_test`` does not name, and of
    a test of ranks or of native code without one those that show no new setting.
    """
    rows = [row for row in rows if row.get_closest_marker("exhaustive") is None]
    named = rows[0].get_closest_marker("in_make_test") if rows else None
    if named is not None:
        left = [row for row in rows if row.callspec.id not in named.args]
    elif rows and rows[0].path.parent.name in ("dist", "ops"):
        kept = covering([tuple(map(_plain, row.callspec.params.values())) for row in rows])
        left = [row for position, row in enumerate(rows) if position not in kept]
    else:
        left = []
    for row in left:
        row.add_marker("exhaustive")


def _plain(value: object) -> object:
    """Make what tells one setting of a test from another: its text, or what it is."""
    return repr(value) if isinstance(value, (str, int, float, bool, tuple, list, dict, type(None))) else id(value)


def covering(rows: Sequence[tuple[object, ...]]) -> set[int]:
    """Choose rows of a matrix so that each value of each column is there, and of three columns and more each pair of
    values that the matrix has: positions, greedily, the row with the most that is new first (a covering array).

    ``rows``: for each row its value in every column, hashable. Columns that always change together count as one.
    """
    columns = {column: None for column in zip(*rows, strict=True) if len(set(column)) > 1}
    if len(columns) < 2:
        return set(range(len(rows)))
    sizes = (1, 2) if len(columns) > 2 else (1,)
    wanted = [
        {(chosen, tuple(column[row] for column in chosen)) for size in sizes for chosen in combinations(columns, size)}
        for row in range(len(rows))
    ]
    return cover(wanted)


def cover(features: Sequence[Set[Hashable]]) -> set[int]:
    """Choose positions of rows that together have every feature, greedily, the row with the most that is new first."""
    kept, missing = set[int](), set[Hashable]().union(*features)
    while missing:
        best = max(range(len(features)), key=lambda row: (len(features[row] & missing), -row))
        kept.add(best)
        missing -= features[best]
    return kept
