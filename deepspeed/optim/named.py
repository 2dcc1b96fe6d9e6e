"""The optimizer classes that clients import by name: signatures over the rules of this package, as one table."""

from typing import TypeVar

from deepspeed.optim.adam import AdamBase
from deepspeed.optim.base import Group, GroupStep
from deepspeed.optim.rules import Adagrad, Lamb, Lion

_Kind = TypeVar("_Kind", bound=GroupStep)
_ADAM = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
_LION = {"lr": 1e-3, "betas": (0.9, 0.999)}
_HOST = {"fp32_optimizer_states": True}


def _client(name: str, base: type[_Kind], keywords: Group, *, unused: tuple[str, ...] = ()) -> type[_Kind]:
    """A class of the client interface; ``unused`` are keywords that clients pass and that mean nothing here."""
    on_host = name.startswith("DeepSpeedCPU")
    place = "on host tensors" if on_host else "for the device the parameters are on"
    text = f"{base.__name__.removesuffix('Base')} {place}, with the signature that clients know."
    members = {"__doc__": text, "__module__": __name__, "host_only": on_host, "keywords": keywords, "unused": unused}
    return type(name, (base,), members)


FusedAdam = _client(
    "FusedAdam",
    AdamBase,
    _ADAM | {"adam_w_mode": True, "weight_decay": 0.0, "amsgrad": False, "set_grad_none": True},
)
DeepSpeedCPUAdam = _client(
    "DeepSpeedCPUAdam", AdamBase, _ADAM | {"weight_decay": 0, "amsgrad": False, "adamw_mode": True} | _HOST
)
DeepSpeedCPUAdagrad = _client(
    "DeepSpeedCPUAdagrad",
    Adagrad,
    {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0, "amsgrad": False} | _HOST,
    unused=("adamw_mode",),
)
FusedLion = _client("FusedLion", Lion, _LION | {"weight_decay": 0.0, "set_grad_none": True})
DeepSpeedCPULion = _client("DeepSpeedCPULion", Lion, _LION | {"weight_decay": 0} | _HOST, unused=("adamw_mode",))
FusedLamb = _client(
    "FusedLamb",
    Lamb,
    _ADAM
    | {"eps_inside_sqrt": False, "weight_decay": 0.0, "max_grad_norm": 0.0, "max_coeff": 10.0, "min_coeff": 0.01}
    | {"amsgrad": False},
)
