"""The one-step delayed parameter update (ZeRO-Offload, Ren et al. 2021): an update goes on beside the next forward and
backward, which compute with the weights from before it.

With w_t the weights of forward t and m_t the masters: g_t = gradient at w_t; m_{t+1} = rule(m_t, g_t); w_{t+1} = m_t.
Whoever reads a state waits for the update; ``publish`` makes the weights those of the masters before their time.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from deepspeed.config import DeepSpeedConfig
from deepspeed.optim.base import GroupStep
from deepspeed.tier.transfer import Several
from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import StateKind, UpdateSettings
from deepspeed.zero.update.apply import captured_groups, frozen_since
from deepspeed.zero.update.late import Begun, LateUpdate
from deepspeed.zero.update.policy import Step, UpdateHost, require_ours


@dataclass(frozen=True)
class DelayedSettings(UpdateSettings):
    """Settings of ``offload_optimizer.delayed_update``, from update number ``first`` (from 1) on."""

    first: int
    masters_apart = True

    @property
    def gradient_copies(self) -> int:
        return 2

    def check(self, optimizer: Any, mesh: Any) -> None:
        require_ours("delayed_update", optimizer)


def settings_of(config: DeepSpeedConfig) -> DelayedSettings | None:
    """Return the settings, where the configuration asks for them, or None."""
    optim = config.zero.offload_optimizer
    if optim is None or not optim.delayed_update:
        return None
    return DelayedSettings(first=1 + int(optim.delayed_update_warm_up))


def policy_of(host: UpdateHost, optimizer: Any, settings: DelayedSettings, tiers: Tiers) -> "DelayedUpdate":
    """Return the policy of an engine with these settings."""
    return DelayedUpdate(host, optimizer, first=settings.first)


class DelayedUpdate(LateUpdate):
    """Delayed update of one engine, from update number ``first`` (from 1) on; earlier updates are ordinary ones."""

    def __init__(self, host: UpdateHost, optimizer: GroupStep, *, first: int) -> None:
        super().__init__(host, optimizer)
        self._first = first

    def apply(self, step: Step) -> None:
        """Publish the update that the last call has begun, and begin this one. Code of the user's that watches the
        optimizer, maybe on this rank alone, gets one call with all gradients, for which the program waits.
        """
        if self.host.steps < self._first:
            super().apply(step)
            return
        landing = {view.unit: view.unit.pending.until(StateKind.GRAD) for view in step.views}
        self._publish()
        if step.failure is not None:
            raise step.failure
        undisturbed, groups = self.optimizer.undisturbed(), captured_groups(self.optimizer)
        self.unpublished = True
        units: list[tuple[Begun, list[OptimView]]] = []
        for unit, unit_views in itertools.groupby(step.views, lambda view: view.unit):
            store = unit.exchange_gradient_store(self._spare.pop(unit, None))
            assert store is not None, "a step comes with gradients"
            after = Several([landing[unit], unit.pending.until(StateKind.OPTIM, write=True)])
            units.append((Begun(unit, store, after), list(unit_views)))
        self._begun += [begun for begun, _ in units]
        if not undisturbed:
            self._update_watched(step, step.factor)
        else:
            self.optimizer.step()  # without gradients: whoever counts steps, as schedules do, sees one
            for begun, views in units:
                turn = self._turn_of(begun, views, groups, step.factor, frozen=frozen_since(views))
                self._start(begun, turn, after=landing[begun.unit])
        self._publish_into_contexts()
