"""Runs the real program on tensors without bytes and says what it did: every operation becomes an event.

Torch's fake tensors carry shapes through; this dispatch mode stands before them, sees each operation with its real
arguments, and turns it into launches on the stream that is current. Private names of torch: see ``install.py``.
"""

import contextlib
import functools
import itertools
import math
import sys
from collections import Counter, defaultdict
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

from deepspeed.accelerator.device import DTYPES
from deepspeed.tools.simulate.costs import MESSAGES
from deepspeed.tools.simulate.device import MODULE, NAME
from deepspeed.tools.simulate.events import (
    BEHIND,
    DEVICE,
    HOST,
    WORKER,
    Event,
    HostWait,
    Launch,
    Phase,
    Record,
    Seen,
    Touch,
    Wait,
    Work,
)
from deepspeed.tools.simulate.memory import Memory
from deepspeed.tools.simulate.order import Clock, OrderCheck
from deepspeed.tools.simulate.stores import Stores
from deepspeed.tools.simulate.timeline import Timeline
from deepspeed.zero.unit import Unit

_aten = torch.ops.aten
_DTYPES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}
_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
}
# Positions of what is written and what is read, which not every release's schema says; else the first two.
_WRITTEN_AND_READ: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"), ((0,), (0,))),
    "send": ((), (0,)),
    **dict.fromkeys(("recv_", "recv_any_source_"), ((0,), ())),
    "barrier": ((), ()),
}
_FACTORIES = ("empty", "new_", "ones", "zeros", "full", "rand", "arange", "scalar_tensor", "_efficientzero")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_LOOKS = ("detach", "lift_fresh", "_unsafe_view", "_reshape_alias", "is_pinned", "sym_size", "device")
_WITHOUT_KERNEL = frozenset((*_EMPTY, *_LOOKS, "set_", "resize_"))
_LOOK_UP = ("embedding", "index", "index_select", "gather")  # read as much as they give
_INDEX_PUT = ("index_put", "index_put_", "_index_put_impl_")
_REAL_NUMEL = 4096  # host tensors of so many integers keep their values: counters, sizes, messages
_FIRST_COMMUNICATOR = 1000
_SITE_DEPTH = 3


class _Op(NamedTuple):
    """Facts that an operator's schema tells."""

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
    attention = "attention" in name and any(a.name == "is_causal" for a in schema.arguments)
    product = name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_grouped_mm")
    kind = "attention" if attention else "matmul" if product else "kernel"
    return _Op(name, written, aliased, view, name.startswith(_FACTORIES), kind)


def launches(func: Any) -> bool:
    """Return whether a call of this operator gives a device something to do."""
    return not _op(func).view and _op(func).name not in _WITHOUT_KERNEL


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, (list, tuple)):
            yield from _tensors(item)
        elif isinstance(item, torch.Tensor):
            yield item


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield (position in the schema, value) of each given argument."""
    yield from enumerate(args)
    if kwargs:
        for position, argument in enumerate(func._schema.arguments[len(args) :], len(args)):
            if argument.name in kwargs:
                yield position, kwargs[argument.name]


def _is_mask(index: Any) -> bool:
    return isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8)


def _on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory, where small tensors are real."""
    return not isinstance(tensor, FakeTensor) or tensor.fake_device.type != NAME


def _copies(op: _Op, args: Any, out: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (source, target) of each copy between host and device; torch's copy of lists is one copy of each."""
    pairs = [(args[1], args[0])] if op.name == "copy_" else [(args[0], out)] if op.name == "_to_copy" else []
    if op.name == "_foreach_copy_":
        pairs = list(zip(args[1], args[0], strict=True))
    return pairs if any(_on_host(source) != _on_host(target) for source, target in pairs) else []


class Moment(NamedTuple):
    """Moment of the program: the time, and what the program knows to have happened."""

    now: float
    clock: Clock


class Recorder(TorchDispatchMode):
    """Dispatch mode that records. Enter ``fake`` first and this inside it (``install.recording`` does both)."""

    def __init__(self, fake: FakeTensorMode, timeline: Timeline) -> None:
        super().__init__()
        self.fake, self.timeline = fake, timeline
        self.order, self.usage = OrderCheck(), Memory(timeline.machine["device_bytes"])
        self.collectives = 0
        self.plain_attention = Counter[str]()  # calls that no fused kernel takes, by reason
        self.routing = ""  # what is assumed of the choice of experts
        self.chosen = ""  # what blocks keep
        # what each group of ranks was given, in order: (collective, bytes)
        self.issued = defaultdict[tuple[int, ...], list[tuple[str, int]]](list)
        self.phase = "build"
        self.action = ""  # of a pipeline: what it computes now, which kernels are done for
        self.host = HOST  # who does what is done on the host
        self.early = False  # threads do their work when they start, not when they are waited for
        self.catch_up: Callable[[float], None] = lambda _: None  # what the thread of an update has begun by then
        self.stores = Stores(self.emit, lambda: self.phase, lambda: self.host)
        self.listeners: list[Callable[[Event], None]] = [self.order.feed, self.usage.feed, self.timeline.feed]
        self.streams: dict[int, str] = {HOST: "program", BEHIND: "save", WORKER: "update", 0: "compute"}
        self._listing = False  # the elements of one list come in one copy, which has been waited for
        self.numbers: Any = None  # what the next list that is read has, where a layer knows
        self._events = itertools.count(1)
        self._communicators: dict[str, int] = {}
        self._works: dict[int, tuple[Any, int, list[torch.Tensor]]] = {}  # torch holds the tensors until the wait

    def emit(self, event: Event) -> None:
        """Pass an event to all listeners."""
        for listener in self.listeners:
            listener(event)

    def enter_phase(self, name: str) -> None:
        """Begin the program's phase ``name``."""
        self.phase = name
        self.emit(Phase(name))

    # -- what the device asks for -------------------------------------------------------------------------------------
    def record(self, stream: int) -> int:
        number = next(self._events)
        self.emit(Record(number, stream))
        return number

    def wait(self, stream: int, event: int) -> None:
        self.emit(Wait(stream, event, self.stores.site(_SITE_DEPTH)))

    def host_wait(self, reason: str, *, stream: int | None = None, event: int | None = None) -> None:
        if self.host == HOST:
            self.emit(HostWait(reason, stream, event, self.stores.site(_SITE_DEPTH)))
        elif event is not None:
            self.wait(self.host, event)
        elif stream is not None:
            self.wait(self.host, self.record(stream))

    def moment(self) -> Moment:
        """Return the present moment."""
        return Moment(self.timeline.now, self.order.knows())

    def _go_to(self, moment: Moment) -> None:
        self.timeline.now = moment.now
        self.order.knows(moment.clock)

    @contextlib.contextmanager
    def behind(self, host: int, *, since: Moment | None = None) -> Iterator[None]:
        """Record, inside, another thread of the program, which the program started at ``since``."""
        before, self.host = self.moment(), host
        self._go_to(since or before)
        try:
            yield
        finally:
            self.host = HOST
            if since is not None:
                self._go_to(before)

    def done(self, event: int) -> bool:
        happened = self.timeline.done(event)
        if happened and self.host == HOST:
            self.emit(Seen(event))
        elif happened:
            self.wait(self.host, event)
        return happened

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
        if op.name in _INDEX_PUT and args[2].numel() > 1 and any(map(_is_mask, args[1])):
            self._wait_here("a size that depends on data")
        if not op.view:
            self._note(func, op, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operation on shapes. A constant would be copied by the device's own kernel, which does not exist."""
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
        if not self._listing:
            self._look_at(tensor)
        # nobody knows the value: nothing overflowed, nothing is set
        return 0.0 if tensor.dtype.is_floating_point else True if tensor.dtype is torch.bool else 0

    def read_list(self, read: Callable[[FakeTensor], Any], tensor: FakeTensor) -> Any:
        """Replace ``tensor.tolist()``, of which ``read`` is torch's."""
        if self._listing:  # a row of a list of lists
            return read(tensor)
        self._look_at(tensor)
        numbers, self.numbers = self.numbers, None
        self._listing = True
        try:
            return read(tensor) if numbers is None else numbers
        finally:
            self._listing = False

    def _look_at(self, tensor: FakeTensor) -> None:
        """Read numbers: of the device, for which the program waits, or of its own memory; a copy may be late."""
        if tensor.fake_device.type == NAME:
            self._wait_here("read of numbers on the device")
        else:
            self._by_host(reads=[self.stores.touch(tensor)])

    def _wait_here(self, reason: str) -> None:
        self.host_wait(reason, stream=MODULE.current_stream().number)

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        """Return a result whose size depends on data; all are taken to be true. The program waits."""
        self._wait_here("a size that depends on data")
        func, out = _aten.nonzero.default, torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device=mask.device)
        self._note(func, _op(func), (mask,), {}, out)
        return out

    def _plain_index(self, index: Any) -> Iterable[Any]:
        if _is_mask(index):
            return self._nonzero(index).unbind(1)
        return (index,)

    def _stays_real(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether a result stays real, as small host tensors do: step counters, sizes, messages, samplers."""
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
        """Note what the operation read and wrote, as an event."""
        reads: dict[bool, list[Touch]] = {True: [], False: []}  # in host memory or not
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
                        reads[_on_host(tensor)].append(touch)
        for tensor in _tensors(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type != "meta":
                devices.add(tensor.fake_device.type)
                if not self.stores.known(tensor):
                    writes.append(self.stores.touch(tensor, pinned=bool(kwargs.get("pin_memory"))))
        if op.name in _WITHOUT_KERNEL or not devices:
            return
        if NAME not in devices:
            nbytes = sum(t.stop - t.start for t in (*reads[True], *writes))
            self._launch(self.host, op.name, reads[True], writes, Work("host", nbytes=nbytes))
            return
        if copies := _copies(op, args, out):
            asked = bool(kwargs.get("non_blocking")) or (len(args) > 2 and bool(args[2]) and op.name != "_to_copy")
            for source, target in copies:
                self._copy(source, target, asked=asked)
            return
        self._by_host(reads=reads[True])  # a number, which is handed over with the launch
        self._launch(MODULE.current_stream().number, op.name, reads[False], writes, _work(func, op, args, kwargs, out))

    def _by_host(self, *, reads: Sequence[Touch] = (), writes: Sequence[Touch] = ()) -> None:
        """Touch host memory, by the program or the driver for it, before the program goes on."""
        if reads or writes:
            self._launch(self.host, "the copying program", reads, writes, Work("host"))

    def _copy(self, source: torch.Tensor, target: torch.Tensor, *, asked: bool) -> None:
        """Copy between host and device. The program goes on at once only if it ``asked`` to and the host's side is
        page-locked and in one piece; all else the driver, or torch, copies over ordinary memory of its own.
        """
        down = _on_host(target)
        host = target if down else source
        # a copy that is waited for is converted by the host, any other by the device
        direct = self.stores.pinned(host) and host.is_contiguous() and (asked or source.dtype == target.dtype)
        width = (source if down != asked else target).element_size()
        work = Work("down" if down else "up", nbytes=target.numel() * width, pinned=direct)
        stream, name = MODULE.current_stream().number, "copy to the host" if down else "copy to the device"
        touches = [[self.stores.touch(t)] if isinstance(t, FakeTensor) else [] for t in (source, target)]
        if not direct and not down:
            self._by_host(reads=touches[0])
        self._launch(stream, name, touches[0] if direct or down else (), touches[1] if direct or not down else (), work)
        if not asked:
            self.host_wait("blocking copy", stream=stream)
        elif not direct and self.host == HOST:
            # to the device it goes on when the driver has taken all: what was launched before need not be done
            reason = "copy with memory that is not page-locked"
            self.emit(HostWait(reason, stream, None, self.stores.site(_SITE_DEPTH), orders=down))
        if not direct and down:
            self._by_host(writes=touches[1])

    def _launch(self, stream: int, name: str, reads: Sequence[Touch], writes: Sequence[Touch], work: Work) -> None:
        if self.host == WORKER != stream:  # it has come so far
            self.wait(stream, self.record(WORKER))
        label = self._unit() if work.kind in ("collective", "up", "down") else self.action or self.phase
        site = self.stores.site(_SITE_DEPTH)
        self.emit(Launch(stream, name, tuple(reads), tuple(writes), work, site, label))

    # -- collectives ----------------------------------------------------------------------------------------------
    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Launch on the communicator's stream, which waits for the calling stream; ``work.wait()`` is the way back."""
        group = CollectiveOp.get_process_group(func, args)
        if dist.get_backend(group) != MODULE.communication_backend:  # real, between processes
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self.collectives += 1
        out = func(*args, **kwargs)
        op = _op(func)
        name = _COLLECTIVES.get(op.name, op.name.strip("_"))
        positions = _WRITTEN_AND_READ.get(op.name, ((0,), (1,)))
        sides = ([t for i in side for t in _tensors(args[i]) if isinstance(t, FakeTensor)] for side in positions)
        written, read = sides
        if not written and not read or all(t.fake_device.type != NAME for t in (*written, *read)):
            return out
        ranks, channel = tuple(dist.get_process_group_ranks(group)), str(group.group_name)
        stream = self._communicator(channel, f"communicator of {len(ranks)} ranks")
        if name in MESSAGES:  # nccl has a communicator for each pair of ranks in a group, with a stream of its own
            me, peer = dist.get_rank(), ranks[args[2]]
            stream = self._communicator(f"{channel}: {min(me, peer)}-{max(me, peer)}", f"messages of rank {peer}")
            ranks = (me, peer) if name == "send" else (peer, me)
            channel = f"{channel}: {ranks[0]}>{ranks[1]}"
        self.wait(stream, self.record(MODULE.current_stream().number))
        nbytes = max(sum(t.nbytes for t in side) for side in (written, read))
        self.issued[ranks].append((name, nbytes))
        reads, writes = ([self.stores.touch(t) for t in side] for side in (read, written))
        self._launch(stream, name, reads, writes, Work("collective", nbytes=nbytes, ranks=ranks, channel=channel))
        work = FakeWork.unbox(out[1] if isinstance(out, (list, tuple)) else out)
        self._works[id(work)] = (work, self.record(stream), [*written, *read])
        return out

    def _communicator(self, key: str, title: str) -> int:
        """Return the communicator's stream."""
        if key not in self._communicators:
            self._communicators[key] = _FIRST_COMMUNICATOR + len(self._communicators)
            self.streams[self._communicators[key]] = title
        return self._communicators[key]

    def work_done(self, work: Any) -> bool:
        """Replace ``wait()`` of a collective's work: the current stream waits for it. Return True, as torch does."""
        if id(work) in self._works:
            _, event, _ = self._works[id(work)]
            self._works[id(work)] = (work, event, [])
            self.wait(MODULE.current_stream().number, event)
        return True

    @staticmethod
    def _unit() -> str:
        """Return the unit, or the message of a pipeline, on whose behalf this happens, by a look at the callers."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.endswith("pipe/links.py") and "message" in frame.f_locals:
                return "{}{}.{}".format(*frame.f_locals["message"])
            if "zero/" in frame.f_code.co_filename:
                for name in ("unit", "self"):
                    owner = frame.f_locals.get(name)
                    if isinstance(owner, Unit):
                        return owner.name
            frame = frame.f_back
        return ""


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes that a kernel reads of a tensor: what is expanded is read once."""
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in shape if stride)


def _work(func: Any, op: _Op, args: Any, kwargs: Any, out: Any) -> Work:
    """Return arithmetic and bytes of one operation on the device. A causal kernel leaves out half of the scores."""
    given = [t for _, v in _arguments(func, args, kwargs) for t in _tensors(v)]
    made = sum(map(_size, _tensors(out)))
    dtype = _DTYPES.get(given[0].dtype, "") if given else ""
    read = 0 if op.factory else made if op.name in _LOOK_UP else sum(map(_size, given))
    formula = flop_registry.get(func._overloadpacket)
    flops = float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0
    shape: tuple[int, ...] = ()
    if op.name == "_grouped_mm":
        flops, shape = _grouped(*(t.shape for t in given[:2]), groups=len(given[2]))
    elif op.kind == "matmul":
        lhs, rhs = [t.shape for t in given[-2:]]
        shape = (int(lhs[-2]), int(lhs[-1]), int(rhs[-1]))
    elif op.kind == "attention":
        query, key = given[1:3] if "backward" in op.name else given[:2]
        shape = (int(query.shape[-2]), int(key.shape[-2]), int(query.shape[-1]))
        names = [argument.name for argument in func._schema.arguments]
        flops /= 2 if dict(_arguments(func, args, kwargs)).get(names.index("is_causal")) else 1
    return Work(op.kind, flops, read + made, dtype, shape)


def _grouped(lhs: Sequence[int], rhs: Sequence[int], *, groups: int) -> tuple[float, tuple[int, int, int]]:
    """Return arithmetic and shape of products of ``groups`` experts, which have equal parts of the rows: rows [S, K]
    by weights [E, K, N], or [K, S] by [S, N] for the gradient of weights.
    """
    part, depth, columns = max(1, math.ceil(lhs[-2] / groups)), lhs[-1], rhs[-1]
    if len(rhs) == 2:
        part, depth = lhs[-2], max(1, math.ceil(lhs[-1] / groups))
    return 2.0 * lhs[-2] * lhs[-1] * columns, (part, depth, columns)
