"""From one rank to another: tensors of a known shape, and small objects where nothing is known yet.

Between two ranks what is received is what was sent, in that order, within one group.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.collectives import AxisGroup, Collective, as_bytes
from deepspeed.tier.transfer import Several, Transfer


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


def exchange(
    sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]], group: AxisGroup
) -> Transfer:
    """Start to send, and to fill, tensors, each with the member it goes to or comes from; one at most for each."""
    if group.backend == "gloo" or not (sends or receives):
        works = [receive(tensor, peer, group) for tensor, peer in receives]
        return Several(works + [send(tensor, peer, group) for tensor, peer in sends])
    # nccl runs what is not grouped one after the other, and two ranks that both send first would wait for each other
    ends = [group.note(op, tensor) for op, each in (("receive", receives), ("send", sends)) for tensor, _ in each]
    calls = [dist.P2POp(dist.irecv, as_bytes(t), group=group.pg, group_peer=peer) for t, peer in receives]
    calls += [dist.P2POp(dist.isend, as_bytes(t), group=group.pg, group_peer=peer) for t, peer in sends]
    return Collective(dist.batch_isend_irecv(calls), *(t for t, _ in (*receives, *sends)), then=tuple(ends))
