"""Import path of the metric writers."""

from deepspeed.observe.monitor import MonitorMaster
