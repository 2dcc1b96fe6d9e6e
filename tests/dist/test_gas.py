"""However a global batch is split over ranks, micro-batches and accumulation, the gradient and the loss are the
same.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deepspeed.tools.verify.grads import full_gradients, scaled_error
from deepspeed.tools.verify.models import IN_FEATURES, OUT_FEATURES, Stack, seeded
from deepspeed.tools.verify.reference import gate_optimizer, trainable
from tests.harness.training import STAGES, make_config, outcome, parameter_error, start

pytestmark = pytest.mark.timeout(120)
GLOBAL_BATCH = 8
SPLITS = [(1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8), (2, 1, 4), (4, 2, 1)]


def global_batch() -> tuple[Tensor, Tensor]:
    """Eight samples and their targets."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(GLOBAL_BATCH, IN_FEATURES, generator=generator)
    return x, torch.randn(GLOBAL_BATCH, OUT_FEATURES, generator=generator)


def plain_gradients(weights: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole batch at once; ``weights`` are per-sample weights that add up to 1."""
    x, y = global_batch()
    model = seeded(Stack)()
    per_sample = F.mse_loss(model(x), y, reduction="none").mean(dim=1)
    loss = per_sample.mean() if weights is None else (per_sample * weights).sum()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def split_run(stage: int, micro: int, accumulation: int) -> tuple[float, float]:
    """Errors of the reported mean loss and of the gradients under one split."""
    expected_loss, expected = plain_gradients()
    world, rank = dist.get_world_size(), dist.get_rank()
    engine = start(
        seeded(Stack)(),
        make_config(
            stage, train_batch_size=GLOBAL_BATCH, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=None
        ),
    )
    assert engine.gradient_accumulation_steps() == accumulation
    x, y = global_batch()
    total = torch.zeros(())
    for index in range(accumulation):
        rows = slice((index * world + rank) * micro, (index * world + rank + 1) * micro)
        total += engine.backward(F.mse_loss(engine(x[rows]), y[rows])).detach()
        if index < accumulation - 1:
            assert not engine.is_gradient_accumulation_boundary()
            engine.step()
    assert engine.is_gradient_accumulation_boundary()
    grads = full_gradients(trainable(engine.module))
    engine.step()
    counters = (engine.global_steps, engine.micro_steps, engine.global_samples)
    assert counters == (1, accumulation, GLOBAL_BATCH), counters
    engine.destroy()
    dist.all_reduce(total)
    error = max(scaled_error(grad, expected[name]) for name, grad in grads.items())
    return abs(float(total) / world - expected_loss), error


@pytest.mark.in_make_test("ranks1-micro8-accum1-0", "ranks2-micro2-accum2-2", "ranks2-micro1-accum4-3")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "ranks{}-micro{}-accum{}".format(*split))
def test_split_does_not_change_the_gradient(
    request: pytest.FixtureRequest, split: tuple[int, int, int], stage: int
) -> None:
    ranks, micro, accumulation = split
    pool = request.getfixturevalue(f"pool{ranks}")
    for loss_error, grad_error in pool.run(split_run, stage, micro, accumulation):
        assert loss_error <= 1e-6 and grad_error <= 1e-6, (loss_error, grad_error)


def ragged_run(stage: int) -> float:
    """Each micro-batch has another number of tokens; the caller normalises by the global count."""
    counts = torch.tensor([3, 1, 2, 2], dtype=torch.float32)  # rows per (micro, rank), in order
    _, expected = plain_gradients(torch.full((GLOBAL_BATCH,), 1.0 / GLOBAL_BATCH))
    world, rank = dist.get_world_size(), dist.get_rank()
    engine = start(seeded(Stack)(), make_config(stage, gradient_accumulation_steps=2))
    x, y = global_batch()
    bounds = [0, *torch.cumsum(counts, 0).int().tolist()]
    for index in range(2):
        piece = index * world + rank
        rows = slice(bounds[piece], bounds[piece + 1])
        loss = F.mse_loss(engine(x[rows]), y[rows], reduction="none").mean(dim=1).sum()
        engine.backward(loss * world / GLOBAL_BATCH, scale_wrt_gas=False)
        if index == 0:
            engine.step()
    grads = full_gradients(trainable(engine.module))
    engine.step()
    engine.destroy()
    return max(scaled_error(grad, expected[name]) for name, grad in grads.items())


@pytest.mark.parametrize("stage", STAGES)
def test_ragged_counts_with_one_owner_of_scaling(pool2: Any, stage: int) -> None:
    assert max(pool2.run(ragged_run, stage)) <= 1e-6


def _batch_that_does_not_divide() -> str:
    config = make_config(1, train_batch_size=7, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None)
    return outcome(lambda: start(seeded(Stack)(), config))


def test_a_batch_the_world_does_not_divide_is_refused(pool2: Any) -> None:
    for text in pool2.run(_batch_that_does_not_divide):
        assert "AssertionError" in text and "7" in text, text


def _of_window(window: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * window + 10 * micro + rank)
    return torch.randn(2, IN_FEATURES, generator=generator), torch.randn(2, OUT_FEATURES, generator=generator)


def changed_lengths(stage: int, calls: dict[tuple[int, int], int], client: bool) -> tuple[float, list[int]]:  # noqa: FBT001
    """Train five windows beside plain PyTorch; ``calls``: the new length by window and micro-batches in it before the
    call. Returns the largest error of a parameter and the lengths. ``client``: ``optimizer.step`` ends a window.
    """
    world, lengths, length, wanted = dist.get_world_size(), list[int](), 3, 3
    engine = start(seeded(Stack)(), make_config(stage, gradient_accumulation_steps=3, train_micro_batch_size_per_gpu=2))
    model = seeded(Stack)()
    optimizer = gate_optimizer(model)
    for window in range(5):
        lengths.append(0)
        length = wanted
        while engine.global_steps == window:
            if (window, lengths[-1]) in calls:
                wanted = calls[window, lengths[-1]]
                engine.set_train_batch_size(2 * world * wanted)
                length = wanted if lengths[-1] == 0 else length
            assert engine.gradient_accumulation_steps() == length > lengths[-1]
            for rank in range(world):
                x, y = _of_window(window, lengths[-1], rank)
                (F.mse_loss(model(x), y) / (world * length)).backward()
            x, y = _of_window(window, lengths[-1], dist.get_rank())
            engine.backward(F.mse_loss(engine(x), y))
            lengths[-1] += 1
            if not client:
                engine.step()
            elif lengths[-1] == length:
                engine.optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    error = parameter_error(engine.module, {name: p.detach() for name, p in model.named_parameters()})[0]
    engine.destroy()
    return error, lengths


@pytest.mark.parametrize("client", [False, True], ids=["engine.step", "optimizer.step"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_window_has_the_length_that_its_micro_batches_are_divided_by(pool2: Any, stage: int, client: bool) -> None:  # noqa: FBT001
    """``set_train_batch_size`` between two windows begins one; inside a window it counts from the next one on."""
    for error, lengths in pool2.run(changed_lengths, stage, {(1, 0): 2, (3, 1): 4}, client):
        assert lengths == [3, 2, 2, 2, 4]
        assert error <= 1e-6, error
