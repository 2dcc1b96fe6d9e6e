from deepspeed.observe.monitor import MonitorMaster
