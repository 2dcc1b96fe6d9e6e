"""Messages from one rank to another, and how far apart the clocks of two are."""

import time

import torch
import torch.distributed as dist

from deepspeed.comm.collectives import AxisGroup
from deepspeed.device import get_accelerator

_PINGS = 8  # round trips with each rank, of which the shortest counts


class Wire:
    """Messages from one rank to another over ``group``."""

    def __init__(self, group: AxisGroup) -> None:
        self._group = group
        self._device = "cpu" if group.backend == "gloo" else get_accelerator().current_device_name()

    def send_number(self, value: int, rank: int) -> None:
        """To the member ``rank``."""
        dist.send(torch.tensor([value], dtype=torch.int64, device=self._device), group=self._group.pg, group_dst=rank)

    def number(self, rank: int) -> int:
        """From the member ``rank``."""
        value = torch.empty(1, dtype=torch.int64, device=self._device)
        dist.recv(value, group=self._group.pg, group_src=rank)
        return int(value)

    def send_bytes(self, content: bytes, rank: int) -> None:
        """To the member ``rank``; at least one."""
        self.send_number(len(content), rank)
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        dist.send(values, group=self._group.pg, group_dst=rank)

    def bytes(self, rank: int) -> bytes:
        """From the member ``rank``."""
        values = torch.empty(self.number(rank), dtype=torch.uint8, device=self._device)
        dist.recv(values, group=self._group.pg, group_src=rank)
        return values.cpu().numpy().tobytes()


def clock_offset(group: AxisGroup) -> tuple[int, int]:
    """How far this rank's ``perf_counter_ns`` is ahead of the first member's, and when that was measured, by its own
    clock. Of several round trips the shortest tells most: the answer is taken to come from its middle (Cristian 1989),
    so it is wrong by less than half of that. Collective.
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
