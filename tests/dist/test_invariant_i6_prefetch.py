"""I6: a prefetch is bound to the unit's version; a misprediction costs time and never serves stale weights."""

import pytest
import torch
from torch import Tensor

from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import Case, MicroBatch, Stack
from deepspeed.zero.unit import UnitState
from tests.harness.cases import regression
from tests.harness.lockstep import equal
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, start

pytestmark = pytest.mark.timeout(60)
STEPS = 7
PREFETCH = {"param_persistence_threshold": 0, "overlap_comm": True, "prefetch_bucket_size": 10_000}
NO_PREFETCH = {"param_persistence_threshold": 0, "overlap_comm": False, "prefetch_bucket_size": 0}


class Reordered(Stack):
    """The blocks run in the order that the caller names."""

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.inp(x)
        for index in order:
            x = self.layers[index](x)
        return self.head(x)


ORDERS = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 0, 1), (2,)]


def _ordered_loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor], place: MicroBatch) -> list[Tensor]:
    x, y = batch
    return [(model(x, ORDERS[place.step % len(ORDERS)]) - y).square().mean()]


def _case(scenario: str) -> Case:
    return regression(Reordered, **({"loss": _ordered_loss} if scenario == "order" else {}))


def _disturb(scenario: str, engine: object, case: Case, step: int) -> None:
    """What happens between two iterations to make the forecast wrong."""
    runtime = engine.runtime  # type: ignore[attr-defined]
    phases = runtime.schedule._phases
    if scenario == "eval":
        with torch.no_grad():
            engine(case.batch(here(step))[0], ORDERS[step % len(ORDERS)])  # type: ignore[operator]
    elif scenario == "poked" and "train" in phases:
        phases["train"].trace = [(index * 7 + step) % len(runtime.units) for index in range(9)]
    elif scenario == "poked_per_rank" and "train" in phases:
        phases["train"].trace = phases["train"].trace[here(0).rank :: 2][::-1]
    elif scenario == "forgotten" and here(0).rank == 1:
        phases.clear()


def trained(scenario: str, zero: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    case = _case(scenario)
    engine = start(case.build(), make_config(3, zero=zero))
    values = []
    for step in range(STEPS):
        _disturb(scenario, engine, case, step)
        (loss,) = case.seeded_loss(engine, here(step))
        if scenario == "eval_between":
            with torch.no_grad():
                values.append(float(engine(case.batch(here(step))[0], ORDERS[step % len(ORDERS)]).sum()))
        engine.backward(loss)
        engine.step()
        values.append(float(loss.detach()))
    weights = full_parameters(engine.module)
    engine.destroy()
    return values, weights


def compared(scenario: str) -> tuple[bool, bool]:
    ours, plain = trained(scenario, PREFETCH), trained(scenario, NO_PREFETCH)
    return ours[0] == plain[0], equal(ours[1], plain[1])


@pytest.mark.in_make_test("order", "eval_between", "poked_per_rank", "forgotten")
@pytest.mark.parametrize("scenario", ["order", "eval", "eval_between", "poked", "poked_per_rank", "forgotten"])
def test_invariant_i6_mispredictions_are_bitwise_harmless(pool2: RankPool, scenario: str) -> None:
    for losses, weights in pool2.run(compared, scenario):
        assert losses, "losses differ from those without prefetch"
        assert weights, "weights differ from those without prefetch"


def prefetched_before_a_step() -> tuple[list[str], bool]:
    """A unit that is in flight while step() changes the weights is fetched again."""
    case = _case("plain")
    engine = start(case.build(), make_config(3, zero=PREFETCH))
    plain = start(case.build(), make_config(3, zero=NO_PREFETCH))
    states = []
    for step in range(3):
        for each in (engine, plain):
            each.backward(case.seeded_loss(each, here(step))[0])
        early = [u for u in engine.runtime.units if u.movable]
        for unit in early:
            engine.runtime._gather(unit, dummy=False)
        states += [unit.state.value for unit in early if unit.state is not UnitState.FETCHING]
        engine.step()
        plain.step()
    same = equal(full_parameters(engine.module), full_parameters(plain.module))
    with torch.no_grad():
        same = same and torch.equal(*(each(case.batch(here(3))[0]) for each in (engine, plain)))
    for each in (engine, plain):
        each.destroy()
    return states, same


def test_invariant_i6_a_fetch_from_before_a_step_is_never_used(pool2: RankPool) -> None:
    for states, same in pool2.run(prefetched_before_a_step):
        assert states == []
        assert same
