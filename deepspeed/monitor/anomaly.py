"""Losses and gradient norms that are out of the ordinary, told from those of the updates before. Pure.

What is ordinary is the median of a window and its spread, the median distance from it (times 1.4826, which makes it the
standard deviation of normal values): neither moves when a few values go astray.
"""

import math
import statistics
from collections import deque

_FEWEST = 20  # updates before anything is called unusual
_WIDE = 8.0  # spreads
_LEAST_SHARE, _LEAST_FACTOR = 0.1, 4.0  # of a loss above its median; of a norm: losses that hardly move are no band


def _ordinary(values: deque[float]) -> tuple[float, float]:
    """Return the median and the spread (1.4826 times the median distance from it)."""
    middle = statistics.median(values)
    return middle, 1.4826 * statistics.median(abs(value - middle) for value in values)


class AnomalyWatch:
    """Watch one run for outliers against the last ``window`` updates; a note of one kind comes once per window."""

    def __init__(self, window: int) -> None:
        self._window, self._fewest = window, min(_FEWEST, window)
        self._losses, self._norms = deque[float](maxlen=window), deque[float](maxlen=window)
        self._quiet_until: dict[str, int] = {}

    def look(self, step: int, *, loss: float | None, norm: float | None) -> list[str]:
        """Return remarks on update ``step``, mostly none. ``norm``: before clipping, infinite for a skipped update."""
        sentences = {"loss": self._judge_loss(loss), "norm": self._judge_norm(norm)}
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)
        if norm is not None and math.isfinite(norm) and norm > 0:
            self._norms.append(math.log(norm))
        return [f"step {step}: {text}" for kind, text in sentences.items() if text and self._first(kind, step)]

    def _first(self, kind: str, step: int) -> bool:
        if step < self._quiet_until.get(kind, 0):
            return False
        self._quiet_until[kind] = step + self._window
        return True

    def _judge_loss(self, loss: float | None) -> str:
        if loss is None:
            return ""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self._losses) < self._fewest:
            return ""
        middle, spread = _ordinary(self._losses)
        limit = middle + max(_WIDE * spread, _LEAST_SHARE * abs(middle))
        if loss <= limit:
            return ""
        last = f"the median of the last {len(self._losses)} is {middle:.4g}, and up to {limit:.4g} is usual"
        return f"the loss is {loss:.4g}; {last}"

    def _judge_norm(self, norm: float | None) -> str:
        if norm is None or not math.isfinite(norm):  # a skipped update is said by who skips it
            return ""
        if norm == 0:
            return "the gradient norm is 0: no parameter gets a gradient"
        if len(self._norms) < self._fewest:
            return ""
        middle, spread = _ordinary(self._norms)
        width = max(_WIDE * spread, math.log(_LEAST_FACTOR))
        if abs(math.log(norm) - middle) <= width:
            return ""
        low, high = math.exp(middle - width), math.exp(min(middle + width, 700.0))
        return (
            f"the gradient norm is {norm:.4g}, out of the band {low:.4g} to {high:.4g} of the last {len(self._norms)}"
        )
