"""``ds_simulate --calibrate`` on a real accelerator: every constant of the device is measured, and none is absurd."""

import json
from pathlib import Path

import pytest
import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.tools.simulate.calibrate import run
from deepspeed.tools.simulate.calibrate.clock import Clock
from deepspeed.tools.simulate.calibrate.device import MIB, Effort
from deepspeed.tools.simulate.costs import load_machine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")]

MEDIUM = Effort(
    sides=(256, 1024, 4096), sequences=(1024, 2048), heads=16, array=256 * MIB, copies=(64 << 10, MIB, 64 * MIB),
    collectives=(64 << 10, MIB), moments=MIB, file=MIB, rounds=3,
)  # fmt: skip
# constant -> (least, most) of any accelerator of this decade
PLAUSIBLE = {
    "flops_bf16": (5e12, 5e15),
    "flops_fp32": (1e12, 2e15),
    "matmul_half": (0, 4096),
    "processors": (0.5, 2000),
    "attention_share": (0.02, 2),
    "memory_rate": (5e10, 2e13),
    "kernel_s": (2e-7, 5e-5),
    "launch_s": (1e-6, 5e-4),
    "wait_s": (1e-7, 1e-3),
    "bus_rate": (2e9, 1e12),
    "pageable_rate": (5e8, 1e12),
    "copy_s": (0, 1e-3),
    "host_rate": (1e8, 1e12),
    "adam_rate": (1e8, 1e12),
}


def test_an_accelerator_s_constants_are_measured_and_plausible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    path = tmp_path / "mine.json"
    document = run.calibrate(path, effort=MEDIUM)
    assert document is not None and document["device"] == get_accelerator().device_name()
    assert json.loads(path.read_text())["measured"]["device"] == get_accelerator().product_name()
    machine = load_machine(str(path))
    assert not machine.on_host
    wrong = {name: machine[name] for name, (least, most) in PLAUSIBLE.items() if not least < machine[name] < most}
    assert not wrong
    assert all(document["constants"][name][1].startswith("measured") for name in PLAUSIBLE if name != "adam_rate")
    assert machine["bus_rate"] > 0.8 * machine["pageable_rate"]
    assert machine["device_bytes"] == get_accelerator().total_memory()


def test_short_kernels_are_timed_without_the_program() -> None:
    """The device is kept busy while it is given them: 200 additions take it less than the program needs for them."""
    accelerator = get_accelerator()
    clock = Clock(accelerator)
    tiny = torch.zeros(16, device=accelerator.current_device_name())
    large = torch.zeros(64 * MIB, device=accelerator.current_device_name())
    seconds = clock.alternating({"tiny": lambda: tiny.add_(1), "large": lambda: large.add_(1)})
    assert 0 < seconds["tiny"] < 2e-5 and seconds["tiny"] < seconds["large"]
    accelerator.synchronize()
    assert float(tiny[0]) > 0
