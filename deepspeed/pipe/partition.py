"""Where a list of layers is cut: contiguous parts, as equal as a method can make them. Pure.

The heaviest part is as light as any cut allows, and of such cuts one with the least sum of squares is taken, so that
the other parts are even too. Boundaries are ``parts + 1`` ascending positions, of which the first is 0.
"""

import itertools
import re
from collections.abc import Sequence

import numpy as np

from deepspeed.errors import UsageError


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return boundaries of parts of equal length; of lengths that differ by one the longer ones come first."""
    share, longer = divmod(num_items, num_parts)
    return [part * share + min(part, longer) for part in range(num_parts + 1)]


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the inclusive prefix sums of ``weights``."""
    return list(itertools.accumulate(weights))


def _heaviest(weight: np.ndarray, parts: int) -> float:
    """Return the least possible weight of the heaviest of ``parts`` non-empty parts, by dynamic programming.

    ``weight[j, i]``: of items i to j, infinite where there is none.
    """
    best = weight[:, 0]
    for _ in range(parts - 1):
        # best[j] = min over i < j of max(weight of the best cut of the first i items, weight of items i to j)
        best = np.maximum(weight, best[None, :]).min(axis=1)
    return float(best[-1])


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return boundaries of non-empty parts with the lightest heaviest part. Raise UsageError for too few items."""
    items = len(weights)
    if not 1 <= num_parts <= items:
        raise UsageError(f"{items} layers cannot be cut into {num_parts} parts with at least one layer each")
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    weight = np.where(np.tri(items + 1, k=-1, dtype=bool), prefix[:, None] - prefix[None, :], np.inf)
    limit = _heaviest(weight, num_parts) * (1 + 1e-12)
    cost = np.where(weight <= limit, weight**2, np.inf)
    best, cuts = cost[:, 0], []
    for _ in range(num_parts - 1):
        total = cost + best[None, :]
        cuts.append(total.argmin(axis=1))
        best = total.min(axis=1)
    boundaries = [items]
    for before in reversed(cuts):
        boundaries.append(int(before[boundaries[-1]]))
    return [0, *reversed(boundaries)]


def boundaries_of(
    method: str | Sequence[float], parts: int, *, names: Sequence[str], numels: Sequence[int]
) -> list[int]:
    """Return boundaries by ``method``: "uniform" (equal numbers of layers), "parameters" (trained ones, ``numels``),
    "type:REGEX" (layers whose class name, in ``names``, matches in any case), or a weight for each layer, such as its
    measured time. Raise UsageError for another method and for more parts than layers.
    """
    layers = len(names)
    if layers < parts:
        raise UsageError(
            f"{layers} layers cannot be dealt out to {parts} pipeline stages or chunks; use fewer (num_stages, "
            "pipeline.chunks_per_stage) or more layers"
        )
    if not isinstance(method, str):
        if len(method) != layers or min(method) < 0:
            raise UsageError(f"partition_method has {len(method)} weights for {layers} layers; give one >= 0 for each")
        return partition_balanced(method, parts)
    kind, _, pattern = method.partition(":")
    match kind:
        case "uniform":
            return partition_uniform(layers, parts)
        case "parameters" | "best":
            # An even share of layers decides where parameters do not: between layers without any.
            return partition_balanced([n + 1e-9 * max(1, sum(numels)) / layers for n in numels], parts)
        case "type":
            hits = [bool(re.search(pattern, name, re.IGNORECASE)) for name in names]
            if sum(hits) < parts:
                raise UsageError(
                    f"partition_method {method!r} matches {sum(hits)} of the layers' classes "
                    f"({', '.join(dict.fromkeys(names))}), fewer than the {parts} parts"
                )
            return partition_balanced([hit + 1e-9 for hit in hits], parts)
    raise UsageError(
        f"partition_method {method!r} is unknown; use 'parameters', 'uniform', 'type:REGEX', 'profile', or a list with "
        "the weight of each layer"
    )
