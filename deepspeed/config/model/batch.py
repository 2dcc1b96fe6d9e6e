"""The batch triangle: train_batch_size = micro batch per rank x accumulation steps x data-parallel ranks."""

from typing import Any, NamedTuple

from deepspeed.config.explain.messages import at_line
from deepspeed.config.model.values import AUTO, whole_number
from deepspeed.config.parse import ConfigSource
from deepspeed.errors import BatchConfigError, DeepSpeedConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
BATCH_KEYS = (TRAIN, MICRO, ACCUMULATION)


class Batch(NamedTuple):
    """The three resolved numbers; ``train`` counts samples per update over all data-parallel ranks."""

    train: int
    micro: int
    accumulation: int


def _read(source: ConfigSource, key: str) -> int | None:
    value: Any = source.data.get(key)
    if value is None or (isinstance(value, str) and value == AUTO):
        return None
    try:
        count = whole_number(value)
    except ValueError as error:
        raise DeepSpeedConfigError(f"{source.name}: " + at_line(source, key, f"{key} {error}.")) from None
    if count <= 0:
        raise DeepSpeedConfigError(f"{source.name}: " + at_line(source, key, f"{key} must be at least 1, not {count}."))
    return int(count)


def _does_not_close(source: ConfigSource, sentence: str) -> BatchConfigError:
    """Programs look for the beginning of the sentence; people are told the file."""
    return BatchConfigError(("" if source.from_program else f"{source.name}: ") + at_line(source, TRAIN, sentence))


def _split(source: ConfigSource, train: int, parts: int, what: str) -> int:
    """``train / parts``, exact."""
    if train % parts:
        below, above = train // parts * parts, (train // parts + 1) * parts
        remedy = f"{below} or {above}" if below else str(above)
        sentence = (
            f"{TRAIN} {train} does not divide evenly over {what} = {parts}. Set {TRAIN} to {remedy}, or "
            "change the number of ranks."
        )
        raise _does_not_close(source, sentence)
    return train // parts


def _unresolved(source: ConfigSource, autos: list[str]) -> DeepSpeedConfigError:
    if autos:
        names = " and ".join(autos)
        return DeepSpeedConfigError(
            f'{source.name}: {names} is still "auto" and cannot be derived from the other batch keys. '
            "Only an integration (Transformers, Accelerate) fills that in; write numbers for two of "
            f"{', '.join(BATCH_KEYS)}."
        )
    return BatchConfigError(f"{source.name}: neither {TRAIN} nor {MICRO} is given. Set at least one of them.")


def resolve_batch(source: ConfigSource, *, world_size: int, lenient: bool) -> Batch:
    """Complete the triangle for ``world_size`` data-parallel ranks.

    Absent accumulation means 1; "auto" counts as absent but is never guessed. With ``lenient`` nothing about the
    sizes is refused and what is missing becomes 1.
    Raises BatchConfigError when the triangle does not close, DeepSpeedConfigError for unresolved "auto" or wrong types.
    """
    train, micro, accumulation = (_read(source, key) for key in BATCH_KEYS)
    if lenient:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(train or micro * accumulation * world_size, micro, accumulation)
    autos = [key for key in BATCH_KEYS if source.data.get(key) == AUTO]
    if accumulation is None and ACCUMULATION not in autos and (train is None or micro is None):
        accumulation = 1
    known = [value is not None for value in (train, micro, accumulation)]
    if sum(known) < 2 or (train is None and micro is None):
        raise _unresolved(source, autos)
    if train is None:
        assert micro is not None and accumulation is not None
        return Batch(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        assert accumulation is not None
        parts = f"{ACCUMULATION} {accumulation} x {world_size} ranks"
        return Batch(train, _split(source, train, accumulation * world_size, parts), accumulation)
    if accumulation is None:
        return Batch(train, micro, _split(source, train, micro * world_size, f"{MICRO} {micro} x {world_size} ranks"))
    product = micro * accumulation * world_size
    if train != product:
        sentence = (
            f"Check batch related parameters. {TRAIN} is not equal to micro_batch_per_gpu * gradient_acc_step "
            "* world_size "
            f"{train} != {micro} * {accumulation} * {world_size} (= {product}). "
            f"Set {TRAIN} to {product}, or delete {ACCUMULATION} and let it be derived."
        )
        raise _does_not_close(source, sentence)
    return Batch(train, micro, accumulation)
