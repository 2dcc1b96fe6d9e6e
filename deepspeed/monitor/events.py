"""Events of a running engine, with begin and end, for a list of listeners.

Without a listener an event costs one branch (``if events:``). Collectives have the same form in the list of their
process group (``AxisGroup.ledger``). Ranges also appear by name in torch's profilers.
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
ACTION = "action"  # an action of a pipeline's program begins; None: the program is over
UPDATE = "update"  # the rule of the optimizer, and the publication of weights

Listener = Callable[[str, Any], Callable[[], object] | None]  # takes kind and subject; returns a call for the end


class Events(list[Listener]):
    """List of listeners, each called with a kind from above and its subject."""

    def begin(self, kind: str, subject: Any = None) -> Callable[[], None]:
        """Notify the listeners of a begin; return the call that notifies them of the end."""
        ends = [call for listener in [*self] if (call := listener(kind, subject)) is not None]

        def end() -> None:
            for call in ends:
                call()

        return end

    @contextlib.contextmanager
    def span(self, kind: str, subject: Any = None) -> Iterator[None]:
        """Notify the listeners around the block."""
        end = self.begin(kind, subject)
        try:
            yield
        finally:
            end()

    def note_wait(self, transfer: Any, subject: str) -> None:
        """Wait for ``transfer``, a Transfer; notify the listeners of the wait if bytes travel."""
        with self.span(WAIT, subject) if transfer.nbytes else contextlib.nullcontext():
            transfer.wait()

    def range(self, name: str, kind: str, subject: Any) -> contextlib.AbstractContextManager[object]:
        """Notify the listeners around the block, and name it in a recording torch profiler (NVTX: ``emit_nvtx()``)."""
        named = profiler.record_function(name) if profiler._is_profiler_enabled else contextlib.nullcontext()
        return self._both(named, kind, subject) if self else named

    @contextlib.contextmanager
    def _both(self, named: contextlib.AbstractContextManager[object], kind: str, subject: Any) -> Iterator[None]:
        with named, self.span(kind, subject):
            yield
