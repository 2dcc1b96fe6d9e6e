"""A flat tensor that rests on a drive."""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch

from deepspeed.errors import InvalidStateError
from deepspeed.tier.aligned import ALIGN
from deepspeed.tier.drive import Drive, Extent
from deepspeed.tier.staging import Staging
from deepspeed.tier.store import TierStore, nothing
from deepspeed.tier.transfer import ARRIVED, Transfer

_GLANCE_S = 0.2  # between looks whether a reader still exists


class Held:
    """An extent that keeps its bytes until ``release``."""

    def __init__(self, drive: Drive, extent: Extent, hurry: Callable[[], None]) -> None:
        self._drive, self._extent, self._hurry = drive, extent, hurry
        self._released = threading.Event()

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (host bytes) from byte ``start`` on. Raises TransferError; InvalidStateError once released."""
        self._drive.read(self._extent, start, out).wait()
        if self._released.is_set():  # perhaps written over before these bytes came
            raise InvalidStateError("a state on a drive was read for a save that had let go of it; save again")

    @property
    def released(self) -> bool:
        """Whether nobody has to wait for it any more."""
        return self._released.is_set()

    def release(self) -> None:
        """It has been read; may be called again."""
        self._released.set()

    def wait(self, seconds: float) -> bool:
        """Until it is released, or so long; whether it is."""
        if not self._released.is_set():
            self._hurry()
        return self._released.wait(seconds)


class Stored(TierStore):
    """``numel`` elements of ``dtype`` in an extent of ``drive``; reads and writes pass through staging buffers.

    A write goes on in the background; whatever touches the same tensor next waits for it. Failures surface there, or at
    ``settle``.
    """

    on_drive = True

    def __init__(self, drive: Drive, numel: int, dtype: torch.dtype, *, staging: Staging | None = None) -> None:
        self.drive, self.numel, self.dtype = drive, numel, dtype
        self.tensor = nothing((numel,), dtype)
        self.staging = staging or drive.staging
        self._extent = drive.reserve(numel * dtype.itemsize)
        self._writes: list[tuple[Transfer, int, int]] = []
        self._ahead: deque[tuple[Transfer, torch.Tensor, int, int]] = deque()
        # weakly: what nobody can read any more holds nothing, however its reader got lost
        self._readers: list[weakref.ref[Held]] = []

    def put(self, values: torch.Tensor, *, start: int = 0, lent: bool = False) -> Transfer:
        if lent and self._straight(values, start):
            return self._write(values, start=start)
        for lo, hi in self._pieces(start, start + values.numel()):
            buffer, inside = self._window(lo, hi)
            transfer = None
            try:
                inside.copy_(values[lo - start : hi - start])
                transfer = self._write(inside, start=lo)
            finally:
                self.staging.give(buffer, after=transfer)
        return ARRIVED

    def get(self, out: torch.Tensor, *, start: int = 0) -> Transfer:
        """Fill ``out`` (any device) with the elements from ``start`` on, using what was read ahead.

        Host memory that lies within its page as the elements do in theirs is read into in the background.
        """
        if not self._ahead and self._straight(out, start):
            self._wait_for_writes(start, start + out.numel())
            return self.drive.read(self._extent, start * self.dtype.itemsize, out)
        self._load(out, start)
        return ARRIVED

    def _load(self, out: torch.Tensor, start: int) -> None:
        end = start + out.numel()
        if self._ahead and (self._ahead[0][2] != start or start + out.numel() < self._ahead[-1][3]):
            self.forget_ahead()
        self._wait_for_writes(start, end)
        waiting = deque(p for p in self._pieces(start, end) if not self._ahead or p[0] >= self._ahead[-1][3])
        while self._ahead or waiting:
            while waiting and (not self._ahead or self.staging.room):
                self._start(*waiting.popleft())
            transfer, buffer, lo, hi = self._ahead.popleft()
            try:
                transfer.wait()
                out[lo - start : hi - start].copy_(self._inside(buffer, lo, hi))
            finally:
                self.staging.give(buffer)

    def read_ahead(self) -> bool:
        if self._ahead or any(not transfer.done() for transfer, _, _ in self._writes):
            return bool(self._ahead)
        self.settle()
        for piece in self._pieces(0, self.numel):
            if not self.staging.room:
                break
            self._start(*piece)
        return bool(self._ahead)

    def forget_ahead(self) -> None:
        while self._ahead:
            transfer, buffer, _, _ = self._ahead.popleft()
            self.staging.give(buffer, after=transfer)

    @contextlib.contextmanager
    def open(self, *, write: bool) -> Iterator[torch.Tensor]:
        values = torch.empty(self.numel, dtype=self.dtype, device="cpu")
        self._load(values, 0)
        yield values
        if write:
            self.put(values)

    def _straight(self, memory: torch.Tensor, start: int) -> bool:
        """Whether bytes can travel between ``memory`` and the drive without a stop, past the page cache."""
        same = memory.device.type == "cpu" and memory.dtype == self.dtype and memory.is_contiguous()
        return same and (memory.data_ptr() - start * self.dtype.itemsize) % ALIGN == 0

    def _write(self, values: torch.Tensor, *, start: int) -> Transfer:
        stop = start + values.numel()
        self._wait_for_readers()
        self.forget_ahead()
        self._heal(start, stop)
        self._wait_for_writes(start, stop)
        transfer = self.drive.write(self._extent, start * self.dtype.itemsize, values)
        self._writes.append((transfer, start, stop))
        return transfer

    def beside(self, nbytes: int) -> "Stored":
        return Stored(self.drive, nbytes, torch.uint8)

    def settle(self) -> None:
        """Wait for the writes under way. Raises TransferError when one failed."""
        self._wait_for_writes(0, self.numel)

    def hold(self, hurry: Callable[[], None]) -> "Held":
        """What is here now, for a reader of any thread: the next write calls ``hurry`` and waits until it is released.

        Raises TransferError when an earlier write failed.
        """
        self.settle()
        reader = Held(self.drive, self._extent, hurry)
        left = [ref for ref in self._readers if (earlier := ref()) is not None and not earlier.released]
        self._readers = [*left, weakref.ref(reader)]  # what is never written would keep those of every save
        return reader

    def drop(self) -> None:
        self._wait_for_readers()
        self.forget_ahead()
        with contextlib.suppress(OSError):
            self.settle()
        self.drive.free(self._extent)

    def _wait_for_readers(self) -> None:
        while self._readers:
            reader = self._readers[-1]()
            if reader is None or reader.wait(_GLANCE_S):
                self._readers.pop()
            reader = None

    def _heal(self, start: int, stop: int) -> None:
        """Forget failed writes of values that are about to be written again."""
        for entry in [w for w in self._writes if start <= w[1] and w[2] <= stop and w[0].done()]:
            with contextlib.suppress(OSError):
                entry[0].wait()
            self._writes.remove(entry)

    def _wait_for_writes(self, start: int, stop: int) -> None:
        # Whole pages: two writes that share one must not overtake each other.
        slack = ALIGN // self.dtype.itemsize
        for entry in [w for w in self._writes if w[1] < stop + slack and start < w[2] + slack or w[0].done()]:
            entry[0].wait()  # one that failed stays, so that nobody reads what it should have replaced
            self._writes.remove(entry)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        each = max(1, self.drive.piece_bytes // self.dtype.itemsize)
        while start < stop:
            end = min(stop, (start // each + 1) * each)
            yield start, end
            start = end

    def _start(self, lo: int, hi: int) -> None:
        buffer, inside = self._window(lo, hi)
        try:
            self._ahead.append((self.drive.read(self._extent, lo * self.dtype.itemsize, inside), buffer, lo, hi))
        except BaseException:
            self.staging.give(buffer)
            raise

    def _window(self, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = self.staging.take((hi - lo) * self.dtype.itemsize + ALIGN)
        return buffer, self._inside(buffer, lo, hi)

    def _inside(self, buffer: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        # The same place within a page as in the file, so that whole pages can bypass the page cache.
        width = self.dtype.itemsize
        shift = lo * width % ALIGN
        return buffer[shift : shift + (hi - lo) * width].view(self.dtype)
