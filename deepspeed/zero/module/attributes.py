"""What is set on a client's parameters and modules: attributes that clients read on a sharded model, the way from a
parameter to its unit, and a pickle (or copy) that has what the plain parameter or module would have.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count
from math import prod
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.zero.param import ReleasedFace, ZeroParamStatus, is_hollow, refusal
from deepspeed.zero.plan import StateKind


class ZeroParamType(Enum):
    """Kinds of parameter by where their shards live (client-facing constants)."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


# Only a source of unique numbers for ``param.ds_id``.
_ids = count()
_REDUCE = "__reduce_ex__"  # pickle and copy ask the object for it, before its class


def mark_zero_parameter(parameter: nn.Parameter, unit: Any, position: int, *, name: str, plain: bool = False) -> None:
    """Set the attributes that lead to the unit and, unless ``plain`` (nothing of the model is sharded), the ``ds_*``
    ones that clients read on sharded models. A persistent parameter has them too, and is always available.
    """
    number = parameter.__dict__.get("ds_id")
    unmark_zero_parameter(parameter)
    attributes: dict[str, Any] = {"_ds_unit": unit, "_ds_position": position, "_ds_name": name}
    attributes[_REDUCE] = functools.partial(_pickled_parameter, unit, position)
    attributes["autocast_dtype"] = unit.dtype  # what autocast lowers rests lowered already
    if not plain:
        segment, shards = unit.layout.segments[position], unit.layout.shards
        shape, shard = torch.Size(segment.shape), unit.part(StateKind.PARAM, segment, unit.shard)
        released = isinstance(parameter, ReleasedFace)
        attributes |= {
            "ds_id": next(_ids) if number is None else number,
            "ds_shape": shape,
            "ds_numel": prod(shape),
            "ds_tensor": shard,
            "ds_status": ZeroParamStatus.NOT_AVAILABLE if released else ZeroParamStatus.AVAILABLE,
            "ds_active_sub_modules": set(),
            "ds_persist": not unit.movable,
            "ds_secondary_tensor": shard if unit.plan.wider else None,
            "ds_param_type": ZeroParamType.PARTITIONED,
            "ds_process_group": unit.mesh.zero.pg,
            "is_external_param": False,
            "partition_numel": lambda: -(-prod(shape) // shards),
            "_ds_by_hand": False,  # between these two
            **dict.fromkeys(("all_gather", "all_gather_coalesced"), functools.partial(_gather_by_hand, unit, position)),
            "partition": functools.partial(_partition_by_hand, unit, position),
        }
    parameter.__dict__.update(attributes, _ds_marks=["_ds_marks", *attributes])


def _gather_by_hand(
    unit: Any, position: int, param_list: Any = None, async_op: bool = False, hierarchy: int = 0
) -> None:
    """Hold the full values of ``param_list`` (None: of the parameter itself) here until ``partition``. Collective."""
    for param in param_list or [unit.params[position]]:
        if not param._ds_by_hand:
            param._ds_unit.pin(lend=True)
            param._ds_by_hand = True


def _partition_by_hand(
    unit: Any, position: int, param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False
) -> None:
    """Release full values. ``has_been_updated``: ranks wrote the same, each keeps its part; else writes are lost."""
    for param in param_list or [unit.params[position]]:
        if param._ds_by_hand:
            if has_been_updated:
                owner = param._ds_unit
                if owner.whole:
                    owner.buffer.bring_back()
                owner.absorb(param._ds_position)
            param._ds_by_hand = False
            param._ds_unit.unpin()


def unmark_zero_parameter(parameter: nn.Parameter) -> None:
    """Remove every attribute of ``mark_zero_parameter``."""
    for attribute in parameter.__dict__.get("_ds_marks", ()):
        parameter.__dict__.pop(attribute, None)


def _pickled_parameter(unit: Any, position: int, protocol: Any) -> Any:
    """Pickle a parameter: a copy of its values, and attributes that clients have set on it; nothing of the unit.

    Raises ReleasedParameterError where the values are not here, UsageError where this rank has only a part.
    """
    parameter: nn.Parameter = unit.params[position]
    if is_hollow(parameter):
        raise refusal("a pickle (torch.save)", parameter)
    if unit.mesh.tp.size > 1:
        raise _parts_refusal(f"parameter {unit.layout.segments[position].name!r}")
    made, marks = copy.deepcopy(parameter), parameter.__dict__["_ds_marks"]
    made.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in marks and not k.startswith("_ds_")})
    return made.__reduce_ex__(protocol)


def _parts_refusal(name: str) -> UsageError:
    """Return the error for a pickle of ``name``, of which a rank has only a part."""
    return UsageError(
        f"{name} is of a model whose layers are in parts over ranks (tensor or pipeline parallelism, experts), so a "
        "pickle or a copy on one of them would be no model: use engine.save_16bit_model() or engine.save_checkpoint()"
    )


def pickle_plainly(module: nn.Module, hooks: Any) -> None:
    """Pickle and copy ``module``, from now on, without the forward hooks of ``hooks``, a ``ModuleHooks``."""
    vars(module)[_REDUCE] = functools.partial(_pickled_module, weakref.ref(module), weakref.ref(hooks))


def pickle_as_before(modules: Iterable[nn.Module]) -> None:
    """End ``pickle_plainly`` for ``modules``."""
    for module in modules:
        vars(module).pop(_REDUCE, None)


def _pickled_module(reference: Callable[[], Any], hooks: Callable[[], Any], protocol: Any) -> Any:
    """Return the values that rebuild the module. UsageError where it is in parts over ranks."""
    module, owner = reference(), hooks()
    mesh = owner.mesh if owner is not None else None
    if mesh is not None and (max(mesh.tp.size, mesh.pp.size) > 1 or mesh.experts):
        raise _parts_refusal(type(module).__name__)
    kind: Any = type(module)
    made = kind.__reduce_ex__(module, protocol)
    if len(made) < 3 or not isinstance(made[2], dict):
        return made
    ours = {handle.id for handle in owner.forward_handles} if owner is not None else set()
    state = {name: value for name, value in made[2].items() if name != _REDUCE}
    for name in [name for name in state if name.startswith("_forward_")]:
        if isinstance(hooked := state[name], dict):
            state[name] = type(hooked)((key, value) for key, value in hooked.items() if key not in ours)
    return (*made[:2], state, *made[3:])
