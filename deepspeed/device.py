"""The device layer: the only file that knows which accelerator runs underneath.

Everything else asks ``get_accelerator()``. The object covers CUDA/ROCm (``torch.cuda``), other backends that
PyTorch offers through ``torch.get_device_module`` (XPU, MPS, NPU, ...) and the CPU, where streams and events are
harmless stand-ins, so that code written for overlap runs unchanged without an accelerator.
"""

import contextlib
import functools
import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.observe import hostmem

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl", "mlu": "cncl"}
_VISIBLE_DEVICES = {"cuda": ["CUDA_VISIBLE_DEVICES"], "xpu": ["ZE_AFFINITY_MASK"], "npu": ["ASCEND_RT_VISIBLE_DEVICES"]}
_EXPORT_ENVS = {"cuda": ["NCCL"], "xpu": ["CCL", "ZE"], "npu": ["ASCEND", "HCCL"]}

DeviceIndex = int | str | torch.device | None


class NullStream:
    """Stands in for a stream where work is already done when the call returns."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: "NullEvent | None" = None) -> "NullEvent":
        """Record and return ``event`` (a new one by default)."""
        event = event if event is not None else NullEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True


class NullEvent:
    """Stands in for an event; it is complete as soon as it exists and knows the host time of ``record``."""

    def __init__(self, **_kwargs: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Remember the host time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always complete."""
        return True

    def elapsed_time(self, end: "NullEvent") -> float:
        """Milliseconds from this event to ``end``."""
        return (end._seconds - self._seconds) * 1e3


class Accelerator:
    """One kind of device. ``index`` arguments take an int, a device, a string or None (the current device).

    Constructing it and asking for names touches no device.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._communication_backend_name = _BACKENDS.get(name, "gloo")
        if sys.platform == "win32" and self._communication_backend_name == "nccl":
            self._communication_backend_name = "gloo"  # PyTorch for Windows is built without NCCL
        self._compile_backend = "inductor"

    def __repr__(self) -> str:
        return f"Accelerator({self._name!r})"

    # names and selection

    @property
    def _is_cpu(self) -> bool:
        return self._name == "cpu"

    @property
    def _module(self) -> ModuleType:
        return torch.get_device_module(self._name)

    def _maybe(self, name: str) -> Callable[..., Any] | None:
        return None if self._is_cpu else getattr(self._module, name, None)

    def is_available(self) -> bool:
        """True when this kind of device can be used here."""
        return bool(self._is_cpu or self._module.is_available())

    def is_synchronized_device(self) -> bool:
        """True when work is finished when the call returns (CPU), so no streams are needed."""
        return self._is_cpu

    def use_host_timers(self) -> bool:
        """True when host clocks time device work correctly."""
        return self._is_cpu

    def resolves_data_dependency(self) -> bool:
        """True when the runtime orders reads and writes of one tensor by itself."""
        return self._is_cpu

    def handles_memory_backpressure(self) -> bool:
        """True when allocation waits for memory in flight by itself."""
        return self._is_cpu

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, or ``"cuda:1"`` with an index; always ``"cpu"`` on the CPU."""
        return self._name if self._is_cpu or device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Context that makes ``device_index`` current."""
        context = self._maybe("device")
        return contextlib.nullcontext() if context is None or device_index is None else context(device_index)

    def torch_device(self) -> torch.device:
        """The current device as a ``torch.device``."""
        return torch.device(self.current_device_name())

    def set_device(self, device_index: int) -> None:
        """Make ``device_index`` current for this thread."""
        if (setter := self._maybe("set_device")) is not None:
            setter(device_index)

    def current_device(self) -> int:
        """Index of the current device (on the CPU: the local rank)."""
        if self._is_cpu:
            return int(os.environ.get("LOCAL_RANK", "0"))
        current = self._maybe("current_device")
        return 0 if current is None else int(current())

    def current_device_name(self) -> str:
        """``"cuda:<current>"`` or ``"cpu"``."""
        return "cpu" if self._is_cpu else f"{self._name}:{self.current_device()}"

    def device_count(self) -> int:
        """Devices that this process can use; on the CPU the number of ranks the launcher put on this machine (1 without
        one).
        """
        if self._is_cpu:
            return int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return int(self._module.device_count())

    def synchronize(self, device_index: DeviceIndex = None) -> None:
        """Wait until the device has finished everything it was given."""
        if (sync := self._maybe("synchronize")) is not None:
            sync() if device_index is None else sync(device_index)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """True when ``tensor`` lies on this kind of device."""
        return tensor.device.type == self._name

    # random numbers

    def random(self) -> ModuleType:
        """The module with the seeding functions of this device."""
        return torch.random if self._is_cpu else getattr(self._module, "random", torch.random)

    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        """State of the device's generator (a byte tensor on the CPU)."""
        getter = self._maybe("get_rng_state")
        if getter is None:
            return torch.get_rng_state()
        return getter() if device_index is None else getter(device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        """Put back a state that ``get_rng_state`` returned."""
        setter = self._maybe("set_rng_state")
        if setter is None:
            torch.set_rng_state(new_state)
        elif device_index is None:
            setter(new_state)
        else:
            setter(new_state, device_index)

    def manual_seed(self, seed: int) -> None:
        """Seed the current device."""
        (self._maybe("manual_seed") or torch.manual_seed)(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device of this process."""
        (self._maybe("manual_seed_all") or self._maybe("manual_seed") or torch.manual_seed)(seed)

    def initial_seed(self) -> int:
        """Seed that the current device's generator started from."""
        return int((self._maybe("initial_seed") or torch.initial_seed)())

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        """Generator of device ``device_index``."""
        if (start := self._maybe("init")) is not None:
            start()  # the list of generators is empty until the device is initialised
        generators = None if self._is_cpu else getattr(self._module, "default_generators", None)
        return torch.default_generator if not generators else generators[device_index]

    # streams and events

    def Stream(self, device: DeviceIndex = None, priority: int = 0, **kwargs: Any) -> Any:  # noqa: N802 (interface name)
        """A new stream (a stand-in where the device has none)."""
        make = self._maybe("Stream")
        return NullStream() if make is None else make(device=device, priority=priority, **kwargs)

    def Event(self, **kwargs: Any) -> Any:  # noqa: N802 (interface name)
        """A new event; ``enable_timing=True`` allows ``elapsed_time``."""
        make = self._maybe("Event")
        return NullEvent() if make is None else make(**kwargs)

    def stream(self, stream: Any) -> Any:
        """Context in which work goes to ``stream``; None and stand-ins are ignored."""
        enter = self._maybe("stream")
        ignored = stream is None or isinstance(stream, NullStream)
        return contextlib.nullcontext() if ignored or enter is None else enter(stream)

    def current_stream(self, device_index: DeviceIndex = None) -> Any:
        """Stream that work goes to now."""
        current = self._maybe("current_stream")
        return NullStream() if current is None else current(device_index)

    def default_stream(self, device_index: DeviceIndex = None) -> Any:
        """The device's default stream."""
        default = self._maybe("default_stream")
        return NullStream() if default is None else default(device_index)

    # memory, in bytes; on the CPU this process' resident memory

    def empty_cache(self) -> None:
        """Give cached, unused device memory back."""
        if (empty := self._maybe("empty_cache")) is not None:
            empty()

    def _memory(self, name: str, device_index: DeviceIndex, on_host: Callable[[], int]) -> int:
        if self._is_cpu:
            return on_host()
        read = self._maybe(name)
        return 0 if read is None else int(read(device_index))

    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Bytes held by tensors."""
        return self._memory("memory_allocated", device_index, hostmem.rss_bytes)

    def max_memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Largest ``memory_allocated`` since the last reset."""
        return self._memory("max_memory_allocated", device_index, hostmem.peak_rss_bytes)

    def memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Bytes held by the caching allocator."""
        return self._memory("memory_reserved", device_index, hostmem.rss_bytes)

    def max_memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Largest ``memory_reserved`` since the last reset."""
        return self._memory("max_memory_reserved", device_index, hostmem.peak_rss_bytes)

    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved

    def reset_peak_memory_stats(self, device_index: DeviceIndex = None) -> None:
        """Start new peak measurements."""
        if self._is_cpu:
            hostmem.reset_peak_rss()
        elif (reset := self._maybe("reset_peak_memory_stats")) is not None:
            reset(device_index)

    reset_max_memory_allocated = reset_peak_memory_stats
    reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: DeviceIndex = None) -> dict[str, Any]:
        """The allocator's own counters."""
        if self._is_cpu:
            return {
                "allocated_bytes.all.current": hostmem.rss_bytes(),
                "allocated_bytes.all.peak": hostmem.peak_rss_bytes(),
            }
        read = self._maybe("memory_stats")
        return {} if read is None else dict(read(device_index))

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        """Memory of the device, or of the machine on the CPU."""
        if self._is_cpu:
            return hostmem.host_total_bytes()
        properties = self._maybe("get_device_properties")
        return (
            0
            if properties is None
            else int(properties(self.current_device() if device_index is None else device_index).total_memory)
        )

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        """Memory still free."""
        if self._is_cpu:
            return hostmem.host_available_bytes()
        info = self._maybe("mem_get_info")
        return 0 if info is None else int(info(device_index)[0])

    # number formats

    def is_bf16_supported(self) -> bool:
        """True when bfloat16 arithmetic runs here."""
        check = self._maybe("is_bf16_supported")
        return self._is_cpu or bool(check is not None and check())

    def is_fp16_supported(self) -> bool:
        """True when float16 arithmetic runs here."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Floating dtypes that may be configured."""
        halves = [torch.float16] if self.is_fp16_supported() else []
        return [torch.float32, *halves, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def amp(self) -> ModuleType | None:
        """Module with this device's autocast."""
        return getattr(torch.cpu if self._is_cpu else self._module, "amp", None)

    # communication, processes, compilation

    def communication_backend_name(self) -> str:
        """Name of the ``torch.distributed`` backend for this device: nccl, gloo, ..."""
        return self._communication_backend_name

    def visible_devices_envs(self) -> list[str]:
        """Variables that restrict which devices a process sees."""
        return list(_VISIBLE_DEVICES.get(self._name, []))

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Iterable[int]) -> None:
        """Write the ids into ``current_env`` under every variable of ``visible_devices_envs``."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Prefixes of variables that a launcher passes on to other machines."""
        return list(_EXPORT_ENVS.get(self._name, []))

    def get_compile_backend(self) -> str:
        """Backend name for ``torch.compile``."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend for ``torch.compile``."""
        self._compile_backend = backend

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Run ``callback`` once the device is initialised (at once where that needs no waiting)."""
        defer = self._maybe("_lazy_call")
        callback() if defer is None else defer(callback)

    def is_triton_supported(self) -> bool:
        """True when Triton kernels run here."""
        if self._name != "cuda" or not self.is_available():
            return False
        return bool(torch.version.hip) or torch.cuda.get_device_capability()[0] >= 7

    # profiler ranges and graph capture

    def range_push(self, msg: str) -> None:
        """Open a named range in the device profiler."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """Close the innermost range."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def create_graph(self) -> Any:
        """An empty device graph, None where there are none."""
        return torch.cuda.CUDAGraph() if self._name == "cuda" else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """Context that records the work inside into ``graph``."""
        return contextlib.nullcontext() if graph is None else torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        """Run a captured graph."""
        if graph is not None:
            graph.replay()

    # page-locked memory

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Copy of ``tensor`` in page-locked memory; the tensor itself on the CPU, where pinning buys nothing."""
        return tensor if self._is_cpu or not self.is_available() else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True when ``tensor`` is page-locked."""
        return not self._is_cpu and tensor.is_pinned()

    # kernels

    def op_builder_dir(self) -> str:
        """Package that holds the kernel builders."""
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """Instance of the kernel builder of that class name; None where there is no such class."""
        builder = self.get_op_builder(class_name)
        return builder and builder()

    def get_op_builder(self, class_name: str) -> Any:
        """Class of the kernel builder of that name; None where there is no such class."""
        # by name, because builders are above the device layer
        return getattr(importlib.import_module(self.op_builder_dir()), class_name, None)


class _Chosen:
    """What ``set_accelerator`` chose. The accelerator is a fact about the process, not about an engine, and its public
    setter has no handle to hang it on, so one module-level cell is unavoidable."""

    accelerator: Accelerator | None = None


@functools.cache
def _detect(requested: str | None) -> Accelerator:
    if requested:
        try:
            torch.device(requested)
        except RuntimeError as error:
            raise DeepSpeedConfigError(
                f"DS_ACCELERATOR={requested!r} is no device type of PyTorch; use cpu, cuda, xpu, ..."
            ) from error
        accelerator = Accelerator(requested)
        if not accelerator.is_available():
            raise DeepSpeedConfigError(
                f"DS_ACCELERATOR={requested!r} asks for a device that this process cannot use; unset it or use cpu."
            )
        return accelerator
    found = torch.accelerator.current_accelerator(check_available=True)
    return Accelerator("cpu" if found is None else found.type)


def get_accelerator() -> Accelerator:
    """The device layer of this process: ``set_accelerator``'s choice, else ``DS_ACCELERATOR``, else what PyTorch finds,
    else the CPU.
    """
    return _Chosen.accelerator or _detect(os.environ.get("DS_ACCELERATOR") or None)


def set_accelerator(accel_obj: Accelerator | None) -> None:
    """Use ``accel_obj`` from now on; None goes back to detection."""
    _Chosen.accelerator = accel_obj


def device_for(local_rank: int) -> torch.device:
    """The torch device of a local rank: its accelerator, or the CPU."""
    accelerator = get_accelerator()
    # Schedulers that give every task one device show each of them only its own, as number 0.
    return torch.device(accelerator.device_name(local_rank if accelerator.device_count() > 1 else 0))


def take_device(local_rank: int) -> torch.device:
    """Make the device of ``local_rank`` current unless this process has chosen one already; returns the current device.

    A process that has chosen nothing stands on device 0, and several on one device cannot form a group.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu" and accelerator.current_device() == 0:
        accelerator.set_device(device_for(local_rank).index)
    return accelerator.torch_device()


def set_random_seed(seed: int) -> None:
    """Seed ``random``, ``numpy`` where it is loaded, torch's CPU generator and every device of this process."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


class OnDevice(contextlib.ContextDecorator):
    """Build modules inside directly on ``device`` with floating dtype ``dtype``, e.g. ``OnDevice(torch.bfloat16,
    device="meta")``.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "OnDevice":
        if self._enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._stack.enter_context(self._device)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()
