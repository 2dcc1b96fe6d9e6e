"""Lending the device to somebody else: states leave it for host memory and come back to the very same tensors.

An inference engine in the same process (generation between training phases) wants the memory that parameters, gradients
and optimizer state hold. They move as they are, so training goes on bitwise.
"""

import functools
from collections.abc import Callable, Iterable

import torch

from deepspeed.config.model.zero import OffloadStateTypeEnum as State
from deepspeed.errors import UsageError
from deepspeed.observe.log import logger
from deepspeed.zero.param import point
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit


class Relocation:
    """What is away from the device of one engine, and the way back."""

    def __init__(self, units: list[Unit], optimizer: torch.optim.Optimizer | None) -> None:
        self._units = units
        self._optimizer = optimizer
        self._ways_back: list[Callable[[], None]] = []

    def leave(self, include: Iterable[State] | State | str | None, *, pin: bool) -> None:
        """Move the named states (None: all) to host memory; parameters that are whole on every rank stay.

        Raises UsageError while the model is in use.
        """
        if any(not unit.idle for unit in self._units):
            raise UsageError(
                "offload_states() was called inside a forward or backward, or inside GatheredParameters; call it "
                "between steps"
            )
        # a single state may stand alone, by name or as the enum
        wanted = {State(s) for s in ([include] if isinstance(include, str) else State if include is None else include)}
        home = functools.partial(_to_host, pin=pin)
        for unit in self._units:
            master, kinds = State.hp_params in wanted, []
            if unit.movable and (State.lp_params in wanted or (unit.master_is_param and master)):
                kinds.append(StateKind.PARAM)
            if master and not unit.master_is_param:
                kinds.append(StateKind.OPTIM)
            if wanted & {State.lp_grads, State.contiguous_grad_buffer}:
                kinds.append(StateKind.GRAD)
            self._ways_back += [back for kind in kinds if (back := unit.leave_device(kind, home)) is not None]
        if State.optim_states in wanted and self._optimizer is not None:
            for view in (view for unit in self._units for view in unit.views):
                for value in self._optimizer.state.get(view.param, {}).values():
                    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device.type != "cpu":
                        self._ways_back.append(functools.partial(_move, value, value.device))
                        point(value, home(value.data))

    def come_back(self) -> None:
        """Move everything back."""
        while self._ways_back:
            self._ways_back.pop()()


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    point(tensor, tensor.data.to(device))


def _to_host(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    try:
        home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
    except RuntimeError as error:
        logger.warning("page-locked memory is refused (%s); ordinary memory serves", error)
        home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return home.copy_(tensor)
