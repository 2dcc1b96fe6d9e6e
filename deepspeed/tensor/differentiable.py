"""Collectives that autograd passes through, for layers whose work several ranks share (Shoeybi et al. 2019).

A value is *whole* (equal on all ranks of the group), *cut* (each has its part) or *partial* (the sum over ranks is
meant). A gradient has the kind of its value, but partial for a whole value of which each rank computes a part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed.comm.collectives import AxisGroup, all_gather, reduce_scatter, sum_in_place
from deepspeed.comm.row_exchange import all_to_all, start_all_to_all
from deepspeed.tier.transfer import Transfer
from deepspeed.zero.regions import widths


def summed(value: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Return the sum over ``group`` in new memory, as autograd owns the tensors that it hands to a function."""
    return sum_in_place(value.clone(memory_format=torch.contiguous_format), group)


def _mine(value: torch.Tensor, group: AxisGroup, dim: int, edges: Sequence[int]) -> torch.Tensor:
    start, stop = edges[group.index], edges[group.index + 1]
    return value.narrow(dim, start, stop - start).contiguous()


def _joined(value: torch.Tensor, group: AxisGroup, dim: int, edges: Sequence[int]) -> torch.Tensor:
    """All-gather the ranks' parts along dimension ``dim``, in rank order; the parts may differ in size."""
    sizes = widths(edges)
    front = value.movedim(dim, 0).contiguous()
    padded = front if len(front) == max(sizes) else torch.cat([front, front.new_zeros(1, *front.shape[1:])])
    full = padded.new_empty(group.size, *padded.shape)
    all_gather(full.view(-1), padded.reshape(-1), group).wait()
    pairs = zip(full, sizes, strict=True)
    whole = full.flatten(0, 1) if min(sizes) == max(sizes) else torch.cat([part[:n] for part, n in pairs])
    return whole.movedim(0, dim)


def _scattered(value: torch.Tensor, group: AxisGroup, dim: int, edges: Sequence[int]) -> torch.Tensor:
    """Reduce-scatter: return this rank's part of the sum (sliced from an all-reduce where parts differ in size)."""
    if len(set(widths(edges))) > 1:
        return _mine(summed(value, group), group, dim, edges)
    front = value.movedim(dim, 0).contiguous()
    part = front.new_empty(edges[1], *front.shape[1:])
    reduce_scatter(front.view(-1), part.view(-1), group, accumulate=False).wait()
    return part.movedim(0, dim)


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], back: Callable[..., Any], *values: torch.Tensor) -> Any:
        ctx.back = back
        return run(*values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back = ctx.back(*grads)
        return None, None, *(back if isinstance(back, tuple) else (back,))


def paired(run: Callable[..., Any], back: Callable[..., Any], *values: torch.Tensor) -> Any:
    """Return ``run(*values)``, a tensor or a tuple; ``back`` makes the gradients of the values from those of that."""
    return _Paired.apply(run, back, *values)


def enter_parts(value: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Return a whole ``value`` as it is, for ranks that compute different parts from it; its gradients are summed."""
    return paired(lambda v: v.view_as(v), lambda grad: summed(grad, group), value)


def sum_parts(value: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Sum a partial value over the ranks to a whole one; pass its gradient on as it is."""
    return paired(lambda v: summed(v, group), lambda grad: grad, value)


def join_parts(
    value: torch.Tensor, group: AxisGroup, dim: int, *, edges: Sequence[int], partial_gradient: bool = False
) -> torch.Tensor:
    """All-gather a value cut along ``dim`` at ``edges``; ``partial_gradient``: ranks compute different parts."""
    how, back = (group, dim, edges), _scattered if partial_gradient else _mine
    return paired(lambda v: _joined(v, *how), lambda grad: back(grad, *how), value)


def cut_parts(
    value: torch.Tensor, group: AxisGroup, dim: int, *, edges: Sequence[int], partial: bool = False
) -> torch.Tensor:
    """Cut a whole value along ``dim`` at ``edges``; reduce-scatter a ``partial`` one."""
    how, run = (group, dim, edges), _scattered if partial else _mine
    return paired(lambda v: run(v, *how), lambda grad: _joined(grad, *how), value)


def exchange_rows(value: torch.Tensor, group: AxisGroup, *, sent: list[int], received: list[int]) -> torch.Tensor:
    """Send ``sent[r]`` consecutive rows of a cut value to each rank r; return the ``received[r]`` rows of each."""
    run, back = {"sent": sent, "received": received}, {"sent": received, "received": sent}
    return paired(lambda v: all_to_all(v, group, **run), lambda grad: all_to_all(grad, group, **back), value)


class _Flight:
    """Rows on their way to other ranks, and later their gradients on the way back."""

    def __init__(self, group: AxisGroup, sent: list[int], received: list[int]) -> None:
        self._group, self._sent, self._received = group, sent, received
        self._under_way: tuple[torch.Tensor, Transfer] | None = None

    def start(self, rows: torch.Tensor, *, back: bool = False) -> None:
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        self._under_way = start_all_to_all(rows, self._group, sent=sent, received=received)

    def end(self) -> torch.Tensor:
        assert self._under_way is not None
        (rows, transfer), self._under_way = self._under_way, None
        transfer.wait()
        return rows


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        flight.start(value)
        return value.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return ctx.flight.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, departed: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        return flight.end()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.flight.start(grad, back=True)
        return grad.new_empty(0), None


def start_rows(
    value: torch.Tensor, group: AxisGroup, *, sent: list[int], received: list[int]
) -> Callable[[], torch.Tensor]:
    """Start ``exchange_rows``; return the function that waits for the rows and returns them.

    What is computed between the two runs beside the exchange; its backward runs beside the one of the gradients, as
    autograd takes the newest step first.
    """
    flight = _Flight(group, sent, received)
    departed = _Depart.apply(value, flight)
    return lambda: _Arrive.apply(departed, flight)


class _Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = len(others)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, *(None,) * ctx.others


def anchored(value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return ``value``, whose backward reaches ``others`` too, with zeros.

    A collective in the backward of ``others`` then runs on a rank that has computed nothing from them.
    """
    return _Anchored.apply(value, *others) if torch.is_grad_enabled() else value
