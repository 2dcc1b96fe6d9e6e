"""Native code that is not run: libraries whose functions note which bytes they would touch.

They take the place of what ``native.build`` loads, so that everything above, the packing of arguments included, is the
code that runs on a real machine.
"""

import contextlib
import ctypes
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.accelerator.native import spec as ops
from deepspeed.checkpoint.save import collect, content, writer
from deepspeed.checkpoint.save.collect import TensorPart
from deepspeed.optim import cuda, host, rules
from deepspeed.tier import aio, arena, drive, staging
from deepspeed.tier.behind import Turn, Worker, next_of
from deepspeed.tools.simulate.device import MODULE, NAME
from deepspeed.tools.simulate.events import (
    BEHIND,
    DRIVE_READS,
    DRIVE_WRITES,
    HOST,
    PAGEABLE,
    REGISTERED,
    WORKER,
    Launch,
    Seen,
    Touch,
    Work,
)
from deepspeed.tools.simulate.record import Moment, Recorder
from deepspeed.zero.update import staged
from deepspeed.zero.update.shares import Rates

_WIDTHS = {0: 4, 1: 2, 2: 2}  # of the dtype codes
_PASSES = {ops.FUSED_LAMB: 2}  # how often parameter and moments are read and written
# Columns of a host kernel's arguments: weights, gradient, moments, rounded output.
_HOST_POINTERS = {ops.CPU_ADAM: 5, ops.CPU_ADAGRAD: 4, ops.CPU_LION: 4}
_PART = 1 << 28
_Bytes = Touch | None


class _Library:
    """Replace the library of ``try_load``: ``ds_*`` symbols are ``op``'s kernel, or the one that writes ``beside``."""

    def __init__(self, run: Callable[..., int], beside: Callable[..., int] | None = None) -> None:
        self._run, self._beside = run, beside or run

    def __getitem__(self, symbol: str) -> Callable[..., Any]:
        if symbol.endswith("_error"):
            return lambda _: b""
        return self._beside if symbol.endswith("_beside") else self._run

    __getattr__ = __getitem__


class _Natives:
    """Kernels of one recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._stores = recorder, recorder.stores

    def load(self, op: ops.OpSpec) -> Any:
        if op in (ops.FUSED_ADAM, ops.FUSED_LAMB, ops.FUSED_LION):
            return _Library(lambda reference: self._fused(op, reference._obj))
        if op in _HOST_POINTERS:
            return _Library(lambda *args: self._host(op, *args), lambda *args: self._beside(op, *args))
        return None

    def rates(self, nbytes: int, _device: torch.device) -> Rates:
        """Return the rates a measurement would give for an update with ``nbytes`` of weight and slots an element."""
        machine = self._recorder.timeline.machine
        travel = nbytes / machine["bus_rate"]
        return Rates((2 * nbytes + 4) / machine["adam_rate"], travel, travel)

    def _launch(
        self, stream: int, name: str, read: Sequence[_Bytes], written: Sequence[_Bytes], kind: str, passes: float
    ) -> int:
        reads, writes = ([t for t in some if t is not None] for some in (read, written))
        nbytes = sum(t.stop - t.start for t in reads) + int(2 * passes * sum(t.stop - t.start for t in writes))
        site = self._stores.site()
        work = Work(kind, nbytes=nbytes)
        self._recorder.emit(Launch(stream, name, tuple(reads), tuple(writes), work, site, self._recorder.phase))
        return 0

    def _touches(self, pointers: Iterable[int], codes: Iterable[int], count: int) -> list[_Bytes]:
        pairs = zip(pointers, codes, strict=True)
        return [self._stores.at(address, count * _WIDTHS[code]) if address else None for address, code in pairs]

    def _fused(self, op: ops.OpSpec, call: Any) -> int:
        """Launch once over ``call.count`` tensors: ``cuda._Call``."""
        sizes = (ctypes.c_int64 * call.count).from_address(call.sizes)
        codes = (call.param_code, call.grad_code, call.moment_code, call.moment_code, call.out_code)
        columns: list[list[Touch]] = []
        for pointer, code in zip(call.columns, codes, strict=True):
            if pointer is None:
                columns.append([])
                continue
            addresses = (ctypes.c_void_p * call.count).from_address(pointer)
            columns.append(
                [self._stores.at(a, n * _WIDTHS[code]) for a, n in zip(addresses, sizes, strict=True) if a and n]
            )
        params, grads, *outputs = columns
        written = [*params, *itertools.chain.from_iterable(outputs)]
        return self._launch(MODULE.current_stream().number, op.name, grads, written, "kernel", _PASSES.get(op, 1))

    def _host(self, op: ops.OpSpec, count: int, *args: Any) -> int:
        pointers = args[: _HOST_POINTERS[op]]
        weights, grad, first, out = args[len(pointers) : len(pointers) + 4]
        codes = [weights, grad, *[first] * (len(pointers) - 3), out]
        values, gradient, *outputs = self._touches(pointers, codes, count)
        return self._launch(self._recorder.host, op.name, [gradient], [values, *outputs], "adam", 1)

    def _beside(self, op: ops.OpSpec, count: int, *args: Any) -> int:
        """Launch with weights, gradient, moments, rounded output; new weights, moments, past the caches; two codes."""
        *old, out, a, b, c = self._touches(args[:8], (0, args[8], 0, 0, args[9], 0, 0, 0), count)
        # the lines of the rounded output are read, too
        return self._launch(self._recorder.host, op.name, [*old, out], [a, b, c, out], "adam", 0.5)


class _Pages:
    """Replace ``arena.Pages``: memory that the program maps and registers itself."""

    def __init__(self, recorder: Recorder, nbytes: int, *, pin: bool = False) -> None:
        self._recorder, self.pinned = recorder, pin
        self.buffer = recorder.stores.map(nbytes, REGISTERED if pin else PAGEABLE)

    def cut(self, start: int, nbytes: int, gone: Callable[[Any], None]) -> tuple[torch.Tensor, Any]:
        with _disable_current_modes():
            bytes_of_nothing = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        part = FakeTensor(self._recorder.fake, bytes_of_nothing, torch.device("cpu"))
        self._recorder.stores.part(part, self, start)
        return part, weakref.ref(part.untyped_storage(), gone)

    def __del__(self) -> None:
        if not MODULE.records(self._recorder):
            return
        if self.pinned:
            MODULE.synchronize()
        self._recorder.stores.unmap(self.buffer)


class _Transfers:
    """Replace the engines of file IO: bytes take their time on the drive and go nowhere."""

    name, holds = "simulated", 0

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tickets: dict[int, int] = {}
        self._parts: dict[tuple[int, int], int] = {}  # (descriptor, number of a part of the file) -> its buffer

    def submit(self, write: int, direct: int, plain: int, offset: int, address: int, nbytes: int) -> int:
        stream, name = (DRIVE_WRITES, "write") if write else (DRIVE_READS, "read")
        recorder = self._recorder
        memory, file = (recorder.stores.at(address, nbytes),), tuple(self._bytes_of(plain, offset, offset + nbytes))
        work, site = Work(name, nbytes=nbytes), recorder.stores.site()
        reads, writes = (memory, file) if write else (file, memory)
        if recorder.host != HOST:  # what the program does is before it anyway
            recorder.wait(stream, recorder.record(recorder.host))
        recorder.emit(Launch(stream, name, reads, writes, work, site, recorder.phase))
        event = recorder.record(stream)
        self._tickets[event] = event
        return event

    def _bytes_of(self, descriptor: int, start: int, stop: int) -> Iterator[Touch]:
        """Yield bytes of a file, each part of it a buffer: a buffer has few accesses to look through."""
        for part in range(start // _PART, -(-stop // _PART)):
            if (descriptor, part) not in self._parts:
                self._parts[descriptor, part] = self._recorder.stores.file()
            begin = part * _PART
            yield Touch(self._parts[descriptor, part], max(start - begin, 0), min(stop - begin, _PART))

    def wait(self, ticket: int) -> int:
        if self._tickets.pop(ticket, None) is not None:
            self._recorder.host_wait("wait for a drive", event=ticket)
        return 0

    def done(self, ticket: int) -> int:
        return int(ticket not in self._tickets or self._recorder.done(ticket))

    def free(self) -> None:
        """Do nothing: no memory is held."""


class _Thread:
    """Replace the thread of a save: a stream of its own, whose work is done as late, or as early, as it can."""

    def __init__(self, recorder: Recorder, *, target: Callable[[], None], **_: Any) -> None:
        self._recorder, self._target = recorder, target
        self._end: int | None = None

    def start(self) -> None:
        if self._recorder.early:
            self._work()

    def _work(self) -> None:
        with self._recorder.behind(BEHIND):
            self._target()
        self._end = self._recorder.record(BEHIND)

    def is_alive(self) -> bool:
        if self._end is not None:
            self.join()
        return self._end is None

    def join(self, _seconds: float | None = None) -> None:
        if self._end is None:
            self._work()
        self._recorder.host_wait("end of a save", event=self._end)


class _Lock:
    """Replace a lock: who takes it comes after all that the holder before had done and knew."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._last = recorder, (HOST, 0)

    def __enter__(self) -> None:
        recorder, (host, event) = self._recorder, self._last
        if host != recorder.host:
            recorder.emit(Seen(event)) if recorder.host == HOST else recorder.wait(recorder.host, event)

    def __exit__(self, *_: object) -> None:
        self._last = self._recorder.host, self._recorder.record(self._recorder.host)


class _Turns:
    """Replace the thread of an update: a stream of its own, which takes what the program has handed over when it comes
    to that, and on which the program waits for the end of a turn once.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._ends = recorder, weakref.WeakKeyDictionary[Turn, int]()
        self._waiting: dict[Turn, tuple[Worker, Moment]] = {}
        recorder.catch_up = self._take_until

    def hand_over(self, worker: Worker, turn: Turn) -> None:
        self._take_until(self._recorder.timeline.now)
        self._waiting[turn] = worker, self._recorder.moment()

    def _take_until(self, time: float) -> None:
        """Take what the thread begins before ``time``."""
        while self._waiting and self._begins() < time:
            self._take()

    def _begins(self) -> float:
        first = min(moment.now for _, moment in self._waiting.values())
        return max(first, self._recorder.timeline.ready(WORKER))

    def _take(self) -> None:
        begin, recorder = self._begins(), self._recorder
        with recorder.behind(WORKER, since=recorder.moment()._replace(now=begin)):
            turn = next_of([turn for turn, (_, moment) in self._waiting.items() if moment.now <= begin])
        worker, moment = self._waiting.pop(turn)
        worker._ident = threading.get_ident()
        with recorder.behind(WORKER, since=moment._replace(now=begin)):
            turn.take()
            self._ends[turn] = recorder.record(WORKER)
        worker._ident = None

    def wait(self, turn: Turn) -> None:
        while turn in self._waiting:
            self._take()
        if (end := self._ends.pop(turn, None)) is not None:
            self._recorder.host_wait("end of an update", event=end)


class _File:
    """Replace ``writer.RankFile``: parts are read, nothing is written."""

    tells = False

    def __init__(self, recorder: Recorder, *_: Any, **__: Any) -> None:
        self._recorder = recorder

    def write(self, parts: Iterable[TensorPart], _stop: Any, _report: Any) -> None:
        recorder = self._recorder
        for part in parts:
            values = part.values
            if recorder.stores.known(values):
                touch, site = recorder.stores.touch(values), recorder.stores.site()
                work = Work("write", nbytes=values.nbytes)
                recorder.emit(Launch(recorder.host, "write of a save", (touch,), (), work, site, recorder.phase))

    def close(self, *_: object) -> None:
        """Do nothing: no file is open."""

    limit = __exit__ = close

    def __enter__(self) -> "_File":
        return self


@contextlib.contextmanager
def replaced(recorder: Recorder) -> Iterator[None]:
    """Simulate native kernels and drives inside."""
    natives, turns = _Natives(recorder), _Turns(recorder)

    def forget() -> None:
        for module in (cuda, host):
            module._kernel.cache_clear()

    with contextlib.ExitStack() as stack:
        stack.callback(forget)
        forget()
        for owner, name, value in (
            (cuda, "try_load", natives.load),
            (host, "try_load", natives.load),
            (cuda, "on_cuda", lambda tensor: tensor.device.type == NAME),
            (
                cuda,
                "usable",
                lambda op, columns: all(t.device.type == NAME and t.is_contiguous() for c in columns for t in c),
            ),
            (staged, "_measure", natives.rates),
            (rules, "can_fuse", lambda tensors: bool(tensors) and all(t.is_floating_point() for t in tensors)),
            (content, "crc32c", lambda *_: 0),
            (content, "capture_rng", dict),
            (collect, "pack_scalar", lambda _: 0),
            (writer, "Thread", functools.partial(_Thread, recorder)),
            (Worker, "_pass", lambda worker, turn: turns.hand_over(worker, turn)),
            (Turn, "_until_ended", lambda turn: turns.wait(turn)),
            (writer, "RankFile", functools.partial(_File, recorder)),
            (writer.Saver, "_finish", lambda *_: None),
            (staging, "RLock", functools.partial(_Lock, recorder)),
            (arena, "Pages", functools.partial(_Pages, recorder)),
            (aio, "try_load", lambda op: None),
            (aio, "_PythonThreads", lambda **_: _Transfers(recorder)),
            (drive.DirectFile, "allocate", lambda file, nbytes: None),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield
