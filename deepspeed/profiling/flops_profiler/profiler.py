"""What a model's forward and backward compute, in operations, and how long each module takes.

``FlopsProfiler`` listens to a model between ``start_profile`` and ``stop_profile``; ``get_model_profile`` makes one
call for you. Sums are of this process: under tensor or pipeline parallelism, of its part of the model.
"""

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.profiling.flops_profiler.counter import BACKWARD, FORWARD, RECOMPUTED, Counter, Whereabouts, module_row
from deepspeed.profiling.flops_profiler.report import ModuleCost, Profile, amount, render


def _numel(module: nn.Module) -> int:
    """Return the number of elements of the module's parameters, sharded or not."""
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters())


def _is_compiled(module: nn.Module) -> bool:
    whole = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    return whole or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


@dataclass
class _Latency:
    """Time of one module: spans that are not added up yet, and their sum in seconds."""

    spans: list[tuple[Any, Any]]
    seconds: float = 0.0


class FlopsProfiler:
    """Count and time the operations of ``model`` between ``start_profile`` and ``stop_profile``.

    ``recompute_fwd_factor``: the share of the forward that a backward repeats where that cannot be counted (inside a
    kernel); recomputation by checkpointing is counted. ``ds_engine`` is accepted: sharded parameters count in full.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self._running = contextlib.ExitStack()
        self.reset_profile()

    def reset_profile(self) -> None:
        """Discard all counts and times. UsageError between start and stop."""
        if self.started:
            raise UsageError("reset_profile() was called while the profiler runs; call stop_profile() first")
        self._counter, self._latencies = Counter(Whereabouts()), dict[str, _Latency]()
        self._duration = _Latency([])

    def start_profile(
        self, ignore_list: Collection[type[nn.Module]] | None = None, *, count: bool = True, time: bool = True
    ) -> None:
        """Start anew; modules of the classes in ``ignore_list`` count nothing. UsageError when it runs already.

        Counting is slower than computing, and compiled code runs uncompiled for it: take times without it.
        """
        if self.started:
            raise UsageError("start_profile() was called while the profiler runs; call stop_profile() first")
        self.reset_profile()
        self._counter = Counter(Whereabouts(ignore_list or ()))
        self.resume(count=count, time=time)

    def resume(self, *, count: bool, time: bool) -> None:
        """Continue after ``stop_profile``, and add to its figures."""
        place = self._counter.place
        with contextlib.ExitStack() as undone:
            for name, module in self._listened(everywhere=count):
                self._listen(undone, place, name, module, time=time)
            if count and "torch._dynamo" in sys.modules:
                undone.enter_context(torch.compiler.set_stance("force_eager"))
            if count:
                undone.enter_context(self._counter)
            if time:
                undone.callback(self._timed(self._duration))
            self._running = undone.pop_all()
        self.started = True

    def _listened(self, *, everywhere: bool) -> list[tuple[str, nn.Module]]:
        """Return the modules to follow: all of them with ``everywhere``, else none inside compiled modules."""
        inside: set[nn.Module] = set()
        for module in [] if everywhere else self.model.modules():
            if _is_compiled(module):
                inside.update(m for m in module.modules() if m is not module)
        return [(name, module) for name, module in self.model.named_modules() if module not in inside]

    def _timed(self, latency: _Latency) -> Any:
        """Start a span; return the function that ends it."""
        start = get_accelerator().Event(enable_timing=True)
        start.record()

        def end() -> None:
            stop = get_accelerator().Event(enable_timing=True)
            stop.record()
            latency.spans.append((start, stop))

        return end

    def _listen(
        self, undone: contextlib.ExitStack, place: Whereabouts, name: str, module: nn.Module, *, time: bool
    ) -> None:
        """Follow the forward of ``module`` until ``undone`` closes."""
        latency, ends = self._latencies.setdefault(name, _Latency([])), list[Any]()

        def before(*_: Any) -> None:
            place.enter(name, module)
            if time:  # a recomputation is part of the backward
                ends.append(None if place.recomputing else self._timed(latency))

        def after(*_: Any) -> None:
            end = ends.pop() if ends else None
            if end is not None:
                end()
            place.leave(name)

        # Inside of the engine's hooks, which gather before and release after: waiting for that is no latency.
        undone.callback(module.register_forward_pre_hook(before).remove)
        undone.callback(module.register_forward_hook(after, prepend=True, always_call=True).remove)

    def stop_profile(self) -> None:
        """Stop listening and keep the figures. Waits for the device."""
        if not self.started:
            return
        self.started = False
        self._running.close()
        get_accelerator().synchronize()
        for latency in (self._duration, *self._latencies.values()):
            latency.seconds += sum(start.elapsed_time(end) for start, end in latency.spans) / 1e3
            latency.spans.clear()

    def end_profile(self) -> None:
        """Stop listening and discard the figures."""
        self.stop_profile()
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the operations of the forward, two for a multiply-add."""
        return _shown(self._counter.flops(FORWARD), "FLOPS", as_string=as_string)

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the multiply-adds of the forward."""
        return _shown(self._counter.flops(FORWARD) // 2, "MACs", as_string=as_string)

    def get_total_backward_flops(self, as_string: bool = False) -> int | str:
        """Return the operations of the backward without recomputation."""
        return _shown(self._counter.flops(BACKWARD), "FLOPS", as_string=as_string)

    def get_total_recomputed_flops(self, as_string: bool = False) -> int | str:
        """Return operations of forwards repeated in the backward; estimated by the factor where none were counted."""
        counted = self._counter.flops(RECOMPUTED)
        estimate = int(self.recompute_fwd_factor * self._counter.flops(FORWARD))
        return _shown(counted or estimate, "FLOPS", as_string=as_string)

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds in the model's forward, or between start and stop where it was not called as a whole."""
        seconds = self._latencies[""].seconds if "" in self._latencies else 0.0
        seconds = seconds or self._duration.seconds
        return amount(seconds, "s") if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of elements of all parameters, whole where they are sharded."""
        return _shown(_numel(self.model), "", as_string=as_string)

    def profile(self, title: str = "", notes: Sequence[str] = ()) -> Profile:
        """Return all figures, for a report."""
        modules = [
            ModuleCost(
                name=name,
                kind=type(module).__name__,
                params=_numel(module),
                flops=self._counter.flops(module_row(name)),
                seconds=self._latencies[name].seconds if name in self._latencies else 0.0,
                whole=not name,
            )
            for name, module in self.model.named_modules()
        ]
        totals: Mapping[str, int] = {part: self._counter.flops(part) for part in (FORWARD, BACKWARD, RECOMPUTED)}
        recomputed = self.get_total_recomputed_flops()
        assert isinstance(recomputed, int)
        return Profile(title, modules, {**totals, RECOMPUTED: recomputed}, [*notes])

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Write the report to ``output_file``, or to standard output. UsageError where the file cannot be written."""
        text = render(self.profile(f"step {profile_step}"), depth=module_depth, top=top_modules, detailed=detailed)
        write_report(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the part of the report that adds up modules of one class."""
        write_report(render(self.profile(), depth=module_depth, top=top_modules, detailed=False), None)


def _shown(count: int, unit: str, *, as_string: bool) -> int | str:
    return amount(count, unit) if as_string else count


def write_report(text: str, output_file: str | None) -> None:
    """Write ``text`` to ``output_file``, whose folder is made, or to standard output if None. UsageError on failure."""
    if output_file is None:
        sys.stdout.write(text + "\n")
        return
    try:
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the profile cannot be written to output_file {output_file!r}: {error}. Choose another file"
        ) from error


def _ones(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """Return ones of ``shape``, in the dtype and on the device of the model's first floating-point parameter."""
    if not isinstance(shape, tuple) or not shape:
        raise UsageError(f"get_model_profile(input_shape={shape!r}): pass a tuple with the batch's size first")
    param = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.ones(shape, dtype=param.dtype, device=param.device)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return the operations, multiply-adds and parameters of one call of ``model``, after ``warm_up`` other calls.

    The call gets one tensor of ones of ``input_shape`` (with the batch), or ``args`` and ``kwargs``. ``mode``
    "generate" calls ``model.generate``. Raises UsageError without an input, or for another mode.
    """
    if mode not in ("forward", "generate"):
        raise UsageError(f"get_model_profile(mode={mode!r}): use 'forward' or 'generate'")
    if input_shape is None and not args and not kwargs:
        raise UsageError("get_model_profile needs an input: pass input_shape=, args= or kwargs=")
    if input_shape is not None:
        args = [_ones(model, input_shape)]
    call = model if mode == "forward" else getattr(model, "generate", None)
    if call is None:
        raise UsageError(f"get_model_profile(mode='generate'): {type(model).__name__} has no generate()")
    modes = {module: module.training for module in model.modules()}
    model.eval()
    profiler = FlopsProfiler(model)
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*args, **(kwargs or {}))
            profiler.start_profile(ignore_modules)
            call(*args, **(kwargs or {}))
    finally:
        profiler.stop_profile()
        model.train(modes[model])  # for modules with a train() of their own
        for module, training in modes.items():
            module.training = training
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    flops, macs, params = (
        get(as_string=as_string)
        for get in (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
    )
    return flops, macs, params
