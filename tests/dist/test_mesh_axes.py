"""Ranks that are cut into stages, data, sequence and tensor-parallel ranks: every group is made once, a module of
Megatron's kind trains under an mpu as one process does, and what all ranks of the job decide they decide alike.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.client.comm.groups import register_mpu, register_topology
from deepspeed.comm.mesh.groups import Mesh, build_mesh, destroy_mesh
from deepspeed.errors import DeepSpeedConfigError, DivergenceError
from deepspeed.utils import groups
from tests.harness.pool import PatientPool, RankPool
from tests.harness.training import ADAMW, STAGES

pytestmark = pytest.mark.timeout(120)

_WIDTH, _HIDDEN, _BATCH = 6, 8, 3
_PLAIN_TEXT = "tensor-parallel rank"


def _sum_over(group: Any) -> list[int]:
    """Which ranks a group really joins."""
    value = torch.tensor(float(2 ** dist.get_rank()))
    if group.pg is not None:
        dist.all_reduce(value, group=group.pg)
    return [r for r in range(dist.get_world_size()) if int(value) >> r & 1]


def _grid() -> tuple[list[list[int]], int, str, int]:
    mesh = build_mesh("gloo", pp=2, tp=2)
    assert mesh.control is not None and mesh.host is not None
    axes = (mesh.tp, mesh.zero, mesh.pp, mesh.data, mesh.job, mesh.control, mesh.host)
    joined = [_sum_over(axis) for axis in axes]
    assert all(sorted(axis.ranks) == ranks for axis, ranks in zip(axes, joined, strict=True))
    assert mesh.data is mesh.zero and mesh.groups == (mesh.zero,) and mesh.talk is mesh.host
    title = mesh.title(6)
    made = len(mesh.made)
    destroy_mesh(mesh)
    mesh = build_mesh("gloo", sp=2, inner_size=2)
    shard, outer = mesh.groups
    joined += [_sum_over(axis) for axis in (shard, outer, mesh.data, mesh.zero)]
    assert mesh.zero is mesh.job and mesh.pp.size == mesh.tp.size == 1
    assert mesh.title(3) == "rank 3 (sequence-parallel rank 1)"
    destroy_mesh(mesh)
    return joined, made, title, dist.get_rank()


def test_every_axis_has_one_group_of_the_ranks_of_its_own() -> None:
    with PatientPool(8) as pool:
        for joined, made, title, r in pool.run(_grid):
            stage, rest = r // 4 * 4, r % 4
            tp, dp, pp = [r // 2 * 2, r // 2 * 2 + 1], [stage + rest % 2, stage + rest % 2 + 2], [rest, rest + 4]
            everyone = list(range(8))
            assert joined[:7] == [tp, dp, pp, dp, everyone, dp, everyone]
            shard, data = list(range(stage, stage + 4)), [r % 2, r % 2 + 2, r % 2 + 4, r % 2 + 6]
            assert joined[7:] == [shard, [rest, rest + 4], data, everyone]
            assert made == 5  # zero (which is data too), tp, pp, control, host
            assert title == "rank 6 (pipeline stage 1, tensor-parallel rank 0)"


class _Copy(torch.autograd.Function):
    """The same forward; gradients are summed over the group."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Summed over the group; the same backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        value = value.contiguous()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class MegatronBlock(nn.Module):
    """A block as users of an mpu write it: one weight cut by rows, one by columns, biases and a norm on every rank."""

    def __init__(self, whole: "MegatronBlock | None" = None, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(_WIDTH)
        ways = 1 if group is None else dist.get_world_size(group)
        way = 0 if group is None else dist.get_rank(group)
        self.up = nn.Parameter(torch.randn(_HIDDEN, _WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(_HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(_WIDTH, _HIDDEN) / 3)
        self.after = nn.Parameter(torch.randn(_WIDTH) / 3)
        if whole is not None:
            self.load_state_dict(whole.state_dict())
            for name, dim in (("up", 0), ("bias", 0), ("down", 1)):
                part = nn.Parameter(getattr(whole, name).detach().chunk(ways, dim)[way].clone())
                part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, dim, 1
                setattr(self, name, part)

    def forward(self, hidden: Tensor) -> Tensor:
        normal = self.norm(hidden)
        if self.group is not None:
            normal = _Copy.apply(normal, self.group)
        out = torch.tanh(normal @ self.up.t() + self.bias) @ self.down.t()
        if self.group is not None:
            out = _Sum.apply(out, self.group)
        return hidden + out + self.after


class MegatronUnits:
    """An mpu: tensor-parallel ranks are neighbours, or as far apart as they can be."""

    def __init__(self, *, neighbours: bool) -> None:
        pairs, rank = [[0, 1], [2, 3]] if neighbours else [[0, 2], [1, 3]], dist.get_rank()
        self.tp = [dist.new_group(pair) for pair in pairs][next(i for i, pair in enumerate(pairs) if rank in pair)]
        others = list(zip(*pairs, strict=True))
        mine = next(i for i, pair in enumerate(others) if rank in pair)
        self.dp = [dist.new_group(list(pair)) for pair in others][mine]

    def get_model_parallel_group(self) -> Any:
        return self.tp

    def get_data_parallel_group(self) -> Any:
        return self.dp

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tp)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tp)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.dp)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.dp)

    def close(self) -> None:
        register_mpu(None)
        for group in (self.tp, self.dp):
            dist.destroy_process_group(group)


def _whole_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(MegatronBlock() for _ in range(3)))


def _batch(step: int, way: int) -> Tensor:
    return torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(10 * step + way))


def _loss(model: Any, step: int, way: int) -> Tensor:
    return model(_batch(step, way)).square().mean()


def _config(stage: int, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "param_persistence_threshold": 10, **changes.pop("zero", {})}
    base = {"train_micro_batch_size_per_gpu": _BATCH, "gradient_clipping": 0.3, "optimizer": ADAMW}
    return {**base, "zero_optimization": zero, **changes}


def _plain(steps: int) -> list[tuple[list[float], float, dict[str, Tensor]]]:
    """Losses of both data ways, the norm before clipping and the parameters after, of plain training."""
    model = _whole_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW["params"])
    records = []
    for step in range(steps):
        losses = [_loss(model, step, way) for way in (0, 1)]
        (sum(losses) / 2).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
        after = {n: p.detach().clone() for n, p in model.named_parameters()}
        records.append(([float(loss) for loss in losses], norm, after))
    return records


def _under_an_mpu(stage: int, neighbours: bool) -> float:  # noqa: FBT001 - called through the pool
    mpu = MegatronUnits(neighbours=neighbours)
    model = nn.Sequential(*(MegatronBlock(block, mpu.tp) for block in _whole_model()))
    engine = deepspeed.initialize(model=model, config=_config(stage), mpu=mpu)[0]
    assert engine.mpu is mpu
    mesh, worst = engine.mesh, 0.0
    assert (mesh.tp.size, mesh.data.size, mesh.job.size, engine.train_batch_size()) == (2, 2, 4, 2 * _BATCH)
    assert mesh.zero.pg is mpu.dp and mesh.tp.pg is mpu.tp  # the user's own groups
    for step, (losses, norm, after) in enumerate(_plain(3)):
        loss = _loss(engine, step, mpu.get_data_parallel_rank())
        engine.backward(loss)
        engine.step()
        worst = max(worst, abs(float(loss) - losses[mesh.data.index]), abs(engine.get_global_grad_norm() - norm) / norm)
        with deepspeed.zero.GatheredParameters(model.parameters()):
            for name, param in model.named_parameters():
                worst = max(worst, float((param.detach() - after[name]).abs().max()))
    engine.destroy()
    mpu.close()
    return worst


@pytest.mark.in_make_test("0-False", "3-True")
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_megatron_model_under_an_mpu_trains_as_one_process_does(
    pool4: RankPool, stage: int, neighbours: bool
) -> None:
    assert max(pool4.run(_under_an_mpu, stage, neighbours)) < 1e-6


def _overflow_and_getters() -> tuple[list[Any], list[Any]]:
    mpu = MegatronUnits(neighbours=True)
    model = nn.Sequential(*(MegatronBlock(block, mpu.tp) for block in _whole_model()))
    engine = deepspeed.initialize(model=model, config=_config(2), mpu=mpu)[0]
    engine.backward(_loss(engine, 0, mpu.get_data_parallel_rank()))
    if dist.get_rank() == 3:  # one tensor-parallel part of one parameter, on one data-parallel rank
        engine.module[1].up.grad = torch.full_like(engine.module[1].up, float("inf"))
    engine.step()
    verdict = [engine.skipped_steps, engine.was_step_applied(), engine.get_global_grad_norm()]
    asked = [groups.get_tensor_model_parallel_world_size(), groups._get_data_parallel_rank(), engine.mp_world_size]
    engine.destroy()
    mpu.close()
    return verdict, asked


def test_what_one_part_overflows_is_skipped_on_every_rank_of_the_job(pool4: RankPool) -> None:
    for rank, (verdict, asked) in enumerate(pool4.run(_overflow_and_getters)):
        assert verdict == [1, False, float("inf")] and asked == [2, rank // 2, 2]


def _sequence_ranks() -> tuple[float, list[int]]:
    """Both sequence ranks have half of each sample's loss: gradients are summed over them, averaged over data."""
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    plain = nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    register_topology(None)
    engine = deepspeed.initialize(model=model, config=_config(3, gradient_clipping=0.0), mesh_param=(2, 2))[0]
    way, part = engine.mesh.data.index, groups._get_sequence_parallel_rank()
    data = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    engine.backward(engine(data[way, 3 * part : 3 * part + 3]).square().sum())
    (plain(data.view(12, 4)).square().sum() / 2).backward()
    from deepspeed.utils import safe_get_full_grad

    worst = max(
        float((safe_get_full_grad(ours) - theirs.grad).abs().max())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    )
    sizes = [engine.train_batch_size(), engine.mesh.zero.size, groups._get_sequence_parallel_world_size()]
    engine.destroy()
    register_topology(None)
    return worst, sizes


def test_sequence_ranks_of_a_mesh_param_share_weights_and_sum_gradients(pool4: RankPool) -> None:
    for worst, sizes in pool4.run(_sequence_ranks):
        assert worst < 1e-5 and sizes == [2 * _BATCH, 4, 2]


class _Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, value: Tensor, *, skip: bool) -> Tensor:
        for block in list(self.blocks)[int(skip) :]:
            value = block(value)
        return value


def _diverging() -> str:
    mpu = MegatronUnits(neighbours=True)
    config = _config(3, zero={"divergence": "error", "param_persistence_threshold": 0})
    engine = deepspeed.initialize(model=_Choosing(), config=config, mpu=mpu)[0]
    assert isinstance(engine.mesh, Mesh)
    with pytest.raises(DivergenceError) as caught:
        engine(torch.ones(2, 4), skip=mpu.get_data_parallel_rank() == 1)
        raise AssertionError("no rank has noticed")
    engine.destroy()
    mpu.close()
    return str(caught.value)


def test_a_divergence_names_the_tensor_parallel_rank(pool4: RankPool) -> None:
    for rank, text in enumerate(pool4.run(_diverging)):
        assert f"rank {rank % 2} ({_PLAIN_TEXT} {rank % 2}) needs 'blocks.0'" in text
        assert f"rank {rank % 2 + 2} ({_PLAIN_TEXT} {rank % 2}) needs 'blocks.1'" in text


class _NoGrid(MegatronUnits):
    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD


def _no_grid() -> str:
    mpu = _NoGrid(neighbours=True)
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.initialize(model=nn.Linear(2, 2), config=_config(0), mpu=mpu)
    mpu.close()
    return str(caught.value)


def test_groups_of_an_mpu_that_are_no_grid_are_refused(pool4: RankPool) -> None:
    assert all("= 8) are no grid of the 4 ranks" in text for text in pool4.run(_no_grid))
