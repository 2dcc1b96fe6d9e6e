"""Activations that a forward keeps for its backward, in host memory meanwhile (MEMO, Zhao et al. 2025, section 4.1).

Copies have a stream of their own: out behind the forward, in ahead of the backward, which takes them last first.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.errors import UsageError


class HostBuffers:
    """Host memory for copies of tensors, kept for the next of the same size: ``limit`` of them, page-locked or not."""

    def __init__(self, limit: int, *, pinned: bool) -> None:
        self._limit, self._pinned = limit, pinned
        self._free: deque[torch.Tensor] = deque()
        self._lock = threading.Lock()  # autograd's threads give back what they have used

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a contiguous copy of ``like``."""
        nbytes = like.numel() * like.element_size()
        with self._lock:
            buffer = next((free for free in self._free if free.numel() == nbytes), None)
            if buffer is not None:
                self._free = deque(free for free in self._free if free is not buffer)
        if buffer is None:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            buffer = get_accelerator().pin_memory(buffer) if self._pinned else buffer
        return buffer.view(like.dtype).view(like.shape)

    def give(self, values: torch.Tensor) -> None:
        """Take back the memory of ``values``, which no copy uses any more."""
        with self._lock:
            self._free.append(values.view(-1).view(torch.uint8))
            while len(self._free) > self._limit:
                self._free.popleft()


class _Activation:
    """One activation: on the device, in host memory, or under way."""

    def __init__(self, owner: "OffloadActivations", tensor: torch.Tensor) -> None:
        self.owner, self.device = owner, tensor.device
        self.tensor: torch.Tensor | None = tensor  # on the device
        self.host: torch.Tensor | None = None
        self.event: Any = None  # of the copy that was issued last
        self.previous: Callable[[], _Activation | None] = lambda: None  # the backward asks for it next

    def __del__(self) -> None:
        if self.tensor is not None and self.event is not None:  # fetched, and never asked for: its memory is another's
            get_accelerator().current_stream().wait_event(self.event)
        if self.host is not None:  # later copies are ordered behind those of this one by their common stream
            self.owner.buffers.give(self.host)


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context of a forward: see ``get_checkpoint_hidden_states_offloading_ctx_manager``. It may be entered again."""

    def __init__(self, *, pinned: bool, streams: bool, smallest: int, in_flight: int, buffers: int, last: int) -> None:
        super().__init__(self._pack, self._unpack)
        self.buffers = HostBuffers(buffers, pinned=pinned)
        self._smallest, self._in_flight, self._last = smallest, in_flight, last
        self._out: deque[_Activation] = deque()  # their copies to the host may be under way
        self._recent: deque[_Activation] = deque()  # kept on the device, as the backward begins with them
        self._newest: Callable[[], _Activation | None] = lambda: None
        self._streams = streams
        self._stream: Any = None
        self.copied = 0  # tensors to the host so far

    def moves(self, tensor: torch.Tensor) -> bool:
        """Tell whether ``tensor`` is an activation that is worth its copies: computed, large enough, on a device."""
        computed = tensor.requires_grad and not tensor.is_leaf and not isinstance(tensor, nn.Parameter)
        return computed and tensor.nbytes >= self._smallest and tensor.device.type != "cpu"

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
        if not self.moves(tensor):
            return tensor
        kept = _Activation(self, tensor.detach())
        kept.previous = self._newest
        self._newest = weakref.ref(kept)
        self._recent.append(kept)
        if len(self._recent) > self._last:
            self._send(self._recent.popleft())
        return kept

    def _send(self, kept: _Activation) -> None:
        """Start the copy of ``kept`` to the host; its memory on the device is free after at most ``in_flight`` more."""
        assert kept.tensor is not None
        kept.host = self.buffers.take(kept.tensor)
        kept.event = self._copy(kept.host, kept.tensor)
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
        kept.tensor = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=kept.device)
        kept.event = self._copy(kept.tensor, kept.host)

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
        if (previous := kept.previous()) is not None:
            self._fetch(previous)
        tensor = kept.tensor
        if kept.host is not None:  # a graph that is retained asks again, and reads the host's copy then
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
        max_cpu_buffer_pool_count: Host buffers that are kept for later tensors of the same size.
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
        buffers=max_cpu_buffer_pool_count,
        last=keep_last_count,
    )
