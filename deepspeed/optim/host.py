"""Optimizer updates over flat host memory by the native kernels: one pass over weights, gradient and moments.

The kernels (csrc/cpu) know raw pointers only and are called through ctypes, which leaves the interpreter to other
threads. Results do not depend on the number of threads, on how a range is cut, or on the machine's vector width.
"""

import contextlib
import ctypes
import functools
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from deepspeed.accelerator.native.build import try_load
from deepspeed.accelerator.native.spec import CPU_ADAGRAD, CPU_ADAM, CPU_LION, OpSpec

Tensors = Sequence[torch.Tensor]
Output = torch.Tensor | None
Scalar = float | torch.Tensor
Betas = tuple[float, float]
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GRAIN = 1 << 18  # elements below which a second thread costs more than it saves
_SHARES = 4  # pieces for each thread: one that other work slows down leaves some of its own to the rest
_LINE = 64  # elements between places where every dtype starts a cache line

_P, _I, _F, _D = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_double
_ADAM_SCALARS = [_F, _D, _D, *[_F] * 5]
_BESIDE = [ctypes.c_int64, *[_P] * 8, *[_I] * 2, *_ADAM_SCALARS]  # of ds_adam_step_beside
_SIGNATURES = {
    CPU_ADAM: ("ds_adam_step", [ctypes.c_int64, *[_P] * 5, *[_I] * 4, *_ADAM_SCALARS]),
    CPU_ADAGRAD: ("ds_adagrad_step", [ctypes.c_int64, *[_P] * 4, *[_I] * 4, *[_F] * 4]),
    CPU_LION: ("ds_lion_step", [ctypes.c_int64, *[_P] * 4, *[_I] * 4, _F, _D, _D, _F, _F]),
}


@functools.cache
def _kernel(op: OpSpec, *, beside: bool = False) -> Callable[..., int] | None:
    """Return the native function, built on first use, or None; ``beside``: Adam's that leaves weights and moments."""
    library = try_load(op)
    if library is None:
        return None
    symbol, arguments = (f"{_SIGNATURES[op][0]}_beside", _BESIDE) if beside else _SIGNATURES[op]
    function = getattr(library, symbol)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


@functools.cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Return threads of this process (a forked child gets its own); a ctypes call leaves the interpreter to others."""
    return ThreadPoolExecutor(count, thread_name_prefix=f"deepspeed-{count}-threads-of-{process}")


def fits(tensor: torch.Tensor) -> bool:
    """Return whether kernels know the tensor's dtype and layout; its device is not looked at."""
    return tensor.is_contiguous() and tensor.dtype in CODES


def usable(op: OpSpec, *tensors: torch.Tensor) -> bool:
    """Return whether the kernel of ``op`` exists and fits: contiguous host tensors of fp32, bf16 or fp16."""
    return all(t.device.type == "cpu" and fits(t) for t in tensors) and _kernel(op, beside=False) is not None


def check(place: str, tensors: Tensors, moments: Tensors, on: Callable[[torch.Tensor], bool]) -> None:
    """Raise ValueError unless a kernel can take ``tensors``, of one size and ``on`` one device, and ``moments``."""
    count, device, right = tensors[0].numel(), tensors[0].device, on(tensors[0])
    for tensor in tensors:
        if tensor.numel() != count or not fits(tensor) or not right or tensor.device != device:
            takes = f"contiguous tensors of {count} elements in fp32, bf16 or fp16 on one {place} device"
            fault = f"{tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}"
            raise ValueError(f"a {place} kernel takes {takes}, not {fault}")
    if len(dtypes := {str(moment.dtype) for moment in moments}) > 1:
        raise ValueError(f"a {place} kernel takes both moments of a tensor in one dtype, not {' and '.join(dtypes)}")


def _run(
    op: OpSpec, tensors: Tensors, out: Output, scalars: list[float], *, beside: Tensors = (), cores: float = 1.0
) -> None:
    """Cut the flat range into pieces and run them on the threads; ``tensors`` are weights, gradient and moments."""
    weights, grad, *moments = tensors
    check("CPU", [*tensors, *beside, *([] if out is None else [out])], moments, lambda t: t.device.type == "cpu")
    if (function := _kernel(op, beside=bool(beside))) is None:
        raise RuntimeError(f"the native op {op.name} is not available (the log says why); use {op.instead}")
    count = weights.numel()
    # 16-bit weights are rounded where they are written; the pass has a second output beside fp32 weights only
    passed = [*tensors, out if weights.dtype is torch.float32 else None, *beside]
    of = (grad, out) if beside else (weights, grad, moments[0], passed[-1])
    codes = [-1 if t is None else CODES[t.dtype] for t in of]
    threads = max(1, min(int(cores * torch.get_num_threads()), count // _GRAIN))
    piece_numel = (count // (threads if threads == 1 else _SHARES * threads) // _LINE + 1) * _LINE
    starts = deque(range(0, count, piece_numel))  # threads may take from it at the same time

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                start = starts.popleft()
                pointers = [0 if t is None else t.data_ptr() + start * t.element_size() for t in passed]
                status = function(min(piece_numel, count - start), *pointers, *codes, *scalars)
                assert status == 0, "dtype codes were checked before"

    futures = [_threads(os.getpid(), torch.get_num_threads()).submit(work) for _ in range(threads - 1)]
    work()
    for future in futures:
        future.result()
    # what autograd saved of the old values must not be used
    changed = (*beside, out) if beside else (weights, *moments, passed[-1])
    torch.autograd.graph.increment_version([t for t in changed if t is not None])
    if out is not None and passed[len(tensors)] is None:
        out.copy_(weights.detach())


def adam_step(
    *tensors: torch.Tensor,
    step: int,
    lr: Scalar,
    betas: Betas,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    out: Output = None,
    beside: Tensors = (),
    cores: float = 1.0,
) -> None:
    """Run an Adam or AdamW update in place (Kingma and Ba 2015; Loshchilov and Hutter 2019). ``step`` counts from 1.

    ``tensors`` are weights, gradient and both moments (of one dtype). They and ``out`` are fp32, bf16 or fp16 of as
    many elements, contiguous, on the host. The gradient is multiplied by ``grad_scale`` first; the update is computed
    in fp32 and rounded once. ``out`` receives the weights as well: in the same pass where they are fp32. ``beside``:
    weights and moments, all fp32, that receive the new values; the old ones stay. ``cores``: the share of torch's
    threads that it takes.
    Raises ValueError for other tensors, RuntimeError where the kernel is not there (see :func:`usable`).
    """
    lr = float(lr)  # of a tensor too
    correct1, correct2 = (1 - betas[0] ** step, 1 - betas[1] ** step) if bias_correction else (1.0, 1.0)
    decay, keep = (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
    scalars = [lr / correct1, *betas, eps, decay, keep, grad_scale, math.sqrt(correct2)]
    _run(CPU_ADAM, tensors, out, scalars, beside=beside, cores=cores)


def adagrad_step(
    *tensors: torch.Tensor, rate: float, eps: float, weight_decay: float, grad_scale: float = 1.0, out: Output = None
) -> None:
    """Run an Adagrad update in place (Duchi et al. 2011) at the decayed ``rate``; otherwise as :func:`adam_step`."""
    _run(CPU_ADAGRAD, tensors, out, [rate, eps, weight_decay, grad_scale])


def lion_step(
    *tensors: torch.Tensor, lr: Scalar, betas: Betas, weight_decay: float, grad_scale: float = 1.0, out: Output = None
) -> None:
    """Run a Lion update in place (Chen et al. 2023); otherwise as :func:`adam_step`."""
    lr = float(lr)
    _run(CPU_LION, tensors, out, [lr, *betas, 1 - lr * weight_decay, grad_scale])
