from deepspeed.monitor.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
