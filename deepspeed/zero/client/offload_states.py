"""Lending the device to somebody else: states leave it for host memory and come back to the very same tensors.

An inference engine in the same process (generation between training phases) wants the memory that parameters, gradients
and optimizer state hold. They move as they are, so training goes on bitwise.
"""

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from deepspeed.config.model.zero import OffloadStateTypeEnum as State
from deepspeed.errors import UsageError
from deepspeed.zero.memory.tiers import host_empty
from deepspeed.zero.param import point
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit


def leave_device(
    back: ExitStack,
    units: list[Unit],
    optimizer: torch.optim.Optimizer | None,
    include: Iterable[State] | State | str | None,
    *,
    pin: bool,
) -> None:
    """Move the named states (None: all) to host memory; parameters that are whole on every rank stay. ``back.close()``
    is the way home.

    Raises UsageError while the model is in use.
    """
    if any(not unit.idle for unit in units):
        raise UsageError(
            "offload_states() was called inside a forward or backward, or inside GatheredParameters; call it "
            "between steps"
        )
    # a single state may stand alone, by name or as the enum
    wanted = {State(s) for s in ([include] if isinstance(include, str) else State if include is None else include)}

    def home(tensor: torch.Tensor) -> torch.Tensor:
        return host_empty(tuple(tensor.shape), tensor.dtype, pin=pin).copy_(tensor)

    for unit in units:
        master = State.hp_params in wanted
        if unit.movable and (State.lp_params in wanted or (unit.master_is_param and master)):
            unit.leave_device(StateKind.PARAM, home, back)
        if master and not unit.master_is_param:
            unit.leave_device(StateKind.OPTIM, home, back)
        if wanted & {State.lp_grads, State.contiguous_grad_buffer}:
            unit.leave_device(StateKind.GRAD, home, back)
        states = optimizer.state if State.optim_states in wanted and optimizer is not None else {}
        for view in unit.views:
            for value in states.get(view.param, {}).values():
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device.type != "cpu":
                    back.callback(_bring_back, value, value.device)
                    point(value, home(value.data))


def _bring_back(tensor: torch.Tensor, device: torch.device) -> None:
    point(tensor, tensor.data.to(device))
