"""Several engines in one process, at different stages, interleaved; and engines one after the other on one module."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.monitor.log import logger
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import MicroBatch
from deepspeed.tools.verify.reference import gate_optimizer
from deepspeed.tools.verify.teardown import FOUR, run_cycles
from deepspeed.utils import safe_get_full_grad
from tests.dist.test_invariant_i8_errors import tensor_bytes
from tests.harness.cases import case_named
from tests.harness.lockstep import equal
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, parameter_error, plain_train, start, train_step

pytestmark = pytest.mark.timeout(120)
STEPS = 3
TOLERANCE = 1e-6


class Chained(nn.Module):
    """Consumes another engine's output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net(x))


def chained_engines(stages: tuple[int, int]) -> tuple[float, float]:
    """One graph through two engines, one backward: each engine gets the gradients of its own parameters."""
    case = case_named("plain")
    world = dist.get_world_size()
    first, second = case.build(), _chained()
    optimizers = gate_optimizer(first), gate_optimizer(second)
    for step in range(STEPS):
        for rank in range(world):
            x, y = case.batch(here(step)._replace(rank=rank))
            ((second(first(x)) - y).square().mean() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    engines = start(case.build(), make_config(stages[0])), start(_chained(), make_config(stages[1]))
    for step in range(STEPS):
        x, y = case.batch(here(step))
        (engines[1](engines[0](x)) - y).square().mean().backward()
        for engine in engines:
            engine.step()
    expected = [dict(model.named_parameters()) for model in (first, second)]
    errors = [parameter_error(engine.module, want)[0] for engine, want in zip(engines, expected, strict=True)]
    for engine in engines:
        engine.destroy()
    return errors[0], errors[1]


def _chained() -> nn.Module:
    torch.manual_seed(77)
    return Chained()


@pytest.mark.parametrize("stages", [(2, 2), (3, 3), (3, 1), (0, 3)])
def test_one_graph_through_two_engines(pool2: RankPool, stages: tuple[int, int]) -> None:
    for errors in pool2.run(chained_engines, stages):
        assert max(errors) <= TOLERANCE, errors


# By case: of the two engines the accumulation steps and the precision; and which one calls ``backward``.
ONE_CALLS: dict[str, tuple[tuple[int, int], tuple[str, str], int]] = {
    "one window": ((2, 2), ("fp32", "fp32"), 1),
    "two windows": ((1, 2), ("fp32", "fp32"), 0),
    "loss scale": ((1, 1), ("fp32", "fp16"), 1),
    "two loss scales": ((2, 2), ("fp16", "fp16"), 0),
}


def backward_of_one(name: str) -> float:
    """One engine's ``backward`` goes through another one: the largest error of gradients, which each has in its own
    window and without the loss scale.
    """
    windows, precisions, caller = ONE_CALLS[name]
    plain, engines = [_chained(), _chained()], list[Any]()
    for window, precision in zip(windows, precisions, strict=True):
        scale = 128.0 if engines else 64.0
        low = {"fp16": {"enabled": True, "loss_scale": scale}} if precision == "fp16" else {}
        engines.append(start(_chained(), make_config(2, gradient_accumulation_steps=window, **low)))
    for micro in range(2):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(micro))
        middle = engines[0](x.to(next(engines[0].module.parameters()).dtype))
        out = engines[1](middle.to(next(engines[1].module.parameters()).dtype))
        engines[caller].backward(out.float().square().mean())
        plain[1](plain[0](x)).square().mean().backward()
    errors = []
    for engine, window, model in zip(engines, windows, plain, strict=True):
        for ours, theirs in zip(engine.module.parameters(), model.parameters(), strict=True):
            grad = safe_get_full_grad(ours)
            assert theirs.grad is not None and grad is not None
            errors.append(float((grad - theirs.grad / window).norm() / theirs.grad.norm() * window))
        engine.destroy()
    return max(errors)


@pytest.mark.parametrize("name", ONE_CALLS)
def test_backward_of_one_engine_gives_others_their_gradients(pool2: RankPool, name: str) -> None:
    for error in pool2.run(backward_of_one, name):
        assert error <= (5e-3 if "scale" in name else TOLERANCE)


def overflow_of_one() -> tuple[int, int, bool]:
    """Updates that each of two engines leaves out, and whether the weights of the one without a scale are finite."""
    low = {"fp16": {"enabled": True, "initial_scale_power": 32}}
    first, second = start(_chained(), make_config(2, bf16={"enabled": True})), start(_chained(), make_config(2, **low))
    second.backward(second(first(torch.ones(4, 5).bfloat16()).half()).float().square().mean())
    for engine in (first, second):
        engine.step()
    finite = all(bool(p.isfinite().all()) for p in first.module.parameters())
    skipped = first.skipped_steps, second.skipped_steps
    for engine in (first, second):
        engine.destroy()
    return *skipped, finite


def test_an_overflow_in_the_engine_that_calls_backward_is_left_out_by_all(pool2: RankPool) -> None:
    assert pool2.run(overflow_of_one) == [(1, 1, True)] * 2


def through_a_frozen_engine() -> tuple[float | None, str]:
    """The norm of an engine whose loss is a frozen fp16 engine's; what an fp16 engine that trains says instead."""
    low = {"fp16": {"enabled": True}}
    actor, reward = start(_chained(), make_config(2)), start(_chained(), make_config(0, optimizer=None, **low))
    actor.backward(reward(actor(torch.ones(2, 5)).half()).float().mean())
    actor.step()
    trains = start(_chained(), make_config(2, **low))
    said = outcome(lambda: actor.backward(trains(actor(torch.ones(2, 5)).half()).float().mean()))
    norm = actor.get_global_grad_norm()
    for engine in (actor, reward, trains):
        engine.destroy()
    return norm, said


def test_a_backward_passes_through_a_frozen_fp16_engine(pool2: RankPool) -> None:
    for norm, said in pool2.run(through_a_frozen_engine):
        assert norm and "while the loss scale is 65536" in said


class Adapted(nn.Module):
    """A head and an adapter of its own beside a trunk that others have, too."""

    def __init__(self, trunk: nn.Module, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.adapter, self.head = trunk, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x) + self.adapter(x)))


def _trunk() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)


def _loss(model: Any, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (model(torch.randn(4, 6, generator=generator)) - 1).square().mean()


class Plain:
    """A model in this process alone, trained on the batches of all ranks."""

    def __init__(self, seed: int) -> None:
        self.model = Adapted(_trunk(), seed)
        self.optimizer = gate_optimizer(self.model)

    def step(self, step: int) -> None:
        """One update; nothing but what requires gradients gets one."""
        world = dist.get_world_size()
        for rank in range(world):
            (_loss(self.model, step, rank) / world).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def error(self, engine: Any) -> float:
        """The largest error of the engine's parameters."""
        return parameter_error(engine.module, dict(self.model.named_parameters()))[0]


def _step(engine: Any, step: int) -> None:
    engine.backward(_loss(engine, step, dist.get_rank()))
    engine.step()


def frozen_trunk(stages: tuple[int, ...], folder: str) -> dict[str, Any]:
    """Engines over one frozen trunk, stepped in turns; the one that keeps it ends first, and another goes on."""
    plain, trunk = [Plain(seed) for seed in (1, 2)], _trunk()
    kept = {name: p.clone() for name, p in trunk.named_parameters()}
    engines = [start(Adapted(trunk, seed), make_config(stage)) for seed, stage in zip((1, 2), stages, strict=True)]
    errors = list[float]()
    for step in range(2 * STEPS):
        pairs = list(zip(engines, plain, strict=True))[step >= STEPS :]
        for engine, alone in pairs:
            _step(engine, step)
            alone.step(step)
        errors += [alone.error(engine) for engine, alone in pairs]
        if step == STEPS - 1:
            engines[1].save_checkpoint(folder, tag="second")
            engines[0].destroy()
    weights = full_parameters(engines[1].module)
    engines[1].load_checkpoint(folder, tag="second")
    for step in range(STEPS, 2 * STEPS):
        _step(engines[1], step)
    same = equal(weights, full_parameters(engines[1].module))
    untouched = equal(kept, {name: p.detach() for name, p in trunk.named_parameters()})
    engines[1].destroy()
    return {"error": max(errors), "resumed": same, "trunk": untouched}


@pytest.mark.in_make_test("(2, 1)")
@pytest.mark.parametrize("stages", [(2, 1), (1, 3), (0, 2)], ids=str)
def test_engines_with_adapters_of_their_own_share_a_frozen_trunk(
    pool2: RankPool, stages: tuple[int, ...], tmp_path: Path
) -> None:
    for found in pool2.run(frozen_trunk, stages, str(tmp_path)):
        assert found["error"] <= TOLERANCE and found["resumed"] and found["trunk"], found


def shared_otherwise(how: str) -> tuple[str, float]:
    """What is said of a trunk that cannot be shared; does the engine that has it go on as before?"""
    trunk, alone = _trunk(), Plain(1)
    if how == "trained":
        trunk[0].requires_grad_()
        alone.model.trunk[0].requires_grad_()
        alone.optimizer = gate_optimizer(alone.model)
    first = start(Adapted(trunk, 1), make_config(3 if how == "sharded" else 2))
    second = Adapted(trunk, 2)
    said = outcome(lambda: start(second, make_config(2, bf16={"enabled": how == "precision"})))
    _step(first, 0)
    alone.step(0)
    error = alone.error(first)
    first.destroy()
    return said, error


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("trained", "parameter 'trunk.0.weight' already belongs to a living engine"),
        ("sharded", "parameter 'trunk.0.weight' already belongs to a living engine"),
        ("precision", "frozen parameter 'trunk.0.weight' is kept in torch.float32 by another engine"),
    ],
)
def test_what_engines_cannot_share_is_refused_by_name(pool2: RankPool, how: str, sentence: str) -> None:
    for said, error in pool2.run(shared_otherwise, how):
        assert "UsageError" in said and sentence in said and error <= TOLERANCE


def frozen_reference(first: str, stage: int) -> list[Any]:
    """A reference that is the frozen trunk itself, made before or after the engine that trains adapters on it."""
    trunk, plain, x = _trunk(), _trunk(), torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    made: dict[str, Any] = {}
    for which in ("reference", "actor") if first == "reference" else ("actor", "reference"):
        model = trunk if which == "reference" else Adapted(trunk, 1)
        made[which] = start(model, make_config(stage, optimizer=None) if which == "reference" else make_config(2))
    same = []
    for step in range(STEPS):
        loss = _loss(made["actor"], step, dist.get_rank())
        with torch.no_grad():  # between a forward and its backward
            same.append(torch.equal(made["reference"](x), plain(x)))
        made["actor"].backward(loss)
        made["actor"].step()
    made[first].destroy()
    with torch.no_grad():
        if first == "actor":
            same.append(torch.equal(made["reference"](x), plain(x)))
    for engine in made.values():
        engine.destroy()
    return same


@pytest.mark.parametrize(("first", "stage"), [("reference", 0), ("actor", 3)])
def test_a_frozen_reference_is_the_trunk_of_an_engine_with_adapters(pool2: RankPool, first: str, stage: int) -> None:
    for same in pool2.run(frozen_reference, first, stage):
        assert len(same) >= STEPS and all(same)


def after_its_keeper(how: str) -> tuple[str, float]:
    """The engine that kept the trunk has ended, a second one reads it, a third one comes: what is said, and whether the
    second goes on as before.
    """
    trunk, alone = _trunk(), Plain(2)
    keeper, reader = (start(Adapted(trunk, seed), make_config(2)) for seed in (1, 2))
    keeper.destroy()
    module, engines = Adapted(trunk, 3), list[Any]()
    if how == "trained":
        trunk[0].requires_grad_()
    config = make_config(3, zero={"param_persistence_threshold": 0}, bf16={"enabled": how == "precision"})
    said = outcome(lambda: engines.append(start(module, config)))
    trunk.requires_grad_(False)
    _step(reader, 0)
    alone.step(0)
    error = alone.error(reader)
    for engine in (reader, *engines):
        engine.destroy()
    start(module, make_config(3)).destroy()  # nobody reads it any more
    return said, error


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("sharded", ""),
        ("trained", "parameter 'trunk.0.weight' already belongs to a living engine"),
        ("precision", "frozen parameter 'trunk.0.weight' is kept in torch.float32 by another engine"),
    ],
)
def test_a_frozen_trunk_stays_as_it_is_while_any_engine_reads_it(pool2: RankPool, how: str, sentence: str) -> None:
    for said, error in pool2.run(after_its_keeper, how):
        assert (sentence in said if sentence else not said) and error <= TOLERANCE, said


def put_away(stage: int, precision: str) -> list[str]:
    """Two engines in turns, the states of the idle one away: what differs from the same ones left alone."""
    case, wrong = case_named("plain"), list[str]()
    options = {} if precision == "fp32" else {precision: {"enabled": True}}
    config = make_config(stage, **options)
    engines, alone = ([start(case.build(), config) for _ in range(2)] for _ in range(2))
    x = case.batch(here(0))[0].to(next(engines[0].module.parameters()).dtype)
    for step in range(STEPS):
        for number in range(2):
            idle, busy = engines[1 - number], engines[number]
            idle.offload_states(include=["optim_states"])
            idle.offload_states(include={"lp_grads", "contiguous_grad_buffer"})  # in two goes
            with torch.no_grad():
                idle.eval()
                wrong += [] if torch.equal(idle(x), alone[1 - number].eval()(x)) else ["an idle engine evaluates wrong"]
                with idle.unsharded() as model:
                    model(x)
                idle.train()
                alone[1 - number].train()
            acts = {
                "step": idle.step,
                "optimizer.step": idle.optimizer.step,
                "save": lambda idle=idle: idle.save_checkpoint("."),
                "backward": lambda idle=idle: idle.backward(x),
                "loss.backward": lambda idle=idle: idle.scale(idle(x).float().sum()).backward(),
            }
            wrong += [f"an idle engine does {name}" for name, act in acts.items() if "reload_st" not in outcome(act)]
            idle.zero_grad()
            if train_step(busy, case, step) != train_step(alone[number], case, step):
                wrong.append(f"losses of engine {number} differ at step {step}")
            idle.reload_states()
    for engine, other in zip(engines, alone, strict=True):
        pairs = zip(full_parameters(engine.module).values(), full_parameters(other.module).values(), strict=True)
        wrong += [] if all(torch.equal(a, b) for a, b in pairs) else ["weights differ"]
    engines[0].offload_states()
    wrong += [] if "reload_states" in outcome(lambda: engines[0](x)) else ["parameters are away, and a forward runs"]
    said = outcome(lambda: engines[0].save_16bit_model("."))
    wrong += [] if "reload_states" in said else ["parameters are away, and weights are written"]
    for engine in (*engines, *alone):
        engine.destroy()
    return wrong


@pytest.mark.in_make_test("2-fp16", "3-bf16")
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp16"), (3, "fp32"), (3, "bf16")])
def test_states_of_an_idle_engine_are_put_away_and_come_back(pool2: RankPool, stage: int, precision: str) -> None:
    assert pool2.run(put_away, stage, precision) == [[], []]


def test_four_engines_leave_nothing_behind(pool2: RankPool) -> None:
    """Fifty such cycles, and those of single engines: ``ds_verify teardown``."""
    for left, _ in pool2.run(run_cycles, FOUR, 3):
        first, last = left[1], left[-1]
        assert all(last[name] <= first[name] for name in ("live", "files", "threads", "groups")), left


def held_after_destroy(stage: int, born: bool, zero: dict[str, Any]) -> int:
    """Bytes of live tensors besides the model's while somebody keeps an engine that has trained and was destroyed."""
    before = tensor_bytes()
    config = make_config(stage, zero=zero, gradient_accumulation_steps=2, bf16={"enabled": True})
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=born):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    engine = start(model, config)
    for _ in range(3):  # the last one is amid a window
        engine.backward(engine(torch.ones(2, 64, dtype=torch.bfloat16)).square().mean())
        engine.step()
    engine.destroy()
    params = [p.ds_tensor if hasattr(p, "ds_tensor") else p for p in model.parameters()]
    own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in params}
    return tensor_bytes() - before - sum(own.values())


@pytest.mark.parametrize("case", ["0", "2", "3 born", "2 drive", "3 drives", "3 born drives"])
def test_a_destroyed_engine_that_somebody_keeps_holds_no_buffer(pool2: RankPool, tmp_path: Path, case: str) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": drive} if "drive" in case else {}
    zero |= {"offload_param": drive} if "drives" in case else {}
    for left in pool2.run(held_after_destroy, int(case[0]), "born" in case, zero):
        assert left <= 1024, left


def after_a_failed_start() -> tuple[str, list[str], float]:
    """An initialize() that fails late leaves a plain module, and the process as it was: what it says, what it has left,
    and the error of the next engine.
    """
    case, level = case_named("plain"), logger.level
    model = case.build()
    scheduler = {"type": "OneCycle", "params": {"nope": 1}}
    said = outcome(lambda: start(model, make_config(3, scheduler=scheduler, log_level="error", disable_python_gc=True)))
    left = [f"a hook of {name}" for name, module in model.named_modules() if module._forward_hooks]
    left += [f"a {type(param).__name__}" for param in model.parameters() if type(param) is not nn.Parameter]
    left += ["its log level"] * (logger.level != level) + ["no collection of garbage"] * (not gc.isenabled())
    expected = plain_train(case, gate_optimizer, steps=1)
    engine = start(model, make_config(3))
    train_step(engine, case, 0)
    error = parameter_error(engine.module, expected)[0]
    engine.destroy()
    return said, left, error


def test_a_failed_start_leaves_the_module_usable(pool2: RankPool) -> None:
    for said, left, error in pool2.run(after_a_failed_start):
        assert "ValueError" in said and "nope" in said
        assert left == [] and error <= TOLERANCE


def one_optimizer(stage: int) -> tuple[str, list[float]]:
    """A client's optimizer in a start that fails late, in two engines one after the other, and in plain torch."""
    case = case_named("plain")
    model, expected, errors = case.build(), case.build(), list[float]()
    optimizer, plain = gate_optimizer(model), gate_optimizer(expected)
    config = make_config(stage, optimizer=None)
    said = outcome(lambda: start(model, config, optimizer=optimizer, lr_scheduler=lambda _: [].pop()))
    for step in range(3):
        if step < 2:
            engine = start(model, config, optimizer=optimizer)
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())  # after which torch has other groups
            train_step(engine, case, step)
            engine.destroy()
        else:
            case.seeded_loss(model, MicroBatch(step, 0, 0, 1))[0].backward()
            optimizer.step()
        plain.state.clear()
        plain.zero_grad()
        world = dist.get_world_size() if step < 2 else 1
        for rank in range(world):
            (case.seeded_loss(expected, MicroBatch(step, 0, rank, world))[0] / world).backward()
        plain.step()
        errors.append(parameter_error(model, dict(expected.named_parameters()))[0])
    return said, errors


@pytest.mark.parametrize("stage", [0, 3])
def test_a_clients_optimizer_is_as_before_when_its_engine_has_ended(pool2: RankPool, stage: int) -> None:
    for said, errors in pool2.run(one_optimizer, stage):
        assert "IndexError" in said and max(errors) <= TOLERANCE, errors


def offloaded_reference() -> tuple[float, str, list[str]]:
    """A reference model by a copy of a policy's configuration whose stage is set to 0: its error, its optimizer's class
    and what was said.
    """
    case = case_named("plain")
    config = make_config(0, optimizer=None, zero={"offload_optimizer": {"device": "cpu"}})
    with logged() as said:
        engine = start(case.build().requires_grad_(False), config)
    with torch.no_grad():
        error = float(case.seeded_loss(engine, here(0))[0] - case.seeded_loss(case.build(), here(0))[0])
    kind = type(engine.optimizer).__name__
    engine.destroy()
    return error, kind, [line for line in said if "no effect" in line]


def test_a_reference_beside_an_offloaded_policy_needs_no_configuration_of_its_own(pool2: RankPool) -> None:
    for error, kind, said in pool2.run(offloaded_reference):
        assert (error, kind) == (0.0, "NoneType") and "offload_optimizer has no effect at stage 0" in said[0]


def scheduled_optimizer(scheduler: dict[str, Any]) -> tuple[str, bool, bool]:
    """What a start that fails after it has made a schedule says; whether the schedule writes to a client's optimizer;
    and whether that holds its own settings after the failure, and after an engine that has trained.
    """
    case = case_named("plain")
    model = case.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    config = make_config(1, optimizer=None, scheduler=scheduler)
    seen = [[(group["lr"], group["betas"]) for group in optimizer.param_groups]]
    said = outcome(lambda: start(model, config | {"observe": {"run": "/dev/null/run"}}, optimizer=optimizer))
    seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
    engine = start(model, config, optimizer=optimizer)
    train_step(engine, case, 0)
    changed = (engine.get_lr()[0], engine.get_mom()[0]) != seen[0][0]
    engine.destroy()
    seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
    return said, changed, seen[0] == seen[1] == seen[2]


def test_a_configured_schedule_leaves_a_clients_optimizer_its_own_rates(pool1: RankPool) -> None:
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}}
    for scheduler in (cosine, cycle):
        said, changed, same = pool1.run(scheduled_optimizer, scheduler)[0]
        assert "observe.run" in said and changed and same, scheduler
