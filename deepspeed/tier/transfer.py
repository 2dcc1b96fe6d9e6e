"""Work under way, one noun for collectives, copies on side streams and file IO; and the work on a unit's states."""

from collections.abc import Iterable
from enum import Enum
from threading import Lock
from typing import NamedTuple


class Transfer:
    """Bytes on their way; in this base class they have arrived.

    ``wait`` may be called any number of times and raises the failure; ``done`` says whether it would return at once;
    ``nbytes`` is the amount moved. The memory of a transfer stays alive and untouched by others until its end.
    """

    nbytes = 0

    def wait(self) -> None:
        """Wait until the transfer has ended."""

    def done(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return True

    def failed(self) -> bool:
        """Return whether the transfer has ended, and ``wait`` raises."""
        return False


class Several(Transfer):
    """Transfers that end together."""

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self._transfers = list(transfers)
        self.nbytes = sum(t.nbytes for t in self._transfers)

    def wait(self) -> None:
        """Wait until all have ended, also when one fails with OSError; raise the first such failure."""
        failure: OSError | None = None
        for transfer in self._transfers:
            try:
                transfer.wait()
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def done(self) -> bool:
        return all(t.done() for t in self._transfers)

    def failed(self) -> bool:
        return self.done() and any(t.failed() for t in self._transfers)


ARRIVED = Transfer()

Kinds = tuple[Enum, ...]  # of states


class _Work(NamedTuple):
    work: Transfer
    reads: Kinds
    writes: Kinds
    copy: bool

    def concerns(self, kind: Enum, *, write: bool) -> bool:
        """Return whether a reader, or a writer, of ``kind`` has to wait for this work."""
        return kind in self.writes or (write and kind in self.reads)


class PendingWork:
    """Work on a unit's states. The program and the thread of an update both note it, so entries are replaced whole."""

    def __init__(self) -> None:
        self._entries: tuple[_Work, ...] = ()
        self._lock = Lock()

    def wait(self, kind: Enum, *, write: bool = False, copies: bool = True) -> None:
        """Wait for work that writes ``kind`` and, with ``write``, reads it; without ``copies`` for updates only."""
        seen: tuple[_Work, ...] = ()
        while (entries := self._entries) is not seen:  # an update that ends may have begun a copy
            for entry in entries:
                if entry.concerns(kind, write=write) and (copies or not entry.copy):
                    entry.work.wait()
            seen = entries

    def until(self, kind: Enum, *, write: bool = False) -> Transfer:
        """Return the work that ``wait`` would wait for now, as one transfer."""
        works = [entry.work for entry in self._entries if entry.concerns(kind, write=write)]
        return works[0] if len(works) == 1 else Several(works) if works else ARRIVED

    def note(self, work: Transfer, reads: Kinds = (), writes: Kinds = (), *, copy: bool = False) -> None:
        """Note ``work``, which reads and writes these states until it ends; ``copy``: between memory and the device."""
        with self._lock:
            earlier = [entry for entry in self._entries if entry.work is not work]
            kept = [entry for entry in earlier if not entry.work.done() or entry.work.failed()]
            self._entries = (*kept, _Work(work, reads, writes, copy))

    def forget_ended(self) -> None:
        """Forget work that has ended, with or without a failure."""
        with self._lock:
            self._entries = tuple(entry for entry in self._entries if not entry.work.done())
