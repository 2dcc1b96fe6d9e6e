"""``"normalize": "tokens"``: an update is that of all its tokens together, however they are split."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.config.model.root import load_config
from deepspeed.errors import PipelineError
from deepspeed.pipe.engine import follow_config
from deepspeed.pipe.module import PipelineModule
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import SEQUENCE, VOCABULARY, Tied, seeded
from deepspeed.tools.verify.reference import clip_factor, gate_optimizer
from deepspeed.tools.verify.training import Labelled
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, make_config, outcome, parameter_error, start

pytestmark = pytest.mark.timeout(120)
MICROS, STEPS = 2, 3
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def rows_of(step: int, micro: int, rank: int, *, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Two samples with another count of labels at every place; rank 1 has none in its first micro-batch."""
    place = (step * MICROS + micro) * 2 + rank
    tokens, labels = torch.randint(VOCABULARY, (2, 2, SEQUENCE), generator=torch.Generator().manual_seed(place))
    labels[0, shift + place % (SEQUENCE - shift) :] = -100
    labels[1, shift + (2 * place) % 3 :] = -100
    if (micro, rank) == (0, 1):
        labels.fill_(-100)
    return tokens, labels


class NextWord(Labelled):
    """The label of a token is that of the one before it, as in language models of transformers."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return super().forward(tokens, shifted)


class Counted(Labelled):
    """Takes a count, as models of transformers do."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None, num_items_in_batch: int = 1) -> Tensor:
        return super().forward(tokens, labels) / num_items_in_batch


class Summed(Labelled):
    """Returns the sum of the losses."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return F.cross_entropy(Tied.forward(self, tokens).flatten(0, 1), labels.flatten(), reduction="sum")


def plain(model: nn.Module, clip: float, *, world: int, shift: int = 0) -> dict[str, Tensor]:
    """The parameters after steps over all tokens of all ranks and micro-batches at once."""
    optimizer = gate_optimizer(model)
    for step in range(STEPS):
        places = itertools.product(range(MICROS), range(world))
        tokens, labels = (
            torch.cat(parts) for parts in zip(*(rows_of(step, *p, shift=shift) for p in places), strict=True)
        )
        model(tokens, labels).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt())
        for grad in grads:
            grad.div_(clip_factor(norm, clip))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(
    engine: Any, how: str = "engine", steps: int = STEPS, shift: int = 0, micros: tuple[int, ...] = (0, 1)
) -> None:
    rank = dist.get_rank()
    for step, micro in itertools.product(range(steps), micros):
        tokens, labels = rows_of(step, micro, rank, shift=shift)
        if how == "now and then past the engine" and micro:
            loss = engine.module(tokens, labels=labels)
        elif how == "told":
            loss = engine(tokens, labels)  # whose name the engine does not see
            engine.set_batch_tokens(int(labels.ne(-100).sum()))
        else:
            loss = engine(tokens, labels=labels)
        if how == "plain":
            loss.backward()
        elif how == "half and half":
            engine.backward(loss * 0.5, retain_graph=True)
            engine.backward(loss * 0.5)
        else:
            engine.backward(loss)
        engine.step()


def run_tokens(stage: int, how: str, clip: float, kind: str = "tokens", zero: Any = None) -> tuple[float, str]:
    shift, model = int(kind == "next_tokens"), seeded(NextWord if kind == "next_tokens" else Labelled)
    config = make_config(
        stage, gradient_accumulation_steps=MICROS, gradient_clipping=clip, normalize=kind, zero=zero or {}
    )
    engine = start(model(), config)
    train(engine, how, shift=shift)
    error = parameter_error(engine.module, plain(model(), clip, world=dist.get_world_size(), shift=shift))
    engine.destroy()
    return error


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["engine", "plain", "told", "half and half", "now and then past the engine"])
def test_an_update_is_that_of_all_tokens_together(pool2: RankPool, stage: int, how: str) -> None:
    clip = 0.05 if stage % 2 else 0.0  # far below the norm
    for error, where in pool2.run(run_tokens, stage, how, clip):
        assert error <= 1e-6, where


@pytest.mark.parametrize("kind", ["tokens", "next_tokens"])
def test_offloaded_and_shifted_labels(pool2: RankPool, kind: str) -> None:
    for error, where in pool2.run(run_tokens, 3, "engine", 0.05, kind, OFFLOAD):
        assert error <= 1e-6, where


def run_read(stage: int) -> tuple[float, float]:
    """The error of gradients that are read before the step; and of the update after they were written back halved."""
    engine = start(seeded(Labelled)(), make_config(stage, gradient_accumulation_steps=MICROS, normalize="tokens"))
    rank, world, model = dist.get_rank(), dist.get_world_size(), seeded(Labelled)()
    places = [*itertools.product(range(MICROS), range(world))]
    tokens, labels = (torch.cat(parts) for parts in zip(*(rows_of(0, *place) for place in places), strict=True))
    model(tokens, labels).backward()
    for micro in range(MICROS):
        rows, those = rows_of(0, micro, rank)
        engine.backward(engine(rows, labels=those))
        if micro < MICROS - 1:
            engine.step()
    errors = []
    for mine, theirs in zip(engine.module.parameters(), model.parameters(), strict=True):
        grad = safe_get_full_grad(mine)
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        errors.append(float((grad - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)))
        safe_set_full_grad(mine, grad * 0.5)
        theirs.grad = wanted * 0.5
    engine.step()
    gate_optimizer(model).step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    error, _ = parameter_error(engine.module, expected)
    engine.destroy()
    return max(errors), error


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_read_before_the_step_are_the_mean_over_tokens(pool2: RankPool, stage: int) -> None:
    for read, written in pool2.run(run_read, stage):
        assert read < 1e-5 and written < 1e-6


def run_parts() -> float:
    """A rank has some tokens of each sequence, and as its loss their share of the mean over all."""
    settings = {"gradient_accumulation_steps": MICROS, "normalize": "tokens", "sequence_parallel_size": 2}
    engine = start(seeded(Summed)(), make_config(1, **settings))
    part = slice(0, 3) if dist.get_rank() == 0 else slice(3, None)
    for step, micro in itertools.product(range(STEPS), range(MICROS)):
        tokens, labels = rows_of(step, micro, 0)
        total = engine(tokens[:, part], labels=labels[:, part])
        engine.backward(total / labels.ne(-100).sum().clamp(min=1))
        engine.step()
    error, _ = parameter_error(engine.module, plain(seeded(Labelled)(), 0.0, world=1))
    engine.destroy()
    return error


def test_ranks_with_parts_of_a_sequence_count_the_tokens_of_all_of_it(pool2: RankPool) -> None:
    assert max(pool2.run(run_parts)) <= 1e-6


def run_fp16() -> tuple[float, int, float]:
    scale = {"enabled": True, "initial_scale_power": 8}
    engine = start(
        seeded(Labelled)(), make_config(2, gradient_accumulation_steps=MICROS, normalize="tokens", fp16=scale)
    )
    train(engine)
    error, _ = parameter_error(engine.module, plain(seeded(Labelled)(), 0.0, world=2))
    result = error, engine.skipped_steps, engine._tokens.unit
    engine.destroy()
    return result


def test_fp16_keeps_weights_near_one(pool2: RankPool) -> None:
    for error, skipped, unit in pool2.run(run_fp16):
        assert error <= 5e-3 and skipped == 0 and unit == 2.0  # near the mean of tokens in a micro-batch


def run_by_caller(kind: str) -> dict[str, Tensor]:
    engine = start(seeded(Labelled)(), make_config(2, gradient_accumulation_steps=MICROS, normalize=kind))
    for step, micro in itertools.product(range(STEPS), range(MICROS)):
        tokens, labels = rows_of(step, micro, 0)
        engine.backward(engine(tokens, labels=labels) / 8, scale_wrt_gas=False)
        engine.step()
    values = full_parameters(engine.module)
    engine.destroy()
    return values


def test_losses_that_the_caller_has_weighed_are_not_weighed_again(pool2: RankPool) -> None:
    ours, expected = (pool2.run(run_by_caller, kind)[0] for kind in ("tokens", "micro_batches"))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def run_resumed(folder: Path, saved: bool) -> dict[str, Tensor]:
    def begin() -> Any:
        return start(seeded(Labelled)(), make_config(2, gradient_accumulation_steps=MICROS, normalize="tokens"))

    engine = begin()
    train(engine, steps=1)
    train(engine, steps=1, micros=(0,))
    if saved:
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = begin()
        engine.load_checkpoint(folder)
    train(engine, steps=1, micros=(1,))
    values = full_parameters(engine.module)
    engine.destroy()
    return values


def test_a_window_goes_on_after_a_resume_bit_for_bit(pool2: RankPool, tmp_path: Path) -> None:
    ours, expected = (pool2.run(run_resumed, tmp_path, saved)[0] for saved in (True, False))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def run_failed() -> float:
    """A window is dropped, another fails half way; what they have counted is forgotten."""
    engine = start(seeded(Labelled)(), make_config(3, gradient_accumulation_steps=MICROS, normalize="tokens"))
    tokens, labels = rows_of(0, 1, 0)
    engine.backward(engine(tokens, labels=labels))
    engine.zero_grad()
    loss = engine(tokens, labels=labels)
    assert "scalar loss" in outcome(lambda: engine.backward(loss.expand(2)))
    engine(tokens, labels=labels)
    engine.zero_grad()
    train(engine)
    error, _ = parameter_error(engine.module, plain(seeded(Labelled)(), 0.0, world=2))
    engine.destroy()
    return error


def test_windows_that_are_dropped_do_not_count(pool2: RankPool) -> None:
    assert max(pool2.run(run_failed)) <= 1e-6


class Shy(Labelled):
    """Raises where it is told to."""

    raises = False

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.raises:
            raise ArithmeticError("planted")
        return super().forward(tokens, labels)


def run_interrupted(how: str) -> float:
    """What a client's loop does between, or in the place of, forward and backward does not count."""
    engine = start(seeded(Shy)(), make_config(2, gradient_accumulation_steps=MICROS, normalize="tokens"))
    tokens, labels = rows_of(7, 1, 0)
    for step, micro in itertools.product(range(STEPS), range(MICROS)):
        if how == "its optimizer drops gradients" and micro == 0:
            engine.backward(engine(tokens, labels=labels))
            engine.optimizer.zero_grad()
        if how == "a forward fails before it begins" and micro:
            hook = engine.module.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
            assert "ZeroDivisionError" in outcome(lambda: engine(tokens, labels=labels))
            hook.remove()
        if how == "a forward fails":
            engine.module.raises = True
            assert "planted" in outcome(lambda: engine(tokens, labels=labels))
            engine.module.raises = False
        rows, those = rows_of(step, micro, dist.get_rank())
        if how == "a forward in a recomputation":
            loss = checkpoint(engine, rows, labels=those, use_reentrant=False)
        else:
            loss = engine(rows, labels=those)
        if how == "gradients are dropped behind the forward" and micro == 0:
            engine.zero_grad()
        engine.backward(loss)
        engine.step()
    error, _ = parameter_error(engine.module, plain(seeded(Labelled)(), 0.0, world=2))
    engine.destroy()
    return error


@pytest.mark.parametrize(
    "how",
    [
        "its optimizer drops gradients",
        "a forward fails",
        "a forward fails before it begins",
        "gradients are dropped behind the forward",
        "a forward in a recomputation",
    ],
)
def test_what_stands_between_forward_and_backward_does_not_count(pool2: RankPool, how: str) -> None:
    assert max(pool2.run(run_interrupted, how)) <= 1e-6


def run_refused() -> list[str]:
    tokens, labels = rows_of(0, 1, 0)
    plain_engine = start(seeded(Labelled)(), make_config(1))
    said = [outcome(lambda: plain_engine.set_batch_tokens(3))]
    plain_engine.destroy()

    def again(call: Any) -> None:
        engine = start(seeded(Counted)(), make_config(1, gradient_accumulation_steps=2, normalize="tokens"))
        said.append(outcome(lambda: call(engine)))
        engine.destroy()

    def mixed(engine: Any) -> None:
        engine.backward(engine(tokens, labels=labels))
        engine.step()
        engine.backward(engine(tokens, labels=labels), scale_wrt_gas=False)

    again(lambda engine: engine.backward(engine(tokens, labels)))
    again(lambda engine: engine.backward(engine(tokens, labels=labels) + engine(tokens, labels=labels)))
    again(mixed)
    again(lambda engine: engine.backward(engine(tokens, labels=labels, num_items_in_batch=8)))
    return said


def test_what_cannot_be_weighed_is_a_sentence(pool1: RankPool) -> None:
    parts = (
        'needs "normalize"',
        "no tensor 'labels'",
        "2 forwards came",
        "has weighed other",
        "num_items_in_batch says",
    )
    (said,) = pool1.run(run_refused)
    for text, part in zip(said, parts, strict=True):
        assert "UsageError" in text and part in text


def test_pipelines_are_refused() -> None:
    config = load_config(make_config(1, normalize="tokens"), world_size=1)
    with pytest.raises(PipelineError, match="normalize 'tokens' is not in this release for a PipelineModule"):
        follow_config(PipelineModule.__new__(PipelineModule), config, fixed=False)
