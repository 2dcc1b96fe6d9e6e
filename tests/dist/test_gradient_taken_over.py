"""A gradient that is all of its unit, and nobody else's, is reduced where autograd left it; others are copied, and
whoever holds them keeps what was there.
"""

import pytest
import torch
from torch import nn

from deepspeed.utils import safe_get_full_grad
from deepspeed.zero.window import GradientWindow
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start

pytestmark = pytest.mark.timeout(60)
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

    GradientWindow.open = spy  # type: ignore[method-assign]
    try:
        engine.backward(engine(torch.ones(2, WIDTH)))
    finally:
        GradientWindow.open = open_window  # type: ignore[method-assign]
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
