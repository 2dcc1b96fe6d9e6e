"""A checkpoint is restored completely or refused with names, before anything has changed; switches that relax it say
what they skip.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.checkpoint.load.reader import read_manifest
from deepspeed.ops.adam import FusedAdam
from deepspeed.tools.verify.grads import full_gradients, full_parameters, scaled_error
from deepspeed.tools.verify.models import HIDDEN, OUT_FEATURES, Case, Stack, case_named
from deepspeed.tools.verify.reference import trainable
from deepspeed.tools.verify.runs import snapshot
from tests.harness.lockstep import equal
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.spy import CollectiveSpy
from tests.harness.training import here, make_config, outcome, start, train_step

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.02}}


def saved(folder: str, stage: int, *, case: Case | None = None, steps: int = 2, **changes: Any) -> Any:
    """An engine that has trained and saved; the caller destroys it."""
    case = case or case_named("plain")
    engine = start(case.build(), make_config(stage, **{"scheduler": SCHEDULE, **changes}))
    for step in range(steps):
        train_step(engine, case, step)
    engine.save_checkpoint(folder)
    return engine


# -- another model -----------------------------------------------------------------------------------------------


def _changed(**parts: nn.Module) -> nn.Module:
    """The model with other modules under some names."""
    model = Stack()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def _with_a_buffer() -> nn.Module:
    model = Stack()
    model.register_buffer("counts", torch.zeros(3))
    return model


# what differs from the model that was saved, the words of the refusal, and one that is said where it may differ
CHANGED: dict[str, tuple[Callable[[], nn.Module], list[str], str]] = {
    "removed": (
        lambda: Stack(depth=2),
        ["there but not in this model", "layers.2.up.weight", "layers.2.norm.bias", "optimizer state 'exp_avg'"],
        "layers.2.up.weight",
    ),
    "added": (
        lambda: Stack(depth=4),
        ["missing there", "layers.3.up.weight", "layers.3.norm.bias"],
        "layers.3.up.weight",
    ),
    "renamed": (
        lambda: _changed(inp=nn.Sequential(Stack().inp)),
        ["missing there", "inp.0.weight", "there but not", "inp.weight"],
        "inp.0.weight",
    ),
    "reshaped": (
        lambda: _changed(head=nn.Linear(HIDDEN, OUT_FEATURES + 1)),
        ["other shapes", "head.weight is (5, 8) there and (6, 8) here", "head.bias"],
        "",
    ),
    "buffer": (_with_a_buffer, ["missing there", "counts"], "counts"),
}


def another_model(change: str, stage: int, folder: str) -> list[str]:
    """Load into a changed model, strictly and, where all shapes are the same, not; what is wrong."""
    engine, wrong = saved(folder, stage), list[str]()
    wanted = {n: v.clone() for n, v in full_parameters(engine.module).items()}
    engine.destroy()
    build, words, skipped = CHANGED[change]
    engine = start(build(), make_config(stage, scheduler=SCHEDULE))

    def train() -> None:
        x, _ = case_named("plain").batch(here(7))
        engine.backward(engine(x).square().mean())
        engine.step()

    train()
    before = snapshot(engine)
    said = outcome(lambda: engine.load_checkpoint(folder))
    if not all(word in said for word in ("CheckpointError", "nothing was loaded", *words)):
        wrong.append(f"said {said!r}")
    wrong += [f"{field} has changed" for field, value in snapshot(engine).items() if before[field] != value]
    train()
    if skipped:
        own = {n: v.clone() for n, v in full_parameters(engine.module).items()}
        with logged() as told:
            engine.load_checkpoint(folder, load_module_strict=False)
        if not any(skipped in text for text in told):
            wrong.append(f"logged {told}")
        found = full_parameters(engine.module)
        wrong += [f"{n} is not as it was" for n in found if not torch.equal(found[n], {**own, **wanted}[n])]
        train()
    engine.destroy()
    return wrong


@pytest.mark.in_make_test("removed-1", "added-3", "reshaped-1", "buffer-3")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("change", CHANGED)
def test_another_model_is_refused_and_changes_nothing_or_takes_what_fits(
    pool2: RankPool, tmp_path: Path, change: str, stage: int
) -> None:
    assert pool2.run(another_model, change, stage, str(tmp_path)) == [[], []]


# -- another optimizer -------------------------------------------------------------------------------------------


def other_optimizer(kind: str, folder: str) -> tuple[str, str, bool]:
    """What loading under another optimizer says; what has changed by it; and whether it works without its state."""
    case = case_named("frozen" if kind == "thawed" else "plain")
    stage, there = (3, {"optimizer": None, "scheduler": None, "steps": 0}) if kind == "none" else (2, {})
    saved(folder, stage, case=case, **there).destroy()
    model = case.build()
    params, config = list(model.parameters()), make_config(2, optimizer=None)
    if kind == "thawed":
        model.get_submodule("inp").requires_grad_()
    if kind == "groups":
        groups = [{"params": params[:4]}, {"params": params[4:], "lr": 1e-3}]
        engine = start(model, config, optimizer=torch.optim.AdamW(groups))
    elif kind == "client":
        engine = start(model, config, optimizer=torch.optim.NAdam(params))
    else:
        blocks = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Lion": {"lr": 1e-3}}
        changes = {"optimizer": {"type": kind, "params": blocks[kind]}} if kind in blocks else {}
        engine = start(model, make_config(2, **changes))
    before = snapshot(engine)
    said = outcome(lambda: engine.load_checkpoint(folder))
    changed = ", ".join(field for field, value in snapshot(engine).items() if before[field] != value)
    without = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    works = outcome(lambda: engine.load_checkpoint(folder, **without)) == ""
    train_step(engine, case, 5)
    engine.destroy()
    return said, changed, works


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("SGD", ["exp_avg", "SGD", "load_optimizer_states=False"]),
        ("Lion", ["exp_avg_sq", "Lion"]),
        ("client", ["exp_avg_sq", "is not what NAdam keeps"]),
        ("groups", ["1 optimizer parameter groups", "2"]),
        ("thawed", ["missing there", "optimizer state 'exp_avg' of inp.weight"]),
        ("none", ["has no optimizer state"]),
    ],
)
def test_another_optimizer_is_refused(pool2: RankPool, tmp_path: Path, kind: str, words: list[str]) -> None:
    for said, changed, works in pool2.run(other_optimizer, kind, str(tmp_path)):
        assert "CheckpointError" in said and all(word in said for word in words), said
        assert not changed and works


def same_method(folder: str) -> list[str]:
    """Classes of one method take each other's state, fresh or stepped."""
    saved(folder, 1).destroy()
    case, found = case_named("plain"), []
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        for steps in (0, 1):
            model = case.build()
            engine = start(model, make_config(1, optimizer=None), optimizer=kind(model.parameters(), lr=1e-2))
            for step in range(steps):
                train_step(engine, case, step)
            found.append(outcome(lambda engine=engine: engine.load_checkpoint(folder)))
            decoupled = kind is torch.optim.AdamW  # how it computes is its own, and does not come from the checkpoint
            assert all(group["decoupled_weight_decay"] is decoupled for group in engine.basic_optimizer.param_groups)
            train_step(engine, case, 3)
            engine.destroy()
    return found


def test_classes_of_one_method_take_each_others_state(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(same_method, str(tmp_path)) == [[""] * 4]


def counted_in_numbers(folder: str, kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a run goes on from a checkpoint whose updates are counted in plain numbers, as DeepSpeed's Adams do."""
    case, engines = case_named("plain"), []
    for _ in range(2):
        model = case.build()
        engines.append(start(model, make_config(1, optimizer=None), optimizer=kind(model.parameters(), lr=1e-2)))
    first, second = engines
    train_step(first, case, 0)
    kept = {param: dict(state) for param, state in first.basic_optimizer.state.items()}
    for state in first.basic_optimizer.state.values():
        state["step"] = int(state["step"])
    first.save_checkpoint(folder)
    for param, state in kept.items():
        first.basic_optimizer.state[param].update(state)
    second.load_checkpoint(folder)
    return [train_step(engine, case, step) for engine in engines for step in (1, 2)] and equal(
        full_parameters(first.module), full_parameters(second.module)
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam])
def test_updates_that_are_counted_in_plain_numbers_count_on(pool1: RankPool, tmp_path: Path, kind: Any) -> None:
    assert pool1.run(counted_in_numbers, str(tmp_path), kind) == [True]


def newcomer(folder: str) -> float:
    """The first update of a parameter that the checkpoint lacks, in learning rates."""
    config = make_config(1, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}})

    def trained(model: nn.Module, steps: int) -> Any:
        engine = start(model, config)
        engine.load_checkpoint(folder, load_module_strict=False)
        for _ in range(steps):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        return engine

    torch.manual_seed(0)
    trained(nn.Sequential(nn.Linear(4, 4)), 20).save_checkpoint(folder)
    wider = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = float(wider[1].bias[0])
    trained(wider, 1).destroy()
    return (before - float(wider[1].bias[0])) / 0.01


def test_a_parameter_that_the_checkpoint_lacks_counts_its_own_updates(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(newcomer, str(tmp_path)) == [pytest.approx(1.0, rel=1e-3)]


def stepped_muon(folder: str) -> bool:
    """State is replaced in an engine that has stepped, also where a rank holds no matrix at all."""
    case, block = case_named("plain"), {"type": "Muon", "params": {"lr": 1e-2}}
    engine = start(case.build(), make_config(3, optimizer=block))
    for step in range(2):
        train_step(engine, case, step)
    engine.save_checkpoint(folder)
    wanted = snapshot(engine)
    for step in range(2, 4):
        train_step(engine, case, step)
    assert snapshot(engine)["opt"] != wanted["opt"]
    engine.load_checkpoint(folder)
    found = snapshot(engine)
    engine.destroy()
    return all(wanted[field] == found[field] for field in ("params", "opt", "lr", "scaler", "rng"))


def test_loading_into_an_engine_that_has_stepped(pool4: RankPool, tmp_path: Path) -> None:
    assert pool4.run(stepped_muon, str(tmp_path)) == [True] * 4


# -- switches ------------------------------------------------------------------------------------------------------


# what is not restored under which switches; the others must be those of the fresh engine
SWITCHES: list[tuple[dict[str, bool], list[str]]] = [
    ({}, []),
    ({"load_module_only": True}, ["opt", "scaler", "scale", "schedule"]),
    ({"load_optimizer_states": False}, ["opt", "scale"]),
    ({"load_lr_scheduler_states": False}, ["schedule"]),
]


def switched(folder: str) -> list[list[str]]:
    """Load with each of the switches: fields that are not the saved ones.

    Rates in the optimizer's groups are the schedule's, so they count there.
    """

    def fields(engine: Any) -> dict[str, dict[str, str]]:
        found = snapshot(engine)
        scale = {"loss scale": found["scaler"].pop("loss scale")}
        return {**found, "opt": {k: v for k, v in found["opt"].items() if " of group " not in k}, "scale": scale}

    engine, lost = saved(folder, 2, steps=3), []
    wanted = fields(engine)
    engine.destroy()
    for switches, _ in SWITCHES:
        engine = start(case_named("plain").build(), make_config(2, scheduler=SCHEDULE))
        fresh = fields(engine)
        torch.manual_seed(77)
        fresh["rng"] = fields(engine)["rng"]
        engine.load_checkpoint(folder, **switches)
        found = fields(engine)
        engine.destroy()
        for field in found.keys() - {"lr"}:
            assert found[field] in (wanted[field], fresh[field]), (field, wanted[field], found[field])
        other = [field for field in found if field not in ("lr", "rng") and found[field] != wanted[field]]
        lost.append(other + ["schedule"] * (found["lr"]["schedule"] != wanted["lr"]["schedule"]))
    return lost


def test_switches_leave_out_what_they_name(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(switched, str(tmp_path)) == [[lost for _, lost in SWITCHES]] * 2


def other_window(
    folder: str, before: int, after: int, switches: dict[str, bool], losses: int
) -> tuple[int, int, float]:
    """Save after 2 micro-batches, of so many losses, of a window of ``before``, load with windows of ``after``.

    Micro-batches to the next update; those that the gradient counts for; its error when every micro-batch is the same
    one.
    """
    case = case_named("plain")

    def backward(engine: Any) -> None:
        loss = case.seeded_loss(engine, here(7))[0]
        for left in reversed(range(losses)):
            engine.backward(loss, retain_graph=left > 0)

    def micro(engine: Any) -> None:
        backward(engine)
        engine.step()

    engine = start(case.build(), make_config(2, gradient_accumulation_steps=before))
    for _ in range(before + 2):
        micro(engine)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(case.build(), make_config(2, gradient_accumulation_steps=after))
    engine.load_checkpoint(folder, **switches)
    counted, left, steps = engine._backwards, 0, engine.global_steps
    while engine.global_steps == steps:
        left += 1
        if engine.is_gradient_accumulation_boundary():
            backward(engine)
            found = full_gradients(trainable(engine.module))
            engine.step()
        else:
            micro(engine)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    for _ in range(after):
        backward(engine)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    wanted = full_gradients(trainable(engine.module))
    engine.destroy()
    return left, counted, max(scaled_error(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("before", "after", "switches", "losses", "left", "counted"),
    [
        (3, 5, {}, 1, 3, 2),
        (4, 2, {}, 1, 1, 1),
        (3, 1, {}, 1, 1, 0),
        (3, 3, {"load_optimizer_states": False}, 1, 3, 0),
        (3, 6, {}, 2, 4, 2),
        (4, 2, {}, 3, 1, 1),
    ],
)
def test_windows_stay_whole_when_their_length_changes(
    pool2: RankPool,
    tmp_path: Path,
    before: int,
    after: int,
    switches: dict[str, bool],
    losses: int,
    left: int,
    counted: int,
) -> None:
    for found in pool2.run(other_window, str(tmp_path), before, after, switches, losses):
        assert found[:2] == (left, counted) and found[2] < 1e-6, found


def saved_behind_a_change(folder: str) -> list[int]:
    """Windows of three, then of two, saved in the middle of the first of these; the updates after each micro-batch."""
    case, steps = case_named("plain"), list[int]()
    engine = start(case.build(), make_config(2, gradient_accumulation_steps=3))
    for number in range(6):
        if number == 3:
            engine.set_train_batch_size(2 * engine.train_micro_batch_size_per_gpu() * engine.world_size)
        if number == 4:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = start(case.build(), make_config(2, gradient_accumulation_steps=2))
            engine.load_checkpoint(folder)
        engine.backward(case.seeded_loss(engine, here(number))[0])
        engine.step()
        steps.append(engine.global_steps)
    engine.destroy()
    return steps


def test_a_window_goes_on_where_it_was_after_its_length_had_changed(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(saved_behind_a_change, str(tmp_path)) == [[0, 0, 1, 1, 2, 2]] * 2


def custom(folder: str, stage: int) -> tuple[list[str], bool]:
    """A load function of the client gets the whole state dict, once on every rank."""
    engine = saved(folder, stage)
    wanted = {n: v.clone() for n, v in full_parameters(engine.module).items()}
    engine.destroy()
    engine = start(case_named("plain").build(), make_config(stage, scheduler=SCHEDULE))
    names: list[str] = []

    def put(src: dict[str, Tensor], dst: nn.Module) -> None:
        names.extend(sorted(src))
        dst.load_state_dict(src)

    engine.load_checkpoint(folder, custom_load_fn=put)
    same = equal(full_parameters(engine.module), wanted)
    train_step(engine, case_named("plain"), 3)
    engine.destroy()
    return names, same


@pytest.mark.parametrize("stage", [1, 3])
def test_custom_load_function(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    for names, same in pool2.run(custom, str(tmp_path), stage):
        assert names == sorted(dict(Stack().named_parameters())) and same


def without_frozen(folder: str, stage: int) -> tuple[str, list[str], bool]:
    """Frozen parameters are left out of the file, and refused or skipped by the load."""
    case = case_named("frozen")
    engine = start(case.build(), make_config(stage))
    train_step(engine, case, 0)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    wanted = full_parameters(engine.module)
    engine.destroy()
    engine = start(case.build(), make_config(stage))
    said = outcome(lambda: engine.load_checkpoint(folder))
    with logged() as told:
        engine.load_checkpoint(folder, load_module_strict=False)
    same = equal(full_parameters(engine.module), wanted)
    engine.destroy()
    return said, told, same


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_can_stay_out(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    for said, told, same in pool2.run(without_frozen, str(tmp_path), stage):
        assert "missing there" in said and "inp.weight" in said
        assert any("inp.weight" in text for text in told) and same
    assert not any(name == "inp.weight" for _, name in entries_of(tmp_path / "global_step1"))


def entries_of(folder: Path) -> set[tuple[str, str]]:
    """(state, name) of every tensor of a checkpoint."""
    return set(read_manifest(folder).entries)


# -- when ----------------------------------------------------------------------------------------------------------


def in_forward(folder: str, stage: int) -> list[str]:
    """Saving and loading inside a forward and a backward."""
    case = case_named("plain")
    engine = start(case.build(), make_config(stage))
    engine.save_checkpoint(folder)
    told: list[str] = []
    for call in (lambda: engine.save_checkpoint(folder), lambda: engine.load_checkpoint(folder)):
        inside = engine.module.head.register_forward_pre_hook(lambda *_, call=call: told.append(outcome(call)))
        (loss,) = case.seeded_loss(engine, here(0))
        inside.remove()
        done = len(told)
        loss.register_hook(lambda grad, call=call, done=done: told.append(outcome(call)) if len(told) == done else None)
        engine.backward(loss)
        engine.step()
    engine.load_checkpoint(folder)
    engine.destroy()
    return told


@pytest.mark.parametrize("stage", [0, 3])
def test_between_steps_only(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    for told in pool2.run(in_forward, str(tmp_path), stage):
        assert len(told) == 4 and all("UsageError" in text and "between steps" in text for text in told), told


def gathers(folder: str) -> tuple[bool, list[str]]:
    """Whether released parameters stay released in a save, and its collectives beyond a word a rank and objects."""
    engine = saved(folder, 3, zero={"param_persistence_threshold": 0})
    states = [u.state for u in engine.runtime.units]
    with CollectiveSpy() as spy:
        engine.save_checkpoint(folder, tag="again")
    same = states == [u.state for u in engine.runtime.units]
    engine.destroy()
    return same, [f"{call}" for call in spy.calls if call.numel > 2 and "object" not in call.name]


def test_a_save_gathers_no_parameter(pool2: RankPool, tmp_path: Path) -> None:
    for same, large in pool2.run(gathers, str(tmp_path)):
        assert same and not large, large
    facts = json.loads((tmp_path / "global_step2" / "manifest.json").read_bytes())["facts"]
    assert facts["engine"]["global_steps"] == 2, "counters and configuration need no reader of this package"
    assert facts["config"]["zero_optimization"]["stage"] == 3
