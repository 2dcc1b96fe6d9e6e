"""How and when the optimizer's rule changes the units of one engine: the protocol, and its smallest case.

The runtime has one policy and calls it at fixed points of an iteration; it knows none by name. States that an update
reads or writes after ``apply`` has returned are noted on their units (``Unit.note_pending``), so that everybody else
waits at one door, ``Unit.wait``.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from deepspeed.comm import collectives
from deepspeed.comm.collectives import AxisGroup, SideStream
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.errors import OptimizerConfigError, UsageError
from deepspeed.optim.base import GroupStep
from deepspeed.optim.host import Scalar
from deepspeed.tier.behind import Worker
from deepspeed.tier.store import TierStore
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import StateKind
from deepspeed.zero.sync.failures import Failures
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.publish import Publication


class UpdateHost(Protocol):
    """Protocol of the runtime, as far as a policy needs it."""

    units: list[Unit]
    mesh: Mesh
    device: torch.device
    up: SideStream
    worker: Worker | None
    failures: Failures
    gradients: Gradients
    steps: int

    def publication(self, units: list[Unit], **how: Any) -> Publication: ...


@dataclass
class Step:
    """Update of ``units``, by their gradients times ``factor``. ``views``: the optimizer's views of them.

    ``failure``: an error on this rank before the update, which is raised when the other ranks have what they wait for.
    ``skip``: a number on the device; nothing changes where it is not 0.
    """

    views: Sequence[OptimView]
    units: list[Unit]
    factor: Scalar
    failure: Exception | None = None
    skip: torch.Tensor | None = None


class UpdatePolicy:
    """Base of policies, and the policy of an engine without an optimizer: it updates nothing."""

    refuses_writes = False  # whether a client's write to a parameter in place would be lost
    swaps_memory = False  # whether an update may put states into other memory
    unpublished = False  # an update has begun on some rank, maybe not here, and PARAM is from before it
    further_slots = ""  # what the names of further slots begin with, which it keeps in the optimizer's state

    def __init__(self, host: UpdateHost, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.host, self.optimizer = host, cast(Any, optimizer)
        if isinstance(optimizer, GroupStep):  # who looks at its state waits for an update
            wait = weakref.WeakMethod(self.wait)
            optimizer.before_looking = functools.partial(_call, wait)
        self._agreed: dict[tuple[object, ...], object] = {}  # what all ranks know to be there, of which update
        self.pending = False  # somebody may have to wait

    # -- one update ------------------------------------------------------------------------------------------------
    def begin_backward(self, loss_scale: float) -> None:
        """Begin a backward, whose gradients are multiplied by ``loss_scale``."""

    def gradient_sent(self, unit: Unit, grad: torch.Tensor) -> None:
        """Note that ``grad``, reduced, travels from the device to the host, on the current stream."""

    def gradient_ready(self, unit: Unit) -> None:
        """Note that the window's last gradient of ``unit`` is reduced, or on its way to where it rests."""

    def begin_step(self) -> None:
        """Begin a step: wait for earlier updates, as far as this one meets them."""
        self.pending = False

    def left_out(self) -> None:
        """Note that the step changes nothing, as a gradient is not finite. Collective."""

    def apply(self, step: Step) -> None:
        """Update ``step.units`` and publish PARAM, now or behind the program. Collective."""

    def launches_ahead(self) -> bool:
        """Tell whether the update may be launched before the norm is known, as its kernels can leave it out. Equal on
        all ranks.
        """
        return False

    # -- whoever reads or writes states ------------------------------------------------------------------------------
    def wait(self) -> None:
        """Wait until every state of every unit may be read and written. UsageError where an update has failed."""
        worker = self.host.worker
        if self.pending and not (worker is not None and worker.inside()):
            for unit in self.host.units:
                unit.wait(StateKind.OPTIM, write=True)
            self.pending = False

    def wait_together(
        self, *, units: Collection[Unit] = (), groups: Sequence[AxisGroup] = (), once: tuple[object, ...] = ()
    ) -> None:
        """Wait, for PARAM of ``units`` (none: for everything), so that no rank waits in a collective that follows.

        Collective over ``groups``, one after the other (none: all ranks): what has failed on one rank is a UsageError
        on all, which names it. ``once``: what for; until the next update the ranks are not asked for it again.
        """
        worker = self.host.worker
        if worker is None and once or (once and self._agreed.get(once) == self.host.steps):
            return
        fault: Exception | None = None
        try:
            for unit in units:
                unit.wait(StateKind.PARAM)
            if not units:
                self.wait()
            self.check()
        except Exception as error:
            fault = error
        named = fault
        mesh = self.host.mesh
        for group in groups or (mesh.job,):
            for rank, text in collectives.failures(named, group).items():
                named = named or UsageError(f"on {mesh.title(rank)}: {text}")
        if named is None:
            self._agreed |= {once: self.host.steps} if once else {}
        elif worker is None:
            raise named
        else:
            worker.fail_everywhere(named)

    def check(self, *, alone: bool = True) -> None:
        """Raise UsageError where an earlier update has failed half way; without ``alone`` not for one in the
        background, of which the caller lets all ranks hear.
        """
        if self.host.worker is not None and alone:
            self.host.worker.check()

    def publish(self) -> None:
        """Bring PARAM up to the masters, where it comes later. Collective then."""

    def collective(self) -> bool:
        """Tell whether ``publish`` may have work to do, on some rank."""
        return False

    def restart(self) -> None:
        """Restart with all states kept; those that the policy keeps beside them go where a checkpoint expects them."""

    def end_updates(self) -> None:
        """Wait until every update has ended, with or without an error, and forget what has failed."""
        if self.host.worker is not None:
            self.host.worker.forget()
            for unit in self.host.units:
                unit.forget_pending()
        self._agreed.clear()

    def forget(self) -> None:
        """Forget updates under way, as all states are about to be overwritten."""

    def close(self) -> None:
        """End with the engine."""
        if isinstance(self.optimizer, GroupStep):
            self.optimizer.before_looking = None

    def runs_late(self, unit: Unit) -> bool:
        """Tell whether ``unit`` may be updated while the program goes on."""
        return self.host.worker is not None and unit.plan.optim is not None and unit.plan.optim.away

    # -- states on a drive ---------------------------------------------------------------------------------------------
    def attached(self, view: OptimView, *, write: bool = False, publish: bool = False) -> AbstractContextManager[None]:
        """Hold weights and slots of ``view`` in memory inside the context; with ``write`` store them at the end."""
        return contextlib.nullcontext()

    def region_of(self, view: OptimView) -> tuple[TierStore | None, dict[str, int]]:
        """Return the store of the slots of ``view`` besides the optimizer's state, and each slot's first byte."""
        return None, {}

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Let the optimizer's own state_dict and load_state_dict work inside the context."""
        yield

    def adopt_state(self) -> None:
        """Bring slots that the optimizer has made, or loaded, to where they rest."""


def require_ours(key: str, optimizer: Any) -> None:
    """Raise OptimizerConfigError where ``optimizer`` is not of this package, which the setting ``key`` needs."""
    if not isinstance(optimizer, GroupStep):
        raise OptimizerConfigError(
            f"zero_optimization.offload_optimizer.{key} needs an optimizer of this package (AdamW, Lion, Adagrad, Lamb "
            f"by name in the configuration), not {type(optimizer).__name__}; remove it, or use one of these"
        )


def _call(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    bound = method()
    if bound is not None:
        bound()
