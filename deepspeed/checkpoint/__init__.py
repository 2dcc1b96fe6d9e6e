"""Checkpoint helpers, each imported when it is first used: commands and lower layers import modules of this package."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.checkpoint.load.compare import diff_live as diff_live

_HOMES = {"diff_live": "load.compare", "clone_tensors_for_torch_save": "utils", "utils": "utils"}
_HOMES |= {f"get_{kind}_ckpt_name_for_rank": "constants" for kind in ("layer", "model", "zero")}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    module = import_module(f"{__name__}.{_HOMES[name]}")
    return module if name == _HOMES[name] else getattr(module, name)
