"""Layers of which every tensor-parallel rank has a part (Shoeybi et al. 2019, Megatron-LM).

A layer takes over the parameters of the one it stands for: the same objects under the same names. Each says in its
``tp_place`` which part of it is this rank's; until it is cut (``cut_now``, or when ZeRO takes it over) it is whole.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm.collectives import AxisGroup, gather_objects
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.errors import UsageError
from deepspeed.tensor.differentiable import cut_parts, enter_parts, join_parts, sum_parts
from deepspeed.zero.layout import Box, Place
from deepspeed.zero.param import local_of, part_of, point, whole_of
from deepspeed.zero.regions import bounds


class RandomStates(NamedTuple):
    """States of torch's default generators: on the host, and on the device if that has one."""

    host: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls) -> "RandomStates":
        """Return the current states."""
        accelerator = get_accelerator()
        device = None if accelerator.device_name() == "cpu" else accelerator.get_rng_state().cpu()
        return cls(torch.get_rng_state(), device)

    def set(self) -> None:
        """Set torch's default generators to these states."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            get_accelerator().set_rng_state(self.device)

    @classmethod
    def agree(cls, group: AxisGroup) -> None:
        """Set the generators of all ranks of ``group`` as the first's. Collective."""
        gather_objects(cls.now(), group)[0].set()


class SharedInput:
    """Hold the ranks that share layers, and the input that several layers in a row have entered (as q, k and v do).

    Gradients of that input are summed over the layers first, so that one sum over the ranks serves all of them.

    With ``random`` numbers (dropout), whole activations need the same numbers on all ranks, parts need other numbers on
    each. Between a column- and a row-parallel layer a rank draws from a generator of its own, seeded from the common
    generator: a recomputation, which begins with the common generator's state, draws the same again.
    """

    def __init__(self, group: AxisGroup, *, random: bool = False) -> None:
        self.group, self.random = group, random
        self._common: RandomStates | None = None
        self._seed = 0
        self._latest: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None

    def enter(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, which is whole, as the input of a layer that computes a part from it."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        if self._latest is not None:
            source, version, entered = self._latest
            if source() is value and version == value._version:
                return entered
        entered = enter_parts(value, self.group)
        self._latest = weakref.ref(value), value._version, entered
        entered.register_hook(lambda _: self.forget())
        return entered

    def begin_parts(self) -> None:
        """Begin work in parts, which draws other random numbers on each rank."""
        if not self.random or (self._common is not None and torch.initial_seed() == self._seed):
            return  # a recomputation that ended early has left a state, which its caller has replaced
        seed = int(torch.randint(1 << 60, (), device="cpu"))
        self._common, self._seed = RandomStates.now(), seed + 1 + self.group.index
        torch.manual_seed(self._seed)

    def end_parts(self) -> None:
        """End work in parts: random numbers are the same on all ranks again."""
        if self._common is not None and torch.initial_seed() == self._seed:
            self._common.set()
        self._common = None

    def forget(self) -> None:
        """Drop the latest input."""
        self._latest = None


def shared_input(group: Any) -> SharedInput:
    """Return the ``SharedInput`` of a caller's process group; a ``SharedInput`` is returned as it is."""
    if isinstance(group, SharedInput):
        return group
    return SharedInput(group if isinstance(group, AxisGroup) else plain_mesh("gloo", group=group).job)


def _weight_of(layer: nn.Module) -> nn.Parameter:
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the whole parameter, from the whole or from a part."""
    place = getattr(parameter, "tp_place", None)
    return place.shape if isinstance(place, Place) else tuple(parameter.shape)


class TensorParallelLayer(nn.Module):
    """Layer whose parameters and work the ranks of a group share; ``name`` is its path in messages."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    input_sums = False  # what made the input sums its gradients over the ranks
    keeps_tokens = False  # of the output, which is (batch, tokens, ...), only this rank's part of the tokens

    def __init__(self, group: Any, *, name: str = "") -> None:
        super().__init__()
        self.shared, self._alone = shared_input(group), not isinstance(group, SharedInput)
        self.name = name

    @property
    def group(self) -> AxisGroup:
        """Return the group of ranks that have the other parts."""
        return self.shared.group

    def take(self, name: str, parameter: nn.Parameter | None, place: Place | None = None) -> None:
        """Register ``parameter``, of which this rank's part is at ``place``; None: it is whole on every rank."""
        self.register_parameter(name, parameter)
        if parameter is not None and place is not None:
            previous = getattr(parameter, "tp_place", place)
            if previous != place:
                raise UsageError(f"{self.name}.{name} is tied to a parameter that is cut in another way: {previous}")
            parameter.tp_place = place  # type: ignore[attr-defined]
            if self._alone:  # no engine will
                self.cut_now()

    def cut_now(self) -> "TensorParallelLayer":
        """Keep only this rank's parts of the parameters."""
        for parameter in self._parameters.values():
            place = getattr(parameter, "tp_place", None)
            if parameter is not None and place is not None and tuple(local_of(parameter).shape) == place.shape:
                point(parameter, part_of(parameter.detach(), place).clone())
        return self

    def gather_params(self, params: Sequence[nn.Parameter]) -> None:
        """Make these parameters, of a layer that no engine has, whole until ``cut_now``. Collective."""
        for parameter in params:
            place = getattr(parameter, "tp_place", None)
            if place is not None and tuple(local_of(parameter).shape) != place.shape:
                point(parameter, whole_of(parameter.detach(), place, self.group))

    def extra_repr(self) -> str:
        shapes = {n: tuple(p.shape) for n, p in self._parameters.items() if p is not None}
        return f"{shapes}, part {self.group.index + 1} of {self.group.size}"


def _place(shape: tuple[int, ...], dim: int, parts: Sequence[int], group: AxisGroup, unit: int = 1) -> Place:
    """Return this rank's share of each of the ``parts`` of dimension ``dim``, in multiples of ``unit``."""
    boxes: list[Box] = []
    before = total = 0
    for part in parts:
        edges = [unit * edge for edge in bounds(part // unit, group.size)]
        lo, hi = edges[group.index], edges[group.index + 1]
        start = tuple(before + lo if d == dim else 0 for d in range(len(shape)))
        boxes.append((start, tuple(hi - lo if d == dim else n for d, n in enumerate(shape))))
        before, total = before + part, total + hi - lo
    size = tuple(total if d == dim else n for d, n in enumerate(shape))
    if dim and len(boxes) > 1:  # one after the other, not side by side
        size = (total * shape[0],)
    return Place(tuple(boxes), size, shape)


class LinearLayer(TensorParallelLayer):
    """Split by output (column-parallel): each rank computes some of the outputs from the whole input.

    ``parts``: sizes of what is packed into one weight (q, k and v), each of which is split; ``gather_output``: every
    rank gets all outputs; ``unit``: outputs that stay together (those of a head).
    """

    leads = True  # to a row-parallel layer, unless outputs are gathered

    def __init__(
        self,
        module: nn.Module,
        mp_group: Any = None,
        *,
        name: str = "",
        parts: Sequence[int] = (),
        gather_output: bool = False,
        unit: int = 1,
    ) -> None:
        super().__init__(mp_group, name=name)
        self.transposed = not isinstance(module, nn.Linear)  # (in, out), as in transformers' Conv1D
        weight, bias = _weight_of(module), getattr(module, "bias", None)
        shape = _whole_shape(weight)
        dim = 1 if self.transposed else 0
        self.parts, self.gather_output = tuple(parts) or (shape[dim],), gather_output
        if gather_output and len(self.parts) > 1:
            raise UsageError(f"{name}: outputs of several parts ({self.parts}) cannot be gathered; split them as one")
        self.in_features, self.out_features = shape[1 - dim], shape[dim]
        self.edges = [unit * edge for edge in bounds(shape[dim] // unit, self.group.size)]
        self.take("weight", weight, _place(shape, dim, self.parts, self.group, unit))
        self.take("bias", bias, _place((shape[dim],), 0, self.parts, self.group, unit))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value, weight = value if self.input_sums else self.shared.enter(value), self.weight
        if self.training and self.leads and not self.gather_output:
            self.shared.begin_parts()
        if not self.transposed:
            out = functional.linear(value, weight, self.bias)
        else:
            boxes = weight.tp_place.boxes  # type: ignore[attr-defined]
            # Several packed weights lie in memory one after the other.
            stretches = [weight] if weight.dim() == 2 else weight.split([math.prod(shape) for _, shape in boxes])
            out = torch.cat([value @ stretch.view(self.in_features, -1) for stretch in stretches], dim=-1)
            out = out if self.bias is None else out + self.bias
        return join_parts(out, self.group, -1, edges=self.edges) if self.gather_output else out


class VocabParallelLinear(LinearLayer):
    """Output head whose logits each rank computes for some words; see ``vocab_parallel_cross_entropy``."""

    leads = False


class LinearAllreduce(TensorParallelLayer):
    """Split by input (row-parallel): each rank takes what a column-parallel layer left on it; the results are summed.

    ``split_input``: the input is whole, and each rank takes its part; ``unit`` as in ``LinearLayer``.
    """

    def __init__(
        self, module: nn.Module, mp_group: Any = None, *, name: str = "", split_input: bool = False, unit: int = 1
    ) -> None:
        super().__init__(mp_group, name=name)
        self.transposed, self.split_input = not isinstance(module, nn.Linear), split_input
        weight = _weight_of(module)
        shape, dim = _whole_shape(weight), 0 if self.transposed else 1
        self.in_features, self.out_features = shape[dim], shape[1 - dim]
        self.edges = [unit * edge for edge in bounds(shape[dim] // unit, self.group.size)]
        self.take("weight", weight, _place(shape, dim, (shape[dim],), self.group, unit))
        self.take("bias", getattr(module, "bias", None))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        index = self.group.index
        self.shared.end_parts()
        if self.split_input:
            value = cut_parts(value, self.group, -1, edges=self.edges)
        elif value.shape[-1] != self.edges[index + 1] - self.edges[index]:
            raise UsageError(
                f"{self.name or type(self).__name__} is split by input and takes "
                f"{self.edges[index + 1] - self.edges[index]} of {self.in_features} features on tensor-parallel rank "
                f"{index}, but got {value.shape[-1]}: the layer before it is not split by output in the same way"
            )
        out = value @ self.weight if self.transposed else functional.linear(value, self.weight)
        if self.keeps_tokens:
            out = cut_parts(out, self.group, 1, edges=bounds(out.shape[1], self.group.size), partial=True)
        else:
            out = sum_parts(out, self.group)
        return out if self.bias is None else out + self.bias


class LmHeadLinearAllreduce(LinearAllreduce):
    """Output head split by input."""


class SubParamLinearLayer(LinearLayer):
    """Column-parallel layer with several packed weights; ``parts`` are their sizes."""


class SubParamLinearAllreduce(LinearAllreduce):
    """Row-parallel layer by the name that clients look for."""


class HeadsLinear(TensorParallelLayer):
    """Keys or values of fewer ``heads`` than ranks, whose number they divide: each rank computes all and uses one."""

    def __init__(self, module: nn.Module, mp_group: Any, *, name: str = "", heads: int) -> None:
        super().__init__(mp_group, name=name)
        self.heads, self.transposed = heads, not isinstance(module, nn.Linear)
        self.take("weight", _weight_of(module))
        self.take("bias", getattr(module, "bias", None))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        out = functional.linear(value, weight, self.bias)
        out = out if self.input_sums else enter_parts(out, self.group)
        width = out.shape[-1] // self.heads
        return out.narrow(-1, self.group.index * self.heads // self.group.size * width, width)


class VocabParallelEmbedding(TensorParallelLayer):
    """Embedding of which each rank has some rows."""

    def __init__(self, module: nn.Embedding, mp_group: Any = None, *, name: str = "") -> None:
        super().__init__(mp_group, name=name)
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.padding_idx = module.padding_idx
        self.edges = bounds(self.num_embeddings, self.group.size)
        shape = (self.num_embeddings, self.embedding_dim)
        self.take("weight", _weight_of(module), _place(shape, 0, shape[:1], self.group))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        lo, hi = self.edges[self.group.index], self.edges[self.group.index + 1]
        input_mask = ((ids >= 0) & (ids < lo)) | ((ids >= hi) & (ids < self.num_embeddings))  # words of other ranks
        pad = self.padding_idx
        pad = pad - lo if pad is not None and lo <= pad < hi else None
        rows = functional.embedding((ids - lo).masked_fill(input_mask, 0), self.weight, pad)
        return sum_parts(rows.masked_fill(input_mask.unsqueeze(-1), 0), self.group)


class HiddenParallelEmbedding(TensorParallelLayer):
    """Embedding of which each rank has some columns."""

    def __init__(self, module: nn.Embedding, mp_group: Any = None, *, name: str = "") -> None:
        super().__init__(mp_group, name=name)
        self.padding_idx, shape = module.padding_idx, (module.num_embeddings, module.embedding_dim)
        self.edges = bounds(shape[1], self.group.size)
        self.take("weight", _weight_of(module), _place(shape, 1, shape[1:], self.group))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        columns = functional.embedding(ids, self.weight, self.padding_idx)
        return join_parts(columns, self.group, -1, edges=self.edges)
