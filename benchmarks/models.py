"""The models, data and optimizer settings that every peer trains, free of any training framework."""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent / "examples")
)  # only the model file lives there, never a framework

from gpt import GPT, GPTConfig

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Workload:
    """A model with the batch that each rank feeds it; ``micro_batch`` sequences of ``model.context`` tokens."""

    model: GPTConfig
    micro_batch: int

    @property
    def tokens(self) -> int:
        """Tokens per rank and step."""
        return self.micro_batch * self.model.context

    def resident_bytes(self, world: int) -> int:
        """What a rank needs to hold: its share of 2 + 4 + 12 bytes per parameter, two gathered units in bf16, and
        activations.

        Activations are 34 bytes per token, width and layer (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198,
        equation 1, without the attention matrix, which the fused attention never stores) and 10 per logit: bf16, the
        fp32 copy, its gradient.
        """
        block = 12 * self.model.width**2 + 13 * self.model.width
        tables = [self.model.vocab * self.model.width] * 2 + [self.model.context * self.model.width]
        total = block * self.model.layers + sum(tables) + 2 * self.model.width
        two_largest = sum(sorted([block, block, *tables])[-2:])
        activations = self.tokens * (34 * self.model.width * self.model.layers + 10 * self.model.vocab)
        return 18 * total // world + 2 * two_largest + activations


WORKLOADS = {
    "134m": Workload(GPTConfig(vocab=32_000, context=64, width=768, layers=12, heads=12), micro_batch=1),
    "33.7m": Workload(GPTConfig(vocab=8_192, context=128, width=512, layers=8, heads=8), micro_batch=2),
    "10m": Workload(GPTConfig(vocab=4_096, context=128, width=256, layers=10, heads=8), micro_batch=8),
    "tiny": Workload(GPTConfig(vocab=256, context=32, width=64, layers=2, heads=4), micro_batch=2),
}


def build_model(workload: Workload) -> GPT:
    """The model, drawn from one fixed seed on every rank (under whatever construction context the caller opened)."""
    torch.manual_seed(0)
    return GPT(workload.model)


def make_batch(workload: Workload, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Random inputs and targets [micro_batch, context], a function of (rank, step) alone."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    ids = torch.randint(workload.model.vocab, (workload.micro_batch, workload.model.context + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


@functools.lru_cache
def _whole(workload: Workload, _: torch.device) -> GPT:
    """Once per process and device, of which ``meta`` is one."""
    return build_model(workload)


class Part(nn.Module):
    """Layer ``index`` of the GPT as a list, with the values that the whole model would have: the embeddings, the
    blocks, and the norm with the head.
    """

    def __init__(self, workload: Workload, index: int) -> None:
        super().__init__()
        whole = _whole(workload, torch.empty(0).device)
        if index == 0:
            self.tokens, self.positions = whole.tokens, whole.positions
        elif index <= workload.model.layers:
            self.block = whole.blocks[index - 1]
        else:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        """Token ids -> hidden states -> ... -> logits."""
        if hasattr(self, "tokens"):
            return self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.block(x) if hasattr(self, "block") else self.head(self.norm(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, as in the whole model."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Cut:
    """How the ranks are cut: ``pp`` and ``tp`` ranks share a model, micro-batches of ``micro`` sequences."""

    pp: int = 1
    tp: int = 1
    micro: int = 0

    def data_rank(self, rank: int, world: int) -> int:
        """Ranks are numbered stage by stage; those that share layers follow each other."""
        return rank % (world // self.pp) // self.tp

    def data_ways(self, world: int) -> int:
        """Ranks that have data of their own."""
        return world // self.pp // self.tp


CUTS = {"pp2": Cut(pp=2, micro=1), "tp2": Cut(tp=2)}
"""By variant; all others are data parallel only."""
