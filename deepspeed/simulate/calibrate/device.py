"""Constants of one device: products, attention, memory, kernels, launches, and copies between it and its host."""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.device import DTYPES, Accelerator
from deepspeed.simulate.calibrate.clock import ROUNDS, Clock, line, saturation, wall
from deepspeed.simulate.models import Decoder, Shape
from deepspeed.simulate.record import launches

MIB = 1 << 20
_FORWARD, _BACKWARD = 4, 10  # operations of attention for each score and channel, as torch's flop counter has them
_TRAINED = 10  # small steps in a turn
_ABOVE = 4  # times the shortest kernel: what is shorter says nothing of arithmetic


@dataclass(frozen=True)
class Effort:
    """How large the things are that are measured."""

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
    """``constants``: name -> (value, what was measured); ``details``: the measurements themselves, for the file."""

    constants: dict[str, tuple[float, str]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, constant: str) -> float:
        return self.constants[constant][0]

    def add(self, constant: str, value: float, text: str) -> None:
        self.constants[constant] = (value, text)


class _Counter(TorchDispatchMode):
    """Counts what the simulator would count as launches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += launches(func)
        return func(*args, **(kwargs or {}))


def measure_device(accelerator: Accelerator, effort: Effort) -> Measured:
    """All of them, of the current device."""
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

    if accelerator.is_synchronized_device():
        findings.add("wait_s", 1e-9, "work is done when the call returns")
    else:
        waits = statistics.median(waited() for _ in range(10 * ROUNDS))
        findings.add("wait_s", max(waits - kernel, 1e-7), "a wait for one short kernel, less the kernel")


def _memory(findings: Measured, clock: Clock, accelerator: Accelerator, effort: Effort) -> None:
    """On a device a copy; where the host computes, kernels that it trains with, of which few wait for memory alone."""
    device = accelerator.current_device_name()
    source, target = (torch.ones(effort.array // 4, device=device).view(-1, 1024) for _ in range(2))
    weight = torch.ones(1024, device=device)
    cases: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "add": lambda: torch.add(source, 1.0, out=target),
        "gelu": lambda: functional.gelu(source),
        "layer norm": lambda: functional.layer_norm(source, (1024,), weight),
    }
    rates = {name: 2 * source.nbytes / s for name, s in clock.alternating(cases, effort.rounds).items()}
    findings.details["memory"] = [{"kernel": name, "bytes_a_second": rate} for name, rate in rates.items()]
    if accelerator.is_synchronized_device():
        findings.add(
            "memory_rate", statistics.harmonic_mean(rates.values()), f"{', '.join(rates)}: the same bytes of each"
        )
    else:
        findings.add("memory_rate", rates["copy"], "a copy, read and written")


def _products(findings: Measured, clock: Clock, accelerator: Accelerator, effort: Effort) -> None:
    """``Machine.product_share`` as the products of the first dtype have it; the second's have the same curve."""
    first, second = _dtypes(accelerator)
    shapes = [s for side in effort.sides for s in ((side, side, side), (4 * side, side, 4 * side))]
    shapes = [shape for shape in shapes if math.prod(shape) <= max(effort.sides) ** 3]
    made: dict[tuple[int, int, str], torch.Tensor] = {}
    cases: dict[tuple[str, tuple[int, int, int]], Callable[[], Any]] = {}
    for dtype, (rows, depth, columns) in itertools.product((first, second), shapes):
        for side in ((rows, depth), (depth, columns)):
            device = accelerator.current_device_name()
            made.setdefault((*side, dtype), torch.ones(side, device=device, dtype=DTYPES[dtype]))
        operands = made[rows, depth, dtype], made[depth, columns, dtype]
        cases[dtype, (rows, depth, columns)] = partial(torch.mm, *operands)
    seconds = clock.alternating(cases, effort.rounds)
    findings.details["products"] = [
        {"dtype": dtype, "shape": shape, "seconds": s, "operations_a_second": 2 * math.prod(shape) / s}
        for (dtype, shape), s in seconds.items()
    ]

    def points(dtype: str) -> list[tuple[int, float]]:
        """(smallest side, operations a second) of products that are no matter of launches."""
        every = [(min(shape), 2 * math.prod(shape) / s, s) for (d, shape), s in seconds.items() if d == dtype]
        return [p[:2] for p in every if p[2] > _ABOVE * findings["kernel_s"]] or [max(every)[:2]]

    most, half = saturation(*zip(*points(first), strict=True))
    findings.add("matmul_half", half, f"curve through {len(points(first))} products in {first}")
    findings.add("matmul_share", 1.0, "the rates above are measured ones")
    findings.add(f"flops_{first}", most, "where that curve ends")
    rates = [rate * (side + half) / side for side, rate in points(second)]
    findings.add(f"flops_{second}", statistics.median(rates), "median of the products, with the same curve")


def _dtypes(accelerator: Accelerator) -> tuple[str, str]:
    """What is trained with there, and the other one."""
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
    each = (_FORWARD + _BACKWARD) * effort.heads * 64
    rates = {sequence: each * sequence**2 / s for sequence, s in seconds.items()}
    findings.details["attention"] = [
        {"dtype": dtype, "sequence": n, "heads": effort.heads, "seconds": seconds[n], "operations_a_second": rate}
        for n, rate in rates.items()
    ]
    share = statistics.median(rates.values()) / findings[f"flops_{dtype}"]
    findings.add("attention_share", share, f"forward and backward, causal, of the whole square, in {dtype}")


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
    findings.details["copies"] = [
        {"host": kind, "way": way, "bytes": nbytes, "seconds": s} for (kind, way, nbytes), s in seconds.items()
    ]
    for kind, constant in (("pinned", "bus_rate"), ("pageable", "pageable_rate")):
        sizes, times = zip(*((float(k[2]), s) for k, s in seconds.items() if k[0] == kind), strict=True)
        start, slope = line(sizes, times)
        text = f"line through copies up and down, {kind} memory"
        if accelerator.is_synchronized_device():
            text += ": the device is the host here"
        findings.add(constant, 1 / slope, text)
        if kind == "pinned":
            findings.add("copy_s", start, text)
