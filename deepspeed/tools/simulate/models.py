"""What is simulated: a user's ``module:build``, or the model of a Hugging Face ``config.json``."""

import functools
import importlib
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import UsageError
from deepspeed.tools.simulate.device import MODULE
from deepspeed.tools.verify.user_model import default_loss, invented_batch, parts_of, resolve

# What the families call the same thing.
_NAMES = {
    "width": ("hidden_size", "n_embd", "d_model"),
    "blocks": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "key_heads": ("num_key_value_heads",),
    "head": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "choices": ("num_experts_per_tok",),
    "expert": ("moe_intermediate_size", "intermediate_size"),
    "shared": ("shared_expert_intermediate_size",),
}
# Families whose blocks are ``Layer``'s: with a gate, rotary positions and RMS norms, or without. A step of the model
# that transformers make is within 2 % of theirs; parallel branches and windows take next to no time and memory.
_ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe")  # every block with experts
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "granite", *_ROUTED)
_PLAIN = ("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt", "phi", "starcoder2")
_TIED = ("gemma", "gpt2", "gpt_bigcode", "opt", "starcoder2")  # unless they say
_PLACED = ("", "gpt2", "gpt_bigcode", "opt")  # a table of positions
_TWO_HALVES: tuple[str, ...] = ("t5", "bart", "pegasus", "marian", "m2m", "blenderbot", "led", "whisper", "prophetnet")
_TWO_HALVES += ("encoder-decoder",)
_GELU_NEW = ("gpt2", "gptj", "phi")  # unless they say
_ACTIVATED_BY = ("hidden_activation", "hidden_act", "activation_function")
_EP_PLAN = {"blocks.*.feed_forward.experts": "ep_dispatch_experts"}


@dataclass(frozen=True)
class Shape:
    """Shape of a decoder: sizes, and whether its feed-forward part is gated, with rotary positions and RMS norms.

    ``head``: channels of a head, 0 for ``width / heads``; ``placed``: with a table of positions; ``normed``: queries
    and keys have norms; ``activation``: as transformers call it, "" for silu with a gate and gelu without. ``family``:
    the configuration's model_type. ``experts`` of width ``expert``, of which a token has ``choices``, and a ``shared``
    one; 0 for none.
    """

    width: int
    blocks: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    key_heads: int
    gated: bool = False
    tied: bool = False
    head: int = 0
    placed: bool = True
    normed: bool = False
    activation: str = ""
    family: str = ""
    experts: int = 0
    choices: int = 1
    expert: int = 0
    shared: int = 0

    @property
    def channels(self) -> int:
        """Return the channels of one head."""
        return self.head or self.width // self.heads


@dataclass(frozen=True)
class Subject:
    """Model to build in the simulation; ``batch(model, step)`` gives its inputs, ``loss(output, batch)`` a scalar."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module, int], Any]
    loss: Callable[[Any, Any], torch.Tensor]


def shape_of(config: dict[str, Any], name: str) -> Shape:
    """Return the decoder of a Hugging Face configuration; UsageError, with the missing keys, for other models."""
    called = {key: next((n for n in names if config.get(n)), "") for key, names in _NAMES.items()}
    if missing := [_NAMES[key][0] for key in ("width", "blocks", "heads", "vocabulary") if not called[key]]:
        raise UsageError(f"{name} describes no decoder: {', '.join(missing)} is missing")
    numbers: dict[str, int] = {key: config[given] for key, given in called.items() if given}
    for key, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}: {called[key]} must be a whole number from 1 on, not {value!r}")
    family = str(config.get("model_type", ""))
    gated = family in _GATED
    if family not in _ROUTED:
        numbers = {
            key: value for key, value in numbers.items() if key not in ("experts", "choices", "expert", "shared")
        }
    elif not 1 <= numbers.get("choices", 0) <= numbers.get("experts", 0):
        raise UsageError(f"{name}: of a {family!r} num_experts_per_tok must be from 1 to the number of its experts")
    numbers.setdefault("inner", int(config.get("expansion_ratio", 4)) * numbers["width"])
    numbers.setdefault("positions", 2048)
    heads, key_heads = numbers["heads"], numbers.setdefault("key_heads", 1 if config.get("multi_query") else 0)
    numbers["key_heads"] = key_heads = key_heads or heads
    if ("head" not in numbers and numbers["width"] % heads) or heads % key_heads:
        raise UsageError(f"{name}: {heads} heads ({key_heads} of keys) do not divide {numbers['width']}")
    tied = bool(config.get("tie_word_embeddings", family in _TIED or not family))
    by_family = "gelu_new" if family in _GELU_NEW else {"gemma": "gelu", "opt": "relu"}.get(family, "")
    activation = next((str(config[key]) for key in _ACTIVATED_BY if config.get(key)), by_family)
    return Shape(
        **numbers, gated=gated, tied=tied, placed=family in _PLACED, normed=family.startswith("qwen3"),
        activation=activation, family=family,
    )  # fmt: skip


def _gelu_new(x: torch.Tensor) -> torch.Tensor:
    """Compute GELU with tanh (Hendrycks and Gimpel 2016), operation by operation as transformers have it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_new": _gelu_new, "gelu_fast": _gelu_new, "relu": functional.relu, "silu": functional.silu,
}  # fmt: skip


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: int = 0) -> torch.Tensor:
    """Return [rows, tokens, heads, width] from [rows, heads, tokens, width]."""
    grouped = query.shape[1] != key.shape[1]
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return mixed.transpose(1, 2)


class Attention(nn.Module):
    """Attention with query, key, value and output projections; tensor parallelism leaves some of the heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attend = shape.heads, shape.channels, causal_attention
        self.norms = nn.ModuleList(nn.RMSNorm(shape.channels) for _ in range(2 if shape.normed else 0))
        bias, wide, narrow = not shape.gated, shape.channels * shape.heads, shape.channels * shape.key_heads
        self.query = nn.Linear(shape.width, wide, bias=bias)
        self.key, self.value = (nn.Linear(shape.width, narrow, bias=bias) for _ in range(2))
        self.out = nn.Linear(wide, shape.width, bias=bias)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in layers)
        if self.norms:
            query, key = self.norms[0](query), self.norms[1](key)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        if angles is not None:
            query, key = _rotated(query, *angles), _rotated(key, *angles)
        out: torch.Tensor = self.out(self.attend(query, key, value).flatten(2))
        return out


class FeedForward(nn.Module):
    """Feed-forward part: two products, or three with a gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        bias = not shape.gated
        self.up = nn.Linear(shape.width, shape.inner, bias=bias)
        self.gate = nn.Linear(shape.width, shape.inner, bias=bias) if shape.gated else None
        self.down = nn.Linear(shape.inner, shape.width, bias=bias)
        self.activation = shape.activation or ("silu" if shape.gated else "gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activate = _ACTIVATIONS.get(self.activation, functional.gelu)
        inner = activate(self.up(x)) if self.gate is None else activate(self.gate(x)) * self.up(x)
        out: torch.Tensor = self.down(inner)
        return out


class StackedExperts(nn.Module):
    """Gated experts, stacked and called as those of transformers, by products over groups of rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_experts = shape.experts
        sizes = (shape.experts, 2 * shape.expert, shape.width), (shape.experts, shape.width, shape.expert)
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(size) * size[2] ** -0.5) for size in sizes)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen, order = index.flatten().sort()
        numbers = torch.arange(self.num_experts, device=index.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        tokens = order // index.shape[1]
        gate, up = functional.grouped_mm(hidden[tokens], self.gate_up_proj.mT, offs=ends).chunk(2, -1)
        out = functional.grouped_mm(functional.silu(gate) * up, self.down_proj.mT, offs=ends)
        return torch.zeros_like(hidden).index_add_(0, tokens, out * weights.flatten()[order, None])


class RoutedExperts(nn.Module):
    """Router, the experts that it chooses for each token, and a shared one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.choices = shape.choices
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = StackedExperts(shape)
        self.shared = FeedForward(replace(shape, inner=shape.shared)) if shape.shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        weights, index = self.router(flat).float().softmax(-1).topk(self.choices)
        out: torch.Tensor = self.experts(flat, index, (weights / weights.sum(-1, keepdim=True)).to(flat.dtype))
        return (out if self.shared is None else out + self.shared(flat)).view(x.shape)


class Layer(nn.Module):
    """Attention and feed-forward with norms before them."""

    gradient_checkpointing = False  # as blocks of transformers have it, by which ``sequence.plan`` finds them

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(shape.width), norm(shape.width)
        self.attention = Attention(shape)
        self.feed_forward: nn.Module = RoutedExperts(shape) if shape.experts else FeedForward(shape)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), angles)
        out: torch.Tensor = x + self.feed_forward(self.norm2(x))
        return out


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Decoder(nn.Module):
    """Causal language model of that shape; ``recompute``: the backward recomputes each block's activations."""

    def __init__(self, shape: Shape, *, recompute: bool = False) -> None:
        super().__init__()
        self.shape, self.recompute = shape, recompute
        self.config = SimpleNamespace(hidden_size=shape.width, base_model_ep_plan=_EP_PLAN if shape.experts else {})
        self.config.num_experts_per_tok = shape.choices if shape.experts else 0
        self.config.num_hidden_layers = shape.blocks
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.positions, shape.width) if shape.placed and not shape.gated else None
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width) if shape.gated else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        self.loss_function = functional.cross_entropy  # tells ``sequence.loss`` where the logits of the head go

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, as transformers' models do."""
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        angles = None
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        else:
            table = torch.ones(tokens.shape[1], self.shape.channels, device=x.device, dtype=x.dtype)
            angles = (table, table)
        run: Any = functools.partial(checkpoint, use_reentrant=False) if self.recompute else nn.Module.__call__
        for block in self.blocks:
            x = getattr(block, "_gradient_checkpointing_func", run)(block, x, angles)
        logits = self.head(self.norm(x))
        return self.loss_function(logits.flatten(0, 1).float(), tokens.flatten())


def decoder_subject(name: str, shape: Shape, *, samples: int, sequence: int, recompute: bool) -> Subject:
    """Return a decoder fed with ``samples`` sequences of ``sequence`` tokens."""

    def batch(model: nn.Module, step: int) -> torch.Tensor:
        return torch.randint(shape.vocabulary, (samples, sequence), device=next(model.parameters()).device)

    return Subject(name, lambda: Decoder(shape, recompute=recompute), batch, lambda output, _: output)


def subject_of(name: str, *, samples: int, sequence: int | None, recompute: bool) -> Subject:
    """Return the model of ``name``: ``module:build`` as in ds_verify, or a ``config.json``. UsageError if it is wrong.

    A configuration file becomes transformers' own model where that package is installed, else a decoder of its shape.
    """
    if not name.endswith(".json"):
        return _users(name)
    try:
        config = json.loads(Path(name).read_text())
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{name} is no Hugging Face configuration: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{name} is no Hugging Face configuration: it holds no object")
    if isinstance(text := config.get("text_config"), dict):
        config = text
    family = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder", any(part in family.replace("_", "-") for part in _TWO_HALVES)):
        raise UsageError(f"{name} describes an encoder-decoder ({family!r}); give the model itself as module:build")
    shape = shape_of(config, name)
    length = sequence or min(shape.positions, 4096)
    if shape.placed and length > shape.positions:
        raise UsageError(f"{name} has {shape.positions} positions, fewer than the sequence of {length}")
    ours = decoder_subject(name, shape, samples=samples, sequence=length, recompute=recompute)
    if "model_type" not in config or importlib.util.find_spec("transformers") is None:
        experts = [key for key in _NAMES["experts"] if isinstance(config.get(key), int) and config[key] > 1]
        uneven = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
        if (experts and (family not in _ROUTED or uneven)) or family not in ("", *_GATED, *_PLAIN):
            raise UsageError(
                f"{name}: without transformers a plain decoder is simulated, which "
                f"{f'experts ({experts[0]})' if experts else repr(family)} is not; install transformers, or give the "
                f"model itself as module:build. Known: {', '.join(sorted((*_GATED, *_PLAIN)))}"
            )
        return ours
    return _transformers(config, ours, recompute=recompute)


def _transformers(config: dict[str, Any], ours: Subject, *, recompute: bool) -> Subject:
    transformers = importlib.import_module("transformers")

    def build() -> nn.Module:
        kind = dict(config)
        parsed = transformers.AutoConfig.for_model(kind.pop("model_type"), **kind)
        parsed.use_cache = False
        make = transformers.AutoModelForCausalLM.from_config
        try:
            model: nn.Module = make(parsed, attn_implementation="sdpa")
        except ValueError:  # what has none, has plain products
            model = make(parsed, attn_implementation="eager")
            MODULE.sink.plain_attention[f"transformers have no other for {config['model_type']!r}"] += 1
        if recompute:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        return model.train()

    def batch(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
        tokens = ours.batch(model, step)
        return {"input_ids": tokens, "labels": tokens}

    return Subject(ours.name, build, batch, lambda output, _: default_loss(output, None))


def _users(name: str) -> Subject:
    build = resolve(name)
    parts: list[Any] = []

    def model() -> nn.Module:
        parts[:] = parts_of(build(), name)
        return parts[0]

    def batch(module: nn.Module, step: int) -> Any:
        return (parts[1] or invented_batch(module))(step, 0, 0, 1)

    def loss(output: Any, given: Any) -> torch.Tensor:
        return (parts[2] or default_loss)(output, given)

    return Subject(name, model, batch, loss)
