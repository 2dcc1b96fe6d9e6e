"""``MoE``: a layer of experts, each a copy of a module of the client's, on one rank or spread over several."""

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.client.comm.groups import GETTERS, create_expert_groups
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.errors import UsageError
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.moe.utils import GROUP_NAME


class Experts(nn.Module):
    """This rank's experts. In an engine their names count the experts of all ranks, so that checkpoints fit any."""

    def __init__(self, expert: nn.Module, num_local_experts: int, expert_group_name: str) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(num_local_experts)])
        self._z3_leaf = True  # which experts run depends on the tokens, what is gathered does not
        self.group_name = expert_group_name
        self.mark()

    def mark(self) -> None:
        """Mark all parameters as those of experts, also of adapters that were put on them."""
        for param in self.deepspeed_experts.parameters():
            param.allreduce, param.group_name = False, self.group_name  # type: ignore[attr-defined]

    def number_from(self, first: int) -> None:
        """Name the experts by their numbers among those of all ranks, from ``first`` on."""
        modules = self.deepspeed_experts._modules
        self.deepspeed_experts._modules = {str(first + i): m for i, m in enumerate(modules.values())}

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs [pairs, H] of pairs of a row ``hidden`` [H] and a local expert ``index`` [1]."""
        experts = list(self.deepspeed_experts._modules.values())
        if len(experts) == 1:
            return _output(experts[0](hidden)) * weights
        order = torch.argsort(index[:, 0], stable=True)
        # not bincount, for whose length the host would wait once more
        counts = index.new_zeros(len(experts)).scatter_add_(0, index[:, 0], torch.ones_like(index[:, 0])).tolist()
        parts = hidden[order].split(counts)
        # Those without a token run too: their weights then have a gradient on each rank, and ranks reduce in one order.
        outputs = [_output(expert(part)) for expert, part in zip(experts, parts, strict=True)]
        return torch.cat(outputs)[torch.argsort(order)] * weights


def _output(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


class MoE(nn.Module):
    """Layer of ``num_experts`` copies of ``expert``, of which a gate chooses ``k`` for each token.

    ``ep_size`` ranks divide the experts; ``deepspeed.initialize`` makes their group. Tokens beyond the capacity of an
    expert, ceil(tokens * k / experts * ``capacity_factor``) and at least ``min_capacity``, are dropped with
    ``drop_tokens``: at random for k = 1 with ``use_rts``. ``use_residual`` adds the output of a dense ``expert``
    (Rajbhandari et al. 2022).
    ``noisy_gate_policy``: None, "Jitter" or "RSample". ``use_tutel`` has no effect. AssertionError for an ``ep_size``
    that does not divide the experts.
    """

    is_mixture_of_experts = True

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,  # noqa: FBT001, FBT002 - the order that clients know
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,  # noqa: FBT001, FBT002
        use_rts: bool = True,  # noqa: FBT001, FBT002
        use_tutel: bool = False,  # noqa: FBT001, FBT002
        enable_expert_tensor_parallelism: bool = False,  # noqa: FBT001, FBT002
        top2_2nd_expert_sampling: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            raise UsageError(f"ep_size {ep_size} does not divide the {num_experts} experts; use a divisor")
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise UsageError(f"noisy_gate_policy is None, 'Jitter' or 'RSample', not {noisy_gate_policy!r}")
        self.use_residual, self.num_experts, self.ep_size = use_residual, num_experts, ep_size
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = GROUP_NAME.format(ep_size)
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel)
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def set_group(self, group: AxisGroup, sharers: AxisGroup | None = None) -> None:
        """Set the ranks that divide the experts, and those with the same tokens; number this rank's experts."""
        self.deepspeed_moe.set_group(group, sharers)
        self.deepspeed_moe.experts.number_from(group.index * self.num_local_experts)  # type: ignore[operator]

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:  # noqa: FBT001, FBT002
        """Make the group of the experts, as ``deepspeed.initialize`` does. Collective."""
        create_expert_groups(self.ep_size, None, use_data_before_expert_parallel_)
        pg = GETTERS["get_expert_parallel_group"](self.expert_group_name)
        self.set_group(plain_mesh("", group=pg).job)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (output in the shape of ``hidden_states`` [..., H], auxiliary loss, choices of each expert [E])."""
        if not self.use_residual:
            output = self.deepspeed_moe(hidden_states, used_token)
            return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
        dense = functools.cache(lambda: self._dense_branch(hidden_states))
        output = self.deepspeed_moe(hidden_states, used_token, meanwhile=dense)
        share, beside = dense()  # computed while tokens travelled, if they did
        return output * share + beside, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts

    def _dense_branch(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the share of the experts, and the weighted output of the expert that sees every token."""
        mixed = F.softmax(self.coefficient(hidden), dim=-1)
        return mixed[..., :1], _output(self.mlp(hidden)) * mixed[..., 1:]
