"""Lending the device to somebody else: states leave it for host memory and come back to the very same tensors.

An inference engine in the same process (generation between training phases) wants the memory that parameters, gradients
and optimizer state hold. They move as they are, so training goes on bitwise.
"""

import functools
from collections.abc import Callable, Iterable

import torch

from deepspeed.config.model.zero import OffloadStateTypeEnum
from deepspeed.errors import UsageError
from deepspeed.observe.log import logger
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.param import point
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit

_GRADS = {OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer}


class Relocation:
    """What is away from the device of one engine, and the way back."""

    def __init__(self, units: list[Unit], views: list[OptimView], optimizer: torch.optim.Optimizer | None) -> None:
        self._units = units
        self._views = views
        self._optimizer = optimizer
        self._homes: list[Callable[[], None]] = []
        self.away: set[OffloadStateTypeEnum] = set()

    def leave(self, include: Iterable[OffloadStateTypeEnum] | OffloadStateTypeEnum | str | None, *, pin: bool) -> None:
        """Move the named states (None: all) to host memory; parameters that are whole on every rank stay.

        Raises UsageError while the model is in use.
        """
        if any(not unit.idle for unit in self._units):
            raise UsageError(
                "offload_states() was called inside a forward or backward, or inside GatheredParameters; call "
                "it between steps"
            )
        # a single state may stand alone, by name or as the enum
        named = [include] if isinstance(include, str) else list(OffloadStateTypeEnum if include is None else include)
        wanted = {OffloadStateTypeEnum(state) for state in named}
        self.away |= wanted
        for unit in self._units:
            also_master = unit.master_is_param and OffloadStateTypeEnum.hp_params in wanted
            if unit.movable and (OffloadStateTypeEnum.lp_params in wanted or also_master):
                self._move(unit, StateKind.PARAM, pin=pin)
            if OffloadStateTypeEnum.hp_params in wanted and not unit.master_is_param:
                self._move(unit, StateKind.OPTIM, pin=pin)
            if wanted & _GRADS:
                self._move(unit, StateKind.GRAD, pin=pin)
        if OffloadStateTypeEnum.optim_states in wanted and self._optimizer is not None:
            for view in self._views:
                for value in self._optimizer.state.get(view.param, {}).values():
                    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device.type != "cpu":
                        self._move_data(value, pin=pin)

    def come_back(self) -> None:
        """Move everything back."""
        while self._homes:
            self._homes.pop()()
        self.away.clear()

    def _move_data(self, tensor: torch.Tensor, *, pin: bool) -> None:
        device = tensor.device
        point(tensor, _to_host(tensor.data, pin=pin))
        self._homes.append(lambda: point(tensor, tensor.data.to(device)))

    def _move(self, unit: Unit, kind: StateKind, *, pin: bool) -> None:
        """Move what rests on a device."""
        store = unit.rest.get(kind)
        if store is None or store.on_drive or (device := store.tensor.device).type == "cpu":
            return
        if kind is StateKind.GRAD and not unit.grad_filled:
            unit.drop_rest(kind)  # only memory; the next reduction makes it again
            return
        unit.relocate(kind, functools.partial(_to_host, pin=pin))
        self._homes.append(lambda: unit.relocate(kind, lambda tensor: tensor.to(device)) if kind in unit.rest else None)


def _to_host(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    try:
        home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
    except RuntimeError as error:
        logger.warning("page-locked memory is refused (%s); ordinary memory serves", error)
        home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return home.copy_(tensor)
