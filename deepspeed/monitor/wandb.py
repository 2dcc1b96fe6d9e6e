from deepspeed.observe.monitor import WandbMonitor
