"""Frozen weights that are codes beside their scales, in classes nobody here knows: they shard, gather, save and load.

``Codes4`` is made like the 4-bit parameters of bitsandbytes: bytes, and an attribute with an object that holds the
scales, themselves quantized. ``Rows8`` is made like a tensor of torchao: one tensor for its users, made of two.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.reference import gate_optimizer
from tests.harness.lockstep import equal
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, make_config, outcome, start

WIDTH, BLOCK, RANK = 16, 8, 2
aten = torch.ops.aten


class State:
    """Scales of blocks, as bytes with a scale of their own."""

    def __init__(self, absmax: Tensor, shape: torch.Size) -> None:
        self.shape = shape
        self.nested = {"top": absmax.max().reshape(1)}
        self.absmax = (absmax / self.nested["top"] * 255).round().to(torch.uint8)

    def scales(self) -> Tensor:
        return self.absmax.float() / 255 * self.nested["top"]


class Codes4(nn.Parameter):
    """Two codes a byte."""

    quant_state: State

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> "Codes4":  # noqa: FBT001, FBT002
        return torch.Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[no-any-return]

    @classmethod
    def of(cls, values: Tensor) -> "Codes4":
        blocks = values.reshape(-1, BLOCK)
        state = State(blocks.abs().amax(1), values.shape)
        codes = (blocks / state.scales().clamp(min=1e-8)[:, None] * 7 + 8).round().clamp(0, 15).to(torch.uint8).view(-1)
        made = cls((codes[::2] * 16 + codes[1::2]).unsqueeze(1))
        made.quant_state = state
        return made

    def dequantized(self) -> Tensor:
        assert type(self) is Codes4
        packed, state = self.as_subclass(Tensor).view(-1), self.quant_state
        codes = torch.stack([packed // 16, packed % 16], 1).view(-1, BLOCK).float()
        return ((codes - 8) / 7 * state.scales()[:, None]).view(state.shape)


class Rows8(Tensor):
    """Codes, and a scale for each row."""

    codes: Tensor
    scale: Tensor

    def __new__(cls, codes: Tensor, scale: Tensor) -> "Rows8":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: Tensor) -> nn.Parameter:
        scale = values.abs().amax(1, keepdim=True) / 127
        return nn.Parameter(cls((values / scale).round().to(torch.int8), scale), requires_grad=False)

    def dequantized(self) -> Tensor:
        return self.codes.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> "Rows8":
        return Rows8(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten._to_copy.default, aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        raise NotImplementedError(f"{func} of Rows8")


class Adapted(nn.Module):
    """A frozen base of one of these classes and an adapter that trains: [samples, WIDTH] -> [samples, WIDTH]."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight: Any = kind.of(torch.randn(WIDTH, WIDTH))
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        self.norm.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + F.linear(y, self.weight.dequantized()) + self.up(self.down(y))


def build(kind: Any, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted(kind) for _ in range(3)))


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()  # type: ignore[no-any-return]


def codes_of(model: Any) -> list[Tensor]:
    """The base as numbers, of a whole model."""
    return [block.weight.dequantized().clone() for block in model]


def same_base(model: Any, base: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(codes_of(model), base, strict=True))


def begin(kind: Any, stage: int, seed: int = 0, **changes: Any) -> Any:
    model = build(kind, seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    zero = {"param_persistence_threshold": 0, **changes}
    return deepspeed.initialize(model=model, model_parameters=trained, config=make_config(stage, zero=zero))[0]


PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


def run_training(kind: Any, stage: int, place: str) -> tuple[float, str, bool]:
    """The error of the adapters, and whether the base is the first rank's to the bit, at the end and when destroyed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine, plain = begin(kind, stage, seed=rank, **PLACES[place]), build(kind)
    optimizer, base = gate_optimizer(plain), codes_of(plain)
    for step in range(3):
        engine.backward(loss_of(engine, step, rank))
        engine.step()
        sum(loss_of(plain, step, r) / world for r in range(world)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    adapters = {name: p.detach() for name, p in plain.named_parameters() if p.requires_grad}
    values = full_parameters(engine.module)
    worst = max((float((values[name] - wanted).abs().max()), name) for name, wanted in adapters.items())
    model = engine.module
    engine.destroy()
    return (*worst, same_base(model, base))


@pytest.mark.in_make_test("0-device-Codes4", "3-device-Rows8", "3-host-Codes4")
@pytest.mark.parametrize("kind", [Codes4, Rows8])
@pytest.mark.parametrize(("stage", "place"), [*((stage, "device") for stage in STAGES), (3, "host")])
def test_adapters_train_on_a_quantized_base_as_in_plain_torch(
    pool2: RankPool, kind: Any, stage: int, place: str
) -> None:
    for error, where, same in pool2.run(run_training, kind, stage, place):
        assert error <= 1e-6 and same, where


def run_moved(stage: int) -> tuple[float, bool]:
    engine, plain = begin(Codes4, stage), build(Codes4)
    error = 0.0
    for step in range(2):
        for block in engine.module:  # as the 8-bit layers of bitsandbytes do in their forward
            block.weight.data = block.weight.data.clone()
        loss = loss_of(engine, step, 0)
        if step == 0:
            error = abs(float(loss.detach()) - float(loss_of(plain, step, 0).detach()))
        engine.backward(loss)
        engine.step()
    return error, same_base(engine.module, codes_of(plain))


@pytest.mark.parametrize("stage", [0, 2])
def test_frozen_codes_that_are_given_other_memory_come_back_with_their_values(pool2: RankPool, stage: int) -> None:
    for error, same in pool2.run(run_moved, stage):
        assert error <= 1e-6 and same


def run_saved(kind: Any, folder: Path) -> list[tuple[bool, bool, str]]:
    """Saved with the base and without, and loaded into engines over another one: whether the base is the saved one
    then, whether adapters are, and the error of a strict load.
    """
    engine, found = begin(kind, 3), []
    engine.backward(loss_of(engine, 0, dist.get_rank()))
    engine.step()
    adapters = {n: v for n, v in full_parameters(engine.module).items() if "up" in n}
    for tag in ("all", "adapters"):
        engine.save_checkpoint(folder, tag=tag, exclude_frozen_parameters=tag == "adapters")
    engine.destroy()
    for tag in ("all", "adapters"):
        other = begin(kind, 3, seed=9)
        said = outcome(lambda other=other, tag=tag: other.load_checkpoint(folder, tag=tag))
        if said:
            other.load_checkpoint(folder, tag=tag, load_module_strict=False)
        loaded = {n: v for n, v in full_parameters(other.module).items() if "up" in n}
        model = other.module
        other.destroy()
        found.append((same_base(model, codes_of(build(kind))), equal(loaded, adapters), said))
    return found


@pytest.mark.parametrize("kind", [Codes4, Rows8])
def test_a_checkpoint_has_codes_and_scales_and_one_of_the_adapters_alone_leaves_the_base(
    pool2: RankPool, kind: Any, tmp_path: Path
) -> None:
    for whole, alone in pool2.run(run_saved, kind, tmp_path):
        assert whole == (True, True, "")
        base, adapters, said = alone
        assert not base and adapters and "missing there" in said
        assert ("weight.quant_state.nested.top" if kind is Codes4 else "weight.codes") in said


def run_file(folder: Path) -> tuple[int, int, dict[str, torch.dtype]]:
    """Bytes of codes at rest and gathered on this rank, and what is in a file of weights."""
    engine = begin(Codes4, 3, gather_16bit_weights_on_model_save=True)
    units = [unit for unit in engine.runtime.units if unit.dtype is torch.uint8]
    shard = sum(unit.shard.nbytes for unit in units)
    gathered = sum(unit.buffer.full.untyped_storage().nbytes() for unit in units)
    engine.save_16bit_model(folder, "model.bin")
    engine.destroy()
    return shard, gathered, {name: value.dtype for name, value in torch.load(folder / "model.bin").items()}


def test_codes_take_their_share_of_bytes_and_a_file_of_weights_has_them_and_scales(
    pool2: RankPool, tmp_path: Path
) -> None:
    for shard, gathered, dtypes in pool2.run(run_file, tmp_path):
        assert (shard, gathered) == (3 * WIDTH * WIDTH // 2 // 2, 0), "half of the bytes, of two codes each"
        found = {name.partition(".")[2]: dtype for name, dtype in dtypes.items() if name.startswith("1.weight")}
        assert found == {
            "weight": torch.uint8,
            "weight.quant_state.absmax": torch.uint8,
            "weight.quant_state.nested.top": torch.float32,
        }


def run_trained() -> str:
    model = build(Rows8)
    model[0].weight.requires_grad_()  # type: ignore[operator]
    return outcome(lambda: start(model, make_config(1)))


def test_a_tensor_made_of_others_is_not_trained(pool1: RankPool) -> None:
    (said,) = pool1.run(run_trained)
    assert "parameter '0.weight' is a Rows8, made of other tensors" in said


def born_sharded(kind: Any) -> tuple[float, bool]:
    """How far the outputs are from plain torch's, and whether the base is the first rank's, to the bit."""
    config, rank = make_config(3, zero={"param_persistence_threshold": 0}), dist.get_rank()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(kind, rank)
    engine, plain = start(model, config), build(kind)
    error = float((loss_of(engine, 0, rank) - loss_of(plain, 0, rank)).abs().detach())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        same = same_base(model, codes_of(plain))
    engine.destroy()
    return error, same


@pytest.mark.parametrize("kind", [Codes4, Rows8])
def test_a_model_born_sharded_keeps_its_quantized_base(pool2: RankPool, kind: Any) -> None:
    for error, same in pool2.run(born_sharded, kind):
        assert error <= 1e-6 and same


class Tuned(nn.Module):
    """An adapted layer as PEFT makes them: the base quantized anew in ``merge``, in a parameter of its own."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.base_layer, self.merged_adapters = kind, nn.Module(), list[str]()
        self.base_layer.weight = kind.of(torch.randn(WIDTH, WIDTH))
        self.delta = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.base_layer.weight
        return F.linear(x, weight.dequantized()) + self.delta(x)

    def merge(self, safe_merge: bool = False) -> None:  # noqa: FBT001, FBT002
        weight: Any = self.base_layer.weight
        self.base_layer.weight = self.kind.of(weight.dequantized() + self.delta.weight)
        self.merged_adapters.append("default")


def merged_stream(kind: Any, stage: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(Tuned(kind), Tuned(kind))
    engine = start(model, make_config(stage, zero={"param_persistence_threshold": 0}))
    x = torch.ones(2, WIDTH)
    before = engine(x).detach().clone()
    said = outcome(lambda: list(engine.stream_weights(merge_adapters=True)))
    same = torch.equal(engine(x).detach(), before)
    engine.destroy()
    return said, same


@pytest.mark.parametrize("kind", [Codes4, Rows8])
def test_merging_into_a_quantized_base_is_refused_and_leaves_it(pool2: RankPool, kind: Any) -> None:
    for said, same in pool2.run(merged_stream, kind, 3):
        assert "UsageError" in said and "0.base_layer.weight is quantized" in said and same
