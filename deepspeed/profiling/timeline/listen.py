"""Notes what an engine tells: a listener of its events (``monitor.events``) and of its process groups.

Calls that clients make, and transfers between tiers, are noted by methods of living objects that stand in for theirs
(``Wraps``).
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup
from deepspeed.monitor.events import FLUSH, ISSUE, NEED, PHASE, UPDATE, WAIT
from deepspeed.profiling.timeline.spans import (
    COLLECTIVES,
    COMPUTE,
    PHASES,
    PREFETCH,
    TIERS,
    WAITS,
    MarkClock,
    StepSpans,
)
from deepspeed.zero.hooks import inside_backward, tensors_in
from deepspeed.zero.unit import UnitState

_MOST = 20_000  # spans of one step
# What one note costs, in situ, where every call meets cold caches (benchmarks/observe.py), and the share of the time of
# an update that notes may cost: of shorter updates not all are noted, after the first ones.
_NOTE_NS, _PRICE, _FIRST = 10_000, 0.005, 10
_GOLDEN = 0.6180339887498949  # multiples of it fall in step with no other period
# Collectives that are waited for at once, unless they are for a unit: the time between begin and end is a wait.
_AT_ONCE = {"all_reduce": "all_reduce", "broadcast": "broadcast", "merge": "agreement"}


class Wraps:
    """Replace methods of living objects until ``close``; each replacement is given the method."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def put(self, owner: object, name: str, call: Callable[..., Any], *given: Any) -> None:
        """Replace ``owner.name`` by ``call(*given, method, ...)``. AttributeError where there is no such method."""
        names, method = vars(owner), getattr(owner, name)
        before = names.get(name)
        names[name] = made = functools.wraps(method)(functools.partial(call, *given, method))

        def back() -> None:
            if names.get(name) in (made, method):  # else another has wrapped it since
                names.pop(name)
                if before is not None:
                    names[name] = before

        self._undo.callback(back)

    def close(self) -> None:
        self._undo.close()

    def on_close(self, call: Callable[..., Any], *args: Any) -> None:
        """Register another call for ``close``."""
        self._undo.callback(call, *args)


class Listener:
    """Note the spans of ``engine`` in ``step``, which is replaced at every update: phases, waits and collectives; with
    ``detail`` the modules, transfers between tiers and each use of a unit, too. Notes may cost at most ``_PRICE`` of
    the time: shorter updates get phases alone, but for a share of them (``StepSpans.noted``).
    """

    def __init__(self, engine: Any, clock: MarkClock) -> None:
        self._engine, self._clock, self._mark = engine, clock, clock.mark
        self.step = StepSpans(clock, clock.mark(), _MOST)
        self._details = Wraps()
        self._updates, self._share, self._begun_ns = 0, 1.0, time.perf_counter_ns()
        self._resting = False
        self._open: list[tuple[str, Any]] = []  # the block whose backward is under way
        self._forwards: dict[nn.Module, Any] = {}
        self._unit, self._titles = "", dict[int, str]()  # what is issued now is for; names of units
        mesh = engine.mesh
        axes = (mesh.job, mesh.control, mesh.zero, mesh.data, mesh.tp, mesh.pp, mesh.reducing)
        axes += (*mesh.groups, *mesh.experts)
        groups = {id(g): g for g in axes if isinstance(g, AxisGroup) and g.size > 1}.values()
        # the lists of listeners that this one is in unless it rests, and as what
        self._places: list[tuple[list[Any], Any]] = [(group.ledger, self._collective) for group in groups]
        self._places.append((engine.runtime.events, self._event))
        self._phases = engine._clock.events
        for place, call in [*self._places, (self._phases, self._phase)]:
            place.append(call)

    def turn(self) -> StepSpans:
        """End the update and begin the next; return the spans of the update that ended."""
        now, last = self._mark(), self.step
        last.end = now
        self.step = StepSpans(self._clock, now, _MOST)
        self._choose(last)
        return last

    def _choose(self, last: StepSpans) -> None:
        """Decide whether to note the update that begins, by what the notes of ``last`` cost."""
        begun, self._begun_ns = self._begun_ns, time.perf_counter_ns()
        if last.noted:
            price_ns = _NOTE_NS * max(1, len(last.spans) + last.hits + last.misses)
            paid = _PRICE * (self._begun_ns - begun) / price_ns
            # What is waited for in an update may have been issued in the one before, so two are listened to for one.
            self._share = 1.0 if paid >= 1 else paid / 2
        self._updates += 1
        this, following = (
            n < _FIRST or n * _GOLDEN % 1 < self._share or self._detailed for n in (self._updates, self._updates + 1)
        )
        self.step.noted = this and not self._resting
        if not (this or following):
            self._rest()
        else:
            self.wake()

    def _rest(self) -> None:
        if not self._resting:
            self._resting = True
            for place, call in self._places:
                place.remove(call)

    def wake(self) -> None:
        """Listen at least until the next update, though that may not be noted."""
        if self._resting:
            self._resting = False
            for place, call in self._places:
                place.append(call)

    def close(self) -> None:
        self._details.close()
        for place, call in [*self._places, (self._phases, self._phase)]:
            if call in place:
                place.remove(call)

    def _begin(self, row: int, name: str, **facts: Any) -> Callable[[], None]:
        begin = self._mark()
        return lambda: self.step.add(row, name, begin, self._mark(), facts or None)

    # -- always -----------------------------------------------------------------------------------------------------
    def _phase(self, kind: str, name: str) -> Callable[[], None] | None:
        return self._begin(PHASES, name) if kind == PHASE else None

    def _event(self, kind: str, subject: Any) -> Callable[[], None] | None:
        if kind == WAIT:
            return self._begin(WAITS, subject)
        if kind == ISSUE:
            before, self._unit = self._unit, self._title(subject)
            return functools.partial(setattr, self, "_unit", before)
        if kind == NEED:
            self._need(subject)
        elif self._detailed and kind == UPDATE:
            return self._begin(COMPUTE, "optimizer")
        elif self._detailed and kind == FLUSH:
            self._end_backward()
        return None

    def _title(self, unit: Any) -> str:
        return self._titles.get(unit.index) or self._titles.setdefault(unit.index, unit.title)

    def _need(self, units: Iterable[Any]) -> None:
        for unit in units:
            if unit.movable:
                ready = unit.state is not UnitState.ABSENT and unit.fetched_version == unit.version
                self.step.hits += ready
                self.step.misses += not ready
                if self._detailed:
                    outcome = "hit" if ready else "miss"
                    state = unit.state.name.lower()
                    self.step.add(PREFETCH, outcome, self._mark(), None, {"unit": self._title(unit), "was": state})

    def _collective(self, op: str, numel: int, dtype: torch.dtype, size: int) -> Callable[[], None]:
        begin, nbytes, unit = self._mark(), numel * dtype.itemsize, self._unit
        waits = "" if unit else _AT_ONCE.get(op, "")
        self.step.bytes_sent += nbytes

        def end() -> None:
            mark, facts = self._mark(), None
            if self._detailed:
                facts = {"bytes": nbytes, "dtype": str(dtype)[6:], "ranks": size} | ({"unit": unit} if unit else {})
            self.step.add(COLLECTIVES, op, begin, mark, facts)
            if waits:
                self.step.add(WAITS, waits, begin, mark)

        return end

    # -- details ----------------------------------------------------------------------------------------------------
    _detailed = False

    def detail(self) -> None:
        """Note more from here on, until ``less``."""
        engine, details = self._engine, self._details
        self._detailed = True
        self.wake()
        hooks, units = engine._parts.hooks, engine.runtime.units
        names = {module: name for name, module in engine.module.named_modules()}
        blocks = {m: root for root in hooks._roots for m in root.modules() if m is not root}
        for module in {*hooks._roots, *(m for m in hooks._touches if m not in blocks)}:
            if module is not engine.module or not blocks:
                self._hook(module, names.get(module) or type(module).__name__)
        for drive in engine._parts.tiers.drives:
            details.put(drive, "read", self._file, "read")
            details.put(drive, "write", self._file, "write")
        stores = {id(s): s for unit in units for s in unit.rest.values() if not s.on_drive}
        for store in stores.values():
            if store.tensor.device.type != engine.device.type:
                details.put(store, "get", self._copy, "to the device")
                details.put(store, "put", self._copy, "to the host")

    def less(self) -> None:
        """Stop noting details."""
        self._detailed = False
        self._details.close()
        self._open.clear()
        self._forwards.clear()

    def _copy(self, where: str, method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        end = self._begin(TIERS, f"copy {where}", bytes=tensor.nbytes)
        try:
            return method(tensor, *args, **kwargs)
        finally:
            end()

    def _file(self, name: str, method: Callable[..., Any], extent: Any, start: int, tensor: torch.Tensor) -> Any:
        begin, transfer = self._mark(), method(extent, start, tensor)
        waits = transfer.wait

        def wait() -> None:
            vars(transfer).pop("wait", None)
            waits()
            self.step.add(TIERS, name, begin, self._mark(), {"bytes": tensor.nbytes})

        vars(transfer)["wait"] = wait
        return transfer

    def _hook(self, module: nn.Module, name: str) -> None:
        def before(*_: Any) -> None:
            self._forwards[module] = self._mark()

        def after(_: nn.Module, __: Any, output: Any) -> None:
            begin = self._forwards.pop(module, None)
            if begin is not None:
                phase = "recompute" if inside_backward() else "forward"
                self.step.add(COMPUTE, f"{phase} {name}", begin, self._mark())
            if torch.is_grad_enabled():
                for origin in {t.grad_fn or t for t in tensors_in(output) if t.requires_grad}:
                    hold = origin.register_hook if isinstance(origin, torch.Tensor) else origin.register_prehook
                    hold(functools.partial(self._begin_backward, name))

        if "torch._dynamo" in sys.modules:  # a compiler cannot see through them
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)):
            self._details.on_close(handle.remove)

    def _begin_backward(self, name: str, _: Any) -> None:
        """Begin the backward of a block, whose output gradients have arrived; it lasts until another block's begins."""
        if self._detailed:
            self._end_backward()
            self._open.append((name, self._mark()))

    def _end_backward(self) -> None:
        while self._open:
            name, begin = self._open.pop()
            self.step.add(COMPUTE, f"backward {name}", begin, self._mark())
