"""A causal decoder with the interfaces of Transformers' models, for tests of sequence parallelism without that package.

``stand_in`` is what is imported as ``transformers``: registries of attention and of masks, and the class of models. The
masks of one process are dense, from the definition: causal, inside a document, inside a window, nothing of padding.
"""

import copy
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from tests.harness.experts import StackedExperts

WORDS, WIDTH, ROWS = 29, 24, 2


class _Registry:
    known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.known[name]

    @classmethod
    def register(cls, name: str, function: Any) -> None:
        cls.known[name] = function


class AttentionInterface(_Registry):
    known: dict[str, Any] = {}


class AttentionMaskInterface(_Registry):
    known: dict[str, Any] = {}


def dense_mask(*, attention_mask: Any, position_ids: Tensor, local_size: int | None, **_: Any) -> Tensor:
    """Which token [rows, 1, tokens, tokens] sees which."""
    number = torch.arange(position_ids.shape[1])
    document = (torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1).cumsum(1)
    seen = (number[:, None] >= number) & (document[:, :, None] == document[:, None, :])
    if local_size is not None:
        seen = seen & (number[:, None] - number < local_size)
    if attention_mask is not None:
        seen = seen & (attention_mask[:, None, :] > 0)
    return (seen | torch.eye(len(number), dtype=torch.bool))[:, None]


def sdpa(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Attention as the registry's function of that name: without a mask it is causal."""
    k, v = (part.repeat_interleave(module.num_key_value_groups, 1) for part in (k, v))
    causal = attention_mask is None and options.get("is_causal", True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=causal).transpose(1, 2), None


def flash(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Attention as kernels for documents of any length take it: where these end, and the window."""
    assert attention_mask is None and module.config._attn_implementation == "flash"
    number, rows = torch.arange(q.shape[2]), q.shape[0]
    ends = options.get("cu_seq_lens_q", len(number) * torch.arange(rows + 1))
    assert int(ends.diff().max()) == options.get("max_length_k", len(number))
    document = torch.bucketize(torch.arange(rows * len(number)), ends, right=True).view(rows, -1)
    seen = (document[:, :, None] == document[:, None]) & (number[:, None] >= number)
    if options.get("sliding_window"):
        seen = seen & (number[:, None] - number < options["sliding_window"])
    return sdpa(module, q, k, v, seen[:, None])


def flex(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Attention by a mask of blocks, which has the function that it was made from."""
    assert isinstance(attention_mask, BlockMask) and attention_mask.seq_lengths == (q.shape[2], k.shape[2])
    number, row = torch.arange(q.shape[2]), torch.arange(q.shape[0])[:, None, None]
    seen = attention_mask.mask_mod(row, torch.zeros_like(row), number[:, None], number)
    return sdpa(module, q, k, v, seen[:, None])


for name, function in {"sdpa": sdpa, "flash": flash, "flex": flex}.items():
    AttentionInterface.register(name, function)
AttentionMaskInterface.register("sdpa", dense_mask)


class Config(SimpleNamespace):
    def get_text_config(self) -> "Config":
        return self

    @property
    def _attn_implementation(self) -> str:
        return self._attn_implementation_internal


class PreTrainedModel(nn.Module):
    def _can_set_attn_implementation(self) -> bool:
        return True


class Mixture(nn.Module):
    """Experts, two for each token."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, experts), StackedExperts(experts, 12, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        weights, index = self.gate(flat).softmax(-1).topk(2)
        return self.experts(flat, index, weights).view(hidden.shape)


class Attention(nn.Module):
    """Layer of attention, with experts behind it where the configuration has some."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.mlp = Mixture(config.num_experts) if config.num_experts else None
        self.config, self.width = config, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(WIDTH, config.num_attention_heads * self.width)
        self.k_proj = nn.Linear(WIDTH, config.num_key_value_heads * self.width)
        self.v_proj = nn.Linear(WIDTH, config.num_key_value_heads * self.width)
        self.o_proj = nn.Linear(config.num_attention_heads * self.width, WIDTH)

    def forward(self, hidden: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = AttentionInterface()[self.config._attn_implementation]
        hidden = hidden + self.o_proj(attend(self, q, k, v, mask, **kwargs)[0].flatten(2))
        return hidden if self.mlp is None else hidden + self.mlp(hidden)


class Decoder(PreTrainedModel):
    """Layers, the positions added to the embeddings. ``heads``, ``keys``: heads of queries and of keys."""

    def __init__(
        self, heads: int = 4, keys: int = 4, *, window: int | None = None, attention: str = "sdpa", experts: int = 0,
        depth: int = 2, tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        names = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 6, "sliding_window": window}
        self.config = Config(**names, _attn_implementation_internal=attention, layer_types=["full_attention"] * depth)
        self.config.num_experts = experts
        self.config.base_model_ep_plan = {"layers.*.mlp.experts": "ep_dispatch_experts"}
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Attention(self.config) for _ in range(depth))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.recomputes = False

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        labels: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape[0], -1)
        mask = AttentionMaskInterface()[self.config._attn_implementation](
            attention_mask=attention_mask, position_ids=position_ids, local_size=self.config.sliding_window
        )
        hidden = self.embed(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            if self.recomputes and self.training:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, mask)
        logits, loss = self.lm_head(self.norm(hidden)), None
        if labels is not None:
            targets = kwargs.get("shift_labels")
            targets = F.pad(labels[:, 1:], (0, 1), value=-100) if targets is None else targets
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


stand_in = ModuleType("transformers")
for part in (AttentionInterface, AttentionMaskInterface, PreTrainedModel):
    setattr(stand_in, part.__name__, part)


def decoder(**options: Any) -> Decoder:
    """A decoder, the same on each call."""
    torch.manual_seed(5)
    return Decoder(**options).train()


def batch_of(kind: str, step: int, feed: int) -> dict[str, Tensor]:
    """Rows of tokens with prompts of different lengths, which have no loss; ``kind`` says what is special."""
    tokens = {"odd": 13, "short": 3}.get(kind, 16)
    ids = torch.randint(1, WORDS, (ROWS, tokens), generator=torch.Generator().manual_seed(100 * step + feed))
    labels = ids.clone()
    labels[0, : 2 * feed + step] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        rows = (7, 6, 3), (1, 12, 3)
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    if kind in ("padded", "padded left"):
        mask = torch.ones_like(ids)
        mask[0, slice(9, None) if kind == "padded" else slice(6)] = 0
        labels[mask == 0] = -100
        labels[0, 6] = -100  # else padding predicts it
        batch["attention_mask"] = mask
    if kind == "no targets":  # but in the first part
        labels[:, 5:] = -100
    return copy.deepcopy(batch)
