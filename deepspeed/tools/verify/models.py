"""Tiny deterministic models that between them contain every shape of parameter use that sharding gets wrong.

A :class:`Case` is a model, its data, its loss and the loop it is trained with. The same case is run by the plain
one-process trainer (``reference.py``) and by the engine on several ranks (``grads.py``), so every random choice in
it is a function of a seed and of the place in the run (step, micro-batch, rank).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.pipe.module import LayerSpec, TiedLayerSpec

IN_FEATURES = 6
HIDDEN = 8
OUT_FEATURES = 5
VOCABULARY = 11
SEQUENCE = 4
SAMPLES = 4
# of the decoder that is cut into stages and parts
WIDTH = 16
HEADS = 4
KEY_HEADS = 2
INNER = 21
WORDS = 13


class MicroBatch(NamedTuple):
    """Place of one forward pass in a run; data, dropout and branches depend on nothing else."""

    step: int
    micro: int
    rank: int
    world: int

    def seed(self) -> int:
        """Return a seed of its own for each place of a run with fewer than 1000 micro-batches and ranks."""
        return (self.step * 1000 + self.micro) * 1000 + self.rank + 1

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed())


Losses = list[Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """Model with its data, its loss and its training loop.

    ``build()`` returns the model on the CPU in fp32, equal at every call. ``batch(place)`` returns the inputs of one
    micro-batch. ``loss(model, batch, place)`` calls the model (plain or wrapped in an engine) and returns the losses,
    each a scalar, in the order in which they are to be back-propagated; several losses share one graph.
    ``optimizer(model)``, if given, replaces the gate's; ``by`` replaces how losses are back-propagated.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[MicroBatch], Any]
    loss: Callable[[nn.Module, Any, MicroBatch], Losses]
    accumulation: int = 1
    clipping: float = 0.0
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    by: Callable[[Losses, Callable[..., Any]], None] | None = None

    def seeded_loss(self, model: nn.Module, place: MicroBatch) -> Losses:
        """Run the forward pass of one place; dropout draws the same masks in the reference and in the engine."""
        batch = self.batch(place)
        torch.manual_seed(place.seed())
        return self.loss(model, batch, place)

    def backward(self, losses: Losses, call: Callable[..., Any]) -> None:
        """Back-propagate the losses by ``call(loss, retain_graph=...)``: the engine's way, or a tensor's."""
        if self.by is not None:
            self.by(losses, call)
            return
        for count, loss in enumerate(losses, 1):
            call(loss, retain_graph=count < len(losses))

    def after_backward(self, model: nn.Module, place: MicroBatch, *, share: float = 1.0) -> bool:
        """Do what the loop does before a step; return whether that changed ``.grad``, on each rank by ``share``."""
        return False


class ResidualBlock(nn.Module):
    """Residual two-layer perceptron: [samples, HIDDEN] -> [samples, HIDDEN]."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Input projection, a list of equal blocks, output projection; most variants below differ in ``trunk``."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(IN_FEATURES, HIDDEN)
        self.layers = nn.ModuleList([ResidualBlock() for _ in range(depth)])
        self.head = nn.Linear(HIDDEN, OUT_FEATURES)

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.trunk(self.inp(x)))


class UsedTwice(Stack):
    """Stack that runs one block twice and one of its leaf modules a third time within one forward pass."""

    def trunk(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.layers[1](self.layers[0](x)))
        return self.layers[2](x) + self.get_submodule("layers.0.norm")(x)


class Tied(nn.Module):
    """Token model whose output projection is its embedding: [samples, SEQUENCE] -> [.., SEQUENCE, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([ResidualBlock() for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Unused(Stack):
    """Hold a block and a loose parameter that no forward pass touches."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = ResidualBlock()
        self.loose = nn.Parameter(torch.ones(3))


class Frozen(Stack):
    """Stack whose input projection, one whole block and parts of another block do not train."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad = not name.startswith(("inp.", "layers.0.", "layers.1.up.", "layers.1.norm.bias"))


class Conditional(Stack):
    """Stack in which a branch decides which blocks run; ranks may take different branches in the same step."""

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        x = self.inp(x)
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x)
        return self.head(x)


class OddShapes(Stack):
    """Stack whose root itself holds a 0-dimensional, a 0-sized and a loose 1-element parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, HIDDEN))
        self.shift = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift + self.empty.sum()


class WithDropout(Stack):
    """Dropout between recomputed blocks; the masks must be the same in the recomputation."""

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: F.dropout(layer(y), 0.25), x, use_reentrant=False)
        return x


def seeded(make: Callable[[], T]) -> Callable[[], T]:
    """Wrap ``make`` so that its result does not depend on the caller's random state."""

    def build() -> T:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            return make()

    return build


def regression_batch(place: MicroBatch) -> tuple[Tensor, Tensor]:
    """Draw inputs [SAMPLES, IN_FEATURES] and targets [SAMPLES, OUT_FEATURES]."""
    generator = place.generator()
    x = torch.randn(SAMPLES, IN_FEATURES, generator=generator)
    return x, torch.randn(SAMPLES, OUT_FEATURES, generator=generator)


def token_batch(place: MicroBatch) -> tuple[Tensor, Tensor]:
    """Draw two integer tensors [SAMPLES, SEQUENCE] below VOCABULARY."""
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=place.generator())
    return tokens[:, :-1], tokens[:, 1:]


def squared_error(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    """Return the mean squared error in fp32; inputs follow the dtype of the model."""
    x, y = batch
    dtypes = (p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point())
    return [F.mse_loss(model(x.to(next(dtypes, torch.float32))).float(), y.float())]


def cross_entropy(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    """Return the mean cross entropy per token in fp32."""
    tokens, targets = batch
    return [F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())]


def squared_error_branch(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    """Skip block 1 on odd ranks in every step, block 2 on even ranks in the second step."""
    x, y = batch
    skip = 1 if place.rank % 2 else (2 if place.step == 1 else -1)
    return [F.mse_loss(model(x, skip).float(), y.float())]


# -- a decoder as a list of layers: an uneven vocabulary, fewer heads of keys, uneven parts, biases on both sides of a
# -- sum, and one layer on two stages. Every layer draws its weights from its own seed, wherever it is built.
def draw(module: nn.Module, seed: int) -> None:
    """Fill the parameters: norms around 1, everything else around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            value = torch.randn(param.shape, generator=generator, device="cpu") / 3
            param.copy_(value + 1 if "norm.weight" in name else value)


class Words(nn.Module):
    """Token ids [samples, length] to vectors [samples, length, WIDTH]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        draw(self, seed)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)


class ResidualFeedForward(nn.Module):
    """Residual two-layer perceptron of an uneven width."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, INNER)
        self.down_proj = nn.Linear(INNER, WIDTH)
        draw(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(F.gelu(self.up_proj(self.norm(x))))


class ResidualAttention(nn.Module):
    """Residual causal attention with HEADS heads, of keys and values KEY_HEADS."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.head_dim = WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, HEADS * self.head_dim)
        self.k_proj = nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False)
        self.v_proj = nn.Linear(WIDTH, KEY_HEADS * self.head_dim)
        self.o_proj = nn.Linear(HEADS * self.head_dim, WIDTH)
        draw(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = [project(y).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o_proj(mixed.transpose(1, 2).flatten(2))


class Scores(nn.Module):
    """Vectors to scores of words [samples, length, WORDS]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        draw(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def decoder_layers(blocks: int = 4) -> list[LayerSpec]:
    """List embedding, blocks of attention and perceptron between two uses of one perceptron, output head."""
    inside = [LayerSpec((ResidualAttention, ResidualFeedForward)[i % 2], 10 + i) for i in range(blocks)]
    shared = TiedLayerSpec("shared", ResidualFeedForward, 2, tied_weight_attr="up_proj.weight")
    return [LayerSpec(Words, 1), shared, *inside, shared, LayerSpec(Scores, 3)]


def word_batch(place: MicroBatch) -> Tensor:
    """Draw token ids [SAMPLES, SEQUENCE] of the decoder."""
    return torch.randint(WORDS, (SAMPLES, SEQUENCE), generator=place.generator())


def next_words(model: nn.Module, ids: Tensor, place: MicroBatch) -> Losses:
    """Return the mean cross-entropy of the next words."""
    return [F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())]


class LayerStack(nn.Module):
    """Layers in one process and plain torch, by default those above; parameters named as by ``PipelineModule``."""

    def __init__(self, layers: Sequence[Any] = ()) -> None:
        super().__init__()
        self.layers = list(layers) or decoder_layers()
        self.tied_modules = nn.ModuleDict()
        self._calls: list[Callable[[Any], Any]] = []
        for index, spec in enumerate(self.layers):
            tied = isinstance(spec, TiedLayerSpec)
            name = spec.key if tied else str(index)
            parent = self.tied_modules if tied else self
            if name not in parent._modules:
                parent.add_module(name, spec.build() if isinstance(spec, LayerSpec) else spec)
            self._calls.append(parent.get_submodule(name))

    def forward(self, x: Any) -> Any:
        for call in self._calls:
            x = call(x)
        return x


# name: model, and what differs from a regression with squared errors
TOKENS: dict[str, Any] = {"batch": token_batch, "loss": cross_entropy}
CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "plain": (Stack, {}),
    "used_twice": (UsedTwice, {}),
    "tied": (Tied, TOKENS),
    "unused": (Unused, {}),
    "frozen": (Frozen, {}),
    "conditional": (Conditional, {"loss": squared_error_branch}),
    "odd_shapes": (OddShapes, {}),
    "dropout_checkpointed": (WithDropout, {}),
    "decoder": (LayerStack, {"batch": word_batch, "loss": next_words}),
}


def fields_of(name: str, model: type[nn.Module], differences: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a case that differs from a regression with squared errors."""
    return {"name": name, "build": seeded(model), "batch": regression_batch, "loss": squared_error, **differences}


def case_named(name: str, **changes: Any) -> Case:
    """Return the named case with some fields replaced."""
    model, differences = CASES[name]
    return Case(**fields_of(name, model, {**differences, **changes}))
