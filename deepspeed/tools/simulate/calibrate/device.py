"""Constants of one device: products, attention, memory, kernels, launches, and copies between it and its host."""

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.accelerator.device import DTYPES, Accelerator
from deepspeed.tools.simulate.calibrate.clock import ROUNDS, Clock, line, wall
from deepspeed.tools.simulate.models import Decoder, Shape
from deepspeed.tools.simulate.record import launches

MIB = 1 << 20
_FORWARD, _BACKWARD = 2, 5  # operations of causal attention for each score and channel of the square
_TRAINED = 10  # small steps in a turn


@dataclass(frozen=True)
class Effort:
    """Sizes of the things that are measured."""

    sides: tuple[int, ...]
    sequences: tuple[int, ...]
    heads: int
    array: int
    copies: tuple[int, ...]
    collectives: tuple[int, ...]
    moments: int
    file: int
    rounds: int = ROUNDS


LARGE = Effort(
    sides=(512, 1024, 2048, 4096, 8192), sequences=(1024, 2048, 4096), heads=32, array=512 * MIB,
    copies=(64 << 10, MIB, 16 * MIB, 256 * MIB), collectives=(64 << 10, MIB, 16 * MIB, 256 * MIB), moments=32 * MIB,
    file=1 << 30,
)  # fmt: skip
SMALL = Effort(
    sides=(64, 128, 256, 512, 1024), sequences=(128, 512), heads=8, array=64 * MIB,
    copies=(64 << 10, MIB, 16 * MIB, 64 * MIB), collectives=(64 << 10, MIB, 4 * MIB, 16 * MIB), moments=8 * MIB,
    file=256 * MIB,
)  # fmt: skip


@dataclass
class Measured:
    """Hold ``constants``: name -> (value, what was measured); ``details``: every single time, for the file."""

    constants: dict[str, tuple[float, str]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, constant: str) -> float:
        return self.constants[constant][0]

    def add(self, constant: str, value: float, text: str) -> None:
        self.constants[constant] = (value, text)

    def note(self, name: str, seconds: Mapping[Any, float]) -> None:
        """Keep the times of some cases among ``details``."""
        self.details[name] = [{"case": case, "seconds": s} for case, s in seconds.items()]


class _Counter(TorchDispatchMode):
    """Count the operations that the simulator would count as launches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += launches(func)
        return func(*args, **(kwargs or {}))


def measure_device(accelerator: Accelerator, effort: Effort) -> Measured:
    """Measure all constants of the current device."""
    findings, clock = Measured(), Clock(accelerator)
    _kernels(findings, clock, accelerator)
    _memory(findings, clock, accelerator, effort)
    _products(findings, clock, accelerator, effort)
    _attention(findings, clock, accelerator, effort)
    _copies(findings, clock, accelerator, effort)
    accelerator.empty_cache()
    return findings


def _kernels(findings: Measured, clock: Clock, accelerator: Accelerator) -> None:
    tiny = torch.zeros(16, device=accelerator.current_device_name())
    kernel = clock.alternating({"kernel": lambda: tiny.add_(1)}, 3 * ROUNDS)["kernel"]
    findings.add("kernel_s", kernel, "the shortest kernel, start to start")
    shape = Shape(width=32, blocks=2, heads=2, inner=64, vocabulary=64, positions=16, key_heads=2)
    model = Decoder(shape).to(accelerator.current_device_name())
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=accelerator.current_device_name())

    def train() -> None:
        torch.autograd.grad(model(tokens), list(model.parameters()))

    with _Counter() as counter:
        train()
    once = counter.count

    def launched() -> float:
        accelerator.synchronize()
        return wall(train, _TRAINED)

    seconds = statistics.median(launched() for _ in range(ROUNDS)) / once
    net = seconds - kernel if accelerator.is_synchronized_device() else seconds
    text = f"the program's time for one of the {once} operations of a small decoder's forward and backward"
    findings.add("launch_s", max(net, 0.1 * seconds), text)

    def waited() -> float:
        tiny.add_(1)
        return wall(accelerator.synchronize, 1)

    waits = statistics.median(waited() for _ in range(10 * ROUNDS))
    findings.add("wait_s", max(waits - kernel, 1e-7), "a wait for one short kernel, less the kernel")


def _memory(findings: Measured, clock: Clock, accelerator: Accelerator, effort: Effort) -> None:
    """Measure the memory rate of kernels that programs train with, few of which wait for memory alone."""
    device = accelerator.current_device_name()
    source, target = (torch.ones(effort.array // 4, device=device).view(-1, 1024) for _ in range(2))
    weight = torch.ones(1024, device=device)
    cases: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "add": lambda: torch.add(source, 1.0, out=target),
        "gelu": lambda: functional.gelu(source),
        "layer norm": lambda: functional.layer_norm(source, (1024,), weight),
    }
    seconds = clock.alternating(cases, effort.rounds)
    findings.note("memory", seconds)
    rate = 2 * source.nbytes / statistics.fmean(seconds.values())
    findings.add("memory_rate", rate, f"{', '.join(cases)}: the same bytes of each")


def _products(findings: Measured, clock: Clock, accelerator: Accelerator, effort: Effort) -> None:
    """Fit a line through the times of products of growing depth, which are waves without a rest, of the first dtype;
    the second dtype has the same curve.
    """
    device, side = accelerator.current_device_name(), max(effort.sides)
    properties = getattr(torch.get_device_module(accelerator.device_name()), "get_device_properties", lambda _: None)
    processors = 1 if accelerator.is_synchronized_device() else getattr(properties(0), "multi_processor_count", 1)
    findings.add("processors", processors, "as the device reports them; 1 where the host computes")
    cases: dict[tuple[str, int], Callable[[], Any]] = {}
    for dtype, depth in itertools.product(_dtypes(accelerator), effort.sides):
        lhs, rhs = (torch.ones(size, device=device, dtype=DTYPES[dtype]) for size in ((side, depth), (depth, side)))
        cases[dtype, depth] = partial(torch.mm, lhs, rhs)
    seconds = clock.alternating(cases, effort.rounds)
    findings.note("products", seconds)
    half = 0.0
    for dtype in _dtypes(accelerator):
        start, slope = line(effort.sides, [seconds[dtype, depth] for depth in effort.sides])
        half = half or start / slope
        rates = [2 * side * side * (depth + half) / seconds[dtype, depth] for depth in effort.sides]
        findings.add(f"flops_{dtype}", statistics.median(rates), f"of products of {side} x {side}, without what begins")
    findings.add("matmul_half", half, f"line through {len(effort.sides)} products in {_dtypes(accelerator)[0]}")
    findings.add("matmul_share", 1.0, "the rates above are measured ones")


def _dtypes(accelerator: Accelerator) -> tuple[str, str]:
    """Return the dtype that is trained with on this device, and the other one."""
    return ("fp32", "bf16") if accelerator.is_synchronized_device() else ("bf16", "fp32")


def _attention(findings: Measured, clock: Clock, accelerator: Accelerator, effort: Effort) -> None:
    dtype = _dtypes(accelerator)[0]
    cases: dict[int, Callable[[], Any]] = {}
    for sequence in effort.sequences:
        shape = (1, effort.heads, sequence, 64)
        given = [
            torch.randn(shape, device=accelerator.current_device_name(), dtype=DTYPES[dtype], requires_grad=True)
            for _ in range(3)
        ]

        def both(given: list[torch.Tensor] = given) -> None:
            query, key, value = given
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(out, given, torch.ones_like(out))

        cases[sequence] = both
    seconds = clock.alternating(cases, effort.rounds)
    findings.note("attention", seconds)
    start, slope = line(effort.sequences, [s / sequence for sequence, s in seconds.items()])
    share = (_FORWARD + _BACKWARD) * effort.heads * 64 / slope / findings[f"flops_{dtype}"]
    findings.add("attention_share", share, f"forward and backward, causal, in {dtype}")
    findings.add("attention_half", start / slope, f"line through {len(seconds)} lengths")


def _copies(findings: Measured, clock: Clock, accelerator: Accelerator, effort: Effort) -> None:
    cases: dict[tuple[str, str, int], Callable[[], Any]] = {}
    for nbytes in effort.copies:
        onboard = torch.ones(nbytes, dtype=torch.uint8, device=accelerator.current_device_name())
        plain = torch.ones(nbytes, dtype=torch.uint8, device="cpu")
        pinned = accelerator.pin_memory(torch.ones(nbytes, dtype=torch.uint8, device="cpu"))
        for kind, host in (("pinned", pinned), ("pageable", plain)):
            cases[kind, "up", nbytes] = partial(onboard.copy_, host, non_blocking=kind == "pinned")
            cases[kind, "down", nbytes] = partial(host.copy_, onboard, non_blocking=kind == "pinned")
    seconds = clock.alternating(cases, effort.rounds)
    findings.note("copies", seconds)
    for kind, constant in (("pinned", "bus_rate"), ("pageable", "pageable_rate")):
        sizes, times = zip(*((float(k[2]), s) for k, s in seconds.items() if k[0] == kind), strict=True)
        start, slope = line(sizes, times)
        text = f"line through copies up and down, {kind} memory"
        if accelerator.is_synchronized_device():
            text += ": the device is the host here"
        findings.add(constant, 1 / slope, text)
        if kind == "pinned":
            findings.add("copy_s", start, text)
