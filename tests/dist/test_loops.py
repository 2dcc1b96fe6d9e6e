"""Any legal PyTorch loop gives the gradients that it gives without sharding, at every stage.

Each loop is written once and run twice: on a plain model once per rank's data in one process, and on the engine.
The gradients before the step and the parameters after two steps must agree within 1e-6. The loops of ``ds_verify loop``
are in test_verify_training.py.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.tools.verify.grads import full_gradients, scaled_error
from deepspeed.tools.verify.models import OUT_FEATURES, MicroBatch, Stack, regression_batch, seeded
from deepspeed.tools.verify.reference import gate_optimizer, trainable
from tests.harness.cases import TwoHeads
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, outcome, parameter_error, start

pytestmark = pytest.mark.timeout(120)
STEPS = 2
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Tools:
    """What differs between a plain model and an engine inside a loop."""

    model: Callable[..., Any]
    module: Any
    backward: Callable[..., Any]
    no_sync: Callable[[], Any]
    boundary: Callable[[bool], Any]


def sample(place: MicroBatch, part: int = 0) -> tuple[Tensor, Tensor]:
    """The ``part``-th micro-batch of a place."""
    return regression_batch(place._replace(micro=part))


def loss_of(tools: Tools, place: MicroBatch, part: int = 0) -> Tensor:
    """Squared error of one micro-batch."""
    x, y = sample(place, part)
    return F.mse_loss(tools.model(x), y)


def accumulate_by_hand(tools: Tools, place: MicroBatch) -> None:
    """As many micro-batches as the step asks for, each divided by hand, before one ``step``."""
    count = 3 - place.step
    for part in range(count):
        (loss_of(tools, place, part) / count).backward()


def accumulate_with_boundary(tools: Tools, place: MicroBatch) -> None:
    """Accelerate's way: the boundary is set before every backward, ``step`` is called once."""
    count = 2 + place.step
    for part in range(count):
        tools.boundary(part == count - 1)
        tools.backward(loss_of(tools, place, part) / count)


def two_forwards_then_two_backwards(tools: Tools, place: MicroBatch) -> None:
    first, second = loss_of(tools, place, 0), loss_of(tools, place, 1)
    tools.backward(first)
    tools.backward(second)


def only_a_submodule(tools: Tools, place: MicroBatch) -> None:
    x, _ = sample(place)
    tools.module.head(tools.module.inp(x)).square().mean().backward()


def input_gradient(tools: Tools, place: MicroBatch) -> None:
    """``autograd.grad`` with respect to the input must leave the parameters' gradients alone."""
    x, y = sample(place)
    x.requires_grad_()
    loss = F.mse_loss(tools.model(x), y)
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    tools.backward(loss * (1 + slope.detach().square().sum()))


LOOPS = (
    accumulate_by_hand,
    accumulate_with_boundary,
    two_forwards_then_two_backwards,
    only_a_submodule,
    input_gradient,
)


def plain_tools(model: nn.Module) -> Tools:
    """The tools of a plain PyTorch loop."""
    return Tools(
        model=model,
        module=model,
        backward=lambda loss, retain_graph=False: loss.backward(retain_graph=retain_graph),
        no_sync=contextlib.nullcontext,
        boundary=lambda _: None,
    )


def engine_tools(engine: Any) -> Tools:
    """The same names on an engine."""
    return Tools(
        model=engine,
        module=engine.module,
        backward=engine.backward,
        no_sync=engine.no_sync,
        boundary=lambda last: engine.set_gradient_accumulation_boundary(is_boundary=last),
    )


def reference_run(
    loop: Callable[[Tools, MicroBatch], None], world: int
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Averaged gradients of every step and the final parameters of the plain loop."""
    model = seeded(Stack)()
    optimizer = gate_optimizer(model)
    all_grads = []
    for step in range(STEPS):
        for rank in range(world):
            loop(plain_tools(model), MicroBatch(step, 0, rank, world))
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad / world
        all_grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return all_grads, {name: p.detach().clone() for name, p in model.named_parameters()}


def run_loop(name: str, stage: int, **changes: Any) -> tuple[dict[str, float], str]:
    """Largest gradient error per step and parameter error of one loop on the ranks of this group."""
    loop = next(function for function in LOOPS if function.__name__ == name)
    expected_grads, expected_params = reference_run(loop, dist.get_world_size())
    engine = start(seeded(Stack)(), make_config(stage, **changes))
    errors = {}
    for step in range(STEPS):
        loop(engine_tools(engine), here(step))
        grads = full_gradients(trainable(engine.module))
        errors[f"grad {step}"] = max(scaled_error(grad, expected_grads[step][key]) for key, grad in grads.items())
        engine.step()
    errors["param"], worst = parameter_error(engine.module, expected_params)
    engine.destroy()
    return errors, worst


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", [loop.__name__ for loop in LOOPS])
def test_loop(pool2: RankPool, name: str, stage: int) -> None:
    for errors, worst in pool2.run(run_loop, name, stage):
        assert max(errors.values()) <= TOLERANCE, (errors, worst)


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_unmanaged_accumulation(pool2: RankPool, stage: int) -> None:
    """``managed_gradient_accumulation: false``: every ``step`` is an update, the caller divides."""
    for errors, worst in pool2.run(run_loop, "accumulate_by_hand", stage, managed_gradient_accumulation=False):
        assert max(errors.values()) <= TOLERANCE, (errors, worst)


def _scaled_once(stage: int) -> tuple[dict[str, float], str]:
    """Accumulation 2 with ``scale_wrt_gas=False``: the caller has divided already."""
    expected_grads, expected = reference_run(two_forwards_then_two_backwards, dist.get_world_size())
    engine = start(seeded(Stack)(), make_config(stage, gradient_accumulation_steps=2))
    errors = {}
    for step in range(STEPS):
        for part in range(2):
            engine.backward(loss_of(engine_tools(engine), here(step), part), scale_wrt_gas=False)
            if part == 1:
                grads = full_gradients(trainable(engine.module))
                errors[f"grad {step}"] = max(scaled_error(g, expected_grads[step][k]) for k, g in grads.items())
            engine.step()
    errors["param"], worst = parameter_error(engine.module, expected)
    engine.destroy()
    return errors, worst


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", STAGES)
def test_scale_wrt_gas_false_does_not_divide(pool2: RankPool, stage: int) -> None:
    for errors, worst in pool2.run(_scaled_once, stage):
        assert max(errors.values()) <= TOLERANCE, (errors, worst)


def _mixed_window(stage: int) -> dict[str, float]:
    """One window of four micro-batches, every other one by a plain backward, which the engine divides at another
    place.
    """
    world, parts = dist.get_world_size(), 4
    model = seeded(Stack)()
    for rank, part in product(range(world), range(parts)):
        (loss_of(plain_tools(model), MicroBatch(0, 0, rank, world), part) / (parts * world)).backward()
    engine = start(seeded(Stack)(), make_config(stage, gradient_accumulation_steps=parts))
    for part in range(parts):
        loss = loss_of(engine_tools(engine), here(0), part)
        if part % 2:
            engine.backward(loss)
        else:
            loss.backward()
        if part < parts - 1:
            engine.step()
    grads = full_gradients(trainable(engine.module))
    engine.step()
    engine.destroy()
    expected = dict(model.named_parameters())
    return {name: scaled_error(grad, expected[name].grad) for name, grad in grads.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_plain_and_engine_backwards_share_a_window(pool2: RankPool, stage: int) -> None:
    for errors in pool2.run(_mixed_window, stage):
        assert max(errors.values()) <= TOLERANCE, errors


def _coalesced(stage: int) -> dict[str, float]:
    expected_grads, _ = reference_run(two_forwards_then_two_backwards, dist.get_world_size())
    engine = start(seeded(Stack)(), make_config(stage))
    with engine.coalesce_grad_reduction():
        for part in range(2):
            engine.backward(loss_of(engine_tools(engine), here(0), part))
    grads = full_gradients(trainable(engine.module))
    engine.step()
    engine.destroy()
    return {key: scaled_error(grad, expected_grads[0][key]) for key, grad in grads.items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_coalesced_reduction(pool2: RankPool, stage: int) -> None:
    for errors in pool2.run(_coalesced, stage):
        assert max(errors.values()) <= TOLERANCE, errors


class Critic(nn.Module):
    """Judges a generator's output: [samples, OUT_FEATURES] -> [samples, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(OUT_FEATURES, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def adversarial_losses(
    generator: Callable[..., Tensor], critic: Callable[..., Tensor], place: MicroBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """The critic's loss (on a detached fake) and, after it, what the generator's loss needs."""
    x, real = sample(place)
    fake = generator(x)
    critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    return critic_loss, fake, real


def plain_adversarial(world: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A GAN in plain PyTorch over the data of every rank."""
    generator, critic = seeded(Stack)(), seeded(Critic)()
    optimizers = gate_optimizer(generator), gate_optimizer(critic)
    for step in range(STEPS):
        places = [MicroBatch(step, 0, rank, world) for rank in range(world)]
        for place in places:
            (adversarial_losses(generator, critic, place)[0] / world).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        for place in places:
            (F.softplus(-critic(generator(sample(place)[0]))).mean() / world).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
    return tuple({n: p.detach().clone() for n, p in m.named_parameters()} for m in (generator, critic))  # type: ignore[return-value]


def run_adversarial(stages: tuple[int, int]) -> tuple[float, float]:
    """The same GAN with two engines; the generator's backward passes through the critic's parameters."""
    expected = plain_adversarial(dist.get_world_size())
    generator = start(seeded(Stack)(), make_config(stages[0]))
    critic = start(seeded(Critic)(), make_config(stages[1]))
    for step in range(STEPS):
        place = here(step)
        critic.backward(adversarial_losses(generator, critic, place)[0])
        critic.step()
        generator.backward(F.softplus(-critic(generator(sample(place)[0]))).mean())
        generator.step()
        critic.zero_grad()
    errors = tuple(
        parameter_error(engine.module, wanted)[0] for engine, wanted in zip((generator, critic), expected, strict=True)
    )
    generator.destroy()
    critic.destroy()
    return errors  # type: ignore[return-value]


@pytest.mark.in_make_test("stages0", "stages2", "stages4")
@pytest.mark.parametrize("stages", [(0, 0), (1, 1), (2, 2), (3, 3), (3, 1), (0, 3)])
def test_adversarial_pair(pool2: RankPool, stages: tuple[int, int]) -> None:
    for errors in pool2.run(run_adversarial, stages):
        assert max(errors) <= TOLERANCE, errors


def _misuse(stage: int) -> dict[str, str]:
    engine = start(seeded(TwoHeads)(), make_config(stage))
    told = {"step before backward": outcome(engine.step)}
    x, _ = sample(here(0))
    first, second = engine(x)
    told["non-scalar"] = outcome(lambda: engine.backward(first))
    told["no graph"] = without = outcome(lambda: engine.backward(first.sum().detach()))
    assert "without torch.no_grad()" in without and "Reduce" not in without

    def step_inside() -> None:
        with engine.no_sync():
            engine.step()

    told["step inside no_sync"] = outcome(step_inside)
    engine.backward(first.sum() + second.sum())
    engine.step()
    engine.destroy()
    return told


@pytest.mark.parametrize("stage", STAGES)
def test_misuse_is_refused_and_the_engine_goes_on(pool2: RankPool, stage: int) -> None:
    for told in pool2.run(_misuse, stage):
        assert all("AssertionError" in text for text in told.values()), told
