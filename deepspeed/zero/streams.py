"""Side streams for collectives, behind the device layer. On the CPU everything here is a no-op.

A gather runs on ``gather`` so that the next unit's bytes travel while this unit computes; a reduction runs on
``reduce`` so that gradients travel while the backward goes on. Buffers are allocated and freed on the compute stream
only; a side stream first waits for the compute stream, and the compute stream waits for the event before anyone touches
the result, so the caching allocator never hands out memory that a side stream still uses.
"""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.device import get_accelerator
from deepspeed.tier.transfer import Transfer


class SideTransfer(Transfer):
    """A transfer started on a side stream; ``wait`` makes the compute stream wait for it. ``captured`` lives until this
    is dropped.
    """

    def __init__(self, inner: Transfer, event: Any, captured: Any) -> None:
        self.nbytes = inner.nbytes
        self._event = event
        self._captured = captured

    def wait(self) -> None:
        if self._event is not None:
            get_accelerator().current_stream().wait_event(self._event)
        self._event = None

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())


class Streams:
    """The gather and reduce streams of one runtime on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._real = device.type != "cpu" and device.type != "meta"
        accelerator = get_accelerator()
        self._gather = accelerator.Stream() if self._real else None
        self._reduce = accelerator.Stream() if self._real else None

    def gather(self, start: Callable[[], Transfer]) -> Transfer:
        """Run ``start`` on the gather stream."""
        return self._on(self._gather, start)

    def reduce(self, start: Callable[[], Transfer]) -> Transfer:
        """Run ``start`` on the reduce stream."""
        return self._on(self._reduce, start)

    def _on(self, stream: Any, start: Callable[[], Transfer]) -> Transfer:
        if stream is None:
            return start()
        accelerator = get_accelerator()
        stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            transfer = start()
            # On a side stream, waiting for nccl only orders that stream: the host goes on. The buffers must outlive the
            # event.
            transfer.wait()
            event = accelerator.Event()
            event.record(stream)
        return SideTransfer(transfer, event, start)
