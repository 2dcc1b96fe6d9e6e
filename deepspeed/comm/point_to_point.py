"""From one rank to another: tensors of a known shape, numbers, and small objects; and how far apart two clocks are.

Between two ranks what is received is what was sent, in that order, within one group.
"""

import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm.collectives import AxisGroup, Collective, as_bytes
from deepspeed.tier.transfer import Several, Transfer

_PINGS = 8  # round trips with each rank, of which the shortest counts


def send(tensor: torch.Tensor, peer: int, group: AxisGroup) -> Collective:
    """Start to send ``tensor`` (contiguous, untouched until it has arrived) to member ``peer``."""
    end = group.note("send", tensor)
    works = [dist.isend(as_bytes(tensor), group=group.pg, group_dst=peer)] if tensor.numel() else []
    return Collective(works, tensor, then=(end,))


def receive(tensor: torch.Tensor, peer: int, group: AxisGroup) -> Collective:
    """Start to fill ``tensor`` (contiguous) with the tensor that member ``peer`` sends."""
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
    """Wait for an object of ``send_object`` and unpickle it; only between ranks of one job, which run one program."""
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    dist.recv(size, group=group.pg, group_src=peer)
    data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.recv(data, group=group.pg, group_src=peer)
    return pickle.loads(data.numpy().tobytes())


def exchange(
    sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]], group: AxisGroup
) -> Transfer:
    """Start to send and to fill tensors, each paired with its member, at most one of either kind for each member."""
    if group.backend == "gloo" or not (sends or receives):
        works = [receive(tensor, peer, group) for tensor, peer in receives]
        return Several(works + [send(tensor, peer, group) for tensor, peer in sends])
    # nccl runs what is not grouped one after the other, and two ranks that both send first would wait for each other
    ends = [group.note(op, tensor) for op, pairs in (("receive", receives), ("send", sends)) for tensor, _ in pairs]
    calls = [dist.P2POp(dist.irecv, as_bytes(t), group=group.pg, group_peer=peer) for t, peer in receives]
    calls += [dist.P2POp(dist.isend, as_bytes(t), group=group.pg, group_peer=peer) for t, peer in sends]
    return Collective(dist.batch_isend_irecv(calls), *(t for t, _ in (*receives, *sends)), then=tuple(ends))


class Wire:
    """Messages from one rank to another over ``group``."""

    def __init__(self, group: AxisGroup) -> None:
        self._group = group
        self._device = "cpu" if group.backend == "gloo" else get_accelerator().current_device_name()

    def send_number(self, value: int, rank: int) -> None:
        """Send an int64 number to the member ``rank``."""
        dist.send(torch.tensor([value], dtype=torch.int64, device=self._device), group=self._group.pg, group_dst=rank)

    def number(self, rank: int) -> int:
        """Receive an int64 number from the member ``rank``."""
        value = torch.empty(1, dtype=torch.int64, device=self._device)
        dist.recv(value, group=self._group.pg, group_src=rank)
        return int(value)

    def send_bytes(self, content: bytes, rank: int) -> None:
        """Send ``content``, at least one byte, to the member ``rank``."""
        self.send_number(len(content), rank)
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        dist.send(values, group=self._group.pg, group_dst=rank)

    def bytes(self, rank: int) -> bytes:
        """Receive the bytes that the member ``rank`` sends."""
        values = torch.empty(self.number(rank), dtype=torch.uint8, device=self._device)
        dist.recv(values, group=self._group.pg, group_src=rank)
        return values.cpu().numpy().tobytes()


def clock_offset(group: AxisGroup) -> tuple[int, int]:
    """Return how far this rank's ``perf_counter_ns`` is ahead of the first member's, and when that was measured, by
    this rank's clock. Of several round trips the shortest counts: the answer is taken to come from its middle (Cristian
    1989), so the error is less than half of its length. Collective.
    """
    if group.size == 1 or group.alike:
        return 0, time.perf_counter_ns()
    wire, now = Wire(group), time.perf_counter_ns
    if group.index:
        for _ in range(_PINGS):
            wire.number(0)
            wire.send_number(now(), 0)
        return wire.number(0), now()
    for rank in range(1, group.size):
        trips = []
        for _ in range(_PINGS):
            begin = now()
            wire.send_number(0, rank)
            theirs = wire.number(rank)
            end = now()
            trips.append((end - begin, theirs - (begin + end) // 2))
        wire.send_number(min(trips)[1], rank)
    return 0, now()
