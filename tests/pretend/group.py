"""Process groups of the device that pretends, over gloo. As NCCL's they return at once: a collective has its place in a
stream of the group's own, which waits for the stream it is issued on, and ``wait`` makes the current stream wait.

Each is done when somebody waits for it, on this rank or on another, as a real device goes on while its host does not.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretend import device as pretend

_FOR_EVER = timedelta(days=1)
_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add, "AVG": torch.add, "MAX": torch.maximum, "MIN": torch.minimum, "PRODUCT": torch.mul,
    "BOR": torch.bitwise_or, "BAND": torch.bitwise_and,
}  # fmt: skip


def _on_host(tensor: Tensor) -> Tensor:
    """The same memory, flat."""
    assert tensor.is_contiguous(), "a collective takes whole memory"
    if tensor.device.type == "cpu" or not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype) if tensor.device.type != "cpu" else tensor.detach().view(-1)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


class Work(dist._Work):  # type: ignore[misc]
    """A collective under way, with what it reads and writes until it has been waited for."""

    def __init__(self, event: pretend.Event, tensors: Sequence[Tensor], *, host: bool) -> None:
        super().__init__()
        self._event, self._tensors, self._host = event, tensors, host

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._host:
            self._event.synchronize()
        else:
            self._event.wait(pretend.current_stream())
        self._tensors = ()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._event.query()

    def is_success(self) -> bool:
        return True


class Group(dist.ProcessGroup):  # type: ignore[misc]
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._stream: pretend.Stream | None = None
        self._events: list[pretend.Event] = []
        self._more, self._over = threading.Condition(), False
        if size > 1:
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
            self._store = dist.PrefixStore("asked", store)
            peers = dist.PrefixStore("asked", store.clone())  # a wait keeps a connection for itself
            threading.Thread(target=self._follow, args=(peers,), daemon=True, name="pretend group").start()

    def _follow(self, store: Any) -> None:
        """Do what another rank waits for."""
        number = 0
        while not self._over:
            try:
                store.wait([str(number)], _FOR_EVER)
            except RuntimeError:  # the store has gone
                return
            with self._more:
                self._more.wait_for(lambda: self._over or len(self._events) > number)  # noqa: B023 - called at once
                event = None if self._over else self._events[number]
            if event is not None:
                pretend.C.pretend_finish_event(event._mark)
            number += 1

    def _issue(self, task: Callable[[], object], *tensors: Tensor, host: bool = False) -> Work:
        self._stream = self._stream or pretend.Stream()
        self._stream.wait_stream(pretend.current_stream(self._stream.device_index))
        host = host or any(t.device.type == "cpu" for t in tensors)
        with self._more:
            number = len(self._events)
            self._stream.submit(functools.partial(self._do, number, task))
            self._events.append(self._stream.record_event())
            self._more.notify_all()
        work = Work(self._events[number], tensors, host=host)
        if host:
            work.wait()
        return work

    def _do(self, number: int, task: Callable[[], object]) -> None:
        if self._size > 1:
            self._store.set(str(number), "")
        task()

    def _everyones(self, mine: Tensor) -> list[Tensor]:
        """Each rank's values, on the host."""
        if self._size == 1:
            return [mine.clone()]
        raw = mine.view(torch.uint8)
        out = [torch.empty_like(raw) for _ in range(self._size)]
        if raw.numel():
            self._gloo.allgather([out], [raw.contiguous()]).wait()
        return [each.view(mine.dtype) for each in out]

    def _sum(self, mine: Tensor, opts: Any) -> Tensor:
        name = str(getattr(opts.reduceOp, "op", opts.reduceOp)).rpartition(".")[2]
        total = functools.reduce(_REDUCE[name], self._everyones(mine))
        return total / self._size if name == "AVG" else total

    # --- what torch.distributed calls; names of before and after 2.13 ---

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        views = [_on_host(t) for t in tensors]
        return self._issue(lambda: [v.copy_(self._sum(v, opts)) for v in views], *tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        view, mine = _on_host(tensors[0]), opts.rootRank == self._rank

        def task() -> None:
            total = self._sum(view, opts)
            if mine:
                view.copy_(total)

        return self._issue(task, *tensors)

    def _allgather_base(self, out: Tensor, mine: Tensor, opts: Any = None) -> Work:
        to, view = _on_host(out), _on_host(mine)
        return self._issue(lambda: to.copy_(torch.cat(self._everyones(view))), out, mine)

    all_gather_single = _allgather_base

    def allgather(self, outs: Any, mine: Any, opts: Any = None) -> Work:
        places, view = [_on_host(t) for t in outs[0]], _on_host(mine[0])
        return self._issue(lambda: _spread(self._everyones(view), places), *outs[0], *mine)

    def _reduce_scatter_base(self, out: Tensor, mine: Tensor, opts: Any = None) -> Work:
        to, view, count = _on_host(out), _on_host(mine), out.numel()
        first = self._rank * count
        return self._issue(lambda: to.copy_(self._sum(view, opts)[first : first + count]), out, mine)

    reduce_scatter_single = _reduce_scatter_base

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        view, root = _on_host(tensors[0]), opts.rootRank
        return self._issue(lambda: view.copy_(self._everyones(view)[root]), *tensors)

    def barrier(self, opts: Any = None) -> Work:
        return self._issue(lambda: self._everyones(torch.zeros(1)), host=True)

    def getBackendName(self) -> str:
        return pretend.BACKEND

    def _get_sequence_number_for_group(self) -> int:
        return len(self._events)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(pretend.NAME)]

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def shutdown(self) -> None:
        with self._more:
            self._over = True
            self._more.notify_all()
        if self._size > 1:
            with contextlib.suppress(RuntimeError):
                self._store.set(str(len(self._events)), "")  # wakes the thread

    abort = shutdown


def _spread(values: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


dist.Backend.register_backend(pretend.BACKEND, Group, devices=[pretend.NAME])
