"""train_batch_size = micro batch x accumulation x ranks: completed where possible, refused where it does not close."""

import pytest

from deepspeed.config import BatchConfigError, DeepSpeedConfigError, load_config
from tests.harness.rows import for_each

TRAIN, MICRO, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def triple(train: object = None, micro: object = None, gas: object = None) -> dict[str, object]:
    return {key: value for key, value in ((TRAIN, train), (MICRO, micro), (GAS, gas)) if value is not None}


def resolved(source: dict[str, object], world: int, *, lenient: bool = False) -> tuple[int, int, int]:
    cfg = load_config(source, world_size=world, lenient=lenient)
    values = (cfg.train_batch_size, cfg.train_micro_batch_size_per_gpu, cfg.gradient_accumulation_steps)
    assert all(type(value) is int for value in values)
    return values


@for_each("absent", [None, "auto"])
def test_completed(absent: str | None) -> None:
    assert resolved(triple(32, 4, 4), 2) == resolved(triple(32, 4, absent), 2) == (32, 4, 4)
    assert resolved(triple(32, absent, 4), 2) == resolved(triple(absent, 4, 4), 2) == (32, 4, 4)
    assert resolved(triple(32, absent), 2) == (32, 16, 1)
    assert resolved(triple(absent, 4), 2) == resolved(triple(8.0, 4.0, 1.0), 2) == (8, 4, 1)


def test_mismatch_names_numbers_and_remedy() -> None:
    with pytest.raises(BatchConfigError) as caught:
        load_config(triple(16, 3, 2), world_size=2)
    text, batch = str(caught.value), "micro_batch_per_gpu * gradient_acc_step * world_size"
    assert text.startswith(f"Check batch related parameters. train_batch_size is not equal to {batch}")
    assert "16 != 3 * 2 * 2" in text and "Set train_batch_size to 12" in text
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ValueError)
    assert "counted" not in text, "16 is no batch of 3 * 2 for any number of ranks"


@for_each(("train", "counted"), [(6, "1 rank:"), (24, "4 ranks:")])
def test_a_batch_of_another_number_of_ranks_says_how_many_were_counted(train: int, counted: str) -> None:
    """As Accelerate fills it in where it was not told of all processes."""
    with pytest.raises(BatchConfigError, match=f"train_batch_size {train} is that of {counted} whoever filled it in"):
        load_config(triple(train, 3, 2), world_size=2)


UNEVEN = "train_batch_size 7 does not divide evenly over gradient_accumulation_steps 1 x 2 ranks = 2. Set "


@for_each(
    ("given", "text"),
    [
        (triple(7), f"{UNEVEN}train_batch_size to 6 or 8"),
        (triple(8, 3), "train_micro_batch_size_per_gpu 3 x 2 ranks = 6. Set train_batch_size to 6 or 12"),
        (triple(8, None, 3), "gradient_accumulation_steps 3 x 2 ranks = 6"),
        (triple(1), "Set train_batch_size to 2,"),
    ],
)
def test_ranks_must_divide(given: dict[str, object], text: str) -> None:
    with pytest.raises(BatchConfigError) as caught:
        load_config(given, world_size=2)
    assert text in str(caught.value)


@for_each("given", [{}, triple(gas=4)])
def test_nothing_given(given: dict[str, object]) -> None:
    with pytest.raises(BatchConfigError, match="neither train_batch_size nor train_micro_batch_size_per_gpu"):
        load_config(given, world_size=1)


AUTO = [("auto",), ("auto", "auto", 1), (None, 4, "auto"), (32, "auto", "auto"), (None, None, "auto")]


@for_each("given", AUTO)
def test_auto_is_never_guessed(given: tuple[object, ...]) -> None:
    with pytest.raises(DeepSpeedConfigError, match='is still "auto" and cannot be derived'):
        load_config(triple(*given), world_size=2)


@for_each(
    ("given", "expected"),
    [
        ({}, (2, 1, 1)),
        (triple("auto", "auto", "auto"), (2, 1, 1)),
        (triple(None, "auto", 4), (8, 1, 4)),
        (triple(32, "auto", "auto"), (32, 1, 1)),
        (triple(7), (7, 1, 1)),
        (triple(16, 3, 2), (16, 3, 2)),
    ],
)
def test_lenient_fills_with_ones(given: dict[str, object], expected: tuple[int, int, int]) -> None:
    assert resolved(given, 2, lenient=True) == expected
