"""Small decoders with experts: stacked ones as Transformers has them, and those of ``deepspeed.moe.layer.MoE``."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.moe.layer import MoE
from tests.harness.decoders import WORDS, Llama

HIDDEN, INNER, VOCABULARY, LENGTH = 16, 24, 32, 6


class StackedExperts(nn.Module):
    """Experts first in each tensor, called with (hidden, index, weights), as ``transformers`` calls its own."""

    def __init__(self, experts: int, inner: int = INNER, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) / 4)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) / 5)
        self.scale: nn.Parameter | None = None  # a number for each expert

    def scaled(self) -> "StackedExperts":
        """Give each expert a factor of its own."""
        self.scale = nn.Parameter(torch.rand(self.num_experts) + 0.5)
        return self

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            token, choice = torch.where(index == expert)
            gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            value = F.linear(F.silu(gate) * up, self.down_proj[expert])
            value = value if self.scale is None else value * self.scale[expert]
            out.index_add_(0, token, value * weights[token, choice, None])
        return out


class TwoStacks(nn.Module):
    """Layer with two kinds of experts, of which a configuration names one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, 4)
        self.experts, self.others = StackedExperts(4, 6, hidden), StackedExperts(4, 6, hidden)
        self.register_buffer("expert_bias", torch.zeros(4))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.gate(hidden).softmax(-1)
        index = torch.topk(scores + self.expert_bias, 2)[1]
        weights = scores.gather(1, index)
        return hidden + self.experts(hidden, index, weights) + self.others(hidden, index, weights)


class StackedBlock(nn.Module):
    """Layer of experts. ``e_score_correction_bias`` is added to the scores that choose, as DeepSeek-V3 does."""

    def __init__(self, experts: int, k: int, inner: int = INNER) -> None:
        super().__init__()
        self.k = k
        self.e_score_correction_bias: Tensor | None = None
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, experts, bias=False)
        self.experts = StackedExperts(experts, inner)
        self.shared = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = self.norm(hidden).view(-1, HIDDEN)
        scores = self.gate(flat).softmax(-1)
        bias = 0.0 if self.e_score_correction_bias is None else self.e_score_correction_bias
        index = torch.topk(scores + bias, self.k)[1]
        weights = scores.gather(1, index)
        out = self.experts(flat, index, weights / weights.sum(-1, keepdim=True))
        return hidden + (out + self.shared(flat)).view(hidden.shape)


class Stacked(nn.Module):
    """Decoder whose configuration names its experts as those of Transformers do."""

    def biased(self) -> "Stacked":
        """Give each router a bias of zeros."""
        for layer in self.layers:
            del layer.e_score_correction_bias
            layer.register_buffer("e_score_correction_bias", torch.zeros(layer.experts.num_experts))
        return self

    def __init__(self, experts: int = 8, k: int = 2, blocks: int = 2, seed: int = 3, inner: int = INNER) -> None:
        super().__init__()
        torch.manual_seed(seed)
        plan = {"layers.*.experts": "ep_dispatch_experts", "layers.*.experts.down_proj": "grouped_gemm"}
        self.config: Any = SimpleNamespace(base_model_ep_plan=plan)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([StackedBlock(experts, k, inner) for _ in range(blocks)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.roll(-1, 1).flatten())


class StackedLlama(Llama):
    """Decoder with heads, whose attention tensor parallelism splits, and experts in place of its last layer's MLP."""

    def __init__(self, experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.config.base_model_ep_plan = {"layers.*.mlp.experts": "ep_dispatch_experts"}
        self.model.layers[-1].mlp = StackedBlock(experts, k)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(ids % WORDS).flatten(0, 1), ids.roll(-1, 1).flatten() % WORDS)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(hidden)))


class Layered(nn.Module):
    """Decoder of ``MoE`` layers; ``ep`` ranks divide each one's experts, and its auxiliary losses are added."""

    def __init__(self, ep: int = 1, experts: int = 4, seed: int = 5, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([MoE(HIDDEN, Expert(), experts, ep, **options) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, extra = self.embed(tokens), torch.zeros(())
        for layer in self.layers:
            out, auxiliary, _ = layer(hidden)
            hidden, extra = hidden + out, extra + auxiliary
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.roll(-1, 1).flatten()) + 0.01 * extra


class Stage(nn.Module):
    """Layer of a pipeline."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.moe = MoE(HIDDEN, Expert(), 4, ep, k=2, top2_2nd_expert_sampling=False, drop_tokens=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.moe(hidden)[0]


def staged(ep: int) -> list[nn.Module]:
    """Layers of a pipeline; ``ep`` ranks divide the experts of each."""
    torch.manual_seed(1)
    return [nn.Embedding(VOCABULARY, HIDDEN), Stage(ep), Stage(ep), nn.Linear(HIDDEN, VOCABULARY)]


def tokens_of(step: int, rank: int) -> Tensor:
    """Tokens [2, LENGTH] of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
