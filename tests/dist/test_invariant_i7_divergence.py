"""I7: ranks that take different branches neither hang nor diverge; with "divergence": "error" all of them raise,
quickly.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.errors import DivergenceError
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import (
    HIDDEN,
    IN_FEATURES,
    OUT_FEATURES,
    Case,
    MicroBatch,
    ResidualBlock,
    regression_batch,
    seeded,
)
from tests.harness.lockstep import TOLERANCE, Lockstep, not_at_rest
from tests.harness.patience import too_long
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, start

pytestmark = pytest.mark.timeout(60)
LIMIT = 40.0
ZERO = {"param_persistence_threshold": 0}


@dataclass(frozen=True)
class Route:
    """Which parts of the model one forward pass uses, and in which order."""

    tower: bool = True
    experts: tuple[int, ...] = (0, 1, 2)
    layers: tuple[int, ...] = (0, 1)
    head: bool = True
    recompute: bool = False


class Router(nn.Module):
    """A vision tower, experts, layers and a head, any of which a forward pass may skip, reorder or use twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(IN_FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
        self.inp = nn.Linear(IN_FEATURES, HIDDEN)
        self.experts = nn.ModuleList([ResidualBlock() for _ in range(3)])
        self.layers = nn.ModuleList([ResidualBlock() for _ in range(2)])
        self.head = nn.Linear(HIDDEN, OUT_FEATURES)

    def forward(self, x: Tensor, route: Route) -> Tensor:
        hidden = self.inp(x)
        if route.tower:
            hidden = hidden + self.tower(x)
        for index in route.experts:
            hidden = hidden + 0.5 * self.experts[index](hidden)
        for index in route.layers:
            layer = self.layers[index]
            hidden = checkpoint(layer, hidden, use_reentrant=False) if route.recompute else layer(hidden)
        return self.head(hidden) if route.head else hidden[:, :OUT_FEATURES]


ALL = Route()
# scenario -> the routes that rank r takes at step s: table[r % len][s % len]
SCENARIOS: dict[str, list[list[Route]]] = {
    "skip_expert": [[ALL], [Route(experts=(0, 2))]],
    "skip_tower": [[ALL], [Route(tower=False)]],
    "skip_both_later": [[ALL], [ALL, Route(tower=False, experts=(2,)), ALL]],
    "only_one_rank_uses_it": [[Route(tower=False, experts=())], [ALL]],
    "disjoint_experts": [[Route(experts=(0,))], [Route(experts=(1,))], [Route(experts=(2,))]],
    "other_order": [[Route(experts=(0, 1, 2), layers=(0, 1))], [Route(experts=(2, 0, 1), layers=(1, 0))]],
    "twice": [[ALL], [Route(experts=(1, 1, 0), layers=(0, 1, 0))]],
    "skip_last": [[ALL], [Route(head=False)]],
    "recomputed": [[Route(recompute=True)], [Route(recompute=True, experts=(1,), layers=(1,)), Route(tower=False)]],
    "nothing_in_common": [
        [Route(tower=True, experts=(0,), layers=(0,))],
        [Route(tower=False, experts=(1,), layers=(1,), head=False)],
    ],
    "swapping": [
        [Route(experts=(0,)), Route(experts=(1,))],
        [Route(experts=(1,), head=False), Route(experts=(0,), tower=False)],
    ],
}


def route_of(scenario: str, step: int, rank: int) -> Route:
    rows = SCENARIOS[scenario]
    row = rows[rank % len(rows)]
    return row[step % len(row)]


def routed(route: Callable[[MicroBatch], Route]) -> Case:
    """A regression in which every rank takes the route of its place."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor], place: MicroBatch) -> list[Tensor]:
        x, y = batch
        return [(model(x, route(place)) - y).square().mean()]

    return Case("routed", seeded(Router), regression_batch, loss)


def _case(scenario: str) -> Case:
    return routed(lambda place: route_of(scenario, place.step, place.rank))


SAME = routed(lambda _: ALL)


def trained(scenario: str, config: dict[str, Any], *, with_eval: bool) -> tuple[float, str]:
    pair = Lockstep(_case(scenario), config)
    for step in range(4):
        if with_eval:
            x = pair.case.batch(here(step))[0]
            route = route_of(scenario, step + 1, dist.get_rank())
            with torch.no_grad():
                error = float((pair.engine.eval()(x, route) - pair.plain(x, route)).abs().max())
            pair.note(error, f"evaluation before step {step}")
            pair.engine.train()
        pair.step(step)
    assert not_at_rest(pair.engine) == []
    return pair.finish()


@pytest.mark.in_make_test(
    "skip_expert-train_and_eval",
    "skip_both_later-train_and_eval",
    "only_one_rank_uses_it-train_and_eval",
    "other_order-train_and_eval",
)
@pytest.mark.parametrize("with_eval", [False, True], ids=["train", "train_and_eval"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_invariant_i7_ranks_may_diverge(pool2: RankPool, scenario: str, with_eval: bool) -> None:
    config = make_config(3, zero=ZERO)
    for error, worst in pool2.run(trained, scenario, config, with_eval=with_eval, time_limit=LIMIT):
        assert error <= TOLERANCE, worst


OTHER_PLANS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": make_config(stage, zero={"reduce_bucket_size": 50}) for stage in (0, 1, 2)},
    "nothing ahead": make_config(3, zero={**ZERO, "prefetch_bucket_size": 0, "overlap_comm": False}),
    "much ahead": make_config(3, zero={**ZERO, "prefetch_bucket_size": 10_000}),
}


@pytest.mark.in_make_test("nothing_in_common-stage 0-2", "nothing_in_common-stage 2-2")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("plan", OTHER_PLANS)
@pytest.mark.parametrize("scenario", ["skip_both_later", "disjoint_experts", "nothing_in_common", "twice"])
def test_invariant_i7_under_other_plans(request: pytest.FixtureRequest, scenario: str, plan: str, world: int) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    for error, worst in pool.run(trained, scenario, OTHER_PLANS[plan], with_eval=True, time_limit=LIMIT):
        assert error <= TOLERANCE, worst


def accumulated(scenario: str, stage: int) -> float:
    """Four micro-batches per step, each on its own route, through the engine's window."""
    case, world = routed(lambda place: route_of(scenario, place.micro, place.rank)), dist.get_world_size()
    pair = Lockstep(case, make_config(stage, zero=ZERO, gradient_accumulation_steps=4))
    for micro in range(4):
        for rank in range(world):
            (case.seeded_loss(pair.plain, MicroBatch(0, micro, rank, world))[0] / (4 * world)).backward()
        pair.engine.backward(case.seeded_loss(pair.engine, here(0, micro))[0])
        if micro < 3:
            pair.engine.step()
    for param in pair.plain.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    pair.compare_gradients(0)
    pair.engine.step()
    return pair.finish()[0]


@pytest.mark.in_make_test("recomputed-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("scenario", ["skip_expert", "swapping", "recomputed"])
def test_invariant_i7_with_accumulation(pool2: RankPool, scenario: str, stage: int) -> None:
    assert max(pool2.run(accumulated, scenario, stage, time_limit=LIMIT)) <= TOLERANCE


def collectives_of_the_user(scenario: str) -> list[float]:
    """The user's own collectives right after a forward must meet, whatever parts a rank skipped (metrics after
    evaluation).
    """
    case = _case(scenario)
    engine = start(case.build(), make_config(3, zero=ZERO))
    seen = []
    for step in range(2):
        with torch.no_grad():
            (value,) = case.seeded_loss(engine, here(step))
        dist.all_reduce(value)
        (loss,) = case.seeded_loss(engine, here(step))
        dist.all_reduce(shown := loss.detach().clone())
        engine.backward(loss)
        dist.barrier()
        engine.step()
        seen += [float(value), float(shown)]
    # The last thing a job does: some ranks evaluate one part more than others, then all meet.
    with torch.no_grad():
        case.seeded_loss(engine, here(0))
    dist.barrier()
    engine.destroy()
    return seen


@pytest.mark.in_make_test("skip_last", "nothing_in_common", "only_one_rank_uses_it")
@pytest.mark.parametrize(
    "scenario", ["skip_expert", "skip_tower", "skip_last", "nothing_in_common", "only_one_rank_uses_it"]
)
def test_invariant_i7_collectives_of_the_user_meet(pool2: RankPool, scenario: str) -> None:
    first, second = pool2.run(collectives_of_the_user, scenario, time_limit=LIMIT)
    assert first == second


def born_sharded(scenario: str) -> tuple[float, str]:
    """The same for a model that was built under zero.Init, with gathered reads and consolidated weights in between."""
    case = _case(scenario)
    with deepspeed.zero.Init():
        torch.manual_seed(5)
        model = Router()
    plain = Router()
    plain.load_state_dict(full_parameters(model))
    pair = Lockstep(case, make_config(3, zero=ZERO), model=model, plain=plain)
    for step in range(3):
        pair.step(step)
        pair.engine._zero3_consolidated_16bit_state_dict()
    return pair.finish()


def test_invariant_i7_born_sharded(pool2: RankPool) -> None:
    for error, worst in pool2.run(born_sharded, "swapping", time_limit=LIMIT):
        assert error <= TOLERANCE, worst


def refused(scenario: str, phase: str) -> tuple[str, bool, float]:
    """What an engine in mode "error" says at the diverging step, whether that took long, and the error of a clean step
    afterwards.
    """
    pair = Lockstep(SAME, make_config(3, zero={**ZERO, "divergence": "error"}))
    pair.step(0)
    started = time.monotonic()
    said = ""
    try:
        with torch.set_grad_enabled(phase == "train"):
            (loss,) = _case(scenario).seeded_loss(pair.engine, here(1))
        if phase == "train":
            pair.engine.backward(loss)
            pair.engine.step()
    except DivergenceError as error:
        said = str(error)
    late = too_long(started, 5.0)
    pair.step(1)
    return said, late, pair.finish()[0]


STEADY = 7  # equal steps, after which the ranks no longer send messages in between
LATE = 11
# What all ranks do, and what the last one does for once: the others go on by prediction and do not know.
SURPRISES = {
    "skips_an_expert": (ALL, Route(experts=(0, 2))),
    "skips_the_tower_and_the_head": (ALL, Route(tower=False, head=False)),
    "needs_the_tower": (Route(tower=False), ALL),
    "needs_an_expert": (Route(experts=(0,)), Route(experts=(0, 2))),
    "needs_another_one": (Route(experts=(0,), tower=False), Route(experts=(1,), tower=False)),
    "other_order": (ALL, Route(experts=(2, 0, 1), layers=(1, 0))),
    "twice": (ALL, Route(experts=(1, 1, 0), layers=(0, 1, 0))),
    "recomputes": (ALL, Route(recompute=True)),
}


def surprising(name: str) -> Case:
    """The last rank surprises the others in step ``STEADY``."""
    usual, surprise = SURPRISES[name]
    return routed(lambda place: surprise if place.step == STEADY and place.rank == place.world - 1 else usual)


def surprised(name: str, config: dict[str, Any], *, shared: bool = False) -> tuple[float, str, list[int]]:
    """Through the surprise: the largest error, where, and the messages of each forward and backward; with ``shared``, a
    collective of the user's lies between them.
    """
    case = surprising(name)
    pair = Lockstep(case, config)
    messages: list[int] = []
    for step in range(LATE):
        before = pair.engine.runtime.agreement.rounds
        (loss,) = case.seeded_loss(pair.engine, here(step))
        if shared:
            dist.all_reduce(loss.detach().clone())
        pair.engine.backward(loss)
        messages.append(pair.engine.runtime.agreement.rounds - before)
        pair.plain_backward(step)
        pair.compare_gradients(step)
        pair.engine.step()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.compare_parameters(step)
        assert not_at_rest(pair.engine) == []
    return *pair.finish(), messages


SEVERAL = {"3": ({**ZERO, "stage": 3}, 2), "3-of-three": ({**ZERO, "stage": 3}, 3)}
SEVERAL |= {str(stage): ({"stage": stage, "reduce_bucket_size": 50}, 2) for stage in (1, 2)}


@pytest.mark.in_make_test(
    "skips_the_tower_and_the_head-3", "recomputes-3", "other_order-2", "skips_the_tower_and_the_head-3-of-three"
)
@pytest.mark.parametrize("plan", SEVERAL)
@pytest.mark.parametrize("name", SURPRISES)
def test_invariant_i7_a_surprise_after_predictions(request: pytest.FixtureRequest, name: str, plan: str) -> None:
    zero, world = SEVERAL[plan]
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    for error, worst, messages in pool.run(surprised, name, make_config(3, zero=zero), time_limit=LIMIT):
        assert error <= TOLERANCE, worst
        assert messages[STEADY - 1] == 1, "a backward is to cost one message by now"
        # To skip, or to recompute, is to be a dummy: that costs no further message.
        assert plan != "3" or messages[STEADY] > 1 or name in ("recomputes", "skips_an_expert")


@pytest.mark.in_make_test("skips_the_tower_and_the_head")
@pytest.mark.parametrize("name", ["skips_the_tower_and_the_head", "needs_the_tower", "other_order"])
def test_invariant_i7_a_surprise_before_a_collective_of_the_users(pool2: RankPool, name: str) -> None:
    """Between forward and backward the others wait for the rank that still needs something: the end of the forward
    stays a message.
    """
    for error, worst, messages in pool2.run(surprised, name, make_config(3, zero=ZERO), shared=True, time_limit=LIMIT):
        assert error <= TOLERANCE, worst
        assert messages[STEADY - 1] <= 2


def refused_after_predictions(name: str) -> tuple[str, float]:
    case = surprising(name)
    pair = Lockstep(case, make_config(3, zero={**ZERO, "divergence": "error"}))
    for step in range(STEADY):
        pair.step(step)
    assert pair.engine.runtime.agreement.mismatches == 0
    said = ""
    try:
        pair.engine.backward(case.seeded_loss(pair.engine, here(STEADY))[0])
    except DivergenceError as error:
        said = str(error)
    pair.step(STEADY + 1)
    return said, pair.finish()[0]


@pytest.mark.in_make_test("skips_the_tower_and_the_head")
@pytest.mark.parametrize("name", [n for n in SURPRISES if n != "recomputes"])
def test_invariant_i7_error_mode_after_predictions(pool2: RankPool, name: str) -> None:
    for said, error in pool2.run(refused_after_predictions, name, time_limit=LIMIT):
        assert "rank 0" in said and "rank 1" in said and f"step {STEADY}" in said, said
        assert any(part in said for part in ("expert", "tower", "layers", "head")), said
        assert error <= TOLERANCE, "after the error, training does not go on as before"


def messages_of(stage: int, window: int, *, unequal: bool) -> list[list[int]]:
    """Messages and unequal ones of each micro-batch, evaluations after predictions included; what these leave of
    gradients.
    """
    engine = start(SAME.build(), make_config(stage, zero=ZERO, gradient_accumulation_steps=window))
    agreement = engine.runtime.agreement
    messages: list[int] = []
    weights = []
    for step in range(10 * window):
        before = agreement.rounds
        engine.backward(SAME.seeded_loss(engine, here(step))[0])
        engine.step()
        messages.append(agreement.rounds - before)
        if unequal and step == 9 * window - 1:
            with torch.no_grad():
                SAME.seeded_loss(engine, here(step))
            weights = [int(unit.window.filled) for unit in engine.runtime.units]
    mismatches = agreement.mismatches
    engine.destroy()
    return [messages, [mismatches], weights]


@pytest.mark.in_make_test("0-3", "2-3", "3-1")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_have_not_differed_for_a_while_send_one_message_a_backward(
    pool2: RankPool, stage: int, window: int
) -> None:
    for messages, mismatches, _ in pool2.run(messages_of, stage, window, unequal=False):
        assert messages[-2 * window :] == [1] * (2 * window)
        assert mismatches == [0]


def test_an_evaluation_in_place_of_a_predicted_backward_leaves_no_gradient(pool2: RankPool) -> None:
    """All ranks execute the backward as dummies; what it reduces are sums of nothing."""
    for _, mismatches, filled in pool2.run(messages_of, 3, 1, unequal=True):
        assert mismatches == [0]
        assert filled and not any(filled)


@pytest.mark.in_make_test("skip_expert-train", "skip_tower-eval", "other_order-train")
@pytest.mark.parametrize("phase", ["train", "eval"])
@pytest.mark.parametrize(
    "scenario", ["skip_expert", "skip_tower", "skip_last", "other_order", "twice", "nothing_in_common"]
)
def test_invariant_i7_error_mode_names_rank_module_and_step(pool2: RankPool, scenario: str, phase: str) -> None:
    for said, late, error in pool2.run(refused, scenario, phase, time_limit=LIMIT):
        assert "rank 0" in said and "rank 1" in said and "step 1" in said, said
        assert any(name in said for name in ("expert", "tower", "layers", "head")), said
        assert not late
        assert error <= TOLERANCE, "after the error, training does not go on as before"


def test_invariant_i7_error_mode_on_three_ranks(pool3: RankPool) -> None:
    for said, late, error in pool3.run(refused, "disjoint_experts", "train", time_limit=LIMIT):
        assert all(f"rank {rank}" in said for rank in range(3)), said
        assert not late and error <= TOLERANCE


def assume_none_is_exact_without_divergence() -> tuple[float, int]:
    pair = Lockstep(SAME, make_config(3, zero={**ZERO, "divergence": "assume_none"}))
    for step in range(3):
        pair.step(step)
    rounds = pair.engine.runtime.agreement.rounds
    return pair.finish()[0], rounds


def test_invariant_i7_assume_none_sends_no_messages(pool2: RankPool) -> None:
    for error, rounds in pool2.run(assume_none_is_exact_without_divergence):
        assert error <= TOLERANCE
        assert rounds == 0
