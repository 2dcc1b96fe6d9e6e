"""Where states rest changes no bit: host and drive give the losses, masters, optimizer slots and parameters of the
device.

Every test trains the same model several times on the same ranks, once without offload, and compares everything exactly.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.verify.grads import full_parameters
from deepspeed.verify.models import (
    IN_FEATURES,
    OUT_FEATURES,
    Case,
    ResidualBlock,
    regression_batch,
    seeded,
    squared_error,
)
from deepspeed.verify.reference import trainable
from deepspeed.zero.memory import fit
from deepspeed.zero.plan import StateKind
from tests.harness.cases import LoopCase, case_named
from tests.harness.lockstep import not_at_rest
from tests.harness.plain_optim import PlainOptimizer, UserElementwise, UserWholeTensor
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, start, train_step

# what differs between the host class and the device class of an optimizer, and has no effect on fp32 weights
OF_THE_CLASS = ("params", "fp32_states")
pytestmark = pytest.mark.timeout(120)
STEPS = 6
WIDTH = 67  # odd: shards, tiles and vectors end in the middle of everything
PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # the first scales overflow, so that some updates are skipped, and the scale grows again before the end
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}},
}
CPU = {"device": "cpu"}


class Wide(nn.Module):
    """Large enough for several tiles a shard: 2 blocks of 18 thousand elements, and small ends."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(IN_FEATURES, WIDTH)
        self.layers = nn.ModuleList([ResidualBlock(WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, OUT_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Everything(Wide):
    """Recomputed blocks over frozen ones with small trained branches (as adapters have them), a block nobody uses, one
    used twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.low, self.high = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)
        self.spare = ResidualBlock(5)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in [*self.layers, self.layers[0]]:
            x = checkpoint(layer, x, use_reentrant=False)
            x = self.frozen(x) + self.high(self.low(x))
        return self.head(x)


def wide_case(model: type[nn.Module] = Wide, **changes: Any) -> Case:
    """Regression on a wide model."""
    return LoopCase(name=model.__name__, build=seeded(model), batch=regression_batch, loss=squared_error, **changes)


CASES: dict[str, Callable[[], Case]] = {
    "wide": wide_case,
    "wide_accumulation": lambda: wide_case(accumulation=3),
    "everything": lambda: wide_case(Everything),
    **{
        name: lambda name=name: case_named(name)  # type: ignore[misc]
        for name in (
            "tied",
            "functional_tied",
            "unused",
            "frozen",
            "frozen_checkpointed",
            "checkpoint_reentrant",
            "conditional",
        )
    },
    "manual_accumulation": lambda: case_named("manual_accumulation"),
    "odd_shapes": lambda: case_named("odd_shapes"),
    "by_hand": lambda: wide_case(Everything, accumulation=2, by_hand=True),
    "mixed_dtype": lambda: case_named("mixed_dtype"),
}


@dataclass(frozen=True)
class Variant:
    """One way of offloading. ``grads`` forces gradients onto the drive, as a tight ``memory.host_limit`` does."""

    zero: dict[str, Any] = field(default_factory=dict)
    grads: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def variants(folder: str) -> dict[str, Variant]:
    """Every way, by name."""
    drive = {"device": "nvme", "nvme_path": folder}
    params = {**drive, "max_in_cpu": 0}
    return {
        "none": Variant(),
        "optim cpu": Variant({"offload_optimizer": CPU}),
        "param cpu": Variant({"offload_param": CPU}),
        "both cpu": Variant({"offload_optimizer": CPU, "offload_param": CPU}),
        "half cpu": Variant({"offload_optimizer": {**CPU, "ratio": 0.5}, "offload_param": CPU}),
        "optim nvme": Variant({"offload_optimizer": drive}),
        "tiles": Variant({"offload_optimizer": {**drive, "buffer_count": 2}, "sub_group_size": 4096}),
        "one buffer": Variant(
            {
                "offload_optimizer": {**drive, "buffer_count": 1},
                "offload_param": {**params, "buffer_count": 1, "buffer_size": 1000},
                "sub_group_size": 4096,
            }
        ),
        "half nvme": Variant({"offload_optimizer": {**drive, "ratio": 0.5}, "sub_group_size": 8192}),
        "param nvme": Variant({"offload_param": params}),
        "pieces": Variant({"offload_param": {**params, "buffer_size": 3000, "buffer_count": 2}}),
        "some in cpu": Variant(
            {"offload_param": {**drive, "max_in_cpu": 12_000}, "offload_optimizer": drive, "sub_group_size": 4096}
        ),
        "all in cpu": Variant({"offload_param": drive, "offload_optimizer": drive}),
        "both nvme": Variant({"offload_param": params, "offload_optimizer": drive}),
        "grads nvme": Variant({"offload_param": params, "offload_optimizer": {**drive, "buffer_count": 2}}, grads=True),
        "grads tiles": Variant({"offload_optimizer": {**drive, "buffer_count": 1}, "sub_group_size": 4096}, grads=True),
        "grads half": Variant({"offload_optimizer": {**drive, "ratio": 0.5}, "sub_group_size": 4096}, grads=True),
        "param nvme, optim cpu": Variant({"offload_param": params, "offload_optimizer": CPU}),
        "no overlap": Variant({"offload_param": params, "offload_optimizer": drive, "overlap_comm": False}, grads=True),
    }


WITHOUT_PARAM = ("optim cpu", "tiles", "grads tiles")
ALL = tuple(name for name in variants("") if name != "none")
FEW = ("one buffer", "grads nvme")
TYPICAL = ("both cpu", "one buffer", "grads nvme", "some in cpu", "half nvme")


@contextlib.contextmanager
def gradients_on_drive(*, forced: bool) -> Iterator[None]:
    """As if host memory had room for everything but gradients."""
    real = fit.Limits.allow
    if forced:
        fit.Limits.allow = lambda _, plan: any(line.what == "gradients" and line.drive for line in plan.lines)  # type: ignore[method-assign]
    try:
        yield
    finally:
        fit.Limits.allow = real  # type: ignore[method-assign]


def snapshot(engine: Any) -> dict[str, Tensor]:
    """Masters and slots of this rank, flat and in order however they are cut; gathered parameters; scalars.
    Collective.
    """
    state = engine.optimizer.state_dict()
    found = {"master": torch.cat([v.reshape(-1) for v in state["fp32_flat"]]) if state["fp32_flat"] else torch.empty(0)}
    base = state["base_optimizer_state"]
    for index in sorted(base["state"]):
        for key, value in base["state"][index].items():
            if isinstance(value, Tensor) and value.dim():
                found[key] = torch.cat([found[key], value.reshape(-1)]) if key in found else value.reshape(-1)
            else:
                found[f"{key} = {float(value)}"] = torch.ones(1)
    for number, group in enumerate(base["param_groups"]):
        found |= {
            f"group {number} {k} = {float(v) if isinstance(v, int) else v}": torch.ones(1)
            for k, v in group.items()
            if k not in OF_THE_CLASS
        }
    return found | {f"parameter {name}": value for name, value in full_parameters(engine.module).items()}


@dataclass
class Plan:
    """What to train and how; ``optimizer(model)`` makes the client's, ``loop`` replaces the plain loop."""

    case: str = "wide"
    stage: int = 3
    config: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    loop: Callable[[Any, Case], list[float]] | None = None
    steps: int = STEPS


def plain_loop(engine: Any, case: Case, steps: int) -> list[float]:
    """Train; losses and norms."""
    told = []
    for step in range(steps):
        told += [*train_step(engine, case, step), engine.get_global_grad_norm() or -1.0, engine.loss_scale()]
    return told


def train(plan: Plan, variant: Variant) -> dict[str, Tensor]:
    """Everything that can be known after training. Collective."""
    case = CASES[plan.case]()
    zero = {**plan.config.get("zero", {}), **variant.zero}
    config = make_config(
        plan.stage, **{"gradient_accumulation_steps": case.accumulation, **plan.config, **variant.extra, "zero": zero}
    )
    model = case.build().train()
    options: dict[str, Any] = {}
    if plan.optimizer is not None:
        config.pop("optimizer")
        options["optimizer"] = plan.optimizer(model)
    elif plan.groups is not None:
        options["model_parameters"] = plan.groups(model)
    with gradients_on_drive(forced=variant.grads):
        engine = start(model, config | {"zero_allow_untested_optimizer": True}, **options)
    check_placed(engine, variant)
    told = plan.loop(engine, case) if plan.loop is not None else plain_loop(engine, case, plan.steps)
    assert not not_at_rest(engine), not_at_rest(engine)
    found = snapshot(engine)
    for drive in engine._parts.tiers.drives:
        assert drive.staging._out == 0, "a staging buffer was not given back"
    engine.destroy()
    whole = {f"whole {name}": param.detach().clone() for name, param in model.named_parameters()}
    return found | whole | {"told": torch.tensor(told, dtype=torch.float64)}


def check_placed(engine: Any, variant: Variant) -> None:
    """The variant is what it says: states rest where it puts them."""
    trained = [u for u in engine.runtime.units if u.trainable]
    for block, kind in (("offload_optimizer", StateKind.OPTIM), ("offload_param", StateKind.PARAM)):
        wanted = variant.zero.get(block, {})
        if (
            wanted.get("device") == "nvme"
            and wanted.get("max_in_cpu", 1 if kind is StateKind.PARAM else 0) == 0
            and any(u.movable for u in trained)
        ):
            assert any(u.on_drive(kind) for u in trained), (block, kind)
    assert variant.grads == any(u.plan.grad.tier.value == "nvme" for u in trained)


def compare(plan: Plan, folder: str, names: tuple[str, ...]) -> list[str]:
    """What differs from training without offload, per variant. Collective."""
    ways = variants(folder)
    wanted = train(plan, ways["none"])
    bad = []
    for name in names:
        found = train(plan, ways[name])
        if found.keys() != wanted.keys():
            bad.append(f"{name}: {sorted(found.keys() ^ wanted.keys())}")
        bad += [f"{name}: {k}" for k in wanted.keys() & found.keys() if not same(wanted[k], found[k])]
    return bad


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits (of numbers; inf equals inf)."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) and not bool(a.isnan().any())


def check(results: list[list[str]]) -> None:
    assert not any(results), "\n".join(f"rank {rank} {line}" for rank, lines in enumerate(results) for line in lines)


def run(plan: Plan, folder: str, names: tuple[str, ...]) -> list[str]:
    """Body of a test on one rank."""
    return compare(plan, folder, names)


# -- precision, stages, ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "precision"), [("wide", "fp32"), ("wide_accumulation", "bf16"), ("wide_accumulation", "fp16")]
)
def test_every_way_on_one_rank(pool1: RankPool, tmp_path: Path, case: str, precision: str) -> None:
    check(pool1.run(run, Plan(case, config=PRECISION[precision]), str(tmp_path), ALL))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", PRECISION)
def test_every_way_on_two_ranks(pool2: RankPool, tmp_path: Path, precision: str) -> None:
    plan = Plan(config={**PRECISION[precision], "gradient_clipping": 0.05})
    check(pool2.run(run, plan, str(tmp_path), ALL if precision == "fp32" else TYPICAL))


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (1, "fp16"), (2, "bf16")])
def test_lower_stages(pool2: RankPool, tmp_path: Path, stage: int, precision: str) -> None:
    check(
        pool2.run(
            run, Plan("wide_accumulation", stage=stage, config=PRECISION[precision]), str(tmp_path), WITHOUT_PARAM
        )
    )


@pytest.mark.parametrize(
    "zero", [{}, {"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=["plain", "mics", "hpz"]
)
def test_four_ranks(pool4: RankPool, tmp_path: Path, zero: dict[str, int]) -> None:
    plan = Plan(config={"zero": zero, "bf16": {"enabled": True}}, steps=3)
    check(pool4.run(run, plan, str(tmp_path), ("one buffer", "grads nvme")))


# -- loops ---------------------------------------------------------------------------------------------------------


def unsynced(engine: Any, case: Case) -> list[float]:
    """Two backwards inside no_sync, one outside; then an evaluation."""
    told = []
    for step in range(4):
        with engine.no_sync():
            for micro in range(2):
                loss = case.seeded_loss(engine, here(step, micro))[0]
                engine.backward(loss)
        loss = case.seeded_loss(engine, here(step, 2))[0]
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            told.append(float(case.seeded_loss(engine, here(step, 3))[0]))
        engine.train()
        told.append(float(loss.detach()))
    return told


def froze_later(engine: Any, case: Case) -> list[float]:
    """A block stops training after the second step and trains again after the fourth."""
    told = []
    for step in range(STEPS):
        engine.module.layers[0].requires_grad_(requires_grad=not 2 <= step < 4)
        told += train_step(engine, case, step)
    return told


def interrupted(engine: Any, case: Case) -> list[float]:
    """A gradient that is not finite, a forward that raises, and a window that is dropped between good steps."""
    told = []
    for step in range(4):
        told += train_step(engine, case, step)
        handle = engine.module.layers[1].register_forward_pre_hook(_fail)
        with contextlib.suppress(ZeroDivisionError):
            case.seeded_loss(engine, here(step))
        handle.remove()
        engine.backward(case.seeded_loss(engine, here(step, 1))[0])
        engine.zero_grad()
        engine.backward(case.seeded_loss(engine, here(step, 2))[0] * float("inf"))
        engine.step()
        told += [float(engine.was_step_applied())]
    return told


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("loop", [unsynced, froze_later, interrupted])
@pytest.mark.parametrize("stage", [2, 3])
def test_loops(pool2: RankPool, tmp_path: Path, stage: int, loop: Callable[[Any, Case], list[float]]) -> None:
    names = FEW if stage == 3 else WITHOUT_PARAM[1:]
    check(pool2.run(run, Plan(stage=stage, loop=loop, config={"gradient_clipping": 0.1}), str(tmp_path), names))


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("wide")])
def test_models(pool2: RankPool, tmp_path: Path, case: str) -> None:
    check(pool2.run(run, Plan(case, steps=3), str(tmp_path), FEW))


def test_adapters_in_16_bit(pool2: RankPool, tmp_path: Path) -> None:
    plan = Plan("everything", config={"gradient_clipping": 0.05, **PRECISION["bf16"]}, steps=4)
    check(pool2.run(run, plan, str(tmp_path), TYPICAL))


# -- optimizers --------------------------------------------------------------------------------------------------


class Counting(UserElementwise):
    """Keeps the number of its steps in the group, as some Adam implementations do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, g / group["count"], state, group)


class GrowingState(PlainOptimizer):
    """Has no slots at first, one after its second step, and puts a new tensor there every time."""

    elementwise = True
    defaults_of = {"lr": 1e-2, "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["turn"] = state.get("turn", 0) + 1
        if state["turn"] > 1:
            state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + g
            state["half"] = state["mean"].bfloat16()
        p.sub_(group["lr"] * state.get("mean", g))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices in a group of their own, everything else without decay and with another rate."""
    params = list(trainable(model).values())
    rest = {"params": [p for p in params if p.ndim < 2], "lr": 3e-3, "weight_decay": 0.0}
    return [{"params": [p for p in params if p.ndim >= 2]}, rest]


CLIENTS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "cpu_adam": (DeepSpeedCPUAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "cpu_adagrad": (DeepSpeedCPUAdagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "cpu_lion": (DeepSpeedCPULion, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "plain_sgd": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "user_elementwise": (UserElementwise, {"lr": 1e-2, "weight_decay": 0.1}),
    "user_whole": (UserWholeTensor, {"lr": 1e-2, "weight_decay": 0.1}),
    "counting": (Counting, {"lr": 1e-2, "weight_decay": 0.1}),
    "growing": (GrowingState, {}),
}
NAMED: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "adam_l2": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False},
    "torch_adam": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
    "Adagrad": {"lr": 1e-2},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1},
    "Muon": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9},
}


def with_client(name: str, stage: int, folder: str, names: tuple[str, ...]) -> list[str]:
    """Differences under a client's optimizer with two groups."""
    factory, settings = CLIENTS[name]
    plan = Plan("unused" if name in ("adafactor", "user_whole") else "wide", stage=stage, steps=4)
    plan.optimizer = lambda model: factory(groups_of(model), **settings)
    return compare(plan, folder, names)


def with_config(name: str, stage: int, folder: str, names: tuple[str, ...]) -> list[str]:
    """Differences under an optimizer of the configuration with two groups."""
    kind = {"adam_l2": "Adam", "torch_adam": "Adam"}.get(name, name)
    plan = Plan(stage=stage, steps=4, config={"optimizer": {"type": kind, "params": NAMED[name]}})
    plan.groups = None if name == "Muon" else groups_of
    return compare(plan, folder, names)


WHOLE_TENSORS = ("adafactor", "user_whole", "Lamb", "Muon")  # parameters are dealt to ranks


@pytest.mark.parametrize("name", [*CLIENTS, *NAMED])
def test_optimizers(pool1: RankPool, tmp_path: Path, name: str) -> None:
    check(
        pool1.run(with_client if name in CLIENTS else with_config, name, 3, str(tmp_path), ("one buffer", "grads half"))
    )


@pytest.mark.parametrize("name", [*WHOLE_TENSORS, "adamw", "Adagrad"])
def test_optimizers_on_two_ranks(pool2: RankPool, tmp_path: Path, name: str) -> None:
    check(pool2.run(with_client if name in CLIENTS else with_config, name, 3, str(tmp_path), FEW))


class Accumulating(UserElementwise):
    """Keeps a running value over all parameters of its group."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["seen"] = group.get("seen", 0.0) + float(g.abs().sum())
        super().update(p, g / (1 + group["seen"]), state, group)


class AccumulatingTensor(UserElementwise):
    """The same in a tensor of the group."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        seen = group.setdefault("seen", torch.zeros(()))
        seen += g.abs().sum()
        super().update(p, g / (1 + seen), state, group)


class AccumulatingElsewhere(UserElementwise):
    """The same in an attribute of the optimizer."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.seen = getattr(self, "seen", 0.0) + float(g.abs().sum())
        super().update(p, g / (1 + self.seen), state, group)


class CountingTensor(UserElementwise):
    """Counts its steps in a tensor of the group, as capturable optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("count", torch.zeros((), dtype=torch.int32)).add_(1)
        super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, g / group["count"], state, group)


class CountingItself(UserElementwise):
    """Counts its steps in an attribute."""

    def step(self, closure: Any = None) -> None:
        self.count = getattr(self, "count", 0) + 1
        super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, g / self.count, state, group)


def refused_or_equal(factory: type[PlainOptimizer], folder: str, way: str) -> str:
    """ "equal", the refusal, or what differs."""
    plan = Plan(steps=3)
    plan.optimizer = lambda model: factory(groups_of(model))
    try:
        return "\n".join(compare(plan, folder, (way,))) or "equal"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("factory", [Accumulating, AccumulatingTensor, AccumulatingElsewhere])
def test_an_optimizer_with_a_global_value_is_refused_on_a_drive(
    pool1: RankPool, tmp_path: Path, factory: type[PlainOptimizer]
) -> None:
    (told,) = pool1.run(refused_or_equal, factory, str(tmp_path), "tiles")
    assert told.startswith("UsageError") and factory.__name__ in told and "cpu" in told, told
    assert pool1.run(refused_or_equal, factory, str(tmp_path), "optim cpu") == ["equal"]


@pytest.mark.parametrize("factory", [Counting, CountingTensor, CountingItself])
def test_a_count_of_steps_goes_up_once_a_step(pool1: RankPool, tmp_path: Path, factory: type[PlainOptimizer]) -> None:
    """In the group as a number it works; kept elsewhere it works or is refused, and never counts the tiles."""
    (told,) = pool1.run(refused_or_equal, factory, str(tmp_path), "tiles")
    if factory is Counting:
        assert told == "equal", told
    assert told == "equal" or told.startswith("UsageError"), told


# -- schedules and backends --------------------------------------------------------------------------------------


def test_a_learning_rate_schedule(pool2: RankPool, tmp_path: Path) -> None:
    block = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
    check(pool2.run(run, Plan(config={"scheduler": block}), str(tmp_path), FEW))


def other_backend(backend: str, folder: str) -> list[str]:
    """Differences under another IO engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_AIO_BACKEND", backend)
        return compare(Plan(steps=3), folder, ("one buffer", "grads nvme"))


@pytest.mark.parametrize("backend", ["threads", "libaio"])
def test_other_backends(pool2: RankPool, tmp_path: Path, backend: str) -> None:
    check(pool2.run(other_backend, backend, str(tmp_path)))


def several_engines(folder: str) -> list[str]:
    """Two engines on one path, stepped in turn, against each alone."""
    ways = variants(folder)
    plans = [Plan("wide", steps=3), Plan("unused", steps=3)]
    wanted = [train(plan, ways["grads nvme"]) for plan in plans]
    engines = []
    for plan in plans:
        with gradients_on_drive(forced=True):
            zero = ways["grads nvme"].zero
            config = make_config(3, zero=zero, zero_allow_untested_optimizer=True)
            engines.append(start(CASES[plan.case]().build().train(), config))
    for step, (plan, engine) in itertools.product(range(3), zip(plans, engines, strict=True)):
        train_step(engine, CASES[plan.case](), step)
    bad = []
    for alone, engine in zip(wanted, engines, strict=True):
        bad += [k for k, v in snapshot(engine).items() if not same(v, alone[k])]
        bad += [n for n, p in trainable(engine.module).items() if safe_get_full_fp32_param(p) is None]
    for engine in engines:
        engine.destroy()
    return bad


def test_two_engines_on_one_path(pool2: RankPool, tmp_path: Path) -> None:
    check(pool2.run(several_engines, str(tmp_path)))
