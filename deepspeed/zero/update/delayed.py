"""The one-step delayed parameter update (ZeRO-Offload, Ren et al. 2021): an update goes on beside the next forward and
backward, which compute with the weights from before it.

With w_t the weights of forward t and m_t the masters: g_t = gradient at w_t; m_{t+1} = rule(m_t, g_t); w_{t+1} = m_t.
Whoever reads a state waits for the update; ``publish`` makes the weights those of the masters before their time.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed.errors import UsageError
from deepspeed.optim.base import GroupStep
from deepspeed.tier.store import TierStore
from deepspeed.tier.transfer import ARRIVED, Several, Transfer
from deepspeed.zero.failures import settle_together
from deepspeed.zero.layout import Segment
from deepspeed.zero.optim_view import OptimView, captured_groups, run_step
from deepspeed.zero.publish import Publication
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.standing import frozen_later

if TYPE_CHECKING:
    from deepspeed.zero.runtime import Runtime


@dataclass
class Begun:
    """The update of one unit, its gradient in ``store``. ``rounded``: whose rounded weights are there, by version."""

    unit: Unit
    store: TierStore
    rounded: list[tuple[OptimView, int]]
    turn: Transfer = ARRIVED

    @property
    def written(self) -> list[OptimView]:
        """Those whose master nobody has written to since."""
        return [view for view, version in self.rounded if view.param._version == version]


class Delayed:
    """Of one engine, from its update number ``first`` (from 1) on."""

    def __init__(self, runtime: "Runtime", optimizer: GroupStep, *, first: int) -> None:
        self._runtime, self._optimizer, self._first = runtime, optimizer, first
        runtime.catch_up = self.publish
        self._begun: list[Begun] = []
        self._pending = False  # an update has begun on some rank: one with few elements may have no view of its own
        self._spare: dict[Unit, TierStore] = {}  # memory of the last gradients but one

    def applies(self) -> bool:
        """Whether the update that begins is delayed: not the first ones of a training. The same answer on all ranks."""
        return bool(self._runtime.client().global_steps + 1 >= self._first)

    def step(self, views: Sequence[OptimView], factor: float, *, failure: Exception | None) -> None:
        """Publish what the last call has begun, and begin the update of ``views`` by their gradients times ``factor``;
        after a ``failure`` raise that, when the other ranks have what they wait for. Code of the user's that watches
        the optimizer, on this rank alone maybe, gets one call with all gradients, for which the program waits.
        """
        gradients = {view.unit: view.unit.landed for view in views}
        self._publish()
        if failure is not None:
            raise failure
        undisturbed, groups = self._optimizer.undisturbed(), captured_groups(self._optimizer)
        if undisturbed:
            self._optimizer.step()  # without gradients: whoever counts steps, as schedules do, sees one
        calls, self._pending = [], True
        for unit, those in itertools.groupby(views, lambda view: view.unit):
            store = unit.exchange_gradient_store(self._spare.pop(unit, None))
            assert store is not None, "a step comes with gradients"
            self._begun.append(begun := Begun(unit, store, []))
            # behind the gradient masters that are published: in fp32 the device copies these
            first, mine = unit.landed.wait, list(those)
            calls.append(self._turn_of(begun, mine, groups, factor, first=first, frozen=frozen_later(mine)))
        worker = self._runtime.worker
        if not undisturbed:
            Several([unit.landed for unit in gradients]).wait()
            self._update(self._begun, views, self._optimizer.step, factor)
        for begun, call in zip(self._begun, calls, strict=True) if undisturbed else ():
            if worker is not None:
                begun.turn = worker.hand_over(call, place=begun.unit.index, after=gradients[begun.unit])
                begun.unit.delay_update(begun.turn)
            else:
                call()
        if any(unit.movable and unit.pins for unit in self._runtime.units):
            self.publish()  # into a context of the user's, whose edits would else be made to what is old

    def _update(
        self,
        begun: Sequence[Begun],
        views: Sequence[OptimView],
        step: Callable[[], object],
        factor: float,
        *,
        frozen: dict[Unit, list[Segment]] | None = None,
    ) -> None:
        apart = {each.unit: each.store for each in begun}
        written = run_step(self._optimizer, [*views], step, factor, frozen=frozen, apart=apart)
        for each in begun:
            each.rounded += [(view, view.param._version) for view in written if view.unit is each.unit]

    def _turn_of(
        self,
        begun: Begun,
        views: list[OptimView],
        groups: list[dict[str, Any]],
        factor: float,
        *,
        first: Callable[[], object],
        frozen: dict[Unit, list[Segment]],
    ) -> Callable[[], Transfer]:
        """The update of one unit with the settings ``groups``, after a call of ``first``."""
        mine = [group | {"params": [v.param for v in views if v.group == i]} for i, group in enumerate(groups)]
        step = functools.partial(self._optimizer.update, mine)

        def turn() -> Transfer:
            first()
            self._update([begun], views, step, factor, frozen=frozen)
            return ARRIVED

        return turn

    def settle(self) -> None:
        """Until the masters and slots are there."""
        Several([begun.turn for begun in self._begun]).wait()

    def publish(self) -> None:
        """The weights become those of the masters. Collective if an update has begun; UsageError if it failed."""
        runtime = self._runtime
        if not self._pending:
            return
        try:
            settle_together(runtime.worker, self.settle, runtime.mesh)
        except UsageError:  # no rank can go on
            self._begun.clear()
            self._pending = False
            raise
        self._publish()

    def _publish(self) -> None:
        self.settle()
        begun, self._begun = self._begun, []
        if not self._pending:
            return
        self._pending = False
        # what is rounded lies in its memory
        kept = [(each, each.unit.exchange_gradient_store(each.store)) for each in begun]
        try:
            self._publication().finish([view for each in begun for view in each.written])
        finally:
            for each, store in kept:
                each.unit.exchange_gradient_store(store)
                self._take_back(each)

    def _publication(self) -> Publication:
        return self._runtime.publication([unit for unit in self._runtime.units if unit.trainable])

    def _take_back(self, begun: Begun) -> None:
        """The memory of one that is published."""
        self._spare[begun.unit] = begun.store

    def come_home(self) -> None:
        """Let all masters and slots be where they rest."""
        self._runtime.settle()

    def left_out(self) -> None:
        """A step that changes nothing: collective."""
        self.publish()

    def restart(self) -> None:
        """All states are about to be others. Collective."""
        self.come_home()

    def forget(self) -> None:
        """What has begun, and ended, is overwritten."""
        for each in self._begun:
            self._take_back(each)
        self._begun.clear()
        self._pending = False
