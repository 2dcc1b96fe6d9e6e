"""Weights of a running engine: whole, bucket by bucket, or into another layout of ranks. See docs/weights.md."""

from deepspeed.reallocate.exchange import ParameterReallocation
from deepspeed.reallocate.moves import ReallocationPlan, RegionTransfer, plan_reallocation

__all__ = ["ParameterReallocation", "ReallocationPlan", "RegionTransfer", "plan_reallocation"]
