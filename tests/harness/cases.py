"""Corners of how models use their parameters and of how loops train them, beside the cases that ``ds_verify`` has.

The loops: losses that are back-propagated several times over one graph, ``loss.backward()`` without the engine, and
gradients that are written by hand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.tools.verify import models
from deepspeed.tools.verify.models import (
    CASES,
    HIDDEN,
    IN_FEATURES,
    TOKENS,
    Case,
    Frozen,
    Losses,
    MicroBatch,
    ResidualBlock,
    Stack,
    Tied,
    Unused,
    UsedTwice,
)


@dataclass(frozen=True)
class LoopCase(Case):
    """``repeats`` back-propagates every loss that many times with ``retain_graph``. ``plain_backward`` uses
    ``loss.backward()`` in place of ``engine.backward(loss)``. ``by_hand`` adds to ``.grad`` after every backward.
    """

    repeats: int = 1
    plain_backward: bool = False
    by_hand: bool = False

    def backward(self, losses: Losses, call: Callable[..., Any]) -> None:
        every = [loss for loss in losses for _ in range(self.repeats)]
        super().backward(every, Tensor.backward if self.plain_backward else call)

    def after_backward(self, model: nn.Module, place: MicroBatch, *, share: float = 1.0) -> bool:
        """Add to ``.grad`` as a client does, where there is one and where there is none; the same on every rank."""
        generator = place._replace(rank=0).generator()
        for index, param in enumerate(model.parameters() if self.by_hand else ()):
            if param.requires_grad and index % 3:
                written = (torch.randn(param.shape, generator=generator) * share).to(param)
                if param.grad is None:
                    param.grad = written
                else:
                    param.grad = param.grad.add_(written) if index % 3 == 1 else param.grad + written
        return self.by_hand


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


class FunctionalTied(Tied):
    """The embedding's weight is used by a module that does not own it, through a function call."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight)


class FrozenCheckpointed(Frozen, CheckpointedNonReentrant):
    """Frozen parts below recomputed blocks, as adapters over a checkpointed base have them."""


class TwoHeads(Stack):
    """Two outputs over one trunk, so that two losses share a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(self.inp(x))
        return self.head(x), self.second(x)


class MixedDtype(Stack):
    """A frozen bf16 projection inside an fp32 model; its dtype must survive."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Linear(IN_FEATURES, IN_FEATURES, bias=False).to(torch.bfloat16)
        self.coarse.weight.requires_grad = False

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


class Rotary(Tied):
    """Far positions turned by frequencies that no parameter holds; a rounded ``inv_freq`` turns them elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        exponents = torch.arange(0, HIDDEN, 2, dtype=torch.float32) / HIDDEN
        self.register_buffer("inv_freq", 1.0 / (10000.0**exponents), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        positions = torch.arange(5000, 5000 + tokens.shape[1], device=tokens.device).float()
        angles = positions[:, None] * self.get_buffer("inv_freq")
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        x = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


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


class Doubles(Stack):
    """A float64 layer behind float32 ones, and buffers of every kind, which have to reach every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        kinds = [torch.bool, torch.int16, torch.uint8, torch.float64, torch.complex64, torch.bfloat16]
        for index, dtype in enumerate(kinds):
            self.register_buffer(f"scalar{index}", torch.ones((), dtype=dtype))
            self.register_buffer(f"matrix{index}", torch.ones(3, 2, dtype=dtype).t())

    def trunk(self, x: Tensor) -> Tensor:
        return self.wide(super().trunk(x).double()).float()


def two_losses(model: nn.Module, batch: Any, place: MicroBatch) -> Losses:
    """Two losses over one graph."""
    x, y = batch
    first, second = model(x)
    return [F.mse_loss(first, y), second.square().mean()]


# name: model, and what differs from a regression with squared errors. Up to "manual_accumulation" they make the parity
# matrix, the rest are corners.
_CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "accumulation": (Stack, {"accumulation": 4}),
    "clipping": (Stack, {"clipping": 0.05}),
    "checkpoint_reentrant": (Checkpointed, {}),
    "checkpoint_nonreentrant": (CheckpointedNonReentrant, {}),
    "two_losses": (TwoHeads, {"loss": two_losses}),
    "retain_graph": (Stack, {"repeats": 2}),
    "manual": (Stack, {"plain_backward": True}),
    "by_hand": (Unused, {"accumulation": 2, "clipping": 0.05, "by_hand": True}),
    "by_hand_twice": (TwoHeads, {"loss": two_losses, "repeats": 2, "by_hand": True}),
    "manual_accumulation": (Stack, {"plain_backward": True, "accumulation": 3}),
    "functional_tied": (FunctionalTied, TOKENS),
    "mixed_dtype": (MixedDtype, {}),
    "shared_module": (SharedModule, {}),
    "containers": (Containers, {}),
    "no_grad_first": (NoGradFirst, {}),
    "frozen_checkpointed": (FrozenCheckpointed, {}),
    "rotary": (Rotary, TOKENS),
    "batch_norm": (BatchNormed, {}),
    "constants": (Constants, {}),
    "doubles": (Doubles, {}),
    "everything": (UsedTwice, {"accumulation": 2, "clipping": 0.05, "repeats": 2, "plain_backward": True}),
}


def case_named(name: str, **changes: Any) -> LoopCase:
    """The case of the package or of this module, with some fields replaced."""
    model, differences = {**CASES, **_CASES}[name]
    return LoopCase(**models.fields_of(name, model, {**differences, **changes}))


def regression(model: Callable[[], nn.Module], **differences: Any) -> LoopCase:
    """The case of a model of one file: a regression with squared errors, with some fields replaced."""
    return LoopCase(**models.fields_of("of its own", model, differences))  # type: ignore[arg-type]


def all_cases() -> dict[str, Case]:
    """Every named case."""
    return {name: case_named(name) for name in (*CASES, *_CASES)}
