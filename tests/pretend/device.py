"""A device without hardware as PyTorch sees it, ``torch.hpu``: importing this registers it, for the whole process.

Streams are queues that execute late, so that a missing wait gives wrong numbers (device.cpp); ``set_order`` says how
late. ``FAULTS`` are questions about another device than the asking thread's, with the thread's name and stack.
"""

import contextlib
import ctypes
import os
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.pretend import native

NAME, BACKEND, TOTAL = "hpu", "hccl", 8 << 30
ORDERS = ("now", "late", "sides", "random")  # at once; when waited for; side streams first; by dice
FAULTS: list[tuple[str, str, str]] = []

C = native.load()
_TASKS: dict[int, Callable[[], None]] = {}
_ERRORS: list[BaseException] = []


class PretendError(RuntimeError):
    """Work of the device has failed; its caller is gone."""


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
def _run_task(number: int) -> int:
    try:
        _TASKS.pop(number)()
    except BaseException as error:
        traceback.print_exc()  # whoever waits may have no way to say it
        _ERRORS.append(error)
        return 1
    return 0


C.pretend_callback(_run_task)


def set_order(name: str, seed: int = 0) -> None:
    """How late work is done from now on."""
    C.pretend_order(ORDERS.index(name), seed)


def _look() -> None:
    """Raise what has failed, and note what was asked from a thread of another device."""
    room = ctypes.create_string_buffer(2000)
    while C.pretend_fault(room, len(room)):
        stack = "".join(traceback.format_stack(limit=12)[:-2])
        FAULTS.append((room.value.decode(), threading.current_thread().name, stack))
    if C.pretend_failure(room, len(room)):
        cause = _ERRORS.pop() if _ERRORS else None
        raise PretendError(room.value.decode()) from cause


def _index(device: Any = None) -> int:
    if device is None:
        return int(C.pretend_current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(C.pretend_current_device()) if index is None else index


class Stream:
    """A queue of its own, or the device's default one with ``number`` 0."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        self.device_index, self.priority = _index(device), priority
        self.stream_id = int(C.pretend_new_stream(self.device_index)) if number is None else number
        self.device = torch.device(NAME, self.device_index)

    def _place(self) -> tuple[int, int]:
        return self.device_index, self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._place() == other._place()

    def __hash__(self) -> int:
        return hash(self._place())

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        C.pretend_finish_stream(*self._place())
        _look()

    def query(self) -> bool:
        return bool(C.pretend_idle(*self._place()))

    def submit(self, task: Callable[[], None]) -> None:
        """Run a function of Python when the queue comes to it."""
        number = id(task)
        _TASKS[number] = task
        C.pretend_submit(*self._place(), number)


class Event:
    """A place in a queue."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._timing, self._recorded, self._mark = enable_timing, False, C.pretend_new_event()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):
            C.pretend_free_event(self._mark)

    def record(self, stream: Stream | None = None) -> None:
        self._recorded = True
        C.pretend_record(self._mark, *(stream or current_stream())._place())

    def wait(self, stream: Stream | None = None) -> None:
        C.pretend_wait(self._mark, *(stream or current_stream())._place())

    def query(self) -> bool:
        over = bool(C.pretend_query(self._mark))
        _look()
        return over

    def synchronize(self) -> None:
        C.pretend_finish_event(self._mark)
        _look()

    def elapsed_time(self, end: "Event") -> float:
        if not (self._timing and end._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._recorded and end._recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(C.pretend_time(end._mark) - C.pretend_time(self._mark)) * 1e3


def default_stream(device: Any = None) -> Stream:
    return Stream(device, number=0)


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return Stream(index, number=int(C.pretend_current_stream(index)))


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    if chosen is None:
        yield
        return
    before, device_before = current_stream(chosen.device_index), C.pretend_exchange_device(chosen.device_index)
    C.pretend_choose_stream(*chosen._place())
    try:
        yield
    finally:
        C.pretend_choose_stream(*before._place())
        C.pretend_exchange_device(device_before)


class device:
    """Makes another device current for a while."""

    def __init__(self, chosen: Any) -> None:
        self._index = _index(chosen)

    def __enter__(self) -> None:
        self._before = C.pretend_exchange_device(self._index)

    def __exit__(self, *_: object) -> None:
        C.pretend_exchange_device(self._before)


class _Runtime:
    def cudaHostRegister(self, address: int, nbytes: int, _: int) -> int:
        C.pretend_lock(address, nbytes)
        _look()
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        C.pretend_unlock(address)
        return 0


def synchronize(device: Any = None) -> None:
    C.pretend_finish_device(_index(device))
    _look()


def _properties(_: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(total_memory=TOTAL, name="a device that pretends")


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _in_use(device: Any = None) -> int:
    return int(C.pretend_in_use(_index(device)))


def _peak(device: Any = None) -> int:
    return int(C.pretend_peak(_index(device)))


def _sleep(cycles: int) -> None:
    """The device is busy for a while; at a thousandth of the cycles' time, as the tests' sleeps are for real ones."""
    current_stream().submit(lambda: time.sleep(cycles / 2e12))


def _module() -> types.ModuleType:
    made = types.ModuleType(f"torch.{NAME}")
    vars(made).update(
        Stream=Stream, Event=Event, default_stream=default_stream, current_stream=current_stream, stream=stream,
        device=device, pretends=True, synchronize=synchronize, set_device=lambda d: C.pretend_set_device(_index(d)),
        current_device=lambda: int(C.pretend_current_device()), device_count=lambda: 2, is_available=lambda: True,
        is_initialized=lambda: True, init=lambda: None, _lazy_init=lambda: None, _is_in_bad_fork=lambda: False,
        cudart=_Runtime, is_bf16_supported=lambda: True, _sleep=_sleep,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        memory_allocated=_in_use, memory_reserved=_in_use, max_memory_allocated=_peak, max_memory_reserved=_peak,
        reset_peak_memory_stats=lambda d=None: C.pretend_reset_peak(_index(d)), empty_cache=synchronize,
        memory_stats=lambda d=None: {}, host_memory_stats=dict, get_device_properties=_properties,
        mem_get_info=lambda d=None: (TOTAL - _in_use(d), TOTAL),
        default_generators=tuple(torch.Generator(f"{NAME}:{index}") for index in range(2)),
        get_rng_state=lambda d=None: torch.get_rng_state(), set_rng_state=lambda s, d=None: torch.set_rng_state(s),
        manual_seed=_seed, manual_seed_all=_seed, initial_seed=torch.initial_seed,
    )  # fmt: skip
    return made


torch._register_device_module(NAME, _module())
set_order(os.environ.get("PRETEND_ORDER", "late"), int(os.environ.get("PRETEND_SEED", "0")))
torch.empty(1).pin_memory()  # until then torch asks nobody whether memory is page-locked
