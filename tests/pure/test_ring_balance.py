"""What each rank of a ring computes, counted: pairs of a query and a key in the blocks that it would compute."""

from itertools import accumulate, chain, pairwise

import pytest
import torch

from deepspeed.comm.collectives import AxisGroup
from deepspeed.sequence.layout import Layout, RingGroups, runs_of
from deepspeed.sequence.ring import RingMask, blocks_of
from deepspeed.zero.regions import bounds, widths


def group(ranks: int) -> AxisGroup:
    return AxisGroup(None, ranks, 0, tuple(range(ranks)), "gloo")


def pairs_of(runs: list[list[range]]) -> list[int]:
    """How many pairs each rank computes, that of a diagonal half."""
    return [
        sum(
            len(block.queries) * (len(block.keys) + block.is_diagonal) // (1 + block.is_diagonal)
            for keys in runs
            for block, *_ in blocks_of(RingMask(), queries, keys)
        )
        for queries in runs
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("tokens", [4096, 4099, 61])
def test_each_rank_of_a_ring_computes_as_much_under_a_causal_mask(ranks: int, tokens: int) -> None:
    lengths = widths(bounds(tokens, ranks))
    pairs, in_order = (pairs_of(runs_of(lengths, from_ends=ends)) for ends in (True, False))
    assert sum(pairs) == sum(in_order) == tokens * (tokens + 1) // 2
    assert max(pairs) <= (1 + ranks / tokens * 2) * sum(pairs) / ranks
    assert max(in_order) > (1.4 if ranks == 2 else 1.6) * sum(in_order) / ranks


@pytest.mark.parametrize(("inner", "outer"), [(1, 4), (2, 2), (3, 2), (4, 1), (2, 3)])
@pytest.mark.parametrize("tokens", [12, 13, 50])
def test_the_runs_of_all_ranks_are_each_token_once(inner: int, outer: int, tokens: int) -> None:
    ranks = inner * outer
    ring = RingGroups(group(inner), group(outer)) if outer > 1 else None
    lengths = tuple(widths(bounds(tokens, ranks)))
    layout = Layout(group(ranks), 1, lengths, ((0, tokens),), torch.device("cpu"), ring, from_ends=True)
    owned = [[*chain(*layout.tokens_of(rank))] for rank in range(ranks)]
    assert [len(own) for own in owned] == list(lengths)
    members = [[*chain(*owned[first : first + inner])] for first in range(0, ranks, inner)]
    assert members == [[*chain(*runs)] for runs in layout.runs]
    assert sorted(chain(*members)) == [*range(tokens)]
    edges = [0, *accumulate(len(runs[0]) for runs in layout.runs)]
    assert [runs[0] for runs in layout.runs] == [range(*pair) for pair in pairwise(edges)]
    assert all(after[1].stop == before[1].start for before, after in pairwise(layout.runs))
    assert outer > 1 or members == [[*range(tokens)]]
