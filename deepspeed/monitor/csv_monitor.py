from deepspeed.observe.monitor import csvMonitor
