"""What an engine tells while it works: beginnings and ends, to listeners.

Without a listener telling costs one branch (``if events:``). Collectives are told in the same form by the list of their
process group (``AxisGroup.ledger``). Ranges have their names in torch's profilers, too.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import profiler

PHASE = "phase"  # "forward", "backward", "step": an engine's part of an update
METRICS = "metrics"  # the engine: an update has ended, and its metrics are written
NEED = "need"  # units: a module that needs them is about to run, and they are not gathered yet
ISSUE = "issue"  # a unit: what is issued until the end is for it
WAIT = "wait"  # a text: the program waits for this
FLUSH = "flush"  # the end of a backward: what is left is reduced
GRADIENTS = "gradients"  # units: their gradients are at rest, before an update. On every rank, which may communicate
UPDATE = "update"  # the rule of the optimizer, and the publication of weights

Listener = Callable[[str, Any], Callable[[], object] | None]  # given kind and subject; returns who is told of the end


class Events(list[Listener]):
    """List of listeners, each called with a kind from above and its subject."""

    def begin(self, kind: str, subject: Any = None) -> Callable[[], None]:
        """Tell that something begins; returns what tells that it has ended."""
        ends = [call for listener in [*self] if (call := listener(kind, subject)) is not None]

        def end() -> None:
            for call in ends:
                call()

        return end

    @contextlib.contextmanager
    def span(self, kind: str, subject: Any = None) -> Iterator[None]:
        """Tell of what is done inside."""
        end = self.begin(kind, subject)
        try:
            yield
        finally:
            end()

    def note_wait(self, transfer: Any, subject: str) -> None:
        """Wait for ``transfer``, a Transfer, and tell of the wait where bytes travel."""
        with self.span(WAIT, subject) if transfer.nbytes else contextlib.nullcontext():
            transfer.wait()

    def range(self, name: str, kind: str, subject: Any) -> contextlib.AbstractContextManager[object]:
        """Tell of what is done inside, as ``name`` to a torch profiler that records now (NVTX: ``emit_nvtx()``)."""
        named = profiler.record_function(name) if profiler._is_profiler_enabled else contextlib.nullcontext()
        return self._both(named, kind, subject) if self else named

    @contextlib.contextmanager
    def _both(self, named: contextlib.AbstractContextManager[object], kind: str, subject: Any) -> Iterator[None]:
        with named, self.span(kind, subject):
            yield
