"""The optimizer classes that clients import by name: on native kernels in host memory and on CUDA, on torch's
elsewhere.
"""

from typing import Any

import torch

from deepspeed.optim.adagrad import Adagrad
from deepspeed.optim.adam import AdamBase
from deepspeed.optim.lamb import Lamb
from deepspeed.optim.lion import Lion


class _SetGradNone(torch.optim.Optimizer):
    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Drop the gradients, or zero them where ``set_grad_none=False`` was given."""
        super().zero_grad(set_to_none=set_to_none and self.defaults["set_grad_none"])


class FusedAdam(_SetGradNone, AdamBase):
    """Adam or AdamW for the device the parameters are on (signature of ``deepspeed.ops.adam.FusedAdam``)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,  # noqa: FBT001, FBT002
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,  # noqa: FBT001, FBT002
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        set_grad_none: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        same: dict[str, Any] = {
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, lr, amsgrad=amsgrad, **same, decoupled=bool(adam_w_mode))
        self.defaults["set_grad_none"] = set_grad_none


class DeepSpeedCPUAdam(AdamBase):
    """Adam or AdamW on host tensors (signature of ``deepspeed.ops.adam.DeepSpeedCPUAdam``); moments in fp32 unless told
    otherwise.
    """

    host_only = True

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,  # noqa: FBT001, FBT002
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        adamw_mode: bool = True,  # noqa: FBT001, FBT002
        fp32_optimizer_states: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        same: dict[str, Any] = {
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(
            model_params, lr, amsgrad=amsgrad, **same, decoupled=bool(adamw_mode), fp32_states=fp32_optimizer_states
        )


class DeepSpeedCPUAdagrad(Adagrad):
    """Adagrad on host tensors (signature of ``deepspeed.ops.adagrad.DeepSpeedCPUAdagrad``); ``adamw_mode`` is accepted
    and unused.
    """

    host_only = True

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        fp32_optimizer_states: bool = True,  # noqa: FBT001, FBT002
        *,
        adamw_mode: bool | None = None,
    ) -> None:
        del adamw_mode
        if amsgrad:
            raise RuntimeError("DeepSpeedCPUAdagrad does not support amsgrad; drop the flag")
        super().__init__(model_params, lr, eps=eps, weight_decay=weight_decay, fp32_states=fp32_optimizer_states)


class FusedLion(_SetGradNone, Lion):
    """Lion for the device the parameters are on (signature of ``deepspeed.ops.lion.FusedLion``)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(params, lr, betas=betas, weight_decay=weight_decay)
        self.defaults["set_grad_none"] = set_grad_none


class DeepSpeedCPULion(Lion):
    """Lion on host tensors (signature of ``deepspeed.ops.lion.DeepSpeedCPULion``); ``adamw_mode`` is accepted and means
    nothing.
    """

    host_only = True

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,  # noqa: FBT001, FBT002
        *,
        adamw_mode: bool | None = None,
    ) -> None:
        del adamw_mode
        super().__init__(model_params, lr, betas=betas, weight_decay=weight_decay, fp32_states=fp32_optimizer_states)


class FusedLamb(Lamb):
    """LAMB for the device the parameters are on (signature of ``deepspeed.ops.lamb.FusedLamb``)."""
