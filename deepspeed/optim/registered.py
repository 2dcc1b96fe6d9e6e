"""The update kernels as torch ops in the namespace ``deepspeed``: schemas that compilers and exporters can see.

Every op works in place and returns nothing, so its meta function has nothing to compute. Where the native kernel of a host op is
missing, plain torch does the same arithmetic.
"""

import torch
from torch import Tensor

from deepspeed.native.ops import CPU_ADAGRAD, CPU_ADAM, CPU_LION
from deepspeed.optim import cuda, host


@torch.library.custom_op("deepspeed::cpu_adam", mutates_args=("master", "exp_avg", "exp_avg_sq", "out"), device_types="cpu")
def cpu_adam(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    grad_scale: float,
) -> None:
    """``host.adam_step``: weights, gradient, moments and output of 16 or 32 bits."""
    held = (master, grad, exp_avg, exp_avg_sq, *(() if out is None else (out,)))
    if host.usable(CPU_ADAM, *held):
        host.adam_step(
            master,
            grad,
            exp_avg,
            exp_avg_sq,
            step=step,
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
            bias_correction=bias_correction,
            grad_scale=grad_scale,
            out=out,
        )
        return
    wide = grad.float() * grad_scale
    if weight_decay and not decoupled:
        wide = wide.add(master, alpha=weight_decay)
    first, second = exp_avg.float().lerp_(wide, 1 - beta1), exp_avg_sq.float().mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    correct1, correct2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    if weight_decay and decoupled:
        master.mul_(1 - lr * weight_decay)
    master.addcdiv_(first, (second / correct2).sqrt_().add_(eps), value=-lr / correct1)
    _finish(master, out, (exp_avg, first), (exp_avg_sq, second))


@torch.library.custom_op("deepspeed::cpu_adagrad", mutates_args=("master", "total", "out"), device_types="cpu")
def cpu_adagrad(
    master: Tensor, grad: Tensor, total: Tensor, out: Tensor | None, rate: float, eps: float, weight_decay: float, grad_scale: float
) -> None:
    """``host.adagrad_step``."""
    held = (master, grad, total, *(() if out is None else (out,)))
    if host.usable(CPU_ADAGRAD, *held):
        host.adagrad_step(master, grad, total, rate=rate, eps=eps, weight_decay=weight_decay, grad_scale=grad_scale, out=out)
        return
    wide = (grad.float() * grad_scale).add_(master, alpha=weight_decay)
    squares = total.float().addcmul_(wide, wide)
    master.addcdiv_(wide, squares.sqrt().add_(eps), value=-rate)
    _finish(master, out, (total, squares))


@torch.library.custom_op("deepspeed::cpu_lion", mutates_args=("master", "exp_avg", "out"), device_types="cpu")
def cpu_lion(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    out: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float,
) -> None:
    """``host.lion_step``."""
    held = (master, grad, exp_avg, *(() if out is None else (out,)))
    if host.usable(CPU_LION, *held):
        betas = (beta1, beta2)
        host.lion_step(master, grad, exp_avg, lr=lr, betas=betas, weight_decay=weight_decay, grad_scale=grad_scale, out=out)
        return
    wide, moment = grad.float() * grad_scale, exp_avg.float()
    blend = torch.lerp(moment, wide, 1 - beta1)
    master.mul_(1 - lr * weight_decay).add_(torch.where(blend.isnan(), blend, blend.sign()), alpha=-lr)
    _finish(master, out, (exp_avg, moment.lerp_(wide, 1 - beta2)))


def _finish(master: Tensor, out: Tensor | None, *slots: tuple[Tensor, Tensor]) -> None:
    for slot, value in slots:
        slot.copy_(value)
    if out is not None:
        out.copy_(master)


@torch.library.custom_op("deepspeed::fused_adam", mutates_args=("params", "exp_avgs", "exp_avg_sqs"), device_types="cuda")
def fused_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    grad_scale: float,
) -> None:
    """``cuda.adam_step`` over lists of tensors."""
    cuda.adam_step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        step=step,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        bias_correction=bias_correction,
        grad_scale=grad_scale,
    )


@torch.library.custom_op("deepspeed::fused_lion", mutates_args=("params", "exp_avgs"), device_types="cuda")
def fused_lion(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float,
) -> None:
    """``cuda.lion_step`` over lists of tensors."""
    betas = (beta1, beta2)
    cuda.lion_step(params, grads, exp_avgs, lr=lr, betas=betas, weight_decay=weight_decay, grad_scale=grad_scale)


def _nothing(*_: object) -> None:
    """The meta function of an op that works in place."""


OPS = (cpu_adam, cpu_adagrad, cpu_lion, fused_adam, fused_lion)
for _op in OPS:
    _op.register_fake(_nothing)
