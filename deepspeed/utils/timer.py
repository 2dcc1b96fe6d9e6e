from deepspeed.observe.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
