"""Optimizer updates over lists of CUDA tensors by the native kernels: one pass over memory, 64 tensors a launch.

The kernels (csrc/cuda) know raw pointers only and are called through ctypes. They run in the current stream of the
tensors' device and never wait for it. What changes from step to step may be on the device (steps, rate, scale, the
overflow flag), so that a step can be captured into a CUDA graph, after one step outside that loads the kernels.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.accelerator.native.build import try_load
from deepspeed.accelerator.native.spec import FUSED_ADAM, FUSED_LAMB, FUSED_LION, OpSpec
from deepspeed.optim import host
from deepspeed.optim.host import Betas, Scalar, Tensors

_Row = Sequence[Any]  # tensors: parameter, gradient, both moments, output; None for what is not there

_CHUNK = 8192  # elements per block; LAMB keeps two sums for each
_ROW_FLOATS = 8
_P, _I, _L, _D = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double


class _Call(ctypes.Structure):
    """Mirror ``ds::Call`` of csrc/cuda/multi_tensor.cuh; the kernel side refuses another size."""

    _fields_ = (
        *(("bytes", _L), ("stream", _P), ("sizes", _P), ("columns", _P * 5)),
        *((name, _P) for name in ("steps", "device_lr", "device_scale", "found_inf", "rows", "partials", "ratios")),
        ("partial_count", _L),
        *((name, _D) for name in ("step", "lr", "scale", "beta1", "beta2", "eps", "weight_decay")),
        *((name, _D) for name in ("min_coeff", "max_coeff")),
        *((name, _I) for name in ("device", "count", "param_code", "grad_code", "moment_code", "out_code")),
        *((name, _I) for name in ("decoupled", "bias_correction", "eps_inside_sqrt", "unused")),
    )


@functools.cache
def _kernel(op: OpSpec) -> Callable[[_Call], None] | None:
    """Return the native update, built on first use; None (after one line in the log) where that is not possible."""
    library = try_load(op)
    if library is None:
        return None
    launch, name_of = library[f"ds_{op.name}"], library[f"ds_{op.name}_error"]
    launch.argtypes, launch.restype = [ctypes.POINTER(_Call)], ctypes.c_int
    name_of.argtypes, name_of.restype = [ctypes.c_int], ctypes.c_char_p

    def run(call: _Call) -> None:
        status = launch(ctypes.byref(call))
        if status != 0:
            failure = f"{op.name} failed with {name_of(status).decode()} ({status}) on cuda:{call.device}"
            raise RuntimeError(f"{failure}; its {call.count} tensors may be half updated")

    return run


def on_cuda(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is on a CUDA device; the cheap first question to :func:`usable`."""
    return tensor.is_cuda


@contextlib.contextmanager
def _stream(device: torch.device) -> Iterator[int]:
    """Make ``device`` the current one; yield the handle of its current stream."""
    with torch.accelerator.device_index(device.index):
        yield get_accelerator().current_stream(device).cuda_stream


def _compiled(param: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor) -> bool:
    """Return whether there is a kernel for these dtypes together: ``by_all`` of multi_tensor.cuh."""
    beside = (torch.float32, param.dtype)
    return all(m.dtype in beside for m in moments) and (param.dtype is torch.float32 or grad.dtype in beside)


def usable(op: OpSpec, columns: Sequence[Tensors]) -> bool:
    """Return whether the kernel of ``op`` exists and fits ``columns`` of parameters, gradients and moments: contiguous
    CUDA tensors of fp32, bf16 or fp16, moments in fp32 or the parameter's dtype, and gradients of 16-bit ones too.
    """
    # the order keeps a machine without CUDA from looking for a compiler; ROCm calls its devices cuda too
    fit = all(on_cuda(t) and host.fits(t) for column in columns for t in column)
    fit = fit and all(_compiled(*row) for row in zip(*columns, strict=True))
    return fit and torch.version.hip is None and get_accelerator().device_name() == "cuda" and _kernel(op) is not None


def _array(tensors: Iterable[torch.Tensor | None]) -> "ctypes.Array[ctypes.c_void_p]":
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    return (_P * len(pointers))(*pointers)


def _split(value: Scalar, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """Return a number that the host knows and None, or (unread) 0 and the number as fp32 on ``device``."""
    if isinstance(value, torch.Tensor) and on_cuda(value):
        return 0.0, value.to(device, torch.float32)
    return float(value), None


def _submit(
    op: OpSpec, rows: Sequence[_Row], steps: Tensors, scalars: Sequence[Any], fields: dict[str, float]
) -> torch.Tensor | None:
    """Make one native call for tensors of one device and the same dtypes; return LAMB's trust ratios. ``scalars``:
    rate, gradients' scale, overflow flag; ``fields``: those of ``_Call`` that the host knows.
    """
    if (run := _kernel(op)) is None:
        raise RuntimeError(f"the native op {op.name} is not available (the log says why); use {op.instead}")
    param, grad, first, _, out = rows[0]
    device, count, lamb = param.device, len(rows), op is FUSED_LAMB
    sizes = [row[0].numel() for row in rows]
    columns = [None if rows[0][i] is None else _array(row[i] for row in rows) for i in range(5)]
    sums = 2 * sum(-(-size // _CHUNK) for size in sizes) if lamb else 0
    size_array, step_array = (ctypes.c_int64 * count)(*sizes), _array(steps)
    with _stream(device) as stream:
        # what is allocated here is freed in stream order: after the kernels, although this returns before they run
        (lr, device_lr), (scale, device_scale) = (_split(number, device) for number in scalars[:2])
        on_device = {
            "device_lr": device_lr,
            "device_scale": device_scale,
            "found_inf": None if scalars[2] is None else scalars[2].to(device, torch.float32),
            "rows": torch.empty(count * _ROW_FLOATS, device=device, dtype=torch.float32),
            "partials": torch.empty(sums, device=device, dtype=torch.float64) if lamb else None,
            "ratios": torch.ones(count, device=device, dtype=torch.float32) if lamb else None,
        }
        call = _Call(
            bytes=ctypes.sizeof(_Call),
            stream=stream,
            sizes=ctypes.addressof(size_array),
            columns=(_P * 5)(*(None if column is None else ctypes.addressof(column) for column in columns)),
            steps=ctypes.addressof(step_array) if steps else None,
            lr=lr,
            scale=scale,
            partial_count=sums,
            device=device.index or 0,
            count=count,
            param_code=host.CODES[param.dtype],
            grad_code=host.CODES[grad.dtype],
            moment_code=host.CODES[first.dtype],
            out_code=-1 if out is None else host.CODES[out.dtype],
            **fields,
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in on_device.items()},
        )
        run(call)
    return on_device["ratios"]


def _check(rows: list[_Row], steps: Tensors, found_inf: torch.Tensor | None) -> None:
    """Raise ValueError for tensors that no kernel takes together."""
    for param, *operands in rows:
        tensors = [param, *(tensor for tensor in operands if tensor is not None)]
        moments = [moment for moment in operands[1:3] if moment is not None]
        host.check("CUDA", tensors, moments, on_cuda)
        if not _compiled(param, operands[0], *moments):
            takes = "moments (and of 16-bit parameters gradients) in fp32 or the parameter's dtype"
            fault = f"{operands[0].dtype} and {moments[0].dtype} beside {param.dtype}"
            raise ValueError(f"a CUDA kernel takes {takes}, not {fault}")
    for step, (param, *_) in zip(steps, rows, strict=True) if steps else ():
        if step.dtype is not torch.float32 or step.numel() != 1 or step.device != param.device:
            raise ValueError("step is an int, or fp32 tensors of one element on the parameters' device, one each")
    if found_inf is not None and not on_cuda(found_inf):
        raise ValueError(f"found_inf is read by the device and must be a CUDA tensor, not one on {found_inf.device}")


def _update(
    op: OpSpec,
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors | None = None,
    *,
    step: int | Tensors = 1,
    lr: Scalar,
    betas: Betas,
    grad_scale: Scalar = 1.0,
    found_inf: torch.Tensor | None = None,
    outs: Sequence[torch.Tensor | None] | None = None,
    **fields: float,
) -> list[torch.Tensor]:
    """Update every parameter in place, in fp32 arithmetic; return the trust ratios of LAMB, 1 where nothing changed.

    Each parameter, gradient, pair of moments and output is fp32, bf16 or fp16, contiguous, on one CUDA device, of as
    many elements; which go together :func:`usable` says. ``step`` is the number of this update, from 1: an int, or one
    fp32 CUDA tensor for each parameter, only read. Gradients are multiplied by ``grad_scale`` first; ``outs`` (None: no
    such) receive the rounded parameters in the same pass. Where ``found_inf`` holds anything but 0 nothing changes.
    ``lr`` and ``grad_scale`` may be CUDA tensors; nothing waits for the device. ``fields`` are further numbers of
    ``_Call``. LAMB adds the norms in a fixed order: equal tensors give equal bits. Raises ValueError for other tensors,
    RuntimeError with CUDA's name of an error or where the kernel is not there (see :func:`usable`).
    """
    columns = (params, grads, exp_avgs, exp_avg_sqs, outs)
    rows: list[_Row] = list(zip(*([None] * len(params) if c is None else c for c in columns), strict=True))
    steps: Tensors = () if isinstance(step, int) else step
    _check(rows, steps, found_inf)
    fields |= {"step": step if isinstance(step, int) else 0, "beta1": betas[0], "beta2": betas[1]}
    buckets: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        kinds = (None if tensor is None else tensor.dtype for tensor in row)
        buckets.setdefault((params[index].device, *kinds), []).append(index)
    ratios: dict[int, torch.Tensor] = {}
    for indices in buckets.values():
        some = [steps[i] for i in indices] if steps else ()
        of_lamb = _submit(op, [rows[i] for i in indices], some, (lr, grad_scale, found_inf), fields)
        if of_lamb is not None:
            ratios.update(zip(indices, of_lamb.unbind(), strict=True))
    # what autograd saved of the old values must not be used
    written = [tensor for param, _, *outputs in rows for tensor in (param, *outputs) if tensor is not None]
    torch.autograd.graph.increment_version(written)
    return [ratios[i] for i in sorted(ratios)]


# Adam and AdamW: Kingma and Ba 2015, Loshchilov and Hutter 2019; Lion: Chen et al. 2023; LAMB: You et al. 2020.
adam_step = functools.partial(_update, FUSED_ADAM, decoupled=True, bias_correction=True)
lion_step = functools.partial(_update, FUSED_LION, decoupled=True)
lamb_step = functools.partial(_update, FUSED_LAMB, bias_correction=True)
