"""Reductions: of windows of any length, once for each unit, of a gradient where autograd left it, over a communicator
of their own.

That splits of a batch give one gradient, test_verify_training.py shows.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import IN_FEATURES, OUT_FEATURES, Stack, case_named, seeded
from deepspeed.tools.verify.reference import gate_optimizer
from deepspeed.utils import safe_get_full_grad
from deepspeed.zero.window import GradientWindow
from tests.harness.lockstep import equal
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, make_config, parameter_error, start, train_step

pytestmark = pytest.mark.timeout(120)


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


# -- gradient taken over --------------------------------------------------------------------------------------------
ROWS, WIDTH = 16, 24  # 384 elements: no padding in the unit of the head


class _Pair(nn.Module):
    """Two units of one parameter, whose gradients autograd lets share one memory where ``both`` is set."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.both = both
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.other = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.both:  # neither module runs: the parameters are fetched as they are read
            return (self.head.weight.view(-1) + self.other.weight.view(-1)).square().sum() * x.sum()
        return self.other(x).square().sum() + self.head(x).square().sum()


def _backward(*, both: bool = False, keep: bool = False) -> dict[str, object]:
    """How many gradients were reduced in place, what was kept of the head's, and the reduced gradients."""
    model = _Pair(both=both)
    kept: list[torch.Tensor] = []
    if keep:  # another's hook: it runs before the engine's, and its gradient is the engine's one
        model.head.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    moved: list[int] = []
    engine = start(model, make_config(3, zero={"param_persistence_threshold": 0}))
    open_window = GradientWindow.open

    def spy(
        window: GradientWindow, dtype: torch.dtype, device: torch.device, *, begin: torch.Tensor | None = None
    ) -> torch.Tensor:
        partial = open_window(window, dtype, device, begin=begin)
        if begin is not None:
            moved.append(int(partial.data_ptr() != begin.data_ptr()))
        return partial

    with mock.patch.object(GradientWindow, "open", spy):
        engine.backward(engine(torch.ones(2, WIDTH)))
    before = [g.clone() for g in kept]
    whole = [safe_get_full_grad(p) for p in (engine.module.head.weight, engine.module.other.weight)]
    engine.step()
    same = all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    engine.destroy()
    return {"moved": moved, "kept": before, "unchanged": same, "whole": whole}


def _plain(*, both: bool = False) -> list[torch.Tensor]:
    model = _Pair(both=both)
    model(torch.ones(2, WIDTH)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_gradient_of_a_whole_unit_is_not_copied(pool2: RankPool) -> None:
    for seen in pool2.run(_backward):
        assert seen["moved"] == [0, 0]
        for ours, plain in zip(seen["whole"], _plain(), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)


def test_gradient_that_a_client_holds_is_copied_and_stays_the_clients(pool2: RankPool) -> None:
    plain = _plain()
    for seen in pool2.run(_backward, keep=True):
        assert seen["moved"] == [0]  # of the other one
        assert torch.equal(seen["kept"][0], plain[0]) and seen["unchanged"]
        torch.testing.assert_close(seen["whole"][0], plain[0], rtol=1e-6, atol=1e-7)


def test_gradients_that_share_memory_are_both_right(pool2: RankPool) -> None:
    for seen in pool2.run(_backward, both=True):
        for ours, plain in zip(seen["whole"], _plain(both=True), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)


def _numpys() -> float:
    """What is left of an array, at first 2.0, that a client's hook has given as the gradient."""
    model = _Pair(both=False)
    array = torch.full((ROWS, WIDTH), 2.0).numpy().copy()
    model.head.weight.register_hook(lambda _: torch.from_numpy(array))
    engine = start(model, make_config(3, zero={"param_persistence_threshold": 0}))
    engine.backward(engine(torch.ones(2, WIDTH)))
    engine.destroy()
    return float(array.max())


def test_memory_of_numpy_is_not_written_to(pool2: RankPool) -> None:
    assert pool2.run(_numpys) == [2.0, 2.0]


# -- reduce group ---------------------------------------------------------------------------------------------------
def _train(zero: dict[str, Any]) -> dict[str, Any]:
    """Losses, weights, and which operations went over the axis and over the group of the sums."""
    case = case_named("plain")
    before = set(dist.distributed_c10d._world.pg_map)
    engine = start(case.build(), make_config(3, zero=zero))
    axis, apart = engine.mesh.groups[0], engine.mesh.reducing
    sent: dict[str, set[str]] = {"axis": set(), "apart": set()}
    for name, group in (("axis", axis), ("apart", apart)):
        if group is not None:
            group.ledger.append(lambda op, *_, name=name: sent[name].add(op))
    losses = [train_step(engine, case, step) for step in range(3)]
    weights: dict[str, Tensor] = full_parameters(engine.module)
    engine.destroy()
    left = len(set(dist.distributed_c10d._world.pg_map) - before)
    return {"losses": losses, "weights": weights, "sent": sent, "left": left, "apart": apart is not None}


def _both(zero: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _train(zero), _train({**zero, "separate_reduce_group": True})


def _check(runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for shared, apart in runs:
        assert not shared["apart"] and apart["apart"]
        assert shared["losses"] == apart["losses"]
        assert equal(shared["weights"], apart["weights"])
        assert {"all_gather", "reduce_scatter"} <= shared["sent"]["axis"]
        assert "all_gather" in apart["sent"]["axis"] and "reduce_scatter" not in apart["sent"]["axis"]
        assert apart["sent"]["apart"] == {"reduce_scatter"}
        assert shared["left"] == apart["left"] == 0


def test_sums_over_their_own_communicator_are_equal_bit_for_bit(pool2: RankPool) -> None:
    _check(pool2.run(_both, {"param_persistence_threshold": 0}))


def test_of_two_axes_the_inner_one_has_it(pool4: RankPool) -> None:
    _check(pool4.run(_both, {"param_persistence_threshold": 0, "mics_shard_size": 2}))


def _without_shards() -> bool:
    engine = start(case_named("plain").build(), make_config(2, zero={"separate_reduce_group": True}))
    none = engine.mesh.reducing is None
    engine.destroy()
    return none


def test_where_nothing_is_gathered_in_the_backward_there_is_none(pool2: RankPool) -> None:
    assert pool2.run(_without_shards) == [True, True]
