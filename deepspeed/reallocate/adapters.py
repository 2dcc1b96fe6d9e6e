"""Adapters (PEFT) and whole weights: which tensors belong together, and merging that edits no parameter.

Recognised by attributes, so that nothing imports PEFT: a tuner layer has ``base_layer``, ``merge`` and
``merged_adapters``, a module that is trained whole beside its origin has ``modules_to_save`` and ``original_module``.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.reallocate.flow import Parcel
from deepspeed.zero.param import castable, is_composed

_PREFIX = "base_model.model."


def _merges(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("base_layer", "merge", "merged_adapters"))


def _outermost(module: nn.Module, path: str, wanted: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if wanted(child):
            yield where, child
        else:
            yield from _outermost(child, where, wanted)


def _wraps(module: nn.Module) -> bool:
    return hasattr(module, "original_module") and (
        hasattr(module, "modules_to_save") or hasattr(module, "token_adapter")
    )


def _base(layer: Any) -> str:
    """Return the name prefix of the parameters that a tuner layer adapts; tuner layers may be nested."""
    prefix = ""
    while _merges(layer):
        prefix, layer = f"{prefix}base_layer.", layer.base_layer
    return prefix


def is_adapter(name: str, module: nn.Module) -> bool:
    """Tell whether the parameter ``name`` of ``module`` belongs to an adapter, not to the weights it adapts."""
    for path, layer in _outermost(module, "", lambda m: _merges(m) or _wraps(m)):
        if name.startswith(f"{path}."):
            rest = name.removeprefix(f"{path}.")
            return not rest.startswith("original_module." if _wraps(layer) else _base(layer))
    return False


def merged_parcels(module: nn.Module, names: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> list[Parcel]:
    """Return parcels of the weights ``names`` as in the model without adapters, with these merged in, in order.

    ``aliases``: further names of tied ones. A layer's values come together, and PEFT's own ``merge`` adds them, on
    copies. Raises UsageError for adapters that no layer can take in.
    """
    layers = dict(_outermost(module, "", lambda m: _merges(m) or _wraps(m)))
    if not layers:
        raise UsageError(
            f"stream_weights(merge_adapters=True): {type(module).__name__} has no layer with an adapter that can be "
            "merged (PEFT's LoRA and its kin); pass the PEFT model to deepspeed.initialize, or leave merge_adapters out"
        )
    layer_of = {name: next((p for p in _paths(name) if p in layers), "") for name in (*names, *aliases)}
    for alias, name in aliases.items():
        if isinstance(names[name], nn.Parameter) and layer_of[alias] not in ("", layer_of[name]):
            raise UsageError(
                f"stream_weights(merge_adapters=True): {alias} is tied to {name}, so an adapter on one of them makes "
                "them differ; untie them before deepspeed.initialize, or leave the adapter away from tied layers"
            )
    parcels = {}
    for name in names:
        path = layer_of[name]
        if not path:
            parcels[name] = Parcel((name,), lambda tensors: {_plain(n): t for n, t in tensors.items()})
        elif path not in parcels:
            unpack = _Chosen(path, layers[path]) if _wraps(layers[path]) else _Merging(path, layers[path])
            parcels[path] = Parcel(tuple(n for n in names if layer_of[n] == path), unpack)
    return list(parcels.values())


def _paths(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _plain(name: str) -> str:
    return ".".join(part for part in name.removeprefix(_PREFIX).split(".") if part != "base_layer")


class _Chosen:
    """Select the copy the forward uses, of a module that is trained whole beside its origin."""

    def __init__(self, path: str, layer: nn.Module) -> None:
        wrapper: Any = layer
        if not hasattr(wrapper, "modules_to_save"):
            raise UsageError(
                f"stream_weights(merge_adapters=True): {path} trains single tokens of an embedding, which is not "
                "merged in this release; merge it after training (model.merge_and_unload())"
            )
        active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
        chosen = f"modules_to_save.{active[0]}" if active and not wrapper.disable_adapters else "original_module"
        self._path, self._from = path, f"{path}.{chosen}."

    def __call__(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {n.removeprefix(self._from): t for n, t in tensors.items() if n.startswith(self._from)}
        return {_plain(f"{self._path}.{name}"): values for name, values in kept.items()}


class _Merging:
    """Merge a layer's adapters: the whole values stand in for its parameters until that is done."""

    def __init__(self, path: str, layer: nn.Module) -> None:
        self._path, self._layer, self._base = path, layer, _base(layer)
        tuners = [where for where, m in layer.named_modules() if _merges(m)]
        if odd := [where for where in tuners if not self._base.startswith(f"{where}." if where else "")]:
            raise UsageError(
                f"stream_weights(merge_adapters=True): {path} has an adapter inside a layer that is adapted itself "
                f"({odd[0]}), which is not merged in this release; merge it after training (model.merge_and_unload())"
            )
        base = ((n, p) for n, p in layer.named_parameters() if n.startswith(self._base))
        if codes := [n for n, p in base if is_composed(p) or not (castable(p.dtype) or p.is_complex())]:
            raise UsageError(
                f"stream_weights(merge_adapters=True): {path}.{codes[0]} is quantized, and would have to be quantized "
                "anew, which is not in this release; stream the adapters beside their base (without merge_adapters), "
                "or merge them after training (engine.save_pretrained, then model.merge_and_unload())"
            )

    def __call__(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values = {name.removeprefix(f"{self._path}."): tensor for name, tensor in tensors.items()}
        tuners: list[Any] = [m for m in self._layer.modules() if _merges(m)]
        with torch.no_grad(), _showing(self._layer, values), contextlib.ExitStack() as back:
            for tuner in reversed(tuners):  # the innermost first
                back.callback(setattr, tuner, "merged_adapters", list(tuner.merged_adapters))
                tuner.merge(safe_merge=True)
            made = {n: p.detach() for n, p in self._layer.named_parameters() if n.startswith(self._base)}
        made |= {n: t for n, t in values.items() if n.startswith(self._base) and n not in made}  # buffers
        return {_plain(f"{self._path}.{name}"): tensor for name, tensor in made.items()}


@contextlib.contextmanager
def _showing(layer: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put ``values`` in place of the parameters of ``layer`` inside the context; any changes to them are dropped."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for path, module in layer.named_modules():
            before += [(place, {**place}) for place in (module._parameters, module._buffers)]
            for name, param in [*module._parameters.items()]:
                where = f"{path}.{name}" if path else name
                if param is not None and where in values:
                    module._parameters[name] = nn.Parameter(values[where], requires_grad=False)
        yield
    finally:
        for place, entries in before:
            place.clear()
            place.update(entries)


def adapted_layer(module: nn.Module) -> str:
    """Return the path of the first layer that has an adapter; "" without any."""
    layers = _outermost(module, "", lambda m: _merges(m) or _wraps(m) or _fuses(m))
    return next((path for path, _ in layers), "")


@contextlib.contextmanager
def fused_adapters(module: nn.Module) -> Iterator[int]:
    """Add active adapters to copies of their layers' weights inside the context; yield the number of such layers.

    Applies to PEFT layers, and modules with ``fuse_lora_weight`` and ``unfuse_lora_weight`` (DeepSpeed-Chat). Adapters
    that cannot be added (to quantized weights, or input-dependent) stay beside. Parameters must be whole.
    """
    with contextlib.ExitStack() as back:
        yield sum(_fuse(layer, back) for _, layer in list(_outermost(module, "", lambda m: _merges(m) or _fuses(m))))


def _fuses(module: nn.Module) -> bool:
    return hasattr(module, "fuse_lora_weight") and hasattr(module, "unfuse_lora_weight")


def _fuse(layer: Any, back: contextlib.ExitStack) -> bool:
    base = {n: p for n, p in layer.named_parameters() if n.startswith(_base(layer))}
    if any(is_composed(p) or not castable(p.dtype) for p in base.values()):
        return False
    tuners: list[Any] = [m for m in layer.modules() if _merges(m)]
    if any(tuner.merged or tuner.disable_adapters for tuner in tuners):
        return False
    with contextlib.ExitStack() as undo, torch.no_grad():
        undo.enter_context(_showing(layer, {n: p.detach().clone() for n, p in base.items()}))
        for tuner in reversed(tuners):  # the innermost first
            undo.callback(setattr, tuner, "merged_adapters", list(tuner.merged_adapters))
            try:
                tuner.merge()
            except (NotImplementedError, ValueError):
                return False
        if not tuners:
            undo.callback(vars(layer).update, {**vars(layer)})  # exact also where the client has fused it before
            undo.callback(vars(layer).clear)
            layer.fuse_lora_weight()
        back.push(undo.pop_all())
    return True
