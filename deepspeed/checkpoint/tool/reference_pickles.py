"""torch files that name the few classes of DeepSpeed its checkpoints hold, written without that package."""

import pickle
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch


class _Named:
    """An instance of a class elsewhere: pickles as that class with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class LossScaler(_Named):
    """A constant scale."""


class DynamicLossScaler(_Named):
    """A scale that follows overflows."""


class FragmentAddress(_Named):
    """``numel`` elements from ``start`` on, in a rank's partition."""


class ZeroEnum:
    """The number of what is sharded, as DeepSpeed's enumeration."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return (ZeroEnum, (self.value,))


_NAMES = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler LossScaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
    FragmentAddress: "deepspeed.utils.tensor_fragment fragment_address",
    ZeroEnum: "deepspeed.runtime.zero.config ZeroStageEnum",
}


class _Pickler(pickle._Pickler):
    """The Python pickler: the compiled one insists on importing every class under the name it writes."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        known = _NAMES.get(obj) if isinstance(obj, type) else None
        if known is None:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        module, _, cls = known.partition(" ")
        self.write(pickle.GLOBAL + f"{module}\n{cls}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


def save(value: Any, file: BinaryIO) -> None:
    """``torch.save`` with the classes above under their names in DeepSpeed."""
    torch.save(value, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))
