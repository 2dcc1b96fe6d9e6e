"""What benchmarks/gpu.py runs and what benchmarks/gpu_predicted.py simulates: cases of one model that differ in one
thing, and how long each part is expected to take. Nothing here needs torch.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
PREDICTED, MEASURED = DATA / "gpu_predicted.json", DATA / "gpu_measured.json"
COMMAND_S = 600.0  # a command may take so long where a device is lent


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT and its micro-batch; ``checkpoint`` recomputes blocks in the backward."""

    layers: int
    width: int
    context: int
    vocab: int
    batch: int
    checkpoint: bool = False

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.batch * self.context

    @property
    def flops(self) -> float:
        """Operations of one micro-batch, forward and backward."""
        inside = self.layers * (12 * self.width**2 + 13 * self.width) + self.vocab * self.width
        return self.tokens * (6.0 * inside + 6.0 * self.layers * self.width * self.context)


TRAIN = Shape(layers=16, width=2048, context=1024, vocab=50_304, batch=8)
LARGE = Shape(layers=0, width=4096, context=512, vocab=8_192, batch=1, checkpoint=True)
QUICK_TRAIN = Shape(layers=2, width=256, context=128, vocab=512, batch=2)
QUICK_LARGE = dataclasses.replace(QUICK_TRAIN, layers=0, batch=1, checkpoint=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train. ``zero``: of this project, its ``zero_optimization`` block; None: of torch. ``sharded``: by
    FSDP2. ``accumulation``: micro-batches a step. ``guess_s``: seconds of a step where nothing predicts it.
    """

    title: str
    zero: dict[str, Any] | None = None
    compiled: bool = False
    sharded: bool = False
    accumulation: int = 1
    guess_s: float = 0.3
    short: bool = False  # few steps, as each takes seconds

    @property
    def simulated(self) -> bool:
        """Whether the simulator can say what it takes: it runs this project, and nothing that is compiled."""
        return self.zero is not None and not self.compiled

    def steps(self, *, quick: bool) -> tuple[int, int]:
        """Before the clock starts, and timed."""
        return (1, 2) if quick or self.short else (3, 6)


_CPU, _DRIVE = {"device": "cpu"}, {"device": "nvme", "nvme_path": "<folder>"}
_OFFLOAD = {"stage": 2, "offload_optimizer": _CPU}
_BOTH = {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU}
CASES: dict[str, Case] = {
    "torch": Case("plain PyTorch AdamW"),
    "torch_compile": Case("plain PyTorch AdamW, compiled blocks", compiled=True),
    "fsdp2": Case("FSDP2", sharded=True),
    "fsdp2_compile": Case("FSDP2, compiled blocks", sharded=True, compiled=True),
    "fsdp2_gas4": Case("FSDP2, 4 micro-batches", sharded=True, accumulation=4, guess_s=1.0),
    "zero0": Case("ZeRO-0", {"stage": 0}),
    "zero2": Case("ZeRO-2", {"stage": 2}),
    "zero3": Case("ZeRO-3", {"stage": 3}),
    "zero3_compile": Case("ZeRO-3, compiled blocks", {"stage": 3}, compiled=True),
    "zero3_gas4": Case("ZeRO-3, 4 micro-batches", {"stage": 3}, accumulation=4, guess_s=1.0),
    "zero_offload": Case("ZeRO-Offload (stage 2, optimizer in host memory)", _OFFLOAD, guess_s=0.6),
    "zero_offload_gas4": Case("ZeRO-Offload, 4 micro-batches", _OFFLOAD, accumulation=4, guess_s=1.5),
    "param": Case("ZeRO-3, parameters in host memory", {"stage": 3, "offload_param": _CPU}, guess_s=0.5),
    "cpu": Case("ZeRO-3, optimizer and parameters in host memory", _BOTH, guess_s=0.6),
    "half": Case(
        "ZeRO-3, half of the optimizer in host memory", {"stage": 3, "offload_optimizer": {**_CPU, "ratio": 0.5}}
    ),
    "nvme": Case(
        "ZeRO-3, optimizer and parameters on NVMe",
        {"stage": 3, "offload_optimizer": _DRIVE, "offload_param": {**_DRIVE, "max_in_cpu": 0}},
        guess_s=8.0,
        short=True,
    ),
}
# What fits into one command each.
EAGER = ("torch", "fsdp2", "zero0", "zero2", "zero3", "zero_offload", "param", "cpu", "half", "nvme")
MORE = ("torch_compile", "fsdp2_compile", "zero3_compile", "fsdp2_gas4", "zero3_gas4", "zero_offload_gas4")
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "1": ("kernels checks train", EAGER),
    "2": ("train", MORE),
    "3": ("largest", ()),
}
PARTS = ("kernels", "checks", "train", "largest")
# Seconds: a process that imports torch and makes a context, a model and its engine; a compiler; kernels that came
# prebuilt (benchmarks/gpu.md; else their compiler takes a minute more); the checks; the series of models.
START_S, COMPILER_S, KERNELS_S, CHECKS_S, LARGEST_S = 25.0, 60.0, 50.0, 60.0, 500.0


def config(case: Case, folder: str, batch: int, host_limit: int = 0) -> dict[str, Any]:
    """The engine's configuration of a case of this project."""
    zero: dict[str, Any] = json.loads(json.dumps(case.zero).replace("<folder>", folder))
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": case.accumulation,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": zero,
        **({"memory": {"host_limit": host_limit}} if host_limit else {}),
    }


def read(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; an empty one where there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def step_s(name: str, predicted: dict[str, Any], machine: str = "h200") -> float:
    """Seconds of one step of a case: predicted, or guessed."""
    row = predicted.get("machines", {}).get(machine, {}).get(name, {})
    return float(row.get("step_s") or CASES[name].guess_s)


def case_s(name: str, predicted: dict[str, Any], *, quick: bool = False) -> float:
    """Seconds that a case is expected to take, its process included; two steps more are watched and profiled."""
    case = CASES[name]
    steps = sum(case.steps(quick=quick)) + 3
    return START_S + COMPILER_S * case.compiled + steps * (0.05 if quick else step_s(name, predicted))


def plan(
    parts: list[str], names: list[str], predicted: dict[str, Any], *, quick: bool = False
) -> list[tuple[str, str, float]]:
    """(part, case, expected seconds) of everything that would run, in order."""
    rows: list[tuple[str, str, float]] = []
    for part in (part for part in PARTS if part in parts):
        if part == "train":
            rows += [(part, name, case_s(name, predicted, quick=quick)) for name in names]
        else:
            seconds = {"kernels": KERNELS_S, "checks": CHECKS_S, "largest": LARGEST_S}[part]
            rows.append((part, "", min(seconds, 60.0) if quick else seconds))
    return rows


def plan_text(rows: list[tuple[str, str, float]], limit_s: float) -> str:
    """The plan for people, with the sum and whether it fits."""
    lines = [f"{part:<9}{name:<20}{seconds:>6.0f} s" for part, name, seconds in rows]
    total = sum(seconds for *_, seconds in rows)
    fits = "fits into" if total <= limit_s else "DOES NOT FIT into"
    return "\n".join([*lines, f"{'':<29}{total:>6.0f} s, {fits} {limit_s:.0f} s"])
