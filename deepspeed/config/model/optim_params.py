"""The settings of each named optimizer and schedule, those of the constructors in ``deepspeed.optim``; no torch."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo

from deepspeed.config.explain.messages import UNFILLED, Judgement, unknown_key, wrong_value
from deepspeed.config.model.spelling import REMOVED_OPTIMIZERS, removed_key
from deepspeed.config.model.values import Block, Count, Flag, Int, Num, Positive, Support, is_auto, key, quoted_hint
from deepspeed.errors import nearest_hint

Part = Literal["optimizer", "scheduler"]
OPTIMIZER_DEFAULT, REQUIRED = "the optimizer's own", "required"  # how a parameter without one default says so

OPTIMIZER_NAMES = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""Matched without regard to case; every other optimizer is an exact class name of torch.optim."""
SCHEDULER_NAMES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
TORCH_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD", "SparseAdam"),
)
TORCH_SCHEDULERS = (
    *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR"),
    *("ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR"),
    *("ReduceLROnPlateau", "SequentialLR", "StepLR"),
)
_NORM = "optimizer.params.max_grad_norm"
_KNOWN = {
    "optimizer": (OPTIMIZER_NAMES, TORCH_OPTIMIZERS, "torch.optim"),
    "scheduler": (SCHEDULER_NAMES, TORCH_SCHEDULERS, "torch.optim.lr_scheduler"),
}


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"must be a list of two numbers, not {value!r}")
    return value


def _per_group(value: Any) -> Any:
    if isinstance(value, list | tuple) and not value:
        raise ValueError("must not be an empty list")
    return value if isinstance(value, list | tuple) else (value,)


Rate = Annotated[Num, Field(ge=0)]
Decay = Annotated[Num, Field(ge=0, lt=1)]
Rates = Annotated[tuple[Rate, ...], BeforeValidator(_per_group, json_schema_input_type=Rate | list[Rate])]
_Betas = Annotated[tuple[Decay, Decay], BeforeValidator(_pair)]
Decays = Annotated[tuple[Decay, ...], BeforeValidator(_per_group, json_schema_input_type=Decay | list[Decay])]


class OptimizerParams(Block):
    """``optimizer.params``: all that any named optimizer has; torch's other classes document their own."""

    lr: Rate = key(OPTIMIZER_DEFAULT, "Learning rate.")
    betas: _Betas = key(OPTIMIZER_DEFAULT, "Decay rates of the first and the second moment.")
    eps: Rate = key(OPTIMIZER_DEFAULT, "Added to the denominator of the update.")
    weight_decay: Rate = key(OPTIMIZER_DEFAULT, "Weight decay; decoupled for AdamW, Lion, Muon, Adam with adam_w_mode.")
    torch_adam: Flag = key(False, "Build torch.optim's Adam or AdamW instead of this package's (Adam, AdamW).")
    foreach: Flag | None = key(None, "Handed to torch's Adam: true updates all tensors in one call, false one by one.")
    adam_w_mode: Flag = key(True, "Decoupled weight decay for type Adam; AdamW always has it.")
    bias_correction: Flag = key(True, "Correct the bias of young moments (Adam, AdamW, Lamb).")
    amsgrad: Flag = key(False, "Divide by the largest second moment so far; chooses torch's Adam.")
    set_grad_none: Flag = key(True, "zero_grad() drops gradients.", Support.INERT, "the engine resets the gradients")
    fp32_optimizer_states: Flag = key(True, "Keep the moments in fp32 on the host.", Support.INERT, "they always are")
    momentum: Decay = key(0.95, "Momentum of Muon (0.95), or of a torch optimizer that has one (SGD: 0).")
    muon_lr: Rate | None = key(None, "Learning rate of the matrices under Muon; lr when absent.")
    adam_lr: Rate | None = key(None, "Learning rate of everything else under Muon; lr when absent.")
    ns_method: Literal["gram", "standard"] = key("gram", "Muon orthogonalises on the Gram matrix, or on the matrix.")
    per_head_muon: Flag = key(False, "Muon orthogonalises each attention head by itself.", Support.NOT_YET)
    max_coeff: Rate = key(10.0, "Upper limit of Lamb's trust ratio.")
    min_coeff: Rate = key(0.01, "Lower limit of Lamb's trust ratio.")
    eps_inside_sqrt: Flag = key(False, "Lamb adds eps under the square root instead of after it.")
    max_grad_norm: Rate = key(0.0, "Deprecated and refused: the top-level gradient_clipping clips.")
    # Settings of torch's own classes that a known name passes on. They are torch's to document.
    fused: Flag | None = None
    maximize: Flag = False
    capturable: Flag = False
    differentiable: Flag = False
    lr_decay: Rate = 0.0
    initial_accumulator_value: Rate = 0.0


class SchedulerParams(Block):
    """``scheduler.params``: all that any named schedule has. Lengths are in updates; rates may be one per group."""

    lr_range_test_min_lr: Rates = key(0.001, "LRRangeTest: the first learning rate.")
    lr_range_test_step_size: Positive = key(2000, "LRRangeTest: updates per interval.")
    lr_range_test_step_rate: Rate = key(1.0, "LRRangeTest: growth per interval, as a share of the first rate.")
    lr_range_test_staircase: Flag = key(False, "LRRangeTest: grow once per interval instead of at every update.")
    cycle_min_lr: Rates = key(REQUIRED, "OneCycle: learning rate at both ends of the cycle.")
    cycle_max_lr: Rates = key(REQUIRED, "OneCycle: learning rate at the top of the cycle.")
    decay_lr_rate: Rate = key(0.0, "OneCycle: decay of the rate per decay_step_size after the cycle; 0 for none.")
    cycle_first_step_size: Positive = key(2000, "OneCycle: updates of the rising half.")
    cycle_second_step_size: Count | None = key(None, "OneCycle: updates of the falling half; null: as the first.")
    cycle_first_stair_count: Count = key(0, "OneCycle: stairs of the rising half; 0 rises evenly.")
    cycle_second_stair_count: Count | None = key(None, "OneCycle: stairs of the falling half; null: as the first.")
    decay_step_size: Count = key(0, "OneCycle: updates per decay interval after the cycle; 0 for no decay.")
    cycle_momentum: Flag = key(True, "OneCycle: move the first beta against the learning rate.")
    cycle_min_mom: Decays = key(0.8, "OneCycle: lowest first beta.")
    cycle_max_mom: Decays = key(0.9, "OneCycle: highest first beta.")
    decay_mom_rate: Num = key(0.0, "OneCycle: growth of the first beta per decay_step_size after the cycle.")
    warmup_min_lr: Rates = key(0.0, "WarmupLR, WarmupDecayLR: learning rate at the start.")
    warmup_max_lr: Rates | None = key(None, "Rate after it. Null: the optimizer's; WarmupDecayLR: 0.001 if absent.")
    warmup_num_steps: Count = key(1000, "Warmup schedules: updates of the warm-up; 0 and 1 count as 2.")
    warmup_type: Literal["log", "linear"] = key("log", "Warmup schedules: the curve, logarithmic or linear.")
    # Transformers writes 0 when it only evaluates.
    total_num_steps: Count = key(REQUIRED, "WarmupDecayLR, WarmupCosineLR: updates of the whole training.")
    warmup_min_ratio: Rate = key(0.0, "WarmupCosineLR: share of the optimizer's rate at the start.")
    cos_min_ratio: Rate = key(0.0001, "WarmupCosineLR: share of the optimizer's rate at the end.")
    last_batch_iteration: Int = key(-1, "Where to resume, in updates; -1 starts anew and writes the first rate.", ge=-1)


PARAM_BLOCKS: Mapping[Part, type[Block]] = {"optimizer": OptimizerParams, "scheduler": SchedulerParams}
_FIELDS = [(part, name, info) for part, block in PARAM_BLOCKS.items() for name, info in block.model_fields.items()]
PARAM_FIELDS: Mapping[str, FieldInfo] = {
    f"{part}.params.{name}": info for part, name, info in _FIELDS if info.description
}
_TORCH_ADAM = ("fused", "maximize", "capturable", "differentiable")
_COMMON = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad")
_ADAM = (*_COMMON, "adam_w_mode", "torch_adam", "foreach", "fp32_optimizer_states", "set_grad_none", *_TORCH_ADAM)
_MUON = ("lr", "muon_lr", "adam_lr", "momentum", "betas", "eps", "weight_decay", "ns_method", "per_head_muon")
_ADAGRAD = ("lr_decay", "initial_accumulator_value", "amsgrad", "fp32_optimizer_states")
_OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "adagrad": ("lr", "eps", "weight_decay", *_ADAGRAD),
    "lion": ("lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states"),
    "lamb": (*_COMMON, "eps_inside_sqrt", "max_coeff", "min_coeff"),
    "muon": (*_MUON, "torch_adam", "adam_w_mode", "foreach"),
}
# Settings that only the class for the host, or only the one for the device, takes.
NOT_ON_DEVICE = {"adagrad": ("amsgrad", "fp32_optimizer_states"), "lion": ("fp32_optimizer_states",)}
NOT_ON_HOST = {"adagrad": ("lr_decay", "initial_accumulator_value")} | dict.fromkeys(
    ("adam", "adamw", "lion"), ("set_grad_none",)
)
_RATES = ("warmup_min_lr", "warmup_max_lr")
_WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
_SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "LRRangeTest": ("lr_range_test_", "last_batch_iteration"),
    "OneCycle": ("cycle_", "decay_", "last_batch_iteration"),
    "WarmupLR": (*_RATES, *_WARMUP),
    "WarmupDecayLR": ("total_num_steps", *_RATES, *_WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_WARMUP),
}
"""What the names of the settings begin with."""


def accepts(part: Part, name: str) -> tuple[str, ...] | None:
    """Return the settings of an optimizer (name in any case) or schedule; None for an unknown name or a torch class."""
    if part == "optimizer":
        return _OPTIMIZERS.get(name.lower())
    heads = _SCHEDULES.get(name)
    return tuple(key for key in SchedulerParams.model_fields if key.startswith(heads)) if heads else None


def _unknown_type(part: Part, name: str) -> str:
    """Return the fault in the name of an optimizer or a schedule as a sentence; empty for a known name."""
    ours, torchs, module = _KNOWN[part]
    if part == "optimizer" and name.lower() in REMOVED_OPTIMIZERS:
        return f"{name!r} was removed with compressed communication. Use {REMOVED_OPTIMIZERS[name.lower()]!r}."
    if name in (*ours, *torchs) or (part == "optimizer" and name.lower() in map(str.lower, ours)):
        return ""
    hint = nearest_hint(name, (*torchs, *ours)) or "."
    return f"{name!r} is unknown{hint} Known: {', '.join(ours)}, and the classes of {module} by their exact names."


def _objection(part: Part, owner: str, name: str, value: Any) -> str:
    """Return the fault in a parameter's name, or in the value for a torch class (which checks the rest); else ""."""
    taken, path = accepts(part, owner), f"{part}.params.{name}"
    if path == _NORM:
        return f"{path} is not read. Set the top-level key gradient_clipping instead."
    if is_auto(value):
        return f"{path} {UNFILLED.replace(' or delete the key', '')}"  # it may be required
    if removed := removed_key(path):
        return removed
    if taken is not None:
        return "" if name in taken else unknown_key(path, taken, f"{owner} has no such setting", most=99)
    numeric = part == "optimizer" and name in ("lr", "weight_decay", "momentum", "muon_lr", "adam_lr")
    hint = quoted_hint(value)
    wrong = hint or (numeric and isinstance(value, str | bool))
    return f"{path} must be a number, not {value!r}{hint}." if wrong else ""


def check_params(part: Part, block: Any, report: Judgement, *, lenient: bool) -> None:
    """Report everything wrong with the name and the parameters of an ``optimizer`` or ``scheduler`` block, as written.

    ``lenient`` skips "auto" and keys that an integration adds later. A value that is no block is left to the models.
    """
    name, params = (block.get("type"), block.get("params") or {}) if isinstance(block, Mapping) else (None, {})
    if not isinstance(name, str) or not isinstance(params, Mapping):
        return
    if unknown := _unknown_type(part, name):
        report.fault(f"{part}.type", f"{part}.type {unknown}")
    accepted, head, taken = {}, f"{part}.params", accepts(part, name)
    for key_, value in params.items():
        if lenient and (is_auto(value) or f"{head}.{key_}" == _NORM):
            continue
        if objection := _objection(part, name, key_, value):
            report.fault(f"{head}.{key_}", objection)
        elif taken is not None:
            accepted[key_] = value
    try:
        PARAM_BLOCKS[part].model_validate(accepted)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            path = f"{head}.{fault['loc'][0]}"
            report.fault(path, f"{path} {wrong_value(fault['type'], fault['msg'], fault['input'])}")
    for key_ in taken if taken is not None and not lenient else ():
        if PARAM_BLOCKS[part].model_fields[key_].default == REQUIRED and key_ not in params:
            report.fault(head, f"{head}.{key_} is required by {name}.")
    for key_, text in _between(name.lower(), params) if part == "optimizer" else ():
        report.fault(f"{head}.{key_}", f"{head}.{key_} {text}")


def _between(name: str, params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, rest of the sentence) for parameters of one optimizer that contradict each other."""
    if name in ("lamb", "adagrad") and params.get("amsgrad") is True:
        yield "amsgrad", f"true is not possible with {name.title()}. Use AdamW, or delete the key."
    low, high = params.get("min_coeff", 0.01), params.get("max_coeff", 10.0)
    if name == "lamb" and all(isinstance(item, int | float) for item in (low, high)) and low > high:
        yield "min_coeff", f"{low} must not be above max_coeff, which is {high}."
    chosen = params.get("torch_adam") is True or params.get("amsgrad") is True or params.get("foreach") is not None
    if name in ("adam", "adamw") and (chosen or any(key in params for key in _TORCH_ADAM)):
        why = "torch_adam, amsgrad, foreach, fused, maximize, capturable and differentiable choose that class"
        refused = [key for key in ("bias_correction", "set_grad_none") if params.get(key) is False]
        yield from ((key, f"false is not possible with torch's own Adam; {why}.") for key in refused)
