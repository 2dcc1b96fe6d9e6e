"""Activations that a forward keeps for its backward, in host memory meanwhile (MEMO, Zhao et al. 2025, section 4.1).

Copies have a stream of their own: out behind the forward, in ahead of the backward, which takes them last first.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.accelerator.device import get_accelerator
from deepspeed.errors import UsageError


def is_weight(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` is a parameter or, as what linear layers save, a view of one."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class _Activation:
    """One activation, of which the first ``count`` elements are on the device, in host memory, or under way."""

    def __init__(self, tensor: torch.Tensor, count: int) -> None:
        self.count = count
        self.like = torch.empty_like(tensor, device="meta")  # dense: with the same strides
        self.device = tensor.device
        self.tensor: torch.Tensor | None = tensor  # on the device
        self.rest: torch.Tensor | None = None  # elements that stay there, once the others have gone
        self.host: torch.Tensor | None = None
        self.event: Any = None  # of the copy that was issued last
        self.previous: Callable[[], _Activation | None] = lambda: None  # the backward asks for it next
        self.packed, self.asked = 1, 0  # how often: what several operations save is copied once

    def __del__(self) -> None:
        if self.tensor is not None and self.event is not None:  # fetched, and never asked for: its memory is another's
            get_accelerator().current_stream().wait_event(self.event)


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context of a forward: see ``get_checkpoint_hidden_states_offloading_ctx_manager``. It may be entered again.

    ``share``: of each activation that is packed from now on, the share that goes to the host.
    """

    def __init__(self, *, pinned: bool, streams: bool, smallest: int, in_flight: int, last: int) -> None:
        super().__init__(self._pack, self._unpack)
        self._pinned = pinned
        self.share = 1.0
        self._smallest, self._in_flight, self._last = smallest, in_flight, last
        self._known: weakref.WeakValueDictionary[Any, _Activation] = weakref.WeakValueDictionary()
        self._out: deque[_Activation] = deque()  # their copies to the host may be under way
        self._recent: deque[_Activation] = deque()  # kept on the device, as the backward begins with them
        self._newest: Callable[[], _Activation | None] = lambda: None
        self._streams = streams
        self._stream: Any = None
        self.copied = 0  # tensors to the host so far

    def __deepcopy__(self, _: Any) -> "OffloadActivations":
        """Stay one for copies of the model that uses it."""
        return self

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, which is called inside of this context."""
        with self:
            return function(*args, **kwargs)

    def worth(self, tensor: torch.Tensor) -> bool:
        """Tell whether ``tensor`` is worth its copies: large enough, on a device."""
        return tensor.nbytes >= self._smallest and tensor.device.type != "cpu"

    def moves(self, tensor: torch.Tensor) -> bool:
        """Tell whether ``tensor`` is an activation that is worth its copies, and was computed."""
        computed = tensor.requires_grad and not tensor.is_leaf and not is_weight(tensor)
        return computed and self.worth(tensor)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy behind all work so far; return the event of its end."""
        accelerator = get_accelerator()
        if self._stream is None:
            self._stream = accelerator.Stream() if self._streams else accelerator.current_stream()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = accelerator.Event()
            event.record(self._stream)
        return event

    def _pack(self, tensor: torch.Tensor) -> Any:
        return self._kept(tensor) if self.moves(tensor) else tensor

    def _kept(self, tensor: torch.Tensor) -> Any:
        count = int(tensor.numel() * self.share)
        if not count or not _is_dense(tensor):
            return tensor
        place = StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()
        key = (*place, tensor.dtype, tensor._version)
        if (known := self._known.get(key)) is not None:
            known.packed += 1
            return known
        kept = self._known[key] = _Activation(tensor.detach(), count)
        kept.previous = self._newest
        self._newest = weakref.ref(kept)
        self._recent.append(kept)
        if len(self._recent) > self._last:
            self._send(self._recent.popleft())
        return kept

    def hold(self, tensor: Any) -> Any:
        """Keep ``tensor``, which is inside no graph, as if it was saved with the one before it; ``get`` returns it."""
        if not isinstance(tensor, torch.Tensor) or not self.worth(tensor):
            return tensor
        before = self._newest()
        kept = self._kept(tensor)
        if before is not None and isinstance(kept, _Activation):  # the backward asks for both together, it first
            kept.previous, before.previous = before.previous, weakref.ref(kept)
            self._newest = weakref.ref(before)
        return kept

    def get(self, kept: Any) -> Any:
        """Return what ``hold`` has kept, on the device."""
        return self._unpack(kept).detach() if isinstance(kept, torch.Tensor | _Activation) else kept

    def _send(self, kept: _Activation) -> None:
        """Start the copy of ``kept`` to the host; its memory on the device is free after at most ``in_flight`` more."""
        assert kept.tensor is not None
        flat = _flat(kept.tensor)
        # torch keeps page-locked memory for the next tensors, and gives it away behind the copies that use it
        pinned = self._pinned and flat.device.type != "cpu"
        kept.host = torch.empty(kept.count, dtype=flat.dtype, device="cpu", pin_memory=pinned)
        kept.event = self._copy(kept.host, flat[: kept.count])
        kept.rest = flat[kept.count :].clone() if kept.count < len(flat) else None
        self.copied += 1
        self._out.append(kept)
        while len(self._out) > (self._in_flight if self._streams else 0):
            oldest = self._out.popleft()
            get_accelerator().current_stream().wait_event(oldest.event)  # whoever gets its memory comes after the copy
            oldest.tensor = None

    def _fetch(self, kept: _Activation) -> None:
        """Start the copy of ``kept`` to the device."""
        if kept.tensor is not None or kept.host is None:
            return
        # allocated on the stream that will use it, after whose work so far the copy may write it
        kept.tensor = torch.empty_like(kept.like, device=kept.device)
        flat = _flat(kept.tensor)
        if kept.rest is not None:
            flat[kept.count :].copy_(kept.rest)
        kept.event = self._copy(flat[: kept.count], kept.host)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Activation):
            return cast(torch.Tensor, kept)
        self._recent.clear()
        while self._out:  # those stay on the device, until their copies are through at least
            get_accelerator().current_stream().wait_event(self._out.popleft().event)
        self._fetch(kept)
        assert kept.tensor is not None
        if kept.event is not None:
            get_accelerator().current_stream().wait_event(kept.event)
        previous = kept.previous()
        for _ in range(max(1, self._in_flight)):
            if previous is not None:
                self._fetch(previous)
                previous = previous.previous()
        tensor = kept.tensor
        kept.asked += 1
        # a graph that is retained asks again, and reads the host's copy then
        if kept.host is not None and kept.asked % kept.packed == 0:
            kept.tensor = None
        return tensor


def get_checkpoint_hidden_states_offloading_ctx_manager(
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_bytes: int = 1024,
    max_fwd_stash_count: int = 2,
    max_cpu_buffer_pool_count: int = 64,
    keep_last_count: int = 1,
) -> OffloadActivations:
    """Return a context for a forward: activations that autograd saves inside go to host memory until the backward.

    With checkpointed layers these are their hidden states. On the CPU it changes nothing. Raises UsageError for numbers
    below 0.

    Args:
        use_pin_memory: Copy to page-locked memory, without which copies block.
        use_streams: Copy on a stream beside the computation, at most ``max_fwd_stash_count`` tensors behind it.
        min_offload_bytes: Smaller tensors stay.
        max_cpu_buffer_pool_count: Has no effect, as torch keeps page-locked memory for later tensors.
        keep_last_count: As many tensors, the last of the forward, stay on the device.
    """
    numbers = {
        "min_offload_bytes": min_offload_bytes,
        "max_fwd_stash_count": max_fwd_stash_count,
        "max_cpu_buffer_pool_count": max_cpu_buffer_pool_count,
        "keep_last_count": keep_last_count,
    }
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 0:
            raise UsageError(f"{name} is a whole number of at least 0, not {number!r}")
    return OffloadActivations(
        pinned=use_pin_memory,
        streams=use_streams,
        smallest=min_offload_bytes,
        in_flight=max_fwd_stash_count,
        last=keep_last_count,
    )
