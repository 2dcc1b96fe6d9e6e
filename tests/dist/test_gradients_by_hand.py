"""What clients write into ``.grad`` counts, once; what they read there at stage 0 is the reduced gradient."""

import contextlib
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from deepspeed.tools.verify.grads import scaled_error
from deepspeed.tools.verify.models import Case, MicroBatch
from deepspeed.tools.verify.reference import gate_optimizer, trainable
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from tests.harness.cases import case_named
from tests.harness.lockstep import TOLERANCE
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, outcome, parameter_error, start

pytestmark = pytest.mark.timeout(60)
SHARDED = (1, 2, 3)
PREDIVIDED = {"prescale_gradients": False, "gradient_predivide_factor": 1.5}
PRECISIONS = pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-6),
        (PREDIVIDED, 1e-6),
        ({"bf16": {"enabled": True}}, 2e-2),
        ({"fp16": {"enabled": True, "initial_scale_power": 4}}, 2e-3),
    ],
    ids=["fp32", "predivided", "bf16", "fp16"],
)


class Pair:
    """An engine, and the plain model that is to stay equal to it; ``back`` accumulates the mean of all ranks'
    gradients.
    """

    def __init__(self, stage: int, *, case: str = "unused", **changes: Any) -> None:
        self.case: Case = case_named(case)
        self.engine = start(self.case.build().train(), make_config(stage, **changes))
        self.plain = self.case.build().train()
        self.optimizer = gate_optimizer(self.plain)

    def losses(self, model: Any, *, micro: int = 0, rank: int | None = None) -> Tensor:
        place = here(0, micro)
        return self.case.seeded_loss(model, place if rank is None else place._replace(rank=rank))[0]

    def back(self, *, micro: int = 0, factor: float = 1.0) -> None:
        """One micro-batch through ``engine.backward`` and on the plain model."""
        self.engine.backward(self.losses(self.engine, micro=micro))
        self.plain_back(micro=micro, factor=factor)

    def plain_back(self, *, micro: int = 0, factor: float = 1.0) -> None:
        world = dist.get_world_size()
        for rank in range(world):
            (self.losses(self.plain, micro=micro, rank=rank) * factor / world).backward()

    def params(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Ours and the plain ones."""
        return list(zip(trainable(self.engine.module).values(), trainable(self.plain).values(), strict=True))

    def fill(self) -> None:
        """Give plain parameters without a gradient one of zeros, as the engine does."""
        for _, param in self.params():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad

    def update(self) -> float:
        """A step of both; the largest difference of any parameter or the norm. Collective."""
        self.fill()
        norm = torch.nn.utils.get_total_norm([p.grad for _, p in self.params() if p.grad is not None])
        self.engine.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert all(p.grad is None for p in self.engine.module.parameters()), "a gradient was left behind the step"
        expected = {name: param.detach() for name, param in self.plain.named_parameters()}
        error, _ = parameter_error(self.engine.module, expected)
        return max(error, scaled_error(torch.tensor(self.engine.get_global_grad_norm()), norm))

    def finish(self) -> float:
        """The same for the last time. Ends the engine."""
        error = self.update()
        self.engine.destroy()
        return error


# -- writing -------------------------------------------------------------------------------------------------------


def one_rank_now_and_then(stage: int) -> float:
    pair, error = Pair(stage), 0.0
    for step in range(8):
        pair.back(micro=step)
        pair.fill()
        for ours, plain in pair.params() if step % 3 == 0 else ():
            ours.grad = torch.ones(ours.shape) if dist.get_rank() == 0 else None
            plain.grad += 0.5
        error = max(error, pair.update())
    pair.engine.destroy()
    return error


@pytest.mark.parametrize("stage", SHARDED)
def test_one_rank_may_write_alone(pool2: RankPool, stage: int) -> None:
    """No step is passed by prediction over it, whatever the others do."""
    assert max(pool2.run(one_rank_now_and_then, stage)) <= 5e-6


def first_by_hand_later(stage: int, accumulation: int) -> float:
    """After some ordinary updates every rank writes gradients by hand, for the first time, before two steps."""
    pair, error = Pair(stage, gradient_accumulation_steps=accumulation), 0.0
    for step in range(9):
        for micro in range(accumulation):
            if micro:
                pair.engine.step()
            pair.back(micro=step * accumulation + micro, factor=1.0 / accumulation)
        pair.fill()
        for ours, plain in pair.params() if step in (5, 7) else ():
            ours.grad = torch.full(ours.shape, 0.5) + (0.0 if ours.grad is None else ours.grad)
            plain.grad += 0.5
        error = max(error, pair.update())
    pair.engine.destroy()
    return error


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_first_gradient_by_hand_counts_after_predictions_has_formed(
    pool2: RankPool, stage: int, accumulation: int
) -> None:
    assert max(pool2.run(first_by_hand_later, stage, accumulation)) <= 5e-6


def without_backward(stage: int, *, plainly: bool) -> tuple[float, str]:
    """Gradients from ``torch.autograd.grad``, and from no backward at all."""
    pair = Pair(stage)
    empty = outcome(pair.engine.step)
    if plainly:
        grads = [torch.full(p.shape, 0.5) for _, p in pair.params()]
    else:
        names = [p for p, _ in pair.params()]
        found = torch.autograd.grad(pair.losses(pair.engine), names, allow_unused=True)
        grads = [torch.zeros(p.shape) if g is None else g for p, g in zip(names, found, strict=True)]
        pair.plain_back()
    for (ours, plain), grad in zip(pair.params(), grads, strict=True):
        ours.grad = grad
        if plainly:
            plain.grad = grad.clone()
    return pair.finish(), empty


@pytest.mark.in_make_test("0-True", "1-False", "2-True", "3-False")
@pytest.mark.parametrize("plainly", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_written_gradients_alone_make_a_step(pool2: RankPool, stage: int, plainly: bool) -> None:  # noqa: FBT001
    for error, empty in pool2.run(without_backward, stage, plainly=plainly):
        assert error <= TOLERANCE
        assert "before backward" in empty


def plain_window(stage: int) -> float:
    """In a plain loop packing divides by the window; what is written by hand there is divided like the gradient beside
    it.
    """
    pair = Pair(stage, gradient_accumulation_steps=4)
    for micro in range(4):
        pair.losses(pair.engine, micro=micro).backward()
        pair.plain_back(micro=micro, factor=0.25)
        for ours, plain in pair.params() if micro < 3 or stage else ():
            ours.grad = torch.full(ours.shape, micro + 1.0)
            plain.grad = torch.full(plain.shape, (micro + 1.0) / 4) + (0 if plain.grad is None else plain.grad)
        if micro < 3:
            pair.engine.step()
    return pair.finish()


@pytest.mark.parametrize("stage", STAGES)
def test_written_gradients_are_divided_like_those_of_autograd(pool2: RankPool, stage: int) -> None:
    assert max(pool2.run(plain_window, stage)) <= TOLERANCE


def saved(stage: int, folder: str) -> float:
    changes: dict[str, Any] = {} if stage else PREDIVIDED
    pair = Pair(stage, **changes)
    pair.back()
    for params in pair.params():
        for param in params:
            written = torch.full(param.shape, 0.5)
            param.grad = written if param.grad is None else param.grad + written
    pair.engine.save_checkpoint(folder, tag="t")
    pair.engine.destroy()
    pair.engine = Pair(stage, **changes).engine
    pair.engine.load_checkpoint(folder, tag="t")
    return pair.finish()


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_what_was_written(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    assert max(pool2.run(saved, stage, str(tmp_path))) <= TOLERANCE


# -- reading -------------------------------------------------------------------------------------------------------


def shown(changes: dict[str, Any]) -> list[float]:
    """``.grad`` against the plain mean after each micro-batch's backward: hidden, then shown, then gone."""
    pair = Pair(0, case="plain", gradient_accumulation_steps=2, **changes)
    pair.back(factor=0.5)
    assert all(p.grad is None for p, _ in pair.params())
    pair.engine.step()
    pair.back(micro=1, factor=0.5)
    scale = pair.engine.loss_scale()
    errors = [scaled_error(ours.grad.float() / scale, plain.grad) for ours, plain in pair.params()]  # type: ignore[union-attr,arg-type]
    errors += [scaled_error(safe_get_full_grad(ours), plain.grad) for ours, plain in pair.params()]  # type: ignore[arg-type]
    storages = {ours.grad.untyped_storage().data_ptr() for ours, _ in pair.params()}  # type: ignore[union-attr]
    assert storages == {u.grad.untyped_storage().data_ptr() for u in pair.engine.runtime.units}, "a copy"
    assert {ours.grad.dtype for ours, _ in pair.params()} == {torch.float32}  # type: ignore[union-attr]
    pair.losses(pair.engine)  # a forward in between (and its graph) changes nothing
    assert all(p.grad is not None for p, _ in pair.params())
    pair.engine.step()
    assert all(p.grad is None and p.grad_dtype is p.dtype for p, _ in pair.params())
    pair.engine.destroy()
    return errors


@PRECISIONS
def test_stage_0_shows_the_reduced_gradient(pool2: RankPool, changes: dict[str, Any], tolerance: float) -> None:
    """A view of it, in the accumulation dtype, from the last backward of the window to the step."""
    assert max(max(errors) for errors in pool2.run(shown, changes)) <= tolerance


def written_beside_a_shown_sum() -> float:
    """Into parameters that no backward has reached, of a unit whose other gradients are shown."""
    pair = Pair(0, **PREDIVIDED)
    with pair.engine.no_sync():
        pair.back()
    assert any(ours.grad is not None for ours, _ in pair.params())
    for ours, plain in pair.params():
        if ours.grad is None:
            ours.grad, plain.grad = torch.full(ours.shape, dist.get_rank() + 1.0), torch.full(plain.shape, 1.5)
    pair.engine.allreduce_gradients()
    return pair.finish()


def test_what_is_written_beside_a_shown_sum_counts(pool2: RankPool) -> None:
    assert max(pool2.run(written_beside_a_shown_sum)) <= TOLERANCE


def saved_without_sync(folder: str) -> bool:
    pair = Pair(0)
    with pair.engine.no_sync():
        pair.back()
    before = [None if ours.grad is None else ours.grad.clone() for ours, _ in pair.params()]
    pair.engine.save_checkpoint(folder, tag="t")
    after = [ours.grad for ours, _ in pair.params()]
    same = all(a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True))  # type: ignore[arg-type]
    pair.engine.destroy()
    return same and any(grad is not None for grad in after)


def test_a_save_leaves_what_no_sync_shows(pool2: RankPool, tmp_path: Path) -> None:
    assert all(pool2.run(saved_without_sync, str(tmp_path)))


def shown_without_sync(changes: dict[str, Any]) -> tuple[list[float], float]:
    """``.grad`` beside that of a plain model of this rank alone, as DDP has it; and the error after the update."""
    pair, own = Pair(0, **changes), case_named("unused").build().train()
    kept, errors = [*trainable(own).values()], list[float]()
    for micro in range(3):
        with pair.engine.no_sync():  # one context after the other
            pair.back(micro=micro)
        pair.losses(own, micro=micro).backward()
        scale = pair.engine.loss_scale()
        for (ours, _), alone in zip(pair.params(), kept, strict=True):
            assert (ours.grad is None) == (alone.grad is None), "unused parameters have none"
            if ours.grad is not None and alone.grad is not None:
                errors.append(scaled_error(ours.grad.float() / scale, alone.grad))
    pair.losses(pair.engine)  # a forward in between changes nothing
    assert any(ours.grad is not None for ours, _ in pair.params())
    pair.back(micro=3)
    for ours, plain in pair.params():
        zeros = torch.zeros_like(plain)
        found, expected = (zeros if each.grad is None else each.grad.float() for each in (ours, plain))
        errors.append(scaled_error(found / scale, expected))
    return errors, pair.finish()


@PRECISIONS
def test_no_sync_shows_the_sum_of_this_rank(pool2: RankPool, changes: dict[str, Any], tolerance: float) -> None:
    """Unreduced, after each of several contexts; the backward outside adds to it, and all of it is reduced once."""
    for errors, error in pool2.run(shown_without_sync, changes):
        assert max(errors) <= tolerance and (error <= TOLERANCE or tolerance > 1e-6)


def edited(way: str, changes: dict[str, Any], *, synced: bool) -> float:
    """The same edit on the engine's parameters, of this rank's sum or the reduced one, and on the plain mean."""
    pair = Pair(0, case="plain", **changes)
    with contextlib.nullcontext() if synced else pair.engine.no_sync():
        pair.back()
        for params in zip(*pair.params(), strict=True):
            if way == "clip":
                assert float(torch.nn.utils.clip_grad_norm_(params, 0.01)) > 0.01
            for index, param in enumerate(params):
                assert param.grad is not None
                if way == "scale":
                    param.grad.mul_(0.5)
                elif way == "add":
                    param.grad.add_(torch.full(param.shape, 0.25))
                elif way == "none" and index % 2:
                    param.grad = None
                elif way in {"replace", "zero", "again", "regulariser"} and index % 2:
                    param.grad = torch.full(param.shape, 0.1 * index)
        if way == "zero":
            pair.engine.module.zero_grad() if synced else pair.engine.zero_grad()
            pair.plain.zero_grad()
        if way == "again":
            pair.back(micro=1)
    if way in {"zero", "scale"} and not synced:
        assert (way == "zero") == all(ours.grad is None for ours, _ in pair.params())
        pair.back(micro=2)
    elif way == "regulariser":  # its backward passes no output of a module
        for model in (pair.engine.module, pair.plain):
            sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    elif way == "reduced":
        pair.engine.allreduce_gradients()
        assert max(scaled_error(ours.grad, plain.grad) for ours, plain in pair.params()) <= 1e-6  # type: ignore[arg-type]
    elif way == "set":
        ours, plain = pair.params()[0]
        safe_set_full_grad(ours, torch.full(ours.shape, 3.0))
        assert float(ours.grad.flatten()[0]) == pytest.approx(3.0)  # type: ignore[union-attr]
        plain.grad = torch.full(plain.shape, 3.0)
    return pair.finish()


BOTH = ("scale", "replace", "none", "zero", "again", "regulariser")


@pytest.mark.parametrize("changes", [{}, PREDIVIDED], ids=["mean", "predivided"])
@pytest.mark.parametrize(
    ("way", "synced"),
    [*((way, True) for way in (*BOTH, "clip", "add", "set")), *((way, False) for way in (*BOTH, "reduced"))],
)
def test_edits_of_a_shown_gradient_count(pool2: RankPool, way: str, synced: bool, changes: dict[str, Any]) -> None:  # noqa: FBT001
    """Reduced, or shown by no_sync: in place, by another tensor, by None, and with a further backward behind them."""
    assert max(pool2.run(edited, way, changes, synced=synced)) <= TOLERANCE


def clipped_in_vain(stage: int) -> tuple[list[str], list[bool]]:
    original = torch.nn.utils.clip_grad_norm_
    engines = [start(case_named("plain").build(), make_config(stage)) for _ in range(2)]
    with logged(logging.WARNING) as said:
        for engine in engines:
            for step in range(2):
                engine.backward(case_named("plain").seeded_loss(engine, here(step))[0])
                torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
                torch.nn.utils.clip_grad.clip_grad_norm_(parameters=engine.module.parameters(), max_norm=1.0)
                torch.nn.utils.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
                engine.step()
    wrapped = [torch.nn.utils.clip_grad_norm_ is original]
    for engine in engines:  # not in reverse order
        engine.destroy()
        wrapped.append(torch.nn.utils.clip_grad_norm_ is original)
    return [text for text in said if "clip_grad_norm_" in text], wrapped


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_of_sharded_gradients_is_told_once(pool2: RankPool, stage: int) -> None:
    """Once for each engine, with the remedy; torch is as before when the last one has gone."""
    for said, restored in pool2.run(clipped_in_vain, stage):
        assert len(said) == (2 if stage else 0)
        assert all("gradient_clipping" in text and "get_global_grad_norm" in text for text in said)
        assert restored == [False, False, True]


# -- backwards that write the gradient themselves ----------------------------------------------------------------


class Blocks(nn.Module):
    """A pipeline stage: tensors in, tensors out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def split_backward(stage: int, window: int) -> float:
    """Zero-bubble schedules: gradients of the inputs first, those of the weights after those of other micro-batches."""
    engine = start(Blocks(), make_config(stage, gradient_accumulation_steps=window))
    plain = Blocks()
    optimizer = gate_optimizer(plain)

    def batch(place: MicroBatch) -> Tensor:
        return torch.randn(4, 6, generator=place.generator())

    for step in range(2):
        waiting = []
        for micro in range(window):
            x = batch(here(step, micro)).requires_grad_()
            loss = engine(x).square().mean()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _, groups = stage_backward_input([loss], None, [x], engine.module.parameters())
            waiting.append(groups)
            if micro % 2 or micro == window - 1:
                while waiting:
                    stage_backward_weight(engine.module.parameters(), waiting.pop(0))
            engine.step()
        world = dist.get_world_size()
        for rank in range(world):
            for micro in range(window):
                (plain(batch(MicroBatch(step, micro, rank, world))).square().mean() / world / window).backward()
        optimizer.step()
        optimizer.zero_grad()
    error, _ = parameter_error(engine.module, {name: param.detach() for name, param in plain.named_parameters()})
    engine.destroy()
    return error


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_split_backward_of_pipeline_schedules(pool2: RankPool, stage: int, window: int) -> None:
    assert max(pool2.run(split_backward, stage, window)) <= TOLERANCE
