from deepspeed.observe.monitor import TensorBoardMonitor
