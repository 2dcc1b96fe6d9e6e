"""Updates of host units that go on beside later steps, and whose weights are published later still."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepspeed.errors import UsageError
from deepspeed.optim.base import GroupStep
from deepspeed.optim.host import Scalar
from deepspeed.tier.store import TierStore
from deepspeed.tier.transfer import ARRIVED, Several, Transfer
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.apply import Frozen, Groups, apply_to_part, apply_whole
from deepspeed.zero.update.inline import BackgroundUpdate
from deepspeed.zero.update.policy import Step, UpdateHost
from deepspeed.zero.update.publish import Publication


@dataclass
class Begun:
    """Update of one unit that has begun, with its gradient in ``store``. ``after``: the end of writes to that and of
    reads of the masters, as in fp32 the device copies these. ``rounded``: views whose rounded weights lie behind the
    gradient, each with the version of its master.
    """

    unit: Unit
    store: TierStore
    after: Transfer
    turn: Transfer = ARRIVED
    rounded: list[tuple[OptimView, int]] = field(default_factory=list)

    @property
    def written(self) -> list[OptimView]:
        """Return the views whose master nobody has written to since."""
        return [view for view, version in self.rounded if view.param._version == version]

    def note_rounded(self, views: Sequence[OptimView]) -> None:
        """Note that the weights of ``views`` are rounded."""
        self.rounded += [(view, view.param._version) for view in views]


class LateUpdate(BackgroundUpdate):
    """Base of late policies: updates that have begun, each with its gradient, and their publication."""

    refuses_writes = True

    def __init__(self, host: UpdateHost, optimizer: GroupStep) -> None:
        super().__init__(host, optimizer)
        self._begun: list[Begun] = []
        self._spare: dict[Unit, TierStore] = {}  # memory of the last gradients but one

    def begin_step(self) -> None:
        self._until_ended()
        super().begin_step()

    def _start(self, begun: Begun, turn: Callable[[], Transfer], *, after: Transfer) -> None:
        """Hand ``turn`` for the unit to the worker, or call it now where there is none."""
        unit, worker = begun.unit, self.host.worker
        if worker is None:
            turn()
            return
        begun.turn = worker.hand_over(turn, place=unit.index, after=after)
        unit.note_pending(begun.turn, writes=(StateKind.OPTIM,))
        self.pending = True

    def _turn_of(
        self,
        begun: Begun,
        views: list[OptimView],
        groups: Groups,
        factor: Scalar,
        *,
        frozen: Frozen,
        first: Callable[[], object] = lambda: None,
    ) -> Callable[[], Transfer]:
        """Return a callable that updates one unit, after a call of ``first``."""

        def turn() -> Transfer:
            begun.after.wait()
            first()
            places = {begun.unit: begun.store}
            written = apply_to_part(self.optimizer, views, groups, factor, frozen=frozen, apart=places)
            begun.note_rounded(written)
            return ARRIVED

        return turn

    def _update_watched(self, step: Step, factor: Scalar, frozen: Frozen | None = None) -> None:
        """Call the optimizer's own ``step`` once, over all updates that have begun."""
        Several([begun.after for begun in self._begun]).wait()
        apart = {begun.unit: begun.store for begun in self._begun}
        written = apply_whole(self.optimizer, step.views, factor, frozen=frozen, apart=apart)
        for begun in self._begun:
            begun.note_rounded([view for view in written if view.unit is begun.unit])

    def _publish_into_contexts(self) -> None:
        """Publish into contexts of the user's, whose edits would else be made to stale values."""
        if any(unit.movable and unit.pins for unit in self.host.units):
            self.publish()

    def _until_ended(self) -> None:
        """Wait for the masters and slots."""
        Several([begun.turn for begun in self._begun]).wait()

    def publish(self) -> None:
        """Implement ``UpdatePolicy.publish``. UsageError on all ranks where the update has failed on one."""
        if not self.unpublished:
            return
        try:
            self.wait_together()
        except UsageError:  # no rank can go on
            self._begun.clear()
            self.unpublished = False
            raise
        self._publish()
        self.pending = self.host.worker is not None  # masters are copied to the device

    def _publish(self) -> None:
        self._until_ended()
        begun, self._begun = self._begun, []
        if not self.unpublished:
            return
        self.unpublished = False
        # What is rounded lies in the memory of the gradients.
        kept = [(update, update.unit.exchange_gradient_store(update.store)) for update in begun]
        try:
            self._publication().finish([view for update in begun for view in update.written])
        finally:
            for update, store in kept:
                update.unit.exchange_gradient_store(store)
                self._take_back(update)

    def _publication(self) -> Publication:
        return self.host.publication([unit for unit in self.host.units if unit.trainable])

    def _take_back(self, begun: Begun) -> None:
        """Keep the gradient memory of a published update."""
        self._spare[begun.unit] = begun.store

    def collective(self) -> bool:
        return True

    def left_out(self) -> None:
        self.publish()

    def restart(self) -> None:
        self.wait()

    def forget(self) -> None:
        super().forget()
        for update in self._begun:
            self._take_back(update)
        self._begun.clear()
        self.unpublished = False
