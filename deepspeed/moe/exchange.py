"""Tokens go to the ranks that hold their experts, and the outputs come back (Lepikhin et al. 2020; Fedus et al. 2021).

The counts travel first, which the host has to know. Then each token travels once to each rank that holds any of its
experts, with the weights of those, and one weighted sum comes back from each: a token of eight experts on two ranks
travels twice, not eight times.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.row_exchange import all_to_all, start_all_to_all
from deepspeed.errors import UsageError
from deepspeed.monitor.log import rank as own_rank
from deepspeed.tensor.differentiable import anchored, cut_parts, exchange_rows, join_parts, start_rows
from deepspeed.tensor.layers import SharedInput
from deepspeed.zero.regions import bounds

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Local experts: (hidden [pairs, H], local expert [pairs, 1], weight [pairs, 1]) -> weighted outputs [pairs, H]."""


LAYER = "a layer of experts"  # one of which no path is known


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


def plan_routes(
    index: torch.Tensor,
    group: AxisGroup,
    experts: int,
    *,
    etp: int = 1,
    fault: torch.Tensor | None = None,
    layer: str = LAYER,
) -> Routes:
    """Return the routes of tokens with the chosen experts ``index`` [tokens, k], of which each rank holds ``experts``.

    ``etp`` neighbouring ranks hold parts of the same experts: a token goes to all of them. A choice outside the experts
    of all ranks is dropped. Collective; the host waits once for the counts. ``fault``, a flag on the device, travels
    with them, and which forward this is: all ranks raise UsageError, which names ``layer``, where any rank's scores are
    not finite, or where ranks are in other layers or some train and some do not.
    """
    homes = group.size // etp
    home = torch.where((index >= 0) & (index < experts * homes), index // experts, homes)
    goes = torch.zeros(len(index), homes + 1, dtype=torch.bool, device=index.device).scatter_(1, home, 1)
    goes = goes[:, :-1].T.repeat_interleave(etp, dim=0)
    each = torch.zeros(homes + 1, dtype=torch.int64, device=index.device)
    pairs = each.scatter_add_(0, home.reshape(-1), torch.ones_like(home).reshape(-1))[:-1].repeat_interleave(etp)
    forward = 2 * zlib.crc32(layer.encode()) + torch.is_grad_enabled()
    flags = torch.full_like(pairs, 2 * forward) if fault is None else (fault + 2 * forward).expand_as(pairs)
    counts = torch.stack([goes.sum(1), pairs, flags], dim=1)
    ones = [1] * group.size
    arriving = all_to_all(counts, group, sent=ones, received=ones)
    sent, received = torch.stack([counts, arriving]).tolist()
    _check_flags({rank: flag for rank, (_, _, flag) in zip(group.ranks, received, strict=True)}, layer)
    rows = [count for count, _, _ in sent]
    rank, tokens = torch.nonzero_static(goes, size=sum(rows)).unbind(1)
    owner = rank[:, None] // etp
    local = torch.where(home[tokens] == owner, index[tokens] - owner * experts, -1)
    arrivals = [count for count, _, _ in received]
    return Routes(tokens, local, rows, arrivals, sum(pairs for _, pairs, _ in received))


def _check_flags(flags: dict[int, int], layer: str) -> None:
    """Raise UsageError if the ``flags`` of ranks tell of different forwards, or of scores that are not finite.

    A rank that evaluates once more than others would else compute with the tokens of their next training step.
    """
    training = [rank for rank, flag in flags.items() if flag & 2]
    others = [rank for rank in flags if rank not in training]
    if training and others:
        raise UsageError(
            f"ranks meet in {layer} from different forwards: with gradients on rank {_listed(training)}, without them "
            f"(evaluation, generation) on rank {_listed(others)}. Experts of all ranks take part in each forward: give "
            "every rank as many batches, and generate() synced_gpus=True"
        )
    if len({flag >> 2 for flag in flags.values()}) > 1:
        raise UsageError(
            f"this rank is in {layer}, others of ranks {_listed(flags)} are in another layer of experts: all of them "
            "have to run the same layers in the same order"
        )
    if faulty := [rank for rank, flag in flags.items() if flag & 1]:
        raise _not_finite(layer, faulty)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _not_finite(layer: str, ranks: Iterable[int]) -> UsageError:
    return UsageError(
        f"the router of {layer} answered scores that are not finite (inf or nan), for tokens of rank {_listed(ranks)}: "
        "no expert can be chosen by them. Check this batch and the loss of the last steps; lower the learning rate, or "
        "keep the router in fp32"
    )


@torch._disable_dynamo  # a compiler cannot see through collectives whose sizes are known at run time
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
    layer: str = LAYER,
    meanwhile: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Return the sum of the chosen experts' weighted outputs for each token of ``hidden`` [tokens, H].

    ``index``, ``weights``: [tokens, k] experts and their weights. Each rank of ``group`` holds ``experts`` of them, in
    rank order, which ``compute`` applies. Sums are taken in fp32. Collective, in the backward too. Without a ``group``
    all experts are here. ``etp`` neighbouring ranks hold parts of the same experts, whose outputs add up. The ranks of
    ``sharers`` have the same tokens (tensor parallelism), and each sends a part of them. ``meanwhile`` is called while
    tokens travel. UsageError, on all ranks, for weights that are not finite; ``layer`` is its name there.
    """
    fault = ~torch.isfinite(weights.detach()).all()
    if group is None:
        kept = index >= 0
        pairs, bad = torch.stack([kept.sum(), fault]).tolist()
        if bad:
            raise _not_finite(layer, [own_rank()])
        row, choice = torch.nonzero_static(kept, size=pairs).unbind(1)
        outputs = compute(hidden[row], index[row, choice, None], weights[row, choice, None])
        return _sum_rows(outputs, row, len(hidden)).to(hidden.dtype)
    shared = sharers if sharers is not None and sharers.size > 1 else None
    if shared is not None:
        edges = bounds(len(hidden), shared.size)
        part = slice(edges[shared.index], edges[shared.index + 1])
        index = index[part]
        hidden, weights = (cut_parts(whole, shared, 0, edges=edges) for whole in (hidden, weights))
    routes = plan_routes(index, group, experts, etp=etp, fault=fault, layer=layer)
    numbers = SharedInput(group if shared is None else shared, random=shared is not None)
    out = _exchanged(hidden, weights, routes, group, compute, numbers, meanwhile)
    return out if shared is None else join_parts(out, shared, 0, edges=edges)


def _exchanged(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    routes: Routes,
    group: AxisGroup,
    compute: Compute,
    numbers: SharedInput,
    meanwhile: Callable[[], object] | None,
) -> torch.Tensor:
    sizes = {"sent": routes.sent, "received": routes.received}
    # Every rank takes part in the collectives of the backward, whatever of this needs a gradient on it.
    start = torch.zeros((), device=hidden.device, requires_grad=torch.is_grad_enabled())
    come_rows = start_rows(anchored(hidden[routes.tokens], start), group, **sizes)
    come_scales = start_rows(anchored(weights[routes.tokens], start), group, **sizes)
    local, transfer = start_all_to_all(routes.local, group, **sizes)
    if meanwhile is not None:
        meanwhile()
    rows, scales = come_rows(), come_scales()
    transfer.wait()
    row, choice = torch.nonzero_static(local >= 0, size=routes.pairs).unbind(1)
    numbers.begin_parts()  # ranks with the same tokens compute different ones here, and draw the same elsewhere
    try:
        outputs = compute(rows[row], local[row, choice, None], scales[row, choice, None])
        if not routes.pairs:  # the weights have a gradient all the same: ranks reduce in one order
            nothing = rows.new_zeros(1, rows.shape[1]), local.new_zeros(1, 1), scales.new_zeros(1, 1)
            outputs = outputs + compute(*nothing).sum()
    finally:
        numbers.end_parts()
    summed = _sum_rows(outputs, row, len(rows)).to(hidden.dtype)
    back = {"sent": routes.received, "received": routes.sent}
    returned = exchange_rows(anchored(summed, rows, scales), group, **back)
    return _sum_rows(returned, routes.tokens, len(hidden)).to(hidden.dtype)


def _sum_rows(values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.new_zeros(count, values.shape[-1], dtype=wide).index_add_(0, places, values.to(wide))
