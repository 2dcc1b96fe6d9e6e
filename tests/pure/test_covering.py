"""Rows that ``make test`` runs of a matrix show each setting, and each pair of settings of three columns and more."""

from itertools import combinations, product

import pytest

from tests.harness.covering import covering


def test_of_two_columns_each_value_stays_and_of_three_each_pair() -> None:
    rows: list[tuple[object, ...]] = [*product((0, 1, 2, 3), ("fp32", "bf16"))]
    kept = [rows[position] for position in covering(rows)]
    assert {stage for stage, _ in kept} == {0, 1, 2, 3} and {dtype for _, dtype in kept} == {"fp32", "bf16"}
    assert len(kept) == 4
    rows = [*product((0, 1, 2, 3), ("fp32", "bf16"), (1, 2))]
    kept = [rows[position] for position in covering(rows)]
    for first, second in combinations(range(3), 2):
        assert {(row[first], row[second]) for row in kept} == {(row[first], row[second]) for row in rows}
    assert len(kept) < len(rows)


def test_rows_of_one_setting_and_columns_that_change_together_stay_whole() -> None:
    assert covering([("a",), ("b",), ("c",)]) == {0, 1, 2}
    assert covering([("a", 1), ("b", 2), ("c", 3)]) == {0, 1, 2}
    assert covering([(1, "x", "a"), (1, "x", "b")]) == {0, 1}


def test_every_row_that_a_mark_names_is_a_row(request: pytest.FixtureRequest) -> None:
    if request.config.args != ["tests"] or request.config.getoption("lf", False) or request.config.option.keyword:
        pytest.skip("only a whole run has every row")
    named, rows = dict[str, set[str]](), set[str]()
    for item in request.session.items:
        rows.add(item.nodeid)
        mark = item.get_closest_marker("in_make_test")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            named[test] = {f"{test}[{row}]" for row in mark.args}
    assert not set().union(*named.values()) - rows
