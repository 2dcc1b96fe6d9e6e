"""What the block ``observe`` asks for: a trace of some updates, and the record of a run. One observer per engine."""

import atexit
import contextlib
import functools
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm.channel import job_channel
from deepspeed.comm.collectives import failures
from deepspeed.errors import UsageError
from deepspeed.monitor.anomaly import AnomalyWatch
from deepspeed.monitor.events import METRICS
from deepspeed.monitor.log import logger
from deepspeed.monitor.runfile import RunFile
from deepspeed.profiling.timeline.board import Board
from deepspeed.profiling.timeline.collect import clock_offset, rows_of, write_trace
from deepspeed.profiling.timeline.listen import Listener, Wraps
from deepspeed.profiling.timeline.spans import StepSpans, clock_for
from deepspeed.profiling.timeline.tracefile import check_writable
from deepspeed.version import __version__

_MOST_SPANS = 200_000  # of one rank in a trace
_LAST_S = 2.0  # how long a script that ends waits for what its device has not passed yet


class LateMean:
    """Mean of losses, which the program need not wait for."""

    def __init__(self, losses: list[torch.Tensor]) -> None:
        mean = torch.stack([loss.float().reshape(()) for loss in losses]).mean()
        self._value: Any = torch.empty_like(mean, device="cpu", pin_memory=mean.device.type != "cpu")
        self._value.copy_(mean, non_blocking=True)
        self._event: Any = get_accelerator().Event()
        self._event.record()

    def known(self) -> bool:
        """Return whether the mean can be read without waiting."""
        return bool(self._event.query())

    def read(self) -> float:
        self._event.synchronize()
        return float(self._value)


class TraceWindow:
    """Updates of a trace: from the ``first`` to the ``last``, counted from 1."""

    def __init__(self, path: str, first: int, last: int) -> None:
        self.path, self.first, self.last = path, first, last
        self.steps: list[StepSpans] = []
        self.begun = self.over = False
        self.base: tuple[Any, int] = (0, 0)
        self.offset = (0, 0)

    def add(self, step: StepSpans) -> None:
        """Add an update, without spans for which there is no room."""
        room = _MOST_SPANS - sum(len(s.spans) for s in self.steps)
        step.left_out += max(0, len(step.spans) - room)
        del step.spans[max(0, room) :]
        self.steps.append(step)


class Observer:
    """Watch an engine from the end of ``initialize`` until it is destroyed."""

    def __init__(self, engine: Any) -> None:
        settings, mesh = engine._config.observe, engine.mesh
        self._engine, self._mesh = engine, mesh
        self._clock = clock_for(engine.device.type)
        self._window = TraceWindow(settings.trace, *settings.steps) if settings.trace else None
        self._board: Board | None = None
        self._losses: list[torch.Tensor] = []
        self._metrics: dict[str, float] = {}
        self._waiting: list[tuple[StepSpans, Any, LateMean | None, dict[str, Any]]] = []
        self._saving: list[dict[str, Any]] = []  # checkpoints of which no line says yet that they have their name
        self._owner = os.getpid()
        file = self._open(settings)
        self._listener, self._wraps = Listener(engine, self._clock), Wraps()
        engine._clock.events.append(self._after_metrics)
        self._metered = engine.update_metrics
        self._metered.observed = True
        # Loss and norm, which a record reads without a wait, say what is unusual, unless the metrics do.
        anomalies = engine._config.anomalies
        watches = settings.run and mesh.first and anomalies.enabled is None and not engine.monitor.enabled
        self._unusual = AnomalyWatch(anomalies.window) if watches else None
        if settings.run:
            self._record(file, settings)
        self._at_exit = functools.partial(_script_ends, weakref.ref(self))
        atexit.register(self._at_exit)
        self._open_window()

    def _open(self, settings: Any) -> RunFile | None:
        """Return the first rank's record; UsageError on all ranks where record or trace cannot be written."""
        file: RunFile | None = None
        fault: Exception | None = None
        try:
            if self._mesh.first and settings.trace:
                check_writable(settings.trace)
            if self._mesh.first and settings.run:
                file = RunFile(settings.run, start_facts(self._engine))
        except OSError as error:
            fault = UsageError(f"observe.trace {settings.trace!r} cannot be written: {error}. Name another file")
        except Exception as error:  # the others wait for the answer
            fault = error
        for text in failures(fault, self._mesh.talk).values():
            raise fault or UsageError(text)
        return file

    def _record(self, file: RunFile | None, settings: Any) -> None:
        engine, mesh, put = self._engine, self._mesh, self._wraps.put
        alone = mesh.job.size == 1 or mesh.job.alike
        self._board = Board(
            None if alone else job_channel(f"{mesh.name}/pace").apart(),
            rank=mesh.job.index,
            ranks=1 if alone else mesh.job.size,
            file=file,
            factor=settings.slow_factor,
            steps=settings.slow_steps,
            drive_bytes=lambda: sum(drive.used_bytes for drive in engine._parts.tiers.drives),
        )
        put(engine, "train_batch" if hasattr(engine, "_links") else "backward", self._hear_loss)
        put(engine, "save_checkpoint", self._timed_save)
        put(engine, "load_checkpoint", self._timed_load)
        put(engine.monitor, "write_events", self._hear_metrics)
        if file is not None:
            handler = logging.Handler(logging.WARNING)
            handler.emit = functools.partial(self._hear_warning, handler)  # type: ignore[method-assign]
            logger.addHandler(handler)
            self._wraps.on_close(logger.removeHandler, handler)

    def close(self, *, script_ends: bool = False) -> None:
        """Stop and pass on the last facts. ``script_ends`` without ``destroy``: alone, without a long device wait."""
        if self._engine is None or os.getpid() != self._owner:  # a fork is no rank
            return
        atexit.unregister(self._at_exit)
        self._wraps.close()
        self._engine._clock.events.remove(self._after_metrics)
        self._listener.close()
        self._metered.observed = False
        window = self._window
        if window is not None and window.begun and not window.over:
            if self._mesh.job.size == 1 and not script_ends:
                self._close_window(window)
            elif self._mesh.first:
                logger.warning(
                    "observe.trace: the engine ends after update %d, and the trace would have been written after %d: "
                    "there is none. Choose observe.steps within the run",
                    *(self._engine.global_steps, window.last),
                )
        if self._board is not None:
            if script_ends:
                self._await_device()
            self._pass_on(wait=not script_ends, last=True)
            self._pass_saving(last=True)
            error = getattr(sys, "last_value", None) if script_ends else None
            self._board.close(wait=not script_ends, error="" if error is None else type(error).__name__)
        self._engine = None

    def _await_device(self) -> None:
        """Wait a while for the device, then drop the updates that it has not passed."""
        end = time.monotonic() + _LAST_S
        while self._waiting and time.monotonic() < end:
            step, outcome, loss, _ = self._waiting[-1]
            if step.known() and outcome.known() and (loss is None or loss.known()):
                return
            time.sleep(0.01)
        self._waiting = [entry for entry in self._waiting if entry[0].known()]

    # -- what the engine does ---------------------------------------------------------------------------------------
    def _after_metrics(self, kind: str, _: object) -> None:
        if kind == METRICS:
            self._boundary()

    def _hear_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the loss: ``backward`` is given one; ``train_batch`` returns one, after the boundary."""
        batch, given = method.__name__ == "train_batch", args[0] if args else kwargs.get("loss")
        if not batch and isinstance(given, torch.Tensor) and given.numel() == 1:
            part = not (args[2] if len(args) > 2 else kwargs.get("scale_wrt_gas", True))  # the caller has divided it
            kept = self._losses if self._engine._backwards else []  # a window begins, perhaps anew
            self._losses = [sum(kept, given.detach())] if part else [*kept, given.detach()]
        result = method(*args, **kwargs)
        if batch:
            step, outcome, _, facts = self._waiting[-1]
            self._waiting[-1] = step, outcome, LateMean([result.detach()]), facts
        return result

    def _hear_metrics(self, method: Callable[..., Any], events: Any) -> Any:
        self._metrics |= {str(name): float(value) for name, value, _ in events}
        return method(events)

    def _hear_warning(self, handler: logging.Handler, record: logging.LogRecord) -> None:
        if self._board is None:
            return
        try:
            text = record.getMessage()
        except Exception:  # what does not fit its text: as any handler, which never ends who logs
            handler.handleError(record)
        else:
            where = f"{record.filename}:{record.lineno}"
            self._board.write("warning", level=record.levelname, text=text, where=where)

    def _timed_save(
        self, method: Callable[..., Any], save_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        self._pass_saving()
        begun, in_background = time.monotonic(), self._engine._config.checkpoint.in_background
        name = str(tag) if tag is not None else f"global_step{self._engine.global_steps}"
        before = _version_of(save_dir, name)
        result = method(save_dir, tag, *args, **kwargs)
        path = str(Path(save_dir).absolute() / name)
        saving = {"step": self._engine.global_steps, "path": path, "begun": begun, "before": before, "bytes": 0}
        self._saving.append(saving | {"seconds": time.monotonic() - begun, "in_background": in_background})
        self._pass_saving()
        return result

    def _pass_saving(self, *, last: bool = False) -> None:
        """Write a line for each checkpoint that has its name, and a warning for each whose save has failed."""
        board, running = self._board, self._engine._checkpoints.saver.running and not last
        while board is not None and len(self._saving) > running:  # one at a time: an earlier one is over
            saved = self._saving.pop(0)
            begun, before, path = saved.pop("begun"), saved.pop("before"), Path(saved["path"])
            if not self._mesh.first:
                continue
            if saved["in_background"] and _version_of(path.parent, path.name) == before:
                text = f"the checkpoint {path} was not saved: it has not got its name in the background"
                board.write("warning", level="WARNING", text=text, where="")
                continue
            with contextlib.suppress(OSError):
                saved["bytes"] = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            board.write("checkpoint", **saved, until_named_s=time.monotonic() - begun)

    def _timed_load(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        path, client = method(*args, **kwargs)
        if path is not None and self._board is not None:
            self._board.write("loaded", path=path, step=self._engine.global_steps, seconds=time.monotonic() - begun)
        return path, client

    # -- at the end of an update ------------------------------------------------------------------------------------
    def _boundary(self) -> None:
        step, window = self._listener.turn(), self._window
        step.number = self._engine.global_steps
        self._metered.steps.append(step)
        if self._board is not None:
            losses, self._losses = self._losses, []
            self._waiting.append(
                (step, self._engine._outcomes.last, LateMean(losses) if losses else None, self._facts())
            )
            self._pass_on()
            self._pass_saving()
            self._tell_of_slow()
        if window is not None and not window.over:
            if window.begun:
                window.add(step)
                if step.number >= window.last:
                    self._close_window(window)
            else:
                self._open_window()

    def _facts(self) -> dict[str, Any]:
        engine = self._engine
        facts = {"samples": engine.global_samples, "lr": next((group["lr"] for group in engine._groups()), None)}
        if engine.fp16_enabled() or engine.dynamic_loss_scale():
            facts["loss_scale"] = engine.loss_scale()
        return facts | ({"metrics": dict(self._metrics)} if self._metrics else {})

    def _pass_on(self, *, wait: bool = False, last: bool = False) -> None:
        """Give the board the updates whose facts are all known; ``wait`` until they are; ``last``: no more comes."""
        assert self._board is not None
        while self._waiting:
            step, outcome, loss, facts = self._waiting[0]
            late = len(self._waiting) > 1 or last  # a pipeline's loss comes after the boundary
            if not (late and outcome.known() and (loss is None or loss.known())) and not wait:
                return
            self._waiting.pop(0)
            norm, clip = outcome.norm, self._engine.gradient_clipping()
            facts["skipped"] = outcome.overflow
            if loss is not None:
                facts["loss"] = loss.read()
            if norm is not None:
                facts["grad_norm"] = float(norm)
                facts["grad_norm_clipped"] = min(float(norm), clip) if clip and math.isfinite(norm) else float(norm)
            self._board.put(step, facts)
            for text in self._unusual.look(step.number, loss=facts.get("loss"), norm=norm) if self._unusual else ():
                logger.warning("%s", text)

    def _tell_of_slow(self) -> None:
        board, engine = self._board, self._engine
        while board is not None and board.slow:
            slow = board.slow.popleft()
            if engine.monitor.enabled:
                pairs = (("slow_rank", slow.pace.rank), ("slow_rank_times_median", slow.times))
                events = [(f"Train/Samples/{name}", float(value), engine.global_samples) for name, value in pairs]
                engine.monitor.write_events(events)

    # -- the trace --------------------------------------------------------------------------------------------------
    def _open_window(self) -> None:
        """Begin the trace if the next update belongs to it. Collective then."""
        window, n = self._window, self._engine.global_steps + 1
        if window is None or n < window.first:
            if window is not None and n + 1 == window.first:
                self._listener.wake()  # for what the trace's first update waits for
            return
        window.begun = True
        window.offset = clock_offset(self._mesh.talk)
        self._listener.detail()
        window.base = self._clock.sync()
        self._listener.turn()
        if n > window.last:  # a run that goes on from a checkpoint
            text = "observe.trace: update %d comes next, later than observe.steps (%d to %d); that one is traced"
            logger.info(text, n, window.first, window.last)

    def _close_window(self, window: TraceWindow) -> None:
        """Write the trace. Collective."""
        window.over = True
        self._listener.less()
        get_accelerator().synchronize()
        mesh, offsets = self._mesh, (window.offset, clock_offset(self._mesh.talk))
        steps, window.steps = window.steps, []
        rows = [*rows_of(steps, self._clock, window.base, offsets)]
        title = mesh.title(mesh.job.ranks[mesh.job.index])
        try:
            write_trace(window.path, title, rows, mesh.talk, sum(step.left_out for step in steps))
        except OSError as error:
            logger.warning("observe.trace %s could not be written: %s", window.path, error)
        else:
            if mesh.first and steps:
                updates = f"updates {steps[0].number} to {steps[-1].number}"
                logger.info("the trace of %s is in %s; open it at https://ui.perfetto.dev", updates, window.path)
        self._listener.turn()


def _version_of(folder: Any, name: str) -> tuple[int, int] | None:
    """Return inode and time, which tell the folder ``name`` from a later one of that name; None where there is none."""
    with contextlib.suppress(OSError, TypeError, ValueError):
        status = (Path(folder) / name).stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _script_ends(observer: "weakref.ref[Observer]") -> None:
    """Close the observer of an engine that the script leaves to the interpreter."""
    if (live := observer()) is not None:
        live.close(script_ends=True)


def start_facts(engine: Any) -> dict[str, Any]:
    """Return the facts of the job (what runs where) for the first line of a record."""
    config, mesh, plan = engine._config, engine.mesh, engine.memory_plan()
    return {
        "version": __version__,
        "torch": torch.__version__,
        "model": type(engine.module).__name__,
        "parameters": sum(segment.numel for unit in engine.runtime.units for segment in unit.layout.segments),
        "units": len(engine.runtime.units),
        "ranks": mesh.job.size,
        "ways": {name: getattr(mesh, name).size for name in ("data", "tp", "pp")},
        "device": engine.device.type,
        "dtype": config.compute_dtype,
        "zero": engine.zero_optimization_stage(),
        "optimizer": engine.optimizer_name(),
        "batch": [engine.train_batch_size(), engine._micro, engine._gas],
        "step": engine.global_steps,
        "plan": {"device": plan.device, "host": plan.host, "drive": plan.drive},
        "places": engine.places(),
    }


def observe(engine: Any) -> None:
    """Start what the engine's configuration asks for in ``observe``, until the engine is destroyed. Collective.

    Raises UsageError where a file cannot be written.
    """
    settings = engine._config.observe
    if settings.trace or settings.run:
        engine._lasting.callback(Observer(engine).close)
