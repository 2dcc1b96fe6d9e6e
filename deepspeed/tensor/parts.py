"""Parameters of which a rank has a part: saves of the client's are whole, or refused."""

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError

_divided: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()  # of all models, by id


def divided_at(tensor: torch.Tensor) -> nn.Parameter | None:
    """Return the parameter whose part on this rank ``tensor`` is, or shares memory with, or None."""
    same = (p for p in list(_divided.values()) if p.data_ptr() == tensor.data_ptr() and p.shape == tensor.shape)
    return next(filter(_in_part, same), None)


def _in_part(param: nn.Parameter) -> bool:
    return hasattr(param, "tp_place") and tuple(param.shape) != param.tp_place.shape


def guard_saving(model: nn.Module, back: ExitStack) -> None:
    """Let ``save_pretrained`` of the models of Transformers in ``model`` refuse to write the parts of one rank alone.

    It would write them as the whole, and nothing would tell that others are missing.
    """
    _divided.update({id(param): param for param in model.parameters() if hasattr(param, "tp_place")})
    for module in model.modules():
        if hasattr(type(module), "save_pretrained") and not hasattr(type(module), "get_base_model"):  # that of PEFT
            save: Any = module.save_pretrained
            back.callback(put_back, module, "save_pretrained", vars(module).get("save_pretrained"))
            module.save_pretrained = functools.partial(_save_whole, module, save)  # type: ignore[assignment]


def _save_whole(module: nn.Module, save: Callable[..., Any], folder: Any, *args: Any, **options: Any) -> Any:
    given = options.get("state_dict", args[1] if len(args) > 1 else None)
    adapters_alone = getattr(module, "_hf_peft_config_loaded", False)
    if given is None and not adapters_alone and any(map(_in_part, module.parameters())):
        raise UsageError(
            f"{type(module).__name__}.save_pretrained would write this rank's parts of layers or experts alone. Call "
            "engine.save_pretrained(folder) without further options on every rank, or pass whole weights as state_dict"
        )
    return save(folder, *args, **options)


def put_back(module: nn.Module, name: str, value: Any) -> None:
    """Give ``module`` the attribute ``name`` of its own back; None: it had none."""
    delattr(module, name)
    if value is not None:
        setattr(module, name, value)
