"""The worker pool of the tests is the one that ``ds_verify`` ships."""

from collections.abc import Callable
from typing import Any

from deepspeed.tools.verify.ranks import RankFailure, RankPool

__all__ = ["PatientPool", "RankFailure", "RankPool"]
PATIENCE = 3


class PatientPool(RankPool):
    """Its limits are seconds of an idle machine, and a busy one has more: they end what hangs, and no test is about
    them.
    """

    def run(
        self, function: Callable[..., Any], *args: Any, time_limit: float | None = None, **kwargs: Any
    ) -> list[Any]:
        limit = PATIENCE * (self.time_limit if time_limit is None else time_limit)
        return super().run(function, *args, time_limit=limit, **kwargs)
