"""torch.compile: blocks are compiled whole, once, train as plain PyTorch does, and hold no more memory than eager."""

import copy
import functools
import shutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import ReleasedParameterError, UsageError
from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.grads import Cell, Compiled, train_compiled, verdict
from deepspeed.tools.verify.models import (
    HIDDEN,
    IN_FEATURES,
    OUT_FEATURES,
    MicroBatch,
    ResidualBlock,
    Stack,
    case_named,
)
from deepspeed.zero.unit import UnitState
from tests.harness.cases import regression
from tests.harness.lockstep import TOLERANCE, Lockstep, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(300)
BACKEND = "aot_eager"  # the graphs of inductor, without its kernels
SHARD_ALL = {"param_persistence_threshold": 0}
ON_HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def check(ranks: list[Compiled]) -> None:
    _, fault = verdict(ranks, TOLERANCE)
    assert not fault


def compiled(model: str, stage: int, accumulation: int = 1, backend: str = BACKEND, **zero: Any) -> Compiled:
    config = {"zero_optimization": {**SHARD_ALL, **zero}}
    return train_compiled(Cell(model, stage=stage, accumulation=accumulation, config=config), 4, backend)


@pytest.mark.in_make_test("frozen-3-2")
@pytest.mark.parametrize(
    ("model", "stage", "accumulation"),
    [
        ("frozen", 3, 2),
        ("plain", 0, 2),
        *(("plain", stage, 1) for stage in (1, 2, 3)),
        *(("tied", stage, 2) for stage in (0, 3)),
        *((name, 3, 1) for name in ("used_twice", "unused", "odd_shapes", "dropout_checkpointed")),
    ],
)
def test_compiled_as_plain_in_whole_graphs(pool2: RankPool, model: str, stage: int, accumulation: int) -> None:
    check(pool2.run(compiled, model, stage, accumulation))


@pytest.mark.exhaustive
def test_ranks_may_branch(pool2: RankPool) -> None:
    for rank in pool2.run(compiled, "conditional", 3):
        assert max(error for error, _ in rank.errors.values()) <= TOLERANCE and not rank.breaks


@pytest.mark.parametrize("zero", [ON_HOST, pytest.param({"overlap_comm": False}, marks=pytest.mark.exhaustive)])
def test_compiled_with_states_elsewhere(pool1: RankPool, zero: dict[str, Any]) -> None:
    check(pool1.run(compiled, "plain", 3, **zero))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_by_inductor(pool2: RankPool, stage: int) -> None:
    check(pool2.run(compiled, "plain", stage, 2, "inductor", time_limit=280.0))


# -- memory -----------------------------------------------------------------------------------------------------------
def _watched(engine: Any) -> list[int]:
    """Bytes of gathered parameters after each gather, from here on."""
    runtime, held = engine.runtime, []
    gather = runtime.order._gather

    def noting(unit: Any, dummy: bool) -> None:
        gather(unit, dummy)
        held.append(sum(u.buffer.full.untyped_storage().nbytes() for u in runtime.units if u.movable))

    runtime.order._gather = noting
    return held


def bytes_gathered(*, by_compiler: bool) -> tuple[list[int], list[str]]:
    """Of three steps, and the states of all units after the last."""
    case = regression(functools.partial(Stack, depth=8))  # so that not all are gathered at once
    engine = start(case.build().train(), make_config(3, zero=SHARD_ALL))
    if by_compiler:
        torch.compiler.reset()
        engine.compile(backend=BACKEND)
    held = _watched(engine)
    released: list[bool] = []
    for step in range(3):
        loss = case.seeded_loss(engine, MicroBatch(step, 0, 0, 1))[0]
        handle = engine.module.inp.weight.register_post_accumulate_grad_hook(
            lambda _: released.append(all(u.state is UnitState.ABSENT for u in engine.runtime.units[2:6]))
        )
        engine.backward(loss)
        handle.remove()
        engine.step()
    states = [u.state.value for u in engine.runtime.units if u.movable]
    engine.destroy()
    assert all(released), "autograd's tensors kept a block beyond its backward"
    return held, states


def test_compiled_blocks_hold_the_bytes_of_eager_ones(pool2: RankPool) -> None:
    eager, with_compiler = (pool2.run(bytes_gathered, by_compiler=flag) for flag in (False, True))
    assert with_compiler == eager
    for held, states in eager:
        assert max(held) < sum(sorted({*held})) and set(states) == {"absent"}


# -- what the client compiles -----------------------------------------------------------------------------------------
def _compile_model(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=BACKEND)


def _compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND)
    return model


def _compile_blocks(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=BACKEND)
    return model


def _compile_forwards(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=BACKEND)
    return model


def clients_own(how: Callable[[nn.Module], nn.Module], *, late: bool) -> tuple[float, str, int, int]:
    """Error, its place, the graphs of compiled blocks, and those compiled after the second step."""
    torch.compiler.reset()
    counters = import_module("torch._dynamo.utils").counters
    counters.clear()
    case = case_named("plain")
    model, plain = case.build().train(), case.build().train()
    if how is _compile_model:  # which renames parameters
        plain = torch.compile(plain, backend="eager")
    pair = Lockstep(case, make_config(3, zero=SHARD_ALL), model=model if late else how(model), plain=plain)
    if late:
        how(pair.engine.module)
    graphs = []
    for step in range(3):
        pair.step(step)
        graphs.append(counters["stats"]["unique_graphs"])
    error, worst = pair.finish()
    return error, worst, graphs[-1], graphs[-1] - graphs[1]


@pytest.mark.in_make_test("_compile_blocks-False")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", [_compile_blocks, _compile_forwards])
def test_blocks_that_the_client_compiles_stay_whole(
    pool2: RankPool, how: Callable[[nn.Module], nn.Module], late: bool
) -> None:
    for error, worst, graphs, more in pool2.run(clients_own, how, late=late):
        assert error <= TOLERANCE, worst
        assert graphs == 1 and not more, "three equal blocks are one graph"


@pytest.mark.parametrize(("how", "late"), [(_compile_model, False), (_compile_in_place, True)])
def test_a_model_that_the_client_compiles_trains_right(
    pool2: RankPool, how: Callable[[nn.Module], nn.Module], late: bool
) -> None:
    for error, worst, _, more in pool2.run(clients_own, how, late=late):
        assert error <= TOLERANCE, worst
        assert not more


# -- blocks that are not entered by their root ------------------------------------------------------------------------
class Pairs(nn.Module):
    """Blocks that are mere lists, whose members the model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(IN_FEATURES, HIDDEN)
        pairs = [nn.ModuleList([ResidualBlock(), nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())]) for _ in "abc"]
        self.layers = nn.ModuleList(pairs)
        self.head = nn.Linear(HIDDEN, OUT_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for first, second in self.layers:
            x = x + second(first(x))
        return self.head(x)


class Within(Stack):
    """Calls what is inside its blocks, and a method of a block that is not its forward."""

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
        return self.layers[0](x)


class Notes:
    """What a forward leaves where no hook looks for tensors."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Aside(Stack):
    """What a module inside the first block computes reaches the loss past the block, whose own output does not."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()
        for layer in self.layers:
            layer.exit = nn.Linear(HIDDEN, HIDDEN)
            layer.notes = self.notes
            layer.__class__ = WithExit

    def forward(self, x: Tensor) -> Any:
        self.notes.kept.clear()
        self.trunk(self.inp(x))
        return self.head(self.notes.kept[0])


class WithExit(ResidualBlock):
    """Leaves the output of a second head in a list of the model's."""

    exit: nn.Linear
    notes: Notes

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.notes.kept.append(self.exit(out))
        return out


def parity(model: type[nn.Module], *, by_compiler: bool) -> tuple[float, str]:
    pair = Lockstep(regression(model), make_config(3, zero=SHARD_ALL))
    if by_compiler:
        torch.compiler.reset()
        pair.engine.compile(backend=BACKEND)
    for step in range(3):
        pair.step(step)
    assert not_at_rest(pair.engine) == []
    return pair.finish()


@pytest.mark.in_make_test("Aside-False", "Aside-True")
@pytest.mark.parametrize("by_compiler", [False, True])
@pytest.mark.parametrize("model", [Pairs, Within, Aside])
def test_a_block_entered_by_what_is_inside(pool2: RankPool, model: type[nn.Module], by_compiler: bool) -> None:
    for error, worst in pool2.run(parity, model, by_compiler=by_compiler):
        assert error <= TOLERANCE, worst


def inside_from_outside() -> list[float]:
    """Modules inside blocks called when no forward runs, before and after steps; the plain model's answer beside."""
    case = case_named("plain")
    pair = Lockstep(case, make_config(3, zero=SHARD_ALL))
    x, errors = torch.ones(2, HIDDEN), []
    for step in range(3):
        ours, plain = (m.layers[1].up(m.layers[1].norm(x)) for m in (pair.engine.module, pair.plain))
        errors.append(float((ours - plain).abs().max().detach()))
        pair.step(step)
    assert all(u.state is UnitState.ABSENT for u in pair.engine.runtime.units if u.movable)
    pair.finish()
    return errors


def test_modules_inside_blocks_can_be_called_alone(pool2: RankPool) -> None:
    for errors in pool2.run(inside_from_outside):
        assert max(errors) <= TOLERANCE


def inside_compiled_from_outside() -> tuple[str, bool]:
    """What a call alone says once blocks are compiled, and whether it works with the parameters gathered."""
    torch.compiler.reset()
    engine = start(case_named("plain").build().train(), make_config(3, zero=SHARD_ALL))
    engine.compile(backend=BACKEND)
    train_step(engine, case_named("plain"), 0)
    inner = engine.module.layers[1].up
    text = outcome(lambda: inner(torch.ones(2, HIDDEN)))
    with deepspeed.zero.GatheredParameters([*inner.parameters()]):
        worked = bool(inner(torch.ones(2, HIDDEN)).isfinite().all())
    train_step(engine, case_named("plain"), 1)
    engine.destroy()
    return text, worked


def test_once_compiled_such_a_call_says_what_to_do(pool2: RankPool) -> None:
    for text, worked in pool2.run(inside_compiled_from_outside):
        assert ReleasedParameterError.__name__ in text and "layers.1.up.weight" in text
        assert "GatheredParameters" in text and worked


def uses_a_step() -> tuple[int, int]:
    """How often units were asked for in the last of three steps, and units."""
    engine = start(case_named("plain").build().train(), make_config(3, zero=SHARD_ALL))
    for step in range(3):
        before = engine.runtime.schedule.uses
        train_step(engine, case_named("plain"), step)
    uses = engine.runtime.schedule.uses - before
    units = sum(u.movable for u in engine.runtime.units)
    engine.destroy()
    return uses, units


def test_a_block_is_asked_for_once_in_each_direction(pool2: RankPool) -> None:
    for uses, units in pool2.run(uses_a_step):
        assert uses == 2 * (units + 1), "inp and head share a unit, and each asks"


# -- the call ---------------------------------------------------------------------------------------------------------
def refusals(stage: int) -> list[str]:
    engine = start(case_named("plain").build().train(), make_config(stage, zero=SHARD_ALL))
    calls: list[dict[str, Any]] = [
        {"compile_kwargs": {"mode": "reduce-overhead"}},
        {"compile_kwargs": {"options": {"triton.cudagraphs": True}}},
        {"schedule": [(0, [])]},
        {"compiled_autograd_enabled": True},
    ]
    texts = [outcome(lambda call=call: engine.compile(**call)) for call in calls]
    assert all(not text or UsageError.__name__ in text for text in texts), texts
    before = {name: module.forward for name, module in engine.module.named_modules()}
    engine.compile(backend="eager")
    engine.compile(backend=BACKEND)
    assert any(module.forward != before[name] for name, module in engine.module.named_modules())
    module = engine.module
    engine.destroy()
    assert not any("forward" in vars(m) for m in module.modules()), "destroy brings every forward back"
    return texts


@pytest.mark.parametrize("stage", [2, 3])
def test_what_cannot_be_compiled_is_refused(pool2: RankPool, stage: int) -> None:
    for graphs, option, schedule, autograd in pool2.run(refusals, stage):
        assert ("CUDA graphs" in graphs) is ("CUDA graphs" in option) is (stage == 3)
        assert "schedule" in schedule and "compiled_autograd_enabled" in autograd


def copies_and_changes() -> tuple[float, list[bool]]:
    """The error of a compiled model's copy with other weights; which forwards of the client's stay after the engine."""
    torch.compiler.reset()
    case = case_named("plain")
    engine, plain = start(case.build().train(), make_config(2)), case.build()
    engine.compile(backend=BACKEND)
    case.seeded_loss(engine, MicroBatch(0, 0, 0, 1))
    other, x = copy.deepcopy(engine.module), torch.ones(2, IN_FEATURES)
    with torch.no_grad():
        for param in (*other.parameters(), *plain.parameters()):
            param.fill_(0.5)
        error = float((other(x) - plain(x)).abs().max())
    module = engine.module
    module.forward = client = functools.partial(type(module).forward, module)
    engine.compile(backend=BACKEND)
    engine.compile(backend=BACKEND)
    compiled_again = module.forward is not client
    engine.destroy()
    kept = [compiled_again, module.forward is client]
    engine = start(module, make_config(2))
    engine.compile(backend=BACKEND)
    module.forward = last = functools.partial(type(module).forward, module)
    engine.destroy()
    return error, [*kept, module.forward is last]


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights_and_forwards_of_the_client_stay(
    pool1: RankPool,
) -> None:
    ((error, kept),) = pool1.run(copies_and_changes)
    assert error <= TOLERANCE
    assert all(kept)


class Breaking(ResidualBlock):
    """Its forward cannot be one graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def _one_block_breaks() -> Stack:
    model = Stack()
    model.layers[1].__class__ = Breaking
    return model


def broken() -> Compiled:
    return train_compiled(Cell("broken", stage=3, accumulation=1), 2, BACKEND, regression(_one_block_breaks))


def test_the_gate_sees_a_block_that_falls_apart(pool1: RankPool) -> None:
    _, fault = verdict(pool1.run(broken), TOLERANCE)
    assert "a graph ended early" in fault
    good = Compiled({"grad": (0.0, ""), "loss": (0.0, ""), "norm": (0.0, ""), "param": (0.0, "")}, 2, 0, ())
    for change, text in (({"late": 1}, "after step 2"), ({"graphs": 0}, "nothing was compiled")):
        assert text in verdict([good, good._replace(**change)], TOLERANCE)[1]
    wrong = good._replace(errors={**good.errors, "grad": (float("inf"), "of w")})
    assert "in grad of w" in verdict([good, wrong], TOLERANCE)[1] and not verdict([good], TOLERANCE)[1]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--backend", "none_such"]) == 2
    assert "none_such" in capsys.readouterr().err
