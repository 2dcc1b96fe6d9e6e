"""Lending the device to somebody else: states leave it for host memory and come back to the very same tensors.

An inference engine in the same process (generation between training phases) wants the memory that parameters, gradients and
optimizer state hold. They move as they are, so training goes on bitwise.
"""

from collections.abc import Callable, Iterable

import torch

from deepspeed.config.zero import OffloadStateTypeEnum
from deepspeed.errors import UsageError
from deepspeed.observe.log import logger
from deepspeed.zero.optim_view import OptimView
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
                "offload_states() was called inside a forward or backward, or inside GatheredParameters; call it between steps"
            )
        # a single state may stand alone, by name or as the enum
        named = [include] if isinstance(include, str) else list(OffloadStateTypeEnum if include is None else include)
        wanted = {OffloadStateTypeEnum(state) for state in named}
        self.away |= wanted
        for unit in self._units:
            if OffloadStateTypeEnum.lp_params in wanted or (unit.master_is_param and OffloadStateTypeEnum.hp_params in wanted):
                self._move_param(unit, pin=pin)
            if OffloadStateTypeEnum.hp_params in wanted:
                self._move_master(unit, pin=pin)
            if wanted & _GRADS:
                self._move_grad(unit, pin=pin)
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
        tensor.data = _to_host(tensor.data, pin=pin)

        def back() -> None:
            tensor.data = tensor.data.to(device)

        self._homes.append(back)

    def _move_param(self, unit: Unit, *, pin: bool) -> None:
        if not unit.movable or StateKind.PARAM in unit.stored or unit.shard.device.type == "cpu":
            return
        device = unit.shard.device
        unit.shard = _to_host(unit.shard, pin=pin)
        self._follow(unit)

        def back() -> None:
            unit.shard = unit.shard.to(device)
            self._follow(unit)

        self._homes.append(back)

    def _follow(self, unit: Unit) -> None:
        """A master that is part of the shard goes where the shard is, and the optimizer's views with it."""
        if unit.master_is_param:
            base, start, stop = unit.range_of(StateKind.PARAM)[0], *unit.range_of(StateKind.OPTIM)
            unit.master = unit.shard[start - base : stop - base]
            self._repoint(unit)

    def _repoint(self, unit: Unit) -> None:
        start = unit.range_of(StateKind.OPTIM)[0]
        for view in self._views:
            if view.unit is unit and unit.master is not None:
                view.param.data = unit.master[view.start - start : view.stop - start].view(view.param.shape)

    def _move_master(self, unit: Unit, *, pin: bool) -> None:
        if unit.master is None or unit.master_is_param or StateKind.OPTIM in unit.stored or unit.master.device.type == "cpu":
            return
        device = unit.master.device
        unit.master = _to_host(unit.master, pin=pin)
        self._repoint(unit)

        def back() -> None:
            assert unit.master is not None
            unit.master = unit.master.to(device)
            self._repoint(unit)

        self._homes.append(back)

    def _move_grad(self, unit: Unit, *, pin: bool) -> None:
        if unit.grad is None or unit.grad.device.type == "cpu":
            return
        if not unit.grad_filled:
            unit.grad = None  # only memory; the next reduction makes it again
            return
        device = unit.grad.device
        unit.grad = _to_host(unit.grad, pin=pin)

        def back() -> None:
            if unit.grad is not None:
                unit.grad = unit.grad.to(device)

        self._homes.append(back)


def _to_host(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    try:
        home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
    except RuntimeError as error:
        logger.warning("page-locked memory is refused (%s); ordinary memory serves", error)
        home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return home.copy_(tensor)
