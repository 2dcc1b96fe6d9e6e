"""What goes wrong in a pipeline is said on every rank, with rank, stage and layer; nobody hangs, and a batch that
failed has not happened.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.tools.verify.grads import full_parameters
from tests.harness import pipes
from tests.harness.patience import too_long
from tests.harness.pool import PatientPool, RankFailure, RankPool
from tests.harness.training import outcome

pytestmark = pytest.mark.timeout(120)


class Breaks(nn.Module):
    """Raises at one call of its forward or backward, where ``armed``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones(())), 0
        self.at, self.backward_too = -1, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls - 1 == self.at and not self.backward_too:
            raise ValueError("no good")
        y = x * self.scale
        if self.calls - 1 == self.at and y.requires_grad:
            y.register_hook(_raise)
        return y


def _raise(_: Tensor) -> None:
    raise ValueError("no good")


def _specs() -> list[Any]:
    specs = pipes.layers()
    return [*specs[:3], LayerSpec(Breaks), *specs[3:5], LayerSpec(Breaks), *specs[5:]]


def _breaking(level: int, **pipeline: Any) -> Any:
    return pipes.engine_of(_specs(), pipes.config(level, 4, pipeline=pipeline), partition_method="uniform")


def _broken(schedule: str, chunks: int, level: int, at: int, backward_too: bool) -> tuple[str, float, int]:  # noqa: FBT001
    """The error where one layer breaks in the second batch, and how training differs from one without it."""
    world, engine = dist.get_world_size(), _breaking(level, schedule=schedule, chunks_per_stage=chunks)
    data = [[pipes.micro_batch(step, micro, engine.mesh.data.index) for micro in range(4)] for step in range(3)]
    engine.train_batch(iter(data[0]))
    layer = dict(engine.module.named_modules()).get("6")
    home = engine.module.stage_owner(6)
    if layer is not None and engine.mesh.data.index == world // 2 - 1:
        layer.at, layer.backward_too = layer.calls + at, backward_too
    text = outcome(lambda: engine.train_batch(iter(data[1])))
    losses = [float(engine.train_batch(iter(data[step]))) for step in (1, 2)]
    params = full_parameters(engine.module)
    engine.destroy()
    expected = pipes.plain_run(_specs(), data_ranks=world // 2)
    return text, pipes.worst((losses, [], params), (expected[0][1:], [], expected[2])), home


@pytest.mark.in_make_test(
    "2-gpipe-1-1-0-True", "2-zero_bubble-1-2-3-True", "4-1f1b-1-3-2-False", "4-interleaved-2-3-1-True"
)
@pytest.mark.parametrize(
    ("schedule", "chunks", "level", "at", "backward_too"),
    [
        ("1f1b", 1, 3, 2, False),
        ("gpipe", 1, 1, 0, True),
        ("interleaved", 2, 3, 1, True),
        ("zero_bubble", 1, 2, 3, True),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_that_raises(
    request: pytest.FixtureRequest, ranks: int, schedule: str, chunks: int, level: int, at: int, *, backward_too: bool
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    for text, error, home in pool.run(_broken, schedule, chunks, level, at, backward_too):
        rank = home * ranks // 2 + ranks // 2 - 1
        assert f"rank {rank} (pipeline stage {home}): " in text and "ValueError: no good" in text, text
        assert f"micro-batch {at}" in text and ("backward" if backward_too else "at layer 6 (Breaks)") in text
        assert error <= 1e-6, "the batch that failed counts"


def _first_shape_breaks() -> str:
    """Before anything is known of the shapes that follow."""
    engine = _breaking(0)
    layer = dict(engine.module.named_modules()).get("3")
    if layer is not None:
        layer.at = 1
    text = outcome(lambda: engine.train_batch(pipes.batches(0, micros=4)))
    engine.train_batch(pipes.batches(0, micros=4))
    engine.destroy()
    return text


def test_a_layer_that_raises_in_the_first_batch(pool2: RankPool) -> None:
    for text in pool2.run(_first_shape_breaks):
        assert "rank 0 (pipeline stage 0): forward of micro-batch 1 at layer 3 (Breaks): ValueError: no good" in text


class Dict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


def _outcome_of(specs: list[Any], data: Callable[[int], Iterator[Any]], loss_fn: Any = pipes.cross_entropy) -> str:
    engine = pipes.engine_of(specs, pipes.config(0, 4), loss_fn=loss_fn, partition_method="uniform")
    text = outcome(lambda: engine.train_batch(data(dist.get_rank())))
    engine.destroy()
    return text


def _ends_early(on: tuple[int, ...], after: int) -> str:
    def data(rank: int) -> Iterator[Any]:
        count = after if rank in on else 4
        return iter([pipes.micro_batch(0, micro, 0) for micro in range(count)])

    return _outcome_of(pipes.layers(), data)


@pytest.mark.parametrize("on", [0, 1])
def test_a_data_iterator_that_ends_early(pool2: RankPool, on: int) -> None:
    for text in pool2.run(_ends_early, (on,), 3):
        assert f"rank {on} (pipeline stage {on}): the data iterator ended after 3 of 4 micro-batches" in text
    for text in pool2.run(_ends_early, (on,), 0):
        assert f"rank {on} (pipeline stage {on}): the data iterator ended after 0 of 4 micro-batches" in text
    assert all("StopIteration" in text for text in pool2.run(_ends_early, (0, 1), 0)), "nobody has anything left"


def _counts_differ() -> tuple[list[str], float]:
    engine, rank = pipes.engine_of(pipes.layers(), pipes.config(3, 4)), dist.get_rank()
    data = lambda: pipes.batches(0, micros=4)  # noqa: E731
    texts = [outcome(lambda: engine.eval_batch(data(), num_micro_batches=4 - rank))]
    if rank:
        engine.set_train_batch_size(2 * pipes.SAMPLES)
    texts.append(outcome(lambda: engine.train_batch(data())))
    engine.set_train_batch_size(4 * pipes.SAMPLES)
    loss = float(engine.train_batch(data()))
    engine.destroy()
    return texts, loss


def test_numbers_of_micro_batches_that_differ_between_ranks(pool2: RankPool) -> None:
    expected = pipes.plain_run(pipes.layers(), steps=1)[0][0]
    for (evaluated, trained), loss in pool2.run(_counts_differ):
        assert "rank 0 (pipeline stage 0) runs 4 micro-batches and rank 1 (pipeline stage 1) 3; call" in evaluated
        assert "rank 0 (pipeline stage 0) runs 4 micro-batches and rank 1 (pipeline stage 1) 2; call" in trained
        assert loss == pytest.approx(expected, rel=1e-6)


def _differs(what: str) -> str:
    def data(rank: int) -> Iterator[Any]:
        for micro in range(4):
            tokens, labels = pipes.micro_batch(0, micro, 0)
            if rank == 1 and micro == 2 and what == "labels":
                labels = labels.flip(0)
            yield (tokens[:, :4] if rank == 1 and micro == 2 and what == "inputs" else tokens), labels

    return _outcome_of(pipes.layers(), data)


@pytest.mark.parametrize("what", ["inputs", "labels"])
def test_data_iterators_that_differ(pool2: RankPool, what: str) -> None:
    for text in pool2.run(_differs, what):
        assert "rank 0 (pipeline stage 0) and rank 1 (pipeline stage 1)" in text and f"{what}" in text
        assert "for micro-batch 2" in text


def _other_mistakes() -> list[str]:
    def no_pairs(_: int) -> Iterator[Any]:
        return iter([pipes.micro_batch(0, 0, 0)[0]] * 4)

    good = lambda _: pipes.batches(0, micros=4)  # noqa: E731
    shared = pipes.Block(3)
    texts = [
        _outcome_of(pipes.layers(), no_pairs),
        _outcome_of(pipes.layers(), good, loss_fn=lambda output, _: output),
        _outcome_of([*pipes.layers(3)[:2], Dict(), *pipes.layers(3)[2:]], good),
        outcome(lambda: PipelineModule([torch.tanh, *pipes.layers()[1:2], torch.tanh, torch.tanh], 2, None)),
        outcome(lambda: PipelineModule(pipes.layers()[:1], num_stages=2)),
        outcome(lambda: PipelineModule(pipes.layers(), num_stages=3)),
        outcome(lambda: PipelineModule([pipes.Embed(1), shared, pipes.Block(4), shared], num_stages=2)),
        outcome(lambda: PipelineModule([TiedLayerSpec("a", pipes.Embed, 1), TiedLayerSpec("a", pipes.Head, 1)], 2)),
        outcome(lambda: PipelineModule([*pipes.layers(2), 3], num_stages=2)),
    ]
    engine = pipes.engine_of(pipes.layers(), pipes.config(0, 4))
    texts += [outcome(engine.train_batch), outcome(lambda: engine(1)), outcome(engine.step)]
    with torch.no_grad():
        texts.append(outcome(lambda: engine.train_batch(good(0))))
    engine.destroy()
    wrong = pipes.config(0, 4, pipeline={"stages": 4})
    texts.append(outcome(lambda: pipes.start(PipelineModule(pipes.layers(), num_stages=2), wrong)))
    module = PipelineModule(pipes.layers(), num_stages=2)
    wrong = pipes.config(0, 4, pipeline={"schedule": "interleaved", "chunks_per_stage": 2})
    texts.append(outcome(lambda: pipes.start(module, wrong, model_parameters=list(module.parameters()))))
    wrong = pipes.config(0, 4, pipeline={"schedule": "1f1b", "chunks_per_stage": 2})
    return [*texts, outcome(lambda: pipes.start(module, wrong))]


WORDS = [
    "has to yield (inputs, labels)",
    "has to return a scalar tensor",
    "at layer 2 (Dict)",
    "layers 2-3) has no parameters",
    "1 layers cannot be dealt",
    "2 ranks cannot be divided into 3",
    "layers 1 and 3 share a parameter",
    "of two classes, Embed and Head",
    "layer 4 is a int",
    "no data: pass data_iter",
    "use train_batch()",
    "use train_batch()",
    "torch.no_grad()",
    "pipeline.stages is 4",
    "hold parameters of another cut",
    "one chunk per rank, not 2",
]


def test_other_mistakes_are_sentences(pool2: RankPool) -> None:
    for texts in pool2.run(_other_mistakes):
        for text, words in zip(texts, WORDS, strict=True):
            assert words in text, (words, text)
        assert "pipeline stage 0" in texts[0] and "pipeline stage 1" in texts[1]
        assert "rank 0 (pipeline stage 0)" in texts[2] and "returned a dict" in texts[2]


def _killed() -> str:
    engine = pipes.engine_of(pipes.layers(), pipes.config(1, 4), stages=3)
    engine.train_batch(pipes.batches(0, micros=4))
    if dist.get_rank() == 2:
        head = engine.module._calls[7]
        calls: list[int] = []

        def dies(x: Tensor) -> Any:
            calls.append(0)
            return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 3 else head(x)

        engine.module._calls[7] = dies
    start = time.monotonic()
    text = outcome(lambda: engine.train_batch(pipes.batches(0, micros=4)))
    assert not too_long(start, 20)
    if dist.get_rank() == 0:
        time.sleep(5)  # until its neighbour has ended
    raise RuntimeError(text)


def test_a_rank_that_dies_in_mid_schedule_is_named_by_its_neighbour() -> None:
    with PatientPool(3) as pool, pytest.raises(RankFailure) as caught:
        pool.run(_killed, time_limit=60)
    text = str(caught.value)
    assert "rank 2 (pipeline stage 2, layers" in text and "does not answer: its process has ended" in text


def _cannot_gather(level: int) -> tuple[str, float]:
    engine = pipes.engine_of(pipes.layers(), pipes.config(level, 4))
    data = engine.mesh.data.index
    unit = engine.runtime.units[-1]
    if dist.get_rank() == dist.get_world_size() - 1:
        pin = unit.pin

        def once() -> None:
            unit.pin = pin
            raise torch.OutOfMemoryError("no room for the stage")

        unit.pin = once
    text = outcome(lambda: engine.train_batch(pipes.batches(data, micros=4)))
    loss = float(engine.train_batch(pipes.batches(data, micros=4)))
    engine.destroy()
    return text, loss


@pytest.mark.parametrize(("ranks", "level"), [(2, 0), (4, 3)])
def test_a_rank_that_cannot_gather_its_stage(request: pytest.FixtureRequest, ranks: int, level: int) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    expected = pipes.plain_run(pipes.layers(), data_ranks=ranks // 2, steps=1)[0][0]
    for text, loss in pool.run(_cannot_gather, level):
        assert f"rank {ranks - 1} (pipeline stage 1)" in text and "no room for the stage" in text
        assert loss == pytest.approx(expected, rel=1e-6)
