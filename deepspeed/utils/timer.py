"""Import path of the timers."""

from deepspeed.observe.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
