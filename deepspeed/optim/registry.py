"""From an optimizer name in the config to an optimizer object, and what sharding may assume about an optimizer."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from deepspeed.errors import OptimizerConfigError, nearest_hint
from deepspeed.monitor.log import logger
from deepspeed.optim.muon import MuonWithAuxAdam
from deepspeed.optim.rules import (
    Adagrad,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
    can_fuse,
)

_NAMES = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
KNOWN_NAMES = tuple(map(str.lower, _NAMES))  # in any case; every other name is exactly that of a class of torch.optim

# without and with an offloaded optimizer state; Adam has a function of its own
_CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "adagrad": (Adagrad, DeepSpeedCPUAdagrad),
    "lion": (FusedLion, DeepSpeedCPULion),
    "lamb": (FusedLamb, FusedLamb),
    "muon": (MuonWithAuxAdam, MuonWithAuxAdam),
}
_MUP_CLASSES = {name.lower(): name for name in _NAMES[-3:]}
_NOT_SHARDABLE = {
    "SparseAdam": "sparse gradients, which the gradient reduction does not produce",
    "LBFGS": "several losses per step",
}
_ADAMS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")
_ELEMENTWISE_TORCH = (*_ADAMS, "SGD", "Adagrad", "RMSprop", "Adadelta", "ASGD", "Rprop")
_ELEMENTWISE_FOREIGN = frozenset({"apex.optimizers.fused_adam.FusedAdam", "apex.optimizers.fused_sgd.FusedSGD"})


def build_optimizer(
    type_name: str, params_cfg: Mapping[str, Any] | None, *, parameters: Iterable[Any], offload: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer that ``optimizer.type`` and ``optimizer.params`` of the config describe.

    ``type_name``: one of ``KNOWN_NAMES`` in any case, or an exact class name of ``torch.optim``. ``parameters``:
    tensors, ``(name, tensor)`` pairs or torch-style group dicts, of which those without parameters are dropped.
    ``offload``: the state rests in host memory or on NVMe, so the ``DeepSpeedCPU*`` class of the name is built.

    Raises OptimizerConfigError (a ``ValueError``) for an unknown name or key, a wrong type of value, ``max_grad_norm``,
    a parameter listed twice, or no parameter at all; ImportError for a ``mu*`` optimizer without the package ``mup``.
    """
    name, settings = type_name.lower(), dict(params_cfg or {})
    if "max_grad_norm" in settings:
        fault = f'optimizer.params.max_grad_norm of "{type_name}" is not used'
        raise OptimizerConfigError(f'{fault}; set the top-level key "gradient_clipping" instead')
    check_numbers("optimizer.params", settings)
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(map(float, settings["betas"]))
    groups = _clean_parameters(type_name, parameters)
    if name in ("adam", "adamw"):
        factory, settings = _choose_adam(name, settings, groups, offload=offload)
    else:
        for key in ("torch_adam", "adam_w_mode", "foreach") if name == "muon" else ():
            settings.pop(key, None)
        factory = _CLASSES[name][offload] if name in _CLASSES else _foreign_class(type_name)
    return construct("optimizer", type_name, factory, groups, settings)


def construct(part: str, name: str, factory: Callable[..., Any], first: Any, settings: Mapping[str, Any]) -> Any:
    """Call ``factory(first, **settings)`` for the ``optimizer`` or ``scheduler`` block of the config. Raise
    OptimizerConfigError for an unknown or missing key, a value of the wrong type, with its path and what is valid.
    """
    accepted = dict(list(inspect.signature(factory).parameters.items())[1:])
    valid = {key: p for key, p in accepted.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    any_key = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    unknown = [key for key in settings if key not in valid]
    if unknown and not any_key:
        fault = f"does not know the key {part}.params.{unknown[0]}{nearest_hint(unknown[0], valid) or '.'}"
        raise OptimizerConfigError(f'{part} "{name}" {fault} Valid keys: {", ".join(valid)}')
    missing = [key for key, p in valid.items() if p.default is p.empty and key not in settings]
    if missing:
        fault = f"needs {part}.params.{missing[0]}; all missing keys: {', '.join(missing)}"
        raise OptimizerConfigError(f'{part} "{name}" {fault}')
    try:
        return factory(first, **settings)
    except (TypeError, RuntimeError) as error:
        raise OptimizerConfigError(f'{part} "{name}" refused {part}.params {dict(settings)}: {error}') from error


def granularity(optimizer: torch.optim.Optimizer) -> Literal["element", "parameter"]:
    """Return how finely a parameter may be cut for this optimizer without changing its result.

    ``element``: each element is updated from its own gradient and state alone. ``parameter``: the update looks at a
    whole tensor (norms, matrix products, factored or block-wise state), also the answer for a class nobody knows.
    A class attribute ``elementwise = True`` or ``False`` decides first. Raises OptimizerConfigError for an optimizer
    whose state cannot be divided over ranks at all.
    """
    cls = type(optimizer)
    for name, need in _NOT_SHARDABLE.items():
        if isinstance(optimizer, getattr(torch.optim, name)):
            hint = "use an element-wise optimizer such as AdamW, or train without this package"
            raise OptimizerConfigError(f"{cls.__name__} cannot be used here: its update needs {need}; {hint}")
    declared = getattr(cls, "elementwise", None)
    if declared is not None:
        return "element" if declared else "parameter"
    if f"{cls.__module__}.{cls.__qualname__}" in _ELEMENTWISE_FOREIGN:
        return "element"
    for name in _ELEMENTWISE_TORCH:
        base = getattr(torch.optim, name)
        # torch wraps ``step`` of the class it meets first, so only the innermost functions can be compared
        if isinstance(optimizer, base) and inspect.unwrap(cls.step) is inspect.unwrap(base.step):
            return "element"
    return "parameter"


def check_numbers(where: str, settings: Mapping[str, Any]) -> None:
    """Raise OptimizerConfigError for numbers written as text, and "auto" that nobody filled in, under ``where``."""
    for key, value in settings.items():
        for item in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(item, str):
                continue
            if item == "auto":
                fault = 'is "auto", and nothing filled it in; write a value or remove the key'
                raise OptimizerConfigError(f"{where}.{key} {fault}")
            try:
                number = float(item)
            except ValueError:
                continue
            raise OptimizerConfigError(f'{where}.{key} is the text "{item}"; write the number without quotes: {number}')


def _clean_parameters(type_name: str, parameters: Iterable[Any]) -> list[Any]:
    as_list = lambda params: [params] if isinstance(params, torch.Tensor) else list(params)  # noqa: E731
    entries = [{**e, "params": as_list(e["params"])} if isinstance(e, dict) else e for e in parameters]
    groups = [e for e in entries if not isinstance(e, dict) or e["params"]]
    seen: set[int] = set()
    for name, tensor in _named_tensors(groups):
        if id(tensor) in seen:
            label = f'"{name}"' if name else f"of shape {tuple(tensor.shape)}"
            fault = f"the parameter {label} is listed twice; list every parameter once"
            raise OptimizerConfigError(f'optimizer "{type_name}": {fault}')
        seen.add(id(tensor))
    if not groups:
        fault = f'optimizer "{type_name}" got no parameters'
        raise OptimizerConfigError(f"{fault}; pass a model with requires_grad parameters")
    return groups


def _named_tensors(groups: list[Any]) -> list[tuple[str, torch.Tensor]]:
    items = [item for entry in groups for item in (entry["params"] if isinstance(entry, dict) else (entry,))]
    return [item if isinstance(item, tuple) else ("", item) for item in items]


def _choose_adam(
    name: str, settings: dict[str, Any], groups: list[Any], *, offload: bool
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Choose torch's class if asked for by ``torch_adam`` or by a setting that only torch has, else the named class."""
    torch_adam = settings.pop("torch_adam", False)
    # plain "Adam" decays decoupled too unless told otherwise; that is what existing configs rely on
    adam_w_mode = settings.pop("adam_w_mode", True)
    decoupled = name == "adamw" or adam_w_mode
    needs_torch = settings.get("amsgrad") or settings.get("foreach") is not None
    if not torch_adam and not needs_torch and not {"fused", "maximize", "capturable", "differentiable"} & set(settings):
        settings.pop("foreach", None)
        if offload:
            return DeepSpeedCPUAdam, settings | {"adamw_mode": decoupled}
        settings.pop("fp32_optimizer_states", None)
        return FusedAdam, settings | {"adam_w_mode": decoupled}
    settings.pop("fp32_optimizer_states", None)
    for key in ("bias_correction", "set_grad_none"):
        if settings.get(key) is True:
            settings.pop(key)
    if not torch_adam:
        # only an explicit ``torch_adam`` asks for torch's own default decay of AdamW (0.01)
        settings.setdefault("weight_decay", 0.0)
    unset = settings.get("foreach") is None and not settings.get("differentiable") and "fused" not in settings
    if unset and can_fuse([tensor for _, tensor in _named_tensors(groups)]):
        settings["fused"] = True
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), settings


def _foreign_class(type_name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return a class of torch, or of the package mup."""
    name = _MUP_CLASSES.get(type_name.lower())
    if name is None:
        if type_name.lower() in ("onebitadam", "onebitlamb", "zerooneadam"):
            fault = 'the compressed-communication optimizers were removed; use "AdamW" or "Lamb"'
            raise OptimizerConfigError(f'optimizer.type "{type_name}": {fault}')
        return class_of_torch("optimizer", type_name, torch.optim, torch.optim.Optimizer, _NAMES)
    try:
        mup = importlib.import_module("mup")
    except ImportError as error:
        text = f'optimizer.type "{name}" needs the package "mup"; install it with: pip install mup'
        raise ImportError(text) from error
    logger.warning("%s scales learning rates by parameter shape; check that the schedule does not overwrite them", name)
    return getattr(mup, name)


def class_of_torch(part: str, name: str, module: Any, base: type, ours: Iterable[str]) -> Any:
    """Return the subclass of ``base`` in ``module`` by that exact name; raise OptimizerConfigError with the nearest."""
    theirs = {n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base) and n[0] != "_"}
    theirs.pop(base.__name__)
    if name not in theirs:
        fault = f'{part}.type "{name}" is unknown{nearest_hint(name, [*theirs, *ours]) or "."}'
        valid = f"{', '.join(ours)}, or a class of {module.__name__} by its exact name"
        raise OptimizerConfigError(f"{fault} Known: {valid}")
    return theirs[name]
