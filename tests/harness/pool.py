"""The worker pool of the tests is the one that ``ds_verify`` ships."""

from deepspeed.verify.ranks import RankFailure, RankPool

__all__ = ["RankFailure", "RankPool"]
