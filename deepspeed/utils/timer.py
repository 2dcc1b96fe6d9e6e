"""Import path of the timers."""

from deepspeed.observe.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]
