"""What is out of the ordinary is named, once; what training does anyway is not."""

import math

import torch

from deepspeed.monitor.anomaly import AnomalyWatch
from tests.harness.rows import for_each


def told(losses: list[float], norms: list[float] | None = None, window: int = 100) -> list[str]:
    watch = AnomalyWatch(window)
    pairs = zip(losses, norms or [1.0] * len(losses), strict=True)
    return [text for step, (loss, norm) in enumerate(pairs, 1) for text in watch.look(step, loss=loss, norm=norm)]


def noisy(count: int, seed: int, share: float = 0.05) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return [1 + share * float(x) for x in torch.randn(count, generator=generator)]


@for_each("seed", range(10))
def test_ordinary_training_is_not_remarked_on(seed: int) -> None:
    """A loss that falls from 10 to 2 with noise, and a norm that falls by ten and doubles now and then."""
    noise = noisy(2000, seed)
    losses = [(2 + 8 * math.exp(-i / 200)) * noise[i] for i in range(2000)]
    norms = [(0.3 + 3 * math.exp(-i / 100)) * noise[-i] * (2 if i % 50 == 7 else 1) for i in range(2000)]
    assert told(losses, norms) == []


def test_a_spike_is_named_once_with_its_step() -> None:
    losses = noisy(200, 0)
    losses[120:124] = [9.0, 8.0, 7.0, 6.0]
    (text,) = told(losses)
    assert text.startswith("step 121: the loss is 9;") and "the median of the last 100 is" in text


def test_a_second_spike_after_the_window_is_named_again() -> None:
    losses = noisy(400, 0)
    losses[120] = losses[300] = 9.0
    assert [text.split(":")[0] for text in told(losses)] == ["step 121", "step 301"]


@for_each("value", [30.0, 0.01])
def test_a_norm_above_or_below_its_band_is_named(value: float) -> None:
    norms = noisy(200, 1)
    norms[150] = value
    (said,) = told([1.0] * 200, norms)
    assert said.startswith("step 151: the gradient norm") and f"is {value:g}, out of the band" in said


def test_what_is_not_finite_and_what_is_zero() -> None:
    watch = AnomalyWatch(100)
    assert watch.look(1, loss=math.nan, norm=1.0) == ["step 1: the loss is nan"]
    assert watch.look(2, loss=1.0, norm=0.0) == ["step 2: the gradient norm is 0: no parameter gets a gradient"]
    assert watch.look(3, loss=1.0, norm=math.inf) == []  # who skips an update says so
    assert watch.look(4, loss=None, norm=None) == []


def test_the_first_updates_are_no_measure() -> None:
    assert told([1.0] * 10 + [50.0]) == []
    assert len(told([1.0] * 5 + [50.0], window=5)) == 1
