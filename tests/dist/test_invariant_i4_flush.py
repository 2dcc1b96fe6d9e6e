"""I4: reduction is driven by gradient hooks when they fire and by flush() always; flush is idempotent; missing
gradients are zeros. That every contribution is reduced once, test_parity_matrix.py shows.
"""

import pytest
import torch
from torch import Tensor

import deepspeed
from deepspeed.tools.verify.grads import full_gradients, scaled_error
from deepspeed.tools.verify.reference import trainable
from deepspeed.zero.window import GradState
from tests.harness.cases import case_named
from tests.harness.lockstep import TOLERANCE, Lockstep
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, start, train_step

pytestmark = pytest.mark.timeout(60)


def flushed_many_times(stage: int) -> float:
    pair = Lockstep(case_named("unused"), make_config(stage))
    runtime = pair.engine.runtime
    runtime.flush()
    for loss in pair.case.seeded_loss(pair.engine, here(0)):
        loss.backward()
    for _ in range(3):
        runtime.flush()
    pair.engine.allreduce_gradients()
    pair.plain_backward(0)
    pair.compare_gradients(0)
    assert not any(u.window.state is GradState.LOCAL for u in runtime.units)
    pair.engine.step()
    pair.optimizer.step()
    pair.compare_parameters(0)
    return pair.finish()[0]


@pytest.mark.parametrize("stage", STAGES)
def test_invariant_i4_flush_is_idempotent(pool2: RankPool, stage: int) -> None:
    assert max(pool2.run(flushed_many_times, stage)) <= TOLERANCE


def partial_backwards(stage: int) -> float:
    """Gradients through torch.autograd.grad leave no trace; backward over part of the graph, then over the rest, adds
    up.
    """
    case = case_named("two_losses")
    engine = start(case.build(), make_config(stage))
    plain = case.build()
    x, y = case.batch(here(0))

    def losses(model: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        first, second = model(leaf)
        return leaf, (first - y).square().mean(), second.square().mean()

    grads = []
    for model, back in ((engine, engine.backward), (plain, Tensor.backward)):
        leaf, first, second = losses(model)
        grads.append(torch.autograd.grad(first, leaf, retain_graph=True)[0])
        back(second, retain_graph=True)
        back(first)
    error = scaled_error(grads[0], grads[1])
    world = torch.distributed.get_world_size()
    for param in trainable(plain).values():
        torch.distributed.all_reduce(param.grad)
        param.grad /= world
    for name, ours in full_gradients(trainable(engine.module)).items():
        error = max(error, scaled_error(ours, trainable(plain)[name].grad))
    engine.destroy()
    return error


@pytest.mark.parametrize("stage", STAGES)
def test_invariant_i4_input_gradients_and_partial_backwards(pool2: RankPool, stage: int) -> None:
    assert max(pool2.run(partial_backwards, stage)) <= TOLERANCE


def never_backpropagated(stage: int) -> list[float]:
    """A step after a backward that reached only the head: all other gradients are zeros, not stale values."""
    case = case_named("plain")
    engine = start(case.build(), make_config(stage))
    train_step(engine, case, 0)
    head = engine.module.head
    with deepspeed.zero.GatheredParameters(list(head.parameters())):
        engine.backward(head(torch.ones(2, head.in_features)).sum())
    found = full_gradients(trainable(engine.module))
    engine.step()  # what nobody touched must not move by old gradients either
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return [
        float(sum(g.abs().sum() for n, g in found.items() if not n.startswith("head"))),
        float((found["head.weight"] - 2.0).abs().max()),
        abs(norm - float((found["head.weight"].square().sum() + found["head.bias"].square().sum()).sqrt())),
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_invariant_i4_missing_gradients_are_zeros(pool2: RankPool, stage: int) -> None:
    for others, head, norm in pool2.run(never_backpropagated, stage):
        assert others == 0.0
        assert head <= TOLERANCE
        assert norm <= 1e-4
