"""From an optimizer name in the config to an optimizer object, and what sharding may assume about an optimizer."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from deepspeed.errors import OptimizerConfigError
from deepspeed.observe.log import logger
from deepspeed.optim.adagrad import Adagrad
from deepspeed.optim.adam import can_fuse
from deepspeed.optim.muon import MuonWithAuxAdam
from deepspeed.optim.named import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)

KNOWN_NAMES = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
"""Names matched without regard to case; every other name is an exact class name of ``torch.optim``."""

_REMOVED_NAMES = ("onebitadam", "onebitlamb", "zerooneadam")
_MUP_CLASSES = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
_TORCH_ADAM_KEYS = ("fused", "maximize", "capturable", "differentiable")
_NOT_SHARDABLE = ("SparseAdam", "LBFGS")
_ELEMENTWISE_TORCH = (
    "Adam",
    "AdamW",
    "SGD",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
)
_ELEMENTWISE_FOREIGN = frozenset({"apex.optimizers.fused_adam.FusedAdam", "apex.optimizers.fused_sgd.FusedSGD"})


def build_optimizer(
    type_name: str, params_cfg: Mapping[str, Any] | None, *, parameters: Iterable[Any], offload: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer that ``optimizer.type`` and ``optimizer.params`` of the config describe.

    Args:
        type_name: one of ``KNOWN_NAMES`` in any case, or an exact class name of ``torch.optim``.
        params_cfg: constructor settings; never changed.
        parameters: tensors, ``(name, tensor)`` pairs or torch-style group dicts. Groups without parameters are dropped.
        offload: the optimizer state rests in host memory or on NVMe: the ``DeepSpeedCPU*`` class of the name is built.

    Raises:
        OptimizerConfigError: (a ``ValueError``) unknown name or key, wrong type of value, ``max_grad_norm``,
            a parameter listed twice, or no parameter at all.
        ImportError: a ``mu*`` optimizer without the package ``mup``.
    """
    name = type_name.lower() if type_name.lower() in KNOWN_NAMES else type_name
    settings = _clean_settings(type_name, params_cfg or {})
    groups = _clean_parameters(type_name, parameters)
    if name in ("adam", "adamw"):
        factory, settings = _choose_adam(name, settings, groups, offload=offload)
    elif name in KNOWN_NAMES:
        for key in ("torch_adam", "adam_w_mode", "foreach") if name == "muon" else ():
            settings.pop(key, None)
        factory = _mup_class(name) if name in _MUP_CLASSES else _class_of(name, offload=offload)
    else:
        factory = _torch_class(type_name)
    return _construct(type_name, factory, groups, settings)


def granularity(optimizer: torch.optim.Optimizer) -> Literal["element", "parameter"]:
    """How finely a parameter may be cut for this optimizer without changing its result.

    ``element``: each element is updated from its own gradient and state alone. ``parameter``: the update looks at a
    whole tensor (norms, matrix products, factored or block-wise state), also the answer for a class nobody knows.
    A class attribute ``elementwise = True`` or ``False`` decides first.

    Raises:
        OptimizerConfigError: an optimizer whose state cannot be divided over ranks at all.
    """
    cls = type(optimizer)
    for name in _NOT_SHARDABLE:
        if isinstance(optimizer, getattr(torch.optim, name)):
            raise OptimizerConfigError(
                f"{cls.__name__} cannot be used here: its update needs "
                + (
                    "sparse gradients, which the gradient reduction does not produce"
                    if name == "SparseAdam"
                    else "several losses per step"
                )
                + "; use an element-wise optimizer such as AdamW, or train without this package"
            )
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
    """Refuse numbers that are written as text, and "auto" that nobody filled in.

    Raises:
        OptimizerConfigError: names the key under ``where`` and what to write.
    """
    for key, value in settings.items():
        for item in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(item, str):
                continue
            if item == "auto":
                raise OptimizerConfigError(
                    f'{where}.{key} is "auto", and nothing filled it in; write a value or remove the key'
                )
            if _is_number(item):
                raise OptimizerConfigError(
                    f'{where}.{key} is the text "{item}"; write the number without quotes: {float(item)}'
                )


def nearest_hint(name: str, candidates: Iterable[str]) -> str:
    """' (did you mean "AdamW"?)' or an empty string."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f' (did you mean "{by_lower[found[0]]}"?)' if found else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _clean_settings(type_name: str, params_cfg: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(params_cfg)
    if "max_grad_norm" in settings:
        raise OptimizerConfigError(
            f'optimizer.params.max_grad_norm of "{type_name}" is not used; set the top-level key '
            '"gradient_clipping" instead'
        )
    check_numbers("optimizer.params", settings)
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(float(beta) for beta in settings["betas"])
    return settings


def _clean_parameters(type_name: str, parameters: Iterable[Any]) -> list[Any]:
    entries = [{**e, "params": _as_list(e["params"])} if isinstance(e, dict) else e for e in parameters]
    groups = [e for e in entries if not isinstance(e, dict) or e["params"]]
    seen: set[int] = set()
    for entry in groups:
        for item in entry["params"] if isinstance(entry, dict) else (entry,):
            tensor = item[1] if isinstance(item, tuple) else item
            if id(tensor) in seen:
                label = f'"{item[0]}"' if isinstance(item, tuple) else f"of shape {tuple(tensor.shape)}"
                raise OptimizerConfigError(
                    f'optimizer "{type_name}": the parameter {label} is listed twice; list every parameter once'
                )
            seen.add(id(tensor))
    if not groups:
        raise OptimizerConfigError(
            f'optimizer "{type_name}" got no parameters; pass a model with requires_grad parameters'
        )
    return groups


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _tensors(groups: list[Any]) -> list[torch.Tensor]:
    items = [item for entry in groups for item in (entry["params"] if isinstance(entry, dict) else (entry,))]
    return [item[1] if isinstance(item, tuple) else item for item in items]


def _choose_adam(
    name: str, settings: dict[str, Any], groups: list[Any], *, offload: bool
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Torch's class when asked for by ``torch_adam`` or by a setting that only torch has, else the named class."""
    settings = dict(settings)
    torch_adam = settings.pop("torch_adam", False)
    # plain "Adam" decays decoupled too unless told otherwise; that is what existing configs rely on
    adam_w_mode = settings.pop("adam_w_mode", True)
    decoupled = name == "adamw" or adam_w_mode
    needs_torch = (
        bool(settings.get("amsgrad"))
        or settings.get("foreach") is not None
        or any(k in settings for k in _TORCH_ADAM_KEYS)
    )
    if not torch_adam and not needs_torch:
        settings.pop("foreach", None)
        if offload:
            return DeepSpeedCPUAdam, settings | {"adamw_mode": decoupled}
        settings.pop("fp32_optimizer_states", None)
        return FusedAdam, settings | {"adam_w_mode": decoupled}
    for key, harmless in (
        ("bias_correction", True),
        ("set_grad_none", True),
        ("fp32_optimizer_states", settings.get("fp32_optimizer_states")),
    ):
        if settings.get(key, harmless) == harmless:
            settings.pop(key, None)
    if not torch_adam:
        # only an explicit ``torch_adam`` asks for torch's own default decay of AdamW (0.01)
        settings.setdefault("weight_decay", 0.0)
    unset = settings.get("foreach") is None and not settings.get("differentiable") and "fused" not in settings
    if unset and can_fuse(_tensors(groups)):
        settings["fused"] = True
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), settings


def _class_of(name: str, *, offload: bool) -> Callable[..., torch.optim.Optimizer]:
    if name == "adagrad":
        return DeepSpeedCPUAdagrad if offload else Adagrad
    if name == "lion":
        return DeepSpeedCPULion if offload else FusedLion
    return FusedLamb if name == "lamb" else MuonWithAuxAdam


def _mup_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    try:
        mup = importlib.import_module("mup")
    except ImportError as error:
        raise ImportError(
            f'optimizer.type "{_MUP_CLASSES[name]}" needs the package "mup"; install it with: pip install mup'
        ) from error
    logger.warning(
        "%s scales learning rates by parameter shape; check that the schedule does not overwrite them",
        _MUP_CLASSES[name],
    )
    cls: Callable[..., torch.optim.Optimizer] = getattr(mup, _MUP_CLASSES[name])
    return cls


def _torch_class(type_name: str) -> Callable[..., torch.optim.Optimizer]:
    if type_name.lower() in _REMOVED_NAMES:
        raise OptimizerConfigError(
            f'optimizer.type "{type_name}": the compressed-communication optimizers were removed; use "AdamW" or "Lamb"'
        )
    cls = getattr(torch.optim, type_name, None)
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
        return cls
    torch_names = [
        n
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and n != "Optimizer"
    ]
    hint = nearest_hint(type_name, [*torch_names, "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD"])
    raise OptimizerConfigError(
        f'optimizer.type "{type_name}" is unknown{hint}. Known: {", ".join(KNOWN_NAMES)}, or a class of '
        "torch.optim by its exact name"
    )


def _construct(
    type_name: str, factory: Callable[..., torch.optim.Optimizer], groups: list[Any], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    accepted = inspect.signature(factory).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        valid = list(accepted)[1:]
        for key in settings:
            if key not in valid:
                raise OptimizerConfigError(
                    f'optimizer "{type_name}" does not know the key optimizer.params.{key}{nearest_hint(key, valid)}. '
                    f"Valid keys: {', '.join(valid)}"
                )
    try:
        return factory(groups, **settings)
    except TypeError as error:
        raise OptimizerConfigError(f'optimizer "{type_name}" refused optimizer.params {settings}: {error}') from error
