"""Layers in parts for a generation: beside a model that trains in another layout, and in its layers' places meanwhile.

The model stays the client's: its attributes, hooks and every module that is not split are its own. Weights come to the
parts by a planned exchange (``ParameterReallocation``), and only when they have changed.
"""

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup, break_off, broadcast, fresh
from deepspeed.comm.mesh.groups import Mesh, destroy_mesh, with_group
from deepspeed.config.model.tensor_parallel import TensorParallelConfig
from deepspeed.errors import NotYetError, UsageError
from deepspeed.monitor.log import log_dist_once
from deepspeed.reallocate.exchange import ParameterReallocation
from deepspeed.reallocate.sides import units_of
from deepspeed.tensor.apply import draws, replace_layers
from deepspeed.tensor.layers import SharedInput
from deepspeed.tensor.splits import Planner, TensorPlan
from deepspeed.zero.module.state import bit_sums, persistent_buffers
from deepspeed.zero.param import castable, is_composed, point
from deepspeed.zero.plan import StateKind

KEY = "hybrid_engine.inference_tp_size"

Marks = list[torch.Tensor]


class _Replacement(NamedTuple):
    """Value that stands in ``place`` under ``name`` while the parts are shown."""

    place: MutableMapping[str, Any]
    name: str
    value: Any


def plan_parts(model: nn.Module, wanted: TensorParallelConfig, tp_size: int, rank: int = 0) -> TensorPlan:
    """Plan how ``tp_size`` ranks share ``model``'s layers while it generates, by ``wanted``'s rules. Changes nothing.

    DeepSpeedConfigError where nothing, or no heads, can be split; NotYetError for weights that are codes.
    """
    for name, param in model.named_parameters():
        if is_composed(param) or not castable(param.dtype):
            kind = type(param).__name__ if is_composed(param) else param.dtype
            raise NotYetError(
                f"{KEY} is {tp_size}, but {name} is {kind}, and only floating-point weights can be dealt out in this "
                "release; set it to 1"
            )
    local = wanted.vocab_parallel_lm_head
    rules = wanted.model_copy(update={"vocab_parallel_lm_head": None if local else local})  # every rank needs all words
    plan = Planner(model, rules, tp_size, rank, key=KEY).make()
    plan.check(model, KEY, tp_size)
    return plan


@contextlib.contextmanager
def _in_place(entries: Sequence[_Replacement]) -> Iterator[None]:
    before = [_Replacement(place, name, place[name]) for place, name, _ in entries]
    try:
        for place, name, value in entries:
            place[name] = value
        yield
    finally:
        for place, name, value in reversed(before):
            place[name] = value


class PartsForGeneration:
    """Layers of ``model`` as ``plan`` deals them out to ``tp_size`` consecutive ranks of the engine on ``mesh``.

    Made without a collective and without memory for weights. ``check``, ``marks``, ``fill`` and ``drop`` are for one
    rank alone; ``take``, ``open`` and forwards inside ``shown`` are collective.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, mesh: Mesh, *, tp_size: int, device: torch.device) -> None:
        job, self._mesh, self._device = mesh.job, mesh, device
        first = job.index - job.index % tp_size
        self.ranks = job.ranks[first : first + tp_size]
        self._opened: Mesh | None = None  # with the group of these ranks alone
        self._groups = 0
        group = AxisGroup(None, tp_size, job.index - first, self.ranks, job.backend)
        self._shared = SharedInput(group, random=draws(model))
        pairs = ((p, _hollow(p, tuple(p.shape), device)) for p in model.parameters())
        self._parts = {p: nn.Parameter(hollow, requires_grad=False) for p, hollow in pairs}
        self._place(model, plan)
        self._target = nn.Module()
        for name, param in model.named_parameters():
            _register(self._target, name, self._parts[param])
        self._buffers: list[_Replacement] = []
        self._moves: ParameterReallocation | None = None
        self._taken: Marks | None = None  # of the weights that the parts have
        self.filled = False

    def _place(self, model: nn.Module, plan: TensorPlan) -> None:
        """Make the parts of layers, and note which values to replace while the parts are shown."""
        modules = dict(model.named_modules(remove_duplicate=False))
        owners = list(dict.fromkeys(modules.values()))
        slots = ((m._parameters, n, p) for m in owners for n, p in m._parameters.items() if p is not None)
        self._entries = [_Replacement(place, name, self._parts[p]) for place, name, p in slots]
        with _in_place(self._entries), ExitStack() as back:
            replace_layers(modules, plan, self._shared, back)
            split = [path for path, how in plan.splits.items() if how.way not in ("sum", "whole")]
            where = [(modules[path.rpartition(".")[0]]._modules, path.rpartition(".")[2]) for path in split]
            layers = [(modules[path], place[name]) for path, (place, name) in zip(split, where, strict=True)]
            self._entries += [_Replacement(place, name, place[name]) for place, name in where]
        self._layers = list(dict.fromkeys(layers))
        self._entries += [_Replacement(vars(holder), name, number) for holder, name, number in plan.numbers]

    @property
    def group(self) -> AxisGroup:
        """Return the group of ranks that share layers."""
        return self._shared.group

    def check(self, model: nn.Module) -> None:
        """Raise UsageError where ``model`` has other parameters than when the parts were made."""
        if self._parts.keys() != {*model.parameters()}:
            raise UsageError(
                f"{type(model).__name__} has other parameters than at deepspeed.initialize, for which its layers were "
                f"dealt out ({KEY}); call engine.destroy() and initialize again"
            )

    def marks(self, model: nn.Module) -> Marks | None:
        """Return sums that change with weights or buffers at rest on this rank; None where weights rest on a drive."""
        tensors = dict(model.named_parameters())
        units = units_of(tensors)
        if any(unit.on_drive(StateKind.PARAM) for unit in units):
            return None
        marks = Marks()
        for unit in units:
            with unit.values(StateKind.PARAM) as resting:
                marks.append(bit_sums(resting.view(-1)))
        loose: list[torch.Tensor] = [tensor for tensor in tensors.values() if not hasattr(tensor, "_ds_unit")]
        loose += persistent_buffers(model, pieces=False).values()
        return marks + [bit_sums(tensor.detach().contiguous().view(-1)) for tensor in loose]

    def holds(self, marks: Marks | None) -> bool:
        """Return whether the parts have the weights of ``marks``."""
        if not self.filled or marks is None or self._taken is None or len(marks) != len(self._taken):
            return False
        return all(torch.equal(now, before) for now, before in zip(marks, self._taken, strict=True))

    def fill(self) -> None:
        """Allocate memory for the parts; on failure give all of it back and raise."""
        if self.filled:
            return
        self.filled = True
        try:
            for part in self._parts.values():
                place = getattr(part, "tp_place", None)
                shape = tuple(part.shape) if place is None else place.size
                point(part, fresh(torch.Size(shape).numel(), part.dtype, self._device).view(shape))
        except BaseException:
            self.drop()
            raise
        nbytes = sum(part.nbytes for part in self._parts.values())
        log_dist_once(
            f"generate(): {self.group.size} ranks share each layer, each with {nbytes / 1e9:.2f} GB of weights"
        )

    def take(self, engine: Any, marks: Marks | None) -> None:
        """Copy the present weights of ``engine`` into the parts, and the buffers of the group's first rank."""
        self._taken = None
        if self._moves is None:
            # buffers, which no layout cuts, are not in the target
            options: Any = {"group": engine.mesh.job.pg, "strict": False, "convert_dtype": True}
            self._moves = ParameterReallocation(engine, self._target, **options)
        self._moves.run()
        self._buffers = []
        for module in engine.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set:
                    values = buffer.detach().clone(memory_format=torch.contiguous_format)
                    broadcast(values, self.group)
                    self._buffers.append(_Replacement(module._buffers, name, values))
        self._taken = marks

    def drop(self) -> None:
        """Give the memory of the parts back."""
        for part in self._parts.values() if self.filled else ():
            point(part, _hollow(part, tuple(part.shape), self._device))
        self._taken, self._buffers, self.filled = None, [], False

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let the model compute by its parts inside this context."""
        for layer, part in self._layers:
            part.train(layer.training)
        with _in_place([*self._entries, *self._buffers]):
            try:
                yield
            finally:
                self._shared.end_parts()
                self._shared.forget()

    def open(self) -> None:
        """Make the group of the ranks that share layers, if there is none. Collective over them."""
        if self._opened is None:
            self._groups += 1
            base = replace(self._mesh, made=())
            self._opened, self._shared.group = with_group(base, f"generation{self._groups}", self.ranks)

    def end_waits(self) -> None:
        """End the waits of other ranks of the group for this one, which has failed (on gloo)."""
        break_off(self.group)

    def close_group(self) -> None:
        """Destroy the group; the next ``open`` makes another one."""
        if self._opened is not None:
            destroy_mesh(self._opened)
        self._opened = None


def _hollow(like: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a tensor of ``shape`` in the dtype of ``like``, in one element's memory."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(shape)


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, leaf = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    root.register_parameter(leaf, parameter)
