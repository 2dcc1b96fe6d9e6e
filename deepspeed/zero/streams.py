"""Side streams for collectives, behind the device layer. On the CPU everything here is a no-op.

A gather runs on ``gather`` so that the next unit's bytes travel while this unit computes; a reduction runs on ``reduce`` so
that gradients travel while the backward goes on. Buffers are allocated and freed on the compute stream only; a side stream
first waits for the compute stream, and the compute stream waits for the event before anyone touches the result, so the caching
allocator never hands out memory that a side stream still uses.
"""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.comm.collectives import Transfer
from deepspeed.device import get_accelerator


class SideTransfer:
    """A transfer started on a side stream; ``wait`` makes the compute stream wait for it and releases its buffers."""

    __slots__ = ("_event", "_inner", "_streams")

    def __init__(self, inner: Transfer, streams: "Streams", event: Any) -> None:
        self._inner = inner
        self._streams = streams
        self._event = event

    def wait(self) -> None:
        if self._event is None:
            self._inner.wait()
            return
        get_accelerator().current_stream().wait_event(self._event)
        self._event = None


class Streams:
    """The gather and reduce streams of one runtime on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._real = device.type != "cpu" and device.type != "meta"
        accelerator = get_accelerator()
        self._gather = accelerator.Stream() if self._real else None
        self._reduce = accelerator.Stream() if self._real else None

    def gather(self, start: Callable[[], Transfer]) -> SideTransfer:
        """Run ``start`` on the gather stream."""
        return self._on(self._gather, start)

    def reduce(self, start: Callable[[], Transfer]) -> SideTransfer:
        """Run ``start`` on the reduce stream."""
        return self._on(self._reduce, start)

    def _on(self, stream: Any, start: Callable[[], Transfer]) -> SideTransfer:
        if stream is None:
            return SideTransfer(start(), self, None)
        accelerator = get_accelerator()
        stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            transfer = start()
            # On a side stream, waiting for nccl only orders that stream: the host goes on. The buffers must outlive the event.
            transfer.wait()
            event = accelerator.Event()
            event.record(stream)
        return SideTransfer(_Held(start), self, event)


class _Held(Transfer):
    """Keeps what the starter captured alive until the SideTransfer is dropped."""

    __slots__ = ("_captured",)

    def __init__(self, captured: Any) -> None:
        super().__init__([])
        self._captured = captured
