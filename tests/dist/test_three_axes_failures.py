"""What goes wrong in a pipeline of tensor-parallel parts is said with rank, stage, tensor-parallel rank and layer, and
nobody hangs, whichever rank it is.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.tools.verify import ranks as processes
from deepspeed.tools.verify.layouts.three_axes import GridCell, run_cell
from deepspeed.tools.verify.models import MicroBatch, decoder_layers, word_batch
from deepspeed.tools.verify.reference import train_reference
from deepspeed.zero.sync import failures
from tests.dist.test_three_axes import OneHead
from tests.harness.decoders import Llama, batch, loss_of
from tests.harness.pool import PatientPool, RankFailure, RankPool
from tests.harness.training import ADAMW, outcome

pytestmark = pytest.mark.timeout(240)
LIMIT = 150.0  # seconds, after which a rank hangs; gloo's own limit is 30 minutes


def next_words(scores: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def engine_of(zero: int = 1, *, pp: int = 2, tp: int = 2, layers: Any = None, plan: Any = None) -> Any:
    """A decoder on pp x data x tp ranks; ``layers`` instead of its own, ``plan`` for how they are split."""
    cell = GridCell(dist.get_world_size() // pp // tp, pp, tp, zero)
    settings = cell.settings(cell.case())
    if plan is not None:
        settings["tensor_parallel"]["partition_config"] = {"layer_specs": plan}
    module = PipelineModule(layers or decoder_layers(), pp, loss_fn=next_words, partition_method="uniform")
    return deepspeed.initialize(model=module, config=settings)[0]


def data(engine: Any, step: int = 0) -> list[tuple[Tensor, Tensor]]:
    """(inputs, labels) of a batch of this rank."""
    ids = [word_batch(MicroBatch(step, micro, engine.mesh.data.index, 8)) for micro in range(4)]
    return [(one, one) for one in ids]


class Odd(nn.Module):
    """Multiplies; at one call on some ranks it does something else."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.calls, self.at, self.act = nn.Parameter(torch.ones(())), 0, -1, act

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = x * self.weight
        return self.act(y) if self.calls - 1 == self.at else y


def raises(_: Tensor) -> Any:
    raise ValueError("no good")


def dies(_: Tensor) -> Any:
    return os.kill(os.getpid(), signal.SIGKILL)


def as_dict(y: Tensor) -> dict[str, Tensor]:
    return {"y": y}


ACTS: dict[str, Callable[[Tensor], Any]] = {"raises": raises, "dies": dies, "as_dict": as_dict}


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """How long a rank that fails waits for those that share its layers."""
    usual, failures._ALIKE_S = failures._ALIKE_S, seconds
    try:
        yield
    finally:
        failures._ALIKE_S = usual


def odd_layer(act: str, on: tuple[int, ...], zero: int, place: int, *, backward: bool = False) -> tuple[str, str]:
    """Layer ``place`` is odd in the second of four micro-batches on the ranks ``on``: what this rank hears, and
    what becomes of the next batch: its loss, or another error.
    """
    specs: list[Any] = decoder_layers()
    specs.insert(place, LayerSpec(Odd, ACTS[act]))
    with patience(0.5 if len(on) == 1 and act != "dies" else LIMIT):
        engine = engine_of(zero, layers=specs)
        engine.train_batch(iter(data(engine)))
        if dist.get_rank() in on:
            layer = engine.module.get_submodule(str(place))
            layer.at = layer.calls + 1
            layer.act = _in_backward(ACTS[act]) if backward else ACTS[act]
        text = outcome(lambda: engine.train_batch(iter(data(engine, 1))))
        if act == "dies":
            raise RuntimeError(text)
        losses: list[float] = []
        after = outcome(lambda: losses.append(float(engine.train_batch(iter(data(engine, 1))))))
        engine.destroy()
        return text, after or str(losses[0])


def _in_backward(act: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def hooked(y: Tensor) -> Tensor:
        y.register_hook(act)
        return y

    return hooked


# the ranks of a stage are neighbours; layer 3 is on the first, layer 7 on the second
@pytest.mark.parametrize(
    ("on", "zero", "place", "backward"),
    [((1,), 1, 3, False), ((2,), 3, 7, True), pytest.param((0,), 0, 3, True, marks=pytest.mark.exhaustive)],
    ids=["forward", "backward", "backward of the first stage"],
)
def test_a_rank_that_fails_alone_does_not_leave_those_waiting_that_share_its_layers(
    pool4: RankPool, on: tuple[int], zero: int, place: int, *, backward: bool
) -> None:
    where = f"rank {on[0]} (pipeline stage {on[0] // 2}, tensor-parallel rank {on[0] % 2}): "
    # it takes a second, and those that are left waiting would do so for gloo's minutes
    for text, after in pool4.run(odd_layer, "raises", on, zero, place, backward=backward, time_limit=30):
        assert where in text and "micro-batch 1 at layer" in text and "ValueError: no good" in text, text
        assert "does not answer" not in text, "what follows from it is left out"
        assert "it cannot go on" in after and where in after


def test_ranks_that_fail_alike_go_on_with_the_next_batch(pool4: RankPool) -> None:
    results = pool4.run(odd_layer, "raises", (0, 1), 2, 3, time_limit=LIMIT)
    for text, after in results:
        assert "rank 0 (pipeline stage 0, tensor-parallel rank 0): forward of micro-batch 1 at layer 3 (Odd)" in text
        assert float(after) == pytest.approx(float(results[0][1]), rel=1e-6)


def test_a_dict_from_a_stage_of_parts(pool4: RankPool) -> None:
    for text, after in pool4.run(odd_layer, "as_dict", (0, 1), 1, 4, time_limit=LIMIT):
        assert "rank 1 (pipeline stage 0, tensor-parallel rank 1): " in text and "layer 4 (Odd)" in text, text
        assert "returned a dict, which cannot go to the next pipeline stage" in text and float(after)


@pytest.mark.parametrize(
    ("ranks", "on", "place", "backward"),
    [
        (4, 1, 3, False),
        pytest.param(4, 2, 7, True, marks=pytest.mark.exhaustive),
        pytest.param(8, 5, 7, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_dies_in_mid_schedule_ends_the_batch_on_all(
    monkeypatch: pytest.MonkeyPatch, *, ranks: int, on: int, place: int, backward: bool
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", LIMIT / 2)
    with PatientPool(ranks) as pool, pytest.raises(RankFailure) as caught:
        pool.run(odd_layer, "dies", (on,), 1, place, backward=backward, time_limit=LIMIT)
    text = str(caught.value)
    assert caught.value.types == {rank: "died" if rank == on else "RuntimeError" for rank in range(ranks)}, text
    assert text.count("deepspeed.errors.PipelineError") >= ranks - 2, text
    assert f"rank {on} (pipeline stage {on // (ranks // 2)}, " in text and "does not answer" in text, text


# -- without a pipeline -----------------------------------------------------------------------------------------------
class Fails(Llama):
    """Raises in the middle of a call, or in its backward."""

    at = ""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers[1].register_forward_pre_hook(self.odd)

    def odd(self, _: nn.Module, args: tuple[Any, ...]) -> Any:
        at, self.at = self.at, ""
        if at == "forward":
            raises(args[0])
        return (_in_backward(raises)(args[0] * 1), *args[1:]) if at == "backward" else None


def fails_in_a_model(on: tuple[int, ...], zero: int, at: str) -> tuple[str, str]:
    """What a rank hears of the second batch, in which those ``on`` fail, and of the third: its loss, or an error."""
    settings = {"zero_optimization": {"stage": zero}, "tensor_parallel": {"autotp_size": 2}, "optimizer": ADAMW}
    losses: list[float] = []

    def step(number: int) -> None:
        loss = loss_of(engine, batch(number, engine.mesh.data.index))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))

    with patience(0.5 if len(on) == 1 else LIMIT):
        engine = deepspeed.initialize(model=Fails(), config={"train_micro_batch_size_per_gpu": 2, **settings})[0]
        step(0)
        if dist.get_rank() in on:
            engine.module.at = at
        text = outcome(lambda: step(1))
        after = outcome(lambda: step(2))
        engine.destroy()
        return text, after or str(losses[-1])


@pytest.mark.parametrize(
    ("ranks", "on", "zero", "at"),
    [(2, 0, 1, "forward"), (4, 2, 3, "backward"), pytest.param(4, 1, 3, "forward", marks=pytest.mark.exhaustive)],
)
def test_a_rank_that_fails_alone_frees_those_that_share_its_layers_without_a_pipeline(
    request: pytest.FixtureRequest, ranks: int, on: int, zero: int, at: str
) -> None:
    # Two ranks share their layers over the group of the world, which is closed.
    with PatientPool(2) if ranks == 2 else contextlib.nullcontext(request.getfixturevalue("pool4")) as pool:
        results = pool.run(fails_in_a_model, (on,), zero, at, time_limit=LIMIT)
    for rank, (text, after) in enumerate(results):
        assert "ValueError" in text and "no good" in text, text
        assert rank == on or ("RankFailedError" in text and f"rank {on} (tensor-parallel rank {on % 2})" in text), text
        assert "it cannot go on" in after, after


@pytest.mark.in_make_test("3-backward")
@pytest.mark.parametrize(("zero", "at"), [(3, "backward"), (1, "forward")])
def test_ranks_that_share_layers_and_fail_alike_go_on_without_a_pipeline(pool4: RankPool, zero: int, at: str) -> None:
    results = pool4.run(fails_in_a_model, (0, 1), zero, at, time_limit=LIMIT)
    for rank, (text, after) in enumerate(results):
        assert rank < 2 or f"rank {rank % 2} (tensor-parallel rank {rank % 2}) failed" in text, text
        assert "no good" in text and float(after) > 0


# -- data -------------------------------------------------------------------------------------------------------------
def odd_data(what: str, on: int) -> str:
    engine = engine_of()

    def read() -> Iterator[Any]:
        for micro, (ids, labels) in enumerate(data(engine)):
            odd = dist.get_rank() == on and micro == 2
            if odd and what == "ends":
                return
            other = (ids + 1) % 13 if odd else ids
            yield (other if "inputs" in what else ids), (other if "labels" in what else labels)

    if "later" in what:
        engine.train_batch(iter(data(engine)))
    text = outcome(lambda: engine.train_batch(read()))
    engine.destroy()
    return text


@pytest.mark.in_make_test("ends", "inputs", "later inputs")
@pytest.mark.parametrize(
    ("what", "on", "words"),
    [
        ("ends", 3, "rank 3 (pipeline stage 1, tensor-parallel rank 1): the data iterator ended after 2 of 4"),
        ("inputs", 1, "rank 0 (pipeline stage 0, tensor-parallel rank 0) and rank 1 (pipeline stage 0, tensor-"),
        ("labels", 3, "rank 0 (pipeline stage 0, tensor-parallel rank 0) and rank 3 (pipeline stage 1, tensor-"),
        ("later inputs", 2, "rank 2 (pipeline stage 1, tensor-parallel rank 0) and rank 3 (pipeline stage 1, tensor-"),
        ("later labels", 1, "rank 0 (pipeline stage 0, tensor-parallel rank 0) and rank 1 (pipeline stage 0, tensor-"),
    ],
    ids=["ends", "inputs", "labels", "later inputs", "later labels"],
)
def test_data_that_differ_between_ranks_of_one_pipeline(pool4: RankPool, what: str, on: int, words: str) -> None:
    for text in pool4.run(odd_data, what, on, time_limit=LIMIT):
        assert words in text, text
        assert what == "ends" or f"have read other {what.removeprefix('later ')} for micro-batch 2" in text


# -- what cannot be cut -----------------------------------------------------------------------------------------------
def refusals() -> list[str]:
    heads, silent = decoder_layers(), [*decoder_layers()[:4], *[LayerSpec(nn.Identity)] * 4]
    heads[6] = LayerSpec(OneHead)
    nothing = [{"patterns": ["decoder\\.layers"], "partition_type": "row"}]
    return [
        outcome(lambda: engine_of(layers=heads)),
        outcome(lambda: engine_of(plan=nothing)),
        outcome(lambda: engine_of(layers=silent)),
        outcome(lambda: engine_of(layers=decoder_layers()[:1])),
    ]


WORDS = [
    "autotp_size 2 does not fit the attention of 6, whose heads are 1 (1 of keys and values); use a divisor of 1",
    "'decoder\\\\.layers' names no parameter of PipelineModule; patterns are regular expressions",
    "rank 2 (pipeline stage 1, layers 4-7) has no parameters; use fewer stages or another partition_method",
    "1 layers cannot be dealt out to 2 pipeline stages or chunks; use fewer",
]


def test_what_cannot_be_cut_is_refused_on_all_ranks(pool4: RankPool) -> None:
    for rank, texts in enumerate(pool4.run(refusals, time_limit=LIMIT)):
        for text, words in zip(texts, WORDS, strict=True):
            assert words in text, (words, text)
        if rank < 2:  # which have none of these heads
            assert "rank 2 (pipeline stage 1, tensor-parallel rank 0): " in texts[0]


def test_a_rule_may_name_layers_of_one_pipeline_stage_only(pool4: RankPool) -> None:
    head = {"patterns": ["7\\.lm_head\\.weight"], "partition_type": "column", "gather_output": True}
    words = {"patterns": ["0\\.embed_tokens\\.weight"], "partition_type": "column"}
    block = {"partition_config": {"layer_specs": [head, words]}}
    cell = replace(GridCell(1, 2, 2, 1), config={"tensor_parallel": block})
    for errors, _ in pool4.run(run_cell, cell, train_reference(cell.case(), world=1)):
        assert max(errors.values())[0] < 1e-6, errors
