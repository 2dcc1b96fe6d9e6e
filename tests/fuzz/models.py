"""Models that are put together from layers, each of which uses its parameters in another way."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.tools.verify.models import (
    HIDDEN,
    IN_FEATURES,
    OUT_FEATURES,
    VOCABULARY,
    MicroBatch,
    ResidualBlock,
    regression_batch,
    token_batch,
)
from tests.harness import decoders, pipes


class Layer(nn.Module):
    """[..., HIDDEN] -> [..., HIDDEN]; ``place`` is (number of the micro-batch in the run, rank)."""

    def __init__(self, before: Sequence["Layer"]) -> None:
        super().__init__()
        self.make(before)

    def make(self, before: Sequence["Layer"]) -> None:
        self.inner = ResidualBlock()

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return self.inner(x)


class Odd(Layer):
    def make(self, before: Sequence[Layer]) -> None:
        self.up, self.down = nn.Linear(HIDDEN, 7), nn.Linear(7, HIDDEN, bias=False)

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Scalars(Layer):
    """The first parameter has no elements, the second no dimension."""

    def make(self, before: Sequence[Layer]) -> None:
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale, self.shift = nn.Parameter(torch.tensor(1.25)), nn.Parameter(torch.full((1,), 0.25))

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x * self.scale + self.shift + self.empty.sum()


class Twice(Layer):
    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return self.inner(self.inner(x)) + self.inner.norm(x)


class Shared(Layer):
    """Its block is that of a layer before, where one has any."""

    def make(self, before: Sequence[Layer]) -> None:
        self.inner = next((layer.inner for layer in before if hasattr(layer, "inner")), None) or ResidualBlock()


class Square(Layer):
    """Its weight is that of the square layer before, where there is one."""

    def make(self, before: Sequence[Layer]) -> None:
        self.square = nn.Linear(HIDDEN, HIDDEN)
        for layer in before:
            if isinstance(layer, Square):
                self.square.weight = layer.square.weight

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x + torch.tanh(self.square(x))


class Functional(Square):
    """Uses the weight of a module that is not called."""

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x + torch.tanh(F.linear(x, self.square.weight, self.square.bias))


class Spare(Layer):
    """Nothing of it is used."""

    def make(self, before: Sequence[Layer]) -> None:
        super().make(before)
        self.loose = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x


class Frozen(Layer):
    def make(self, before: Sequence[Layer]) -> None:
        super().make(before)
        self.inner.requires_grad_(requires_grad=False)


class HalfFrozen(Layer):
    def make(self, before: Sequence[Layer]) -> None:
        super().make(before)
        self.inner.up.requires_grad_(requires_grad=False)


class Branch(Layer):
    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return self.inner(x) if sum(place) % 3 else x


class Experts(Layer):
    """Each rank takes another one."""

    def make(self, before: Sequence[Layer]) -> None:
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x + torch.tanh(self.experts[sum(place) % 3](x))


class Recomputed(Layer):
    reentrant = False

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Reentrant(Recomputed):
    """Its inputs have to require a gradient; the first layer's may not, as that before it can be frozen."""

    reentrant = True

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return super().forward(x, place) if x.requires_grad else self.inner(x)


class Normed(Layer):
    """A batch norm that is evaluated."""

    def make(self, before: Sequence[Layer]) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def train(self, mode: bool = True) -> "Normed":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x + self.norm(x.flatten(0, -2)).to(x).view_as(x)


class Dropped(Layer):
    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return F.dropout(self.inner(x), 0.25, self.training)


class Direct(Layer):
    """A list and a dictionary that are never called themselves."""

    def make(self, before: Sequence[Layer]) -> None:
        self.items = nn.ModuleList([ResidualBlock(), ResidualBlock()])
        self.named = nn.ModuleDict({"norm": nn.LayerNorm(HIDDEN)})

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        for item in self.items:
            x = item(x)
        return self.named["norm"](x)


class Buffered(Layer):
    def make(self, before: Sequence[Layer]) -> None:
        super().make(before)
        self.register_buffer("kept", torch.linspace(0, 1, HIDDEN))
        self.register_buffer("third", torch.full((HIDDEN,), 1 / 3), persistent=False)

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return self.inner(x) + (self.get_buffer("kept") * self.get_buffer("third")).to(x)


class Target(Layer):
    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        with torch.no_grad():
            target = self.inner(x)
        return self.inner(x) + 0.1 * target


class Strided(Layer):
    """A parameter whose memory is transposed."""

    def make(self, before: Sequence[Layer]) -> None:
        self.weight = nn.Parameter((torch.randn(11, HIDDEN) / 4).t())

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x + torch.tanh(x @ self.weight) @ self.weight.t()


class Adapter(Layer):
    def make(self, before: Sequence[Layer]) -> None:
        self.base = nn.Linear(HIDDEN, HIDDEN).requires_grad_(requires_grad=False)
        self.low, self.high = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x + torch.tanh(self.base(x) + self.high(self.low(x)))


class Clamped(Layer):
    """Writes its weight in the forward; a second time changes nothing."""

    def make(self, before: Sequence[Layer]) -> None:
        self.clamped = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        with torch.no_grad():
            self.clamped.weight.clamp_(-0.2, 0.2)
        return x + self.clamped(x)


LAYERS: dict[str, type[Layer]] = {
    **{"plain": Layer, "odd": Odd, "scalars": Scalars, "twice": Twice, "shared": Shared, "square": Square},
    **{"functional": Functional, "spare": Spare, "frozen": Frozen, "half_frozen": HalfFrozen, "branch": Branch},
    **{"experts": Experts, "recomputed": Recomputed, "reentrant": Reentrant, "normed": Normed, "dropped": Dropped},
    **{"direct": Direct, "buffered": Buffered, "target": Target, "strided": Strided, "adapter": Adapter},
    "clamped": Clamped,
}


class Cell(nn.Module):
    """Around each layer where all are to be of one class, as the blocks of a decoder are."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any) -> Tensor:
        return self.layer(*inputs)


class Mixed(nn.Module):
    """The layers between a projection or an embedding and one output or two."""

    def __init__(self, layers: Sequence[str], *, tokens: bool, outputs: int, cells: bool) -> None:
        super().__init__()
        self.inp = nn.Embedding(VOCABULARY, HIDDEN) if tokens else nn.Linear(IN_FEATURES, HIDDEN)
        made: list[Layer] = []
        for name in layers:
            made.append(LAYERS[name](made))
        self.layers = nn.ModuleList(Cell(layer) if cells else layer for layer in made)
        width = VOCABULARY if tokens else OUT_FEATURES
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, width) for _ in range(outputs))

    def forward(self, x: Tensor, place: tuple[int, int]) -> list[Tensor]:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, place)
        return [head(x) for head in self.heads]


def build(case: Any) -> nn.Module:
    """The model of a case, equal at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        if case.front == "llama":
            return decoders.Llama(tied=case.outputs == 2, bias=True)
        if case.front == "pipe":
            return pipes.Plain(pipe_layers(case))
        return Mixed(case.layers, tokens=case.front == "tokens", outputs=case.outputs, cells=case.cells)


def round_to(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With initial weights that ``dtype`` can hold, so that masters agree however they are made."""
    for param in model.parameters():
        param.data = param.data.to(dtype).to(param.dtype)
    return model


def pipe_layers(case: Any) -> list[Any]:
    """Of a pipeline."""
    return pipes.layers(4 + len(case.layers), tied=case.outputs == 2)


def losses_of(case: Any, model: Callable[..., Any], place: MicroBatch, dtype: torch.dtype) -> list[Tensor]:
    """The forward of one place; draws are the same for whoever calls."""
    torch.manual_seed(place.seed())
    if case.front == "llama":
        return [decoders.loss_of(model, decoders.batch(place.step * 10 + place.micro, place.rank))]
    if case.front == "pipe":
        inputs, labels = pipes.micro_batch(place.step, place.micro, place.rank)
        return [pipes.cross_entropy(model(inputs), labels)]
    x, y = (token_batch if case.front == "tokens" else regression_batch)(place)
    outputs = model(x if case.front == "tokens" else x.to(dtype), (place.step + place.micro, place.rank))
    if case.front == "tokens":
        return [F.cross_entropy(out.float().flatten(0, 1), y.flatten()) for out in outputs]
    return [F.mse_loss(out.float(), y) for out in outputs]
