from deepspeed.config.model.blocks import MonitorConfig as DeepSpeedMonitorConfig
