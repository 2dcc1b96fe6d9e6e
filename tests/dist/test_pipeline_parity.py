"""A model cut into pipeline stages trains as in one process: losses, norms, clipping and three steps, under every
schedule, ZeRO level and place of the states.
"""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import PipelineError
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from tests.harness import pipes
from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(120)
TOLERANCE = 1e-6
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))
# schedule, chunks per rank, micro-batches: each schedule once, and numbers of micro-batches that fill no pipeline
QUICK = [("gpipe", 1, 4, 0), ("1f1b", 1, 1, 1), ("1f1b", 1, 3, 3), ("interleaved", 2, 4, 3), ("interleaved", 2, 3, 1)]
QUICK += [("zero_bubble", 1, 4, 3), ("zero_bubble", 2, 3, 2), ("breadth_first", 2, 3, 3), ("zbv", 2, 4, 0)]
QUICK += [("dualpipev", 2, 4, 2)]


@pytest.mark.in_make_test(
    "gpipe-1-4-0",
    "1f1b-1-3-3",
    "interleaved-2-4-3",
    "zero_bubble-2-3-2",
    "breadth_first-2-3-3",
    "zbv-2-4-0",
    "dualpipev-2-4-2",
)
@pytest.mark.parametrize(("schedule", "chunks", "micros", "level"), QUICK)
def test_two_stages(pool2: RankPool, schedule: str, chunks: int, micros: int, level: int) -> None:
    assert max(pool2.run(pipes.case, 2, level, schedule, micros, chunks)) <= TOLERANCE


@pytest.mark.in_make_test("4-eager_1f1b-1-8-2", "2-zero_bubble-1-4-3", "2-interleaved-2-4-2", "4-1f1b-1-3-1")
@pytest.mark.parametrize(
    ("stages", "schedule", "chunks", "micros", "level"),
    [
        (4, "eager_1f1b", 1, 8, 2),
        (2, "zero_bubble", 1, 4, 3),
        (2, "interleaved", 2, 4, 2),
        (4, "1f1b", 1, 3, 1),
        (4, "zero_bubble", 2, 8, 3),
    ],
)
def test_four_ranks(pool4: RankPool, stages: int, schedule: str, chunks: int, micros: int, level: int) -> None:
    assert max(pool4.run(pipes.case, stages, level, schedule, micros, chunks)) <= TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize(("level", "schedule", "stages"), [*product(range(4), SCHEDULES, (2, 4))])
@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_matrix(pool4: RankPool, level: int, schedule: tuple[str, int], stages: int, *, tied: bool) -> None:
    name, chunks = schedule
    for micros in (1, 4, 6):
        assert max(pool4.run(_case, stages, level, name, micros, chunks, tied)) <= TOLERANCE


def _case(stages: int, level: int, name: str, micros: int, chunks: int, tied: bool) -> float:  # noqa: FBT001
    return pipes.case(stages, level, name, micros, chunks, tied=tied)


def _offloaded(schedule: str, chunks: int, place: str, folder: str) -> float:
    block = {"device": place, "nvme_path": folder}
    zero = {"stage": 3, "offload_param": block, "offload_optimizer": block}
    return pipes.case(2, 3, schedule, 4, chunks, zero=zero)


@pytest.mark.parametrize(("schedule", "chunks", "place"), [("zero_bubble", 1, "nvme"), ("interleaved", 2, "cpu")])
def test_states_may_rest_elsewhere(pool4: RankPool, tmp_path: Any, schedule: str, chunks: int, place: str) -> None:
    assert max(pool4.run(_offloaded, schedule, chunks, place, str(tmp_path))) <= TOLERANCE


# -- what travels between stages ------------------------------------------------------------------------------------


class Masked(nn.Module):
    """(vectors, mask, None, a second stream without gradient) through a block."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = pipes.Block(seed)

    def forward(self, value: Any) -> Any:
        x, mask, nothing, count = value
        assert nothing is None and mask.dtype is torch.bool and count.dtype is torch.int64
        y = torch.where(mask.unsqueeze(-1), self.block(x), x)
        return y, mask, None, count + 1


class Begin(pipes.Embed):
    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens), tokens % 2 == 0, None, torch.zeros(1, dtype=torch.int64)


class End(pipes.Head):
    def forward(self, value: Any) -> Tensor:
        x, _, _, count = value
        assert int(count) == 4
        return super().forward(x)


def _tuples(schedule: str, chunks: int) -> float:
    specs = [LayerSpec(Begin, 1), *(LayerSpec(Masked, 10 + i) for i in range(4)), LayerSpec(End, 2)]
    pipeline = {"schedule": schedule, "chunks_per_stage": chunks}
    run = pipes.pipe_run(specs, pipes.config(3, 4, pipeline=pipeline), stages=2)
    return pipes.worst(run, pipes.plain_run(specs, micros=4, data_ranks=1, steps=3))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zero_bubble", 2)])
def test_tuples_masks_and_none_travel(pool2: RankPool, schedule: str, chunks: int) -> None:
    assert max(pool2.run(_tuples, schedule, chunks)) <= TOLERANCE


def _lengths(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    return pipes.micro_batch(step, micro, rank, length=3 + (step + 2 * micro) % 4)


def _shapes(schedule: str) -> float:
    pipeline = {"schedule": schedule}
    run = pipes.pipe_run(pipes.layers(4), pipes.config(2, 4, pipeline=pipeline), stages=2, batch=_lengths)
    return pipes.worst(run, pipes.plain_run(pipes.layers(4), micros=4, data_ranks=1, steps=3, batch=_lengths))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_shapes_change_between_batches_and_micro_batches(pool2: RankPool, schedule: str) -> None:
    assert max(pool2.run(_shapes, schedule)) <= TOLERANCE


class Drops(nn.Module):
    """Leaves out vectors by their values, so that shapes do not follow from those of the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : 2 + int(x[0, 0, 0] > 0)]


def _sum_of(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def _dropping(dynamic: bool) -> float | str:  # noqa: FBT001
    specs = [LayerSpec(pipes.Embed, 1), Drops(), *(LayerSpec(pipes.Block, i) for i in range(4))]
    batch = pipes.micro_batch
    try:
        run = pipes.pipe_run(specs, pipes.config(1, 4), stages=2, loss_fn=_sum_of, dynamic_shape=dynamic)
    except RuntimeError as error:
        return str(error)
    plain = pipes.plain_run(specs, micros=4, data_ranks=1, steps=3, loss_fn=_sum_of, batch=batch)
    return pipes.worst(run, plain)


def test_shapes_that_follow_from_values_are_asked_for(pool2: RankPool) -> None:
    assert max(pool2.run(_dropping, True)) <= TOLERANCE
    for text in pool2.run(_dropping, False):
        assert "rank 0 (pipeline stage 0)" in text and "dynamic_shape=True" in text


# -- layers ---------------------------------------------------------------------------------------------------------


def _recomputing(schedule: str, chunks: int) -> float:
    pipeline = {"schedule": schedule, "chunks_per_stage": chunks, "activation_checkpoint_interval": 2}
    specs = pipes.layers(6)
    run = pipes.pipe_run(specs, pipes.config(3, 4, pipeline=pipeline), stages=2)
    return pipes.worst(run, pipes.plain_run(specs, micros=4, data_ranks=1, steps=3))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zero_bubble", 1)])
def test_recomputed_layers(pool2: RankPool, schedule: str, chunks: int) -> None:
    assert max(pool2.run(_recomputing, schedule, chunks)) <= TOLERANCE


def _modules_and_callables() -> tuple[float, list[str]]:
    def built() -> list[Any]:
        return [pipes.Embed(1), pipes.Block(3), torch.tanh, pipes.Block(4), lambda x: x * 2, pipes.Head(2)]

    engine = pipes.start(
        PipelineModule(built(), num_stages=2, loss_fn=pipes.cross_entropy, partition_method="uniform"),
        pipes.config(1, 2),
    )
    names = sorted(name for name, _ in engine.module.named_parameters())
    engine.destroy()
    run = pipes.pipe_run(built(), pipes.config(1, 2), stages=2, partition_method="uniform")
    return pipes.worst(run, pipes.plain_run(built(), micros=2, data_ranks=1, steps=3)), names


def test_layers_are_built_on_their_stage_only_and_named_by_their_place(pool2: RankPool) -> None:
    errors, names = zip(*pool2.run(_modules_and_callables), strict=True)
    assert max(errors) <= TOLERANCE
    assert {name.split(".")[0] for name in names[0]} == {"0", "1"} and {n.split(".")[0] for n in names[1]} == {"3", "5"}


def _lower_precision(dtype: str) -> tuple[list[float], list[float]]:
    losses = []
    for stages in (2, 1):
        block = {"enabled": True} | ({"loss_scale": 128.0} if dtype == "fp16" else {})
        changes = {dtype: block, "gradient_clipping": 1.0}
        micros = 2 * dist.get_world_size() // (dist.get_world_size() // stages)
        run = pipes.pipe_run(pipes.layers(4), pipes.config(3, micros if stages == 2 else 2, **changes), stages=stages,
            batch=pipes.micro_batch if stages == 2 else _dealt)  # fmt: skip
        losses.append(run[0])
    return losses[0], losses[1]


def _dealt(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Of the four micro-batches of the pipeline, two for each of two data-parallel ranks."""
    return pipes.micro_batch(step, 2 * rank + micro, 0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_train_as_without_a_pipeline(pool2: RankPool, dtype: str) -> None:
    for piped, plain in pool2.run(_lower_precision, dtype):
        assert piped == pytest.approx(plain, rel=2e-2) and piped[0] != piped[-1]


def _v_module() -> tuple[str, list[int], float, bool]:
    engine = pipes.start(
        DualPipeVModule(pipes.layers(6), num_stages=2, loss_fn=pipes.cross_entropy), pipes.config(1, 4)
    )
    loss = float(engine.train_batch(pipes.batches(0, micros=4)))
    name, homes, known = engine.module.schedule, list(engine.module.homes), type(engine) is deepspeed.DualPipeVEngine
    engine.destroy()
    return name, homes, loss, known


def test_a_v_shaped_module_runs_dualpipev(pool2: RankPool) -> None:
    (name, homes, first, known), (_, _, second, _) = pool2.run(_v_module)
    assert known and name == "dualpipev" and homes == [0, 1, 1, 0] and first == second


def _weight_gradients_apart() -> tuple[int, float]:
    """Zero-bubble schedules write weight gradients without hooks: what the engine has taken over of them."""
    engine = pipes.start(
        PipelineModule(pipes.layers(4), num_stages=2, loss_fn=pipes.cross_entropy),
        pipes.config(2, 3, pipeline={"schedule": "zero_bubble"}),
    )
    taken = []
    pack = engine.runtime.gradients.pack
    engine.runtime.gradients.pack = lambda unit, position: (taken.append(position), pack(unit, position))
    engine.train_batch(pipes.batches(0, micros=3))
    left = [p for p in engine.module.parameters() if p.grad is not None]
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return len(taken) * (not left), norm


def test_gradients_written_by_hand_are_collected(pool2: RankPool) -> None:
    expected = pipes.plain_run(pipes.layers(4), micros=3, data_ranks=1, steps=1)[1][0]
    for taken, norm in pool2.run(_weight_gradients_apart):
        assert taken >= 12 and norm == pytest.approx(expected, rel=1e-5)  # further ones are added in their place


def _sums_in_place(fails_at: int) -> tuple[bool, bool, list[float]]:
    """Two batches, in front of the second one that fails at that micro-batch, if not 0: whether each gradient was taken
    over once a batch (where none fails into the same memory); whether none is left; norms.
    """
    calls: list[int] = []

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        if fails_at and len(calls) == 3 + fails_at:
            raise ValueError("odd labels")
        return pipes.cross_entropy(output, labels)

    module = PipelineModule(pipes.layers(4, tied=False), num_stages=2, loss_fn=loss_fn)
    engine = pipes.start(module, pipes.config(1, 3))
    gradients, params, taken, places, norms = engine.runtime.gradients, list(module.parameters()), [], [], []
    pack = gradients.pack
    gradients.pack = lambda unit, position: (taken.append(position), pack(unit, position))
    for run, step in enumerate((0, 1, 1) if fails_at else (0, 1)):
        taken.clear()
        data = iter([pipes.micro_batch(step, micro, 0) for micro in range(3)])
        if fails_at and run == 1:
            with pytest.raises(PipelineError, match="odd labels"):
                engine.train_batch(data)
            continue
        engine.train_batch(data)
        norms.append(engine.get_global_grad_norm())
        memory = [unit.window._spare.data_ptr() for unit in engine.runtime.units if not fails_at]
        places.append([*memory, len(taken)])
    left = any(p.grad is not None for p in params)
    engine.destroy()
    return places[0] == places[1] and places[0][-1] == len(params), not left, norms


@pytest.mark.parametrize("fails_at", [0, 2])
def test_further_gradients_of_a_batch_are_added_where_the_first_was_put(pool2: RankPool, fails_at: int) -> None:
    """Without a call of the engine's for each; nothing stays of a batch that fails in the middle."""
    expected = pipes.plain_run(pipes.layers(4, tied=False), micros=3, data_ranks=1, steps=2)[1]
    for once, clean, norms in pool2.run(_sums_in_place, fails_at):
        assert once and clean and norms == pytest.approx(expected, rel=1e-5)
