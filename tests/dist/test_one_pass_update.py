"""The optimizer rounds the weights into PARAM in the pass of its update: not one bit differs from a second pass, in no
mode.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.accelerator.native.build import try_load
from deepspeed.accelerator.native.spec import CPU_ADAM
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lion import FusedLion
from deepspeed.optim.base import GroupStep
from deepspeed.tier import store
from deepspeed.tier.transfer import Transfer
from deepspeed.tools.verify.models import Case
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero import GatheredParameters
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit
from deepspeed.zero.update import publish as publish_module
from tests.dist.test_offload_parity import froze_later
from tests.harness.offload import (
    CASES,
    PRECISION,
    STEPS,
    Plan,
    check,
    differences,
    plain_loop,
    started,
    train,
    variants,
)
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start, train_step

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(try_load(CPU_ADAM) is None, reason="no C++ compiler: torch's update writes no outputs"),
]


@contextlib.contextmanager
def two_passes() -> Iterator[None]:
    """As if the optimizers could not write PARAM."""
    real = GroupStep.writing_outputs
    with patch.object(GroupStep, "writing_outputs", lambda self, outputs, **asked: real(self, {}, **asked)):
        yield


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Elements that the second pass rounds, and that the optimizer writes itself."""
    found = {"rounded": 0, "written": 0}
    round_into, writing = store.round_into, GroupStep.writing_outputs

    def counting(out: Tensor, values: Tensor) -> Transfer:
        found["rounded"] += values.numel()
        return round_into(out, values)

    @contextlib.contextmanager
    def watched(self: GroupStep, outputs: Mapping[Tensor, Tensor], **asked: Any) -> Iterator[Any]:
        with writing(self, outputs, **asked) as written:
            yield written
        found["written"] += sum(p.numel() for p in written)

    store.round_into = publish_module.round_into = counting
    GroupStep.writing_outputs = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        store.round_into = publish_module.round_into = round_into
        GroupStep.writing_outputs = writing  # type: ignore[method-assign]


def both_ways(plan: Plan, folder: str, names: tuple[str, ...], one_pass: bool = True) -> list[str]:  # noqa: FBT001, FBT002
    """What differs between one pass and two, per variant; ``one_pass``: the optimizer is expected to write PARAM.
    Collective.
    """
    bad = []
    for name in names:
        with two_passes(), counted() as before:
            wanted = train(plan, variants(folder)[name])
        with counted() as after:
            found = train(plan, variants(folder)[name])
        if (
            before["written"]
            or (after["written"] > 0) is not one_pass
            or after["rounded"] + after["written"] != before["rounded"]
        ):
            bad.append(f"{name}: {before} and {after}")
        bad += differences(wanted, found, f"{name}: ")
    return bad


IN_MEMORY = ("none", "optim cpu", "both cpu", "half cpu")


@pytest.mark.in_make_test("0-bf16", "3-bf16")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage(pool2: RankPool, stage: int, precision: str) -> None:
    plan = Plan(stage=stage, config={**PRECISION[precision], "gradient_clipping": 0.05}, steps=3)
    check(pool2.run(both_ways, plan, "", IN_MEMORY[: {0: 1, 3: 4}.get(stage, 2)]))


@pytest.mark.in_make_test("hpz")
@pytest.mark.parametrize("zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=["mics", "hpz"])
def test_two_levels(pool4: RankPool, zero: dict[str, int]) -> None:
    check(pool4.run(both_ways, Plan(config={"zero": zero, **PRECISION["bf16"]}, steps=3), "", ("none",)))


BF16, FP32 = Plan(config=PRECISION["bf16"], steps=3), Plan(steps=3)


@pytest.mark.parametrize(
    ("plan", "names", "one_pass"),
    [
        (BF16, ("half nvme", "grads tiles"), True),
        (FP32, ("tiles",), True),
        (FP32, ("none",), False),  # parameters are the master
    ],
    ids=["bf16", "tiles in fp32", "fp32"],
)
def test_tiles_whose_parameters_are_in_memory(
    pool2: RankPool, tmp_path: Path, plan: Plan, names: tuple[str, ...], one_pass: bool
) -> None:
    check(pool2.run(both_ways, plan, str(tmp_path), names, one_pass))


def test_parameters_on_a_drive_keep_the_second_pass(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(both_ways, BF16, str(tmp_path), ("param nvme", "both nvme")))


# -- what may not be written -------------------------------------------------------------------------------------


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_parts_that_are_frozen_later_are_put_back(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    plan = Plan(stage=stage, config=PRECISION["bf16"], loop=froze_later)
    check(pool2.run(both_ways, plan, str(tmp_path), ("none", "tiles")))


class Clamped(FusedAdam):
    """A client's class that changes weights behind the update, where no version counter notices."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data.clamp_(-0.05, 0.05)
        return result


class Holder:
    """Makes an optimizer of ``cls`` over the parameters of a model; can be sent to a rank."""

    def __init__(self, cls: type[torch.optim.Optimizer], **settings: Any) -> None:
        self.cls, self.settings = cls, settings

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        half = [p for p in model.parameters() if p.requires_grad]
        return self.cls([{"params": half[::2], "lr": 0.01}, {"params": half[1::2], "lr": 0.02}], **self.settings)


def changing_rates(engine: Any, case: Case) -> list[float]:
    """Other rates every step, for each group its own."""
    told = []
    for step in range(STEPS):
        for index, group in enumerate(engine.optimizer.param_groups):
            group["lr"] = 0.01 / (1 + step + index)
        told += train_step(engine, case, step)
    return told


def clamped(engine: Any, case: Case) -> list[float]:
    """The plain loop; every weight is where the class puts it."""
    told = plain_loop(engine, case, STEPS)
    for unit in engine.runtime.units:
        assert unit.shard.float().abs().max() <= 0.051
    return told


@pytest.mark.in_make_test("FusedAdam-changing_rates-True", "Clamped-clamped-False")
@pytest.mark.parametrize(
    ("cls", "loop", "one_pass"),
    [
        (FusedAdam, changing_rates, True),
        (FusedLion, changing_rates, True),
        (DeepSpeedCPUAdagrad, changing_rates, True),
        (torch.optim.AdamW, changing_rates, False),
        (torch.optim.SGD, changing_rates, False),
        (Clamped, clamped, False),
    ],
)
def test_classes_with_groups(
    pool2: RankPool, tmp_path: Path, cls: type[torch.optim.Optimizer], loop: Any, one_pass: bool
) -> None:
    plan = Plan(config=PRECISION["bf16"], optimizer=Holder(cls), loop=loop)
    check(pool2.run(both_ways, plan, str(tmp_path), ("none", "tiles"), one_pass))


def skips(stage: int) -> list[str]:
    """A skipped update leaves PARAM at rest, its memory and its version counter alone; a good one counts and moves. On
    one rank.
    """
    case, bad = CASES["wide"](), []
    engine = started(stage, {}, fp16={"enabled": True, "initial_scale_power": 4})
    train_step(engine, case, 0)

    def state() -> list[tuple[int, int, Tensor]]:
        return [(u.version, u.shard._version, u.shard.clone()) for u in engine.runtime.units]

    before, places = state(), [u.shard.data_ptr() for u in engine.runtime.units]
    handle = engine.module.layers[1].register_full_backward_hook(lambda _, gi, go: (gi[0] * float("inf"),))
    train_step(engine, case, 1)
    handle.remove()
    for (version, counter, values), (now, now_counter, now_values) in zip(before, state(), strict=True):
        if engine.skipped_steps != 1 or version != now or counter != now_counter or not torch.equal(values, now_values):
            bad.append(f"skipped: {version} {now} {counter} {now_counter}")
    train_step(engine, case, 2)
    for (version, counter, values), (now, now_counter, now_values) in zip(before, state(), strict=True):
        if now != version + 1 or now_counter <= counter or torch.equal(values, now_values):
            bad.append(f"good: {version} {now} {counter} {now_counter}")
    if places != [u.shard.data_ptr() for u in engine.runtime.units]:
        bad.append("PARAM has moved")
    engine.destroy()
    return bad


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_skipped_update_writes_nothing(pool1: RankPool, stage: int) -> None:
    check(pool1.run(skips, stage))


def failing(stage: int) -> list[str]:
    """An update that fails behind its first group; what the parameters are then, and that training goes on."""
    case, bad = CASES["wide"](), []
    model = case.build().train()
    config = make_config(stage, optimizer=None, **PRECISION["bf16"])
    engine = start(model, config, optimizer=Holder(FusedAdam, weight_decay=0.1)(model))
    train_step(engine, case, 0)
    frozen = next(model.parameters()).requires_grad_(requires_grad=False)
    before, still = [u.shard.clone() for u in engine.runtime.units], safe_get_full_fp32_param(frozen)
    second = engine.basic_optimizer.param_groups[1]
    good, second["lr"] = second["lr"], "fast"
    bad += [] if "Error" in outcome(lambda: train_step(engine, case, 1)) else ["it did not fail"]
    if all(torch.equal(a, u.shard) for a, u in zip(before, engine.runtime.units, strict=True)):
        bad.append("nothing was updated before it failed")
    for unit in engine.runtime.units:
        base, first, stop = unit.range_of(StateKind.PARAM)[0], *unit.range_of(StateKind.OPTIM)
        if not torch.equal(unit.shard[first - base : stop - base], unit.master.bfloat16()):
            bad.append(f"{unit.name} is not its master")
        whole = [torch.empty_like(unit.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(whole, unit.shard)
        if stage < 3 and not torch.equal(whole[0], whole[1]):
            bad.append(f"ranks hold different parameters of {unit.name}")
    if not torch.equal(safe_get_full_fp32_param(frozen), still):
        bad.append("a frozen parameter has moved")
    second["lr"] = good
    train_step(engine, case, 2)
    engine.destroy()
    return bad


@pytest.mark.in_make_test("2", "3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_hold_the_same_parameters_after_an_update_that_failed(pool2: RankPool, stage: int) -> None:
    check(pool2.run(failing, stage))


def gathers_of_a_step(stage: int) -> list[str]:
    """What is wrong with how often units that the user holds over an update are gathered in it: an error of one rank
    is told to the others behind as many collectives as they have.
    """
    case, counts, real = CASES["wide"](), Counter[str](), Unit.start_gather
    engine = started(stage, {}, **PRECISION["bf16"])
    train_step(engine, case, 0)
    step = engine.step

    def counting(self: Unit, *into: torch.Tensor) -> Transfer:
        counts[self.name] += 1
        return real(self, *into)

    def holding() -> None:
        every = [p for unit in engine.runtime.units for p in unit.params]
        with GatheredParameters(every), patch.object(Unit, "start_gather", counting):
            step()

    engine.step = holding
    train_step(engine, case, 1)
    engine.destroy()
    return [f"{name}: {count}" for name, count in counts.items() if count != 1] + ([] if counts else ["none"])


def test_what_is_held_over_an_update_is_gathered_once(pool2: RankPool) -> None:
    check(pool2.run(gathers_of_a_step, 3))
