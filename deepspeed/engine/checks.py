"""What keeps an engine from what a client asks for: looked at when a call begins, before anything changes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.comm import interrupts
from deepspeed.comm.collectives import AxisGroup, check_alike, failures, is_of_backend
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model.blocks import MonitorConfig
from deepspeed.config.model.settings import settings
from deepspeed.errors import FolderNameError, UsageError
from deepspeed.reallocate.flow import WeightFlow
from deepspeed.zero.hooks import inside_backward

# Blocks and keys that each rank may have for itself: what it logs and watches, and its own memory.
_OF_A_RANK = {
    *("aio", "comms_logger", "disable_python_gc", "dump_state", "hang_timeout", "log_level", "memory"),
    *("memory_breakdown", "steps_per_print", "timers", "wall_clock_breakdown"),
    *MonitorConfig.model_fields,
}


def check_same_config(cfg: DeepSpeedConfig, job: AxisGroup) -> None:
    """Raise DivergenceError unless the keys that matter to all are the same on all ranks, but for paths. Collective."""
    shared = [item for item in settings(cfg) if item.path.partition(".")[0] not in _OF_A_RANK]
    entries = [f"{item.path} {item.value!r}" for item in shared if "/" not in str(item.value)]
    check_alike("were given different configurations", entries, job, "Pass the same one on every rank")


class Checks:
    """States of ``engine``, a DeepSpeedEngine, in which it refuses calls."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._runtime = engine, engine.runtime
        self.destroyed = False
        self.torn = ""  # why parameters are of two states
        self.lent = self.params_lent = False  # states are away (``offload_states``), parameters among them
        self.generating = False  # inside unsharded()
        self.open_flow: Callable[[], WeightFlow | None] = lambda: None  # a stream of weights
        # A launcher that has started the script anew after it had saved says so.
        self.must_load = os.environ.get("DS_ELASTIC_SAVED", "")

    def lives(self) -> None:
        """Raise UsageError where the engine was destroyed."""
        if self.destroyed:
            raise UsageError("this engine was destroyed; call deepspeed.initialize again")

    def alive(self, *, alone: bool = True, params: bool = True) -> None:
        """Raise UsageError where the engine cannot go on. Without ``alone``: not for what the caller lets all ranks
        hear of (``begin_collective``). Without ``params`` parameters may be away.
        """
        self.lives()
        interrupts.at_door()
        self.end_flow()
        self._engine._forget_failed_backward()
        self._runtime.failures.check()
        if self.torn:
            raise UsageError(f"{self.torn}, so the engine holds parts of two states; load a checkpoint that is whole")
        if params and self.params_lent:
            self.states_here()
        self._runtime.update.check(alone=alone)

    def states_here(self) -> None:
        """Raise UsageError where states are away."""
        if self.lent:
            raise UsageError("states were moved away by offload_states(); call engine.reload_states() first")

    def folder(self, given: object, call: str) -> Path:
        """Return ``given``, a client's argument of ``call``, as a path. Raises FolderNameError unless it is one."""
        if not isinstance(given, str | os.PathLike) or not str(given):
            raise FolderNameError(f"{call} needs a folder, as a str or a pathlib.Path, and got {given!r}")
        return Path(given)

    def between_passes(self, call: str) -> None:
        """Raise UsageError, which names ``call``, inside a forward or backward; take in the outcome of updates."""
        if self._runtime.depth or self._runtime.in_backward or inside_backward():
            raise UsageError(f"{call}() was called inside a forward or backward of the model; call it between steps")
        self._engine._outcomes.hear()  # so that what an update came to is known, and a schedule stands where it belongs

    def publish(self, call: str) -> None:
        """Bring PARAM up to a late update. UsageError, on all ranks, where a backward is to come on one. Collective."""
        update, mesh = self._runtime.update, self._runtime.mesh
        if update.unpublished:
            fault = self._engine._parts.hooks.refuse(f"{call}()", "the engine")
            for rank, text in failures(fault, mesh.job).items():
                raise fault or UsageError(f"{mesh.title(rank)}: {text}")
        update.publish()

    def ready(self, training: str = "") -> None:
        """Raise UsageError if a client's call cannot be followed; ``training`` names one that needs an optimizer."""
        self.lives()
        worker = self._runtime.worker
        if worker is not None and worker.failure is not None and not worker.announced:
            self._engine._recover(worker.failure)  # the others wait for this rank
        self.alive()
        if not training:
            return
        self.states_here()
        if self.must_load:
            raise UsageError(
                f"this job has saved {self.must_load} and was started again, and the script trains without having "
                "loaded a checkpoint: it would repeat samples. Call deepspeed.elasticity.take_part(engine, folder), or "
                "engine.load_checkpoint(folder), before the first step"
            )
        if self.generating:
            raise UsageError(f"{training} was called inside unsharded(); leave the context first")
        if self._engine.basic_optimizer is None:
            raise UsageError(f"{training} needs an optimizer: pass one to deepspeed.initialize, or configure one")

    def begin_collective(self) -> None:
        """Begin a collective call of the client: all ranks raise if an update on any of them has failed."""
        try:
            self._runtime.update.wait_together()
        except RuntimeError as error:  # a rank that is gone, or in another call, may have said why
            if not self._runtime.failures.broken and is_of_backend(error):
                self._engine._recover(error)
            raise

    def may_compile(self, options: dict[str, Any], *, absent: bool) -> None:
        """Raise UsageError for what is ``absent``, inside a pass, or for CUDA graphs over parameters that move."""
        self.alive()
        if absent:
            raise UsageError("engine.compile: schedule and compiled_autograd_enabled are not in this release")
        self.between_passes("engine.compile")
        graphs = (options.get("options") or {}).get("triton.cudagraphs")
        captures = graphs or options.get("mode") in ("reduce-overhead", "max-autotune")
        if captures and any(unit.movable for unit in self._runtime.units):
            raise UsageError(
                f"engine.compile(compile_kwargs={options}) captures CUDA graphs, which need parameters that stay where "
                "they are, and under this configuration they are sharded or offloaded; use another mode "
                "('max-autotune-no-cudagraphs', 'default') or a stage below 3"
            )

    def end_flow(self) -> None:
        """End a stream of weights that was left open."""
        flow = self.open_flow()
        if flow is not None:
            flow.close("it has left the loop and called the engine", cut=True)
