"""The optimizer classes that clients import by name: signatures over the classes of this package, as one table."""

from inspect import Parameter, Signature
from typing import Any, TypeVar

from deepspeed.optim.adagrad import Adagrad
from deepspeed.optim.adam import AdamBase
from deepspeed.optim.base import GroupStep
from deepspeed.optim.lamb import Lamb
from deepspeed.optim.lion import Lion

_Kind = TypeVar("_Kind", bound=GroupStep)
_OUR_NAMES = {"adam_w_mode": "decoupled", "adamw_mode": "decoupled", "fp32_optimizer_states": "fp32_states"}
_ADAM = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
_LION = {"lr": 1e-3, "betas": (0.9, 0.999)}
_HOST = {"fp32_optimizer_states": True}


def _client(name: str, base: type[_Kind], settings: dict[str, Any], *, unused: tuple[str, ...] = ()) -> type[_Kind]:
    """A class of the client interface; ``unused`` are keywords that clients pass and that mean nothing here."""
    on_host = name.startswith("DeepSpeedCPU")
    keywords = [Parameter(key, Parameter.POSITIONAL_OR_KEYWORD, default=value) for key, value in settings.items()]
    ignored = [Parameter(key, Parameter.KEYWORD_ONLY, default=None) for key in unused]
    params = "model_params" if on_host else "params"
    me, first = (Parameter(key, Parameter.POSITIONAL_OR_KEYWORD) for key in ("self", params))
    signature = Signature([me, first, *keywords, *ignored])

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        given = settings | signature.bind(self, *args, **kwargs).arguments
        if given.pop("amsgrad", False):
            raise RuntimeError(f"{name} does not support amsgrad; use torch.optim.AdamW(amsgrad=True) or drop the flag")
        set_grad_none = given.pop("set_grad_none", None)
        ours = {_OUR_NAMES.get(key, key): value for key, value in given.items() if key in settings}
        base.__init__(self, given[params], **ours)
        if set_grad_none is not None:
            self.defaults["set_grad_none"] = set_grad_none

    place = "on host tensors" if on_host else "for the device the parameters are on"
    initialize.__signature__ = signature  # type: ignore[attr-defined]
    text = f"{base.__name__.removesuffix('Base')} {place}, with the signature that clients know."
    members = {"__init__": initialize, "__doc__": text, "__module__": __name__, "host_only": on_host}
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
