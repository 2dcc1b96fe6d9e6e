"""Tiny deterministic models that between them contain every shape of parameter use that sharding gets wrong.

A :class:`Case` is a model, its data, its loss and the loop it is trained with. The same case is run by the plain
one-process trainer (``reference.py``) and by the engine on several ranks (``grads.py``), so every random choice in
it is a function of a seed and of the place in the run (step, micro-batch, rank).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IN_FEATURES = 6
HIDDEN = 8
OUT_FEATURES = 5
VOCABULARY = 11
SEQUENCE = 4
SAMPLES = 4


class MicroBatch(NamedTuple):
    """Where in a run one forward pass happens; data, dropout and branches depend on nothing else."""

    step: int
    micro: int
    rank: int
    world: int

    def seed(self) -> int:
        """A seed that no two places of one run share (fewer than 1000 micro-batches and ranks)."""
        return (self.step * 1000 + self.micro) * 1000 + self.rank + 1

    def generator(self) -> torch.Generator:
        """A fresh CPU generator for this place."""
        return torch.Generator().manual_seed(self.seed())


Losses = list[Tensor]


@dataclass(frozen=True)
class Case:
    """One model with its data, its loss and its training loop.

    ``build()`` returns the model on the CPU in fp32, equal at every call. ``batch(place)`` returns the inputs of one
    micro-batch. ``loss(model, batch, place)`` calls the model (plain or wrapped in an engine) and returns the losses,
    each a scalar, in the order in which they are to be back-propagated; several losses share one graph.
    ``repeats`` back-propagates every loss that many times with ``retain_graph``. ``plain_backward`` uses
    ``loss.backward()`` in place of ``engine.backward(loss)``. ``by_hand`` adds to ``.grad`` after every backward.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[MicroBatch], Any]
    loss: Callable[[nn.Module, Any, MicroBatch], Losses]
    accumulation: int = 1
    clipping: float = 0.0
    repeats: int = 1
    plain_backward: bool = False
    by_hand: bool = False

    def seeded_loss(self, model: nn.Module, place: MicroBatch) -> Losses:
        """Run the forward pass of one place; dropout draws the same masks in the reference and in the engine."""
        batch = self.batch(place)
        torch.manual_seed(place.seed())
        return self.loss(model, batch, place)

    def write_by_hand(self, model: nn.Module, place: MicroBatch, *, share: float = 1.0) -> None:
        """Add to ``.grad`` as a client does, where there is one and where there is none; the same on every rank."""
        generator = place._replace(rank=0).generator()
        for index, param in enumerate(model.parameters() if self.by_hand else ()):
            if param.requires_grad and index % 3:
                written = (torch.randn(param.shape, generator=generator) * share).to(param)
                if param.grad is None:
                    param.grad = written
                else:
                    param.grad = param.grad.add_(written) if index % 3 == 1 else param.grad + written


def _freeze(*params: Tensor) -> None:
    for param in params:
        param.requires_grad = False


class ResidualBlock(nn.Module):
    """A residual two-layer perceptron: [samples, HIDDEN] -> [samples, HIDDEN]."""

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

    def blocks(self) -> list[ResidualBlock]:
        """The blocks, typed."""
        return [layer for layer in self.layers if isinstance(layer, ResidualBlock)]

    def trunk(self, x: Tensor) -> Tensor:
        """The blocks, one after the other."""
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.trunk(self.inp(x)))


class Checkpointed(Stack):
    """Every block is recomputed in the backward pass."""

    reentrant = True

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class CheckpointedNonReentrant(Checkpointed):
    """The same with the saved-tensor-hooks implementation."""

    reentrant = False


class UsedTwice(Stack):
    """One block runs twice and one of its leaf modules a third time within one forward pass."""

    def trunk(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.layers[1](self.layers[0](x)))
        return self.layers[2](x) + self.blocks()[0].norm(x)


class Tied(nn.Module):
    """A token model whose output projection is its embedding: [samples, SEQUENCE] -> [.., SEQUENCE, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([ResidualBlock() for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def projected(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.projected(x)


class FunctionalTied(Tied):
    """The embedding's weight is used by a module that does not own it, through a function call."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def projected(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed.weight)


class Unused(Stack):
    """Holds a block and a loose parameter that no forward pass touches."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = ResidualBlock()
        self.loose = nn.Parameter(torch.ones(3))


class Frozen(Stack):
    """The input projection, one whole block and parts of another one do not train."""

    def __init__(self) -> None:
        super().__init__()
        half = self.blocks()[1]
        _freeze(*self.inp.parameters(), *self.layers[0].parameters(), *half.up.parameters(), half.norm.bias)


class FrozenCheckpointed(Frozen, CheckpointedNonReentrant):
    """Frozen parts below recomputed blocks, as adapters over a checkpointed base have them."""


class Conditional(Stack):
    """A branch decides which blocks run; ranks may take different branches in the same step."""

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        x = self.inp(x)
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x)
        return self.head(x)


class TwoHeads(Stack):
    """Two outputs over one trunk, so that two losses share a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(self.inp(x))
        return self.head(x), self.second(x)


class OddShapes(Stack):
    """A 0-dimensional, a 0-sized and a loose 1-element parameter held by the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, HIDDEN))
        self.shift = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift + self.empty.sum()


class MixedDtype(Stack):
    """A frozen bf16 projection inside an fp32 model; its dtype must survive."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Linear(IN_FEATURES, IN_FEATURES, bias=False).to(torch.bfloat16)
        _freeze(self.coarse.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.coarse(x.to(torch.bfloat16)).float())


class SharedModule(Stack):
    """The same module object is registered under two names, and both names are called."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = self.layers[1]

    def trunk(self, x: Tensor) -> Tensor:
        return self.alias(super().trunk(x))


class DictBlock(ResidualBlock):
    """A block that speaks dictionaries, as many model libraries do."""

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"hidden": super().forward(x["hidden"]), "extra": [x["hidden"].detach(), None]}


class Containers(Stack):
    """Inputs and outputs of the blocks are nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DictBlock() for _ in range(3)])

    def trunk(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"hidden": x}
        for layer in self.layers:
            state = layer(state)
        return state["hidden"] + 0.5 * state["extra"][0]


class NoGradFirst(Stack):
    """Each block runs once under ``no_grad`` (a target network) and once with gradients."""

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.no_grad():
                target = layer(x)
            x = layer(x) + 0.1 * target
        return x


class WithDropout(Stack):
    """Dropout between recomputed blocks; the masks must be the same in the recomputation."""

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: F.dropout(layer(y), 0.25), x, use_reentrant=False)
        return x


class Rotary(Tied):
    """Far positions turned by frequencies that no parameter holds; a rounded ``inv_freq`` turns them elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        exponents = torch.arange(0, HIDDEN, 2, dtype=torch.float32) / HIDDEN
        self.register_buffer("inv_freq", 1.0 / (10000.0**exponents), persistent=False)

    def embedded(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        positions = torch.arange(5000, 5000 + tokens.shape[1], device=tokens.device).float()
        angles = positions[:, None] * self.get_buffer("inv_freq")
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class BatchNormed(Stack):
    """Running statistics, moved by every forward, between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(HIDDEN) for _ in self.layers])

    def trunk(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = layer(norm(x))
        return x


class Constants(Stack):
    """Buffers that no checkpoint holds: fp32, float64, integers and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((IN_FEATURES,), 1 / 3), persistent=False)
        self.register_buffer("wide", torch.linspace(0, 1, IN_FEATURES, dtype=torch.float64) + 1e-9, persistent=False)
        self.register_buffer("order", torch.arange(IN_FEATURES).flip(0), persistent=False)
        self.register_buffer("mask", torch.arange(IN_FEATURES) % 3 == 0, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        offset, wide, order, mask = (self.get_buffer(name) for name in ("offset", "wide", "order", "mask"))
        shift = 1e3 * offset - 333.0 + 1e6 * (wide - wide.float())  # what rounding would take away
        return super().forward((x[:, order] + shift.to(x.dtype)).masked_fill(mask, 0.5))


def seeded(model_class: type[nn.Module]) -> Callable[[], nn.Module]:
    """Return a builder of ``model_class`` whose initial weights do not depend on the caller's random state."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            return model_class()

    return build


def regression_batch(place: MicroBatch) -> tuple[Tensor, Tensor]:
    """Inputs [SAMPLES, IN_FEATURES] and targets [SAMPLES, OUT_FEATURES]."""
    generator = place.generator()
    x = torch.randn(SAMPLES, IN_FEATURES, generator=generator)
    return x, torch.randn(SAMPLES, OUT_FEATURES, generator=generator)


def token_batch(place: MicroBatch) -> tuple[Tensor, Tensor]:
    """Two integer tensors [SAMPLES, SEQUENCE] below VOCABULARY."""
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=place.generator())
    return tokens[:, :-1], tokens[:, 1:]


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()), torch.float32)


def squared_error(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    """Mean squared error in fp32; inputs follow the dtype of the model."""
    x, y = batch
    return [F.mse_loss(model(x.to(_dtype_of(model))).float(), y)]


def cross_entropy(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    """Mean cross entropy per token in fp32."""
    tokens, targets = batch
    return [F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())]


def squared_error_branch(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    """Odd ranks skip block 1 in every step; even ranks skip block 2 in the second step."""
    x, y = batch
    skip = 1 if place.rank % 2 else (2 if place.step == 1 else -1)
    return [F.mse_loss(model(x, skip), y)]


def two_losses(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    """Two losses over one graph."""
    x, y = batch
    first, second = model(x)
    return [F.mse_loss(first, y), second.square().mean()]


# name: model, and what differs from a regression with squared errors. Up to "manual_accumulation" they make the parity
# matrix, the rest are corners.
_TOKENS: dict[str, Any] = {"batch": token_batch, "loss": cross_entropy}
_CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "plain": (Stack, {}),
    "accumulation": (Stack, {"accumulation": 4}),
    "clipping": (Stack, {"clipping": 0.05}),
    "checkpoint_reentrant": (Checkpointed, {}),
    "checkpoint_nonreentrant": (CheckpointedNonReentrant, {}),
    "used_twice": (UsedTwice, {}),
    "tied": (Tied, _TOKENS),
    "unused": (Unused, {}),
    "frozen": (Frozen, {}),
    "conditional": (Conditional, {"loss": squared_error_branch}),
    "two_losses": (TwoHeads, {"loss": two_losses}),
    "retain_graph": (Stack, {"repeats": 2}),
    "manual": (Stack, {"plain_backward": True}),
    "by_hand": (Unused, {"accumulation": 2, "clipping": 0.05, "by_hand": True}),
    "by_hand_twice": (TwoHeads, {"loss": two_losses, "repeats": 2, "by_hand": True}),
    "manual_accumulation": (Stack, {"plain_backward": True, "accumulation": 3}),
    "functional_tied": (FunctionalTied, _TOKENS),
    "odd_shapes": (OddShapes, {}),
    "mixed_dtype": (MixedDtype, {}),
    "shared_module": (SharedModule, {}),
    "containers": (Containers, {}),
    "no_grad_first": (NoGradFirst, {}),
    "frozen_checkpointed": (FrozenCheckpointed, {}),
    "dropout_checkpointed": (WithDropout, {}),
    "rotary": (Rotary, _TOKENS),
    "batch_norm": (BatchNormed, {}),
    "constants": (Constants, {}),
    "everything": (UsedTwice, {"accumulation": 2, "clipping": 0.05, "repeats": 2, "plain_backward": True}),
}


def case_named(name: str, **changes: Any) -> Case:
    """Return the named case with some fields replaced; KeyError lists the names there are."""
    if name not in _CASES:
        raise KeyError(f"no verification case is called {name!r}; there are: {', '.join(sorted(_CASES))}")
    model, differences = _CASES[name]
    fields: dict[str, Any] = {"batch": regression_batch, "loss": squared_error, **differences, **changes}
    return Case(name=name, **{"build": seeded(model), **fields})


def all_cases() -> dict[str, Case]:
    """Every named case."""
    return {name: case_named(name) for name in _CASES}
