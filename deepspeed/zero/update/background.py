"""The update behind the program: what rests on the host, and is no matter of other ranks, is left to a thread."""

import torch

from deepspeed.optim.host import Scalar
from deepspeed.tier.behind import Turn
from deepspeed.zero.publish import Publication
from deepspeed.zero.update.apply import Groups
from deepspeed.zero.update.inline import InlineUpdate, Part
from deepspeed.zero.update.policy import Host


class BackgroundUpdate(InlineUpdate):
    """Units whose PARAM only this rank publishes are updated by the worker, each as soon as its gradient is there; the
    others, which other ranks wait for, within the step before.
    """

    def __init__(self, host: Host, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(host, optimizer)
        self._turns: list[Turn] = []

    def begin(self) -> None:
        """Wait for the last update, whose masters this one begins with."""
        for turn in self._turns:
            turn.wait()
        self._turns.clear()
        super().begin()

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
