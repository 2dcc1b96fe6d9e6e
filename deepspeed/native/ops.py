"""The native ops of this package: what each is made of."""

from deepspeed.native.spec import OpSpec

# Contraction is off because the loops say themselves where they fuse; the other two only drop error reports nobody
# reads.
_EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
CPU_ADAM = OpSpec("cpu_adam", ("cpu/adam.cpp",), flags=_EXACT)
CPU_ADAGRAD = OpSpec("cpu_adagrad", ("cpu/adagrad.cpp",), flags=_EXACT)
CPU_LION = OpSpec("cpu_lion", ("cpu/lion.cpp",), flags=_EXACT)
CPU_CHECKSUM = OpSpec("cpu_checksum", ("cpu/crc32c.cpp",), instead="tables and torch")
_AIO = ("aio/aio.cpp", "aio/libaio.cpp", "aio/threads.cpp", "aio/uring.cpp")
ASYNC_IO = OpSpec("async_io", _AIO, instead="plain reads and writes on Python threads")
ASYNC_IO_MODULE = "deepspeed.tier.aio_handle"
_CUDA_EXACT = ("--fmad=false", "-Xcompiler", "-ffp-contract=off")  # as above, for device code and for host code
FUSED_ADAM = OpSpec(
    "fused_adam", ("cuda/fused_adam.cu",), flags=_CUDA_EXACT, kind="cuda", instead="torch's own fused Adam"
)
FUSED_LAMB = OpSpec("fused_lamb", ("cuda/fused_lamb.cu",), flags=_CUDA_EXACT, kind="cuda")
FUSED_LION = OpSpec("fused_lion", ("cuda/fused_lion.cu",), flags=_CUDA_EXACT, kind="cuda")
