"""The optimizer gate: every optimizer gives what it gives without sharding, each group with its own rate and decay.

Rows are optimizers of torch and a class as a user would write it, at each ZeRO stage, and with their states in host
memory. Matrices are in a group of their own; all else has another learning rate and no decay. Methods that look at
whole matrices (Adafactor, Muon) or whole tensors (the user's class) must agree, too. All in fp32.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn

from deepspeed.optim.rules import FusedLion
from deepspeed.verify.common import Printout
from deepspeed.verify.grads import Cell, Errors, run_cell
from deepspeed.verify.models import Stack, case_named, seeded
from deepspeed.verify.reference import GATE_ADAM, trainable
from deepspeed.verify.training.table import run_table


class OfAUser(torch.optim.Optimizer):
    """Divides by the norm of the whole tensor, and says so to nobody."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = param.grad + group["weight_decay"] * param
                    param.sub_(group["lr"] * grad / (grad.norm() + 0.1))


# name: the class and its settings, smooth where the method allows it (see [Note: the gate's Adam settings])
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, GATE_ADAM),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "Lion": (FusedLion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "Muon": (torch.optim.Muon, {"lr": 1e-2, "weight_decay": 0.1}),
    "a class of a user": (OfAUser, {"lr": 1e-2, "weight_decay": 0.1}),
}
_AWAY = ", offloaded"


class Matrices(Stack):
    """Trains nothing but matrices, which is all that Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.requires_grad = param.ndim == 2


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and all else with settings of its own."""
    params = list(trainable(model).values())
    matrices, rest = ([p for p in params if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [{"params": matrices}, *([{"params": rest, "lr": 3e-3, "weight_decay": 0.0}] if rest else [])]


def run_optimizer(name: str, stage: int, steps: int) -> Errors:
    """Train with the optimizer of this ``name`` on the ranks of this process group; this rank's errors. Collective."""
    short = name.removesuffix(_AWAY)
    factory, settings = OPTIMIZERS[short]
    case = case_named("plain", optimizer=lambda model: factory(groups(model), **settings))
    case = replace(case, build=seeded(Matrices)) if short == "Muon" else case
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config |= {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if name.endswith(_AWAY) else {}
    return run_cell(Cell("plain", stage=stage, bucket="tiny", config=config), steps=steps, case=case)


def run(options: argparse.Namespace, report: Printout) -> int:
    rows = [*product(OPTIMIZERS, range(4)), *product([f"{name}{_AWAY}" for name in OPTIMIZERS], range(1, 4))]
    return run_table(options, report, run_optimizer, rows)
