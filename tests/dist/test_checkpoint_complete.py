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
from deepspeed.comm import collectives
from deepspeed.tools.verify.grads import full_gradients, full_parameters, scaled_error
from deepspeed.tools.verify.models import HIDDEN, IN_FEATURES, OUT_FEATURES, Case, Stack, case_named
from deepspeed.tools.verify.reference import trainable
from deepspeed.tools.verify.runs import snapshot
from tests.harness.lockstep import equal
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(120)
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.02}}


def saved(folder: str, stage: int, *, case: Case | None = None, steps: int = 2, **changes: Any) -> Any:
    """An engine that has trained and saved; the caller destroys it."""
    case = case or case_named("plain")
    engine = start(case.build(), make_config(stage, scheduler=SCHEDULE, **changes))
    for step in range(steps):
        train_step(engine, case, step)
    engine.save_checkpoint(folder)
    return engine


# -- another model -----------------------------------------------------------------------------------------------


def _without_a_block() -> nn.Module:
    return Stack(depth=2)


def _with_a_block() -> nn.Module:
    return Stack(depth=4)


def _renamed() -> nn.Module:
    model = Stack()
    model.layers[1].widen = model.layers[1].up
    del model.layers[1].up
    model.layers[1].up = nn.Identity()
    model.layers[1].forward = lambda x: (
        x + model.layers[1].down(torch.relu(model.layers[1].widen(model.layers[1].norm(x))))
    )
    return model


def _reshaped() -> nn.Module:
    model = Stack()
    model.head = nn.Linear(HIDDEN, OUT_FEATURES + 1)
    return model


def _with_a_buffer() -> nn.Module:
    model = Stack()
    model.register_buffer("counts", torch.zeros(3))
    return model


CHANGED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "removed": (
        _without_a_block,
        ["there but not in this model", "layers.2.up.weight", "layers.2.norm.bias", "optimizer state 'exp_avg'"],
    ),
    "added": (_with_a_block, ["missing there", "layers.3.up.weight", "layers.3.norm.bias"]),
    "renamed": (_renamed, ["missing there", "layers.1.widen.weight", "there but not", "layers.1.up.weight"]),
    "reshaped": (_reshaped, ["other shapes", "head.weight is (5, 8) there and (6, 8) here", "head.bias"]),
    "buffer": (_with_a_buffer, ["missing there", "counts"]),
}


def refused(change: str, stage: int, folder: str) -> tuple[str, str]:
    """What loading into a changed model says, and what has changed by it."""
    saved(folder, stage).destroy()
    engine = start(CHANGED[change][0](), make_config(stage, scheduler=SCHEDULE))
    batch = torch.randn(4, IN_FEATURES, generator=torch.Generator().manual_seed(1))
    engine.backward(engine(batch).square().mean())
    engine.step()
    before = snapshot(engine)
    said = outcome(lambda: engine.load_checkpoint(folder))
    after = snapshot(engine)
    engine.backward(engine(batch).square().mean())
    engine.step()
    engine.destroy()
    return said, ", ".join(field for field in before if before[field] != after[field])


@pytest.mark.in_make_test("removed-1", "added-3", "reshaped-1")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("change", CHANGED)
def test_another_model_is_refused_and_nothing_has_changed(
    pool2: RankPool, tmp_path: Path, change: str, stage: int
) -> None:
    for said, changed in pool2.run(refused, change, stage, str(tmp_path)):
        assert "CheckpointError" in said and "nothing was loaded" in said, said
        assert all(word in said for word in CHANGED[change][1]), said
        assert not changed


def relaxed(change: str, folder: str) -> tuple[list[str], bool, bool]:
    """Warnings of ``load_module_strict=False``; whether what fits was taken and the rest left alone."""
    engine = saved(folder, 2)
    wanted = {n: v.clone() for n, v in full_parameters(engine.module).items()}
    engine.destroy()
    engine = start(CHANGED[change][0](), make_config(2, scheduler=SCHEDULE))
    before = {n: v.clone() for n, v in full_parameters(engine.module).items()}
    with logged() as told:
        engine.load_checkpoint(folder, load_module_strict=False)
    found = full_parameters(engine.module)
    taken = all(torch.equal(found[n], wanted[n]) for n in found if n in wanted)
    left = all(torch.equal(found[n], before[n]) for n in found if n not in wanted)
    batch = torch.randn(4, IN_FEATURES, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        engine.backward(engine(batch).square().mean())
        engine.step()
    engine.destroy()
    return told, taken, left


@pytest.mark.parametrize(
    ("change", "word"), [("removed", "layers.2.up.weight"), ("added", "layers.3.up.weight"), ("buffer", "counts")]
)
def test_not_strict_takes_what_fits_and_says_what_was_skipped(
    pool2: RankPool, tmp_path: Path, change: str, word: str
) -> None:
    for told, taken, left in pool2.run(relaxed, change, str(tmp_path)):
        assert any(word in text for text in told), told
        assert taken and left


# -- another optimizer -------------------------------------------------------------------------------------------


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:4]}, {"params": params[4:], "lr": 1e-3}]


def _thawed(model: nn.Module) -> None:
    for param in model.get_submodule("inp").parameters():
        param.requires_grad = True


def other_optimizer(kind: str, folder: str) -> tuple[str, str, bool]:
    """What loading under another optimizer says; what has changed by it; and whether it works without its state."""
    case = case_named("frozen" if kind == "thawed" else "plain")
    saved(folder, 2, case=case).destroy()
    model = case.build()
    if kind == "thawed":
        _thawed(model)
    if kind == "groups":
        engine = start(model, make_config(2, optimizer=None), optimizer=torch.optim.AdamW(_groups(model)))
    elif kind == "client":
        engine = start(model, make_config(2, optimizer=None), optimizer=torch.optim.NAdam(model.parameters()))
    else:
        block = {
            "SGD": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "Lion": {"type": "Lion", "params": {"lr": 1e-3}},
        }.get(kind)
        engine = start(model, make_config(2, **({"optimizer": block} if block else {})))
    before = snapshot(engine)
    said = outcome(lambda: engine.load_checkpoint(folder))
    changed = ", ".join(field for field, value in snapshot(engine).items() if before[field] != value)
    works = (
        outcome(lambda: engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False))
        == ""
    )
    train_step(engine, case, 5)
    engine.destroy()
    return said, changed, works


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("SGD", ["exp_avg", "SGD", "load_optimizer_states=False"]),
        ("Lion", ["exp_avg_sq", "Lion"]),
        ("client", ["exp_avg_sq", "NAdam"]),
        ("groups", ["1 optimizer parameter groups", "2"]),
        ("thawed", ["missing there", "optimizer state 'exp_avg' of inp.weight"]),
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
            train_step(engine, case, 3)
            engine.destroy()
    return found


def test_classes_of_one_method_take_each_others_state(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(same_method, str(tmp_path)) == [[""] * 4]


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


def switched(folder: str, **switches: Any) -> dict[str, bool]:
    """Which fields are the saved ones after a load with switches; the others must be those of the fresh engine.

    Rates in the optimizer's groups are the schedule's, so they count there.
    """

    def fields(engine: Any) -> dict[str, dict[str, str]]:
        found = snapshot(engine)
        scale = {"loss scale": found["scaler"].pop("loss scale")}
        return {**found, "opt": {k: v for k, v in found["opt"].items() if " of group " not in k}, "scale": scale}

    engine = saved(folder, 2, steps=3)
    wanted = fields(engine)
    engine.destroy()
    case = case_named("plain")
    engine = start(case.build(), make_config(2, scheduler=SCHEDULE))
    fresh = fields(engine)
    torch.manual_seed(77)
    fresh["rng"] = fields(engine)["rng"]
    engine.load_checkpoint(folder, **switches)
    found = fields(engine)
    for field in found:
        if field != "lr":
            assert found[field] in (wanted[field], fresh[field]), (field, wanted[field], found[field])
    schedule = found["lr"]["schedule"] == wanted["lr"]["schedule"]
    engine.destroy()
    return {
        **{field: found[field] == wanted[field] for field in found if field not in ("lr", "rng")},
        "schedule": schedule,
    }


@pytest.mark.parametrize(
    ("switches", "lost"),
    [
        ({}, []),
        ({"load_module_only": True}, ["opt", "scaler", "scale", "schedule"]),
        ({"load_optimizer_states": False}, ["opt", "scale"]),
        ({"load_lr_scheduler_states": False}, ["schedule"]),
    ],
    ids=["all", "module_only", "no_optimizer", "no_schedule"],
)
def test_switches_leave_out_what_they_name(
    pool2: RankPool, tmp_path: Path, switches: dict[str, bool], lost: list[str]
) -> None:
    for found in pool2.run(switched, str(tmp_path), **switches):
        assert [field for field, same in found.items() if not same] == lost


def other_window(folder: str, before: int, after: int, switches: dict[str, bool]) -> tuple[int, int, float]:
    """Save after 2 micro-batches of a window of ``before``, load with windows of ``after``.

    Micro-batches to the next update; those that the gradient counts for; its error when every micro-batch is the same
    one.
    """
    case = case_named("plain")

    def micro(engine: Any) -> None:
        engine.backward(case.seeded_loss(engine, here(7))[0])
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
            engine.backward(case.seeded_loss(engine, here(7))[0])
            found = full_gradients(trainable(engine.module))
            engine.step()
        else:
            micro(engine)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    for _ in range(after):
        engine.backward(case.seeded_loss(engine, here(7))[0])
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    wanted = full_gradients(trainable(engine.module))
    engine.destroy()
    return left, counted, max(scaled_error(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("before", "after", "switches", "left", "counted"),
    [
        (3, 3, {}, 1, 2),
        (3, 5, {}, 3, 2),
        (4, 2, {}, 1, 1),
        (3, 1, {}, 1, 0),
        (3, 3, {"load_optimizer_states": False}, 3, 0),
    ],
)
def test_windows_stay_whole_when_their_length_changes(
    pool2: RankPool, tmp_path: Path, before: int, after: int, switches: dict[str, bool], left: int, counted: int
) -> None:
    for found in pool2.run(other_window, str(tmp_path), before, after, switches):
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


class Meddling(Stack):
    """Calls something in the middle of its forward."""

    inside: Callable[[], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.inside is not None:
            self.inside()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def in_forward(folder: str, stage: int) -> list[str]:
    """Saving and loading inside a forward and a backward."""
    engine = start(Meddling(), make_config(stage))
    engine.save_checkpoint(folder)
    told: list[str] = []
    batch = torch.ones(2, IN_FEATURES)
    for call in (lambda: engine.save_checkpoint(folder), lambda: engine.load_checkpoint(folder)):
        engine.module.inside = lambda call=call: told.append(outcome(call))
        loss = engine(batch).square().mean()
        engine.module.inside = None
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
        assert len(told) >= 2 and all("UsageError" in text and "between steps" in text for text in told), told


def gathers(folder: str) -> tuple[int, list[str]]:
    """Collectives on parameters during a save of released parameters."""
    engine = saved(folder, 3, zero={"param_persistence_threshold": 0})
    counted: list[str] = []
    names = [
        n
        for n in dir(collectives)
        if callable(getattr(collectives, n)) and not n.startswith("_") and n != "gather_objects"
    ]
    originals = {
        n: getattr(collectives, n)
        for n in names
        if getattr(getattr(collectives, n), "__module__", "") == collectives.__name__
    }
    for name, original in originals.items():
        setattr(collectives, name, lambda *a, _n=name, _o=original, **k: (counted.append(_n), _o(*a, **k))[1])
    states = [u.state for u in engine.runtime.units]
    try:
        engine.save_checkpoint(folder, tag="again")
    finally:
        for name, original in originals.items():
            setattr(collectives, name, original)
    same = states == [u.state for u in engine.runtime.units]
    engine.destroy()
    return int(same), [name for name in counted if "object" not in name and name != "failures"]  # a word a rank


def test_a_save_gathers_no_parameter(pool2: RankPool, tmp_path: Path) -> None:
    for same, counted in pool2.run(gathers, str(tmp_path)):
        assert same and not counted, counted


@pytest.mark.parametrize("stage", STAGES)
def test_counters_and_config_are_readable_without_this_package(pool1: RankPool, tmp_path: Path, stage: int) -> None:
    pool1.run(_save_and_end, str(tmp_path), stage)
    facts = json.loads((tmp_path / "global_step2" / "manifest.json").read_bytes())["facts"]
    assert facts["engine"]["global_steps"] == 2 and facts["config"]["zero_optimization"]["stage"] == stage


def _save_and_end(folder: str, stage: int) -> None:
    saved(folder, stage).destroy()
