from deepspeed.accelerator.native.builders import CUDAOpBuilder, OpBuilder, TorchCPUOpBuilder, installed_ops
from deepspeed.errors import CUDAMismatchException, MissingCUDAException
