"""Sequences that ranks share, in a simulation: each row is taken to be one document, the same on all ranks."""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.client.mpu import Ways
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine import initialize as start
from deepspeed.sequence import wire
from deepspeed.sequence.layout import Layout, RingGroups, in_turn
from deepspeed.sequence.ring import inner_ranks
from deepspeed.tools.simulate.device import MODULE
from deepspeed.tools.simulate.models import Decoder
from deepspeed.zero.regions import bounds, widths

_wire_sequences = wire.wire_sequences


def wire_sequences(model: nn.Module, cfg: DeepSpeedConfig, mesh: Mesh, dims: Ways, back: ExitStack) -> Mesh:
    """Wire in place of ``wire.wire_sequences``: it knows models of Transformers, and ``Decoder`` is none."""
    if mesh.sp.size == 1 or not isinstance(model, Decoder):
        return _wire_sequences(model, cfg, mesh, dims, back)
    ways = inner_ranks(mesh.sp.size, model.shape.heads // mesh.tp.size, cfg.sequence.attention)
    mesh, ring = wire._with_ring(mesh, ways)
    model.layout_of = functools.partial(_layout_of, group=mesh.sp, ring=ring)
    return mesh


def _layout_of(tokens: torch.Tensor, *, group: AxisGroup, ring: RingGroups | None) -> Layout:
    agreed([*tokens.shape, tokens.sum()], None, group, tokens.device)
    return layout_of(tokens, group, widths(bounds(tokens.shape[1], group.size)), ring)


def agreed(
    numbers: Sequence[int | torch.Tensor], _: Exception | None, group: AxisGroup, device: torch.device
) -> torch.Tensor:
    """Agree in place of ``wire.agreed``: all ranks say the same. The program waits for the answers twice."""
    answers = in_turn([0, *numbers], group, device)
    for column in (0, 1):
        answers[:, column].any().item()
    known = [number if isinstance(number, int) else 0 for number in numbers]
    return torch.tensor([known] * group.size, device="cpu")


def layout_of(codes: torch.Tensor, group: AxisGroup, lengths: Sequence[int], ring: RingGroups | None = None) -> Layout:
    """Return a layout in place of ``wire.layout_of``, whose program waits for the first tokens of documents."""
    rows, tokens = codes.shape
    codes.sum().item()
    if ring is not None:
        part, parts = ring.outer.index + 1, ring.outer.size
        text = f"keys go around {parts} parts of a sequence, of which this rank's attends to {part}"
        MODULE.sink.routing = text + f"; all wait for the last (--rank {group.ranks[-1]})" * (part < parts)
    documents = tuple((row * tokens, tokens) for row in range(rows))
    return Layout(group, rows, tuple(lengths), documents, codes.device, ring)


def _each(posted: Sequence[dist.P2POp]) -> list[Any]:
    """Post in place of ``dist.batch_isend_irecv``, which asks for the device's own backend: one after the other."""
    sides = {dist.isend: "group_dst", dist.irecv: "group_src"}
    return [one.op(one.tensor, group=one.group, **{sides[one.op]: one.group_peer}) for one in posted]


PLACES: list[tuple[Any, str, Any]] = [  # owner, name, what is there instead
    (start, "wire_sequences", wire_sequences),
    (wire, "agreed", agreed),
    (wire, "layout_of", layout_of),
    (dist, "batch_isend_irecv", _each),
]
