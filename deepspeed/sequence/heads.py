"""Some tokens of all heads become all tokens of some heads, and back (DeepSpeed-Ulysses, Jacobs et al. 2023).

Ranks divide the heads of queries in order, as evenly as these allow, and each gets the heads of keys and values that
its queries read: several ranks get the same ones where there are fewer of them than ranks (Ainslie et al. 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import SequenceError
from deepspeed.tensor.differentiable import exchange_rows
from deepspeed.zero.regions import bounds


@dataclass(frozen=True)
class HeadPlan:
    """Heads of each rank. ``index``: for each of a rank's heads of queries its place among the rank's ``keys``."""

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    index: tuple[tuple[int, ...], ...]

    def groups(self, rank: int) -> int:
        """Return how many heads of queries follow each other on each of keys; 0 where their numbers differ."""
        queries, keys = len(self.queries[rank]), len(self.keys[rank])
        each = queries // keys
        return each if self.index[rank] == tuple(head // each for head in range(each * keys)) else 0


def plan_heads(queries: int, keys: int, ranks: int) -> HeadPlan:
    """Divide ``queries`` heads that read ``keys`` heads of keys and values over ``ranks``.

    Raises SequenceError where there are fewer of them than ranks.
    """
    if queries < ranks or queries % keys:
        raise SequenceError(
            f"{queries} heads of queries on {keys} of keys and values cannot be divided over {ranks} ranks of one "
            f"sequence: each rank needs a head. Set sequence_parallel_size to {queries} or less"
        )
    group = queries // keys
    parts = tuple(range(*edges) for edges in pairwise(bounds(queries, ranks)))
    read = tuple(range(part[0] // group, part[-1] // group + 1) for part in parts)
    index = tuple(tuple(head // group - heads.start for head in part) for part, heads in zip(parts, read, strict=True))
    return HeadPlan(parts, read, index)


def to_heads(
    values: Sequence[torch.Tensor], owners: Sequence[Sequence[range]], group: AxisGroup, lengths: Sequence[int]
) -> list[torch.Tensor]:
    """Send each rank its heads of this rank's tokens; return this rank's heads of all tokens.

    ``values``: [batch, heads, this rank's tokens, width] each; ``owners``: for each the heads of each rank.
    ``lengths``: tokens of each rank. One exchange for all of them. Collective, in the backward too.
    """
    pieces = [
        value[:, heads[rank].start : heads[rank].stop].reshape(-1)
        for rank in range(group.size)
        for value, heads in zip(values, owners, strict=True)
    ]
    per_token = [
        value.shape[0] * len(heads[group.index]) * value.shape[3] for value, heads in zip(values, owners, strict=True)
    ]
    sent = [sum(piece.numel() for piece in pieces[rank * len(values) :][: len(values)]) for rank in range(group.size)]
    received = [length * sum(per_token) for length in lengths]
    flat = exchange_rows(torch.cat(pieces), group, sent=sent, received=received)
    parts = flat.split([length * width for length in lengths for width in per_token])
    results = []
    for place, (value, heads) in enumerate(zip(values, owners, strict=True)):
        shapes = [(value.shape[0], len(heads[group.index]), length, value.shape[3]) for length in lengths]
        blocks = [part.view(shape) for part, shape in zip(parts[place :: len(values)], shapes, strict=True)]
        results.append(torch.cat(blocks, dim=2).to(value.dtype))
    return results


def to_tokens(value: torch.Tensor, owners: Sequence[range], group: AxisGroup, lengths: Sequence[int]) -> torch.Tensor:
    """Undo ``to_heads``: [batch, all tokens, this rank's heads, width] -> [batch, this rank's tokens, heads, width]."""
    batch, _, heads, width = value.shape
    pieces = [part.reshape(-1) for part in value.split(list(lengths), dim=1)]
    mine = lengths[group.index]
    received = [batch * mine * len(part) * width for part in owners]
    flat = exchange_rows(torch.cat(pieces), group, sent=[piece.numel() for piece in pieces], received=received)
    parts = zip(flat.split(received), owners, strict=True)
    return torch.cat([part.view(batch, mine, len(part_heads), width) for part, part_heads in parts], dim=2)
