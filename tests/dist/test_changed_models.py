"""A model that is changed after initialize trains as in plain torch, or is refused by a sentence that names what."""

import contextlib
import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import MicroBatch, case_named, regression_batch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.harness.faults import raise_planted
from tests.harness.lockstep import equal
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, outcome, parameter_error, start, train_step

pytestmark = pytest.mark.timeout(90)
CASE = case_named("plain")
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}}
ZERO = {"param_persistence_threshold": 20}
PLACES: dict[str, dict[str, Any]] = {"device": {}, "host": {"offload_optimizer": {"device": "cpu"}}}
HALF = {"bf16": {"enabled": True}}


def engine_of(stage: int, place: str = "device", **changes: Any) -> Any:
    config = make_config(stage, zero=ZERO | PLACES[place], **({"optimizer": SGD} | changes))
    return start(CASE.build().train(), config)


class Plain:
    """The same by hand: gradients averaged over the data of all ranks."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = CASE.build().train(), dtype
        self.optimizer = torch.optim.SGD(self.model.parameters(), **SGD["params"])

    def step(self, step: int) -> None:
        shown = CASE.build().train().to(self.dtype)  # what the forward sees of the masters
        with torch.no_grad():
            for p, master in zip(shown.parameters(), self.model.parameters(), strict=True):
                p.copy_(master)
                p.requires_grad_(master.requires_grad)
        world = dist.get_world_size()
        sums: dict[str, Tensor] = {}
        for rank in range(world):
            shown.zero_grad()
            CASE.seeded_loss(shown, MicroBatch(step, 0, rank, world))[0].backward()
            for name, p in shown.named_parameters():
                if p.grad is not None:
                    sums[name] = sums.get(name, torch.zeros(p.shape)) + p.grad.float() / world
        for name, p in self.model.named_parameters():
            p.grad = sums.get(name)
        self.optimizer.step()


def error_of(engine: Any, plain: Plain) -> float:
    return parameter_error(engine.module, {name: p.detach() for name, p in plain.model.named_parameters()})[0]


def pair_of(stage: int, place: str, half: bool) -> tuple[Any, Plain]:  # noqa: FBT001
    return engine_of(stage, place, **(HALF if half else {})), Plain(torch.bfloat16 if half else torch.float32)


def error_at_end(engine: Any, plain: Plain) -> float:
    error = error_of(engine, plain)
    engine.destroy()
    return error


def both(engine: Any, plain: Plain, number: int) -> None:
    train_step(engine, CASE, number)
    plain.step(number)


def _load(model: nn.Module) -> None:
    torch.manual_seed(9)
    state = {n: torch.randn(v.shape).bfloat16().float() * 0.1 for n, v in sorted(CASE.build().state_dict().items())}
    model.load_state_dict(state)


def _initialise(model: nn.Module) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.125)

    model.apply(fill)


def _edit(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.weight[0] = 0.25  # type: ignore[union-attr,index,operator]


EDITS: dict[str, Callable[[nn.Module], None]] = {"load_state_dict": _load, "apply": _initialise, "in place": _edit}


def edited(how: str, stage: int, place: str, half: bool) -> float:  # noqa: FBT001
    engine, plain = pair_of(stage, place, half)
    for number in range(4):
        if number == 2:
            whole = list(engine.module.parameters()) if stage == 3 else []
            with deepspeed.zero.GatheredParameters(whole, modifier_rank=0):
                EDITS[how](engine.module)
            EDITS[how](plain.model)
        both(engine, plain, number)
    return error_at_end(engine, plain)


@pytest.mark.in_make_test(
    "load_state_dict-2-host-bf16",
    "load_state_dict-3-device-bf16",
    "apply-1-device-fp32",
    "apply-3-device-fp32",
    "in place-0-device-fp32",
    "in place-3-device-fp32",
)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "place"), [(0, "device"), (1, "device"), (2, "host"), (3, "device")])
@pytest.mark.parametrize("how", EDITS)
def test_values_written_into_parameters_are_what_trains_on(
    pool2: RankPool, how: str, stage: int, place: str, half: bool
) -> None:
    assert max(pool2.run(edited, how, stage, place, half)) < (0.01 if half else 1e-6)


def masters_after_an_edit() -> None:
    engine = engine_of(1, **HALF)
    train_step(engine, CASE, 0)

    def masters() -> dict[str, Tensor]:
        return {n: safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}

    before = masters()
    with torch.no_grad():
        for p in engine.module.parameters():
            p.copy_(p.clone())
        engine.module.head.weight[0] = 0.25
    engine._parts.hooks.take_edits()
    before["head.weight"][0] = 0.25
    assert equal(masters(), before)
    assert any(not torch.equal(v, v.bfloat16().float()) for v in before.values()), "a rounded value has all bits"
    engine.destroy()


def test_elements_that_nobody_edits_keep_the_bits_of_their_masters(pool2: RankPool) -> None:
    pool2.run(masters_after_an_edit)


def _through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)
    model.head.weight.data[1] = 0.25  # type: ignore[union-attr,operator,index]


def edited_through_data(stage: int, place: str, half: bool, when: int) -> float:  # noqa: FBT001
    """The error where before update ``when`` parameters are written to in ways that torch does not count."""
    engine, plain = pair_of(stage, place, half)
    for number in range(when + 2):
        if number == when:
            for model in (engine.module, plain.model):
                _through_data(model)
            if when:
                engine.optimizer.refresh_fp32_params()
        both(engine, plain, number)
    return error_at_end(engine, plain)


@pytest.mark.in_make_test("0-device-True-0", "1-device-True-2", "2-host-True-2", "2-device-False-0")
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize(
    ("stage", "place", "half"), [(0, "device", True), (1, "device", True), (2, "host", True), (2, "device", False)]
)
def test_what_is_written_through_data_counts_before_the_first_update_and_when_it_is_said(
    pool2: RankPool, stage: int, place: str, half: bool, when: int
) -> None:
    assert max(pool2.run(edited_through_data, stage, place, half, when)) < (0.01 if half else 1e-6)


def edited_again(folder: str) -> float:
    """The error where parameters are written to through ``data``, saved and written to again before an update."""
    engine, plain = pair_of(1, "device", half=True)
    for model in (engine.module, plain.model):
        _through_data(model)
    engine.save_checkpoint(folder)
    for model in (engine.module, plain.model):
        for p in model.parameters():
            p.data.mul_(-1.0)
    both(engine, plain, 0)
    return error_at_end(engine, plain)


def test_what_is_written_through_data_after_a_save_counts_until_the_first_update(
    pool2: RankPool, tmp_path: Path
) -> None:
    assert max(pool2.run(edited_again, str(tmp_path))) < 0.01


def masters_written_first() -> None:
    """A master that is written before the first update is what trains on, not what the model shows of it."""
    engine = engine_of(1, **HALF, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    weight = engine.module.head.weight
    values = torch.full(weight.shape, 0.3)
    safe_set_full_fp32_param(weight, values)
    train_step(engine, CASE, 0)
    assert torch.equal(safe_get_full_fp32_param(weight), values)
    engine.destroy()


def test_masters_that_are_written_before_the_first_update_stay(pool2: RankPool) -> None:
    pool2.run(masters_written_first)


def released(how: str) -> str:
    engine = engine_of(3)
    said = outcome(lambda: EDITS[how](engine.module))
    engine.destroy()
    return said


@pytest.mark.parametrize("how", EDITS)
def test_writing_into_shards_is_refused_with_the_context_that_can(pool2: RankPool, how: str) -> None:
    for said in pool2.run(released, how):
        assert "GatheredParameters" in said and "modifier_rank" in said and "weight" in said


def train_first_block(*models: Any, on: bool) -> None:
    for model in models:
        for name, param in model.named_parameters():
            if "layers.0" in name:
                param.requires_grad_(on)


def frozen_behind_a_failure(stage: int) -> list[float]:
    """The error after two updates in which the first block is frozen, and after two more."""
    engine, plain, errors = engine_of(stage), Plain(), list[float]()
    for number in range(6):
        if number == 2:
            handle = engine.module.head.register_forward_pre_hook(raise_planted)
            with contextlib.suppress(ZeroDivisionError):
                engine(regression_batch(here(number))[0])
            handle.remove()
        if number in (2, 4):
            errors.append(error_of(engine, plain))
            train_first_block(engine.module, plain.model, on=number == 4)
        both(engine, plain, number)
    return [*errors, error_at_end(engine, plain)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_that_failed_is_no_part_of_a_window(pool2: RankPool, stage: int) -> None:
    """What is frozen behind it stands still from there, momentum or not, as in plain PyTorch."""
    for errors in pool2.run(frozen_behind_a_failure, stage):
        assert max(errors) < 1e-6


def frozen_beside(door: str, stage: int) -> float:
    """The error of what is frozen before a door that takes hooks away and brings them back, and trained behind it."""
    engine, plain = engine_of(stage), Plain()
    hooks = engine._parts.hooks
    count = len(hooks.backward_handles)
    for number in range(5):
        if number in (1, 3):
            train_first_block(engine.module, plain.model, on=number == 3)
        if number in (1, 2) and door == "unsharded":
            ids = [handle.id for handle in hooks.forward_handles]
            with engine.unsharded():
                assert not any(hook in m._forward_pre_hooks for m in engine.module.modules() for hook in ids)
        if number in (1, 2) and door == "compile":
            engine.compile(backend="eager")
        both(engine, plain, number)
        assert all(p.grad is None for p in engine.module.parameters())
    assert len(hooks.backward_handles) == count and all(h.id in h.hooks_dict_ref() for h in hooks.backward_handles)
    return error_at_end(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("door", ["unsharded", "compile"])
def test_what_is_frozen_before_a_door_keeps_its_hooks(pool2: RankPool, door: str, stage: int) -> None:
    assert max(pool2.run(frozen_beside, door, stage)) < 1e-6


def broken_install(door: str, stage: int) -> tuple[str, float]:
    """An error while hooks are installed, in the middle of them; what it says, and the error of training after it."""
    engine, plain = engine_of(stage), Plain()
    hooks, forwards = engine._parts.hooks, {m: vars(m).get("forward") for m in engine.module.modules()}
    both(engine, plain, 0)
    seen = [(h.id, [*h.hooks_dict_ref()]) for h in [*hooks.forward_handles, *hooks.backward_handles]]
    count, real = 0, hooks._hook_parameter

    def failing(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("no more hooks")
        real(*args, **kwargs)

    with mock.patch.object(hooks, "_hook_parameter", failing):
        said = outcome(hooks.install if door == "install" else lambda: engine.compile(backend="eager"))
    assert seen == [(h.id, [*h.hooks_dict_ref()]) for h in [*hooks.forward_handles, *hooks.backward_handles]]
    assert all(vars(m).get("forward") is forward for m, forward in forwards.items())
    for number in (1, 2):
        both(engine, plain, number)
    return said, error_at_end(engine, plain)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("door", ["install", "compile"])
def test_an_error_while_hooks_are_installed_leaves_those_of_before(pool2: RankPool, door: str, stage: int) -> None:
    for said, error in pool2.run(broken_install, door, stage):
        assert "no more hooks" in said and error < 1e-6


def unfrozen(stage: int, grouped: bool) -> tuple[str, list[str]]:  # noqa: FBT001
    model = CASE.build().train()
    name = next(n for n, _ in model.named_parameters() if "layers.0" in n)
    model.get_parameter(name).requires_grad_(False)
    wanted = [p for p in model.parameters() if grouped or p.requires_grad]
    optimizer = torch.optim.SGD(wanted, **SGD["params"])
    config = make_config(stage, zero=ZERO, optimizer=None)
    with logged(logging.WARNING) as lines:
        engine = start(model, config | {"zero_allow_untested_optimizer": True}, optimizer=optimizer)
        train_step(engine, CASE, 0)
        model.get_parameter(name).requires_grad_(True)
        said = outcome(lambda: train_step(engine, CASE, 1))
    engine.destroy()
    return said, [line for line in lines if name in line]


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_unfrozen_and_was_to_train_is_refused_by_name(pool2: RankPool, stage: int) -> None:
    for said, _ in pool2.run(unfrozen, stage, True):
        assert "UsageError" in said and "layers.0" in said and "was unfrozen after deepspeed.initialize" in said
    for said, lines in pool2.run(unfrozen, stage, False):
        assert not said and len(lines) == 1 and "unfrozen" in lines[0], "plain torch would not train it either"


def _replace(model: Any) -> None:
    model.head = nn.Linear(model.head.in_features, model.head.out_features)


def _untie(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(model.head.weight.shape))


def _tie(model: Any) -> None:
    model.layers[1].up.weight = model.layers[0].up.weight


def _add(model: Any) -> None:
    model.layers[0].extra = nn.Linear(2, 2)


def _add_frozen_then_train(model: Any) -> None:
    model.extra = nn.Linear(2, 2).requires_grad_(False)
    model.extra.requires_grad_(True)


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "another head": (_replace, "'head.weight' was replaced"),
    "another parameter": (_untie, "'head.weight' was replaced"),
    "tied": (_tie, "'layers.1.up.weight' was tied to 'layers.0.up.weight'"),
    "added": (_add, "'layers.0.extra.weight' was added"),
    "added and unfrozen": (_add_frozen_then_train, "'extra.weight' was added"),
}


def refused(what: str, stage: int) -> str:
    engine = engine_of(stage)
    train_step(engine, CASE, 0)
    REFUSED[what][0](engine.module)
    said = outcome(lambda: train_step(engine, CASE, 1))
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("what", REFUSED)
def test_another_model_is_refused_by_name(pool2: RankPool, what: str, stage: int) -> None:
    for said in pool2.run(refused, what, stage):
        assert "UsageError" in said and REFUSED[what][1] in said and "initialize again" in said, said


def other_modules(stage: int) -> tuple[list[str], float]:
    """What ``engine.module`` may become, after which training goes on."""
    engine, plain = engine_of(stage), Plain()
    both(engine, plain, 0)
    trained = engine.module
    compiled = torch.compile(trained, backend="eager")
    said = [outcome(lambda m=m: setattr(engine, "module", m)) for m in (nn.Linear(2, 2), compiled, trained)]
    both(engine, plain, 1)
    return said, error_at_end(engine, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_keeps_its_module_and_says_how_to_compile_it(pool2: RankPool, stage: int) -> None:
    for (another, compiled, same), error in pool2.run(other_modules, stage):
        assert "UsageError" in another and "this Linear" in another and "deepspeed.initialize" in another
        assert ("engine.compile()" in compiled) == (stage == 3), compiled
        assert not same and error <= 1e-6


def kept_going(stage: int) -> tuple[float, list[str]]:
    """Modules that are wrapped, dropped or added frozen leave the training as it is."""
    engine, plain = engine_of(stage), Plain()
    with logged(logging.WARNING) as lines:
        for number in range(4):
            if number == 2:
                engine.module.layers[0].up = nn.Sequential(OrderedDict(inner=engine.module.layers[0].up))
                engine.module.extra = nn.Linear(2, 2).requires_grad_(False)
            both(engine, plain, number)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        whole = {n.replace(".inner", ""): p.detach().clone() for n, p in engine.module.named_parameters()}
    expected = dict(plain.model.named_parameters())
    error = max(scaled_error(v, expected[n].detach()) for n, v in whole.items() if n in expected)
    engine.destroy()
    return error, [line for line in lines if "added after" in line]


@pytest.mark.parametrize("stage", [0, 3])
def test_wrapped_modules_and_frozen_ones_that_are_added_leave_training_as_it_is(pool2: RankPool, stage: int) -> None:
    for error, lines in pool2.run(kept_going, stage):
        assert error < 1e-6 and len(lines) == 1 and "extra.weight" in lines[0]


def dropped() -> list[str]:
    engine = engine_of(3)
    train_step(engine, CASE, 0)
    with logged(logging.WARNING) as lines:
        engine.module.layers[1].norm = nn.Identity()
        train_step(engine, CASE, 1)
        train_step(engine, CASE, 2)
    engine.destroy()
    return [line for line in lines if "no longer in the model" in line]


def test_what_is_dropped_is_said_once(pool2: RankPool) -> None:
    for lines in pool2.run(dropped):
        assert len(lines) == 1 and "layers.1.norm" in lines[0]


def averaged(stage: int) -> tuple[float, float, float]:
    """A copy of the model that follows it, evaluated on one rank alone, and in place of the weights on all."""
    engine, plain = engine_of(stage), Plain()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        mine = copy.deepcopy(engine.module)
    theirs = copy.deepcopy(plain.model)
    for number in range(3):
        both(engine, plain, number)
        with torch.no_grad():
            names = dict(mine.named_parameters())
            for bucket in engine.stream_weights("1MB"):
                for name, values in bucket:
                    names[name].lerp_(values, 0.25)
            for p, q in zip(theirs.parameters(), plain.model.parameters(), strict=True):
                p.lerp_(q, 0.25)
    place = MicroBatch(8, 0, 0, 1)
    expected = float(CASE.seeded_loss(theirs, place)[0])
    alone = float(CASE.seeded_loss(mine, place)[0]) if dist.get_rank() == 1 else expected  # the other does not come
    state = {n: p.detach() for n, p in mine.named_parameters()}

    class Swapped:
        def __init__(self, module: nn.Module) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            return getattr(self._module, name)

        def __call__(self, *inputs: Any) -> Any:
            return torch.func.functional_call(self._module, state, inputs)

    with engine.unsharded() as module, torch.no_grad():
        swapped = float(CASE.seeded_loss(Swapped(module), place)[0])
    both(engine, plain, 3)
    return abs(alone - expected), abs(swapped - expected), error_at_end(engine, plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_averaged_copies_run_alone_and_in_place_of_the_weights(pool2: RankPool, stage: int) -> None:
    for alone, swapped, error in pool2.run(averaged, stage, time_limit=30):
        assert alone < 1e-6 and swapped < 1e-6 and error < 1e-6


def looks(stage: int, place: str) -> None:
    engine = engine_of(stage, place, **HALF)
    for number in range(3):
        train_step(engine, CASE, number)
    engine.eval()
    with torch.no_grad():
        CASE.seeded_loss(engine, MicroBatch(9, 0, 0, 1))
    versions = engine._parts.hooks._tree._versions
    assert versions and all([p._version for p in u.params] == before for u, before in versions.items())
    engine.destroy()


@pytest.mark.parametrize(("stage", "place"), [(0, "device"), (1, "device"), (2, "host"), (3, "device")])
def test_training_alone_makes_no_step_look_for_edits(pool2: RankPool, stage: int, place: str) -> None:
    pool2.run(looks, stage, place)


def resumed_under_delay(stage: int, folder: str) -> tuple[str, bool]:
    """What the first step of a resumed run says, whose script writes weights before it loads, and whether it is as it
    would have been.
    """
    delayed = {"offload_optimizer": {"device": "cpu", "delayed_update": True}}
    weights = []
    for resumes in (False, True):
        engine = start(CASE.build().train(), make_config(stage, zero=ZERO | delayed, **HALF))
        with torch.no_grad():
            engine.module.head.bias.fill_(0.25)
        if resumes:
            engine.load_checkpoint(folder)
        else:
            train_step(engine, CASE, 0)
            engine.save_checkpoint(folder)
        said = outcome(lambda engine=engine: train_step(engine, CASE, 1))
        engine.eval()
        weights.append(full_parameters(engine.module))
        engine.destroy()
    return said, equal(*weights)


@pytest.mark.parametrize("stage", [1, 3])
def test_under_delayed_updates_weights_may_be_written_before_a_checkpoint_is_loaded(
    pool2: RankPool, tmp_path: Path, stage: int
) -> None:
    assert pool2.run(resumed_under_delay, stage, str(tmp_path)) == [("", True)] * 2


def loaded_under_delay(stage: int) -> list[str]:
    """What the steps after a load say, after an edit, and after the load that its refusal names."""
    delayed = {"offload_optimizer": {"device": "cpu", "delayed_update": True}}
    engine = start(CASE.build().train(), make_config(stage, zero=ZERO | delayed, **HALF))
    state = {n: torch.full_like(v, 0.01) for n, v in CASE.build().state_dict().items()}

    def load() -> None:
        engine.load_module_state_dict(state)
        train_step(engine, CASE, 2)

    train_step(engine, CASE, 0)
    said = [outcome(load)]
    with torch.no_grad():
        engine.module.head.bias.fill_(0.25)
    said += [outcome(lambda: train_step(engine, CASE, 1)), outcome(load)]
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_under_delayed_updates_weights_are_loaded_by_the_engine(pool2: RankPool, stage: int) -> None:
    for loaded, edited, again in pool2.run(loaded_under_delay, stage):
        assert loaded == again == ""
        assert "'head.bias' was written in place under delayed_update" in edited
