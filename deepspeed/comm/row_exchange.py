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
    if group.size == 1:
        return rows.clone()
    out, transfer = start_all_to_all(rows, group, sent=sent, received=received)
    transfer.wait()
    return out


def start_shift(values: torch.Tensor, out: torch.Tensor, group: AxisGroup) -> Collective:
    """Start to send ``values`` to the next member, and to receive those of the one before into ``out``."""
    end = group.note("shift", values)
    before, behind = (group.index - 1) % group.size, (group.index + 1) % group.size
    pairs = ((dist.irecv, out, before), (dist.isend, values.contiguous(), behind))
    posted = [dist.P2POp(op, tensor, group=group.pg, group_peer=peer) for op, tensor, peer in pairs]
    return Collective(dist.batch_isend_irecv(posted), out, values, then=(end,))
