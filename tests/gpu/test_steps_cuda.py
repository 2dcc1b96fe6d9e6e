"""What a step does beside computing, on a real device: waits that are not needed, copies that do not hide, memory that
an error leaves behind, and what compiled blocks and accumulation change.

One rank in this process; benchmarks/gpu.py measures the same things at size.
"""

import gc
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepspeed
from tests.gpu.target import DEVICE, NAME, PRETENDS, needs_device, needs_real
from tests.gpu.test_offload_cuda import Stack, _alone  # noqa: F401 - the fixture: one rank without a launcher

pytestmark = [
    pytest.mark.gpu,
    needs_device,
    pytest.mark.timeout(300),
]
WIDTH, DEPTH, ROWS, MIB = 2048, 6, 64 if PRETENDS else 4096, 1 << 20
CPU = {"device": "cpu"}
PLACES: dict[str, dict[str, Any]] = {
    "stage0": {"stage": 0},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "offload": {"stage": 2, "offload_optimizer": CPU},
    "parameters": {"stage": 3, "offload_param": CPU},
}


def watch() -> Any:
    """benchmarks/gpu_watch.py."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return importlib.import_module("gpu_watch")


def start(place: str, *, accumulation: int = 1, clipping: float = 0.0, width: int = WIDTH) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **PLACES[place]},
    }
    return deepspeed.initialize(model=Stack(width, DEPTH), config=config)[0]


def rows(number: int, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, width, generator=generator).to(NAME, torch.bfloat16)


def stepping(engine: Any, *, accumulation: int = 1, width: int = WIDTH) -> Callable[[], Tensor]:
    """A step on data that are on the device already."""
    batches = [rows(number, width) for number in range(accumulation)]

    def step() -> Tensor:
        for batch in batches:
            loss: Tensor = engine(batch).float().square().mean()
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return step


@needs_real("a profiler")
@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("place", ["stage0", "stage2", "stage3"])
def test_a_step_on_the_device_waits_for_the_norm_or_for_nothing(place: str, clipping: float) -> None:
    engine = start(place, clipping=clipping)
    step = stepping(engine)
    for _ in range(5):
        step()
    DEVICE.synchronize()
    found = watch().waits(step)
    engine.destroy()
    assert found["waits_per_step"] <= (1 if clipping else 0), found["waits"]


@needs_real("a profiler")
@pytest.mark.parametrize("place", ["offload", "parameters"])
def test_copies_of_offloaded_states_run_beside_kernels(place: str) -> None:
    engine = start(place)
    step = stepping(engine)
    for _ in range(4):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        found = watch().overlap(step)
    engine.destroy()
    assert found["copies_ms"] > 0 and found["copies_hidden"] > 0.2, found


@pytest.mark.parametrize("place", list(PLACES))
def test_after_running_out_of_memory_training_goes_on_as_if_that_batch_had_not_been(place: str) -> None:
    def losses(*, drill: bool) -> tuple[list[float], int]:
        engine, found = start(place, width=512), []
        step = stepping(engine, width=512)

        def too_much(*_: Any) -> None:
            torch.empty(1 << 44, dtype=torch.uint8, device=NAME)

        for number in range(4):
            if drill and number == 2:
                handle = engine.module.blocks[2].register_forward_pre_hook(too_much)
                with pytest.raises(torch.OutOfMemoryError):
                    engine(rows(9, 512))
                handle.remove()
            found.append(float(step()))
        DEVICE.synchronize()
        gc.collect()
        left = DEVICE.memory_allocated()
        engine.destroy()
        return found, left

    (plain, before), (drilled, after) = losses(drill=False), losses(drill=True)
    assert plain == drilled
    assert after <= before + 2 * MIB


@needs_real("a compiler")
@pytest.mark.filterwarnings("ignore")  # importing the compiler warns
@pytest.mark.parametrize("place", ["stage3", "parameters"])
def test_compiled_blocks_train_as_eager_ones_in_whole_graphs(place: str) -> None:
    found: dict[bool, tuple[list[float], int]] = {}
    for compiled in (False, True):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        engine = start(place, width=512)
        if compiled:
            engine.compile()
        step = stepping(engine, width=512)
        losses = [float(step()) for _ in range(3)]
        DEVICE.reset_peak_memory_stats()
        losses.append(float(step()))
        found[compiled] = losses, DEVICE.max_memory_allocated()
        engine.destroy()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert found[True][0] == pytest.approx(found[False][0], rel=2e-2)
    assert found[True][1] <= 1.1 * found[False][1]


@pytest.mark.parametrize("place", list(PLACES))
def test_accumulated_micro_batches_are_one_of_their_mean(place: str) -> None:
    """Two equal micro-batches give the gradient of one."""
    weights = []
    for accumulation in (1, 2):
        engine = start(place, accumulation=accumulation, width=512)
        batch = rows(0, 512)
        for _ in range(3 * accumulation):
            engine.backward(engine(batch).float().square().mean())
            engine.step()
        weights.append([deepspeed.utils.safe_get_full_fp32_param(p).cpu() for p in engine.module.parameters()])
        engine.destroy()
    error = max(float((one - two).abs().max()) for one, two in zip(*weights, strict=True))
    assert error <= 1e-2, error


@needs_real("backends that FSDP2 knows")
def test_losses_are_those_of_fsdp2() -> None:
    """The same model under FSDP2 on one device."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    engine = start("stage3", width=512)
    step = stepping(engine, width=512)
    ours = [float(step()) for _ in range(4)]
    engine.destroy()
    torch.manual_seed(0)
    model = Stack(512, DEPTH).to(NAME)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = torch.distributed.device_mesh.init_device_mesh(NAME, (1,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    theirs = []
    for _ in range(4):
        loss = model(rows(0, 512)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(float(loss.detach()))
    assert ours == pytest.approx(theirs, rel=3e-2)
