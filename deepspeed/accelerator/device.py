"""The device layer: the only file that knows which accelerator runs underneath.

Everything else asks ``get_accelerator()``: CUDA/ROCm, other backends of ``torch.get_device_module`` (XPU, MPS, NPU,
...) and the CPU, where streams and events are harmless stand-ins, so that code written for overlap runs unchanged.
"""

import contextlib
import copy
import functools
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from deepspeed.client.attrs import answers
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.monitor import hostmem

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl", "mlu": "cncl"}
_VISIBLE_DEVICES = {"cuda": ["CUDA_VISIBLE_DEVICES"], "xpu": ["ZE_AFFINITY_MASK"], "npu": ["ASCEND_RT_VISIBLE_DEVICES"]}
_EXPORT_ENVS = {"cuda": ["NCCL"], "xpu": ["CCL", "ZE"], "npu": ["ASCEND", "HCCL"]}

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable

# The configuration's names of dtypes.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NullEvent:
    """Stand in for an event; it is complete as soon as it exists and knows the host time of ``record``."""

    def __init__(self, **_kwargs: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once: there is nothing to wait for."""

    def query(self) -> bool:
        return True

    synchronize = wait

    def elapsed_time(self, end: "NullEvent") -> float:
        """Return the milliseconds from this event to ``end``."""
        return (end._seconds - self._seconds) * 1e3


class NullStream:
    """Stand in for a stream where work is already done when the call returns."""

    wait_event = wait_stream = synchronize = NullEvent.wait
    query = NullEvent.query

    def record_event(self, event: NullEvent | None = None) -> NullEvent:
        """Record and return ``event`` (a new one by default)."""
        event = event or NullEvent()
        event.record(self)
        return event


def _forwarded(name: str, absent: Any = None, *, on_cpu: Callable[[], Any] | None = None, text: str = "") -> Any:
    """Make a method that calls ``name`` of the device's module, without the arguments that are None.

    ``absent``, a function or a value, answers where the module has none, and on the CPU unless ``on_cpu`` does.
    """
    owner, _, last = name.rpartition(".")

    def method(self: "Accelerator", *args: Any, **kwargs: Any) -> Any:
        if self._is_cpu and on_cpu is not None:
            return on_cpu()
        namespace = getattr(self._module, owner, None) if owner else self._module
        run = absent if self._is_cpu else getattr(namespace, last, absent)
        if not callable(run):
            return run
        given = [*args, kwargs.pop("device_index", None)]
        while given and given[-1] is None:  # not every device takes an index
            given.pop()
        return run(*given, **{key: value for key, value in kwargs.items() if value is not None})

    method.__name__ = method.__qualname__ = last
    method.__doc__ = text or f"``{name}`` as the device's module has it; a harmless stand-in where it has none."
    return method


def _tensor_of(dtype: torch.dtype) -> Any:
    """Make a property that makes tensors of ``dtype``: of given sizes, or from one list of values."""

    def make(self: "Accelerator", *given: Any) -> torch.Tensor:
        device = self.current_device_name()
        if given and not isinstance(given[0], int):
            return torch.tensor(given[0], dtype=dtype, device=device)
        return torch.empty(given or 0, dtype=dtype, device=device)

    return property(lambda self: functools.partial(make, self))


def _process_stats() -> dict[str, int]:
    return {"allocated_bytes.all.current": hostmem.rss_bytes(), "allocated_bytes.all.peak": hostmem.peak_rss_bytes()}


class Accelerator:
    """Kind of device. ``device_index`` arguments take an int, a device, a string or None (the current device).

    Constructing it and asking for names touches no device. Methods that only call ``torch.<device>`` are rows below.
    """

    # What ``set_accelerator`` chose: a fact about the process, whose public setter has no handle to hang it on.
    _chosen: "Accelerator | None" = None

    def __init__(self, name: str) -> None:
        self._name, self._is_cpu, self._compile_backend = name, name == "cpu", "inductor"

    def __repr__(self) -> str:
        return f"Accelerator({self._name!r})"

    _module = property(lambda self: torch.get_device_module(self._name))

    # names and selection
    is_available = answers(
        lambda self: bool(self._module.is_available()), "True when this kind of device can be used here."
    )
    # whether work is finished when the call returns: no streams are needed, and host clocks are right
    is_synchronized_device, use_host_timers = map(answers, ["_is_cpu"] * 2)
    resolves_data_dependency, handles_memory_backpressure = map(answers, ["_is_cpu"] * 2)
    # nccl, gloo, ...; a module that torch does not know may say itself
    communication_backend_name = answers(
        lambda self: _BACKENDS.get(self._name) or getattr(self._module, "communication_backend", "gloo")
    )
    current_device_name = answers(
        lambda self: "cpu" if self._is_cpu else f"{self._name}:{self.current_device()}",
        '``"cuda:<current>"`` or ``"cpu"``.',
    )
    torch_device = answers(lambda self: torch.device(self.current_device_name()))  # the current one

    def device_name(self, device_index: int | None = None) -> str:
        """Return ``"cuda"``, or ``"cuda:1"`` with an index; always ``"cpu"`` on the CPU."""
        return self._name if self._is_cpu or device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: Any = None) -> Any:
        """Return a context that makes ``device_index`` current."""
        none = self._is_cpu or device_index is None or not hasattr(self._module, "device")
        return contextlib.nullcontext() if none else self._module.device(device_index)

    def device_count(self) -> int:
        """Count devices that this process can use; on the CPU the ranks that the launcher put on this machine, or 1."""
        if self._is_cpu:
            return int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return int(self._module.device_count())

    set_device = _forwarded("set_device")
    current_device = _forwarded("current_device", 0, on_cpu=lambda: int(os.environ.get("LOCAL_RANK", "0")))
    synchronize = _forwarded("synchronize")

    # tensors of a dtype on the current device, from a size or from values
    ByteTensor, IntTensor, LongTensor = map(_tensor_of, (torch.uint8, torch.int32, torch.int64))
    FloatTensor, DoubleTensor = map(_tensor_of, (torch.float32, torch.float64))
    HalfTensor, BFloat16Tensor = map(_tensor_of, (torch.float16, torch.bfloat16))

    # random numbers
    random = answers(lambda self: torch.random)

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        """Return the generator of device ``device_index``."""
        if hasattr(self._module, "init"):  # the list of generators is empty until the device is initialised
            self._module.init()
        generators = getattr(self._module, "default_generators", None)
        return generators[device_index] if generators else torch.default_generator

    get_rng_state = _forwarded("get_rng_state", lambda *_: torch.get_rng_state())
    set_rng_state = _forwarded("set_rng_state", lambda new_state, *_: torch.set_rng_state(new_state))
    manual_seed = _forwarded("manual_seed", torch.manual_seed)
    manual_seed_all = _forwarded("manual_seed_all", torch.manual_seed)
    initial_seed = _forwarded("initial_seed", torch.initial_seed)

    # streams and events
    def stream(self, stream: Any) -> Any:
        """Return a context in which work goes to ``stream``; None and stand-ins are ignored."""
        ignored = self._is_cpu or stream is None or isinstance(stream, NullStream)
        return contextlib.nullcontext() if ignored else self._module.stream(stream)

    Stream = _forwarded("Stream", lambda *_, **__: NullStream())

    def urgent_stream(self) -> Any:
        """Make a stream whose kernels go before those of ordinary streams, where the device has priorities."""
        with contextlib.suppress(TypeError):  # not every device's streams have priorities
            return self.Stream(priority=-1)
        return self.Stream()

    Event = _forwarded("Event", NullEvent)

    def awaited_event(self) -> Any:
        """Make an event for which a thread of the host sleeps; where the device has no such, it may spin."""
        with contextlib.suppress(TypeError):
            return self.Event(blocking=True)
        return self.Event()

    current_stream = _forwarded("current_stream", lambda *_: NullStream())
    default_stream = _forwarded("default_stream", lambda *_: NullStream())

    collectives_version = _forwarded("nccl.version", lambda: (), text="Of NCCL, as numbers; () where there is none.")

    # memory, in bytes; on the CPU this process' resident memory
    empty_cache = _forwarded("empty_cache")
    memory_allocated = _forwarded("memory_allocated", 0, on_cpu=hostmem.rss_bytes)
    max_memory_allocated = _forwarded("max_memory_allocated", 0, on_cpu=hostmem.peak_rss_bytes)
    memory_reserved = _forwarded("memory_reserved", 0, on_cpu=hostmem.rss_bytes)
    max_memory_reserved = _forwarded("max_memory_reserved", 0, on_cpu=hostmem.peak_rss_bytes)
    reset_peak_memory_stats = _forwarded("reset_peak_memory_stats", on_cpu=hostmem.reset_peak_rss)
    # older names of the same
    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved
    reset_max_memory_allocated, reset_max_memory_cached = reset_peak_memory_stats, reset_peak_memory_stats
    memory_stats = _forwarded(
        "memory_stats", lambda *_: {}, on_cpu=_process_stats, text="The allocator's own counters, by name; in bytes."
    )

    def available_memory(self, device_index: Any = None) -> int:
        """Return the bytes that are still free on the device, or on the machine for the CPU."""
        if self._is_cpu:
            return hostmem.host_available_bytes()
        return int(getattr(self._module, "mem_get_info", lambda _: (0, 0))(device_index)[0])

    def product_name(self, device_index: Any = None) -> str:
        """Return the maker's name of the device; the kind of device where none is known, and on the CPU."""
        if self._is_cpu or not hasattr(self._module, "get_device_properties"):
            return self._name
        index = self.current_device() if device_index is None else device_index
        return str(self._module.get_device_properties(index).name)

    def total_memory(self, device_index: Any = None) -> int:
        """Return all bytes of the device; asking starts nothing on a device that this process does not use."""
        if self._is_cpu:
            return hostmem.host_total_bytes()
        if not hasattr(self._module, "get_device_properties"):
            return 0
        index = self.current_device() if device_index is None else device_index
        return int(self._module.get_device_properties(index).total_memory)

    # number formats; float16 arithmetic runs everywhere
    is_bf16_supported = _forwarded("is_bf16_supported", lambda: False, on_cpu=lambda: True)
    is_fp16_supported = _forwarded("is_fp16_supported", lambda: True)
    supported_dtypes = answers(
        lambda self: [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]
    )

    # processes: variables that restrict which devices one sees; prefixes of variables that other machines need too
    visible_devices_envs = answers(lambda self: list(_VISIBLE_DEVICES.get(self._name, [])))
    export_envs = answers(lambda self: list(_EXPORT_ENVS.get(self._name, [])))

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Iterable[int]) -> None:
        """Write the ids into ``current_env`` under every variable of ``visible_devices_envs``."""
        current_env |= dict.fromkeys(self.visible_devices_envs(), ",".join(map(str, local_accelerator_ids)))

    # calls that may wait until the device is initialised, mixed precision, Triton
    lazy_call = _forwarded("_lazy_call", lambda callback: callback())
    amp = answers(lambda self: getattr(self._module, "amp", None))
    is_triton_supported = answers(lambda self: not self._is_cpu and importlib.util.find_spec("triton") is not None)

    # compilation, profiler ranges and graph capture
    get_compile_backend = answers("_compile_backend")

    def set_compile_backend(self, backend: str) -> None:
        """Set the answer of ``get_compile_backend``; raise ValueError for a name that torch.compile does not know."""
        backends = torch.compiler.list_backends(exclude_tags=())
        if backend not in backends:
            raise ValueError(f"torch.compile has no backend {backend!r}; it has {', '.join(backends)}")
        self._compile_backend = backend

    range_push, range_pop = _forwarded("nvtx.range_push"), _forwarded("nvtx.range_pop")
    create_graph = _forwarded("CUDAGraph")  # None where there are none

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """Return a context that records the work inside into ``graph``."""
        return contextlib.nullcontext() if graph is None else torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        if graph is not None:
            graph.replay()

    # page-locked memory
    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Copy ``tensor`` to page-locked memory; return it as it is on the CPU, where pinning buys nothing."""
        return tensor if self._is_cpu or not self.is_available() else tensor.pin_memory()

    def unpin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy ``tensor`` to ordinary memory where it is page-locked, else return the tensor itself."""
        return tensor.clone() if self.is_pinned(tensor) else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is page-locked."""
        return not self._is_cpu and tensor.is_pinned()

    def lock_memory(self, address: int, nbytes: int) -> str:
        """Page-lock ``nbytes`` bytes of host memory that the caller keeps; return why not, or "" when it is done."""
        if not hasattr(self._module, "cudart"):
            return f"the {self._name} device of this PyTorch cannot register memory"
        runtime = self._module.cudart()
        if not int(status := runtime.cudaHostRegister(address, nbytes, _FOR_ALL_DEVICES)):
            return ""
        # the runtime would raise it at the next kernel, whoever launches that
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._name)
        return f"cudaHostRegister of {nbytes:,} bytes: {runtime.cudaGetErrorString(status)}"

    def unlock_memory(self, address: int) -> None:
        """Undo ``lock_memory``; no work of the device may use the memory any more."""
        self._module.cudart().cudaHostUnregister(address)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on this kind of device."""
        return tensor.device.type == self._name

    # kernels; by name, because builders are above the device layer
    op_builder_dir = answers(lambda self: "deepspeed.ops.op_builder")
    build_extension = answers(lambda self: importlib.import_module("torch.utils.cpp_extension").BuildExtension)

    def create_op_builder(self, class_name: str) -> Any:
        """Make an instance of ``get_op_builder``'s class; None where there is no such class."""
        builder = self.get_op_builder(class_name)
        return builder and builder()

    def get_op_builder(self, class_name: str) -> Any:
        """Return the class of the kernel builder of that name; None where there is no such class."""
        return getattr(importlib.import_module(self.op_builder_dir()), class_name, None)


@functools.cache
def _detect(requested: str | None) -> Accelerator:
    if requested:
        with contextlib.suppress(RuntimeError):  # no device type of PyTorch
            if Accelerator(requested).is_available():
                return Accelerator(requested)
        raise DeepSpeedConfigError(
            f"DS_ACCELERATOR={requested!r} is no device that this process can use; unset it, or use cpu, cuda, ..."
        )
    device = torch.accelerator.current_accelerator(check_available=True)
    return Accelerator("cpu" if device is None else device.type)


DeepSpeedAccelerator = Accelerator  # as clients call it


def get_accelerator() -> Accelerator:
    """Return the device layer: ``set_accelerator``'s choice, else ``DS_ACCELERATOR``, else what PyTorch finds."""
    return Accelerator._chosen or _detect(os.environ.get("DS_ACCELERATOR") or None)


def set_accelerator(accel_obj: Accelerator | None) -> None:
    """Use ``accel_obj`` from now on; None goes back to detection."""
    Accelerator._chosen = accel_obj


def device_for(local_rank: int) -> torch.device:
    """Return the torch device of a local rank: its accelerator, or the CPU."""
    accelerator = get_accelerator()
    # Schedulers that give every task one device show each of them only its own, as number 0.
    return torch.device(accelerator.device_name(local_rank if accelerator.device_count() > 1 else 0))


def take_device(local_rank: int) -> torch.device:
    """Make the device of ``local_rank`` current unless this process has chosen one already; return the current one.

    A process that has chosen nothing stands on device 0, and several on one device cannot form a group.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu" and accelerator.current_device() == 0:
        accelerator.set_device(device_for(local_rank).index)
    return accelerator.torch_device()


def map_tensors(item: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply ``function`` to every tensor in the dicts, lists and (named) tuples of ``item``; anything else is kept.

    Mutable mappings (as tokenizers return) keep their type, other mappings become dicts.
    """
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in item.items()}
        if type(item) is dict or not isinstance(item, MutableMapping):
            return mapped
        twin = copy.copy(item)  # keeps what a constructor would not take: a default factory, a tokenizer's encodings
        twin.update(mapped)
        return twin
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(map_tensors(value, function) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(map_tensors(value, function) for value in item)
    return item


def move_to_device(
    item: Any, device: str | torch.device, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """Copy the nested ``item`` with its tensors on ``device``; ``criterion_func`` selects which (all by default)."""
    chosen = criterion_func or torch.is_tensor
    return map_tensors(item, lambda tensor: tensor.to(device) if chosen(tensor) else tensor)


def set_random_seed(seed: int) -> None:
    """Seed ``random``, ``numpy`` where it is loaded, torch's CPU generator and every device of this process."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> Iterator[None]:
    """Build modules inside directly on ``device`` with floating dtype ``dtype``: ``OnDevice(torch.bfloat16)``."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
