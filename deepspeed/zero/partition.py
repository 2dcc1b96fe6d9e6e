"""Which parameters form a unit, and what holds for one whatever is in it: who shares it, which moves are legal.

The unit of a sharded PARAM is the block the model itself repeats (one gather per transformer block); what lies outside
the blocks is packed module by module. A replicated PARAM needs no gathers, so its units are plain buckets for the
reduction.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.zero.param import is_composed, local_of
from deepspeed.zero.plan import Spread, Spreads, ZeroPlan

# What is only reduced is cut so that reductions travel while the backward goes on, whatever the bucket may hold.
_BUCKET_NUMEL = 1 << 25
# Modules outside the repeated blocks are packed up to this many elements: large embeddings stay units of their own.
_PACK_NUMEL = 1_000_000


@dataclass(frozen=True)
class UnitFacts:
    """Facts about a unit, whatever is in it: the ranks that share it, and how its gradient becomes a mean.

    ``divisor``: divides the sum over ranks; its factor ``early`` divides before the sum travels. ``wire``: dtype of
    gradients in collectives; None for the parameters' own. ``tie``: name of a parameter that several pipeline stages
    hold. It is a unit of its own, laid out alike on these stages, which are the last axis of its mesh.
    ``sanity_checks``: refuse every write in a read-only context, even one that changes nothing.
    """

    mesh: Mesh
    divisor: float = 1.0
    early: float = 1.0
    wire: torch.dtype | None = None
    tie: str = ""
    sanity_checks: bool = False

    @property
    def axes(self) -> tuple[AxisGroup, ...]:
        """Return the axes of the mesh within its ``zero`` group."""
        return self.mesh.groups[: len(self.mesh.groups) - bool(self.tie)]

    @cached_property
    def before(self) -> float:
        """Return the factor that a local gradient is multiplied by when it is packed."""
        return 1.0 / self.early

    @cached_property
    def after(self) -> float:
        """Return the factor that turns the reduced gradient into the mean."""
        return self.early / self.divisor

    def sharing(self, spread: Spreads) -> list[AxisGroup]:
        """Return the process groups over which a state with that ``spread`` is sharded."""
        axes = zip(spread, self.mesh.groups, strict=True)
        return [group for way, group in axes if way is Spread.SHARDED and group.size > 1]


def owned_range(numel: int, spread: Spreads, mesh: Mesh) -> tuple[int, int]:
    """Return this rank's flat [start, stop) under ``spread``, cut by the inner axis first, then by outer ones."""
    start = 0
    for way, axis in zip(spread, mesh.groups, strict=True):
        if way is Spread.SHARDED:
            numel //= axis.size
            start += numel * axis.index
    return start, start + numel


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares in float64, computed from norms in fp32 or wider."""
    wide = torch.promote_types(values.dtype, torch.float32)
    if values.device.type != "cpu":
        return torch.linalg.vector_norm(values, dtype=wide).double().square()
    # torch adds up in a few lanes there: one norm of 32 million elements would be wrong by 5e-4.
    norms = [torch.linalg.vector_norm(piece, dtype=wide) for piece in values.split(1 << 16)]
    return torch.stack(norms).double().square().sum()


@dataclass
class UnitSpec:
    """Unit before it has memory: parameters of one ``dtype``, which will rest in dtype ``rest``."""

    name: str
    trainable: bool
    persistent: bool
    dtype: torch.dtype
    rest: torch.dtype
    facts: UnitFacts | None = None
    params: list[nn.Parameter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    numel: int = 0
    largest: int = 0  # elements of its largest parameter
    first: int = 0  # number of units of the same kind before it

    def add(self, name: str, param: nn.Parameter, numel: int) -> None:
        self.params.append(param)
        self.names.append(name)
        self.numel += numel
        self.largest = max(self.largest, numel)

    def shards(self, plan: ZeroPlan) -> int:
        """Return the number of equal pieces that the unit's layout is cut into."""
        row = plan.row(trainable=self.trainable, persistent=self.persistent)
        states = [s for s in (row.param, row.grad, row.optim) if s is not None]
        axes = enumerate(self.facts.axes if self.facts is not None else ())
        return prod(axis.size for i, axis in axes if any(s.spread[i] is Spread.SHARDED for s in states))


@dataclass
class Partition:
    """Units, and the indices of those that each module needs in its forward.

    ``roots``: the modules by which a block is entered. They need all units of the modules inside them.
    """

    units: list[UnitSpec]
    touches: dict[nn.Module, list[int]]
    roots: set[nn.Module]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost repeated blocks, by name, and leaf modules. A block is one of several children of one class,
    with parameters, in one container. Blocks of a ``repeats_blocks`` module inside another block come after that block.
    """

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if getattr(module, "_z3_leaf", False):
            yield prefix, module
            return
        children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
        repeats = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        repeats = repeats or getattr(module, "repeats_blocks", False)
        counts = Counter(type(child) for _, child in children if repeats)
        for name, child in children:
            path = f"{prefix}.{name}" if prefix else name
            if counts[type(child)] >= 2:
                yield path, child
                for inner, part in child.named_modules(prefix=path):
                    if getattr(part, "repeats_blocks", False):
                        yield from walk(part, inner)
            else:
                yield from walk(child, path)

    return list(walk(model, ""))


def _entries(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost callable modules of ``block``: ``block`` itself, or those inside a mere container."""
    if type(block).forward is not nn.Module.forward:
        yield block
        return
    for child in block.children():
        yield from _entries(child)


def statistics_dtypes(model: nn.Module) -> dict[nn.Parameter, torch.dtype]:
    """Return the parameters beside running statistics (batch norm) with the dtype of these; torch wants both alike."""
    means = [(m, m._buffers.get("running_mean")) for m in model.modules()]
    return {p: mean.dtype for m, mean in means if mean is not None for p in m.parameters(recurse=False)}


def is_shared(param: nn.Parameter) -> bool:
    """Tell whether a living engine keeps or reads the frozen ``param``, so that other engines may only read it."""
    keeper = getattr(getattr(param, "_ds_unit", None), "keeper", None)
    return not param.requires_grad and (getattr(keeper, "client", lambda: None)() is not None or is_read(param))


def is_read(param: nn.Parameter) -> bool:
    """Tell whether a living engine reads ``param``, which another engine keeps or has kept."""
    return any(runtime.client() is not None for runtime in vars(param).get("_ds_readers", ()))


def _touches(
    model: nn.Module,
    index_of: Mapping[nn.Parameter, int],
    roots: Mapping[str, nn.Module],
    block_of: Mapping[nn.Module, str],
) -> tuple[dict[nn.Module, list[int]], set[nn.Module]]:
    """Return the units that a call of each module needs, and the modules by which blocks are entered."""
    touches: dict[nn.Module, list[int]] = {}
    for module in model.modules():
        units = [index_of[param] for param in module.parameters(recurse=False) if param in index_of]
        if units:
            touches[module] = list(dict.fromkeys(units))
    entries = {entry: path for path, block in roots.items() for entry in _entries(block)}
    for entry, path in entries.items():
        inside = (m for m in entry.modules() if block_of[m] == path)
        touches[entry] = list(dict.fromkeys(i for m in inside for i in touches.get(m, ())))
    return touches, set(entries)


def partition(
    model: nn.Module,
    plan: ZeroPlan,
    *,
    trainable: Iterable[nn.Parameter],
    rest_dtype: Callable[[str, nn.Parameter], torch.dtype] = lambda _, param: param.dtype,
    facts_of: Callable[[str, nn.Parameter], UnitFacts | None] = lambda *_: None,
    whole: bool = False,
) -> Partition:
    """Divide the parameters of ``model`` into units by ``plan``, except composed ones and those that another engine
    shares.

    ``trainable``: parameters with gradients and optimizer state. ``rest_dtype(name, param)``: dtype in which PARAM is
    stored. ``facts_of(name, param)``: facts of its unit; a unit holds parameters with equal facts. The first module
    with a tied parameter owns it; each module that touches a unit directly is listed for it, and so is its root.
    ``whole``: no trained parameter will be cut. Then every shard is as large as the largest, so others fill the rest.
    """
    numel_of = partial(_even_numel, facts_of=facts_of)
    names = {p: n for n, p in model.named_parameters() if not (is_composed(p) or is_shared(p))}
    trained, small = set(trainable), _persistent(names, plan, numel_of)
    roots = dict(find_blocks(model))
    block_of = {m: path for path, block in roots.items() for m in block.modules()}
    limits = [min(plan.pack_numel, _PACK_NUMEL), min(plan.pack_numel, _BUCKET_NUMEL)]
    specs: list[UnitSpec] = []
    latest: dict[object, UnitSpec] = {}  # the unit that further parameters of a kind join, unless it is full
    kinds = Counter[object]()
    for path, module in model.named_modules():
        block = block_of.get(module)
        for param in (p for p in module.parameters(recurse=False) if p in names):
            name, numel = names.pop(param), numel_of(param)
            kind = (param in trained, param in small, param.dtype, rest_dtype(name, param), facts_of(name, param))
            replicated = param in small or not plan.regular.param.sharded
            scope = (kind, None if replicated else (block,))
            spec, room = latest.get(scope), limits[replicated]
            if spec is not None and whole and spec.trainable:
                room = max(room, spec.shards(plan) * max(spec.largest, numel))
            if spec is None or not (
                (block is not None and not replicated)
                or spec.numel + numel <= room
                or (not replicated and name.rpartition(".")[0] == spec.names[-1].rpartition(".")[0])
            ):
                label = f"{'small' if param in small else 'bucket'}#{len(specs)}"
                owner = path if block is None else block
                spec = UnitSpec(label if replicated else owner or "root", *kind, first=kinds[kind])
                specs.append(spec)
                latest[scope], kinds[kind] = spec, spec.first + 1
            spec.add(name, param, numel)
    index_of = {param: index for index, spec in enumerate(specs) for param in spec.params}
    return Partition(specs, *_touches(model, index_of, roots, block_of))


def _even_numel(param: nn.Parameter, facts_of: Callable[[str, nn.Parameter], UnitFacts | None]) -> int:
    """Return the elements per rank as if all ranks' parts were equal, so that every rank makes equal units."""
    place, facts = getattr(param, "tp_place", None), facts_of("", param)
    ways = facts.mesh.tp.size if facts is not None else 1
    return -(-prod(place.shape) * place.copies // ways) if place else prod(local_of(param).shape)


def _persistent(
    params: Iterable[nn.Parameter], plan: ZeroPlan, numel_of: Callable[[nn.Parameter], int]
) -> set[nn.Parameter]:
    """Return the small parameters that stay whole: each up to one threshold, their sum up to the model's."""
    chosen: set[nn.Parameter] = set()
    total = 0
    for param in params if plan.regular.param.sharded else ():
        numel = numel_of(param)
        if numel <= plan.persistence_numel and total + numel <= plan.model_persistence_numel:
            chosen.add(param)
            total += numel
    return chosen
