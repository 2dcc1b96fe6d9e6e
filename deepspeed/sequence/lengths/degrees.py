"""Sequences shared by 1, 2, 4, ... ranks at the same time: groups of each degree, and that of the micro-batch."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import group_over, plain_mesh
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.monitor.log import log_dist
from deepspeed.sequence.attention import PREFIX
from deepspeed.sequence.layout import Layout, codes_of, in_turn, joined, layout_of
from deepspeed.sequence.wire import Hooks, attach_attention, check, outermost


class DegreeGroups:
    """Groups of up to ``max_degree`` neighbouring ``ranks``, a power of 2 each, for the attention of ``model``, whose
    layers ``tp`` ranks share.

    ``current`` is the group of the micro-batch at hand, which ``BalancedLoader`` sets. A model of Transformers attends
    over it in training, inside each document; evaluation is left as it is. Another model has to attend by ``layout``.
    The groups are made once. Collective. Raises DeepSpeedConfigError for a model that cannot be divided.
    """

    def __init__(self, max_degree: int, model: nn.Module, ranks: AxisGroup, *, tp: int = 1) -> None:
        self.max_degree = min(max_degree, ranks.size)
        self._groups = {1: AxisGroup(None, 1, 0, (ranks.ranks[ranks.index],), "none")}
        self._back = ExitStack()
        degree = 2
        while degree <= self.max_degree:
            first = ranks.index // degree * degree
            members = ranks.ranks[first : first + degree]
            if len(members) == degree:
                world = plain_mesh(ranks.backend).job.pg
                assert world is not None
                pg = ranks.pg if degree == ranks.size else group_over(world, members)
                self._groups[degree] = plain_mesh(ranks.backend, group=pg).job
            degree *= 2
        self.current = self._groups[1]
        self.wired = self._attach(model, tp)

    def use(self, degree: int) -> None:
        """Let ``current`` be this rank's group of ``degree`` ranks, until the next call."""
        self.current = self._groups[degree]

    def layout(self, position_ids: torch.Tensor) -> Layout:
        """Return the cut of the current sequences, whose ``attend`` is attention, from this rank's positions
        [rows, tokens]. Collective over ``current``.
        """
        codes, group = codes_of(position_ids, None, len(position_ids)), self.current
        lengths = in_turn([position_ids.shape[1]], group, position_ids.device).view(-1).tolist()
        return layout_of(joined(codes, group, lengths), group, lengths)

    def detach(self) -> None:
        """Give the model its own attention back."""
        self._back.close()

    def _attach(self, model: nn.Module, tp: int) -> bool:
        tops = outermost(model)
        if any(str(top.config._attn_implementation).startswith(PREFIX) for top in tops):
            raise DeepSpeedConfigError(
                f"the attention of {type(tops[0]).__name__} is divided over ranks already: an engine has one "
                "BalancedLoader, and no UlyssesSPAttentionHF.register_with_transformers beside it"
            )
        for top in tops:
            check(top, self.max_degree, tp=tp)
            attach_attention(top, self._back)
            _HooksOfBatch(self).attach(top, self._back)
        if not tops:
            log_dist(
                f"{type(model).__name__} is no model of Transformers: its attention has to keep packed documents apart "
                "and to reach the other ranks by DegreeGroups.layout"
            )
        return bool(tops)


class _HooksOfBatch(Hooks):
    """Hooks that divide each forward over the group of its own micro-batch, which the loader has cut before."""

    def __init__(self, groups: DegreeGroups) -> None:
        super().__init__(groups.current, None, cuts=False, in_eval=False)
        self._groups = groups

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._group = self._groups.current
        return super()._before(module, args, kwargs)
