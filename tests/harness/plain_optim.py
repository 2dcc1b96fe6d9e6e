"""Optimizers written straight from their formulas, one tensor at a time: the other side of the comparison."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PlainOptimizer(torch.optim.Optimizer):
    """Calls :meth:`update` for every parameter with its gradient, its state and its group."""

    defaults_of: dict[str, Any] = {}

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {**self.defaults_of, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """The rule of one parameter."""
        raise NotImplementedError


class PlainLion(PlainOptimizer):
    """Chen et al. 2023."""

    defaults_of = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        m = state.get("m", torch.zeros_like(p))
        u = torch.sign(b1 * m + (1 - b1) * g)
        p.sub_(group["lr"] * (u + group["weight_decay"] * p))
        state["m"] = b2 * m + (1 - b2) * g


class PlainLamb(PlainOptimizer):
    """You et al. 2020, with the trust ratio clamped to [0.01, 10]."""

    defaults_of = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        step = state["step"] = state.get("step", 0) + 1
        m = state["m"] = b1 * state.get("m", torch.zeros_like(p)) + (1 - b1) * g
        v = state["v"] = b2 * state.get("v", torch.zeros_like(p)) + (1 - b2) * g * g
        u = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + group["eps"]) + group["weight_decay"] * p
        norms = float(p.norm()), float(u.norm())
        ratio = min(max(norms[0] / norms[1], 0.01), 10.0) if norms[0] > 0 and norms[1] > 0 else 1.0
        p.sub_(group["lr"] * ratio * u)


class UserElementwise(PlainOptimizer):
    """A user's own class that looks at one element at a time and says so."""

    elementwise = True
    defaults_of = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state["m"] = group["momentum"] * state.get("m", torch.zeros_like(p)) + g + group["weight_decay"] * p
        p.sub_(group["lr"] * torch.tanh(m))


class UserWholeTensor(PlainOptimizer):
    """A user's own class that needs whole tensors (their norm and their rows) and says nothing about it."""

    defaults_of = {"lr": 1e-2, "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = g + group["weight_decay"] * p
        rows = g.flatten(1).norm(dim=1).view(-1, *[1] * (g.ndim - 1)) if g.ndim > 1 else g.norm()
        p.sub_(group["lr"] * g / (rows + g.norm() + 0.1))
