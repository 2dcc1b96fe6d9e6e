"""The same training with states in every place they may rest in, and what it takes to compare and to disturb it."""

import contextlib
import gc
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import (
    IN_FEATURES,
    OUT_FEATURES,
    Case,
    ResidualBlock,
    regression_batch,
    seeded,
    squared_error,
)
from deepspeed.zero.memory import fit
from deepspeed.zero.plan import StateKind
from tests.harness.cases import LoopCase, case_named
from tests.harness.lockstep import not_at_rest
from tests.harness.training import make_config, start, train_step

# what differs between the host class and the device class of an optimizer, and has no effect on fp32 weights
OF_THE_CLASS = ("params", "fp32_states")
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


class Single(nn.Module):
    """One unit, so that a gradient of it is on its way to where it rests when the next one comes; it is so small that
    the first rank has all of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x)


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
    "single": lambda: wide_case(Single, accumulation=3),
    "by_hand": lambda: wide_case(Everything, accumulation=2, by_hand=True),
    **{
        name: partial(case_named, name)
        for name in (
            "tied",
            "functional_tied",
            "unused",
            "frozen",
            "frozen_checkpointed",
            "checkpoint_reentrant",
            "conditional",
            "manual_accumulation",
            "odd_shapes",
            "mixed_dtype",
        )
    },
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
        "travelling": Variant({"offload_optimizer": {**CPU, "ratio": 0.5, "device_states": "travel"}}),
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
    return [line for name in names for line in differences(wanted, train(plan, ways[name]), f"{name}: ")]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits (of numbers; inf equals inf)."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) and not bool(a.isnan().any())


def differences(wanted: dict[str, Tensor], found: dict[str, Tensor], where: str = "") -> list[str]:
    """What only one of them has, or has in other bits, by name behind ``where``."""
    both = wanted.keys() & found.keys()
    names = sorted(wanted.keys() | found.keys())
    return [f"{where}{name}" for name in names if name not in both or not same(wanted[name], found[name])]


def differs_from(trained: dict[str, Tensor], engine: Any, where: str = "") -> list[str]:
    """What ``engine`` has now in other bits than a training had at its end. Collective."""
    found = snapshot(engine)
    return differences({name: trained[name] for name in found if name in trained}, found, where)


def check(results: list[list[str]]) -> None:
    assert not any(results), "\n".join(f"rank {rank} {line}" for rank, lines in enumerate(results) for line in lines)


def started(stage: int, zero: dict[str, Any], case: str = "wide", **config: Any) -> Any:
    """An engine over the model of a case, with its accumulation."""
    made = CASES[case]()
    config = {"gradient_accumulation_steps": made.accumulation, **config}
    return start(made.build().train(), make_config(stage, zero=zero, **config))


def engine_for(way: str, folder: str, **config: Any) -> Any:
    """An engine over the wide model, with its states where that variant has them."""
    variant = variants(folder)[way]
    with gradients_on_drive(forced=variant.grads):
        return started(3, variant.zero, **config)


def plain_steps(engine: Any, case: str, begin: int, end: int) -> list[float]:
    """Train from one step to another; the losses. Collective."""
    return [loss for step in range(begin, end) for loss in train_step(engine, CASES[case](), step)]


def at_the_end(engine: Any, told: list[float]) -> dict[str, Tensor]:
    """All states, brought up to date, of an engine that ends. Collective."""
    engine.eval()
    found = snapshot(engine) | {"told": torch.tensor(told)}
    engine.destroy()
    return found


def differs_resumed(make: Callable[[], Any], case: str, at: int, steps: int, folder: str) -> list[str]:
    """What differs after a save at one step between engines that go on, and that start from it. Collective."""
    engine = make()
    plain_steps(engine, case, 0, at)
    engine.save_checkpoint(folder)
    gone_on = at_the_end(engine, plain_steps(engine, case, at, steps))
    engine = make()
    engine.load_checkpoint(folder)
    return differences(gone_on, at_the_end(engine, plain_steps(engine, case, at, steps)))


def open_files() -> int:
    """Descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def descriptors() -> list[str]:
    """What they stand for."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond that: to the process a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
