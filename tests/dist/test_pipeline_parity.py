"""A model cut into pipeline stages trains as in one process: losses, norms, clipping and three steps, under every
schedule, ZeRO level and place of the states.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import PipelineError
from deepspeed.pipe import DualPipeVModule, LayerSpec
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
        specs = pipes.layers(tied=tied)
        assert max(pool4.run(pipes.case, stages, level, name, micros, chunks, specs=specs)) <= TOLERANCE


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
    return pipes.case(2, 3, schedule, 4, chunks, specs=specs)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zero_bubble", 2)])
def test_tuples_masks_and_none_travel(pool2: RankPool, schedule: str, chunks: int) -> None:
    assert max(pool2.run(_tuples, schedule, chunks)) <= TOLERANCE


def _lengths(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    return pipes.micro_batch(step, micro, rank, length=3 + (step + 2 * micro) % 4)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_shapes_change_between_batches_and_micro_batches(pool2: RankPool, schedule: str) -> None:
    assert max(pool2.run(pipes.case, 2, 2, schedule, batch=_lengths)) <= TOLERANCE


class Drops(nn.Module):
    """Leaves out vectors by their values, so that shapes do not follow from those of the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : 2 + int(x[0, 0, 0] > 0)]


def _sum_of(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def _dropping(dynamic: bool) -> float | str:  # noqa: FBT001
    specs = [LayerSpec(pipes.Embed, 1), Drops(), *(LayerSpec(pipes.Block, i) for i in range(4))]
    try:
        return pipes.case(2, 1, "1f1b", specs=specs, loss_fn=_sum_of, module={"dynamic_shape": dynamic})
    except RuntimeError as error:
        return str(error)


def test_shapes_that_follow_from_values_are_asked_for(pool2: RankPool) -> None:
    assert max(pool2.run(_dropping, True)) <= TOLERANCE
    for text in pool2.run(_dropping, False):
        assert "rank 0 (pipeline stage 0)" in text and "dynamic_shape=True" in text


# -- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_recomputed_layers(pool2: RankPool, schedule: str) -> None:
    pipeline = {"activation_checkpoint_interval": 2}
    assert max(pool2.run(pipes.case, 2, 3, schedule, pipeline=pipeline)) <= TOLERANCE


def _in_place(schedule: str, chunks: int) -> float:
    ends, relu = (LayerSpec(pipes.Embed, 1), LayerSpec(pipes.Head, 2)), LayerSpec(nn.ReLU, inplace=True)
    blocks = [one for seed in range(3) for one in (LayerSpec(pipes.Block, seed), relu)]
    return pipes.case(
        2, 0, schedule, chunks=chunks, specs=[ends[0], *blocks, ends[1]], module={"partition_method": "uniform"}
    )


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zbv", 2)])
def test_a_stage_may_begin_with_a_layer_that_works_in_place(pool2: RankPool, schedule: str, chunks: int) -> None:
    """Under zbv the chunk before may be on the same rank."""
    assert max(pool2.run(_in_place, schedule, chunks)) <= TOLERANCE


def _modules_and_callables() -> tuple[float, list[str]]:
    def built() -> list[Any]:
        return [pipes.Embed(1), pipes.Block(3), torch.tanh, pipes.Block(4), lambda x: x * 2, pipes.Head(2)]

    run = pipes.pipe_run(built(), pipes.config(1, 2), partition_method="uniform")
    return pipes.worst(run, pipes.plain_run(built(), micros=2)), sorted(run[2])


def test_layers_that_are_built_train_on_their_stage_and_are_named_by_their_place(pool2: RankPool) -> None:
    errors, names = zip(*pool2.run(_modules_and_callables), strict=True)
    assert max(errors) <= TOLERANCE
    assert {name.split(".")[0] for name in names[0]} == {"0", "1"} and {n.split(".")[0] for n in names[1]} == {"3", "5"}


def _lower_precision(dtype: str) -> tuple[list[float], list[float]]:
    """Losses in two stages, and of the same micro-batches on two data-parallel ranks."""
    block = {"enabled": True} | ({"loss_scale": 128.0} if dtype == "fp16" else {})
    changes = {dtype: block, "gradient_clipping": 1.0}
    piped = pipes.pipe_run(pipes.layers(4), pipes.config(3, 4, **changes))
    plain = pipes.pipe_run(pipes.layers(4), pipes.config(3, 2, **changes), stages=1, batch=_dealt)
    return piped[0], plain[0]


def _dealt(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Of the four micro-batches of the pipeline, two for each of two data-parallel ranks."""
    return pipes.micro_batch(step, 2 * rank + micro, 0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_train_as_without_a_pipeline(pool2: RankPool, dtype: str) -> None:
    for piped, plain in pool2.run(_lower_precision, dtype):
        assert piped == pytest.approx(plain, rel=2e-2) and piped[0] != piped[-1]


def _v_module() -> tuple[str, list[int], float, bool]:
    module = DualPipeVModule(pipes.layers(), num_stages=2, loss_fn=pipes.cross_entropy)
    engine = pipes.start(module, pipes.config(1, 4))
    loss = float(engine.train_batch(pipes.batches(0, micros=4)))
    engine.destroy()
    return module.schedule, list(module.homes), loss, type(engine) is deepspeed.DualPipeVEngine


def test_a_v_shaped_module_runs_dualpipev(pool2: RankPool) -> None:
    (name, homes, first, known), (_, _, second, _) = pool2.run(_v_module)
    assert known and name == "dualpipev" and homes == [0, 1, 1, 0] and first == second


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

    engine = pipes.engine_of(pipes.layers(4, tied=False), pipes.config(1, 3), loss_fn=loss_fn)
    gradients, params, taken, places, norms = engine.runtime.gradients, list(engine.module.parameters()), [], [], []
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
    expected = pipes.plain_run(pipes.layers(4, tied=False), micros=3, steps=2)[1]
    for once, clean, norms in pool2.run(_sums_in_place, fails_at):
        assert once and clean and norms == pytest.approx(expected, rel=1e-5)
