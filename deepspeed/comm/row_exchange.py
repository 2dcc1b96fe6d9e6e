"""Rows to every rank of a group: what layers exchange whose work several ranks share, and ZeRO does not."""

import torch
import torch.distributed as dist

from deepspeed.comm.collectives import AxisGroup, Collective


def start_all_to_all(
    rows: torch.Tensor, group: AxisGroup, *, sent: list[int], received: list[int]
) -> tuple[torch.Tensor, Collective]:
    """Start an ``all_to_all``; return what will hold the rows, and the transfer to wait for."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    end = group.note("all_to_all", rows)
    rows = rows.contiguous()
    work = dist.all_to_all_single(out, rows, received, sent, group=group.pg, async_op=True)
    return out, Collective([work], rows, out, then=(end,))


def all_to_all(rows: torch.Tensor, group: AxisGroup, *, sent: list[int], received: list[int]) -> torch.Tensor:
    """Send ``sent[r]`` consecutive rows to each member r; return the ``received[r]`` rows of each, in member order."""
    out, transfer = start_all_to_all(rows, group, sent=sent, received=received)
    transfer.wait()
    return out
