"""A unit packs the local tensors of DTensors: values, the released face, gradients, the norm. (Tensor parallelism
stands on this.)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.comm.mesh.topology import dense_topology
from deepspeed.errors import ReleasedParameterError
from deepspeed.zero.layout import FlatLayout, Granularity, Segment, build_layout
from deepspeed.zero.module.attributes import mark_zero_parameter
from deepspeed.zero.param import ReleasedFace, local_of, take_gradient
from deepspeed.zero.partition import UnitFacts, square_sum
from deepspeed.zero.plan import Spread, StateKind, StatePlan, UnitPlan
from deepspeed.zero.unit import Unit
from tests.harness.pool import RankPool
from tests.harness.training import outcome

S = StatePlan((Spread.SHARDED,))


def _grid() -> tuple[Mesh, object]:
    """Two data-parallel ways of two tensor-parallel ranks, and the device mesh of the latter."""
    topology, rank = dense_topology((0, 1, 2, 3), tp=2), dist.get_rank()
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    axis = topology.axis(rank, "dp")
    group = AxisGroup(device_mesh.get_group("dp"), axis.size, axis.index, axis.ranks, "gloo")
    job = AxisGroup(dist.group.WORLD, 4, rank, topology.ranks, "gloo")
    return Mesh((group,), job, group, group, None), device_mesh["tp"]


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 5, generator=generator), torch.randn(5, generator=generator)


def _unit() -> tuple[Unit, list[nn.Parameter], object]:
    mesh, tp = _grid()
    weight, norm = _weights()
    params = [
        nn.Parameter(distribute_tensor(weight.clone(), tp, [Shard(0)])),
        nn.Parameter(distribute_tensor(norm.clone(), tp, [Replicate()])),
    ]
    layout = build_layout([("weight", (3, 5), 0), ("norm", (5,), 0)], 2, Granularity.ELEMENT)
    # what every tensor-parallel rank holds counts once in the job's norm
    segments = tuple(
        Segment(s.name, s.shape, s.offset, s.group, 0.5 if s.name == "norm" else 1.0) for s in layout.segments
    )
    layout = FlatLayout(segments, layout.numel, layout.shards)
    unit = Unit(
        0, "block", params, layout=layout, plan=UnitPlan(S, S, S), facts=UnitFacts(mesh, divisor=2.0, early=2.0)
    )
    values = torch.zeros(layout.numel)
    for param, segment in zip(params, segments, strict=True):
        Unit.view(values, segment).copy_(local_of(param).detach())
    unit.adopt(values, torch.float32, keep_master=True)
    for position, param in enumerate(params):
        mark_zero_parameter(param, unit, position, name=segments[position].name)
    return unit, params, tp


def _faces() -> None:
    unit, params, _ = _unit()
    weight, norm = _weights()
    for _ in range(2):
        assert all(isinstance(p, ReleasedFace) for p in params)
        assert isinstance(params[0], DTensor) and tuple(params[0].shape) == (6, 5)
        for read in (lambda: params[0].full_tensor(), lambda: params[0] + 1, lambda: params[0].detach() * 2):
            said = outcome(read)
            assert ReleasedParameterError.__name__ in said and "weight" in said, said
        unit.fetch_whole()
        assert type(params[0]) is DTensor
        assert torch.equal(params[0].full_tensor(), weight) and torch.equal(params[1].to_local(), norm)
        assert local_of(params[0]).untyped_storage().data_ptr() == unit.buffer.full.untyped_storage().data_ptr()
        unit.release()


def test_a_dtensor_is_released_and_gathered_as_any_parameter(pool4: RankPool) -> None:
    pool4.run(_faces)


def _gradients() -> tuple[float, float]:
    unit, params, tp = _unit()
    unit.fetch_whole()
    inputs = distribute_tensor(torch.arange(10.0).view(2, 5), tp, [Replicate()])
    hidden = (inputs * params[1]) @ params[0].t()
    hidden.redistribute(placements=[Replicate()]).to_local().square().sum().backward()
    reference = [w.requires_grad_() for w in _weights()]
    ((torch.arange(10.0).view(2, 5) * reference[1]) @ reference[0].t()).square().sum().backward()
    assert any(isinstance(p, Partial) for p in params[1].grad.placements), "it comes as partial sums"
    partial_sum = unit.window.open(torch.float32, unit.device)
    for position, (param, segment) in enumerate(zip(params, unit.layout.segments, strict=True)):
        Unit.view(partial_sum, segment).copy_(take_gradient(param))
        unit.window.note_packed(position)
    mine = tp.get_local_rank()
    expected = [reference[0].grad[3 * mine : 3 * mine + 3], reference[1].grad]
    wrong = max(
        float((Unit.view(partial_sum, s) - e).abs().max() / e.abs().max())
        for s, e in zip(unit.layout.segments, expected, strict=True)
    )
    # both data-parallel ranks saw the same batch: the rest gradient is a cut of this sum
    start, stop = unit.range_of(StateKind.GRAD)
    unit.open_grad(torch.float32).put(unit.window.take(torch.float32, unit.device)[start:stop])
    square = unit.gradient_square()
    dist.all_reduce(square)
    true = sum(square_sum(r.grad) for r in reference)
    return wrong, float((square - true).abs() / true)


def test_partial_gradients_are_summed_and_replicated_ones_count_once_in_the_norm(pool4: RankPool) -> None:
    for wrong, norm in pool4.run(_gradients):
        assert wrong < 1e-6 and norm < 1e-6
