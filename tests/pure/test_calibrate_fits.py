"""The lines and curves that a calibration puts through what it measures."""

import pytest

from deepspeed.tools.simulate.calibrate.clock import alternating, line

SIZES = [64e3, 1e6, 16e6, 256e6]


def test_a_line_finds_latency_and_rate() -> None:
    start, slope = line(SIZES, [5e-6 + size / 20e9 for size in SIZES])
    assert start == pytest.approx(5e-6) and 1 / slope == pytest.approx(20e9)


def test_a_line_counts_relative_errors() -> None:
    """A large size that takes 10 % longer moves the latency no more than 10 %."""
    seconds = [5e-6 + size / 20e9 for size in SIZES]
    start, _ = line(SIZES, [*seconds[:3], 1.1 * seconds[3]])
    assert start == pytest.approx(5e-6, rel=0.1)


@pytest.mark.parametrize("seconds", [[1e-5, 1e-3, 1e-2, 0.3], [3e-3, 2e-3, 2e-3, 1e-3], [1e-4] * 4])
def test_what_a_line_gives_is_always_positive(seconds: list[float]) -> None:
    start, slope = line(SIZES, seconds)
    assert start > 0 and slope > 0


def test_a_line_through_one_size_goes_through_the_origin_or_is_flat() -> None:
    start, slope = line([1e6], [1e-3])
    assert start + slope * 1e6 == pytest.approx(1e-3, rel=1e-3)


def test_cases_take_turns_and_every_other_round_backwards() -> None:
    order: list[str] = []

    def case(name: str, values: list[float]) -> object:
        def run() -> float:
            order.append(name)
            return values.pop(0)

        return run

    found = alternating({"a": case("a", [3.0, 1.0, 2.0]), "b": case("b", [9.0, 9.0, 5.0])}, 3)  # type: ignore[dict-item]
    assert found == {"a": 2.0, "b": 9.0} and "".join(order) == "abbaab"
