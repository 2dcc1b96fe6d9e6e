"""Any legal PyTorch loop gives the gradients that it gives without sharding, at every stage.

Each loop is written once, and trains a plain model on the data of every rank in one process, and the engine. The
gradients before the step, norms, and the parameters after two steps must agree within 1e-6. The loops of ``ds_verify
loop`` are in test_verify_training.py.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.tools.verify.grads import Errors, compare, compare_update, full_gradients, no_errors
from deepspeed.tools.verify.models import (
    OUT_FEATURES,
    Losses,
    MicroBatch,
    Stack,
    case_named,
    regression_batch,
    seeded,
    squared_error,
)
from deepspeed.tools.verify.reference import gate_optimizer, train_reference, trainable
from tests.harness.cases import TwoHeads
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, outcome, parameter_error, start

pytestmark = pytest.mark.timeout(120)
STEPS = 2
TOLERANCE = 1e-6
Call = Callable[..., Any]


# -- losses of a micro-batch -------------------------------------------------------------------------------------
def in_turn(model: nn.Module, _: Any, place: MicroBatch) -> Iterator[Tensor]:
    """Losses of more or fewer batches, which the loop has divided. Each forward runs when its loss is asked for, so
    that one loss is back-propagated before the next forward.
    """
    count = 3 - place.step
    for part in range(count):
        x, y = regression_batch(place._replace(micro=part))
        yield F.mse_loss(model(x), y) / count


def of_submodules(model: Any, batch: Any, _: MicroBatch) -> Losses:
    """No forward of the model itself."""
    module = getattr(model, "module", model)
    return [module.head(module.inp(batch[0])).square().mean()]


# -- how they are back-propagated: by an engine's ``backward``, or by that of plain tensors ------------------------
def engine_of(call: Call) -> Any:
    return getattr(call, "__self__", None)


def plainly(losses: Losses, _: Call) -> None:
    for loss in losses:
        loss.backward()


def to_a_boundary(losses: Losses, call: Call) -> None:
    """Accelerate's way: the boundary is set before every backward, ``step`` is called once."""
    engine, count = engine_of(call), 0
    for loss in losses:
        if engine is not None:
            count += 1
            engine.set_gradient_accumulation_boundary(is_boundary=count == 3 - engine.global_steps)
        call(loss)


def coalesced(losses: Losses, call: Call) -> None:
    engine = engine_of(call)
    if engine is None:
        plainly(losses, call)
    else:
        with engine.coalesce_grad_reduction():
            for loss in losses:
                call(loss)


def divided_by_the_loop(losses: Losses, call: Call) -> None:
    """Of two micro-batches."""
    for loss in losses:
        if engine_of(call) is None:
            call(loss)
        else:
            call(loss / 2, scale_wrt_gas=False)


def every_other_plainly(losses: Losses, call: Call) -> None:
    """A plain backward is divided by the accumulation at another place than the engine's."""
    engine = engine_of(call)
    for loss in losses:
        if engine is None or engine.micro_steps % 2:
            call(loss)
        else:
            loss.backward()


def with_a_graph(losses: Losses, call: Call) -> None:
    """Gradients that could be differentiated again, of which torch warns."""
    for loss in losses:
        if engine_of(call) is None:
            call(loss)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss.backward(create_graph=True)


# name: losses, how they are back-propagated, micro-batches of a step, and what is configured
LOOPS: dict[str, tuple[Call, Call, int, dict[str, Any]]] = {
    "by_hand": (in_turn, plainly, 1, {}),
    "unmanaged": (in_turn, plainly, 1, {"managed_gradient_accumulation": False}),
    "boundary": (in_turn, to_a_boundary, 1, {}),
    "coalesced": (in_turn, coalesced, 1, {}),
    "submodules": (of_submodules, plainly, 1, {}),
    "divided": (squared_error, divided_by_the_loop, 2, {}),
    "with_a_graph": (squared_error, with_a_graph, 2, {}),
    "every_other_plainly": (squared_error, every_other_plainly, 4, {}),
}


def run_loop(name: str, stage: int) -> Errors:
    """Largest errors of gradients, norms and parameters of one loop on the ranks of this group. Collective."""
    loss, by, accumulation, changes = LOOPS[name]
    case, errors = case_named("plain", loss=loss, by=by, accumulation=accumulation), no_errors()
    engine = start(case.build().train(), make_config(stage, gradient_accumulation_steps=accumulation, **changes))
    for step, record in enumerate(train_reference(case, world=dist.get_world_size(), steps=STEPS)):
        for micro in range(accumulation):
            case.backward(case.seeded_loss(engine, here(step, micro)), engine.backward)
            if micro == accumulation - 1:
                compare(errors, "grad", full_gradients(trainable(engine.module)), record.grads, f"at step {step}")
            engine.step()
        compare_update(engine, record, step, errors)
    engine.destroy()
    return errors


@pytest.mark.in_make_test(
    "by_hand-1",
    "unmanaged-3",
    "boundary-3",
    "coalesced-2",
    "submodules-3",
    "divided-0",
    "with_a_graph-3",
    "every_other_plainly-3",
)
@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in LOOPS for stage in STAGES if stage or name != "coalesced"]
)
def test_loop(pool2: RankPool, name: str, stage: int) -> None:
    for errors in pool2.run(run_loop, name, stage):
        assert max(error for error, _ in errors.values()) <= TOLERANCE, errors


# -- two engines ---------------------------------------------------------------------------------------------------
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
    x, real = regression_batch(place)
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
            (F.softplus(-critic(generator(regression_batch(place)[0]))).mean() / world).backward()
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
        generator.backward(F.softplus(-critic(generator(regression_batch(place)[0]))).mean())
        generator.step()
        critic.zero_grad()
    errors = tuple(
        parameter_error(engine.module, wanted)[0] for engine, wanted in zip((generator, critic), expected, strict=True)
    )
    generator.destroy()
    critic.destroy()
    return errors  # type: ignore[return-value]


@pytest.mark.in_make_test("stages2", "stages4")
@pytest.mark.parametrize("stages", [(0, 0), (1, 1), (2, 2), (3, 3), (3, 1), (0, 3)])
def test_adversarial_pair(pool2: RankPool, stages: tuple[int, int]) -> None:
    for errors in pool2.run(run_adversarial, stages):
        assert max(errors) <= TOLERANCE, errors


def _misuse(stage: int) -> dict[str, str]:
    engine = start(seeded(TwoHeads)(), make_config(stage))
    told = {"step before backward": outcome(engine.step)}
    x, _ = regression_batch(here(0))
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


@pytest.mark.in_make_test("0", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_misuse_is_refused_and_the_engine_goes_on(pool2: RankPool, stage: int) -> None:
    for told in pool2.run(_misuse, stage):
        assert all("AssertionError" in text for text in told.values()), told
