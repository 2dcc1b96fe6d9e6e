from deepspeed.monitor.monitor import TensorBoardMonitor
