"""Optimizer updates over flat host memory by the native kernels: one pass over master, gradient and moments.

The kernels (csrc/cpu) know raw pointers only and are called through ctypes, which leaves the interpreter to other threads.
Results do not depend on the number of threads, on how a range is cut, or on the machine's vector width.
"""

import ctypes
import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from deepspeed.native.build import try_load
from deepspeed.native.ops import CPU_ADAGRAD, CPU_ADAM, CPU_LION
from deepspeed.native.spec import OpSpec

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GRADIENT = 1  # its place among the tensors of every kernel: the only one that is not written
_GRAIN = 1 << 18  # elements below which a second thread costs more than it saves

_P, _I, _F, _D = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_double
_SIGNATURES = {
    "ds_adam_step": [ctypes.c_int64, *[_P] * 5, *[_I] * 3, _F, _D, _D, *[_F] * 5],
    "ds_adagrad_step": [ctypes.c_int64, *[_P] * 4, *[_I] * 3, *[_F] * 4],
    "ds_lion_step": [ctypes.c_int64, *[_P] * 4, *[_I] * 3, _F, _D, _D, _F, _F],
}


@functools.cache
def _kernel(op: OpSpec, symbol: str) -> Callable[..., int] | None:
    """The native function, built on first use; None (after one line in the log) where that is not possible."""
    library = try_load(op)
    if library is None:
        return None
    function = getattr(library, symbol)
    function.argtypes, function.restype = _SIGNATURES[symbol], ctypes.c_int
    return function


@functools.cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Threads of this process (a forked child gets its own); a ctypes call leaves the interpreter to the others."""
    return ThreadPoolExecutor(count, thread_name_prefix=f"deepspeed-{count}-threads-of-{process}")


def usable(op: OpSpec, master: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernel of ``op`` exists and fits: contiguous host tensors, fp32 weights, 16 or 32 bits a number beside them."""
    symbol = {CPU_ADAM.name: "ds_adam_step", CPU_ADAGRAD.name: "ds_adagrad_step", CPU_LION.name: "ds_lion_step"}[op.name]
    fits = all(t.device.type == "cpu" and t.is_contiguous() and t.dtype in _CODES for t in (master, *others))
    return fits and master.dtype is torch.float32 and _kernel(op, symbol) is not None


def _check(master: torch.Tensor, *others: torch.Tensor | None) -> None:
    for tensor in (master, *others):
        if tensor is None:
            continue
        if tensor.numel() != master.numel() or not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.dtype not in _CODES:
            raise ValueError(
                f"a host kernel takes contiguous host tensors of {master.numel()} elements in fp32, bf16 or fp16, not "
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
    if master.dtype is not torch.float32:
        raise ValueError(f"the weights of a host kernel are fp32, not {master.dtype}")


def _run(function: Callable[..., int], tensors: list[torch.Tensor | None], codes: list[int], scalars: list[float]) -> None:
    """Cut the flat range into one piece per thread and run them; None stands for the output that is not wanted."""
    count = next(t for t in tensors if t is not None).numel()
    threads = max(1, min(torch.get_num_threads(), count // _GRAIN))
    each = -(-count // threads)

    def piece(start: int) -> None:
        pointers = [0 if t is None else t.data_ptr() + start * t.element_size() for t in tensors]
        status = function(min(each, count - start), *pointers, *codes, *scalars)
        assert status == 0, "dtype codes were checked before"

    if threads == 1:
        piece(0)
    else:
        list(_threads(os.getpid(), torch.get_num_threads()).map(piece, range(0, count, each)))
    for index, tensor in enumerate(tensors):
        if tensor is not None and index != _GRADIENT:
            torch.autograd.graph.increment_version(tensor)  # what autograd saved of the old values must not be used


def _codes(grad: torch.Tensor, moment: torch.Tensor, out: torch.Tensor | None) -> list[int]:
    return [_CODES[grad.dtype], _CODES[moment.dtype], -1 if out is None else _CODES[out.dtype]]


def adam_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> None:
    """One Adam or AdamW update in place (Kingma and Ba 2015; Loshchilov and Hutter 2019). ``step`` counts from 1.

    ``master`` is fp32; ``grad``, the moments and ``out`` are fp32, bf16 or fp16 of as many elements, contiguous, on the host.
    The gradient is multiplied by ``grad_scale`` first; ``out`` receives the rounded weights in the same pass.
    Raises ValueError for other tensors, RuntimeError where the kernel is not there (see :func:`usable`).
    """
    _check(master, grad, exp_avg, exp_avg_sq, out)
    correct1, correct2 = (1 - betas[0] ** step, 1 - betas[1] ** step) if bias_correction else (1.0, 1.0)
    rate, root = lr / correct1, math.sqrt(correct2)
    decay, keep = (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
    scalars = [rate, betas[0], betas[1], eps, decay, keep, grad_scale, root]
    _run(_wanted(CPU_ADAM, "ds_adam_step"), [master, grad, exp_avg, exp_avg_sq, out], _codes(grad, exp_avg, out), scalars)


def adagrad_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    total: torch.Tensor,
    *,
    rate: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> None:
    """One Adagrad update in place (Duchi et al. 2011); ``rate`` is the decayed learning rate. Tensors and errors as :func:`adam_step`."""
    _check(master, grad, total, out)
    scalars = [rate, eps, weight_decay, grad_scale]
    _run(_wanted(CPU_ADAGRAD, "ds_adagrad_step"), [master, grad, total, out], _codes(grad, total, out), scalars)


def lion_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> None:
    """One Lion update in place (Chen et al. 2023). Tensors and errors as :func:`adam_step`."""
    _check(master, grad, exp_avg, out)
    scalars = [lr, betas[0], betas[1], 1 - lr * weight_decay, grad_scale]
    _run(_wanted(CPU_LION, "ds_lion_step"), [master, grad, exp_avg, out], _codes(grad, exp_avg, out), scalars)


def _wanted(op: OpSpec, symbol: str) -> Callable[..., int]:
    function = _kernel(op, symbol)
    if function is None:
        raise RuntimeError(f"the native kernel {op.name} could not be built here (the log says why); use {op.instead}")
    return function
