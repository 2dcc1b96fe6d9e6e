"""A model as a LoRA fine-tune leaves it (Hu et al. 2021): everything frozen, and thin matrices beside chosen layers.

Nothing imports PEFT. Modules are nested and named as PEFT does it, since units are formed by modules.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.tools.simulate.models import Decoder, Subject

ALL_LINEAR = "all-linear"
_LISTED = 12
_PATTERN = set("\\^$*+?{}[]|()")  # of these a regular expression has one, and no module's name any
# What a family with Llama's layers calls those of ``Decoder``.
_CALLED = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down",
}  # fmt: skip
_FUSED = ("phi3",)  # has Llama's layers, several in one


@dataclass(frozen=True)
class Lora:
    """Adapters of ``rank`` on ``targets``: names of modules with commas between, a regular expression that whole paths
    match, or "all-linear". ``dtype``: of the adapters; None: fp32 beside 16-bit weights, else the weights' own.
    """

    rank: int
    targets: str = ALL_LINEAR
    dtype: torch.dtype | None = None


class AdaptedLinear(nn.Module):
    """Keep ``base_layer``, and beside it ``rank`` channels: in by ``lora_A``, out by ``lora_B``. Planned, never run."""

    def __init__(self, base_layer: nn.Module, rank: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        wide, high = sizes_of(base_layer)
        weight: Any = base_layer.weight
        default = torch.promote_types(weight.dtype, torch.float32) if weight.is_floating_point() else torch.float32
        options: dict[str, Any] = {"bias": False, "dtype": dtype or default}
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(wide, rank, **options)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, high, **options)})


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Return channels in and out of a linear layer, torch's or transformers' ``Conv1D``; zeros for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(width := getattr(module, "nf", None), int):
        weight: Any = module.weight
        return weight.shape[0], width
    return 0, 0


def chosen_layers(model: nn.Module, targets: str, title: str) -> list[str]:
    """Return paths of the layers that get adapters. UsageError, with the known layers, for a name of no linear layer.

    As in PEFT a name chooses every module that has it, or ends with it after a dot, and "all-linear" every linear layer
    but the one behind ``get_output_embeddings()``.
    """
    modules = dict(model.named_modules())
    if adapted := next((path for path, module in modules.items() if hasattr(module, "base_layer")), None):
        raise UsageError(
            f"--lora: {title} has adapters already ({adapted}); leave --lora out, they are planned as they are"
        )
    linear = [path for path, module in modules.items() if path and sizes_of(module)[1]]
    last = {path.rpartition(".")[2] for path in linear}
    choices = f"linear layers of {title}: {', '.join(sorted(last)[:_LISTED]) or 'none'}"
    if targets == ALL_LINEAR:
        ask: Callable[[], Any] = getattr(model, "get_output_embeddings", lambda: None)
        head = ask()
        if chosen := [path for path in linear if modules[path] is not head]:
            return chosen
        raise UsageError(f"--lora: no layer to adapt; {choices}")
    paths: dict[str, None] = {}
    for name in [targets] if _PATTERN & set(targets) else targets.split(","):
        matches = _matches(model, name.strip(), modules)
        if not matches:
            raise UsageError(f"--lora_targets: no module is called {name.strip()!r}; {choices}")
        if other := next((path for path in matches if not sizes_of(modules[path])[1]), None):
            kind = type(modules[other]).__name__
            raise UsageError(f"--lora_targets: {other} is no linear layer but {kind}; {choices}")
        paths |= dict.fromkeys(matches)
    return [path for path in linear if path in paths]


def _matches(model: nn.Module, name: str, modules: dict[str, nn.Module]) -> list[str]:
    if _PATTERN & set(name):
        try:
            wanted = re.compile(name)
        except re.error as error:
            raise UsageError(f"--lora_targets: {name!r} is no regular expression: {error}") from error
        return [path for path, module in modules.items() if wanted.fullmatch(path) and sizes_of(module)[1]]
    names = {name, _CALLED.get(name, name) if isinstance(model, Decoder) else name}
    return [path for path in modules if path and (path in names or path.rpartition(".")[2] in names)]


def adapt(model: nn.Module, lora: Lora, title: str) -> list[str]:
    """Freeze ``model`` and put adapters on it, in place; return the paths of the layers. Raises UsageError."""
    family = model.shape.family if isinstance(model, Decoder) else ""
    if isinstance(model, Decoder) and family and (not model.shape.gated or family in _FUSED):
        raise UsageError(
            f"--lora: without transformers a plain decoder is planned, whose linear layers are not those of {family!r};"
            f" install transformers, or give the model itself as module:build"
        )
    paths = chosen_layers(model, lora.targets, title)
    for param in model.parameters():
        param.requires_grad = False
    for path in paths:
        parent, _, name = path.rpartition(".")
        layer = AdaptedLinear(model.get_submodule(path), lora.rank, lora.dtype)
        setattr(model.get_submodule(parent), name, layer)
    return paths


def adapted(subject: Subject, lora: Lora) -> Subject:
    """Return ``subject`` with adapters on its model."""

    def build() -> nn.Module:
        model = subject.build()
        adapt(model, lora, subject.name)
        return model

    return replace(subject, build=build)
