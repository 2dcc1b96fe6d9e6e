"""The models, data and optimizer settings that every peer trains, free of any training framework."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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
