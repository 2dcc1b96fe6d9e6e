"""How many ranks an elastic job runs on, and how many of them on each node; pure."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.config import read_config_source
from deepspeed.config.model.elastic import in_words, kept_sizes
from deepspeed.errors import UsageError


@dataclass(frozen=True)
class Elastic:
    """Limits of an elastic job. ``sizes``: the numbers of ranks it may have, ascending."""

    min_nodes: int
    max_nodes: int
    sizes: tuple[int, ...]
    max_restarts: int

    def largest(self, ranks: int, nodes: int = 1) -> int:
        """Return the largest allowed number of at most ``ranks`` ranks, at least one on each of ``nodes``; 0: none."""
        return max((size for size in self.sizes if nodes <= size <= ranks), default=0)


def share_ranks(slots: Sequence[int], size: int) -> list[int]:
    """Share ``size`` ranks over nodes with ``slots``: the nodes with most slots give up theirs first, and none all."""
    shares = list(slots)
    while sum(shares) > size:
        most = max(shares)
        shares[len(shares) - 1 - shares[::-1].index(most)] -= 1
    return shares


def named_configs(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return file -> content of the configurations named in a script's arguments (--deepspeed_config)."""
    line = [word for argument in arguments for word in argument.split("=", 1)]
    names = [line[i + 1] for i, word in enumerate(line[:-1]) if word in ("--deepspeed_config", "--deepscale_config")]
    return {name: read_config_source(name) for name in names if os.path.isfile(name)}


def plan(options: Any, *, nodes: int, ranks: int) -> Elastic | None:
    """Return the limits set by the flags, for at most ``nodes`` and ``ranks``; None without --elastic_training.

    Raises UsageError for limits without that flag, minima above maxima, or when no number of ranks keeps the batch.
    """
    given = {
        "--min_elastic_nodes": options.min_elastic_nodes,
        "--max_elastic_nodes": options.max_elastic_nodes,
        "--min_ranks": options.min_ranks,
        "--max_ranks": options.max_ranks,
    }
    if not options.elastic_training:
        for flag in (flag for flag, value in given.items() if value != -1):
            raise UsageError(f"{flag} needs --elastic_training; add that, or leave {flag} out")
        return None
    for flag, value in given.items():
        if value != -1 and value < 1:
            raise UsageError(f"{flag} {value} must be at least 1")
    if options.max_restarts < 0:
        raise UsageError(f"--max_restarts {options.max_restarts} cannot be negative")
    low, high = (options.min_elastic_nodes if options.min_elastic_nodes > 0 else 1), options.max_elastic_nodes
    high = high if high > 0 else max(nodes, low)
    if low > high:
        raise UsageError(f"--min_elastic_nodes {low} is above the {high} node(s) of this job; exchange or add some")
    first = options.min_ranks if options.min_ranks > 0 else 1
    last = options.max_ranks if options.max_ranks > 0 else ranks
    if first > last:
        raise UsageError(f"--min_ranks {first} is above the {last} rank(s) that this job can have; lower it")
    if high == 1 and first > ranks:
        raise UsageError(
            f"--min_ranks {first} is above the {ranks} rank(s) of this node, and no other may come; lower it, or name "
            "more slots (--num_gpus) or nodes (--max_elastic_nodes)"
        )
    sizes = list(range(first, last + 1))
    for name, config in named_configs(options.user_args).items():
        kept = kept_sizes(config, sizes)
        if not kept:
            raise UsageError(
                f"{name}: no number of ranks from {first} to {last} keeps its global batch "
                f"(train_batch_size {config.get('train_batch_size', 'of the elasticity block')}); allow other numbers, "
                "or change the batch or micro batch"
            )
        sizes = kept
    return Elastic(low, high, tuple(sizes), options.max_restarts)


def too_few(limits: Elastic, ranks: int, nodes: int) -> str:
    """Explain why ``ranks`` on ``nodes`` cannot go on."""
    return (
        f"{ranks} rank(s) on {nodes} node(s) are left, and this job runs on {in_words(limits.sizes)} (--min_ranks, "
        "--max_ranks and the global batch)"
    )
