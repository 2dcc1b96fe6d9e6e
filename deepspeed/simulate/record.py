"""Runs the real program on tensors without bytes and says what it did: every operation becomes an event.

Torch's fake tensors carry shapes through; this dispatch mode stands before them, sees each operation with its real
arguments, and turns it into launches on the stream that is current. Private names of torch: see ``install.py``.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from deepspeed.device import DTYPES
from deepspeed.simulate.device import MODULE, NAME, SimStream
from deepspeed.simulate.events import (
    DEVICE,
    HOST,
    Event,
    HostWait,
    Launch,
    Phase,
    Record,
    Touch,
    Wait,
    Work,
)
from deepspeed.simulate.memory import Memory
from deepspeed.simulate.order import OrderCheck
from deepspeed.simulate.stores import Stores
from deepspeed.simulate.timeline import Timeline
from deepspeed.zero.unit import Unit

_aten = torch.ops.aten
_DTYPES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}
_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
}
_FACTORIES = ("empty", "new_", "ones", "zeros", "full", "rand", "arange", "scalar_tensor", "_efficientzero")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_LOOKS = ("detach", "lift_fresh", "_unsafe_view", "_reshape_alias", "is_pinned", "sym_size", "device")
_WITHOUT_KERNEL = frozenset((*_EMPTY, *_LOOKS, "set_", "resize_", "record_stream"))
_REAL_NUMEL = 4096  # host tensors of so many integers keep their values: counters, sizes, messages
_FIRST_COMMUNICATOR = 1000
_SITE_DEPTH = 3


class _Op(NamedTuple):
    """What an operator's schema says about it."""

    name: str
    written: tuple[bool, ...]
    aliased: tuple[bool, ...]
    view: bool
    factory: bool
    kind: str


@functools.cache
def _op(func: Any) -> _Op:
    schema = func._schema
    name = schema.name.partition("::")[2]
    written = tuple(bool(a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments)
    aliased = tuple(a.alias_info is not None for a in schema.arguments)
    view = any(aliased) and not any(written) and all(r.alias_info is not None for r in schema.returns)
    attention = "attention" in name
    product = name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")
    kind = "attention" if attention else "matmul" if product else "kernel"
    return _Op(name, written, aliased, view, name.startswith(_FACTORIES), kind)


def launches(func: Any) -> bool:
    """Whether a call of this operator gives a device something to do."""
    return not _op(func).view and _op(func).name not in _WITHOUT_KERNEL


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, (list, tuple)):
            yield from _tensors(item)
        elif isinstance(item, torch.Tensor):
            yield item


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """(position in the schema, value) of what was given."""
    yield from enumerate(args)
    if kwargs:
        for position, argument in enumerate(func._schema.arguments[len(args) :], len(args)):
            if argument.name in kwargs:
                yield position, kwargs[argument.name]


def _answer(dtype: torch.dtype) -> float | int | bool:
    """What a tensor reads as, whose values nobody knows: nothing overflowed, nothing is set."""
    return 0.0 if dtype.is_floating_point else True if dtype is torch.bool else 0


class Recorder(TorchDispatchMode):
    """The dispatch mode. Enter ``fake`` first and this inside it (``install.recording`` does both and the rest)."""

    def __init__(self, fake: FakeTensorMode, timeline: Timeline) -> None:
        super().__init__()
        self.fake, self.timeline = fake, timeline
        self.order, self.usage = OrderCheck(), Memory(timeline.machine["device_bytes"])
        self.phase = "build"
        self.stores = Stores(self.emit, lambda: self.phase)
        self.listeners: list[Callable[[Event], None]] = [self.order.feed, self.usage.feed, self.timeline.feed]
        self.streams: dict[int, str] = {HOST: "program", 0: "compute"}
        self._read: int | None = None  # the storage that the program has read last, if nothing has happened since
        self._events = itertools.count(1)
        self._communicators: dict[str, int] = {}
        self._works: dict[int, tuple[Any, int]] = {}

    def emit(self, event: Event) -> None:
        """Hand an event to everybody who wants it."""
        self._read = None
        for listener in self.listeners:
            listener(event)

    def enter_phase(self, name: str) -> None:
        """What the program does from here on."""
        self.phase = name
        self.emit(Phase(name))

    # -- what the device asks for (device.Sink) ---------------------------------------------------------------------
    def record(self, stream: int) -> int:
        number = next(self._events)
        self.emit(Record(number, stream))
        return number

    def wait(self, stream: int, event: int) -> None:
        self.emit(Wait(stream, event, self.stores.site(_SITE_DEPTH)))

    def host_wait(self, what: str, *, stream: int | None = None, event: int | None = None) -> None:
        self.emit(HostWait(what, stream, event, self.stores.site(_SITE_DEPTH)))

    def done(self, event: int) -> bool:
        return self.timeline.done(event)

    def happens(self, event: int) -> float:
        return self.timeline.happens(event)

    def memory(self) -> tuple[int, int]:
        usage = self.usage.of(DEVICE)
        return usage.now, usage.peak

    def device_bytes(self) -> int:
        return int(self.timeline.machine["device_bytes"])

    # -- operations -----------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func is _aten._local_scalar_dense.default:
            return self._read_scalar(func, args[0])
        if func is _aten.is_pinned.default:
            return self.stores.pinned(args[0])
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if func is _aten.nonzero.default and isinstance(args[0], FakeTensor):
            return self._nonzero(args[0])
        if func is _aten.index.Tensor:
            args = (args[0], [i for index in args[1] for i in self._plain_index(index)])
        if self._stays_real(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        out = self._run(func, args, kwargs)
        op = _op(func)
        if op.name == "record_stream":
            self.stores.cover(args[0], args[1].number if isinstance(args[1], SimStream) else 0)
        if not op.view:
            self._note(func, op, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation on shapes. A constant would be copied by the device's own kernel, which is not there."""
        if func is not _aten._to_copy.default:
            return func(*args, **kwargs)
        source = args[0] if isinstance(args[0], FakeTensor) else self.fake.from_tensor(args[0])
        constant, source.constant = source.constant, None
        try:
            return func(source, *args[1:], **kwargs)
        finally:
            if isinstance(args[0], FakeTensor):
                source.constant = constant

    def _read_scalar(self, func: Any, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                return func(tensor)
        if tensor.constant is not None:
            with unset_fake_temporarily():
                return tensor.constant.item()
        storage = tensor.untyped_storage()._cdata
        if tensor.fake_device.type == NAME and storage != self._read:  # the elements of one list come in one copy
            self.host_wait("read of numbers on the device", stream=MODULE.current_stream().number)
            self._read = storage
        value = _answer(tensor.dtype)
        return float(value) if tensor.dtype.is_floating_point else value

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        """A size that depends on data; half are taken to be true."""
        self.host_wait("a size that depends on data", stream=MODULE.current_stream().number)
        return torch.empty((max(1, mask.numel() // 2), mask.dim()), dtype=torch.int64, device=mask.device)

    def _plain_index(self, index: Any) -> Iterable[Any]:
        if isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8):
            return self._nonzero(index).unbind(1)
        return (index,)

    def _stays_real(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Small host tensors keep their values: step counters, sizes, messages, samplers."""
        given = [t for value in (*args, *kwargs.values()) for t in _tensors(value)]
        if any(isinstance(t, FakeTensor) for t in given):
            return False
        if (device := kwargs.get("device")) is not None and torch.device(device).type != "cpu":
            return False
        if given:
            # what stands for values that are elsewhere has a parameter's shape, and is to be one's data
            large = func is _aten.expand.default and (given[0].is_floating_point() or math.prod(args[1]) > _REAL_NUMEL)
            return not large
        op = _op(func)
        if not op.factory and op.name != "randperm" or kwargs.get("pin_memory"):
            return False
        first = args[0] if args else ()
        size = tuple(first) if isinstance(first, (list, tuple)) else (first,) if isinstance(first, int) else ()
        counts = op.name in ("arange", "randperm")
        dtype = kwargs.get("dtype") or (torch.int64 if counts else torch.get_default_dtype())
        return math.prod(size) <= _REAL_NUMEL and (not dtype.is_floating_point or not size)

    def _note(self, func: Any, op: _Op, args: Any, kwargs: Any, out: Any) -> None:
        """What the operation read and wrote, as an event."""
        reads: list[Touch] = []
        writes: list[Touch] = []
        devices = set()
        for position, value in _arguments(func, args, kwargs):
            for tensor in _tensors(value):
                if isinstance(tensor, FakeTensor):
                    devices.add(tensor.fake_device.type)
                    touch = self.stores.touch(tensor)
                    if op.written[position]:
                        writes.append(touch)
                    elif not op.aliased[position] and not op.factory:
                        reads.append(touch)
        for tensor in _tensors(out):
            if isinstance(tensor, FakeTensor):
                devices.add(tensor.fake_device.type)
                if not self.stores.known(tensor):
                    writes.append(self.stores.touch(tensor, pinned=bool(kwargs.get("pin_memory"))))
        if op.name in _WITHOUT_KERNEL or not devices:
            return
        if NAME not in devices:
            nbytes = sum(t.stop - t.start for t in (*reads, *writes))
            self._launch(HOST, op.name, reads, writes, Work("host", nbytes=nbytes))
        elif "cpu" in devices and op.name in ("copy_", "_to_copy"):
            self._copy(op, args, kwargs, (reads, writes), out)
        else:
            self._launch(MODULE.current_stream().number, op.name, reads, writes, _work(func, op, args, kwargs, out))

    def _copy(self, op: _Op, args: Any, kwargs: Any, touched: tuple[list[Touch], list[Touch]], out: Any) -> None:
        """Between host and device: the program goes on only where it asked to and the host's side is page-locked."""
        source, target = (args[1], args[0]) if op.name == "copy_" else (args[0], out)
        asked = bool(kwargs.get("non_blocking")) or (op.name == "copy_" and len(args) > 2 and bool(args[2]))
        down = target.fake_device.type == "cpu"
        pinned = self.stores.pinned(target if down else source)
        # torch converts before or after the copy, always on the side of the target
        work = Work("down" if down else "up", nbytes=target.numel() * source.element_size(), pinned=pinned)
        stream = MODULE.current_stream().number
        self._launch(stream, "copy to the host" if down else "copy to the device", *touched, work)
        if asked and pinned:
            return
        self.host_wait("blocking copy" if not asked else "copy with memory that is not page-locked", stream=stream)

    def _launch(self, stream: int, name: str, reads: Sequence[Touch], writes: Sequence[Touch], work: Work) -> None:
        label = self._unit() if work.kind in ("collective", "up", "down") else self.phase
        site = self.stores.site(_SITE_DEPTH)
        self.emit(Launch(stream, name, tuple(reads), tuple(writes), work, site, label))

    # -- collectives ----------------------------------------------------------------------------------------------
    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On the communicator's own stream, which waits for the one that calls; ``work.wait()`` is the way back."""
        out = func(*args, **kwargs)
        op = _op(func)
        name = _COLLECTIVES.get(op.name, op.name.strip("_"))
        given = [(op.written[i], t) for i, v in _arguments(func, args, kwargs) for t in _tensors(v)]
        written = [t for is_written, t in given if is_written and isinstance(t, FakeTensor)]
        read = [t for is_written, t in given if not is_written and isinstance(t, FakeTensor)]
        if op.name in ("allreduce_", "broadcast_"):
            read = written
        elif op.name in ("_allgather_base_", "_reduce_scatter_base_"):  # not every release's schema says so
            written, read = [args[0]], [args[1]]
        if not written and not read or all(t.fake_device.type != NAME for t in (*written, *read)):
            return out
        group = CollectiveOp.get_process_group(func, args)
        ranks = tuple(dist.get_process_group_ranks(group))
        stream = self._communicators.get(group.group_name)
        if stream is None:
            stream = self._communicators[group.group_name] = _FIRST_COMMUNICATOR + len(self._communicators)
            self.streams[stream] = f"communicator of {len(ranks)} ranks"
        self.wait(stream, self.record(MODULE.current_stream().number))
        nbytes = max(sum(t.nbytes for t in side) for side in (written, read))
        reads, writes = ([self.stores.touch(t) for t in side] for side in (read, written))
        self._launch(stream, name, reads, writes, Work("collective", nbytes=nbytes, ranks=ranks))
        work = FakeWork.unbox(out[1] if isinstance(out, (list, tuple)) else out)
        self._works[id(work)] = (work, self.record(stream))
        return out

    def work_done(self, work: Any) -> bool:
        """``wait()`` of what a collective returned: the current stream waits for it. True, as torch's."""
        _, event = self._works.pop(id(work), (None, None))
        if event is not None:
            self.wait(MODULE.current_stream().number, event)
        return True

    @staticmethod
    def _unit() -> str:
        """The unit on whose behalf this happens, found by looking at who called."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if "zero/" in frame.f_code.co_filename:
                for name in ("unit", "self"):
                    owner = frame.f_locals.get(name)
                    if isinstance(owner, Unit):
                        return owner.name
            frame = frame.f_back
        return ""


def _work(func: Any, op: _Op, args: Any, kwargs: Any, out: Any) -> Work:
    """Arithmetic and bytes of one operation on the device."""
    given = [t for _, v in _arguments(func, args, kwargs) for t in _tensors(v)]
    dtype = _DTYPES.get(given[0].dtype, "") if given else ""
    sizes = [t.numel() * t.element_size() for t in (*(() if op.factory else given), *_tensors(out))]
    formula = flop_registry.get(func._overloadpacket)
    flops = float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0
    shape: tuple[int, ...] = ()
    if op.kind == "matmul":
        left, right = [t.shape for t in given[-2:]]
        shape = (int(left[-2]), int(left[-1]), int(right[-1]))
    return Work(op.kind, flops, sum(sizes), dtype, shape)
