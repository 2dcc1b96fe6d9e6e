"""Which parameters form a unit. Pure over an ``nn.Module`` tree: no process group, no memory.

The unit of a sharded PARAM is the block the model itself repeats (one gather per transformer block); what lies outside
the blocks is packed module by module. A replicated PARAM needs no gathers, so its units are plain buckets for the
reduction.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from deepspeed.zero.facts import UnitFacts
from deepspeed.zero.param import local_of
from deepspeed.zero.plan import ZeroPlan


@dataclass
class UnitSpec:
    """A unit before it has memory: parameters of one ``dtype`` that will rest in one dtype, ``rest``."""

    name: str
    trainable: bool
    persistent: bool
    dtype: torch.dtype
    rest: torch.dtype
    facts: UnitFacts | None = None
    params: list[nn.Parameter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    numel: int = 0

    def add(self, name: str, param: nn.Parameter) -> None:
        self.params.append(param)
        self.names.append(name)
        self.numel += local_of(param).numel()


@dataclass
class Partition:
    """Units, and which of them (by index) each module needs in its forward."""

    units: list[UnitSpec]
    touches: dict[nn.Module, list[int]]
    roots: set[nn.Module]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated blocks: children of one class (two or more, with parameters) of one container.

    Modules marked as leaves (``set_z3_leaf_modules``) are blocks by the user's word.
    """

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if getattr(module, "_z3_leaf", False):
            yield prefix, module
            return
        children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
        repeats = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        counts = Counter(type(child) for _, child in children if repeats)
        for name, child in children:
            path = f"{prefix}.{name}" if prefix else name
            if counts[type(child)] >= 2:
                yield path, child
            else:
                yield from walk(child, path)

    return list(walk(model, ""))


def statistics_dtypes(model: nn.Module) -> dict[nn.Parameter, torch.dtype]:
    """The parameters beside running statistics (a batch norm's), with their dtype: torch computes with both in one."""
    means = [(m, m._buffers.get("running_mean")) for m in model.modules()]
    return {p: mean.dtype for m, mean in means if mean is not None for p in m.parameters(recurse=False)}


def _numel(param: nn.Parameter) -> int:
    return local_of(param).numel()


def partition(
    model: nn.Module,
    plan: ZeroPlan,
    *,
    trainable: Iterable[nn.Parameter],
    rest_dtype: Callable[[str, nn.Parameter], torch.dtype] = lambda _, param: param.dtype,
    facts_of: Callable[[str, nn.Parameter], UnitFacts | None] = lambda *_: None,
) -> Partition:
    """Divide all parameters of ``model`` into units according to ``plan``.

    ``trainable``: the parameters that get gradients and optimizer state. ``rest_dtype(name, param)``: what PARAM will
    be stored in. ``facts_of(name, param)``: who shares it and what divides its gradient; a unit holds parameters with
    equal facts. Tied parameters are owned by the first module that holds them; every module that touches a unit
    directly is listed for it.
    """
    names = {p: n for n, p in model.named_parameters()}
    trained, small = set(trainable), _persistent(names, plan)
    roots = dict(find_blocks(model))
    homes = _homes(model, roots)
    builder = _Builder(plan, names)
    for param, home in homes.items():
        rest, facts = rest_dtype(names[param], param), facts_of(names[param], param)
        builder.place(param, home, _Kind(param in trained, param in small, param.dtype, rest, facts))
    return Partition(builder.specs, _touches(model, builder.index_of, homes, roots), set(roots.values()))


def _persistent(names: dict[nn.Parameter, str], plan: ZeroPlan) -> set[nn.Parameter]:
    """Small parameters that stay whole: each at most the threshold, together at most the model threshold."""
    chosen: set[nn.Parameter] = set()
    if not plan.regular.param.sharded:
        return chosen
    total = 0
    for param in names:
        if _numel(param) <= plan.persistence_numel and total + _numel(param) <= plan.model_persistence_numel:
            chosen.add(param)
            total += _numel(param)
    return chosen


_Home = tuple[str, bool]  # path of a module, and whether that is a block


def _homes(model: nn.Module, roots: dict[str, nn.Module]) -> dict[nn.Parameter, _Home]:
    """The home of each parameter, in traversal order."""
    inside = {m: path for path, block in roots.items() for m in block.modules()}
    homes: dict[nn.Parameter, _Home] = {}
    for path, module in model.named_modules():
        for param in module.parameters(recurse=False):
            homes.setdefault(param, (inside[module], True) if module in inside else (path, False))
    return homes


class _Kind(NamedTuple):
    """What parameters of one unit have in common."""

    trainable: bool
    persistent: bool
    dtype: torch.dtype
    rest: torch.dtype
    facts: UnitFacts | None


class _Builder:
    """Appends parameters to open units; a unit closes when its home changes or it is full."""

    def __init__(self, plan: ZeroPlan, names: dict[nn.Parameter, str]) -> None:
        self.plan = plan
        self.names = names
        self.specs: list[UnitSpec] = []
        self.index_of: dict[nn.Parameter, int] = {}
        self._open: dict[object, int] = {}

    def place(self, param: nn.Parameter, home: _Home, kind: _Kind) -> None:
        path, is_block = home
        replicated = kind.persistent or not self.plan.regular.param.sharded
        scope = None if replicated else home if is_block else ""
        key = (scope, kind)
        limit = min(self.plan.pack_numel, _BUCKET_NUMEL if replicated else _PACK_NUMEL)
        index = self._open.get(key)
        full = index is not None and (replicated or not is_block) and self.specs[index].numel + _numel(param) > limit
        if index is None or (full and not self._same_module(index, param)):
            index = self._open[key] = len(self.specs)
            label = f"{'small' if kind.persistent else 'bucket'}#{index}" if replicated else path or "root"
            self.specs.append(UnitSpec(label, *kind))
        self.specs[index].add(self.names[param], param)
        self.index_of[param] = index

    def _same_module(self, index: int, param: nn.Parameter) -> bool:
        """Weight and bias of one module stay together when the PARAM is gathered for that module anyway."""
        if not self.plan.regular.param.sharded or self.specs[index].persistent:
            return False
        return self.names[param].rpartition(".")[0] == self.specs[index].names[-1].rpartition(".")[0]


# What is only reduced is cut so that reductions travel while the backward goes on, whatever the bucket may hold.
_BUCKET_NUMEL = 1 << 25
# Modules outside the repeated blocks are packed up to this many elements: large embeddings stay units of their own.
_PACK_NUMEL = 1_000_000


def _touches(
    model: nn.Module,
    index_of: dict[nn.Parameter, int],
    homes: dict[nn.Parameter, _Home],
    roots: dict[str, nn.Module],
) -> dict[nn.Module, list[int]]:
    touches: dict[nn.Module, list[int]] = {}
    for module in model.modules():
        units = [index_of[p] for p in module.parameters(recurse=False)]
        if units:
            touches[module] = list(dict.fromkeys(units))
    for path, block in roots.items():
        inside = [index_of[p] for p, home in homes.items() if home == (path, True)]
        touches[block] = list(dict.fromkeys([*inside, *touches.get(block, [])]))
    return touches
