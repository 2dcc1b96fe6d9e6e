"""The update within the step: everything at once, or, where states rest on the host, unit by unit; and the update in
the background, where the last of these are left to a thread.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from deepspeed.comm import collectives
from deepspeed.errors import UsageError
from deepspeed.optim.base import GroupStep
from deepspeed.optim.host import Scalar
from deepspeed.tier.behind import Turn
from deepspeed.zero.layout import Granularity
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.apply import Groups, apply_to_part, apply_whole, captured_groups, frozen_since
from deepspeed.zero.update.policy import Step, UpdateHost, UpdatePolicy
from deepspeed.zero.update.publish import Publication

Part = tuple[Unit | None, list[OptimView]]  # the views of a unit on the host, or those of several on the device


class InlineUpdate(UpdatePolicy):
    """Update within the step, on the host unit by unit in the order of the forward: new weights travel to the device
    and to other ranks beside the update of the next unit.
    """

    def __init__(self, host: UpdateHost, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(host, optimizer)
        rows = [unit.plan.optim for unit in host.units if unit.plan.optim is not None]
        offloaded = host.device.type == "cpu" or any(row.away for row in rows)
        self._leads = not offloaded and getattr(type(optimizer), "heeds_skip", False)
        self._compares = not (isinstance(optimizer, GroupStep) or host.mesh.zero.alike) and any(
            u.layout.shards > 1 and u.layout.granularity is Granularity.PARAMETER for u in host.units
        )

    def launches_ahead(self) -> bool:
        """Tell whether updates run on the device and heed ``skip``; rank-local views and hooks do not count."""
        return self._leads

    def apply(self, step: Step) -> None:
        """Update and publish. Later readers of states wait for worker turns, and for masters on their way up."""
        publication = self.host.publication(step.units)
        before = self._numbers() if self._compares and self.host.steps % 100 in (1, 2) else None
        try:
            publication.finish(self._update_or_serve(step, publication))
        finally:
            self.pending = self.host.worker is not None
            if before is not None:  # after an error, too: the other ranks know nothing of it
                self._compare(before)

    def _numbers(self) -> dict[tuple[int, str], str]:
        """Return the numbers of the optimizer's groups, by index and key."""
        items = ((i, key, value) for i, group in enumerate(self.optimizer.param_groups) for key, value in group.items())
        kinds = (int, float, torch.Tensor)
        return {(i, k): float(v).hex() for i, k, v in items if isinstance(v, kinds) and torch.as_tensor(v).numel() == 1}

    def _compare(self, before: dict[tuple[int, str], str]) -> None:
        """Raise UsageError, on all ranks, where a number that the step has changed differs between ranks: it is of all
        parameters, of which each rank has a part. Collective.
        """
        changed, first = dict(self._numbers().items() - before.items()), dict[tuple[int, str], str]()
        for theirs in collectives.gather_objects(changed, self.host.mesh.zero):
            for (index, key), value in theirs.items():
                if first.setdefault((index, key), value) != value:
                    raise UsageError(
                        f"{type(self.optimizer).__name__} keeps {key} of group {index} over all parameters, of which "
                        "each rank updates a part; use zero_optimization.stage 0, or another optimizer"
                    )

    def _update_or_serve(self, step: Step, publication: Publication) -> list[OptimView]:
        """Update; on an error the other ranks, which know nothing of it, get the publication."""
        try:
            if step.failure is not None:
                raise step.failure
            return self._update(step, publication)
        except Exception:
            with contextlib.suppress(Exception):
                publication.finish()
            raise

    def _update(self, step: Step, publication: Publication) -> list[OptimView]:
        """Apply the rule to all views; return those with PARAM written that ``publication`` does not know of."""
        skip = step.skip
        if skip is not None and not self.optimizer.skips_alone():  # a hook of the user's
            if skip.item():
                return []
            skip = None
        parts = self._parts(step.views)
        if not parts:
            return self._update_all(step.views, step.factor, skip)
        groups = captured_groups(self.optimizer)
        self.optimizer.step()  # without gradients: whoever counts steps, as schedules do, sees one
        self._update_parts(parts, groups, step.factor, publication)
        return []

    def _parts(self, views: Sequence[OptimView]) -> list[Part]:
        """Group views to update in turn; none where all is on the device, or a user's hook watches the step."""
        homes = [view.unit if view.unit.plan.of(StateKind.OPTIM).away else None for view in views]
        if not any(homes) or not isinstance(self.optimizer, GroupStep) or not self.optimizer.undisturbed():
            return []
        pairs = zip(homes, views, strict=True)
        return [(unit, [view for _, view in group]) for unit, group in itertools.groupby(pairs, lambda pair: pair[0])]

    def _update_all(self, views: Sequence[OptimView], factor: Scalar, skip: torch.Tensor | None) -> list[OptimView]:
        return apply_whole(self.optimizer, views, factor, skip=skip)

    def _update_parts(self, parts: list[Part], groups: Groups, factor: Scalar, publication: Publication) -> None:
        for unit, views in parts:
            with self._states_of(views):
                written = self._part_update(views, groups, factor)()
            publication.through(unit, written)

    def _part_update(self, views: list[OptimView], groups: Groups, factor: Scalar) -> Callable[[], list[OptimView]]:
        """Return a callable that updates ``views`` with the settings and frozen parameters of now."""
        frozen = frozen_since(views)
        return functools.partial(apply_to_part, self.optimizer, views, groups, factor, frozen=frozen)

    @contextlib.contextmanager
    def _states_of(self, views: Sequence[OptimView]) -> Iterator[None]:
        """Keep the states of ``views``, inside the context, where they are updated."""
        yield


class BackgroundUpdate(InlineUpdate):
    """Update by the worker for units whose PARAM only this rank publishes, each as soon as its gradient is there; the
    others, which other ranks wait for, are updated within the step before.
    """

    def __init__(self, host: UpdateHost, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(host, optimizer)
        self._turns: list[Turn] = []

    def begin_step(self) -> None:
        """Wait for the last update, whose masters this one begins with."""
        for turn in self._turns:
            turn.wait()
        self._turns.clear()
        super().begin_step()

    def _update_parts(self, parts: list[Part], groups: Groups, factor: Scalar, publication: Publication) -> None:
        worker = self.host.worker
        if worker is None or not self.optimizer.scales_on_host():
            super()._update_parts(parts, groups, factor, publication)
            return
        within: list[Part] = []
        later: list[Part] = []
        for part in parts:
            (later if part[0] is not None and publication.leave_out(part[0]) else within).append(part)
        super()._update_parts(within, groups, factor, publication)
        for unit, views in later:
            assert unit is not None
            self._turns.append(publication.leave_to(worker, unit, self._part_update(views, groups, factor)))
