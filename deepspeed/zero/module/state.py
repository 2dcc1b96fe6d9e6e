"""The state of a client's module by its names: parameters that units keep, buffers, and whole values of both."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.config import OffloadStateTypeEnum as State
from deepspeed.errors import UsageError
from deepspeed.tier.arena import Arena
from deepspeed.zero.layout import Segment
from deepspeed.zero.optim_view import move_state
from deepspeed.zero.param import is_composed, pieces_of, point
from deepspeed.zero.plan import StateKind
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit

_ROW_BYTES = 8192


def runtime_of(unit: Unit) -> Runtime | None:
    """Return the runtime of the living engine that trains the unit, or None."""
    keeper = unit.keeper
    return keeper if isinstance(keeper, Runtime) and keeper.client() is not None else None


def segment_of(param: torch.Tensor) -> Segment:
    """Return the place in its unit of a parameter that an engine has."""
    unit: Unit = param._ds_unit  # type: ignore[attr-defined]
    return unit.layout.segments[param._ds_position]  # type: ignore[attr-defined]


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's shape; for a parameter of an engine that of the global tensor."""
    taken = isinstance(tensor, nn.Parameter) and hasattr(tensor, "_ds_unit")
    return segment_of(tensor).whole_shape if taken else tuple(tensor.shape)


def bit_sums(flat: torch.Tensor) -> torch.Tensor:
    """Return row and column sums over the values' bits; only a deliberate edit can leave all of them unchanged."""
    data = flat.detach().view(torch.uint8)
    cut = data.numel() // _ROW_BYTES * _ROW_BYTES
    rows = data[:cut].view(torch.int64).view(-1, _ROW_BYTES // 8)
    return torch.cat([rows.sum(1), rows.sum(0), data[cut:]])


def state_names(module: nn.Module, *, exclude_frozen: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return parameters and persistent buffers by name, each once, and the further names of tied ones."""
    named = module.named_parameters(remove_duplicate=False)
    params = {n: p for n, p in named if not (is_composed(p) or (exclude_frozen and not p.requires_grad))}
    buffers = persistent_buffers(module, pieces=not exclude_frozen)
    everywhere = params | persistent_buffers(module, pieces=False, once=False)
    first = {id(tensor): name for name, tensor in reversed((params | buffers).items())}
    aliases = {n: first[id(t)] for n, t in everywhere.items() if n not in buffers and n != first[id(t)]}
    return {n: p for n, p in params.items() if n not in aliases} | buffers, aliases


def persistent_buffers(module: nn.Module, *, pieces: bool = True, once: bool = True) -> dict[str, torch.Tensor]:
    """Return buffers of a module's state by name (or all names), and, with ``pieces``, those of opaque parameters."""
    params = module.named_parameters() if pieces else ()
    of_params = {f"{name}.{path}": piece for name, param in params for path, piece, _ in pieces_of(param)}
    return of_params | {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, child in module.named_modules(remove_duplicate=once)
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    }


def leave_device(
    back: list[Any], units: list[Unit], optimizer: Optimizer | None, include: Any, *, arena: Arena, pin: bool
) -> bool:
    """Move the named states (None: all) to host memory of ``arena``; calls that join ``back`` undo it, bit for bit.

    Parameters whole on every rank stay. Returns whether parameters moved. UsageError while the model is in use.
    """
    if any(not unit.idle for unit in units):
        raise UsageError("offload_states() inside a forward, backward or GatheredParameters; call it between steps")
    # a single state may stand alone, by name or as the enum
    wanted = {State(s) for s in ([include] if isinstance(include, str) else State if include is None else include)}

    def home(tensor: torch.Tensor) -> torch.Tensor:
        return arena.empty(tensor.shape, dtype=tensor.dtype, pin=pin).copy_(tensor)

    def leave(unit: Unit, kind: StateKind) -> None:
        store = unit.rest.get(kind)
        if store is None or store.on_drive or store.tensor.device.type == "cpu":
            return
        if kind is StateKind.GRAD and not unit.window.filled:
            unit.drop_rest(kind)  # only memory; the next reduction makes it again
            return
        device = store.tensor.device
        move_state(unit, kind, home(store.tensor))
        back.append(lambda: move_state(unit, kind, unit.rest[kind].tensor.to(device)) if kind in unit.rest else None)

    for unit in units:
        master = State.hp_params in wanted
        if unit.movable and (State.lp_params in wanted or (unit.master_is_param and master)):
            leave(unit, StateKind.PARAM)
        if master and not unit.master_is_param:
            leave(unit, StateKind.OPTIM)
        if wanted & {State.lp_grads, State.contiguous_grad_buffer}:
            leave(unit, StateKind.GRAD)
        states = optimizer.state if State.optim_states in wanted and optimizer is not None else {}
        for view in unit.views:
            for value in states.get(view.param, {}).values():
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device.type != "cpu":
                    back.append(lambda t=value, place=value.device: point(t, t.data.to(place)))
                    point(value, home(value.data))
    return State.lp_params in wanted or (State.hp_params in wanted and any(u.master_is_param for u in units))
