"""The few buffers that everything between memory and a drive passes through."""

from collections import deque
from threading import RLock

import torch

from deepspeed.tier.arena import ALIGN, Arena
from deepspeed.tier.transfer import Transfer


class Staging:
    """Hand out byte buffers, normally ``count`` at most; one given back with a transfer is free when that has ended.
    ``take`` adds one while all are out, freed afterwards: memory beyond the promise is better than a hang. Memory
    is the ``arena``'s, which locks its pages with ``pin`` where it can. Several threads may use it.
    """

    def __init__(self, count: int, *, arena: Arena | None = None, pin: bool = False) -> None:
        self._count, self._arena, self._pin = max(1, count), arena or Arena(keep=False), pin
        self._free: list[torch.Tensor] = []
        self._busy: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._out, self._lock = 0, RLock()

    def has_room(self, buffers: int = 1) -> bool:
        """Return whether so many ``buffers`` could be taken without waiting and without exceeding the count."""
        with self._lock:
            self._reap()
            return self._out + len(self._busy) + buffers <= self._count

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 buffer of at least ``nbytes`` bytes that begins at a multiple of 4096."""
        with self._lock:
            self._reap()
            while not self._free and self._busy and self._total() >= self._count:
                self._retire()
            fitting = [i for i, b in enumerate(self._free) if b.numel() >= nbytes]
            if fitting:
                chosen = self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
            else:
                while self._free and self._total() >= self._count:
                    self._free.pop()  # what is too small for this one gives its place to it
                chosen = self._arena.empty(-(-max(nbytes, 1) // ALIGN) * ALIGN, pin=self._pin)
            self._out += 1
            return chosen

    def give(self, buffer: torch.Tensor, *, after: Transfer | None = None) -> None:
        """Take ``buffer`` back, for the next user when ``after`` has ended."""
        with self._lock:
            self._out -= 1
            if after is not None:
                self._busy.append((buffer, after))
            elif self._total() < self._count:
                self._free.append(buffer)

    def settle(self) -> None:
        """Wait for every transfer; raise the first OSError when all have ended."""
        failure: OSError | None = None
        with self._lock:
            while self._busy:
                try:
                    self._retire()
                except OSError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def clear(self) -> None:
        """Settle, and give the memory back."""
        try:
            self.settle()
        finally:
            self._free.clear()

    def _total(self) -> int:
        return self._out + len(self._busy) + len(self._free)

    def _reap(self) -> None:
        while self._busy and self._busy[0][1].done():
            self._retire()

    def _retire(self) -> None:
        buffer, transfer = self._busy.popleft()
        try:
            transfer.wait()
        finally:
            if self._total() < self._count:
                self._free.append(buffer)
