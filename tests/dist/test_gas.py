"""A window has the micro-batches by which its gradients are divided, also when its length changes. That splits of a
batch give one gradient, test_verify_training.py shows.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deepspeed.tools.verify.models import IN_FEATURES, OUT_FEATURES, Stack, seeded
from deepspeed.tools.verify.reference import gate_optimizer
from tests.harness.training import STAGES, make_config, outcome, parameter_error, start

pytestmark = pytest.mark.timeout(120)


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
    samples = 2 * world * sum(lengths)
    assert (engine.global_steps, engine.global_samples) == (len(lengths), samples), (engine.global_samples, samples)
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


def reductions_of_a_window(stage: int) -> float:
    """Reductions per unit and update with an accumulation of four."""
    engine = start(seeded(Stack)(), make_config(stage, gradient_accumulation_steps=4))
    for micro in range(8):
        x, y = _of_window(0, micro, dist.get_rank())
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
    count = engine.runtime.counts.reductions / 2 / len(engine.runtime.units)
    engine.destroy()
    return count


@pytest.mark.parametrize("stage", [0, 1])
def test_a_window_is_reduced_once_where_gradients_stay_local(pool2: Any, stage: int) -> None:
    """It was twice: the first gradient of the last backward sent the unit off."""
    assert pool2.run(reductions_of_a_window, stage) == [1.0, 1.0]
