"""Ranks that hold different parts of one model, made by hand: tensor-parallel slices, pipeline stages, and ZeRO within
each.

A layout lists groups of ranks; the ranks of a group share the same local tensors, each of which is a whole global
tensor or a rectangular region of it. Every value follows from the state and the name, so that any rank of any layout
knows what it must hold.
"""

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.checkpoint.load.reader import open_everywhere
from deepspeed.checkpoint.load.restore import fill_gradients, load_into
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.save import content as contents
from deepspeed.checkpoint.save.collect import States
from deepspeed.checkpoint.save.content import content_of
from deepspeed.checkpoint.save.writer import SaveOrder, Saver
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.zero.layout import Granularity, build_layout
from deepspeed.zero.optim_view import OptimView, build_views
from deepspeed.zero.partition import UnitFacts
from deepspeed.zero.plan import Spread, StateKind, StatePlan, UnitPlan
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.policy import UpdatePolicy

Place = tuple[tuple[int, ...], tuple[int, ...]] | None  # start and shape; None: the whole
Group = tuple[tuple[int, ...], dict[str, Place]]
Layout = list[Group]

SHAPES = {"emb": (7, 6), "col": (6, 5), "row": (5, 9), "deep": (3, 4, 5), "norm": (6,), "empty": (0, 4)}
FIRST, LAST = ("emb", "col", "norm"), ("row", "deep", "norm", "empty")  # of two stages, which share "norm"


def sliced(dims: dict[str, int], cut: dict[str, int], way: int) -> dict[str, Place]:
    """One of two tensor-parallel parts: each tensor in ``dims`` is cut along that dimension, before index ``cut``."""
    found: dict[str, Place] = dict.fromkeys(SHAPES)
    for name, dim in dims.items():
        shape, at = SHAPES[name], cut[name]
        start = tuple(at * way if d == dim else 0 for d in range(len(shape)))
        found[name] = (start, tuple((shape[d] - at if way else at) if d == dim else n for d, n in enumerate(shape)))
    return found


ROWS = {"emb": 0, "col": 0, "row": 0, "deep": 0}
COLUMNS = {"emb": 1, "col": 1, "row": 1, "deep": 1}
UNEVEN = {"emb": 2, "col": 3, "row": 4, "deep": 1}
WHOLE: dict[str, Place] = dict.fromkeys(SHAPES)
LAYOUTS: dict[str, Layout] = {
    "whole x 1": [((0,), WHOLE)],
    "whole x 2": [((0, 1), WHOLE)],
    "whole x 3": [((0, 1, 2), WHOLE)],
    "rows x 2": [((0, 2), sliced(ROWS, UNEVEN, 0)), ((1, 3), sliced(ROWS, UNEVEN, 1))],
    "columns x 2": [((0, 1), sliced(COLUMNS, UNEVEN, 0)), ((2, 3), sliced(COLUMNS, UNEVEN, 1))],
    "rows": [((0,), sliced(ROWS, {**UNEVEN, "emb": 5}, 0)), ((1,), sliced(ROWS, {**UNEVEN, "emb": 5}, 1))],
    "stages x 2": [((0, 1), dict.fromkeys(FIRST)), ((2, 3), dict.fromkeys(LAST))],
    "stages": [((0,), dict.fromkeys(FIRST)), ((1,), dict.fromkeys(LAST))],
    "stages x columns": [
        ((way + 2 * stage,), {n: p for n, p in sliced(COLUMNS, UNEVEN, way).items() if n in names})
        for stage, names in enumerate((FIRST, LAST))
        for way in (0, 1)
    ],
}


def world_of(layout: str) -> int:
    return sum(len(ranks) for ranks, _ in LAYOUTS[layout])


def value(state: str, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """The global tensor."""
    seed = zlib.crc32(f"{state}/{name}".encode())
    return torch.randn(SHAPES[name] if shape is None else shape, generator=torch.Generator().manual_seed(seed))


def local(whole: Tensor, place: Place) -> Tensor:
    """What a rank holds of it, flat."""
    if place is not None:
        whole = whole[tuple(slice(s, s + n) for s, n in zip(*place, strict=True))]
    return whole.reshape(-1)


def mesh_of(groups: Layout) -> Mesh:
    """Collective over the world."""
    rank, made = dist.get_rank(), [dist.new_group(list(ranks), backend="gloo") for ranks, _ in groups]
    index = next(i for i, (ranks, _) in enumerate(groups) if rank in ranks)
    ranks = groups[index][0]
    job = AxisGroup(dist.group.WORLD, dist.get_world_size(), rank, tuple(range(dist.get_world_size())), "gloo")
    zero = AxisGroup(made[index], len(ranks), ranks.index(rank), ranks, "gloo")
    return Mesh((zero,), job, zero, zero, None)


def stages_of(places: dict[str, Place]) -> list[int]:
    return [stage for stage, name in enumerate(("emb", "row")) if name in places]


class Extra(nn.Module):
    """A module with a state that is no tensor of the model."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage, self.told = stage, -1

    def get_extra_state(self) -> Any:
        return {"of": torch.tensor(self.stage)}

    def set_extra_state(self, state: Any) -> None:
        self.told = int(state["of"])


def module_of(places: dict[str, Place]) -> nn.Module:
    """A module with the local parameters, a buffer that all ranks have, and of each stage it has a buffer and extra
    state.
    """
    module = nn.Module()
    for name, place in places.items():
        shape = SHAPES[name] if place is None else place[1]
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    module.register_buffer("everywhere", torch.full((3,), 5.0))
    for stage in stages_of(places):
        module.register_buffer(f"of_stage_{stage}", torch.full((2,), float(stage)))
        module.add_module(f"extra_{stage}", Extra(stage))
    return module


class Rank:
    """What one rank of a layout holds: one unit, Adam's views over it, and an open accumulation window."""

    def __init__(self, groups: Layout, granularity: Granularity = Granularity.ELEMENT) -> None:
        self.mesh = mesh_of(groups)
        self.index = next(i for i, (ranks, _) in enumerate(groups) if self.mesh.job.index in ranks)
        self.places = groups[self.index][1]
        self.module = module_of(self.places)
        params = dict(self.module.named_parameters())
        layout = build_layout([(n, tuple(p.shape), 0) for n, p in params.items()], self.mesh.zero.size, granularity)
        cut = {n: p for n, p in self.places.items() if p is not None}
        segments = [
            replace(s, global_start=cut[s.name][0], global_shape=SHAPES[s.name]) if s.name in cut else s
            for s in layout.segments
        ]
        layout = replace(layout, segments=tuple(segments))
        rest = StatePlan((Spread.SHARDED,))
        self.unit = Unit(
            0,
            "u",
            [params[s.name] for s in segments],
            layout=layout,
            plan=UnitPlan(rest, rest, rest),
            facts=UnitFacts(self.mesh),
        )
        self.unit.adopt(torch.zeros(layout.numel), torch.bfloat16, keep_master=True)
        self.views = build_views([self.unit], 1)
        self.optimizer = torch.optim.Adam([v.param for v in self.views] or [torch.zeros(1)])

    @property
    def states(self) -> States:
        names = [[s.name for s in self.unit.layout.segments]]
        return States(self.module, self.mesh, [self.unit], self.views, self.optimizer, names, UpdatePolicy(Any))

    def flat(self, state: str) -> Tensor:
        """What the flat buffer of the unit must hold of a state."""
        found = torch.zeros(self.unit.layout.numel)
        for segment in self.unit.layout.segments:
            found[segment.offset : segment.stop] = local(value(state, segment.name), self.places[segment.name])
        return found

    def fill(self) -> None:
        """Every state with its values."""
        start, stop = self.unit.range_of(StateKind.OPTIM)
        assert self.unit.master is not None
        self.unit.master.copy_(self.flat("master")[start:stop])
        for view in self.views:
            slots = {
                s: self.flat(f"optim.{s}")[view.start : view.stop].view(view.param.shape)
                for s in ("exp_avg", "exp_avg_sq")
            }
            self.optimizer.state[view.param] = {"step": torch.tensor(3.0), **slots}
        self.unit.open_grad(torch.float32).tensor.copy_(self.flat("grad")[start:stop])
        self.unit.window.filled = True
        self.unit.window.partial = self.flat(f"grad_partial@{self.mesh.zero.index}")
        self.unit.window.fired = set(range(len(self.unit.layout.segments)))

    def factored(self, view: OptimView) -> Tensor | None:
        """What an optimizer with factored moments keeps of a matrix: one number a row of the local tensor."""
        shape = tuple(view.param.shape)
        return value(f"rows of {self.index}", view.name, shape[:1]) if len(shape) == 2 and prod(shape) else None

    def wrong(self, *, window: int | None = None) -> list[str]:
        """What it does not hold that it should. ``window``: how many partial sums were saved; None: no window."""
        found = []
        start, stop = self.unit.range_of(StateKind.OPTIM)
        assert self.unit.master is not None
        held = {"master": (self.unit.master, start, stop)}
        for view in self.views:
            held |= {
                f"optim.{s}": (self.optimizer.state[view.param][s].reshape(-1), view.start, view.stop)
                for s in ("exp_avg", "exp_avg_sq")
            }
            found += [name for name, (got, lo, hi) in held.items() if not torch.equal(got, self.flat(name)[lo:hi])]
            if float(self.optimizer.state[view.param]["step"]) != 3.0:
                found.append("step")
        if window is not None and (
            self.unit.grad is None or not torch.equal(self.unit.grad, self.flat("grad")[start:stop])
        ):
            found.append("grad")
        if window is not None:
            partial = self.unit.window.partial
            total = torch.zeros(self.unit.layout.numel) if partial is None else partial.clone()
            dist.all_reduce(total, group=self.mesh.zero.pg)
            wanted = torch.stack([self.flat(f"grad_partial@{i}") for i in range(window)]).sum(0)
            if not torch.allclose(total, wanted, atol=1e-6):
                found.append("grad_partial")
        extras = [m for m in self.module.children() if isinstance(m, Extra)]
        return found + [f"extra state {m.stage}" for m in extras if m.told != m.stage]

    def save(self, folder: str, *, ways: dict[str, int] | None = None) -> None:
        """As ``save_checkpoint`` does; random generators and the time, which differ from run to run, are left out."""
        given: dict[str, Any] = dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "loss_scaler", "data"))
        given |= {"tag": "t", "engine": {"global_steps": 3}, "config": {}, "client_state": {"mine": 1}}
        given["world"] = {"compute_dtype": "bf16", **(ways or {})}
        with patch.object(contents, "capture_rng", dict):
            content = content_of(self.states, lambda: given, exclude_frozen=False)
        Saver(self.mesh).save(SaveOrder(Path(folder), "t"), content)

    def load(self, folder: str, *, window: bool = False, **rules: Any) -> Source:
        """As ``load_checkpoint`` does."""
        source = open_everywhere(self.mesh, Path(folder), "t", allow_pickle=False)
        assert source is not None
        runtime: Any = SimpleNamespace(units=[self.unit], publish=lambda units: None, update=self.states.update)
        try:
            loaded = load_into(self.states, runtime, source, **rules)
            if window:
                fill_gradients(self.states, loaded, self, factor=1.0)  # type: ignore[arg-type]
            return loaded
        finally:
            source.close()

    # What is used of ``Gradients``.
    def refill(self, unit: Unit) -> None:
        unit.open_grad(torch.float32).tensor.zero_()
        unit.window.filled = True


@contextlib.contextmanager
def rank_of(groups: Layout, granularity: Granularity = Granularity.ELEMENT) -> Iterator[Rank]:
    rank = Rank(groups, granularity)
    try:
        yield rank
    finally:
        assert rank.mesh.zero.pg is not None
        dist.destroy_process_group(rank.mesh.zero.pg)
