"""Every optimizer gives the result that it gives without sharding, with its groups' own learning rates and decays.

Settings keep the update smooth where the method allows it (see [Note: the gate's Adam settings]); on two ranks the sum
of two gradients has no order, so even the methods that round inside (Muon iterates in bf16) must agree.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.tools.verify.grads import scaled_error
from deepspeed.tools.verify.models import (
    HIDDEN,
    IN_FEATURES,
    OUT_FEATURES,
    Case,
    case_named,
    regression_batch,
    seeded,
    squared_error,
)
from deepspeed.tools.verify.reference import trainable
from deepspeed.utils import safe_get_full_optimizer_state
from tests.harness.logs import logged
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


class Matrices(nn.Module):
    """A model of matrices only, as ``torch.optim.Muon`` demands."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [IN_FEATURES, HIDDEN, 2 * HIDDEN, HIDDEN, OUT_FEATURES]
        self.layers = nn.ModuleList([nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:], strict=False)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.silu(layer(x))
        return x


def matrices_case() -> Case:
    """Regression on :class:`Matrices`."""
    return Case(name="matrices", build=seeded(Matrices), batch=regression_batch, loss=squared_error)


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


def by_name(name: str, stage: int) -> tuple[float, str]:
    """Parameter error of an optimizer named in the configuration."""
    settings, factory, plain = BY_NAME[name]
    case = case_named("used_twice")
    expected = plain_train(case, lambda model: factory(model.parameters(), **plain), steps=STEPS)
    block = {
        "type": CONFIG_TYPE.get(name, name),
        "params": {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
    }
    engine = start(case.build(), plain_config(stage, optimizer=block))
    return trained_error(engine, case, expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", BY_NAME)
def test_optimizer_by_name(pool2: RankPool, name: str, stage: int) -> None:
    for error, worst in pool2.run(by_name, name, stage):
        assert error <= TOLERANCE, (error, worst)


def split_groups(model: nn.Module, **changes: Any) -> list[dict[str, Any]]:
    """Matrices in a group of their own, everything else without decay and with another rate."""
    params = list(trainable(model).values())
    matrices, rest = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    return [{"params": matrices, **changes}, {"params": rest, "lr": 3e-3, "weight_decay": 0.0}]


def by_client(name: str, stage: int, form: str) -> tuple[float, str]:
    """Parameter error of a client's optimizer with two groups, given as an object or as a callable."""
    factory, settings = CLIENT[name]
    case = case_named("unused")
    expected = plain_train(case, lambda model: factory(split_groups(model), **settings), steps=STEPS)
    model = case.build()
    groups = split_groups(model)
    if form == "object":
        optimizer = factory(groups, **settings)
        engine = start(model, plain_config(stage, optimizer=None), optimizer=optimizer)
        assert engine.basic_optimizer is optimizer
        assert [group["lr"] for group in engine.optimizer.param_groups] == [settings["lr"], 3e-3]
    else:
        config = plain_config(stage, optimizer=None)
        engine = start(model, config, optimizer=lambda params: factory(params, **settings), model_parameters=groups)
    return trained_error(engine, case, expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ["object", "callable"])
@pytest.mark.parametrize("name", CLIENT)
def test_client_optimizer_with_groups(pool2: RankPool, name: str, stage: int, form: str) -> None:
    for error, worst in pool2.run(by_client, name, stage, form):
        assert error <= TOLERANCE, (error, worst)


def config_groups(stage: int) -> tuple[float, str]:
    """Groups through ``model_parameters`` and the optimizer from the configuration; frozen parameters in between."""
    case = case_named("frozen")
    expected = plain_train(case, lambda model: torch.optim.AdamW(split_groups(model, lr=5e-3), **SMOOTH), steps=STEPS)
    model = case.build()
    block = {"type": "AdamW", "params": {**SMOOTH, "betas": [0.9, 0.95]}}
    engine = start(model, plain_config(stage, optimizer=block), model_parameters=split_groups(model, lr=5e-3))
    return trained_error(engine, case, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_groups_with_an_optimizer_from_the_configuration(pool2: RankPool, stage: int) -> None:
    for error, worst in pool2.run(config_groups, stage):
        assert error <= TOLERANCE, (error, worst)


def muon(stage: int) -> tuple[float, str]:
    """torch's Muon on a model of matrices."""
    case = matrices_case()
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    expected = plain_train(case, lambda model: torch.optim.Muon(model.parameters(), **settings), steps=STEPS)
    model = case.build()
    engine = start(
        model, plain_config(stage, optimizer=None), optimizer=torch.optim.Muon(model.parameters(), **settings)
    )
    return trained_error(engine, case, expected)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("stage", STAGES)
def test_torch_muon(pool2: RankPool, stage: int) -> None:
    for error, worst in pool2.run(muon, stage):
        assert error <= TOLERANCE, (error, worst)


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


def two_of_each() -> list[str]:
    """The warnings of an engine whose optimizer and schedule stand in the script and in the configuration."""
    model = case_named("plain").build()
    blocks = {"optimizer": {"type": "AdamW", "params": {}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    with logged(logging.WARNING) as said:
        start(
            model,
            plain_config(2, **blocks),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        ).destroy()
    return said


def test_blocks_that_objects_of_the_script_replace_are_told_once(pool2: RankPool) -> None:
    first, second = pool2.run(two_of_each)
    text = "the configuration's block {!r} ({}) is ignored, as deepspeed.initialize got another; delete one of the two"
    assert first == ["[rank 0] " + text.format(*block) for block in (("optimizer", "AdamW"), ("scheduler", "WarmupLR"))]
    assert not second


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
