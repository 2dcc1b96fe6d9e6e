"""What an engine tells whoever listens.

Nothing of the engine knows of a listener: for as long as there is one, methods of living objects are replaced by ones
that call them and note when (``Wraps``), and the listeners of process groups have one more. Unwatched, an engine pays
nothing.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup
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
from deepspeed.tier.transfer import Transfer
from deepspeed.zero.hooks import inside_backward, tensors_in
from deepspeed.zero.unit import UnitState

_MOST = 20_000  # spans of one step
# What one note costs, in situ, where every call meets cold caches (benchmarks/observe.py), and the share of the time of
# an update that notes may cost: of shorter updates not all are noted, after the first ones.
_NOTE_NS, _PRICE, _FIRST = 10_000, 0.005, 10
_GOLDEN = 0.6180339887498949  # multiples of it fall in step with no other period
# Calls that return when the values are there: the time between begin and end is a wait.
_AT_ONCE = ("sum_in_place", "broadcast")
_MAY_BE_AT_ONCE = ("all_reduce", "broadcast")  # what these tell of


class Wraps:
    """Methods of living objects, each replaced until ``close`` by one that is given it."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._made: list[tuple[dict[str, Any], str, Any, Any]] = []

    def put(self, owner: object, name: str, call: Callable[..., Any], *given: Any) -> None:
        """Let ``owner.name(...)`` be ``call(*given, method, ...)``. AttributeError where there is no such method."""
        names, method = vars(owner), getattr(owner, name)
        before = names.get(name)
        names[name] = made = functools.wraps(method)(functools.partial(call, *given, method))
        self._made.append((names, name, method, made))

        def back() -> None:
            if names.get(name) in (made, method):  # else another has wrapped it since
                names.pop(name)
                if before is not None:
                    names[name] = before

        self._undo.callback(back)

    def rest(self) -> None:
        """Let the methods be called as they are, until ``wake``; one that another has wrapped since stays."""
        for names, name, method, made in self._made:
            if names.get(name) is made:  # it stays in the dict: an interpreter that specializes looks it up again else
                names[name] = method

    def wake(self) -> None:
        """The end of ``rest``."""
        for names, name, method, made in self._made:
            if names.get(name) is method:
                names[name] = made

    def close(self) -> None:
        self._made.clear()
        self._undo.close()

    def on_close(self, call: Callable[..., Any], *args: Any) -> None:
        """Something else to undo."""
        self._undo.callback(call, *args)


def _caller() -> str:
    """The function that issues the collective of which a group has just told."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("note", "<listcomp>"):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_name


class Listener:
    """Notes the spans of ``engine`` in ``step``, which is replaced at every update: phases, waits and collectives; with
    ``detail`` the modules, transfers between tiers and each use of a unit, too. Of updates so short that notes would
    cost more than ``_PRICE`` of them, phases alone, but for a share of them (``StepSpans.noted``).
    """

    def __init__(self, engine: Any, clock: MarkClock) -> None:
        self._engine, self._clock, self._mark = engine, clock, clock.mark
        self.step = StepSpans(clock, clock.mark(), _MOST)
        self._wraps, self._notes, self._details = Wraps(), Wraps(), Wraps()
        self._groups: list[AxisGroup] = []
        self._updates, self._share, self._begun_ns = 0, 1.0, time.perf_counter_ns()
        self._resting = False
        self._open: list[tuple[str, Any]] = []  # the block whose backward is under way
        self._forwards: dict[nn.Module, Any] = {}
        self._unit, self._titles = "", dict[int, str]()  # what is issued now is for; names of units
        self._beside = 0  # streams beside the computation that are given work right now
        self._hear = self._collective  # one object, to be found again
        self._follow()

    def turn(self) -> StepSpans:
        """The update ends, and the next begins: what the last one was."""
        now, last = self._mark(), self.step
        last.end = now
        self.step = StepSpans(self._clock, now, _MOST)
        self._choose(last)
        return last

    def _choose(self, last: StepSpans) -> None:
        """Whether the update that begins is noted: after ``last``, by what its notes cost."""
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
            self._notes.rest()
            for group in self._groups:
                self._leave(group)

    def wake(self) -> None:
        """Listen at least until the next update, though that may not be noted."""
        if self._resting:
            self._resting = False
            self._notes.wake()
            for group in self._groups:
                group.ledger.append(self._hear)

    def close(self) -> None:
        self._details.close()
        self._notes.close()
        self._wraps.close()
        for group in self._groups:
            self._leave(group)

    @contextlib.contextmanager
    def _span(self, row: int, name: str, **facts: Any) -> Iterator[None]:
        begin = self._mark()
        try:
            yield
        finally:
            self.step.add(row, name, begin, self._mark(), facts or None)

    def _timed(self, row: int, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = self._mark()  # not ``_span``, whose generator takes longer, at every wait
        try:
            return method(*args, **kwargs)
        finally:
            self.step.add(row, name, begin, self._mark())

    # -- always -----------------------------------------------------------------------------------------------------
    def _follow(self) -> None:
        engine, put = self._engine, self._notes.put
        runtime, mesh = engine.runtime, engine.mesh
        self._wraps.put(engine, "_clock", self._phase)
        put(runtime, "need", self._need)
        put(runtime, "publication", self._publication)
        if runtime.agreement.speaks:
            put(runtime.agreement, "_message", self._timed, WAITS, "agreement")
        gradients = runtime.gradients
        streams = {"gather of": (runtime._stream,), "reduction of": gradients._streams}
        streams["gradient in host memory of"] = (gradients._out, gradients._back)
        for what, each in streams.items():
            for stream in each:
                put(stream, "run", self._run, what, stream._stream is not None)
        if hasattr(engine, "_links"):
            put(engine._links, "_wait", self._timed, WAITS, "messages of the pipeline")
        each = (mesh.job, mesh.zero, mesh.data, mesh.tp, mesh.pp, mesh.reducing, *mesh.groups)
        self._groups += {id(g): g for g in each if isinstance(g, AxisGroup) and g.size > 1}.values()
        for group in self._groups:
            group.ledger.append(self._hear)

    def _leave(self, group: AxisGroup) -> None:
        if self._hear in group.ledger:
            group.ledger.remove(self._hear)

    @contextlib.contextmanager
    def _phase(self, method: Callable[..., Any], name: str) -> Iterator[None]:
        inner = name in self._engine._phases  # a forward inside a forward is part of it
        with method(name), contextlib.nullcontext() if inner else self._span(PHASES, name):
            yield

    def _run(self, what: str, beside: bool, method: Callable[..., Any], start: Any) -> Transfer:  # noqa: FBT001 - private
        """Who waits for what a stream has begun waits for a transfer; but not a stream ``beside`` the computation."""
        self._beside += beside
        try:
            transfer: Transfer = method(start)
        finally:
            self._beside -= beside
        return _Watched(transfer, self, f"{what} {self._unit or 'a unit'}") if transfer.nbytes else transfer

    def _for_unit(self, method: Callable[..., Any], unit: Any, *args: Any) -> Any:
        """What is issued in this call is for ``unit``."""
        before, self._unit = self._unit, self._title(unit)
        try:
            return method(unit, *args)
        finally:
            self._unit = before

    def _title(self, unit: Any) -> str:
        return self._titles.get(unit.index) or self._titles.setdefault(unit.index, unit.title)

    def _publication(self, method: Callable[..., Any], units: list[Any], **how: Any) -> Any:
        made = method(units, **how)
        sent = any(g.size > 1 for u in units for g in u.mesh.groups)
        whole = sent and any(not u.movable for u in units)
        if whole:  # of these the values are gathered at once, and waited for at the end
            vars(made)["finish"] = functools.partial(self._timed, WAITS, "publish the update", made.finish)
            start = made._start
            vars(made)["_start"] = lambda *, spent: self._for_unit(lambda _: start(spent=spent), made._waiting[0])
        return made

    def _need(self, method: Callable[..., Any], units: Iterable[Any]) -> None:
        units = list(units)
        for unit in units:
            if unit.movable:
                ready = unit.state is not UnitState.ABSENT and unit.fetched_version == unit.version
                self.step.hits += ready
                self.step.misses += not ready
                if self._detailed:
                    what = "hit" if ready else "miss"
                    state = unit.state.name.lower()
                    self.step.add(PREFETCH, what, self._mark(), None, {"unit": self._title(unit), "was": state})
        method(units)

    def _collective(self, op: str, numel: int, dtype: torch.dtype, size: int) -> Callable[[], None]:
        begin, nbytes, unit = self._mark(), numel * dtype.itemsize, self._unit
        at_once = not unit and op in _MAY_BE_AT_ONCE and _caller() in _AT_ONCE
        self.step.bytes_sent += nbytes

        def end() -> None:
            mark, facts = self._mark(), None
            if self._detailed:
                facts = {"bytes": nbytes, "dtype": str(dtype)[6:], "ranks": size} | ({"unit": unit} if unit else {})
            self.step.add(COLLECTIVES, op, begin, mark, facts)
            if at_once:
                self.step.add(WAITS, op, begin, mark)

        return end

    # -- details ----------------------------------------------------------------------------------------------------
    _detailed = False

    def detail(self) -> None:
        """From here on more is noted, until ``less``."""
        engine, details = self._engine, self._details
        self._detailed = True
        self.wake()
        details.put(engine.runtime.order, "_gather", self._for_unit)
        details.put(engine.runtime.gradients, "reduce", self._for_unit)
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
        if engine.basic_optimizer is not None:
            details.put(engine.basic_optimizer, "step", self._timed, COMPUTE, "optimizer")
        details.put(engine.runtime, "flush", self._flush)

    def less(self) -> None:
        """No more details."""
        self._detailed = False
        self._details.close()
        self._open.clear()
        self._forwards.clear()

    def _copy(self, where: str, method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with self._span(TIERS, f"copy {where}", bytes=tensor.nbytes):
            return method(tensor, *args, **kwargs)

    def _file(self, what: str, method: Callable[..., Any], extent: Any, start: int, tensor: torch.Tensor) -> Any:
        begin, transfer = self._mark(), method(extent, start, tensor)
        waits = transfer.wait

        def wait() -> None:
            vars(transfer).pop("wait", None)
            waits()
            self.step.add(TIERS, what, begin, self._mark(), {"bytes": tensor.nbytes})

        vars(transfer)["wait"] = wait
        return transfer

    def _hook(self, module: nn.Module, name: str) -> None:
        def before(*_: Any) -> None:
            self._forwards[module] = self._mark()

        def after(_: nn.Module, __: Any, output: Any) -> None:
            begin = self._forwards.pop(module, None)
            if begin is not None:
                what = "recompute" if inside_backward() else "forward"
                self.step.add(COMPUTE, f"{what} {name}", begin, self._mark())
            if torch.is_grad_enabled():
                for origin in {t.grad_fn or t for t in tensors_in(output) if t.requires_grad}:
                    hold = origin.register_hook if isinstance(origin, torch.Tensor) else origin.register_prehook
                    hold(functools.partial(self._begin_backward, name))

        if "torch._dynamo" in sys.modules:  # a compiler cannot see through them
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)):
            self._details.on_close(handle.remove)

    def _begin_backward(self, name: str, _: Any) -> None:
        """The gradients of a block's outputs are there: what comes now is its backward, until another's begins."""
        if self._detailed:
            self._end_backward()
            self._open.append((name, self._mark()))

    def _end_backward(self) -> None:
        while self._open:
            name, begin = self._open.pop()
            self.step.add(COMPUTE, f"backward {name}", begin, self._mark())

    def _flush(self, method: Callable[..., Any]) -> None:
        self._end_backward()
        method()


class _Watched(Transfer):
    """A transfer whose first wait that has to last is noted."""

    def __init__(self, transfer: Transfer, listener: Listener, what: str) -> None:
        self.nbytes, self._transfer, self._listener, self._what = transfer.nbytes, transfer, listener, what
        self._waited = False

    def wait(self) -> None:
        listener, again, self._waited = self._listener, self._waited, True
        if again or listener._beside:
            self._transfer.wait()
            return
        listener._timed(WAITS, self._what, self._transfer.wait)

    def done(self) -> bool:
        return self._transfer.done()
