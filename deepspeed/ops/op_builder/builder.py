from deepspeed.errors import CUDAMismatchException, MissingCUDAException
from deepspeed.native.builders import CUDAOpBuilder, OpBuilder, TorchCPUOpBuilder, installed_ops
