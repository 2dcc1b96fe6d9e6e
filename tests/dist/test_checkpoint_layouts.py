"""Any layout loads what any other layout saved: ranks, stages, offload, meshes, precision and granularity, without a
conversion.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.tools.verify.grads import full_gradients, full_parameters, scaled_error
from deepspeed.tools.verify.models import Case, MicroBatch
from deepspeed.tools.verify.reference import trainable
from deepspeed.tools.verify.runs import whole_state
from deepspeed.utils import safe_get_full_fp32_param
from tests.dist.test_checkpoint_resume import OddElements
from tests.harness.cases import case_named
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(180)
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}}
TINY = {"reduce_bucket_size": 1, "param_persistence_threshold": 0}
HUGE = {"reduce_bucket_size": 500_000_000, "param_persistence_threshold": 10_000}
# name -> (ranks, stage, changes of zero_optimization)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1 rank stage 0": (1, 0, {}),
    "1 rank stage 3": (1, 3, {}),
    "2 ranks stage 1": (2, 1, TINY),
    "2 ranks stage 3 huge": (2, 3, HUGE),
    "2 ranks stage 2 cpu": (2, 2, {"offload_optimizer": {"device": "cpu"}}),
    "2 ranks stage 3 nvme": (
        2,
        3,
        {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "max_in_cpu": 0}},
    ),
    "3 ranks stage 2": (3, 2, {}),
    "3 ranks stage 3 tiny": (3, 3, TINY),
    "3 ranks stage 3 cpu": (3, 3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "4 ranks stage 0": (4, 0, {}),
    "4 ranks hpz": (4, 3, {"zero_hpz_partition_size": 2}),
    "4 ranks mics": (4, 3, {"mics_shard_size": 2}),
}
SOURCES = [
    "1 rank stage 0",
    "2 ranks stage 1",
    "2 ranks stage 3 nvme",
    "3 ranks stage 3 tiny",
    "4 ranks hpz",
    "4 ranks mics",
]


def engine_for(layout: str, folder: str, case: Case, **changes: Any) -> Any:
    """An engine of ``case`` under a layout."""
    _, stage, zero = LAYOUTS[layout]
    zero = {
        k: {**v, "nvme_path": folder} if isinstance(v, dict) and v["device"] == "nvme" else v for k, v in zero.items()
    }
    if "nvme" in layout:
        zero["sub_group_size"] = 4096
    config = make_config(stage, zero=zero, scheduler=SCHEDULE, gradient_accumulation_steps=case.accumulation, **changes)
    return start(case.build(), config)


def states_of(engine: Any) -> dict[str, str]:
    """What must not depend on the layout; which class of an optimizer runs shows in group keys of its own."""
    return {
        k: v
        for k, v in whole_state(engine).items()
        if " of group " not in k or k.startswith(("lr ", "betas ", "weight_decay ", "eps "))
    }


def pools_of(request: pytest.FixtureRequest, layout: str) -> RankPool:
    """The pool with as many ranks as the layout has."""
    pool: RankPool = request.getfixturevalue(f"pool{LAYOUTS[layout][0]}")
    return pool


def on_each(
    request: pytest.FixtureRequest, calls: dict[int, tuple[Any, ...]], function: Callable[..., Any]
) -> dict[int, list[Any]]:
    """The answers of ``function`` on the pools of so many ranks, which read the same folder at the same time: half of
    it is waiting.
    """
    pools: list[RankPool] = [request.getfixturevalue(f"pool{world}") for world in calls]
    for pool in pools:
        pool.start()
    with ThreadPoolExecutor(len(pools)) as threads:
        found = threads.map(lambda pool, arguments: pool.run(function, *arguments), pools, calls.values())
        return dict(zip(calls, found, strict=True))


def save(layout: str, folder: str, model: str, changes: dict[str, Any]) -> dict[str, str]:
    """Train three steps and save; the state."""
    case = case_named(model)
    engine = engine_for(layout, folder, case, **changes)
    for step in range(3):
        train_step(engine, case, step)
    engine.save_checkpoint(folder, tag="t", client_state={"from": layout})
    found = states_of(engine)
    engine.destroy()
    return found


def load(
    layouts: list[str], folder: str, model: str, changes: dict[str, Any]
) -> list[tuple[dict[str, str], list[float]]]:
    """Load under each of the layouts; the state, and losses of steps after it that all ranks take on the same
    samples.
    """
    found = []
    for layout in layouts:
        case = case_named(model)
        engine = engine_for(layout, folder, case, **changes)
        path, client_state = engine.load_checkpoint(folder, tag="t")
        assert path is not None and client_state is not None and client_state["from"]
        state, losses = states_of(engine), []
        for step in range(3, 6):
            loss = case.seeded_loss(engine, MicroBatch(step, 0, 0, 1))[0]
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found.append((state, losses))
        engine.destroy()
    return found


def by_world(names: list[str]) -> dict[int, list[str]]:
    """Layouts by their number of ranks."""
    return {world: [n for n in names if LAYOUTS[n][0] == world] for world in sorted({LAYOUTS[n][0] for n in names})}


def unequal(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    """Names that differ."""
    return [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]


@pytest.mark.in_make_test("2 ranks stage 3 nvme")
@pytest.mark.parametrize("source", SOURCES)
def test_any_layout_to_any_layout(request: pytest.FixtureRequest, tmp_path: Path, source: str) -> None:
    wanted = pools_of(request, source).run(save, source, str(tmp_path), "plain", {})[0]
    assert sum("(exp_avg)" in name for name in wanted) > 10 and any("step of " in name for name in wanted)
    losses: list[list[float]] = []
    layouts = by_world(list(LAYOUTS))
    for world, ranks in on_each(
        request, {w: (names, str(tmp_path), "plain", {}) for w, names in layouts.items()}, load
    ).items():
        for rank in ranks:
            for name, (state, told) in zip(layouts[world], rank, strict=True):
                assert not unequal(wanted, state), f"{source} -> {name}"
                losses.append(told)
    for told in losses:
        assert told == pytest.approx(losses[0], abs=2e-6)


@pytest.mark.in_make_test("odd_shapes")
@pytest.mark.parametrize("model", ["odd_shapes", "tied", "frozen"])
def test_odd_models_change_their_layout(request: pytest.FixtureRequest, tmp_path: Path, model: str) -> None:
    changes = {"bf16": {"enabled": True}}
    wanted = pools_of(request, "3 ranks stage 3 tiny").run(save, "3 ranks stage 3 tiny", str(tmp_path), model, changes)[
        0
    ]
    layouts = by_world(["1 rank stage 0", "2 ranks stage 3 huge", "4 ranks hpz"])
    for world, ranks in on_each(
        request, {w: (names, str(tmp_path), model, changes) for w, names in layouts.items()}, load
    ).items():
        for rank in ranks:
            for name, (state, _) in zip(layouts[world], rank, strict=True):
                assert not unequal(wanted, state), name


# -- precision -----------------------------------------------------------------------------------------------------


def masters(engine: Any) -> dict[str, Tensor]:
    """Full fp32 masters."""
    found = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    return {name: value.clone() for name, value in found.items() if value is not None}


def to_precision(source: dict[str, Any], target: dict[str, Any], folder: str) -> bool:
    """Masters are the same after a change of the compute dtype, and the weights are theirs."""
    case = case_named("plain")
    engine = start(case.build(), make_config(3, **source))
    for step in range(2):
        train_step(engine, case, step)
    engine.save_checkpoint(folder)
    wanted = masters(engine)
    engine.destroy()
    engine = start(case.build(), make_config(2, **target))
    engine.load_checkpoint(folder)
    found, weights = masters(engine), full_parameters(engine.module)
    train_step(engine, case, 2)
    engine.destroy()
    follow = all(torch.equal(weights[n], found[n].to(weights[n].dtype)) for n in found)
    return follow and all(torch.equal(wanted[n], found[n]) for n in wanted)


@pytest.mark.parametrize(("source", "target"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_weights_follow_the_masters(pool2: RankPool, tmp_path: Path, source: str, target: str) -> None:
    blocks: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True}},
    }
    assert pool2.run(to_precision, blocks[source], blocks[target], str(tmp_path)) == [True, True]


# -- granularity -------------------------------------------------------------------------------------------------


def client_engine(case: Case, stage: int, *, whole: bool) -> Any:
    """An engine under a class that is Adam for the rest of the world, and needs whole tensors or not."""
    kind = type("Adam", (torch.optim.Adam,), {"elementwise": not whole})
    model = case.build()
    config = make_config(stage, optimizer=None, zero_allow_untested_optimizer=True)
    return start(model, config, optimizer=kind(model.parameters(), lr=1e-2))


def save_whole(folder: str, stage: int, whole: bool) -> dict[str, str]:  # noqa: FBT001
    """Train and save under one granularity."""
    case = case_named("plain")
    engine = client_engine(case, stage, whole=whole)
    for step in range(3):
        train_step(engine, case, step)
    engine.save_checkpoint(folder, tag="t")
    found = states_of(engine)
    engine.destroy()
    return found


def load_whole(folder: str, stage: int, whole: bool) -> dict[str, str]:  # noqa: FBT001
    """Load under the other one, and train on."""
    case = case_named("plain")
    engine = client_engine(case, stage, whole=whole)
    engine.load_checkpoint(folder, tag="t")
    found = states_of(engine)
    train_step(engine, case, 3)
    engine.destroy()
    return found


@pytest.mark.parametrize("whole", [False, True])
def test_whole_tensors_to_elements_and_back(pool2: RankPool, pool3: RankPool, tmp_path: Path, whole: bool) -> None:  # noqa: FBT001
    wanted = pool2.run(save_whole, str(tmp_path), 2, whole)[0]
    for found in pool3.run(load_whole, str(tmp_path), 3, not whole):
        assert not unequal(wanted, found)


def factored(folder: str, act: str, stage: int) -> str:
    """Adafactor's state, which has rows and columns, under another number of ranks."""
    case = case_named("plain")
    model = case.build()
    engine = start(
        model, make_config(stage, optimizer=None), optimizer=torch.optim.Adafactor(model.parameters(), lr=1e-2)
    )
    if act == "save":
        for step in range(3):
            loss = case.seeded_loss(engine, MicroBatch(step, 0, 0, 1))[0]
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    told = []
    for step in range(3, 6):
        loss = case.seeded_loss(engine, MicroBatch(step, 0, 0, 1))[0]
        engine.backward(loss)
        engine.step()
        told.append(float(loss.detach()))
    engine.destroy()
    return repr([round(value, 5) for value in told])


def test_factored_state_on_other_ranks(pool3: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    wanted = pool3.run(factored, str(tmp_path), "save", 3)[0]
    assert pool2.run(factored, str(tmp_path), "load", 1) == [wanted] * 2


def bound_to_layout(folder: str, act: str) -> str:
    """An elementwise class with state of a shape of its own."""
    case = case_named("plain")
    model = case.build()
    engine = start(model, make_config(2, optimizer=None), optimizer=OddElements(model.parameters()))
    if act == "save":
        train_step(engine, case, 0)
        engine.save_checkpoint(folder)
        engine.destroy()
        return ""
    said = outcome(lambda: engine.load_checkpoint(folder))
    engine.destroy()
    return said


def test_state_that_is_bound_to_its_layout_is_refused_elsewhere(
    pool2: RankPool, pool3: RankPool, tmp_path: Path
) -> None:
    pool2.run(bound_to_layout, str(tmp_path), "save")
    for said in pool3.run(bound_to_layout, str(tmp_path), "load"):
        assert (
            "CheckpointError" in said and "layout it was saved under" in said and "load_optimizer_states=False" in said
        )


# -- half a window -----------------------------------------------------------------------------------------------


def half_window(layout: str, folder: str, act: str, synced: bool) -> tuple[float, int]:  # noqa: FBT001
    """Save or load a window with gradients in it; the error of the full mean gradient against that of the saving
    ranks.
    """
    case = case_named("plain", accumulation=3)
    engine = engine_for(layout, folder, case)
    file = Path(folder, "gradients.pt")
    if act == "save":
        train_step(engine, case, 0)
        for micro in range(2):
            with contextlib.nullcontext() if synced else engine.no_sync():
                engine.backward(case.seeded_loss(engine, here(1, micro))[0])
            engine.step()
        engine.save_checkpoint(folder, tag="t")
    else:
        engine.load_checkpoint(folder, tag="t")
    assert not engine.is_gradient_accumulation_boundary() or engine.micro_steps % 3 == 2
    micro_steps = engine.micro_steps
    engine.allreduce_gradients()
    found = full_gradients(trainable(engine.module))
    if act == "save" and here(0).rank == 0:
        torch.save(found, file)
    wanted = torch.load(file) if act == "load" else found
    error = max(scaled_error(found[name], wanted[name]) for name in wanted)
    assert max(float(g.abs().max()) for g in found.values()) > 1e-4
    engine.destroy()
    return error, micro_steps


@pytest.mark.in_make_test("2 ranks stage 1-no_sync", "3 ranks stage 3 tiny-no_sync")
@pytest.mark.parametrize("synced", [True, False], ids=["reduced", "no_sync"])
@pytest.mark.parametrize("source", ["2 ranks stage 1", "3 ranks stage 3 tiny", "4 ranks stage 0"])
def test_half_a_window_keeps_its_mean(
    request: pytest.FixtureRequest, tmp_path: Path, source: str, synced: bool
) -> None:  # noqa: FBT001
    pools_of(request, source).run(half_window, source, str(tmp_path), "save", synced)
    targets = ("1 rank stage 0", "2 ranks stage 3 huge", "3 ranks stage 2", "4 ranks hpz")
    calls = {LAYOUTS[target][0]: (target, str(tmp_path), "load", synced) for target in targets}
    for world, ranks in on_each(request, calls, half_window).items():
        for error, micro_steps in ranks:
            assert error < 1e-6 and micro_steps == 5, (calls[world][0], error, micro_steps)
