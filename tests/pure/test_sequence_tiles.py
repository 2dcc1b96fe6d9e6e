"""Tiles in one process: values, gradients, random numbers, and what is refused."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from deepspeed.config.model.sequence import SequenceConfig
from deepspeed.errors import UsageError
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from deepspeed.sequence.tiling import logits
from deepspeed.sequence.tiling.logits import LazyHead, LazyLogits
from deepspeed.sequence.tiling.memory import _TiledForward, save_memory


class _Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.drop(self.up(x).relu()))
        return out


def _call(module: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(x)
    return out


def _gradients(loss: torch.Tensor, *of: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, of, **options))


def _error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("shape", [(2, 13, 8), (13, 8)])
@pytest.mark.parametrize("shards", [1, 4, 99])
def test_a_tiled_mlp_is_the_whole_one_and_a_retained_graph_gives_the_same_again(
    shape: tuple[int, ...], shards: int
) -> None:
    mlp, x = _Mlp(), torch.randn(shape, requires_grad=True)
    whole, tiles = mlp(x), TiledMLP.apply(_call, mlp, x, shards, None)
    assert torch.allclose(tiles, whole, atol=1e-6)
    of = [x, *mlp.parameters()]
    wanted = _gradients(whole.square().sum(), *of)
    loss = tiles.square().sum()
    first = _gradients(loss, *of, retain_graph=True)
    assert _error(first, wanted) <= 1e-6
    assert all(torch.equal(a, b) for a, b in zip(first, _gradients(loss, *of), strict=True))


def test_the_backward_draws_the_random_numbers_of_the_forward() -> None:
    mlp, x = _Mlp(0.5), torch.randn(2, 12, 8, requires_grad=True)
    torch.manual_seed(3)
    out = TiledMLP.apply(_call, mlp, x, 4, None)
    after = torch.get_rng_state()
    (grad,) = _gradients(out.sum(), x)
    assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(3)
    parts = [part.detach().requires_grad_() for part in x.split(3, 1)]
    wanted = [_gradients(mlp(part).sum(), part)[0] for part in parts]
    assert torch.equal(grad, torch.cat(wanted, 1))


def test_weight_gradients_of_tiles_in_bf16_are_summed_in_fp32_and_rounded_once() -> None:
    mlp, x = _Mlp().bfloat16(), torch.randn(1, 4096, 8).bfloat16()
    tiles = _gradients(TiledMLP.apply(_call, mlp, x, 512, None).float().sum(), mlp.up.weight, mlp.down.weight)
    parts = [_gradients(mlp(part).float().sum(), mlp.up.weight, mlp.down.weight) for part in x.split(8, 1)]
    wanted = [torch.stack([part[i].float() for part in parts]).sum(0) for i in range(2)]
    assert all(grad.dtype == torch.bfloat16 for grad in tiles)
    assert _error(tiles, wanted) <= 2**-8  # a sum in bf16 is wrong by a tenth and more


def test_a_parameter_that_nobody_named_gets_one_gradient() -> None:
    mlp, x, extra = _Mlp(), torch.randn(2, 12, 8, requires_grad=True), nn.Parameter(torch.randn(8))
    fired: list[int] = []
    extra.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    TiledMLP.apply(lambda module, part: module(part) * extra, mlp, x, 4, [mlp.up.weight]).sum().backward()
    assert fired == [1]
    assert extra.grad is not None and torch.allclose(extra.grad, mlp(x).sum((0, 1)), atol=1e-4)


@pytest.mark.parametrize("named", [False, True])
def test_a_hook_on_a_parameter_sees_one_gradient_a_backward(named: bool) -> None:  # noqa: FBT001
    """Tensor parallelism sums the gradients of shared norms in such a hook: each call is a collective."""
    grads = []
    for shards in (0, 3):
        mlp, x, calls = _Mlp(), torch.linspace(-1, 1, 104).view(1, 13, 8).requires_grad_(), list[int]()
        for param in mlp.parameters():
            param.register_hook(lambda grad, calls=calls: (calls.append(1), 2 * grad)[1])
        listed = [*mlp.parameters()] if named else [mlp.up.weight]
        out = TiledMLP.apply(_call, mlp, x, shards, listed) if shards else mlp(x)
        out.square().sum().backward()
        assert len(calls) == 4
        grads.append([param.grad for param in mlp.parameters()])
    assert _error(grads[1], grads[0]) <= 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_tiles_are_weighed_by_their_positions(reduction: Any) -> None:
    head, x = nn.Linear(8, 5), torch.randn(2, 13, 8, requires_grad=True)
    y, mask = torch.randint(5, (2, 13)), torch.rand(2, 13)

    def loss(module: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows = functional.cross_entropy(module(x).flatten(0, 1), y.flatten(), reduction="none")
        rows = rows if mask is None else rows * mask.flatten()
        return rows.mean() if reduction == "mean" else rows.sum()

    of = [x, *head.parameters()]
    for given in (None, mask):
        whole = loss(head, x, y, given)
        tiles = TiledFusedLogitsLoss.apply(loss, head, x, y, given, 4, [*head.parameters()], reduction)
        assert abs(float(tiles.detach() / whole.detach()) - 1) <= 1e-6
        assert _error(_gradients(tiles, *of), _gradients(whole, *of)) <= 1e-6


def test_a_function_of_keywords_in_tiles() -> None:
    mlp, x, scale = _Mlp(), torch.randn(2, 12, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def compute(*, x: torch.Tensor, scale: torch.Tensor, module: Any, power: int) -> torch.Tensor:
        out: torch.Tensor = (module(x) * scale) ** power
        return out

    passed = {"scale": scale, "module": mlp, "power": 2}
    whole = compute(x=x, **passed)  # type: ignore[arg-type]
    of = [x, scale, *mlp.parameters()]
    wanted = _gradients(whole.sum(), *of)
    for axis, reduction in ((1, None), (0, None)):
        cut = x if axis else x.transpose(0, 1)
        out = sequence_tiled_compute(compute, 12, 5, {"x": cut}, passed, "x", None, axis, reduction)
        assert torch.allclose(out if axis else out.transpose(0, 1), whole, atol=1e-6)
        assert _error(_gradients(out.sum(), *of), wanted) <= 1e-6
    mean = sequence_tiled_compute(
        lambda **given: compute(**given).mean(), 12, 5, {"x": x}, passed, "x", mlp.parameters()
    )
    assert abs(float(mean.detach() / whole.detach().mean()) - 1) <= 1e-6


def test_what_tiles_cannot_do_is_said() -> None:
    mlp, x = _Mlp(), torch.randn(2, 12, 8)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        TiledMLP.apply(_call, mlp, x, 0, None)
    with pytest.raises(UsageError, match="returned a tuple"):
        TiledMLP.apply(lambda module, part: (module(part), None), mlp, x, 2, None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match=r"shape \(2, 6, 8\) for a tile"):
        sequence_tiled_compute(lambda x: x, 12, 2, {"x": x}, {}, "x")
    with pytest.raises(UsageError, match=r"shape \(2, 8\) for a tile of 6 positions"):
        sequence_tiled_compute(lambda x: x.sum(1), 12, 2, {"x": x}, {}, "x", output_reduction=None)
    with pytest.raises(UsageError, match="neither dimension 1 nor 0 is seqlen"):
        sequence_tiled_compute(lambda x: x, 11, 2, {"x": x}, {}, "x")
    with pytest.raises(UsageError, match="is none of the keys"):
        SequenceTiledCompute.apply(lambda x: x, 12, 2, ["x"], [], "y", None, 1, None, x)
    with pytest.raises(UsageError, match="'mean' or 'sum'"):
        TiledFusedLogitsLoss.apply(_call, mlp, x, x, None, 2, None, None)  # type: ignore[arg-type]


def _lazy(monkeypatch: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, torch.Tensor, LazyHead]:
    monkeypatch.setattr(logits, "TILE_BYTES", 3 * 11 * 4)
    torch.manual_seed(1)
    head, hidden = nn.Linear(8, 11, bias=False, dtype=dtype), torch.randn(2, 7, 8, dtype=dtype, requires_grad=True)
    lazy = LazyHead(head, always=True)
    head.forward = lazy  # type: ignore[assignment]
    return head, hidden, lazy


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_of_lazy_logits_is_that_of_all_and_rows_without_a_label_reach_no_head(
    monkeypatch: Any, reduction: str, smoothing: float
) -> None:
    head, hidden, lazy = _lazy(monkeypatch)
    target = torch.randint(11, (2, 6))
    target[0, :4] = -100
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    seen: list[int] = []
    linear = functional.linear
    monkeypatch.setattr(functional, "linear", lambda x, *rest: seen.append(len(x)) or linear(x, *rest))
    losses = []
    for words in (head(hidden), linear(hidden, head.weight)):
        words = (torch.tanh(words / 3) * 3)[:, :-1].float().contiguous().view(-1, 11)
        losses.append(functional.cross_entropy(words, target.view(-1), **options))
    assert torch.allclose(losses[0], losses[1], atol=1e-6)
    found, wanted = (
        _gradients((loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).sum(), hidden, head.weight)
        for loss in losses
    )
    assert _error(found, wanted) <= 1e-6
    assert sum(seen) == 2 * 8 and max(seen) <= 3  # 8 of 12 have a label; forward and backward


def test_lazy_logits_are_logits(monkeypatch: Any) -> None:
    head, hidden, lazy = _lazy(monkeypatch)
    words, whole = head(hidden), functional.linear(hidden, head.weight)
    assert type(words) is LazyLogits and words.shape == whole.shape and words.dtype == whole.dtype
    part = words[:, -1:, :] * 2
    assert type(part) is LazyLogits and torch.equal(part + 0 * whole[:, -1:], whole[:, -1:] * 2)
    assert torch.equal(words[..., :-1, :].argmax(-1), whole[:, :-1].argmax(-1)) and words._whole is None
    assert torch.equal(words[torch.tensor([[True] * 7, [False] * 7])].logsumexp(-1), whole[0].logsumexp(-1))
    assert [torch.equal(a.softmax(-1), b.softmax(-1)) for a, b in zip(words.split(1), whole.split(1), strict=True)] == [
        True
    ] * 2
    assert torch.equal(words[..., 3], whole[..., 3]) and torch.equal(
        torch.cat([words, whole]), torch.cat([whole, whole])
    )
    assert words._whole is not None
    assert torch.equal(head(hidden).argmax(axis=-1), whole.argmax(-1))
    assert torch.equal(head(hidden).split(split_size=1)[1], whole[1:])
    words.zero_()
    assert not words.any()
    with torch.no_grad():
        early = head(hidden)
        early.sum()
    assert torch.equal(_gradients(early.sum(), hidden)[0], _gradients(whole.sum(), hidden)[0])
    assert not isinstance(functional.cross_entropy(head(hidden).view(-1, 11), torch.rand(14, 11)), LazyLogits)
    lazy._always = False
    monkeypatch.setattr(logits, "TILE_BYTES", logits.MIB)
    assert type(head(hidden)) is torch.Tensor


def test_autocast_holds_in_the_recomputation(monkeypatch: Any) -> None:
    head, hidden, _ = _lazy(monkeypatch)
    target, grads = torch.randint(11, (14,)), []
    for compute in (head, lambda x: functional.linear(x, head.weight)):
        with torch.autocast("cpu", torch.bfloat16):
            words = compute(hidden)
        assert words.dtype == torch.bfloat16
        grads.append(_gradients(functional.cross_entropy(words.float().view(-1, 11), target), hidden, head.weight))
    assert _error(grads[0], grads[1]) <= 2**-7


class _Normed(nn.Module):
    """A layer, after which a norm of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"input_norm": nn.RMSNorm(8), "mlp": _Mlp()})])
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (layer,) = self.layers
        return self.norm(x + layer["mlp"](layer["input_norm"](x)))


def test_norms_are_computed_in_tiles_with_the_mlps() -> None:
    torch.manual_seed(0)
    model, x, rows = _Normed(), torch.randn(2, 9, 8, requires_grad=True), list[int]()
    of = [x, *model.parameters()]
    wanted = _gradients(model(x).square().sum(), *of)
    with ExitStack() as back:
        save_memory(model, SequenceConfig(mlp_tiles=3), shared=False, back=back)
        inner = model.norm.forward.forward
        model.norm.forward.forward = lambda part: (rows.append(part.shape[1]), inner(part))[1]
        found = _gradients(model(x).square().sum(), *of)
    assert rows == [3, 3, 3] * 2 and _error(found, wanted) < 1e-6
    assert "forward" not in vars(model.norm)


class _Stacked(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up, self.down = nn.Parameter(torch.zeros(experts, 32, 8)), nn.Parameter(torch.zeros(experts, 8, 32))


def test_experts_that_ranks_divide_get_the_tiles_of_what_one_of_them_computes(monkeypatch: Any) -> None:
    monkeypatch.setattr(logits, "TILE_BYTES", 1000)
    tokens, choices = torch.zeros(40, 8), torch.zeros(40, 1)
    module = _Stacked(8)
    forward = _TiledForward(module, "auto", [])
    tiles = forward._number(tokens, choices, choices)
    module.num_experts = 1
    for param in module.parameters():
        param.data = param.data[:1]
    assert forward._number(tokens, choices, choices) == tiles > 8
