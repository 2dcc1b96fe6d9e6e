"""The attributes that clients read on parameters of a sharded model, and the way from a parameter to its unit."""

import functools
from enum import Enum
from itertools import count
from math import prod
from typing import Any

import torch
from torch import nn

from deepspeed.zero.param import ReleasedFace, ZeroParamStatus, _pickled
from deepspeed.zero.plan import StateKind


class ZeroParamType(Enum):
    """Kinds of parameter by where their shards live (client-facing constants)."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


# Only a source of unique numbers for ``param.ds_id``.
_ids = count()


def mark_zero_parameter(parameter: nn.Parameter, unit: Any, position: int, *, name: str, plain: bool = False) -> None:
    """Set the attributes that lead to the unit and, unless ``plain`` (nothing of the model is sharded), the ``ds_*``
    ones that clients read on sharded models. A persistent parameter has them too, and is always available.
    """
    number = parameter.__dict__.get("ds_id")
    unmark_zero_parameter(parameter)
    attributes: dict[str, Any] = {"_ds_unit": unit, "_ds_position": position, "_ds_name": name}
    attributes["__reduce_ex__"] = functools.partial(_pickled, unit, position)
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
