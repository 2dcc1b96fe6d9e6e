"""Weights from one layout of ranks to another, by one planned exchange of bytes. See docs/weights.md."""

from deepspeed.reallocate.exchange import ParameterReallocation
from deepspeed.reallocate.moves import ReallocationPlan, RegionTransfer, plan_reallocation

__all__ = ["ParameterReallocation", "ReallocationPlan", "RegionTransfer", "plan_reallocation"]
