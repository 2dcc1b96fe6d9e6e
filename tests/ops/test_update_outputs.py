"""The optimizers round parameters in the pass of the update, and say which; wherever a user's code may come behind,
they do not.
"""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.accelerator.native.build import try_load
from deepspeed.accelerator.native.spec import CPU_ADAM
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.optim import cuda, host
from deepspeed.optim.rules import Adagrad, Lamb
from deepspeed.tier import store

pytestmark = pytest.mark.skipif(try_load(CPU_ADAM) is None, reason="no C++ compiler: torch's update writes no outputs")

LOW = (torch.bfloat16, torch.float16)
KERNELS = (FusedAdam, DeepSpeedCPUAdam, Adagrad, DeepSpeedCPUAdagrad, FusedLion, DeepSpeedCPULion)
COUNT = 1003


def parameter(count: int = COUNT, *, seed: int = 0) -> torch.nn.Parameter:
    draw = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(count, generator=draw))
    param.grad = torch.randn(count, generator=draw)
    return param


def step_with_outputs(
    optimizer: Any, params: list[torch.nn.Parameter], dtype: torch.dtype = torch.bfloat16
) -> list[int]:
    """One step; the positions of the parameters whose output was written. Those outputs are right, the others
    untouched.
    """
    outputs = {p: torch.full_like(p, 7.0, dtype=dtype, requires_grad=False, device=p.device) for p in params}
    with optimizer.writing_outputs(outputs) as written:
        optimizer.step()
    for p, out in outputs.items():
        assert torch.equal(out, p.detach().to(dtype) if p in written else torch.full_like(out, 7.0))
    return [i for i, p in enumerate(params) if p in written]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("cls", KERNELS)
def test_the_kernels_write_them(cls: type, dtype: torch.dtype) -> None:
    params, theirs = [parameter(seed=i) for i in range(3)], [parameter(seed=i) for i in range(3)]
    mine, reference = (
        cls([{"params": each[:1], "lr": 0.1}, {"params": each[1:], "lr": 0.01}]) for each in (params, theirs)
    )
    params[2].grad = theirs[2].grad = None
    for _ in range(3):
        assert step_with_outputs(mine, params, dtype) == [0, 1]
        reference.step()
        mine.param_groups[1]["lr"] = reference.param_groups[1]["lr"] = mine.param_groups[1]["lr"] / 2
    assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True)), "outputs change the update"


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("cls", [FusedAdam, Adagrad, FusedLion])
def test_rounding_is_torchs_for_every_upper_half_and_every_tie(cls: type, dtype: torch.dtype) -> None:
    """Every sign, exponent and upper mantissa, with lower bits below, at and above each place where rounding
    decides.
    """
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    bits = (torch.arange(1 << 16).unsqueeze(1) * (1 << 16) + torch.tensor(lower)).reshape(-1)
    values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    param = torch.nn.Parameter(values.clone())
    param.grad, out = torch.zeros_like(values), torch.empty_like(values, dtype=dtype)
    optimizer = cls([param], lr=0.0)
    with optimizer.writing_outputs({param: out}) as written:
        optimizer.step()
    expected = torch.empty_like(out).copy_(param.detach())
    assert param in written and torch.equal(out.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(out.view(torch.int16)[known], expected.view(torch.int16)[known])
    assert torch.equal(param.detach()[known].view(torch.int32), values[known].view(torch.int32)) or cls is not FusedAdam


def test_what_the_kernels_do_not_take_is_not_written() -> None:
    fits, strided, low, wide = parameter(), parameter(), parameter(), parameter()
    strided.data = torch.randn(2 * COUNT)[::2]
    low.data, low.grad = low.data.bfloat16(), low.grad.bfloat16()
    wide.data, wide.grad = wide.data.double(), wide.grad.double()
    params = [fits, strided, low, wide]
    assert step_with_outputs(FusedAdam(params, lr=0.1), params) == [0, 2]
    assert step_with_outputs(Adagrad(params), params) == [0, 2]


def test_outputs_that_do_not_fit_are_left_alone() -> None:
    outs = [torch.full((COUNT,), 7.0, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.int16)]
    outs += [torch.full((2 * COUNT,), 7.0)[::2], torch.full((COUNT - 1,), 7.0), torch.empty(COUNT, device="meta")]
    params = [parameter() for _ in outs]
    optimizer = FusedAdam(params)
    with optimizer.writing_outputs(dict(zip(params, outs, strict=True))) as written:
        optimizer.step()
    assert not written and all(bool((out.float() == 7).all()) for out in outs[:-1])


def test_a_tensor_that_is_refused_leaves_all_others_as_they_were() -> None:
    params = [parameter(), parameter()]
    before = params[0].detach().clone()
    params[1] = torch.nn.Parameter(torch.ones(3, device="meta"))
    params[1].grad = torch.ones_like(params[1])
    with pytest.raises(AssertionError, match="host memory"):
        DeepSpeedCPUAdam([{"params": params[:1]}, {"params": params[1:]}]).step()
    assert torch.equal(params[0], before)


def test_torch_does_the_update_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable", lambda *_: False)
    for cls in KERNELS:
        params = [parameter()]
        assert step_with_outputs(cls(params), params) == []


def test_nothing_of_it_stays() -> None:
    params = [parameter()]
    optimizer = DeepSpeedCPUAdam(params)
    before = set(vars(optimizer))
    with optimizer.writing_outputs({params[0]: torch.empty(COUNT, dtype=torch.bfloat16)}) as written:
        optimizer.step()
        assert params[0] in written
        kept = [pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)]
        assert set(optimizer.state_dict()) == {"state", "param_groups"}
    assert set(vars(optimizer)) == before and all(set(vars(k)) <= before for k in kept)
    with pytest.raises(ZeroDivisionError), optimizer.writing_outputs({}):
        raise ZeroDivisionError
    assert set(vars(optimizer)) == before


# --- a user's code behind the kernels ---


def clamp(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.clamp_(-0.1, 0.1)  # no version counter notices this


class Clamped(FusedAdam):
    """Overrides ``step``."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        clamp(self)
        return result


class ClampedBelow(FusedAdam):
    """Overrides what ``step`` calls."""

    def _update_group(self, *args: Any) -> None:
        super()._update_group(*args)
        clamp(self)


def patched_object(params: list[torch.nn.Parameter]) -> FusedAdam:
    optimizer = FusedAdam(params)
    inner = optimizer.step

    @functools.wraps(inner)
    def step(*args: Any) -> None:
        inner(*args)
        clamp(optimizer)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def patched_below_a_scheduler(params: list[torch.nn.Parameter]) -> FusedAdam:
    optimizer = patched_object(params)
    optimizer.step = functools.partial(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def patched_kernels(params: list[torch.nn.Parameter]) -> FusedAdam:
    optimizer = FusedAdam(params)
    inner = optimizer._update_group

    def update(*args: Any) -> None:
        inner(*args)
        clamp(optimizer)

    optimizer._update_group = update  # type: ignore[method-assign]
    return optimizer


def with_hook(params: list[torch.nn.Parameter]) -> FusedAdam:
    optimizer = FusedAdam(params)
    optimizer.register_step_post_hook(lambda it, *_: clamp(it))
    return optimizer


@pytest.mark.parametrize(
    "build", [Clamped, ClampedBelow, patched_object, patched_below_a_scheduler, patched_kernels, with_hook]
)
def test_a_users_code_behind_the_update_is_respected(build: Callable[[list[torch.nn.Parameter]], Any]) -> None:
    params = [parameter()]
    assert step_with_outputs(build(params), params) == []
    assert params[0].abs().max() <= 0.1


def test_a_hook_on_all_optimizers_is_respected() -> None:
    params = [parameter()]
    optimizer = FusedAdam(params)
    handle = register_optimizer_step_post_hook(lambda it, *_: clamp(it))
    try:
        assert step_with_outputs(optimizer, params) == []
    finally:
        handle.remove()
    assert step_with_outputs(optimizer, params) == [0]


def test_a_patched_class_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [parameter()]
    optimizer, inner = FusedAdam(params), FusedAdam.step

    def step(self: FusedAdam) -> None:
        inner(self)
        clamp(self)

    monkeypatch.setattr(FusedAdam, "step", step)
    assert step_with_outputs(optimizer, params) == []


def test_torchs_own_wrappers_change_nothing() -> None:
    params = [parameter()]
    optimizer = FusedAdam(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer), "the scheduler wraps the method on the object"
    for _ in range(2):
        assert step_with_outputs(optimizer, params) == [0]
        scheduler.step()


# --- one group on several kinds of device (offload_optimizer.ratio) ---


@pytest.mark.parametrize("first", ["cpu", "meta"])
def test_each_kind_of_device_gets_its_kernel(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With meta tensors in the place of CUDA's: half of a group in host memory takes no kernel from the other half."""
    calls: list[tuple[str, int]] = []

    def record(name: str, result: Callable[[int], Any] = lambda _: None) -> Any:
        def kernel(params: Any, *_: Any, outs: Any = None, out: Any = None, **__: Any) -> Any:
            calls.append((name, 1 if isinstance(params, torch.Tensor) else len(params)))
            assert not any(outs or ()) and out is None
            return result(len(params))

        return kernel

    monkeypatch.setattr(cuda, "on_cuda", lambda t: t.device.type == "meta")

    def usable(_: Any, columns: Any) -> bool:
        return all(t.device.type == "meta" for column in columns for t in column)

    monkeypatch.setattr(cuda, "usable", usable)
    monkeypatch.setattr(host, "usable", lambda _, *tensors: all(t.device.type == "cpu" for t in tensors))
    for name in ("adam_step", "lion_step", "adagrad_step"):
        monkeypatch.setattr(host, name, record("host"))
    for name in ("adam_step", "lion_step"):
        monkeypatch.setattr(cuda, name, record("cuda"))
    monkeypatch.setattr(cuda, "lamb_step", record("cuda", lambda n: [torch.ones(())] * n))
    for cls, expected in {
        FusedAdam: {("host", 1), ("cuda", 2)},
        FusedLion: {("host", 1), ("cuda", 2)},
        Adagrad: {("host", 1)},
        Lamb: {("cuda", 2)},
    }.items():
        second = {"cpu": "meta", "meta": "cpu"}[first]
        params = [torch.nn.Parameter(torch.ones(4, device=place)) for place in (first, second, first, second)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = cls(params)
        for group in optimizer.param_groups:
            group["fused"] = group.get("fused") and None  # its step counts stay on the host, where meta has no numbers
        if cls is FusedAdam:
            for param in params:
                zeros = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                optimizer.state[param] = {"step": torch.zeros((), device=param.device), **zeros}
        calls.clear()
        optimizer.step()
        assert set(calls) == expected, cls


# --- from the host to a device ---


class Copies(TorchDispatchMode):
    """Notes the devices and dtypes of every copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        pair = {"aten::copy_": lambda: (args[0], args[1]), "aten::_to_copy": lambda: (result, args[0])}.get(
            func._schema.name
        )
        if pair is not None:
            to, source = pair()
            self.seen.append((to.device.type, to.dtype, source.device.type, source.dtype, to.numel()))
        return result


def test_master_in_host_memory_is_rounded_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own copy to another device and dtype rounds on the host first; so both never change in one copy. In
    bounded pieces.
    """
    monkeypatch.setattr(store, "_PIECE_NUMEL", 400)
    with Copies() as copies:
        store.round_into(torch.empty(COUNT, dtype=torch.bfloat16, device="meta"), torch.ones(COUNT))
    moved = [entry for entry in copies.seen if entry[0] != entry[2]]
    rounded = [entry for entry in copies.seen if entry[1] != entry[3]]
    assert [e[4] for e in moved] == [e[4] for e in rounded] == [400, 400, 203]
    assert all(e[1] == e[3] == torch.float32 for e in moved) and all(e[0] == e[2] == "meta" for e in rounded)


@pytest.mark.parametrize("dtype", LOW)
def test_on_one_device_it_is_torchs_copy(dtype: torch.dtype) -> None:
    values, out = torch.randn(COUNT), torch.empty(COUNT, dtype=dtype)
    with Copies() as copies:
        store.round_into(out, values)
    assert torch.equal(out, values.to(dtype)) and len(copies.seen) == 1


@pytest.mark.parametrize("cls", KERNELS)
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_gradients_that_the_kernels_multiply_give_the_same_bits(cls: type, dtype: torch.dtype) -> None:
    """As if they were converted and multiplied before; and where no kernel fits they are."""
    for slots in (torch.float32, torch.float64):  # float64 fits no kernel
        params, theirs = ([parameter(seed=i).to(slots).detach().requires_grad_() for i in range(2)] for _ in range(2))
        mine, reference = cls(params, lr=0.1, weight_decay=0.01), cls(theirs, lr=0.1, weight_decay=0.01)
        for step in range(2):
            for p, other in zip(params, theirs, strict=True):
                p.grad_dtype = None
                p.grad = torch.randn(COUNT, generator=torch.Generator().manual_seed(step)).to(dtype)
                other.grad = p.grad.to(slots, copy=True)
                other.grad *= 0.3 if other is theirs[0] else 1.0
            with mine.writing_outputs({}, scales={params[0]: 0.3, params[1]: 1.0}):
                mine.step()
            reference.step()
        for p, other in zip(params, theirs, strict=True):
            assert torch.equal(p, other)
