"""From one rank to another: tensors of a known shape, and small objects where nothing is known yet.

Between two ranks what is received is what was sent, in that order, within one group.
"""

import pickle
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.collectives import AxisGroup, Collective, as_bytes


def send(tensor: torch.Tensor, peer: int, group: AxisGroup) -> Collective:
    """Start to send ``tensor`` (contiguous, untouched until it has arrived) to member ``peer``."""
    end = group.note("send", tensor)
    works = [dist.isend(as_bytes(tensor), group=group.pg, group_dst=peer)] if tensor.numel() else []
    return Collective(works, tensor, then=(end,))


def receive(tensor: torch.Tensor, peer: int, group: AxisGroup) -> Collective:
    """Start to fill ``tensor`` (contiguous) with what member ``peer`` sends."""
    end = group.note("receive", tensor)
    works: list[Any] = [dist.irecv(as_bytes(tensor), group=group.pg, group_src=peer)] if tensor.numel() else []
    return Collective(works, tensor, then=(end,))


def send_object(value: object, peer: int, group: AxisGroup) -> Collective:
    """Start to send a picklable object to member ``peer`` of a group on the host."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size = torch.tensor([data.numel()], device="cpu")
    works: list[Any] = [dist.isend(part, group=group.pg, group_dst=peer) for part in (size, data)]
    return Collective(works, size, data)


def receive_object(peer: int, group: AxisGroup) -> Any:
    """Wait for an object of ``send_object``. Between ranks of one job, which run one program."""
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    dist.recv(size, group=group.pg, group_src=peer)
    data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.recv(data, group=group.pg, group_src=peer)
    return pickle.loads(data.numpy().tobytes())
