"""The batch triangle: train_batch_size = micro batch per rank x accumulation steps x data-parallel ranks."""

from collections.abc import Mapping
from typing import Any

from deepspeed.config.model.values import is_auto

TRAIN, MICRO, ACCUMULATION = BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def _parts(train: int | None, factor: int | None, world_size: int, name: str) -> int:
    """``train / (factor * world_size)``, exact."""
    assert train is not None and factor is not None, "two of three are known"
    count = factor * world_size
    if train % count:
        below, above = train // count * count, (train // count + 1) * count
        raise ValueError(
            f"{TRAIN} {train} does not divide evenly over {name} {factor} x {world_size} ranks = {count}. Set {TRAIN} "
            f"to {f'{below} or {above}' if below else above}, or change the number of ranks."
        )
    return train // count


def resolve_batch(
    sizes: tuple[int | None, int | None, int | None], written: Mapping[str, Any], *, world_size: int, lenient: bool
) -> tuple[int, int, int]:
    """Complete (train, micro, accumulation) for ``world_size`` data-parallel ranks; None is what is absent or "auto".

    Absent accumulation means 1; "auto" in ``written`` is never guessed. ``lenient`` refuses nothing: what is missing
    becomes 1. Raises LookupError for an "auto" that nobody resolved, ValueError when the triangle does not close.
    """
    train, micro, steps = sizes
    if lenient:
        micro, steps = micro or 1, steps or 1
        return train or micro * steps * world_size, micro, steps
    autos = [key for key in BATCH_KEYS if is_auto(written.get(key))]
    if steps is None and ACCUMULATION not in autos and (train is None or micro is None):
        steps = 1
    if [train, micro, steps].count(None) > 1:
        if not autos:
            raise ValueError(f"neither {TRAIN} nor {MICRO} is given. Set at least one of them.")
        raise LookupError(
            f'{" and ".join(autos)} is still "auto" and cannot be derived from the other batch keys. Only an '
            f"integration (Transformers, Accelerate) fills that in; write numbers for two of {', '.join(BATCH_KEYS)}."
        )
    if micro is None:
        micro = _parts(train, steps, world_size, ACCUMULATION)
    elif steps is None:
        steps = _parts(train, micro, world_size, MICRO)
    assert micro is not None and steps is not None, "two of three are known"
    product = micro * steps * world_size
    if train not in (None, product):
        raise ValueError(
            f"Check batch related parameters. {TRAIN} is not equal to micro_batch_per_gpu * gradient_acc_step * "
            f"world_size {train} != {micro} * {steps} * {world_size} (= {product}). "
            f"Set {TRAIN} to {product}, or delete {ACCUMULATION} and let it be derived."
        )
    return product, micro, steps
