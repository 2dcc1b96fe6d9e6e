"""Every optimizer gives the result that it gives without sharding, with its groups' own learning rates and decays.

Settings keep the update smooth where the method allows it (see [Note: the gate's Adam settings]); on two ranks the sum
of two gradients has no order, so even the methods that round inside (Muon iterates in bf16) must agree.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.tools.verify.grads import scaled_error
from deepspeed.tools.verify.models import (
    Case,
    case_named,
)
from deepspeed.tools.verify.reference import trainable
from deepspeed.utils import safe_get_full_optimizer_state
from tests.harness.plain_optim import PlainLamb, PlainLion, UserElementwise, UserWholeTensor
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, make_config, outcome, parameter_error, plain_train, start, train_step

pytestmark = pytest.mark.timeout(120)
STEPS = 4
TOLERANCE = 1e-6
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


def plain_config(stage: int, **changes: Any) -> dict[str, Any]:
    """A configuration that tolerates every optimizer and cuts parameters in many pieces."""
    return make_config(stage, zero_allow_untested_optimizer=True, **changes)


def trained_error(engine: Any, case: Case, expected: dict[str, Tensor]) -> tuple[float, str]:
    """Train, and say how far the parameters are from those expected."""
    for step in range(STEPS):
        train_step(engine, case, step)
    result = parameter_error(engine.module, expected)
    engine.destroy()
    return result


def adam_state(stage: int) -> dict[str, float]:
    """Errors of the moments, by parameter name, against plain AdamW."""
    case = case_named("plain")
    reference: list[torch.optim.Optimizer] = []
    models: list[nn.Module] = []

    def remember(model: nn.Module) -> torch.optim.Optimizer:
        models.append(model)
        reference.append(torch.optim.AdamW(model.parameters(), **SMOOTH))
        return reference[0]

    plain_train(case, remember, steps=2)
    engine = start(
        case.build(), make_config(stage, optimizer={"type": "AdamW", "params": {**SMOOTH, "betas": [0.9, 0.95]}})
    )
    for step in range(2):
        train_step(engine, case, step)
    wanted = {name: reference[0].state[param] for name, param in models[0].named_parameters()}
    errors = {}
    for name, param in trainable(engine.module).items():
        for key in ("exp_avg", "exp_avg_sq"):
            errors[f"{name}.{key}"] = scaled_error(safe_get_full_optimizer_state(param, key), wanted[name][key])
    engine.destroy()
    return errors


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_is_addressed_by_parameter(pool2: RankPool, stage: int) -> None:
    for errors in pool2.run(adam_state, stage):
        assert max(errors.values()) <= TOLERANCE, errors


def refusals() -> dict[str, str]:
    """What is said about optimizers that cannot work."""
    model = case_named("plain").build()
    foreign = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    return {
        "foreign": outcome(lambda: start(model, plain_config(2, optimizer=None), optimizer=foreign)),
        "unknown": outcome(lambda: start(model, plain_config(2, optimizer={"type": "AdmW", "params": {"lr": 1e-3}}))),
        "max_grad_norm": outcome(
            lambda: start(model, plain_config(2, optimizer={"type": "AdamW", "params": {"max_grad_norm": 1.0}}))
        ),
        "twice": outcome(
            lambda: start(model, plain_config(2), model_parameters=[model.head.weight, model.head.weight])
        ),
    }


def test_refusals_are_sentences(pool2: RankPool) -> None:
    for told in pool2.run(refusals):
        assert all(told.values()), told
        assert "AdamW" in told["unknown"] and "gradient_clipping" in told["max_grad_norm"], told


# The parameters of each group of an optimizer that fills its state at construction, by what they begin with.
FIRST: dict[str, list[list[str]]] = {
    "0-dimensional": [["scale", "empty", "*"]],
    "empty": [["empty", "scale", "*"]],
    "alone": [["scale"], ["empty"], ["*"]],
}


def filled(first: str, stage: int) -> tuple[float, str]:
    """Parameter error of a client's Adagrad, whose groups begin with odd shapes."""
    case = case_named("odd_shapes")

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        rest = [p for n, p in named.items() if n not in ("scale", "empty")]
        groups = [[p for n in names for p in (rest if n == "*" else [named[n]])] for names in FIRST[first]]
        return torch.optim.Adagrad([{"params": g} for g in groups], lr=1e-2, eps=1e-2, initial_accumulator_value=0.1)

    expected = plain_train(case, adagrad, steps=STEPS)
    model = case.build()
    return trained_error(start(model, plain_config(stage, optimizer=None), optimizer=adagrad(model)), case, expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("first", FIRST)
def test_state_filled_at_construction_is_that_of_any_shape(pool2: RankPool, first: str, stage: int) -> None:
    for error, where in pool2.run(filled, first, stage):
        assert error <= TOLERANCE, f"{where} differs by {error}"
