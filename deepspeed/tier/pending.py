"""Work behind the program that reads and writes the states of a unit: updates in the background, copies on streams."""

from enum import Enum
from threading import Lock
from typing import NamedTuple

from deepspeed.tier.transfer import ARRIVED, Several, Transfer

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
