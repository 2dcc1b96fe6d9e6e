"""Optimizers by name, and what each is in plain torch. Settings keep the update smooth where the method allows it (see
[Note: the gate's Adam settings]).
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.harness.plain_optim import PlainLamb, PlainLion, UserElementwise, UserWholeTensor

SMOOTH = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.1}
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}

Factory = Callable[..., torch.optim.Optimizer]
# configuration block -> the same optimizer in plain torch
BY_NAME: dict[str, tuple[dict[str, Any], Factory, dict[str, Any]]] = {
    "Adam": (SMOOTH, torch.optim.AdamW, SMOOTH),  # "Adam" decays decoupled unless adam_w_mode is false
    "adam_l2": ({**SMOOTH, "adam_w_mode": False}, torch.optim.Adam, SMOOTH),
    "AdamW": (SMOOTH, torch.optim.AdamW, SMOOTH),
    "torch_adam": ({**SMOOTH, "torch_adam": True}, torch.optim.AdamW, SMOOTH),
    "SGD": ({"lr": 0.05, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adagrad": ({"lr": 1e-2, "eps": 1e-2}, torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-2}),
    "RMSprop": ({"lr": 1e-2, "eps": 1e-1}, torch.optim.RMSprop, {"lr": 1e-2, "eps": 1e-1}),
    "Lion": (LION, PlainLion, LION),
    "Lamb": (SMOOTH, PlainLamb, SMOOTH),
    "Adafactor": ({"lr": 1e-2}, torch.optim.Adafactor, {"lr": 1e-2}),
}
CONFIG_TYPE = {"adam_l2": "Adam", "torch_adam": "AdamW"}
CLIENT: dict[str, tuple[Factory, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, SMOOTH),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "UserElementwise": (UserElementwise, {"lr": 1e-2, "weight_decay": 0.1}),
    "UserWholeTensor": (UserWholeTensor, {"lr": 1e-2, "weight_decay": 0.1}),
}
