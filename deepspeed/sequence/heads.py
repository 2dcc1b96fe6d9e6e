"""Some tokens of all heads become all tokens of some heads, and back (DeepSpeed-Ulysses, Jacobs et al. 2023).

Ranks divide the heads of queries in order, as evenly as these allow, and each gets the heads of keys and values that
its queries read: several ranks get the same ones where there are fewer of them than ranks (Ainslie et al. 2023).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.row_exchange import all_to_all
from deepspeed.errors import SequenceError
from deepspeed.tensor.differentiable import paired
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
    if group.size == 1:
        return list(values)
    how = _Exchange(owners, group, lengths)
    return list(paired(how.to_heads, how.to_tokens, *values))


def share_heads(
    qkv: Sequence[torch.Tensor], group: AxisGroup, lengths: Sequence[int]
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], HeadPlan]:
    """Return ``to_heads`` of q, k, v and its plan; as many heads of keys as of queries if nothing else fits."""
    plan = plan_heads(qkv[0].shape[1], qkv[1].shape[1], group.size)
    q, k, v = to_heads(qkv, (plan.queries, plan.keys, plan.keys), group, lengths)
    if not plan.groups(group.index):
        index = torch.tensor(plan.index[group.index], device=k.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    return (q, k, v), plan


def to_tokens(value: torch.Tensor, owners: Sequence[range], group: AxisGroup, lengths: Sequence[int]) -> torch.Tensor:
    """Undo ``to_heads``: [batch, all tokens, this rank's heads, width] -> [batch, this rank's tokens, heads, width]."""
    if group.size == 1:
        return value
    how = _Exchange([owners], group, lengths)
    result: torch.Tensor = paired(how.to_tokens, how.to_heads, value.transpose(1, 2))[0]
    return result.transpose(1, 2)


class _Exchange(NamedTuple):
    """Rows of tokens travel, each with its parts of all values: whole sequences then lie in memory as they came."""

    owners: Sequence[Sequence[range]]
    group: AxisGroup
    lengths: Sequence[int]

    def _shapes(self, rank: int, values: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
        """Return of each value what a token has of the heads of ``rank``: [batch, heads, width]."""
        return [(v.shape[0], len(of[rank]), v.shape[3]) for v, of in zip(values, self.owners, strict=True)]

    def _rows(self, flat: torch.Tensor, rank: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the heads of ``rank`` of each value, of the tokens in ``flat``: [batch, heads, tokens, width]."""
        shapes = self._shapes(rank, values)
        sizes = [math.prod(shape) for shape in shapes]
        parts = flat.view(-1, sum(sizes)).split(sizes, dim=1)
        return [part.unflatten(1, shape).permute(1, 2, 0, 3) for part, shape in zip(parts, shapes, strict=True)]

    def _sizes(self, values: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """Return how many numbers go from tokens to heads: to each rank, and from each."""
        mine, ranks = self.group.index, range(self.group.size)
        each = [sum(map(math.prod, self._shapes(rank, values))) for rank in ranks]
        return [self.lengths[mine] * width for width in each], [length * each[mine] for length in self.lengths]

    def to_heads(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return [batch, this rank's heads, all tokens, width] from [batch, heads, this rank's tokens, width] each."""
        sent, received = self._sizes(values)
        flat = values[0].new_empty(sum(sent), dtype=_wide(values))
        for rank, part in enumerate(flat.split(sent)):
            for place, value, heads in zip(self._rows(part, rank, values), values, self.owners, strict=True):
                place.copy_(value[:, heads[rank].start : heads[rank].stop])
        got = all_to_all(flat, self.group, sent=sent, received=received)
        whole = self._rows(got, self.group.index, values)
        # Tensors of their own, not views of one: a client may write into them.
        return tuple(part.data.to(value.dtype) for part, value in zip(whole, values, strict=True))

    def to_tokens(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Undo ``to_heads``; what several ranks have of one head is summed."""
        received, sent = self._sizes(values)
        flat = values[0].new_empty(sum(sent), dtype=_wide(values))
        for place, value in zip(self._rows(flat, self.group.index, values), values, strict=True):
            place.copy_(value)
        got = all_to_all(flat, self.group, sent=sent, received=received)
        blocks = [self._rows(part, rank, values) for rank, part in enumerate(got.split(received))]
        return tuple(
            _joined(of, [block[number].to(value.dtype) for block in blocks])
            for number, (of, value) in enumerate(zip(self.owners, values, strict=True))
        )


def _joined(owners: Sequence[range], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all heads [batch, heads, tokens, width], each token's together, from the heads of each rank."""
    if sum(map(len, owners)) == owners[-1].stop:
        return torch.cat([part.transpose(1, 2) for part in parts], dim=2).transpose(1, 2)
    batch, _, tokens, width = parts[0].shape
    whole = parts[0].new_zeros(batch, tokens, owners[-1].stop, width).transpose(1, 2)
    for heads, part in zip(owners, parts, strict=True):
        whole[:, heads.start : heads.stop] += part
    return whole


def _wide(values: Sequence[torch.Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (value.dtype for value in values))
