"""Copies of what training will change, for a save that goes on behind it: beside the compute where that is safe."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from deepspeed.checkpoint.save.collect import Elements, TensorPart
from deepspeed.device import get_accelerator
from deepspeed.errors import CheckpointError
from deepspeed.tier.arena import Arena

_LINE = 64  # bytes: where a copy begins


class Copies:
    """Copies of one rank's parts, in memory of ``arena`` that is kept: mapping new memory takes longer than the copy.

    Host tensors are copied at once. Device tensors are copied asynchronously: state that only the engine's update
    writes, on a side stream, beside forward and backward until ``before_update``; all that others may write, on the
    compute stream, ahead of later writes.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._stream: Any = None
        self._event: Any = None  # of all copies on their way
        self._reading: list[tuple[torch.Tensor, int]] = []  # what they read beside the compute, and its version
        self._mutex, self._touched = threading.Lock(), False

    def take(self, parts: list[TensorPart]) -> list[TensorPart]:
        """Copy ``parts``; the copies are valid until the next call, and complete after ``arrive``."""
        if self._event is not None:
            self._event.synchronize()  # of a save that failed before it looked
        accelerator, copies, beside = get_accelerator(), [], list[tuple[torch.Tensor, torch.Tensor]]()
        for part, target in zip(parts, self._targets(parts), strict=True):
            values, on_host = part.values, part.values.device.type == "cpu"
            if part.quiet and not on_host:
                beside.append((target, values))
            else:
                target.copy_(values.reshape(-1), non_blocking=not on_host)
            copies.append(replace(part, elements=Elements(target)))
        self._touched, self._reading = False, [(values, values._version) for _, values in beside]
        self._stream = self._stream or accelerator.Stream()
        self._stream.wait_stream(accelerator.current_stream())
        try:
            with accelerator.stream(self._stream):
                for target, values in beside:
                    target.copy_(values.reshape(-1), non_blocking=True)
        finally:  # one that failed half way has copies on their way too
            self._event = accelerator.awaited_event()
            self._event.record(self._stream)
        return copies

    def _targets(self, parts: list[TensorPart]) -> Iterator[torch.Tensor]:
        ends = list(itertools.accumulate(-(-part.values.nbytes // _LINE) * _LINE for part in parts))
        if parts and not ends[-1] <= self._slab.numel() <= 2 * ends[-1]:
            self._slab = torch.empty(0, dtype=torch.uint8)  # before the larger one is there
            self._slab = self._arena.empty(ends[-1], pin=True)
        for part, start in zip(parts, [0, *ends], strict=False):
            yield self._slab[start : start + part.values.nbytes].view(part.values.dtype)

    def before_update(self) -> None:
        """Make the compute stream wait for copies that still read: the engine is about to write their sources."""
        if self._reading:
            get_accelerator().current_stream().wait_event(self._event)
            self._let_go()

    def arrive(self) -> None:
        """Wait until the copies are complete; any thread. CheckpointError if others have written the sources."""
        self._event.synchronize()
        self._let_go()
        if self._touched:
            raise CheckpointError(
                "masters or optimizer state on the device were written by hand while a save in the background copied "
                "them; call wait_for_checkpoint() first, or write them with safe_set_full_fp32_param and the like"
            )

    def _let_go(self) -> None:
        with self._mutex:
            self._touched |= any(values._version != version for values, version in self._reading)
            self._reading = []
