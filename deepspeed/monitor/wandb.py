from deepspeed.monitor.monitor import WandbMonitor
