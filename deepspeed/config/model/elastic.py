"""The block ``elasticity``: one global batch for many numbers of ranks, and what a rank takes of it."""

from collections import Counter
from collections.abc import Collection, Sequence
from math import prod
from typing import Any

from deepspeed.config.model.values import Block, Flag, Int, Num, Support, key
from deepspeed.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

_BLOCK = "elasticity"
_NEWEST = 0.2
_REQUIRED = ("max_train_batch_size", "micro_batch_sizes")


class ElasticityConfig(Block):
    """``elasticity``: the global batch follows from the allowed sizes, and stays when the number of ranks changes."""

    enabled: Flag = key(False, "Choose one global batch that fits as many numbers of ranks as possible.")
    max_train_batch_size: Int = key(2000, "Largest global batch.", ge=1)
    micro_batch_sizes: tuple[Int, ...] = key((2, 4, 6), "Micro batches to choose from.")
    min_gpus: Int = key(1, "Fewest ranks of the job.", ge=1)
    max_gpus: Int = key(10000, "Most ranks of the job.", ge=1)
    min_time: Int = key(0, "Minutes before the size changes.", Support.INERT, "it changes at checkpoints", ge=0)
    prefer_larger_batch: Flag = key(True, "Of batches that fit equally many numbers of ranks take the largest.")
    ignore_non_elastic_batch_info: Flag = key(False, "Pass over batch keys instead of refusing them.")
    version: Num = key(_NEWEST, "0.1, or 0.2, which knows the next two keys.", gt=0)
    model_parallel_size: Int = key(1, "Ranks that share one batch (0.2).", ge=1)
    num_gpus_per_node: Int = key(1, "Ranks of a node; the job has whole nodes (0.2).", ge=1)

    @property
    def fault(self) -> str:
        """Return the first fault between the keys as a sentence; empty when there is none."""
        micro, missing = self.micro_batch_sizes, [name for name in _REQUIRED if name not in self.model_fields_set]
        mp_size, node = self.model_parallel_size, self.num_gpus_per_node
        if missing:
            return f"{_BLOCK}.{missing[0]} is required when {_BLOCK}.enabled is true. Write it."
        if not micro or min(micro) < 1:
            return f"{_BLOCK}.micro_batch_sizes must list positive numbers, not {list(micro)}."
        if self.min_gpus > self.max_gpus:
            return f"{_BLOCK}.min_gpus {self.min_gpus} is above max_gpus {self.max_gpus}. Exchange them."
        if self.version > _NEWEST:
            return f"{_BLOCK}.version {self.version:g} does not exist. Use 0.1 or {_NEWEST}."
        if self.version < _NEWEST and mp_size > 1:
            return f"{_BLOCK}.model_parallel_size {mp_size} needs version {_NEWEST}."
        if mp_size > 1 and node % mp_size and mp_size % node:
            return f"{_BLOCK}.model_parallel_size {mp_size} and num_gpus_per_node {node} do not divide each other."
        if min(micro) > self.max_train_batch_size:
            return f"no micro batch of {_BLOCK}.micro_batch_sizes is within max_train_batch_size."
        return ""


def allowed_sizes(batch: int, micros: Collection[int], sizes: Sequence[int], *, mp_size: int = 1) -> list[int]:
    """Return the ``sizes`` (ranks, ``mp_size`` of which share one batch) at which some micro batch gives ``batch``."""
    return [size for size in sizes if size % mp_size == 0 and any(batch % (m * (size // mp_size)) == 0 for m in micros)]


def best_batch(micros: Collection[int], largest: int, shares: Collection[int], *, prefer_larger: bool) -> int:
    """Return the batch of at most ``largest`` samples that most of ``shares`` (data-parallel ranks) can cut, or 0.

    Every batch is tried, so no other fits more sizes; of equals the largest or the smallest is taken.
    """
    fits: Counter[int] = Counter()
    for share in shares:
        fits.update({batch for m in set(micros) for batch in range(m * share, largest + 1, m * share)})
    return max(fits, key=lambda batch: (fits[batch], batch if prefer_larger else -batch), default=0)


def elastic_batch(block: ElasticityConfig) -> tuple[int, list[int]]:
    """Return the global batch in samples and the numbers of ranks that can keep it. Raise ElasticityConfigError."""
    if block.fault:
        raise ElasticityConfigError(block.fault)
    new = block.version >= _NEWEST
    mp_size, node = (block.model_parallel_size, block.num_gpus_per_node) if new else (1, 1)
    most = min(block.max_gpus, block.max_train_batch_size // min(block.micro_batch_sizes) * mp_size)
    sizes = [size for size in range(block.min_gpus, most + 1) if size % mp_size == 0 and size % node == 0]
    shares = [size // mp_size for size in sizes]
    micros, limit = block.micro_batch_sizes, block.max_train_batch_size
    batch = best_batch(micros, limit, shares, prefer_larger=block.prefer_larger_batch)
    if not batch:
        raise ElasticityConfigError(
            f"no global batch of at most {_BLOCK}.max_train_batch_size {limit} can be kept by any number of ranks from "
            f"{block.min_gpus} to {block.max_gpus} with micro batches {list(micros)}. Raise the limit, or allow fewer "
            "ranks or smaller micro batches."
        )
    return batch, allowed_sizes(batch, micros, sizes, mp_size=mp_size)


def share_of(block: ElasticityConfig, world_size: int, *, mp_size: int | None = None) -> tuple[int, int, list[int]]:
    """Return (global batch, micro batch, allowed sizes) at ``world_size`` ranks: the largest micro batch that fits.

    Raises ElasticityIncompatibleWorldSize for a number of ranks that cannot keep the batch, ElasticityConfigError.
    """
    batch, sizes = elastic_batch(block)
    if world_size not in sizes:
        raise ElasticityIncompatibleWorldSize(
            f"{_BLOCK}: {world_size} rank(s) cannot keep the global batch of {batch} samples with micro batches "
            f"{list(block.micro_batch_sizes)}; {in_words(sizes)} can."
        )
    share = world_size // (mp_size or (block.model_parallel_size if block.version >= _NEWEST else 1))
    return batch, max(m for m in block.micro_batch_sizes if batch % (m * share) == 0), sizes


def in_words(sizes: Sequence[int]) -> str:
    """Format a list of numbers of ranks for people, the first ten of them."""
    return ", ".join(map(str, sizes[:10])) + (", ..." if len(sizes) > 10 else "")


def kept_sizes(config: dict[str, Any], sizes: Sequence[int]) -> list[int]:
    """Return the ``sizes`` (ranks) at which the batch keys or the elasticity block of ``config`` give the same batch.

    Without a batch (none, or "auto") keep the multiples of the ranks that share one. Raise ElasticityConfigError for a
    faulty block.
    """
    block, parallel = config.get(_BLOCK), config.get("tensor_parallel")
    degrees = (config.get("sequence_parallel_size"), parallel.get("autotp_size") if isinstance(parallel, dict) else 1)
    mp_size = prod(size for size in degrees if isinstance(size, int) and size > 0)
    if isinstance(block, dict) and block.get("enabled") is True:
        allowed = elastic_batch(_read(block))[1]
        return [size for size in sizes if size in allowed]
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    steps = config.get("gradient_accumulation_steps")
    if not isinstance(batch, int):
        return [size for size in sizes if size % mp_size == 0]
    factors = [n for n in (micro, steps) if isinstance(n, int)]
    if len(factors) == 2:  # micro batch and accumulation are both given: they fix the number of ranks
        return [size for size in sizes if size == batch // (factors[0] * factors[1]) * mp_size]
    return allowed_sizes(batch, factors or [1], sizes, mp_size=mp_size)


def elasticity_enabled(ds_config: dict[str, Any]) -> bool:
    """Return whether the configuration's elasticity block is on."""
    block = ds_config.get(_BLOCK)
    return isinstance(block, dict) and block.get("enabled") is True


def compute_elastic_config(
    ds_config: dict[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,  # noqa: FBT001, FBT002 - the name and place are the interface's
) -> tuple[Any, ...]:
    """Return (global batch, numbers of ranks that keep it), with ``world_size`` or ``return_microbatch`` also the micro
    batch of a rank (None without ``world_size``). ``target_deepspeed_version`` is not read: there is one algorithm.

    Raise ElasticityError where the block is absent or off, ElasticityConfigError where it is wrong,
    ElasticityIncompatibleWorldSize where ``world_size`` cannot keep the batch.
    """
    if not elasticity_enabled(ds_config):
        raise ElasticityError(f"the configuration has no block {_BLOCK} with enabled: true. Write one.")
    block = _read(ds_config[_BLOCK])
    if world_size <= 0:
        batch, sizes = elastic_batch(block)
        return (batch, sizes, None) if return_microbatch else (batch, sizes)
    batch, micro, sizes = share_of(block, world_size)
    return batch, sizes, micro


def _read(block: dict[str, Any]) -> ElasticityConfig:
    try:
        return ElasticityConfig.model_validate(block)
    except ValueError as error:
        raise ElasticityConfigError(f"{_BLOCK} cannot be read ({error}); see ds_config check") from error
