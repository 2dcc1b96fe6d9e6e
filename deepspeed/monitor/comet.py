from deepspeed.observe.monitor import CometMonitor
