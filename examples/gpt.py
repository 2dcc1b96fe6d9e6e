"""A small decoder-only transformer in one screen (GPT-2: learned positions, pre-norm blocks, biases)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. ``checkpoint`` recomputes each block in the backward; ``tied`` shares embedding and head."""

    vocab: int = 256
    context: int = 128
    width: int = 192
    layers: int = 4
    heads: int = 6
    tied: bool = False
    checkpoint: bool = False


class Linear(nn.Linear):
    """A linear layer that draws N(0, std) while it is constructed, so that ``zero.Init`` shards the drawn values."""

    def __init__(self, d_in: int, d_out: int, std: float = 0.02, bias: bool = True) -> None:
        self.std = std  # reset_parameters runs inside the parent's constructor
        super().__init__(d_in, d_out, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight, clear the bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of N(0, 0.02) rows."""

    def reset_parameters(self) -> None:
        """Draw the rows."""
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x is [batch, time, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width, residual_std = config.width // config.heads, 0.02 / (2 * config.layers) ** 0.5
        self.norm_attention, self.norm_mlp = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv, self.project = (
            Linear(config.width, 3 * config.width),
            Linear(config.width, config.width, residual_std),
        )
        self.up, self.down = (
            Linear(config.width, 4 * config.width),
            Linear(4 * config.width, config.width, residual_std),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> [batch, time, width]."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # of a tensor-parallel rank: its heads alone
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """Token ids [batch, time] -> logits [batch, time, vocab], or with targets the mean cross-entropy in nats per
    token.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens, self.positions = Embedding(config.vocab, config.width), Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the loss where ``targets`` [batch, time] are given."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.config.checkpoint and self.training else block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
