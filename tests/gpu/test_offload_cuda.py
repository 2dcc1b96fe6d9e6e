"""Offload beside a real device: host and drive train what the device trains, states are where they should be, limits
are kept.

One rank in this process. ``-s`` shows the largest differences and what memory was used.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.accelerator.device import get_accelerator
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero.plan import StateKind
from tests.gpu.target import DEVICE, NAME, needs_device

pytestmark = [
    pytest.mark.gpu,
    needs_device,
    pytest.mark.timeout(300),
]

WIDTH, STEPS, GAS = 192, 4, 2  # a weight is large enough for the drive (zero.Init leaves smaller ones on the device)
STAGES = (1, 2, 3)
# A norm over host memory adds in another order, so that clipping may scale by another last bit; in bf16 that can flip
# the rounding of single weights, whose gradients then differ by parts in a thousand.
TOLERANCE = {"fp32": 2e-6, "bf16": 1e-3}
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    """One rank without a launcher; nothing of it is left for the tests of other modules."""
    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = tf32
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


class Block(nn.Module):
    """x + tanh(linear(norm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Blocks of one width: as many units, with weights that move and biases that stay."""

    def __init__(self, width: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def places(folder: Path | str) -> dict[str, dict[str, Any]]:
    """Additions to the zero block, by name; ``ratio`` and tiles among them."""
    cpu, drive = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(folder)}
    params = {**drive, "max_in_cpu": 0}
    return {
        "none": {},
        "optim cpu": {"offload_optimizer": cpu},
        "optim cpu, unpinned": {"offload_optimizer": {**cpu, "pin_memory": False}},
        "optim nvme": {"offload_optimizer": drive, "sub_group_size": 8192},
        "optim cpu, early": {"offload_optimizer": {**cpu, "super_offload": True}},
        "half cpu": {"offload_optimizer": {**cpu, "ratio": 0.5}},
        "half cpu, travelling": {"offload_optimizer": {**cpu, "ratio": 0.5, "device_states": "travel"}},
        "half nvme": {"offload_optimizer": {**drive, "ratio": 0.5}, "sub_group_size": 8192},
        "param cpu": {"offload_param": cpu},
        "param nvme": {"offload_param": {**params, "buffer_size": 30_000}},
        "both cpu": {"offload_optimizer": cpu, "offload_param": cpu},
        "both cpu, unpinned": {
            "offload_optimizer": {**cpu, "pin_memory": False},
            "offload_param": {**cpu, "pin_memory": False},
        },
        "both nvme": {"offload_optimizer": drive, "offload_param": params},
        "param nvme, optim cpu": {"offload_optimizer": cpu, "offload_param": params},
        "no overlap": {"offload_optimizer": cpu, "offload_param": cpu, "overlap_comm": False},
    }


NAMES = tuple(name for name in places("") if name != "none")
CELLS = [
    (stage, name)
    for stage in STAGES
    for name in NAMES
    if stage == 3 or not ({"param", "both", "no"} & set(name.split()) or name in ("half cpu", "half nvme"))
]
# Rules of their own: what of them equals what.
LATE = {
    "delayed": {"offload_optimizer": {"device": "cpu", "delayed_update": True}},
    "zenflow": {
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {"topk_ratio": 0.25, "update_interval": 2, "overlap_step": True},
    },
}


def config(
    stage: int, dtype: str, zero: dict[str, Any], *, clip: float = 0.0, gas: int = GAS, **more: Any
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 1000,
            "reduce_bucket_size": 50_000,
            **zero,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}},
        "bf16": {"enabled": dtype == "bf16"},
        **more,
    }


def start(cfg: dict[str, Any], model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return deepspeed.initialize(model=Stack() if model is None else model, config=cfg)[0]


def backward(engine: Any, seed: int) -> float:
    """One micro-batch; two of them come again and again, so that the loss must fall."""
    width = engine.module.head.in_features if hasattr(engine.module, "head") else WIDTH
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(seed % GAS)).to(
        engine.device, next(engine.module.parameters()).dtype
    )
    loss = (engine(x).float() - 1).square().mean()
    engine.backward(loss)
    return float(loss.detach())


def train(engine: Any, *, first: int = 0, steps: int = STEPS) -> list[float]:
    """Losses of some optimizer steps."""
    losses = []
    for number in range(first * GAS, (first + steps) * GAS):
        losses.append(backward(engine, number))
        engine.step()
    return losses


def outcome(engine: Any) -> dict[str, Tensor]:
    """fp32 weights and the model's own, on the host; the engine is destroyed."""
    found = {f"{name} (fp32)": _whole(safe_get_full_fp32_param(p)) for name, p in engine.module.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found |= {name: p.detach().float().cpu().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return found


def _whole(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.cpu().clone()


def run(cfg: dict[str, Any], model: nn.Module | None = None) -> tuple[list[float], dict[str, Tensor]]:
    engine = start(cfg, model)
    return train(engine), outcome(engine)


def difference(one: dict[str, Tensor], other: dict[str, Tensor], *, fp32_only: bool = True) -> float:
    """The largest, over fp32 weights or all."""
    names = [name for name in one if name.endswith("(fp32)") or not fp32_only]
    assert one.keys() == other.keys() and all(
        torch.isfinite(one[n]).all() and torch.isfinite(other[n]).all() for n in names
    )
    return max((one[name] - other[name]).abs().max().item() for name in names)


def synchronize() -> None:
    """Collect what nobody holds, and let the device finish."""
    gc.collect()
    get_accelerator().synchronize()


# --- the same numbers ---


@pytest.fixture(scope="module")
def on_device() -> dict[tuple[int, str, float], tuple[list[float], dict[str, Tensor]]]:
    """Runs without offload, made once."""
    return {}


def plain(cache: dict[Any, Any], stage: int, dtype: str, clip: float) -> tuple[list[float], dict[str, Tensor]]:
    if (stage, dtype, clip) not in cache:
        cache[stage, dtype, clip] = run(config(stage, dtype, {}, clip=clip))
    return cache[stage, dtype, clip]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "name"), CELLS)
def test_training_follows_the_device(
    stage: int, name: str, dtype: str, tmp_path: Path, on_device: dict[Any, Any]
) -> None:
    """With accumulation and with clipping at every step."""
    losses, weights = plain(on_device, stage, dtype, 0.05)
    found_losses, found = run(config(stage, dtype, places(tmp_path)[name], clip=0.05))
    print(f"stage {stage}, {dtype}, {name}: largest difference {difference(weights, found):.3g}")
    assert difference(weights, found) <= TOLERANCE[dtype]
    assert found_losses == pytest.approx(losses, rel=1e-5 if dtype == "fp32" else 1e-2)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_how_equal_the_kernels_of_device_and_host_are(
    stage: int, dtype: str, tmp_path: Path, on_device: dict[Any, Any]
) -> None:
    """Without clipping only the kernels can differ: FusedAdam's on the device, the host's elsewhere. Host and drive
    share one.
    """
    _, weights = plain(on_device, stage, dtype, 0.0)
    _, cpu = run(config(stage, dtype, places(tmp_path)["optim cpu"]))
    _, nvme = run(config(stage, dtype, places(tmp_path)["optim nvme"]))
    largest = difference(weights, cpu, fp32_only=False)
    print(
        f"stage {stage}, {dtype}: device against host "
        f"{'bitwise equal' if largest == 0 else f'differ by up to {largest:.3g}'}"
    )
    assert difference(weights, cpu) <= TOLERANCE[dtype]
    assert difference(cpu, nvme, fp32_only=False) == 0.0


@pytest.mark.parametrize("name", ["param cpu", "param nvme"])
def test_parameters_that_travel_change_no_bit(name: str, tmp_path: Path, on_device: dict[Any, Any]) -> None:
    """The update is on the device in both runs."""
    losses, weights = plain(on_device, 3, "bf16", 0.05)
    found_losses, found = run(config(3, "bf16", places(tmp_path)[name], clip=0.05))
    assert difference(weights, found, fp32_only=False) == 0.0 and found_losses == losses


@pytest.mark.parametrize("name", ["optim cpu", "optim nvme"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_unit_accumulates_on_the_host(stage: int, name: str, tmp_path: Path) -> None:
    """Its second reduction begins while the first may still be on its way to the host."""
    results = []
    for zero in ({}, places(tmp_path)[name]):
        torch.manual_seed(2)
        engine = start(config(stage, "fp32", {**zero, "stage3_param_persistence_threshold": 0}), nn.Linear(WIDTH, 8))
        assert len(engine.runtime.units) == 1
        results.append((train(engine), outcome(engine)))
    assert difference(results[0][1], results[1][1]) <= TOLERANCE["fp32"]
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", LATE)
def test_who_looks_at_states_beside_a_late_update_changes_no_bit(name: str, stage: int, dtype: str) -> None:
    """Nor does a device that is far behind the program."""
    found = []
    for look in (False, True):
        engine = start(config(stage, dtype, LATE[name], clip=0.05))
        for number in range(3 * STEPS * GAS):
            if not look:
                DEVICE._sleep(20_000_000)
            backward(engine, number)
            engine.step()
            if look:
                assert all(_whole(safe_get_full_fp32_param(p)).isfinite().all() for p in engine.module.parameters())
        engine.eval()
        found.append(outcome(engine))
    assert difference(*found, fp32_only=False) == 0.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_nearly_all_columns_and_windows_of_one_are_the_update_at_once(
    stage: int, dtype: str, on_device: dict[Any, Any]
) -> None:
    _, weights = plain(on_device, stage, dtype, 0.05)
    block = {"topk_ratio": 0.99, "update_interval": 1}
    _, found = run(config(stage, dtype, {"offload_optimizer": {"device": "cpu"}, "zenflow": block}, clip=0.05))
    assert difference(weights, found) <= TOLERANCE[dtype]


def test_many_steps_ahead_of_the_device(tmp_path: Path, on_device: dict[Any, Any]) -> None:
    """The host queues work faster than a busy device does it: nothing that is still to be copied may be overwritten."""
    _, weights = plain(on_device, 3, "fp32", 0.0)
    for name in ("both cpu", "both nvme"):
        engine = start(config(3, "fp32", places(tmp_path)[name]))
        for number in range(STEPS * GAS):
            DEVICE._sleep(20_000_000)
            backward(engine, number)
            DEVICE._sleep(20_000_000)
            engine.step()
        assert difference(weights, outcome(engine)) <= TOLERANCE["fp32"], name


# --- where things are ---


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "name"), CELLS)
def test_states_rest_where_they_should(stage: int, name: str, dtype: str, tmp_path: Path) -> None:
    zero = places(tmp_path)[name]
    engine = start(config(stage, dtype, zero, gas=1))
    backward(engine, 0)
    engine.runtime.gradients.land_all()
    optim, param = zero.get("offload_optimizer", {}), zero.get("offload_param", {})
    updated_here = 0
    for unit in engine.runtime.units:
        home = optim["device"] if unit.plan.optim.away else "device"
        updated_here += unit.layout.numel * (home == "device")
        _check_optim(unit, home, pinned=optim.get("pin_memory", True), tied=unit.master_is_param)
        away = param.get("device", "device") if unit.plan.param.away else "device"
        assert (unit.on_drive(StateKind.PARAM)) == (away == "nvme"), unit.name
        if away == "cpu":
            assert unit.shard.device.type == "cpu" and unit.shard.is_pinned() == param.get("pin_memory", True), (
                unit.name
            )
        elif away == "device":
            assert unit.shard.device.type == NAME, unit.name
        assert not unit.movable or unit.buffer.full.untyped_storage().nbytes() == 0, f"{unit.name} is still gathered"
    moved = {unit.plan.param.tier.value for unit in engine.runtime.units}
    assert not param or moved & {"host", "nvme"}
    share = updated_here / sum(unit.layout.numel for unit in engine.runtime.units)
    rests = "ratio" in optim and optim.get("device_states") != "travel"
    assert share == 1.0 if not optim else 0.0 < share <= 0.5 if rests else share == 0.0
    engine.step()
    for view in engine._views:
        for value in engine.optimizer.state[view.param].values():
            if isinstance(value, Tensor) and value.dim() and not view.on_drive:
                assert value.device.type == unit_home(view), view.name
    engine.destroy()


def unit_home(view: Any) -> str:
    return "cpu" if view.unit.plan.optim.away else NAME


def _check_optim(unit: Any, home: str, *, pinned: bool, tied: bool) -> None:
    """Masters and gradients of one unit after a backward."""
    kind = NAME if home == "device" else "cpu"
    assert (unit.on_drive(StateKind.OPTIM)) == (home == "nvme"), unit.name
    near = NAME if unit.plan.loads_states else kind  # where the update will be
    assert unit.grad is not None and unit.window.filled and unit.grad.device.type == near, unit.name
    if home != "nvme":
        assert unit.master.device.type == kind, unit.name
    if near != NAME:
        assert unit.grad.is_pinned() == pinned, unit.name
    if home == "cpu" and not tied:
        assert unit.master.is_pinned() == pinned, unit.name


@pytest.mark.parametrize("name", ["optim cpu", "optim nvme"])
def test_offload_takes_the_states_off_the_device(name: str, tmp_path: Path) -> None:
    matmul_workspaces()
    held = {}
    for which in ("none", name):
        synchronize()
        before = get_accelerator().memory_allocated()
        engine = start(config(2, "bf16", places(tmp_path)[which]), Stack(1024, 8))
        train(engine, steps=2)
        numel = sum(unit.layout.numel for unit in engine.runtime.units)
        held[which] = get_accelerator().memory_allocated() - before
        engine.destroy()
        del engine
    # master, two moments and the gradient, 4 bytes each; the parameters stay
    assert held["none"] - held[name] >= 0.95 * 16 * numel
    assert held[name] <= 2 * numel * 1.1 + 8 * MIB


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_lent_states_leave_the_device_and_come_back(stage: int, dtype: str, on_device: dict[Any, Any]) -> None:
    losses, weights = plain(on_device, stage, dtype, 0.05)
    engine = start(config(stage, dtype, {}, clip=0.05))
    found = train(engine, steps=2)
    synchronize()
    states = sum(_bytes_on_device(engine, view) for view in engine._views)
    states += sum(u.grad.nbytes + (0 if u.master_is_param else u.master.nbytes) for u in engine.runtime.units)
    before = get_accelerator().memory_allocated()
    engine.offload_states()
    synchronize()
    left = before - get_accelerator().memory_allocated()
    print(f"stage {stage}, {dtype}: {left / MIB:.2f} MiB left the device, the states are {states / MIB:.2f}")
    assert 0.95 * states <= left <= 1.1 * states + MIB
    with pytest.raises(UsageError, match="reload_states"):
        engine.step()
    engine.reload_states()
    assert all(unit.master.device.type == NAME for unit in engine.runtime.units)
    found += train(engine, first=2, steps=STEPS - 2)
    assert found == losses and difference(weights, outcome(engine), fp32_only=False) == 0.0


def _bytes_on_device(engine: Any, view: Any) -> int:
    values = engine.optimizer.state[view.param].values()
    return sum(v.nbytes for v in values if isinstance(v, Tensor) and v.dim() and v.device.type == NAME)


def test_gradients_can_be_lent_within_a_window(on_device: dict[Any, Any]) -> None:
    losses, weights = plain(on_device, 2, "bf16", 0.05)
    engine = start(config(2, "bf16", {}, clip=0.05))
    found = []
    for number in range(STEPS * GAS):
        found.append(backward(engine, number))
        engine.offload_states()
        assert all(u.grad is None or u.grad.device.type == "cpu" for u in engine.runtime.units)
        engine.reload_states()
        engine.step()
    assert found == losses and difference(weights, outcome(engine), fp32_only=False) == 0.0


@pytest.mark.parametrize("remote", ["cpu", "nvme"])
def test_a_model_is_born_in_host_memory_or_on_a_drive(remote: str, tmp_path: Path) -> None:
    results = []
    # at the rate of the other tests this model's loss grows, and roundings alone make the weights differ
    slow = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "eps": 1e-4, "weight_decay": 0.1}}}
    for where, name in ((None, "none"), (remote, f"both {remote}")):
        cfg = config(3, "bf16", places(tmp_path)[name], **slow)
        torch.manual_seed(1)
        synchronize()
        before = get_accelerator().memory_allocated()
        with deepspeed.zero.Init(remote_device=where, config_dict_or_path=cfg):
            model = Stack(256, 8)
        synchronize()
        if where is not None:
            units = [p._ds_unit for p in model.parameters() if p.numel() >= 1 << 14]
            assert len(units) == 8
            for unit in units:
                assert (unit.on_drive(StateKind.PARAM)) if where == "nvme" else unit.shard.device.type == "cpu", (
                    unit.name
                )
                assert where == "nvme" or unit.shard.is_pinned(), unit.name
            assert get_accelerator().memory_allocated() - before < MIB // 2  # what moves is 1 MiB
        results.append(run(cfg, model))
        assert results[-1][0][-1] < results[-1][0][0]
    assert difference(results[0][1], results[1][1]) <= TOLERANCE["bf16"]


# --- limits ---


def test_what_does_not_fit_the_device_is_refused() -> None:
    model = Stack(1024, 8)
    in_use = get_accelerator().memory_allocated() // MIB
    cfg = config(3, "bf16", {}, memory={"device_limit": f"{in_use + 64}MiB"})
    with pytest.raises(
        DeepSpeedConfigError, match=r"memory\.device_limit is (.|\n)*It fits with zero_optimization\.offload_optimizer"
    ):
        start(cfg, model)
    synchronize()
    assert get_accelerator().memory_allocated() // MIB <= in_use + 1, "a refused model has left something on the device"


@pytest.mark.parametrize("name", ["optim cpu", "both cpu", "both nvme"])
def test_a_device_limit_is_kept(name: str, tmp_path: Path) -> None:
    """The peak of a run is what was planned: activations are next to nothing here."""
    matmul_workspaces()
    synchronize()
    before = get_accelerator().memory_allocated()
    limit = before // MIB + 512
    engine = start(config(3, "bf16", places(tmp_path)[name], memory={"device_limit": f"{limit}MiB"}), Stack(2048, 6))
    planned = engine.memory_plan()
    get_accelerator().reset_peak_memory_stats()
    train(engine, steps=2)
    peak = get_accelerator().max_memory_allocated() - before
    pinned = DEVICE.host_memory_stats().get("allocated_bytes.current", 0)
    print(f"{name}: device {peak / MIB:.1f} MiB of {planned.device / MIB:.1f} planned", end=", ")
    print(f"page-locked {pinned / MIB:.1f} MiB of {planned.host / MIB:.1f} planned for the host")
    engine.destroy()
    assert peak <= planned.device + 16 * MIB


def matmul_workspaces() -> None:
    """Have the matrix library allocate what it keeps, on the threads of forward and backward."""
    layer = nn.Linear(256, 256, device=NAME, dtype=torch.bfloat16)
    layer(torch.ones(8, 256, device=NAME, dtype=torch.bfloat16)).sum().backward()


@pytest.mark.parametrize("name", ["none", "both cpu", "both nvme"])
def test_a_destroyed_engine_leaves_nothing_on_the_device(name: str, tmp_path: Path) -> None:
    matmul_workspaces()
    synchronize()
    before = get_accelerator().memory_allocated()
    engine = start(config(3, "bf16", places(tmp_path)[name]))
    train(engine, steps=1)
    model = engine.module
    engine.destroy()
    del engine, model
    synchronize()
    assert get_accelerator().memory_allocated() - before <= MIB // 4


@pytest.mark.parametrize("ours", [True, False])
def test_a_resumed_run_counts_updates_where_its_kernel_reads_them(ours: bool, tmp_path: Path) -> None:  # noqa: FBT001
    def begin() -> Any:
        model, settings = Stack(), config(2, "fp32", {})
        if ours:
            return start(settings, model)
        del settings["optimizer"]
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]

    def places_of_counts(engine: Any) -> set[str]:
        return {str(state["step"].device) for state in engine.basic_optimizer.state.values()}

    first = begin()
    train(first, steps=1)
    first.save_checkpoint(str(tmp_path))
    expected, counted = train(first, first=1, steps=1), places_of_counts(first)
    first.destroy()
    second = begin()
    second.load_checkpoint(str(tmp_path))
    assert places_of_counts(second) == counted
    assert train(second, first=1, steps=1) == expected
    second.destroy()
