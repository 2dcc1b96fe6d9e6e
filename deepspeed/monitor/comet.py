from deepspeed.monitor.monitor import CometMonitor
