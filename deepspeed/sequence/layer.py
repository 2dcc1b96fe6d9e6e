"""``DistributedAttention``: any attention, on all tokens of a part of the heads (DeepSpeed-Ulysses)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.hang.watch import heard
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.errors import SequenceError
from deepspeed.sequence.layout import Layout, agreed
from deepspeed.tensor.differentiable import exchange_rows
from deepspeed.zero.regions import bounds, widths


def single_all_to_all(
    input: torch.Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: Any,
    async_op: bool = False,  # noqa: FBT001, FBT002 - the order that clients know
    handle: Any = None,
    type: str | None = None,
) -> torch.Tensor:
    """Cut ``input`` along dimension ``scatter_idx`` over the ranks of ``group``, and join it along ``gather_idx``.

    Parts differ by at most one where ranks do not divide the dimension that is cut. ``async_op`` is done at once, and
    ``handle``, ``type`` and ``batch_dim_idx`` have no effect. Collective, in the backward too. Raises SequenceError on
    every rank where other dimensions than ``gather_idx`` differ.
    """
    ranks = heard(plain_mesh("", group=group).job, "group")
    parts = input.split(widths(bounds(input.shape[scatter_idx], ranks.size)), dim=scatter_idx)
    shapes = _shapes_of_all((input,), ranks, "single_all_to_all: tensors", dims=input.dim(), but=gather_idx)
    for shape in shapes:
        shape[scatter_idx] = parts[ranks.index].shape[scatter_idx]
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.cat([part.reshape(-1) for part in parts])
    got = exchange_rows(flat, ranks, sent=[part.numel() for part in parts], received=sizes).split(sizes)
    return torch.cat([part.view(shape) for part, shape in zip(got, shapes, strict=True)], dim=gather_idx)


class DistributedAttention(nn.Module):
    """Attention of a sequence whose tokens the ranks of ``sequence_process_group`` share, as many on each.

    ``local_attention(q, k, v, *args, **kwargs)`` gets all tokens of this rank's heads and returns its output in the
    form of q. ``scatter_idx``: dimension of heads; ``gather_idx``: of tokens. Ranks need not divide the heads; where
    there are fewer heads of keys than ranks, several ranks compute with the same ones. ``num_kv_heads`` (default: as k
    has) and ``sp_stream`` have no effect.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.num_kv_heads = num_kv_heads
        self._alike: list[torch.Size] = []  # shapes that all ranks had

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the attention of this rank's tokens, in the form of ``query``: 4 dimensions, the batch's among them.

        ``rotary_pos_emb``: cosine and sine of all positions, which broadcast over q [.., tokens, heads, width]; q and k
        are rotated by halves after the exchange. Collective, in the backward too. Raises SequenceError on every rank
        where their shapes differ. On a device they are compared at the first call and when this rank's change: where
        only some ranks' change, all wait for each other until the group's timeout or ``hang_timeout`` ends it.
        """
        group = heard(plain_mesh("", group=self.spg).job, "sequence_process_group")
        shapes = [part.shape for part in (query, key, value)]
        if query.device.type == "cpu" or shapes != self._alike:  # a comparison waits for the device
            _shapes_of_all((query, key, value), group, "DistributedAttention: query, key, value", dims=4)
            self._alike = shapes
        heads, tokens = self.scatter_idx, self.gather_idx
        order = (batch_dim_idx, heads, tokens, 6 - batch_dim_idx - heads - tokens)
        tokens_first = (batch_dim_idx, tokens, heads, order[3])

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: int) -> torch.Tensor:
            q, k, v = (part.permute(_undone(order)) for part in (q, k, v))
            q, k = _rotated((q, k), rotary_pos_emb)
            return self.local_attn(q, k, v, *args, **kwargs).permute(tokens_first)

        rows, lengths = query.shape[batch_dim_idx], (query.shape[tokens],) * group.size
        q, k, v = (part.permute(order) for part in (query, key, value))
        context = Layout(group, rows, lengths, (), query.device).attend(q, k, v, attend, whole=True)
        return context.permute(_undone(tokens_first))


def _shapes_of_all(
    values: tuple[torch.Tensor, ...], group: AxisGroup, what: str, *, dims: int, but: int | None = None
) -> list[list[int]]:
    """Return the lengths of each rank's ``values``, one after the other, which may differ ``but`` in one dimension.

    Collective. Raises SequenceError on every rank.
    """
    fault, lengths = None, [length for value in values for length in value.shape]
    if any(value.dim() != dims for value in values):
        fault, lengths = SequenceError(f"{what} have {dims} dimensions, not {lengths}"), [0] * dims * len(values)
    _, others = agreed(lengths, fault, group, values[0].device)
    for rank, other in zip(group.ranks, others, strict=True):
        if any(one != two for dim, (one, two) in enumerate(zip(others[0], other, strict=True)) if dim != but):
            texts = (", ".join(str(row[n : n + dims]) for n in range(0, len(row), dims)) for row in (others[0], other))
            raise SequenceError(
                f"{what} have the shapes {next(texts)} on rank {group.ranks[0]} and {next(texts)} on rank {rank}: all "
                "ranks of a sequence need the same. Pad sequences to a multiple of the ranks and cut them evenly"
            )
    return others


def _undone(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of dimensions that takes ``order`` back."""
    return tuple(order.index(dim) for dim in range(len(order)))


def _rotated(values: tuple[torch.Tensor, ...], angles: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
    """Return ``values`` with the first features turned by ``angles`` (cosine, sine): halves of them are the pairs."""
    if angles is None:
        return values
    cosine, sine = angles
    results = []
    for value in values:
        turned, rest = value[..., : cosine.shape[-1]], value[..., cosine.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        results.append(torch.cat([turned * cosine + torch.cat([-second, first], dim=-1) * sine, rest], dim=-1))
    return results
