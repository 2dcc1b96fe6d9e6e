"""A sequence in tiles: losses, gradients and norms equal those of one plain process, and no tile waits for a rank."""

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deepspeed.sequence.tiling import logits, memory
from deepspeed.sequence.tiling.tiles import TiledMLP
from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.harness.beside import Beside
from tests.harness.decoders import WORDS, Llama
from tests.harness.experts import StackedBlock
from tests.harness.training import make_config, start

pytestmark = pytest.mark.timeout(120)


class Long(Llama):
    """A language model that asks for its loss as those of Transformers do."""

    loss_function = staticmethod(functional.cross_entropy)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        words = super().forward(ids) / 3
        return SimpleNamespace(loss=self.loss_function(words.float().view(-1, WORDS), labels.view(-1)), logits=words)


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks have other lengths, so other numbers of tiles, and other numbers of labels; one of them once has none."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(1, WORDS, (2, 5 + 6 * rank), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, : 2 + rank] = -100
    return ids, labels


def _plainly(_: Long) -> None:
    """Leave the model as it is."""


def _frozen(model: Long) -> None:
    """As under an adapter: only the attention is trained, by the gradient of what passes frozen tiles."""
    for name, param in model.named_parameters():
        param.requires_grad_("self_attn" in name)


def _recomputed(model: Long) -> None:
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _mixed(model: Long) -> None:
    model.model.layers[-1].mlp = StackedBlock(4, 2)


def _own_head(model: Long) -> None:
    """A head that is no plain linear layer, as with an adapter."""

    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x[..., :1]

    model.lm_head.__class__ = Adapted


def _few_bytes(run: Any) -> Any:
    """Let ``run`` see three or four rows to a tile, from the first tile on."""
    run = mock.patch.multiple(logits, TILE_BYTES=4 * WORDS * 4, LAZY_FROM=2)(run)
    return mock.patch.object(memory, "_MLP_FROM", 2)(run)


@_few_bytes
def _parity(prepare: Any, stage: int, options: dict[str, Any], changes: dict[str, Any]) -> dict[str, float]:
    """Train two steps beside one process that sees the batches of both ranks; return the largest errors."""
    gas, world = changes.get("gradient_accumulation_steps", 1), dist.get_world_size()
    torch.manual_seed(1)
    model, plain = Long(**options), Long(**options)
    prepare(model)
    torch.manual_seed(1)
    prepare(plain)
    plain.load_state_dict(model.state_dict())
    lazy = model.lm_head
    engine = start(model, make_config(stage, gradient_clipping=0.5, **changes))
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **changes["optimizer"]["params"])
    worst = Beside(engine, plain, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(gas):
            batches = [_batch(gas * step + micro, rank) for rank in range(world)]
            losses = [plain(*batch).loss for batch in batches]
            (sum(losses) / (world * gas)).backward()  # type: ignore[union-attr]
            out = engine(*batches[dist.get_rank()])
            assert type(out.logits) is logits.LazyLogits
            engine.backward(out.loss)
            worst.loss(out.loss, losses[dist.get_rank()])
            if micro < gas - 1:
                engine.step()
        worst.gradients()
        worst.update()
    engine.destroy()
    return {**worst, "given back": float("forward" in vars(lazy))}


ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}}
CELLS: dict[str, tuple[Any, ...]] = {
    "stage 0": (_plainly, 0, {}, {}),
    "stage 2, accumulation": (_plainly, 2, {"bias": True}, {"gradient_accumulation_steps": 2}),
    "stage 3": (_plainly, 3, {}, {}),
    "stage 3, tied weights": (_plainly, 3, {"tied": True}, {}),
    "stage 3, frozen": (_frozen, 3, {}, {}),
    "stage 3, recomputed": (_recomputed, 3, {}, {}),
    "stage 3, experts": (_mixed, 3, {}, {}),
    "stage 3, a head of another class": (_own_head, 3, {}, {}),
    "stage 3, divergence is an error": (_plainly, 3, {}, {"zero": {"divergence": "error"}}),
    "stage 3, divergence is not looked for": (_plainly, 3, {}, {"zero": {"divergence": "assume_none"}}),
    "stage 1, tiles by number": (_plainly, 1, {}, {"sequence": {"loss": "tiled", "mlp_tiles": 3}}),
}


@pytest.mark.in_make_test(*(CELLS.keys() - {"stage 3"}))  # which every other cell of that stage shows
@pytest.mark.parametrize("cell", CELLS)
def test_tiles_train_as_the_whole_does_where_ranks_have_other_numbers_of_them(pool2: Any, cell: str) -> None:
    prepare, stage, options, changes = CELLS[cell]
    for errors in pool2.run(_parity, prepare, stage, options, {"optimizer": ADAMW, **changes}):
        assert max(errors.values()) <= 1e-6, errors


class _Pair(nn.Module):
    """Two layers that ZeRO gathers one at a time, as nothing repeats, with a parameter that no module runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.scale = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, shards: int) -> torch.Tensor:
        for _ in range(2):
            x = x + TiledMLP.apply(_between, self, x, shards, [self.up.weight]) if shards else x + _between(self, x)
        return x.square().mean()


def _between(module: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module.down(module.up(x).tanh()) @ module.scale
    return out


def _own_numbers(divergence: str, frozen: bool) -> tuple[float, list[int], int]:
    """Largest error of gradients; gathers of each step, with 1 tile first; gradients per parameter."""
    rank, gathers, fired = dist.get_rank(), list[int](), list[str]()
    model, plain = _Pair(), _Pair()
    for one in (model, plain):
        one.up.requires_grad_(not frozen)
    engine = start(model, make_config(3, zero={"divergence": divergence}))
    worst = 0.0
    for step, shards in enumerate((1, 5, 5, 3 + rank, 2 + 3 * rank, 1)):
        x = [torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(step * 2 + r)) for r in range(2)]
        plain.zero_grad()
        (sum(plain(part, 0) for part in x) / 2).backward()  # type: ignore[union-attr]
        before = engine.runtime.counts.gathers
        handles = [
            p.register_post_accumulate_grad_hook(lambda _, name=n: fired.append(name))
            for n, p in model.named_parameters()
            if step == 1 and p.requires_grad
        ]
        engine.backward(engine(x[rank], shards))
        gathers.append(engine.runtime.counts.gathers - before)
        for handle in handles:
            handle.remove()
        for name, param in model.named_parameters():
            if param.requires_grad:
                worst = max(worst, scaled_error(safe_get_full_grad(param), dict(plain.named_parameters())[name].grad))
        engine.step()
        with torch.no_grad():
            for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                if param.requires_grad:
                    wanted.copy_(safe_get_full_fp32_param(param))
    engine.destroy()
    return worst, gathers, max(fired.count(name) for name in fired)


@pytest.mark.parametrize(("divergence", "frozen"), [("tolerate", False), ("error", True), ("assume_none", False)])
def test_no_tile_gathers_and_each_parameter_gets_one_gradient(pool2: Any, divergence: str, frozen: bool) -> None:
    for worst, gathers, fired in pool2.run(_own_numbers, divergence, frozen):
        assert worst <= 1e-6
        assert max(gathers) == gathers[0]  # with one tile, and nothing foreseen yet
        assert fired == 1
