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
from deepspeed.tools.verify.models import Case
from deepspeed.tools.verify.reference import trainable
from deepspeed.tools.verify.runs import differing, train_case, whole_state
from deepspeed.utils import safe_get_full_fp32_param
from tests.dist.test_checkpoint_resume import OddElements
from tests.harness.cases import case_named
from tests.harness.offload import PRECISION
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
        state = states_of(engine)
        found.append((state, train_case(engine, case, range(3, 6), alike=True)))
        engine.destroy()
    return found


def by_world(names: list[str]) -> dict[int, list[str]]:
    """Layouts by their number of ranks."""
    return {world: [n for n in names if LAYOUTS[n][0] == world] for world in sorted({LAYOUTS[n][0] for n in names})}


def travels(
    request: pytest.FixtureRequest, folder: str, model: str, changes: dict[str, Any], source: str, targets: list[str]
) -> tuple[dict[str, str], list[list[float]]]:
    """Assert that the state saved under ``source`` is whole under each target; it, and the losses that come then."""
    wanted = pools_of(request, source).run(save, source, folder, model, changes)[0]
    layouts, losses = by_world(targets), []
    calls = {world: (names, folder, model, changes) for world, names in layouts.items()}
    for world, ranks in on_each(request, calls, load).items():
        for rank in ranks:
            for name, (state, told) in zip(layouts[world], rank, strict=True):
                assert not differing(wanted, state), f"{source} -> {name}"
                losses.append(told)
    return wanted, losses


@pytest.mark.in_make_test("2 ranks stage 3 nvme")
@pytest.mark.parametrize("source", SOURCES)
def test_any_layout_to_any_layout(request: pytest.FixtureRequest, tmp_path: Path, source: str) -> None:
    wanted, losses = travels(request, str(tmp_path), "plain", {}, source, list(LAYOUTS))
    assert sum("(exp_avg)" in name for name in wanted) > 10 and any("step of " in name for name in wanted)
    for told in losses:
        assert told == pytest.approx(losses[0], abs=2e-6)


@pytest.mark.in_make_test("odd_shapes")
@pytest.mark.parametrize("model", ["odd_shapes", "tied", "frozen"])
def test_odd_models_change_their_layout(request: pytest.FixtureRequest, tmp_path: Path, model: str) -> None:
    targets = ["1 rank stage 0", "2 ranks stage 3 huge", "4 ranks hpz"]
    travels(request, str(tmp_path), model, PRECISION["bf16"], "3 ranks stage 3 tiny", targets)


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
    blocks = {**PRECISION, "fp16": {"fp16": {"enabled": True}}}  # with a scale that lets each step be one
    assert pool2.run(to_precision, blocks[source], blocks[target], str(tmp_path)) == [True, True]


# -- granularity -------------------------------------------------------------------------------------------------


# Adam for the rest of the world, under classes that need whole tensors, or not
CLIENT: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "whole": type("Adam", (torch.optim.Adam,), {"elementwise": False}),
    "elements": type("Adam", (torch.optim.Adam,), {"elementwise": True}),
    "factored": torch.optim.Adafactor,
    "of a shape of its own": OddElements,
}


def of_client(kind: str, stage: int, folder: str, act: str) -> tuple[str, dict[str, str], list[float]]:
    """Train and save under a client's optimizer, or load: what is said, the state, losses that come then."""
    case = case_named("plain")
    model = case.build()
    config = make_config(stage, optimizer=None, zero_allow_untested_optimizer=True)
    engine = start(model, config, optimizer=CLIENT[kind](model.parameters(), lr=1e-2))
    said = ""
    if act == "save":
        train_case(engine, case, range(3), alike=True)
        engine.save_checkpoint(folder, tag="t")
    else:
        said = outcome(lambda: engine.load_checkpoint(folder, tag="t"))
    state = states_of(engine) if kind in ("whole", "elements") else {}
    losses = [] if said else train_case(engine, case, range(3, 6), alike=True)
    engine.destroy()
    return said, state, losses


@pytest.mark.parametrize(("saved", "loaded"), [("elements", "whole"), ("whole", "elements")])
def test_whole_tensors_to_elements_and_back(
    pool2: RankPool, pool3: RankPool, tmp_path: Path, saved: str, loaded: str
) -> None:
    _, wanted, _ = pool2.run(of_client, saved, 2, str(tmp_path), "save")[0]
    for said, found, _ in pool3.run(of_client, loaded, 3, str(tmp_path), "load"):
        assert not said and not differing(wanted, found)


def test_factored_state_on_other_ranks(pool3: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    _, _, wanted = pool3.run(of_client, "factored", 3, str(tmp_path), "save")[0]
    for said, _, losses in pool2.run(of_client, "factored", 1, str(tmp_path), "load"):
        assert not said and losses == pytest.approx(wanted, abs=1e-5)


def test_state_that_is_bound_to_its_layout_is_refused_elsewhere(
    pool2: RankPool, pool3: RankPool, tmp_path: Path
) -> None:
    pool2.run(of_client, "of a shape of its own", 2, str(tmp_path), "save")
    for said, _, _ in pool3.run(of_client, "of a shape of its own", 2, str(tmp_path), "load"):
        assert "CheckpointError" in said and "layout it was saved under" in said
        assert "load_optimizer_states=False" in said


def refused_and_loaded(folder: str) -> tuple[str, bool, str]:
    """What the refusal says, whether the weights stay, and what a load says that follows its advice."""
    case = case_named("plain")
    model = case.build()
    optimizer = CLIENT["of a shape of its own"](model.parameters(), lr=1e-2)
    engine = start(model, make_config(2, optimizer=None, zero_allow_untested_optimizer=True), optimizer=optimizer)
    before = {name: value.clone() for name, value in full_parameters(engine.module).items()}
    said = outcome(lambda: engine.load_checkpoint(folder, tag="t"))
    stayed = all(torch.equal(value, before[name]) for name, value in full_parameters(engine.module).items())
    then = outcome(lambda: engine.load_checkpoint(folder, tag="t", load_optimizer_states=False))
    train_case(engine, case, range(3, 4), alike=True)
    engine.destroy()
    return said, stayed, then


def test_optimizer_state_is_refused_before_anything_changes(pool2: RankPool, pool3: RankPool, tmp_path: Path) -> None:
    pool2.run(of_client, "of a shape of its own", 2, str(tmp_path), "save")
    for said, stayed, then in pool3.run(refused_and_loaded, str(tmp_path)):
        assert "layout it was saved under" in said and stayed and not then, (said, then)


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


def scaled_window(folder: str, block: dict[str, Any]) -> list[float]:
    """Norms of an update whose window was begun under the loss scale 1024: in that run, and in one with ``block``."""
    case, norms = case_named("plain"), []
    for precision in ({"fp16": {"enabled": True, "loss_scale": 1024}}, block):
        engine = start(case.build(), make_config(1, gradient_accumulation_steps=2, **precision))
        if norms:
            engine.load_checkpoint(folder, tag="t")
        for micro in range(len(norms), 2):
            engine.backward(case.seeded_loss(engine, here(0, micro))[0])
            engine.step()
            if micro == 0:
                engine.save_checkpoint(folder, tag="t")
        norms.append(float(engine.get_global_grad_norm()))
        engine.destroy()
    return norms


@pytest.mark.parametrize("loaded", ["fp16", "bf16", "fp32"])
def test_half_a_window_takes_on_another_loss_scale(pool1: RankPool, tmp_path: Path, loaded: str) -> None:
    block = {"fp16": {"enabled": True, "loss_scale": 8}} if loaded == "fp16" else PRECISION[loaded]
    ((saved, found),) = pool1.run(scaled_window, str(tmp_path), block)
    assert found == pytest.approx(saved, rel=0.05)
