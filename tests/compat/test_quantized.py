"""Frozen bases quantized by bitsandbytes and torchao, with adapters trained beside them: the losses of one process in
plain torch, at every stage and on one and two ranks; a checkpoint comes back bit for bit.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.zero.param import ReleasedFace
from tests.compat.common import need
from tests.harness.pool import RankPool

need("bitsandbytes", "torchao")

IN, OUT, RANK, STEPS, MICRO = 64, 128, 4, 4, 4
SHARDED = ("nf4", "int8")  # parameters whose bytes are cut; a tensor that stands for several stays whole


def nf4(linear: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32)
    made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    return made.to("cpu")  # type: ignore[no-any-return]  # where it quantizes


def int8(linear: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    return made.to("cpu")  # type: ignore[no-any-return]


def torchao_int8(linear: nn.Linear) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    around = nn.Sequential(linear)
    quantize_(around, Int8WeightOnlyConfig())
    return around[0].requires_grad_(requires_grad=False)


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {"nf4": nf4, "int8": int8, "torchao": torchao_int8}


class Adapted(nn.Module):
    def __init__(self, kind: str, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = KINDS[kind](nn.Linear(inputs, outputs, bias=False))
        self.down, self.up = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def trained(kind: str, stage: int, folder: Path) -> tuple[list[float], list[float], bool, bool]:
    """Losses here and in plain torch; whether a base is cut; whether the outputs are the same after a load."""
    torch.manual_seed(0)
    plain = nn.Sequential(Adapted(kind, IN, OUT), nn.ReLU(), Adapted(kind, OUT, IN))
    model = copy.deepcopy(plain)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )
    optimizer = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    cut = any(isinstance(p, ReleasedFace) and not p.requires_grad for p in model.parameters())
    draw = torch.Generator().manual_seed(1)
    found, wanted = [], []
    for _ in range(STEPS):
        batch = torch.randn(dist.get_world_size(), MICRO, IN, generator=draw)
        loss = engine(batch[dist.get_rank()]).pow(2).mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean) / len(batch))
        expected = sum(plain(part).pow(2).mean() for part in batch) / len(batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        wanted.append(float(expected.detach()))
    engine.save_checkpoint(folder)
    probe = torch.ones(1, IN)
    with torch.no_grad():
        before = engine(probe).clone()
    engine.backward(engine(probe).sum())
    engine.step()
    engine.load_checkpoint(folder)
    with torch.no_grad():
        after = engine(probe)
    engine.destroy()
    return found, wanted, cut, torch.equal(before, after)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_over_a_quantized_base(
    kind: str, stage: int, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    for found, wanted, cut, same in pool.run(trained, kind, stage, tmp_path):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert cut == (stage == 3 and ranks > 1 and kind in SHARDED)
        assert same
