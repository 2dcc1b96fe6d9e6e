"""A TiledLinear computes and trains as the torch.nn.Linear whose values it has."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.zero import TiledLinear, TiledLinearReturnBias
from tests.harness.pool import RankPool


class _ReturnsBias(nn.Linear):
    """A layer as Megatron has them: its bias is for others to add."""

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.in_make_test("1-1-False", "2-3-True", "7-1-True", "3-5-False")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (2, 3), (7, 1), (3, 5)])
def test_tiles_compute_what_the_whole_layer_does(in_splits: int, out_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(7, 5, bias=bias)
    tiled = TiledLinear(7, 5, bias, in_splits, out_splits, init_linear=whole)
    x = torch.randn(2, 3, 7)
    assert torch.allclose(tiled(x), whole(x), atol=1e-6)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())
    assert {tuple(tile.weight.shape) for tile in tiled.linears} <= {
        (out, inside)
        for out in (5 // out_splits, -(-5 // out_splits))
        for inside in (7 // in_splits, -(-7 // in_splits))
    }


def test_slices_in_and_out() -> None:
    whole = nn.Linear(4, 6)
    tiled = TiledLinear(4, 6, in_splits=2, out_splits=3, input_is_already_split=True, combine_out_splits=False)
    tiled.copy_params_from(whole)
    x = torch.randn(2, 4)
    out = tiled(x.split(2, dim=-1))
    assert [tuple(part.shape) for part in out] == [(2, 2)] * 3
    assert torch.allclose(torch.cat(out, -1), whole(x), atol=1e-6)
    with pytest.raises(RuntimeError, match="with 2 in_splits got 4 slices"):
        tiled(x.split(1, dim=-1))


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_that_is_returned(bias: bool) -> None:
    whole, x = nn.Linear(4, 6, bias=bias), torch.randn(2, 4)
    options: dict[str, Any] = {"in_splits": 2, "out_splits": 3, "linear_cls": _ReturnsBias, "init_linear": whole}
    output, added = TiledLinearReturnBias(4, 6, bias, **options)(x)
    assert (added is None) is not bias
    assert torch.allclose(output + (added if bias else 0), whole(x), atol=1e-6)
    outputs, biases = TiledLinearReturnBias(4, 6, bias, combine_out_splits=False, **options)(x)
    assert torch.equal(torch.cat(outputs, -1), output) and (biases is None or torch.equal(torch.cat(biases), added))


@pytest.mark.parametrize("splits", [{"in_splits": 0}, {"in_splits": 5}, {"out_splits": 7}, {"out_splits": -1}])
def test_splits_that_the_features_have_not_are_refused(splits: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match="has to be 1 to"):
        TiledLinear(4, 6, **splits)
    with pytest.raises(RuntimeError, match=r"shape \(6, 4\), and \(4, 6\) is needed"):
        TiledLinear(6, 4).copy_params_from(nn.Linear(4, 6))


class _Block(nn.Module):
    """A block of a model, with a wide layer in tiles or in one piece."""

    def __init__(self, splits: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide = TiledLinear(64, 64, in_splits=splits, out_splits=splits) if splits else nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wide(self.norm(x)).tanh()


def _sharded() -> tuple[list[str], float]:
    """Units that come and go, and the largest difference of a loss from plain training."""
    torch.manual_seed(0)
    whole, tiled = (nn.Sequential(*(_Block(splits) for _ in range(2))) for splits in (0, 2))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.0}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=tiled, config=config | {"gradient_clipping": 0.0})
    for mine, theirs in zip(tiled, whole, strict=True):
        mine.wide.copy_params_from(theirs.wide)
    units, worst = [unit.name for unit in engine.runtime.units if unit.movable], 0.0
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        loss, theirs = engine(x).square().mean(), whole(x).square().mean()
        worst = max(worst, abs(float(loss) - float(theirs)))
        engine.backward(loss)
        engine.step()
        theirs.backward()
        plain.step()
        plain.zero_grad()
    engine.destroy()
    return units, worst


def test_sharded_tiles_are_units_of_their_own_and_train_as_the_whole_layer_does(pool2: RankPool) -> None:
    for units, worst in pool2.run(_sharded):
        assert units == [f"{b}{part}" for b in "01" for part in ("", *(f".wide.linears.{i}" for i in range(4)))]
        assert worst < 1e-6
