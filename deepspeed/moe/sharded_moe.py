"""Gates that choose experts for tokens, with capacity (GShard, Lepikhin et al. 2020; Switch, Fedus et al. 2021)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.comm.collectives import AxisGroup, gather_objects
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.errors import UsageError
from deepspeed.moe.exchange import LAYER, through_experts

_JITTER = 1e-2  # half the width of the factors on a gate's input (Fedus et al. 2021)
Gating = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Routing(NamedTuple):
    """Experts of each token: ``chosen`` [tokens, k], -1 where a choice was dropped, with ``weights`` [tokens, k].

    ``loss``: the auxiliary loss E * sum over experts of (mean probability * share of the choices). ``counts`` [E]:
    choices of each expert before any was dropped. ``capacity``: most tokens of an expert.
    """

    chosen: torch.Tensor
    weights: torch.Tensor
    loss: torch.Tensor
    counts: torch.Tensor
    capacity: int


def _capacity(tokens: int, experts: int, factor: float, least: int) -> int:
    """Return ceil(tokens / experts * factor), at least ``least``."""
    return max(math.ceil(tokens / experts * factor), least)


def _places(mask: torch.Tensor) -> torch.Tensor:
    """Return the place of each choice in ``mask`` [tokens, E] among those of its expert."""
    return torch.cumsum(mask.long(), dim=0) - 1


def _within(capacity: int, mask: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    """Return the choices in ``mask`` [tokens, E] that experts keep: those of the highest ``scores``, or the first."""
    if capacity >= len(mask):
        return mask
    if scores is None:
        return mask & (_places(mask) < capacity)
    best = torch.where(mask, scores, -1.0).topk(capacity, dim=0)[1]
    return mask & torch.zeros_like(mask).scatter_(0, best, 1)


def _gumbel(like: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log(torch.rand_like(like).clamp_(1e-20, 1 - 1e-7)))


def _mask(index: torch.Tensor, experts: int) -> torch.Tensor:
    return F.one_hot(index, experts).bool()


def _balance(probabilities: torch.Tensor, mask: torch.Tensor, k: int = 1) -> torch.Tensor:
    shares = mask.to(probabilities.dtype).mean(0) / k
    return (probabilities.mean(0) * shares).sum() * mask.shape[1]


def _normalised(weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    kept = weights * (index >= 0)
    return kept / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def _first(
    logits: torch.Tensor, factor: float, least: int, *, drop: bool, random: bool, noisy: bool, used: Any
) -> Routing:
    """Choose one expert a token, weighted by its probability. ``random``: who is dropped is drawn, else the last."""
    tokens, experts = logits.shape
    probabilities = F.softmax(logits, dim=1)
    index = torch.argmax(logits + _gumbel(logits) if noisy else probabilities, dim=1)
    mask = _mask(index, experts)
    if used is not None:
        mask &= used.reshape(-1, 1).bool()
    capacity = _capacity(tokens, experts, factor, least) if drop else tokens
    drawn = torch.rand_like(logits, dtype=torch.float32) if random and capacity < tokens else None
    kept = _within(capacity, mask, drawn)
    index = torch.where(kept.any(1), index, -1)[:, None]
    weights = probabilities.gather(1, index.clamp(min=0)) * (index >= 0)
    return Routing(index, weights, _balance(probabilities, mask), mask.sum(0), capacity)


def _two(logits: torch.Tensor, factor: float, least: int, *, drop: bool, sample: bool) -> Routing:
    """Choose two experts a token; ``sample``: the second by its probability among the others. Later tokens, and second
    choices, are dropped; the weights of what is kept add up to 1.
    """
    tokens, experts = logits.shape
    probabilities = F.softmax(logits, dim=1)
    first = torch.argmax(probabilities, dim=1)
    mask = _mask(first, experts)
    others = (logits + _gumbel(logits) if sample else logits).masked_fill(mask, -math.inf)
    second = torch.argmax(others, dim=1)
    behind = _mask(second, experts)
    capacity = _capacity(tokens, experts, 2 * factor, least) if drop else 2 * tokens
    index = torch.stack([first, second], dim=1)
    places = [_places(mask).gather(1, first[:, None]), (_places(behind) + mask.sum(0)).gather(1, second[:, None])]
    weights = probabilities.gather(1, index)
    index = torch.where(torch.cat(places, dim=1) < capacity, index, -1)
    return Routing(index, _normalised(weights, index), _balance(probabilities, mask), (mask | behind).sum(0), capacity)


def _several(logits: torch.Tensor, k: int, factor: float, least: int, *, drop: bool, policy: str = "probs") -> Routing:
    """Choose ``k`` experts a token, and drop by ``policy``: the least probable choices, or those of later tokens."""
    tokens, experts = logits.shape
    probabilities = F.softmax(logits, dim=1)
    weights, index = torch.topk(probabilities, k, dim=1)
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, index, 1)
    capacity = _capacity(tokens, experts, k * factor, least) if drop else tokens
    if policy not in ("probs", "position"):
        raise UsageError(f"topkgating: drop_policy is 'probs' or 'position', not {policy!r}")
    kept = _within(capacity, mask, probabilities.detach() if policy == "probs" else None)
    index = torch.where(kept.gather(1, index), index, -1)
    loss = _balance(probabilities, mask, k)
    return Routing(index, _normalised(weights, index), loss, mask.sum(0), capacity)


def _dense(routing: Routing, experts: int, group: Any, *, drop: bool) -> Gating:
    """Return auxiliary loss, weights and mask [tokens, E, capacity], and counts; in the second each expert's kept
    choices have places of their own.
    """
    kept = torch.zeros(len(routing.chosen), experts + 1, dtype=torch.bool, device=routing.chosen.device)
    index = torch.where(routing.chosen >= 0, routing.chosen, experts)
    kept = kept.scatter_(1, index, 1)[:, :-1]
    capacity = routing.capacity if drop else int(kept.sum(0).max())
    if group is not None and not drop:
        capacity = max(gather_objects(capacity, plain_mesh("", group=group).job))
    spread = routing.weights.new_zeros(len(index), experts + 1).scatter(1, index, routing.weights)[:, :-1]
    places = F.one_hot(torch.where(kept, _places(kept), 0), capacity) * kept[..., None]
    combine = spread[..., None] * places.to(spread.dtype)
    return routing.loss, combine, combine.bool(), routing.counts


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,  # noqa: FBT001, FBT002 - the order that clients know
    use_rts: bool = True,  # noqa: FBT001, FBT002
    ep_group: Any = None,
    use_tutel: bool = False,  # noqa: FBT001, FBT002
) -> Gating:
    """Return (auxiliary loss, weights [tokens, E, C], mask [tokens, E, C], counts [E]) for one expert a token."""
    noisy = noisy_gate_policy == "RSample"
    routing = _first(
        logits, capacity_factor, min_capacity, drop=drop_tokens, random=use_rts, noisy=noisy, used=used_token
    )
    return _dense(routing, logits.shape[1], ep_group, drop=drop_tokens)


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,  # noqa: FBT001, FBT002
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,  # noqa: FBT001, FBT002
) -> Gating:
    """Return the same as ``top1gating`` for two experts a token."""
    routing = _two(logits, capacity_factor, min_capacity, drop=drop_tokens, sample=top2_2nd_expert_sampling)
    return _dense(routing, logits.shape[1], ep_group, drop=drop_tokens)


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,  # noqa: FBT001, FBT002
    ep_group: Any = None,
    drop_policy: str = "probs",
) -> Gating:
    """Return the same as ``top1gating`` for ``k`` experts a token; ``drop_policy``: "probs" or "position"."""
    routing = _several(logits, k, capacity_factor, min_capacity, drop=drop_tokens, policy=drop_policy)
    return _dense(routing, logits.shape[1], ep_group, drop=drop_tokens)


class TopKGate(nn.Module):
    """Gate: a linear layer in fp32 without bias, whose ``k`` largest outputs choose a token's experts."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,  # noqa: FBT001, FBT002
        use_rts: bool = True,  # noqa: FBT001, FBT002
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise UsageError(f"a gate chooses k={k} of {num_experts} experts; k is from 1 to {num_experts}")
        if min(capacity_factor, eval_capacity_factor) <= 0:
            raise UsageError(f"capacity factors {capacity_factor} and {eval_capacity_factor} must be above 0")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group, self.k, self.num_experts = ep_group, k, num_experts
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = min_capacity, noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def route(self, hidden: torch.Tensor, used_token: torch.Tensor | None = None) -> Routing:
        """Choose experts for ``hidden`` [tokens, H]; ``used_token`` [tokens]: 0 for tokens that go nowhere (k = 1)."""
        hidden = hidden.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            hidden = hidden * torch.empty_like(hidden).uniform_(1 - _JITTER, 1 + _JITTER)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        drop, least = self.drop_tokens, self.min_capacity
        if self.k == 1:
            noisy = self.noisy_gate_policy == "RSample" and self.training
            return _first(logits, factor, least, drop=drop, random=self.use_rts, noisy=noisy, used=used_token)
        if self.k == 2:
            return _two(logits, factor, least, drop=drop, sample=self.top2_2nd_expert_sampling)
        return _several(logits, self.k, factor, least, drop=drop)

    def forward(self, input: torch.Tensor, used_token: torch.Tensor | None = None) -> Gating:
        """Return what ``top1gating`` does."""
        return _dense(self.route(input, used_token), self.num_experts, self.ep_group, drop=self.drop_tokens)


class MOELayer(nn.Module):
    """Layer of experts: tokens go where ``gate`` sends them. ``l_aux`` and ``exp_counts`` are of the last forward."""

    def __init__(
        self,
        gate: TopKGate,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.ep_group_name, self.ep_size, self.num_local_experts = ep_group_name, ep_size, num_local_experts
        self.group: AxisGroup | None = None
        self.sharers: AxisGroup | None = None
        self.path = LAYER  # in the model, where it is known
        self.note: Callable[[torch.Tensor, torch.Tensor], None] | None = None  # of chosen experts, and of loads
        self.l_aux, self.exp_counts = torch.zeros(()), torch.zeros((), dtype=torch.int64)

    def set_group(self, group: AxisGroup, sharers: AxisGroup | None = None) -> None:
        """Set the ranks that hold the experts, and those with the same tokens."""
        self.group, self.gate.ep_group, self.sharers = group, group.pg, sharers

    def forward(
        self,
        hidden: torch.Tensor,
        used_token: torch.Tensor | None = None,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Return the outputs, in the shape of ``hidden`` [..., H]. Collective over the expert-parallel ranks.

        ``meanwhile`` is called while tokens travel.
        """
        if self.group is None and self.ep_size > 1:
            raise UsageError(
                f"the experts of this layer are on {self.ep_size} ranks; call deepspeed.initialize before a forward"
            )
        flat = hidden.reshape(-1, hidden.shape[-1])
        routing = self.gate.route(flat, used_token)
        self.l_aux, self.exp_counts = routing.loss, routing.counts
        if self.note is not None:
            self.note(routing.chosen, routing.counts)
        out = through_experts(
            flat,
            routing.chosen,
            routing.weights.to(hidden.dtype),
            group=self.group,
            sharers=self.sharers,
            experts=self.num_local_experts,
            compute=self.experts,
            layer=self.path,
            meanwhile=meanwhile,
        )
        return out.view(hidden.shape)
