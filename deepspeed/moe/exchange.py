"""Tokens go to the ranks that hold their experts, and the outputs come back (Lepikhin et al. 2020; Fedus et al. 2021).

The counts travel first, which the host has to know. Then each token travels once to each rank that holds any of its
experts, with the weights of those, and one weighted sum comes back from each: a token of eight experts on two ranks
travels twice, not eight times.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from deepspeed.comm.collectives import AxisGroup, all_to_all
from deepspeed.tensor.differentiable import anchored, cut_parts, exchange_rows, join_parts
from deepspeed.zero.regions import bounds

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Local experts: (hidden [pairs, H], local expert [pairs, 1], weight [pairs, 1]) -> weighted outputs [pairs, H]."""


class Routes(NamedTuple):
    """Plan of one exchange. ``tokens``: the token of each row sent, by receiving rank; ``local``: experts of that rank
    by row and choice, -1 for a choice on another rank. ``sent`` and ``received`` count rows by rank; ``pairs`` are the
    (row, expert) pairs that this rank will compute.
    """

    tokens: torch.Tensor
    local: torch.Tensor
    sent: list[int]
    received: list[int]
    pairs: int


def plan_routes(index: torch.Tensor, group: AxisGroup, experts: int, *, etp: int = 1) -> Routes:
    """Return the routes of tokens with the chosen experts ``index`` [tokens, k], of which each rank holds ``experts``.

    ``etp`` neighbouring ranks hold parts of the same experts: a token goes to all of them. A choice outside the experts
    of all ranks is dropped. Collective; the host waits once for the counts.
    """
    homes = group.size // etp
    home = torch.where((index >= 0) & (index < experts * homes), index // experts, homes)
    goes = torch.zeros(len(index), homes + 1, dtype=torch.bool, device=index.device).scatter_(1, home, 1)
    goes = goes[:, :-1].T.repeat_interleave(etp, dim=0)
    each = torch.zeros(homes + 1, dtype=torch.int64, device=index.device)
    pairs = each.scatter_add_(0, home.reshape(-1), torch.ones_like(home).reshape(-1))[:-1].repeat_interleave(etp)
    counts = torch.stack([goes.sum(1), pairs], dim=1)
    ones = [1] * group.size
    arriving = all_to_all(counts, group, sent=ones, received=ones)
    sent, received = torch.stack([counts, arriving]).tolist()
    rows = [count for count, _ in sent]
    rank, tokens = torch.nonzero_static(goes, size=sum(rows)).unbind(1)
    owner = rank[:, None] // etp
    local = torch.where(home[tokens] == owner, index[tokens] - owner * experts, -1)
    return Routes(tokens, local, rows, [count for count, _ in received], sum(count for _, count in received))


def through_experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    group: AxisGroup | None,
    experts: int,
    compute: Compute,
    etp: int = 1,
    sharers: AxisGroup | None = None,
) -> torch.Tensor:
    """Return the sum of the chosen experts' weighted outputs for each token of ``hidden`` [tokens, H].

    ``index``, ``weights``: [tokens, k] experts and their weights. Each rank of ``group`` holds ``experts`` of them, in
    rank order, which ``compute`` applies. Sums are taken in fp32. Collective, in the backward too. Without a ``group``
    all experts are here. ``etp`` neighbouring ranks hold parts of the same experts, whose outputs add up. The ranks of
    ``sharers`` have the same tokens (tensor parallelism), and each sends a part of them.
    """
    if sharers is not None and sharers.size > 1:
        edges = bounds(len(hidden), sharers.size)
        part = slice(edges[sharers.index], edges[sharers.index + 1])
        hidden, weights = (cut_parts(whole, sharers, 0, edges=edges) for whole in (hidden, weights))
        out = through_experts(hidden, index[part], weights, group=group, experts=experts, compute=compute, etp=etp)
        return join_parts(out, sharers, 0, edges=edges)
    if group is None:
        row, choice = torch.nonzero(index >= 0).unbind(1)
        outputs = compute(hidden[row], index[row, choice, None], weights[row, choice, None])
        return _sum_rows(outputs, row, len(hidden)).to(hidden.dtype)
    routes = plan_routes(index, group, experts, etp=etp)
    sizes = {"sent": routes.sent, "received": routes.received}
    # Every rank takes part in the collectives of the backward, whatever of this needs a gradient on it.
    start = torch.zeros((), device=hidden.device, requires_grad=torch.is_grad_enabled())
    rows = exchange_rows(anchored(hidden[routes.tokens], start), group, **sizes)
    scales = exchange_rows(anchored(weights[routes.tokens], start), group, **sizes)
    local = all_to_all(routes.local, group, **sizes)
    row, choice = torch.nonzero_static(local >= 0, size=routes.pairs).unbind(1)
    outputs = compute(rows[row], local[row, choice, None], scales[row, choice, None])
    if not routes.pairs:  # the weights have a gradient all the same: ranks reduce in one order
        nothing = rows.new_zeros(1, rows.shape[1]), local.new_zeros(1, 1), scales.new_zeros(1, 1)
        outputs = outputs + compute(*nothing).sum()
    summed = _sum_rows(outputs, row, len(rows)).to(hidden.dtype)
    back = {"sent": routes.received, "received": routes.sent}
    returned = exchange_rows(anchored(summed, rows, scales), group, **back)
    return _sum_rows(returned, routes.tokens, len(hidden)).to(hidden.dtype)


def _sum_rows(values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.new_zeros(count, values.shape[-1], dtype=wide).index_add_(0, places, values.to(wide))
