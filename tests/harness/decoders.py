"""Small decoders with the layer names of Hugging Face models, for tests of tensor parallelism."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, LENGTH, HEADS = 13, 16, 6, 4  # an uneven vocabulary


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(width) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Causal attention of (batch, length, heads, features); back to (batch, length, heads * features)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    return out.transpose(1, 2).flatten(2)


class LlamaAttention(nn.Module):
    """Separate projections, fewer heads of keys and values, norms over the features of a head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads = config.num_attention_heads
        self.q_proj = nn.Linear(WIDTH, heads * self.head_dim, bias=config.bias)
        self.k_proj = nn.Linear(WIDTH, config.num_key_value_heads * self.head_dim, bias=config.bias)
        self.v_proj = nn.Linear(WIDTH, config.num_key_value_heads * self.head_dim, bias=config.bias)
        self.o_proj = nn.Linear(heads * self.head_dim, WIDTH, bias=config.bias)
        if config.head_norms:
            self.q_norm, self.k_norm = Norm(self.head_dim), Norm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(attend(q, k, v))


class LlamaMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, width, bias=False)
        self.up_proj = nn.Linear(WIDTH, width, bias=False)
        self.down_proj = nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(WIDTH), Norm(WIDTH)
        self.self_attn, self.mlp = LlamaAttention(config), LlamaMLP(config.inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A decoder whose weights have the names of LlamaForCausalLM."""

    def __init__(
        self, *, heads: int = HEADS, kv: int = 2, tied: bool = False, bias: bool = False, head_norms: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 4, "inner": 21}
        self.config = SimpleNamespace(**sizes, bias=bias, head_norms=head_norms, model_type="own")
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.model.layers = nn.ModuleList(LlamaLayer(self.config) for _ in range(2))
        self.model.norm = Norm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


class Conv1D(nn.Module):
    """A linear layer with a weight (in, out), by the name it has in transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class GPT2Attention(nn.Module):
    """Queries, keys and values in one transposed layer; sizes in numbers of the module."""

    def __init__(self, *, heads: int = HEADS, interleaved: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        inner = heads * WIDTH // HEADS
        self.num_heads, self.head_dim, self.split_size = heads, WIDTH // HEADS, inner
        self.dropout = dropout
        if interleaved:
            self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * inner), nn.Linear(inner, WIDTH)
        else:
            self.c_attn, self.c_proj = Conv1D(3 * inner, WIDTH), Conv1D(WIDTH, inner)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        dropout = self.dropout if self.training else 0.0
        if hasattr(self, "dense"):
            q, k, v = self.query_key_value(x).view(*x.shape[:2], self.num_heads, -1).chunk(3, -1)
            return self.dense(attend(q, k, v, dropout=dropout))
        q, k, v = (part.view(shape) for part in self.c_attn(x).split(self.split_size, 2))
        return self.c_proj(attend(q, k, v, dropout=dropout))


class GPT2MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self, **attention: Any) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = GPT2Attention(**attention), GPT2MLP()
        self.resid_dropout = nn.Dropout(self.attn.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.resid_dropout(self.attn(self.ln_1(x)))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """A decoder whose weights have the names of GPT2LMHeadModel (``interleaved``: of GPT-NeoX), its embedding tied."""

    def __init__(self, **attention: Any) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(GPT2Block(**attention) for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def batch(step: int, way: int, samples: int = 2) -> Tensor:
    """Token ids of one data-parallel rank."""
    return torch.randint(1, WORDS, (samples, LENGTH), generator=torch.Generator().manual_seed(100 * step + way))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next tokens."""
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
