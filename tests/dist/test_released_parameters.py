"""A released parameter keeps its face: metadata works, reading values is one clear error, nothing crashes or writes
empty tensors.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import ReleasedParameterError
from deepspeed.tools.verify.models import (
    HIDDEN,
    IN_FEATURES,
    OUT_FEATURES,
    ResidualBlock,
    case_named,
)
from tests.harness.cases import regression
from tests.harness.lockstep import TOLERANCE, equal, live_bytes, lockstep
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, parameter_error, start, train_step

pytestmark = pytest.mark.timeout(60)
ZERO = {"param_persistence_threshold": 0}
NAME = "layers.1.up.weight"
SHAPE = (2 * HIDDEN, HIDDEN)


def _engine(dtype: torch.dtype = torch.float32, *, steps: int = 1) -> Any:
    config = make_config(3, zero=ZERO, **({"bf16": {"enabled": True}} if dtype is torch.bfloat16 else {}))
    engine = start(case_named("tied").build(), config)
    for step in range(steps):
        train_step(engine, case_named("tied"), step)
    return engine


def metadata(dtype: torch.dtype) -> None:
    engine, plain = _engine(dtype), case_named("tied").build()
    model = engine.module
    p = model.get_parameter(NAME)
    assert isinstance(p, nn.Parameter) and isinstance(p, Tensor) and torch.is_tensor(p)
    assert p.shape == p.size() == p.data.shape == p.detach().shape == SHAPE
    assert (p.size(0), len(p), p.dim(), p.ndim) == (SHAPE[0], SHAPE[0], 2, 2)
    assert {p.numel(), p.nelement(), torch.numel(p)} == {SHAPE[0] * SHAPE[1]}
    assert p.dtype is p.data.dtype is dtype and p.element_size() == p.itemsize == dtype.itemsize
    assert p.is_floating_point() and torch.is_floating_point(p) and not p.is_complex()
    assert p.device.type == "cpu" and p.is_cpu and not p.is_cuda and not p.is_meta
    assert p.layout is torch.strided and not p.is_sparse and p.is_contiguous() and p.data.stride() == (HIDDEN, 1)
    assert p.requires_grad and p.is_leaf and p.grad_fn is None and p.grad is None
    assert hash(p) == id(p) and p in {p} and p is model.get_parameter(NAME) and {p: 1}[p]
    assert torch.empty_like(p).shape == torch.zeros_like(p).shape == SHAPE
    assert torch.zeros_like(p).dtype is p.new_zeros(3).dtype is dtype
    assert sum(each.numel() for each in model.parameters()) == sum(each.numel() for each in plain.parameters())
    for text in (repr(p), repr(p.data), str(p), f"{p}"):
        assert NAME in text and str(SHAPE) in text, text
    assert repr(model) == repr(plain)
    assert live_bytes(model) == 0
    p.requires_grad_(False)
    p.requires_grad = True
    p.some_attribute = 3
    assert p.some_attribute == 3 and p.requires_grad
    engine.destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_metadata_of_a_released_parameter_tells_the_truth(pool2: RankPool, dtype: torch.dtype) -> None:
    pool2.run(metadata, dtype)


def _saved(thing: Any) -> None:
    torch.save(thing, io.BytesIO())


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda p: p + 1,
    "radd": lambda p: torch.ones(SHAPE) + p,
    "matmul": lambda p: torch.ones(1, SHAPE[0]) @ p,
    "linear": lambda p: F.linear(torch.ones(1, HIDDEN), p),
    "sum": lambda p: p.sum(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "item": lambda p: p[0, 0].item(),
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "float": lambda p: float(p),
    "bool": lambda p: bool(p.data.all()),
    "numpy": lambda p: p.detach().numpy(),
    "array": lambda p: p.__array__(),
    "tolist": lambda p: p.tolist(),
    "clone": lambda p: p.clone(),
    "detach clone": lambda p: p.detach().clone(),
    "data clone": lambda p: p.data.clone(),
    "cpu copy": lambda p: p.to("cpu", copy=True),
    "to float64": lambda p: p.double(),
    "half": lambda p: p.data.half(),
    "view": lambda p: p.view(-1).sum(),
    "data view": lambda p: p.data.view(-1).sum(),
    "transpose": lambda p: p.t().sum(),
    "detach transpose": lambda p: p.detach().t() + 1,
    "equal": lambda p: torch.equal(p, torch.ones(SHAPE)),
    "eq": lambda p: p == 0,
    "allclose": lambda p: torch.allclose(p, p),
    "stack": lambda p: torch.stack([p, p]),
    "cat": lambda p: torch.cat([p.data, p.data]),
    "copy_": lambda p: p.data.copy_(torch.ones(SHAPE)),
    "copy from": lambda p: torch.empty(SHAPE).copy_(p.data),
    "add_": lambda p: p.data.add_(1),
    "fill": lambda p: nn.init.zeros_(p),
    "normal": lambda p: nn.init.normal_(p),
    "setitem": lambda p: p.data.__setitem__(0, 1.0),
    "setitem into": lambda p: torch.empty(SHAPE).__setitem__(slice(None), p.data),
    "out": lambda p: torch.add(torch.ones(SHAPE), 1, out=p.data),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "foreach": lambda p: torch._foreach_add([p.data], 1),
    "foreach norm": lambda p: nn.utils.get_total_norm([p.data]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "where": lambda p: torch.where(torch.ones(SHAPE, dtype=torch.bool), p, 0.0),
    "einsum": lambda p: torch.einsum("ij->j", p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "deepcopy data": lambda p: copy.deepcopy(p.data),
    "pickle": lambda p: pickle.dumps(p),
    "pickle data": lambda p: pickle.dumps(p.data),
    "save": lambda p: _saved(p),
    "save data": lambda p: _saved({"w": p.data}),
    "safetensors": lambda p: safetensors.torch.save({"w": p.data}),
    "broadcast": lambda p: dist.broadcast(p.data, 0),
    "dlpack": lambda p: p.data.__dlpack__(),
    "from numpy": lambda p: torch.as_tensor(p.data).sum(),
    "share memory": lambda p: p.data.share_memory_(),
}


def reads() -> dict[str, str]:
    engine = _engine()
    p = engine.module.get_parameter(NAME)
    told = {name: outcome(lambda read=read: read(p)) for name, read in READS.items()}
    engine.runtime._gather(p._ds_unit, dummy=False)  # as between a forward and its backward
    told["in flight"] = outcome(p.sum)
    engine.runtime.flush()
    engine.destroy()
    return told


def test_every_read_of_a_released_parameter_raises_and_names_it(pool2: RankPool) -> None:
    """One that is in flight is refused, too, and never half-filled."""
    words = (ReleasedParameterError.__name__, NAME, "GatheredParameters")
    for told in pool2.run(reads):
        wrong = {name: text[:200] for name, text in told.items() if not all(word in text for word in words)}
        assert not wrong, wrong


def whole_models(folder: str) -> dict[str, str]:
    engine = _engine()
    model = engine.module
    target = Path(folder) / f"rank{dist.get_rank()}"
    other = case_named("tied").build()
    attempts: dict[str, Callable[[], Any]] = {
        "torch.save state_dict": lambda: torch.save(model.state_dict(), target),
        "torch.save module": lambda: torch.save(model, target),
        "safetensors": lambda: safetensors.torch.save_file(dict(model.state_dict()), target),
        "safetensors model": lambda: safetensors.torch.save_model(model, str(target)),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(model),
        "load from": lambda: other.load_state_dict(model.state_dict()),
        "double": lambda: model.double(),
        "half": lambda: model.half(),
        "engine state_dict": lambda: torch.save(engine.module.state_dict(), target),
    }
    told = {}
    for name, attempt in attempts.items():
        told[name] = outcome(attempt)
        assert outcome(lambda: torch.load(target, weights_only=False)), f"{name} has written a file that loads"
        target.unlink(missing_ok=True)
    train_step(engine, case_named("tied"), 1)
    engine.destroy()
    return told


def test_no_empty_tensor_can_be_written(pool2: RankPool, tmp_path: Path) -> None:
    for told in pool2.run(whole_models, str(tmp_path)):
        for name, text in told.items():
            assert "sharded over the ranks" in text, f"{name}: {text[:300]}"


def harmless_calls() -> None:
    engine = _engine()
    model = engine.module
    ours, plain = (
        [(name, value.shape, value.dtype) for name, value in each.state_dict().items()]
        for each in (model, case_named("tied").build())
    )
    assert ours == plain, "state_dict() lost keys or logical shapes"
    objects = [id(p) for p in model.parameters()]
    for call in (model.cpu, model.float, model.train, model.eval, model.train):
        call()
    model.to("cpu").to(torch.float32)
    p = model.get_parameter(NAME)
    assert p.to("cpu") is p and p.float() is p and p.to(p.device, p.dtype) is p, "what is there already moves"
    assert p.data.float() is not None
    model.zero_grad()
    model.zero_grad(set_to_none=False)
    model.requires_grad_(True)
    list(model.named_parameters()), list(model.buffers())
    assert objects == [id(p) for p in model.parameters()], "model.to() replaced parameters"
    train_step(engine, case_named("tied"), 1)
    saved = io.BytesIO()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        inside = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save({"w": p.data}, saved)
        assert copy.deepcopy(p).sum() == p.sum()
    engine.destroy()
    saved.seek(0)
    assert torch.load(saved)["w"].equal(inside[NAME])
    assert equal(dict(model.state_dict()), inside)


def test_harmless_calls_work(pool2: RankPool) -> None:
    pool2.run(harmless_calls)


class Borrower(nn.Module):
    """Uses weights that belong to other modules, in several ways, in forward and (through autograd) in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(IN_FEATURES, HIDDEN)
        self.layers = nn.ModuleList([ResidualBlock() for _ in range(2)])
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.recurrent = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.lists = nn.ParameterList(
            [nn.Parameter(torch.full((HIDDEN,), 0.5)), nn.Parameter(torch.full((HIDDEN,), 0.25))]
        )
        self.head = nn.Linear(HIDDEN, OUT_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = self.layers[0](x)
        up = self.layers[1].up
        x = x + F.linear(F.linear(x, up.weight, up.bias), up.weight.t())
        x = x.unsqueeze(0)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = (x + self.recurrent(x)[0]).squeeze(0)
        x = x * self.lists[0] + self.lists[1] * torch.stack(list(self.lists)).sum(0)
        x = self.layers[1](x) + x @ self.inp.weight @ self.inp.weight.T
        penalty = sum(p.square().sum() for p in self.layers[0].parameters())
        return F.linear(x, self.head.weight) + self.head.bias + 0.01 * penalty


def borrowed(stage: int) -> tuple[float, str]:
    return lockstep(regression(Borrower), make_config(stage, zero=ZERO))


@pytest.mark.in_make_test("3")  # where they come and go
@pytest.mark.parametrize("stage", [0, 3])
def test_weights_used_outside_their_module(pool2: RankPool, stage: int) -> None:
    for error, worst in pool2.run(borrowed, stage):
        assert error <= TOLERANCE, worst


def read_past_every_guard(dtype: torch.dtype) -> list[bool]:
    engine = _engine(dtype, steps=1 if dtype is torch.float32 else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [bool(torch.tensor(p).isnan().all()) for p in engine.module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_read_that_passes_the_guard_gives_nan_and_never_freed_memory(pool2: RankPool, dtype: torch.dtype) -> None:
    for answers in pool2.run(read_past_every_guard, dtype):
        assert answers and all(answers)


def _shards(partition: int) -> tuple[bool, list[int], int]:
    zero = {"stage": 3, "zero_hpz_partition_size": partition, **ZERO}
    engine = start(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), make_config(3, zero_optimization=zero))
    weight: Any = engine.module[0].weight
    secondary = weight.ds_secondary_tensor
    shown = secondary is weight.ds_tensor, [0 if secondary is None else secondary.numel(), weight.ds_tensor.numel()]
    group = dist.get_world_size(weight.ds_process_group)
    assert not weight.is_external_param and weight.ds_param_type.name == "PARTITIONED"
    engine.destroy()
    return *shown, group


def test_the_shards_that_a_parameter_shows(pool4: RankPool) -> None:
    """Where a part of the ranks holds the parameters once more (hpZ), the shard is the secondary one."""
    shown = pool4.run(_shards, 2)
    assert {(same, group) for same, _, group in shown} == {(True, 4)}
    assert [sum(shown[rank][1]) for rank in (0, 1)] == [sum(shown[rank][1]) for rank in (2, 3)]
    assert sum(sizes[0] for _, sizes, _ in shown) == 2 * 8 * 4
    shown = pool4.run(_shards, 1)
    assert {(same, sizes[0], group) for same, sizes, group in shown} == {(False, 0, 4)}
    assert sum(sizes[1] for _, sizes, _ in shown) == 8 * 4


class _Borrowing(nn.Module):
    """Uses the weight of a module that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.square.weight, self.square.bias))


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inp, self.layer = nn.Linear(8, 8), _Borrowing()
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.layer(self.inp(x))
        return [head(x).square().mean() for head in self.heads]


def _read_while_it_stays(threshold: int) -> float:
    """The error of weights after steps with two backward passes over one graph each."""
    config = make_config(3, zero={"param_persistence_threshold": threshold})
    engine, plain = start(_TwoHeads(), config), _TwoHeads()
    optimizer = torch.optim.AdamW(plain.parameters(), **config["optimizer"]["params"])
    for number in range(3):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        first, second = engine(x)
        engine.backward(first, retain_graph=True)
        engine.backward(second)
        engine.step()
        optimizer.zero_grad()
        sum(plain(x)).backward()
        optimizer.step()
    error, _ = parameter_error(engine.module, {name: p.detach() for name, p in plain.named_parameters()})
    engine.destroy()
    return error


@pytest.mark.parametrize("threshold", [0, 20])
def test_what_stays_for_a_later_use_is_there_for_every_backward_of_who_reads_it_meanwhile(
    pool2: RankPool, threshold: int
) -> None:
    assert max(pool2.run(_read_while_it_stays, threshold)) < 1e-6
