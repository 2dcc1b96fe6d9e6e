"""Muon for matrices with an auxiliary Adam for everything else (Jordan et al. 2024, "Muon")."""

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.errors import NotYetError, OptimizerConfigError, UsageError
from deepspeed.optim.base import Group, GroupStep, checked
from deepspeed.optim.rules import adam_update_

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
GRAM_RESTART = 2  # iterations after which the Gram form starts from the iterate: no rounding piles up


def is_muon_parameter(name: str, param: torch.Tensor) -> bool:
    """Return whether Muon updates a parameter: two or more dimensions; by name neither embedding nor output head."""
    return param.ndim >= 2 and "embed" not in name and "lm_head" not in name


def mark_muon_parameters(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Set ``use_muon`` on every parameter that does not have it yet; call it before the optimizer is built."""
    for name, param in named_parameters:
        if not hasattr(param, "use_muon"):
            param.use_muon = is_muon_parameter(name, param)  # type: ignore[attr-defined]


def _iterate_standard(x: torch.Tensor) -> torch.Tensor:
    a, b, c = NS_COEFFICIENTS
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _iterate_gram(x: torch.Tensor) -> torch.Tensor:
    """Evaluate the same polynomial, but multiply only rows x rows matrices between restarts."""
    a, b, c = NS_COEFFICIENTS
    eye = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    for count in (GRAM_RESTART, NS_STEPS - GRAM_RESTART):
        gram, product = x @ x.mT, eye
        for _ in range(count):
            factor = a * eye + b * gram + c * gram @ gram
            product = factor @ product
            gram = factor @ gram @ factor
        x = product @ x
    return x


_METHODS = {"gram": (torch.float16, _iterate_gram), "standard": (torch.bfloat16, _iterate_standard)}


def orthogonalize(matrix: torch.Tensor, method: str = "gram") -> torch.Tensor:
    """Return the nearest semi-orthogonal matrix, approximately: five quintic Newton-Schulz iterations.

    ``matrix`` is (..., rows, cols), a batch of them; so is the result, in the same dtype, with singular values around 1
    (roughly 0.7 to 1.2). ``standard`` iterates in bf16, ``gram`` in fp16; both in fp32 on the CPU, where half-precision
    matrix products are slow.
    """
    half, iterate = _METHODS[method]
    tall = matrix.shape[-2] > matrix.shape[-1]
    # normalise in fp32: the square of a small fp16 number is zero
    x = (matrix.mT if tall else matrix).float()
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    x = iterate(x.to(torch.float32 if x.device.type == "cpu" else half)).to(matrix.dtype)
    return x.mT if tall else x


class MuonWithAuxAdam(GroupStep):
    """Muon for the parameters marked ``use_muon``, Adam with decoupled decay for the others.

    Every given parameter group is split in a Muon half and an Adam half and keeps its own settings; a group that
    carries the key ``use_muon`` is taken as it is. A parameter without the mark is judged by its shape, and by its
    name where named parameters are given. ``lr`` sets both halves, ``muon_lr`` and ``adam_lr`` one of them. Raises
    OptimizerConfigError for an unknown ``ns_method``, NotYetError for ``per_head_muon``, and in ``step`` UsageError
    where a Muon parameter is not seen as a matrix.
    """

    keywords = {
        **dict.fromkeys(("lr", "muon_lr", "adam_lr")),
        **{"momentum": 0.95, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10},
        **{"ns_method": "gram", "per_head_muon": False},
    }
    elementwise = False
    by_matrix = True  # of a stack, each on its own

    def _build(self, params: Any, settings: Group) -> None:
        method, rate = settings["ns_method"], settings["lr"]
        if method not in _METHODS:
            raise OptimizerConfigError(f"Muon: ns_method is {method!r}; use 'gram' or 'standard'")
        if settings["per_head_muon"]:
            raise NotYetError("Muon: per_head_muon is not available in this release; remove it from optimizer.params")
        rates = {"muon_lr": 0.02 if rate is None else rate, "adam_lr": 3e-4 if rate is None else rate}
        rates |= {key: settings[key] for key in rates if settings[key] is not None}
        numbers = {key: settings[key] for key in ("momentum", "weight_decay", "eps")}
        checks = checked(self, betas=settings["betas"], **numbers, **rates)
        adam = {"bias_correction": True, "decoupled_weight_decay": True, "betas": checks["betas"], "eps": checks["eps"]}
        self._group_keys = {
            True: {"lr": checks["muon_lr"], "momentum": checks["momentum"], "ns_method": method},
            False: {"lr": checks["adam_lr"], **adam},
        }
        defaults = {"lr": checks["muon_lr"], "weight_decay": checks["weight_decay"]}
        torch.optim.Optimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add one group, split by ``use_muon`` into at most two."""
        params = param_group["params"]
        entries = [params] if isinstance(params, torch.Tensor) else list(params)
        given = param_group.get("use_muon")
        for use_muon in (True, False):
            half = [e for e in entries if (_wants_muon(e) if given is None else bool(given)) is use_muon]
            if half:
                group = self._group_keys[use_muon] | param_group | {"params": half, "use_muon": use_muon}
                super().add_param_group(group)

    def _slots(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["use_muon"] else super()._slots(group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: Group, group: Group) -> None:
        if not group["use_muon"]:
            adam_update_(param, grad, state, group)
            return
        if param.ndim < 2:
            fault = f"Muon got a tensor of shape {tuple(param.shape)} where it needs a matrix"
            raise UsageError(f"{fault}; sharding must keep parameters whole for this optimizer")
        buffer, mu = state["momentum_buffer"], group["momentum"]
        # decided on the device: a non-finite gradient leaves the momentum as it was and shows in the weights
        finite = torch.isfinite(grad).all()
        buffer.copy_(torch.where(finite, torch.lerp(buffer, grad, 1 - mu), buffer))
        update = torch.where(finite, torch.lerp(grad, buffer, mu), grad)
        matrix = update.reshape(update.shape[0], -1) if update.ndim == 4 else update
        matrix = orthogonalize(matrix, group["ns_method"]).reshape(grad.shape)
        scale = max(1.0, grad.shape[-2] / grad.shape[-1]) ** 0.5
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(matrix, alpha=group["lr"] * scale)


def _wants_muon(entry: torch.Tensor | tuple[str, torch.Tensor]) -> bool:
    name, param = entry if isinstance(entry, tuple) else ("", entry)
    return bool(getattr(param, "use_muon", is_muon_parameter(name, param)))
