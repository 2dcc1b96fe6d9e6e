from deepspeed.monitor.monitor import csvMonitor
