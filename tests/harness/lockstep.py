"""The engine and a plain one-process model trained side by side, compared after every backward and every step."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.tools.verify.grads import full_gradients, full_parameters, scaled_error
from deepspeed.tools.verify.models import Case, MicroBatch
from deepspeed.tools.verify.reference import gate_optimizer, trainable
from deepspeed.zero.param import ReleasedFace
from deepspeed.zero.unit import UnitState
from deepspeed.zero.window import GradState
from tests.harness.training import here, start

TOLERANCE = 1e-6


class Lockstep:
    """``case`` under an engine with ``config`` on every rank, and the same case plain; losses are functions of the
    place.

    ``error`` is the largest error of any gradient or parameter so far, ``worst`` where it was met.
    """

    def __init__(
        self, case: Case, config: dict[str, Any], *, model: nn.Module | None = None, plain: nn.Module | None = None
    ) -> None:
        self.case = case
        self.engine = start(case.build().train() if model is None else model, config)
        self.plain = case.build().train() if plain is None else plain
        self.optimizer = gate_optimizer(self.plain)
        self.error, self.worst = 0.0, ""

    def step(self, step: int, *, before_step: Callable[[], None] | None = None) -> None:
        """One optimizer step of both, with all comparisons. Collective."""
        losses = self.case.seeded_loss(self.engine, here(step))
        for count, loss in enumerate(losses, start=1):
            self.engine.backward(loss, retain_graph=count < len(losses))
        self.plain_backward(step)
        self.compare_gradients(step)
        if before_step is not None:
            before_step()
        self.engine.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.compare_parameters(step)

    def plain_backward(self, step: int) -> None:
        """The gradients of all ranks' losses, averaged, on the plain model; missing ones are zeros."""
        world = dist.get_world_size()
        for rank in range(world):
            losses = self.case.seeded_loss(self.plain, MicroBatch(step, 0, rank, world))
            (sum(losses) / world).backward()  # type: ignore[union-attr]
        for param in trainable(self.plain).values():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad

    def compare_gradients(self, step: int) -> None:
        """Hold the full gradients against the plain ones. Collective."""
        expected = trainable(self.plain)
        for name, ours in full_gradients(trainable(self.engine.module)).items():
            plain = expected[name].grad
            assert plain is not None, name
            self.note(scaled_error(ours, plain), f"gradient of {name} at step {step}")

    def compare_parameters(self, step: int) -> None:
        """Hold the full parameters against the plain ones. Collective."""
        expected = dict(self.plain.named_parameters())
        for name, value in full_parameters(self.engine.module).items():
            self.note(scaled_error(value, expected[name].detach()), f"parameter {name} at step {step}")

    def note(self, error: float, where: str) -> None:
        """Remember the largest error."""
        if error > self.error:
            self.error, self.worst = error, where

    def finish(self) -> tuple[float, str]:
        """Destroy the engine; the largest error and its place."""
        self.engine.destroy()
        return self.error, self.worst


def lockstep(case: Case, config: dict[str, Any], *, steps: int = 3) -> tuple[float, str]:
    """Train both for ``steps`` steps; the largest error of anything and where. Collective."""
    pair = Lockstep(case, config)
    for step in range(steps):
        pair.step(step)
    restless = not_at_rest(pair.engine)
    assert not restless, restless
    return pair.finish()


def not_at_rest(engine: Any) -> list[str]:
    """What an idle engine should not have: users, pins, gathered parameters, local gradients, an open phase."""
    found = []
    for unit in engine.runtime.units:
        if unit.users or unit.pins:
            found.append(f"{unit.name}: {unit.users} users, {unit.pins} pins")
        if unit.movable and unit.state is not UnitState.ABSENT:
            found.append(f"{unit.name}: parameters are {unit.state.value}")
        if unit.window.state is GradState.LOCAL or unit.window.partial is not None:
            found.append(f"{unit.name}: gradients are {unit.window.state.value}")
    if engine.runtime.depth or engine.runtime.in_backward:
        found.append(f"depth {engine.runtime.depth}, in_backward {engine.runtime.in_backward}")
    return found


def live_bytes(model: nn.Module) -> int:
    """Storage bytes behind the parameters of ``model``, each storage once; released ones (a scalar of NaN) count
    nothing.
    """
    here = [p for p in model.parameters() if not isinstance(p, ReleasedFace)]
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in here}.values())


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Same names, same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
