"""``optimizer.params`` and ``scheduler.params``: which settings each named optimizer and schedule has, and what each
may be.

The names and signatures are those of ``deepspeed.optim``; a test compares them. Nothing here imports torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from deepspeed.config.explain.messages import nearest
from deepspeed.config.model.removed import REMOVED_OPTIMIZERS, removed_key
from deepspeed.config.model.values import AUTO, Violation, finite_number, quoted_hint, whole_number

Part = Literal["optimizer", "scheduler"]
OPTIMIZER_DEFAULT = "the optimizer's own"

OPTIMIZER_NAMES = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""Matched without regard to case; every other optimizer is an exact class name of torch.optim."""
SCHEDULER_NAMES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

TORCH_OPTIMIZERS = (
    *(
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "LBFGS",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
    ),
    *("Rprop", "SGD", "SparseAdam"),
)
TORCH_SCHEDULERS = (
    *(
        "ChainedScheduler",
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
    ),
    *("LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau"),
    *("SequentialLR", "StepLR"),
)


@dataclass(frozen=True)
class ParamSpec:
    """Type, bounds and default of one parameter.

    ``kind``: number, whole number, true/false, one of ``choices``, or a pair of numbers. ``per_group``: a list with one
    entry per parameter group is as good. ``default`` is text where it depends on the optimizer.
    """

    kind: Literal["number", "whole", "flag", "choice", "pair"]
    default: Any = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    per_group: bool = False
    nullable: bool = False

    @property
    def bounds_text(self) -> str:
        """The range in words such as ``>= 0, < 1``; empty without one."""
        signs = ((self.ge, ">="), (self.lt, "<"), (self.le, "<="))
        return ", ".join(f"{sign} {bound:g}" for bound, sign in signs if bound is not None)

    @property
    def type_text(self) -> str:
        """The type in words, with its range."""
        names = {"number": "float", "whole": "int", "flag": "bool", "pair": "list of two floats"}
        text = " or ".join(f'"{item}"' for item in self.choices) or names[self.kind]
        text += f" {self.bounds_text}" if self.bounds_text else ""
        return (
            text
            + (" or a list with one per parameter group" if self.per_group else "")
            + (" or null" if self.nullable else "")
        )

    @property
    def default_text(self) -> str:
        """The default in words."""
        if isinstance(self.default, bool) or self.default is None:
            return {True: "true", False: "false", None: "null"}[self.default]
        return str(self.default)

    def json_schema(self) -> dict[str, Any]:
        """The type as JSON Schema."""
        bounds = {"minimum": self.ge, "exclusiveMaximum": self.lt, "maximum": self.le}
        one: dict[str, Any] = {
            "type": {"number": "number", "whole": "integer", "flag": "boolean"}.get(self.kind, "number")
        }
        one |= {key: bound for key, bound in bounds.items() if bound is not None}
        if self.kind == "choice":
            one = {"enum": list(self.choices)}
        if self.kind == "pair":
            one = {"type": "array", "items": one, "minItems": 2, "maxItems": 2}
        options = [
            one,
            *([{"type": "array", "items": one}] if self.per_group else []),
            *([{"type": "null"}] if self.nullable else []),
        ]
        return one if len(options) == 1 else {"anyOf": options}

    def objection(self, value: Any) -> str | None:
        """What is wrong with ``value``, as the end of a sentence that begins with the key; None when nothing is."""
        if value is None and self.nullable:
            return None
        if self.kind == "pair":
            if not isinstance(value, list | tuple) or len(value) != 2:
                return f"must be a list of two numbers, not {value!r}"
            return next(filter(None, map(self._objection_to_one, value)), None)
        if self.per_group and isinstance(value, list | tuple):
            return (
                next(filter(None, map(self._objection_to_one, value)), None) if value else "must not be an empty list"
            )
        return self._objection_to_one(value)

    def _objection_to_one(self, value: Any) -> str | None:
        if self.kind == "flag":
            return None if isinstance(value, bool) else f"must be true or false, not {value!r}"
        if self.kind == "choice":
            return None if value in self.choices else f"must be {' or '.join(map(repr, self.choices))}, not {value!r}"
        try:
            number = whole_number(value) if self.kind == "whole" else finite_number(value)
        except ValueError as error:
            return str(error)
        if (
            (self.ge is not None and number < self.ge)
            or (self.lt is not None and number >= self.lt)
            or (self.le is not None and number > self.le)
        ):
            return f"must be {self.bounds_text}, not {value!r}"
        return None


def _number(
    default: Any, *, ge: float | None = 0, lt: float | None = None, per_group: bool = False, nullable: bool = False
) -> ParamSpec:
    return ParamSpec("number", default, ge=ge, lt=lt, per_group=per_group, nullable=nullable)


def _whole(default: Any, *, ge: float, nullable: bool = False) -> ParamSpec:
    return ParamSpec("whole", default, ge=ge, nullable=nullable)


def _flag(default: bool | None, *, nullable: bool = False) -> ParamSpec:  # noqa: FBT001 - the value itself
    return ParamSpec("flag", default, nullable=nullable)


_OPTIMIZER_SPECS = {
    "lr": _number(OPTIMIZER_DEFAULT),
    "betas": ParamSpec("pair", OPTIMIZER_DEFAULT, ge=0, lt=1),
    "eps": _number(OPTIMIZER_DEFAULT),
    "weight_decay": _number(OPTIMIZER_DEFAULT),
    "torch_adam": _flag(default=False),
    "foreach": _flag(default=None, nullable=True),
    "adam_w_mode": _flag(default=True),
    "bias_correction": _flag(default=True),
    "amsgrad": _flag(default=False),
    "set_grad_none": _flag(default=True),
    "fp32_optimizer_states": _flag(default=True),
    "momentum": _number(0.95, lt=1),
    "muon_lr": _number(None, nullable=True),
    "adam_lr": _number(None, nullable=True),
    "ns_method": ParamSpec("choice", "gram", choices=("gram", "standard")),
    "per_head_muon": _flag(default=False),
    "max_coeff": _number(10.0),
    "min_coeff": _number(0.01),
    "eps_inside_sqrt": _flag(default=False),
    "max_grad_norm": _number(0.0),
}
# Settings of torch's own classes that a known name passes on. They are torch's to document.
_PASSED_ON = {
    "fused": _flag(default=None, nullable=True),
    "maximize": _flag(default=False),
    "capturable": _flag(default=False),
    "differentiable": _flag(default=False),
    "lr_decay": _number(0.0),
    "initial_accumulator_value": _number(0.0),
}
_SCHEDULER_SPECS = {
    "lr_range_test_min_lr": _number(0.001, per_group=True),
    "lr_range_test_step_size": _whole(2000, ge=1),
    "lr_range_test_step_rate": _number(1.0),
    "lr_range_test_staircase": _flag(default=False),
    "cycle_min_lr": _number("required", per_group=True),
    "cycle_max_lr": _number("required", per_group=True),
    "decay_lr_rate": _number(0.0),
    "cycle_first_step_size": _whole(2000, ge=1),
    "cycle_second_step_size": _whole(None, ge=0, nullable=True),
    "cycle_first_stair_count": _whole(0, ge=0),
    "cycle_second_stair_count": _whole(None, ge=0, nullable=True),
    "decay_step_size": _whole(0, ge=0),
    "cycle_momentum": _flag(default=True),
    "cycle_min_mom": _number(0.8, lt=1, per_group=True),
    "cycle_max_mom": _number(0.9, lt=1, per_group=True),
    "decay_mom_rate": _number(0.0, ge=None),
    "warmup_min_lr": _number(0.0, per_group=True),
    "warmup_max_lr": _number(None, per_group=True, nullable=True),
    "warmup_num_steps": _whole(1000, ge=0),
    "warmup_type": ParamSpec("choice", "log", choices=("log", "linear")),
    # Transformers writes 0 when it only evaluates.
    "total_num_steps": _whole("required", ge=0),
    "warmup_min_ratio": _number(0.0),
    "cos_min_ratio": _number(0.0001),
    "last_batch_iteration": _whole(-1, ge=-1),
}
_SPECS: Mapping[Part, Mapping[str, ParamSpec]] = MappingProxyType(
    {"optimizer": MappingProxyType(_OPTIMIZER_SPECS | _PASSED_ON), "scheduler": MappingProxyType(_SCHEDULER_SPECS)}
)
PARAM_SPECS: Mapping[str, ParamSpec] = MappingProxyType(
    {f"optimizer.params.{name}": spec for name, spec in _OPTIMIZER_SPECS.items()}
    | {f"scheduler.params.{name}": spec for name, spec in _SCHEDULER_SPECS.items()}
)


@dataclass(frozen=True)
class Accepts:
    """The parameter names of one optimizer or schedule; ``on_device`` and ``on_host`` hold without and with optimizer
    offload.
    """

    always: tuple[str, ...]
    on_device: tuple[str, ...] = ()
    on_host: tuple[str, ...] = ()
    required: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.always, *self.on_device, *self.on_host)


_ADAM_ONLY_TORCH = ("fused", "maximize", "capturable", "differentiable")
_ADAM = Accepts(
    (
        *("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "adam_w_mode", "torch_adam", "foreach"),
        *("fp32_optimizer_states", *_ADAM_ONLY_TORCH),
    ),
    on_device=("set_grad_none",),
)
_LAMB = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "bias_correction",
    "eps_inside_sqrt",
    "max_coeff",
    "min_coeff",
    "amsgrad",
)
_MUON = ("lr", "muon_lr", "adam_lr", "momentum", "betas", "eps", "weight_decay", "ns_method", "per_head_muon")
OPTIMIZER_ACCEPTS: Mapping[str, Accepts] = MappingProxyType(
    {
        "adam": _ADAM,
        "adamw": _ADAM,
        "adagrad": Accepts(
            ("lr", "eps", "weight_decay"),
            on_device=("lr_decay", "initial_accumulator_value"),
            on_host=("amsgrad", "fp32_optimizer_states"),
        ),
        "lion": Accepts(
            ("lr", "betas", "weight_decay"), on_device=("set_grad_none",), on_host=("fp32_optimizer_states",)
        ),
        "lamb": Accepts(_LAMB),
        "muon": Accepts((*_MUON, "torch_adam", "adam_w_mode", "foreach")),
    }
)
"""By lower-case name; the classes of mup and of torch.optim check their own settings."""

_CYCLE = tuple(name for name in _SCHEDULER_SPECS if name.startswith(("cycle_", "decay_")))
_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
_COSINE = (
    "total_num_steps",
    "warmup_min_ratio",
    "warmup_num_steps",
    "cos_min_ratio",
    "warmup_type",
    "last_batch_iteration",
)
_RANGE = tuple(name for name in _SCHEDULER_SPECS if name.startswith("lr_range_test_"))
SCHEDULER_ACCEPTS: Mapping[str, Accepts] = MappingProxyType(
    {
        "LRRangeTest": Accepts((*_RANGE, "last_batch_iteration")),
        "OneCycle": Accepts((*_CYCLE, "last_batch_iteration"), required=("cycle_min_lr", "cycle_max_lr")),
        "WarmupLR": Accepts(_WARMUP),
        "WarmupDecayLR": Accepts(("total_num_steps", *_WARMUP), required=("total_num_steps",)),
        "WarmupCosineLR": Accepts(_COSINE, required=("total_num_steps",)),
    }
)


def accepts(part: Part, name: str) -> Accepts | None:
    """What the optimizer or schedule ``name`` takes; None for one that checks its settings itself, or that does not
    exist.
    """
    return OPTIMIZER_ACCEPTS.get(name.lower()) if part == "optimizer" else SCHEDULER_ACCEPTS.get(name)


def _type_violation(part: Part, name: str) -> Violation | None:
    path = f"{part}.type"
    if part == "scheduler":
        known: tuple[str, ...] = (*SCHEDULER_NAMES, *TORCH_SCHEDULERS)
        exists = name in known
    else:
        known = tuple(dict.fromkeys((*OPTIMIZER_NAMES, *TORCH_OPTIMIZERS)))
        exists = name in known or name.lower() in map(str.lower, OPTIMIZER_NAMES)
    if exists:
        return None
    removed = REMOVED_OPTIMIZERS.get(name.lower()) if part == "optimizer" else None
    if removed is not None:
        return Violation(path, f"{path} {name!r} was removed with compressed communication. Use {removed!r}.")
    by_lower = {item.lower(): item for item in known}
    guess = nearest(name.lower(), by_lower, 0.5)
    hint = f", did you mean {by_lower[guess]!r}?" if guess else "."
    own = ", ".join(OPTIMIZER_NAMES if part == "optimizer" else SCHEDULER_NAMES)
    module = "torch.optim" if part == "optimizer" else "torch.optim.lr_scheduler"
    return Violation(
        path, f"{path} {name!r} is unknown{hint} Known: {own}, and the classes of {module} by their exact names."
    )


def _unknown(path: str, owner: str, names: Iterable[str]) -> str:
    valid = sorted(names)
    guess = nearest(path.rpartition(".")[2], valid)
    hint = f", did you mean {guess!r}?" if guess else "."
    return f"{path}: {owner} has no such setting{hint} Valid: {', '.join(valid)}."


def _objection(part: Part, name: str, key: str, value: Any) -> str | None:
    """The sentence about one parameter; None when it is in order."""
    path = f"{part}.params.{key}"
    removed = removed_key(path)
    if removed is not None:
        return removed
    taken = accepts(part, name)
    if taken is None:
        # These classes check their own settings; what no number can be is said before the model is touched.
        numeric = part == "optimizer" and key in ("lr", "weight_decay", "momentum", "muon_lr", "adam_lr")
        hint = quoted_hint(value)
        if (numeric and isinstance(value, str | bool)) or hint:
            return f"{path} must be a number, not {value!r}{hint}."
        return None
    if key not in taken.names:
        return _unknown(path, name, taken.names)
    wrong = _SPECS[part][key].objection(value)
    return None if wrong is None else f"{path} {wrong}."


def param_violations(part: Part, block: Any, *, lenient: bool) -> list[Violation]:
    """Everything wrong with the name and the parameters of an ``optimizer`` or ``scheduler`` block, as written.

    ``lenient`` passes over "auto" and over what an integration has yet to add. What is no block at all is left to the
    models.
    """
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        return []
    name, params = block["type"], block.get("params") or {}
    found = [_type_violation(part, name)]
    for key, value in params.items() if isinstance(params, Mapping) else ():
        path, sentence = f"{part}.params.{key}", None
        if part == "optimizer" and key == "max_grad_norm":
            sentence = None if lenient else f"{path} is not read. Set the top-level key gradient_clipping instead."
        elif isinstance(value, str) and value == AUTO:
            auto = (
                f'{path} is still "auto". Only an integration (Transformers, Accelerate) fills that in; write a value.'
            )
            sentence = None if lenient else auto
        else:
            sentence = _objection(part, name, str(key), value)
        found.append(None if sentence is None else Violation(path, sentence))
    taken = accepts(part, name)
    for key in taken.required if taken is not None and not lenient else ():
        if key not in params:
            found.append(Violation(f"{part}.params", f"{part}.params.{key} is required by {name}."))
    return [item for item in found if item is not None] + (_between(name, params) if part == "optimizer" else [])


def _between(name: str, params: Any) -> list[Violation]:
    """Parameters of one optimizer that contradict each other."""
    if not isinstance(params, Mapping):
        return []
    out, lower = [], name.lower()
    if lower in ("lamb", "adagrad") and params.get("amsgrad") is True:
        path = "optimizer.params.amsgrad"
        out.append(Violation(path, f"{path} true is not possible with {name}. Use AdamW, or delete the key."))
    low, high = (params.get(key, _OPTIMIZER_SPECS[key].default) for key in ("min_coeff", "max_coeff"))
    if lower == "lamb" and all(isinstance(item, int | float) for item in (low, high)) and low > high:
        path = "optimizer.params.min_coeff"
        out.append(Violation(path, f"{path} {low} must not be above max_coeff, which is {high}."))
    torch_only = params.get("torch_adam") is True or params.get("amsgrad") is True or params.get("foreach") is not None
    if lower in ("adam", "adamw") and (torch_only or any(key in params for key in _ADAM_ONLY_TORCH)):
        for key in ("bias_correction", "set_grad_none"):
            if params.get(key) is False:
                path = f"optimizer.params.{key}"
                why = "torch_adam, amsgrad, foreach, fused, maximize, capturable and differentiable choose that class"
                out.append(Violation(path, f"{path} false is not possible with torch's own Adam; {why}."))
    return out
