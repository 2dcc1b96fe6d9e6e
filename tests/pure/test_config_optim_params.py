"""``optimizer.params`` and ``scheduler.params``: the config knows what deepspeed.optim and torch accept, and says so in
sentences.
"""

import copy
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from deepspeed.client import lr_schedules
from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, load_config
from deepspeed.config.model.optim_params import (
    NOT_ON_DEVICE,
    NOT_ON_HOST,
    OPTIMIZER_NAMES,
    PARAM_BLOCKS,
    PARAM_FIELDS,
    REQUIRED,
    SCHEDULER_NAMES,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    accepts,
)
from deepspeed.errors import OptimizerConfigError
from deepspeed.optim.muon import MuonWithAuxAdam
from deepspeed.optim.registry import KNOWN_NAMES, build_optimizer
from deepspeed.optim.rules import (
    Adagrad,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from tests.harness.rows import for_each

CPU = {"stage": 1, "offload_optimizer": {"device": "cpu"}}


def load(
    part: str, name: str, *, lenient: bool = False, zero: dict[str, Any] | None = None, **params: Any
) -> DeepSpeedConfig:
    source = {"train_batch_size": 1, part: {"type": name, "params": params}, "zero_optimization": zero}
    return load_config(source, world_size=1, lenient=lenient, check_support=False)


def faults(part: str, name: str, **params: Any) -> tuple[str, ...]:
    with pytest.raises(DeepSpeedConfigError) as caught:
        load(part, name, **params)
    assert "pydantic" not in str(caught.value)
    return caught.value.faults


# --- the lists are those of the code that reads the parameters ---


def _arguments(cls: Any) -> set[str]:
    named = {item.name for item in inspect.signature(cls).parameters.values() if item.kind is not item.VAR_KEYWORD}
    return named - {"params", "model_params", "optimizer", "self"}


# Chosen or removed by the registry before a class is built, or refused with a reason of its own.
REGISTRY = {"torch_adam", "adam_w_mode", "foreach", "adamw_mode", "fp32_states", "max_grad_norm"}


CLASSES: dict[str, tuple[Any, ...]] = {
    "adam": (FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW),
    "adagrad": (Adagrad, DeepSpeedCPUAdagrad),
    "lion": (FusedLion, DeepSpeedCPULion),
    "lamb": (FusedLamb,),
    "muon": (MuonWithAuxAdam,),
}


@for_each("name", CLASSES)
def test_an_optimizer_has_the_settings_of_every_class_that_may_be_built(name: str) -> None:
    assert set(accepts("optimizer", name)) - REGISTRY == set().union(*map(_arguments, CLASSES[name])) - REGISTRY
    assert accepts("optimizer", "AdamW") is accepts("optimizer", "adam")


@for_each("name", SCHEDULER_NAMES)
def test_the_schedules_are_those_of_the_code(name: str) -> None:
    found = inspect.signature(getattr(lr_schedules, name)).parameters
    taken, fields = accepts("scheduler", name), PARAM_BLOCKS["scheduler"].model_fields
    assert set(taken) == set(found) - {"optimizer"}
    required = {key for key in taken if fields[key].default == REQUIRED}
    assert required == {key for key, item in found.items() if item.default is item.empty} - {"optimizer"}
    for key, item in found.items():
        spec = PARAM_FIELDS.get(f"scheduler.params.{key}")
        if spec is not None and item.default is not item.empty and (name, key) != ("WarmupDecayLR", "warmup_max_lr"):
            assert spec.default == item.default, key


def test_names() -> None:
    assert sorted(map(str.lower, OPTIMIZER_NAMES)) == sorted(KNOWN_NAMES)
    assert list(SCHEDULER_NAMES) == lr_schedules.VALID_LR_SCHEDULES
    assert {name for name in KNOWN_NAMES if accepts("optimizer", name) is None} == {"muadam", "muadamw", "musgd"}


def test_the_torch_classes_are_those_of_the_newest_torch() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("the lists are those of torch 2.13 to 2.15")

    def classes(module: Any, base: type) -> list[str]:
        found = {name for name, each in vars(module).items() if isinstance(each, type) and issubclass(each, base)}
        return sorted(name for name in found - {base.__name__} if name[0] != "_")

    assert list(TORCH_OPTIMIZERS) == classes(torch.optim, torch.optim.Optimizer)
    assert list(TORCH_SCHEDULERS) == classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)


# --- what is refused, and how ---

UNKNOWN = {
    "Adm": "is unknown, did you mean 'Adam'? Known: Adam, AdamW,",
    "fused_lamb": "is unknown",
    "sgd": "is unknown, did you mean 'SGD'?",
    "Optimizer": "is unknown",
    "WarmUpLR": "is unknown, did you mean 'WarmupLR'?",
    "steplr": "is unknown, did you mean 'StepLR'?",
}


@for_each("name", UNKNOWN)
def test_an_unknown_name_is_refused(name: str) -> None:
    part = "scheduler" if name.lower().endswith("lr") else "optimizer"
    (found,) = faults(part, name)
    assert found.startswith(f"{part}.type {name!r} {UNKNOWN[name]}")


# Name, a setting, its value, and what is said behind "optimizer.params.SETTING" or "scheduler.params.SETTING".
OF_OPTIMIZERS: list[tuple[str, str, Any, str]] = [
    ("AdamW", "learning_rate", 1, ": AdamW has no such setting. Valid here: adam_w_mode, amsgrad,"),
    ("adamW", "weight_dekay", 1, ": adamW has no such setting, did you mean 'weight_decay'?"),
    ("Lion", "eps", 1e-8, ": Lion has no such setting"),
    ("Adam", "lr", "1e-3", " must be a finite number, not '1e-3'; write it without quotes."),
    ("Adam", "lr", True, " must be a finite number, not True."),
    ("Adam", "lr", float("nan"), " must be a finite number, not nan."),
    ("Adam", "lr", 10**400, " must be a finite number"),
    ("Adam", "lr", -1, " must be greater than or equal to 0, not -1."),
    ("Adam", "lr", "auto", ' is still "auto". Only an integration'),
    ("Adam", "betas", [0.9], " must be a list of two numbers, not [0.9]."),
    ("Adam", "betas", 0.9, " must be a list of two numbers, not 0.9."),
    ("Adam", "betas", [0.9, 1], " must be less than 1, not 1"),
    ("Adam", "betas", [0.9, "x"], " must be a finite number, not 'x'."),
    ("Adam", "torch_adam", 2, " must be true or false, not 2."),
    ("Adam", "max_grad_norm", 0, " is not read. Set the top-level key gradient_clipping"),
    ("Muon", "momentum", 1, " must be less than 1, not 1"),
    ("Muon", "ns_method", "newton", " must be 'gram' or 'standard', not 'newton'."),
    ("Lamb", "amsgrad", True, " true is not possible with Lamb. Use AdamW"),
    ("Lamb", "min_coeff", 11, " 11 must not be above max_coeff, which is 10.0."),
    ("SGD", "lr", "0.1", " must be a number, not '0.1'; write it without quotes."),
    ("SGD", "dampening", "0.1", " must be a number, not '0.1'"),
    ("MuSGD", "lr", "fast", " must be a number, not 'fast'."),
]
OF_SCHEDULERS: list[tuple[str, str, Any, str]] = [
    ("WarmupLR", "warmup_num_step", 3, ": WarmupLR has no such setting, did you mean 'war"),
    ("WarmupLR", "warmup_num_steps", 1.5, " must be a whole number, not 1.5."),
    ("WarmupLR", "warmup_type", "cosine", " must be 'log' or 'linear', not 'cosine'."),
    ("WarmupLR", "warmup_max_lr", [], " must not be an empty list."),
    ("WarmupLR", "warmup_max_lr", [0.1, -1], " must be greater than or equal to 0"),
    ("WarmupLR", "warmup_min_lr", "auto", ' is still "auto"'),
    ("LRRangeTest", "lr_range_test_step_size", 0, " must be greater than or equal to 1, not 0."),
    ("StepLR", "step_size", "3", " must be a number, not '3'; write it without quotes."),
]


@for_each(("name", "setting", "value", "text"), [*OF_OPTIMIZERS, *OF_SCHEDULERS])
def test_refused(name: str, setting: str, value: Any, text: str) -> None:
    part = "optimizer" if name in {row[0] for row in OF_OPTIMIZERS} else "scheduler"
    (found,) = faults(part, name, **{setting: value})
    assert found.startswith(f"{part}.params.{setting}{text}")


def test_settings_that_do_not_go_together_or_are_missing_are_refused() -> None:
    (found,) = faults("optimizer", "Adam", torch_adam=True, bias_correction=False)
    assert "bias_correction false is not possible with torch's own Adam" in found
    (found,) = faults("scheduler", "OneCycle", cycle_min_lr=0.1)
    assert found.startswith("scheduler.params.cycle_max_lr is required by OneCycle.")


def test_all_faults_come_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    text = '"train_batch_size": 1, "fp16": {"enabled": 2},\n"optimizer": {"type": "Adam",\n"params": {\n"lr": -1,\n'
    path.write_text(f'{{{text}"bettas": 3}}}},\n"scheduler": {{\n"type": "Warmup"}}}}')
    with pytest.raises(DeepSpeedConfigError) as caught:
        load_config(path, world_size=1)
    lines = sorted(fault.rpartition("(")[2] for fault in caught.value.faults)
    assert lines == ["line 1)", "line 4)", "line 5)", "line 7)"]


# --- what is accepted ---

DECAY = {"total_num_steps": 1e4, "warmup_min_lr": [0, 0], "warmup_max_lr": None, "warmup_num_steps": 0}
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": [0.2], "cycle_second_step_size": None, "decay_mom_rate": -0.1}
ACCEPTED = [
    ("optimizer", "ADAMW", {"lr": 0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "foreach": None}),
    ("optimizer", "Adam", {"torch_adam": True, "fused": False, "amsgrad": True, "adam_w_mode": False}),
    ("optimizer", "Lamb", {"min_coeff": 0.1, "max_coeff": 1, "eps_inside_sqrt": True}),
    ("optimizer", "muon", {"lr": 0.1, "muon_lr": None, "momentum": 0.0, "ns_method": "standard"}),
    ("optimizer", "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("optimizer", "Adafactor", {"eps": [None, 1e-3], "d": 1}),
    ("scheduler", "WarmupLR", {}),
    ("scheduler", "WarmupDecayLR", DECAY),
    ("scheduler", "OneCycle", CYCLE),
    ("scheduler", "MultiStepLR", {"milestones": [3, 5]}),
]


@for_each(("part", "name", "params"), ACCEPTED)
def test_accepted(part: str, name: str, params: dict[str, Any]) -> None:
    found = getattr(load(part, name, **params), part).params
    assert set(found) == set(params)
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    if part == "optimizer":
        assert isinstance(build_optimizer(name, found, parameters=[parameter]), torch.optim.Optimizer)
    else:
        count = max([1, *(len(value) for key, value in params.items() if isinstance(value, list) and "lr" in key)])
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(count)]
        assert lr_schedules.build_scheduler(name, found, torch.optim.Adam(groups)).get_last_lr()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "Lion"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_setting_of_the_class_for_the_other_case_is_found_when_the_file_is_read(name: str, offload: bool) -> None:
    taken, weights = accepts("optimizer", name), [torch.nn.Parameter(torch.ones(2))]
    zero, how = (CPU, "with") if offload else (None, "without")
    values = {key: PARAM_BLOCKS["optimizer"].model_fields[key].default for key in taken}
    values = {key: value for key, value in values.items() if isinstance(value, bool | float)}
    refused = set((NOT_ON_HOST if offload else NOT_ON_DEVICE).get(name.lower(), ()))
    for key, value in values.items():
        if key in refused:
            (text,) = faults("optimizer", name, zero=zero, **{key: value})
            assert text.endswith(f".{key} is not a setting of {name} {how} zero_optimization.offload_optimizer.")
            with pytest.raises(OptimizerConfigError, match=rf"does not know the key optimizer\.params\.{key}"):
                build_optimizer(name, {key: value}, parameters=weights, offload=offload)
        else:
            params = load("optimizer", name, zero=zero, **{key: value}).optimizer.params
            build_optimizer(name, params, parameters=weights, offload=offload)
    assert refused <= set(values)


def test_lenient_waits_for_integrations() -> None:
    load("optimizer", "Adam", lenient=True, lr="auto", betas="auto", max_grad_norm="auto")
    load("scheduler", "WarmupDecayLR", lenient=True, warmup_max_lr="auto")
    with pytest.raises(DeepSpeedConfigError, match="did you mean 'betas'"):
        load("optimizer", "Adam", lenient=True, beta="auto2")


# --- the result ---


def test_params_are_read_only() -> None:
    source = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.99]}}}
    params = load_config(source, world_size=1).optimizer.params
    assert params["lr"] == 0.1 and dict(params) == {**params} == {"lr": 0.1, "betas": (0.9, 0.99)}
    changes = (lambda: params.update(lr=1), lambda: params.pop("lr"), lambda: params.__setitem__("lr", 1), params.clear)
    for change in changes:
        with pytest.raises(TypeError, match="cannot be changed"):
            change()
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert json.loads(json.dumps(params)) == source["optimizer"]["params"] == {"lr": 0.1, "betas": [0.9, 0.99]}


@for_each("path", sorted(PARAM_FIELDS))
def test_defaults_are_in_order_and_odd_values_are_not(path: str) -> None:
    part, _, name = path.split(".")
    block, default = PARAM_BLOCKS[part], PARAM_FIELDS[path].default
    if not isinstance(default, str) or name in ("ns_method", "warmup_type"):
        block.model_validate({name: default})
    for odd in ({"a": 1}, "no such value"):
        with pytest.raises(ValidationError):
            block.model_validate({name: odd})


@for_each("params", [True, 3, [1]])
def test_params_that_are_no_block_are_refused_in_a_sentence(params: Any) -> None:
    for part, name in (("optimizer", "Adam"), ("scheduler", "OneCycle")):
        with pytest.raises(DeepSpeedConfigError, match=rf"{part}\.params must be a block"):
            load_config({"train_batch_size": 1, part: {"type": name, "params": params}}, world_size=1)
