"""A device of PyTorch that does not exist: streams, events and memory questions go to whoever records.

Registered as the backend "sim" in the slot that torch keeps for others (PrivateUse1); that holds for the process and
cannot be undone, so a simulation has a process of its own.
"""

import contextlib
import itertools
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils import backend_registration

from deepspeed.errors import UsageError
from deepspeed.tools.simulate.events import COMPUTE

NAME = "sim"


class Sink(Protocol):
    """Receiver of all requests to the device: ``simulate.record``. Streams and events are numbers, times seconds."""

    plain_attention: Counter[str]
    routing: str

    def record(self, stream: int) -> int: ...
    def wait(self, stream: int, event: int) -> None: ...
    def host_wait(self, reason: str, *, stream: int | None = None, event: int | None = None) -> None: ...
    def done(self, event: int) -> bool: ...
    def happens(self, event: int) -> float: ...
    def memory(self) -> tuple[int, int]: ...
    def device_bytes(self) -> int: ...


class _Current(threading.local):
    stream: "SimStream | None" = None


class SimEvent:
    """Imitate ``torch.cuda.Event`` on a simulated stream."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.number: int | None = None

    def record(self, stream: "SimStream | None" = None) -> None:
        self.number = MODULE.sink.record((stream or MODULE.current_stream()).number)

    def wait(self, stream: "SimStream | None" = None) -> None:
        (stream or MODULE.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self.number is not None:
            MODULE.sink.host_wait("event.synchronize", event=self.number)

    def query(self) -> bool:
        return self.number is None or MODULE.sink.done(self.number)

    def elapsed_time(self, end: "SimEvent") -> float:
        """Return milliseconds from this event to ``end``; RuntimeError, as on a device, before both have happened."""
        if self.number is None or end.number is None or not (self.query() and end.query()):
            raise RuntimeError("both events must be recorded and complete before their times are read")
        return (MODULE.sink.happens(end.number) - MODULE.sink.happens(self.number)) * 1e3


class SimStream:
    """Imitate ``torch.cuda.Stream``."""

    _numbers = itertools.count(COMPUTE + 1)

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        self.number = next(self._numbers) if number is None else number
        self.priority, self.cuda_stream = priority, self.number

    def wait_event(self, event: SimEvent) -> None:
        if event.number is not None:
            MODULE.sink.wait(self.number, event.number)

    def wait_stream(self, stream: "SimStream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        event = event or SimEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        MODULE.sink.host_wait("stream.synchronize", stream=self.number)

    def query(self) -> bool:
        return MODULE.sink.done(MODULE.sink.record(self.number))


class _Module(types.ModuleType):
    """Take the place of ``torch.cuda``."""

    Stream, Event = SimStream, SimEvent
    communication_backend = "fake"  # torch's process group without peers

    def __init__(self) -> None:
        super().__init__("torch.sim")
        self._sink: Sink | None = None
        self._default = SimStream(number=COMPUTE)
        self._local = _Current()

    @property
    def sink(self) -> Sink:
        if self._sink is None:
            raise UsageError("the simulated device is used outside of a simulation")
        return self._sink

    def records(self, sink: Sink) -> bool:
        """Return whether ``sink`` receives the requests now."""
        return self._sink is sink

    @contextlib.contextmanager
    def recorded_by(self, sink: Sink) -> Iterator[None]:
        """Send all requests to the device inside to ``sink``."""
        before, self._sink = self._sink, sink
        try:
            yield
        finally:
            self._sink = before

    def current_stream(self, _device: Any = None) -> SimStream:
        return self._local.stream or self._default

    def default_stream(self, _device: Any = None) -> SimStream:
        return self._default

    @contextlib.contextmanager
    def stream(self, stream: SimStream | None) -> Iterator[None]:
        before, self._local.stream = self._local.stream, stream or self._local.stream
        try:
            yield
        finally:
            self._local.stream = before

    def synchronize(self, _device: Any = None) -> None:
        self.sink.host_wait("device.synchronize")

    def memory_allocated(self, _device: Any = None) -> int:
        return self.sink.memory()[0]

    def max_memory_allocated(self, _device: Any = None) -> int:
        return self.sink.memory()[1]

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def mem_get_info(self, _device: Any = None) -> tuple[int, int]:
        return self.sink.device_bytes() - self.sink.memory()[0], self.sink.device_bytes()

    def get_device_properties(self, _device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=self.sink.device_bytes(), name="simulated")

    def get_rng_state(self, _device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @contextlib.contextmanager
    def device(self, _index: int) -> Iterator[None]:
        yield


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


MODULE = _Module()
_CONSTANTS: dict[str, Any] = {
    "is_initialized": True,
    "is_available": True,
    "is_bf16_supported": True,
    "_is_in_bad_fork": False,
    "current_device": 0,
    "device_count": 1,
    "initial_seed": 0,
    "memory_stats": {},
    **dict.fromkeys(("set_device", "manual_seed", "manual_seed_all", "set_rng_state", "empty_cache", "init")),
    "reset_peak_memory_stats": None,
}
for _name, _value in _CONSTANTS.items():
    setattr(MODULE, _name, _constant(_value))


def install() -> None:
    """Register the device with torch, once for the process."""
    if not hasattr(torch, NAME):
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
