"""``DistributedAttention``: any attention, on all tokens of a part of the heads (DeepSpeed-Ulysses)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.hang.watch import heard
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.errors import SequenceError
from deepspeed.sequence.layout import Layout, in_turn
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
    ``handle``, ``type`` and ``batch_dim_idx`` have no effect. Collective, in the backward too.
    """
    ranks = heard(plain_mesh("", group=group).job, "group")
    parts = input.split(widths(bounds(input.shape[scatter_idx], ranks.size)), dim=scatter_idx)
    lengths = in_turn([input.shape[gather_idx]], ranks, input.device).view(-1).tolist()
    shapes = [list(parts[ranks.index].shape) for _ in lengths]
    for shape, length in zip(shapes, lengths, strict=True):
        shape[gather_idx] = length
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
        are rotated by halves after the exchange. Collective, in the backward too.
        """
        group = heard(plain_mesh("", group=self.spg).job, "sequence_process_group")
        if query.dim() != 4:
            raise SequenceError(f"DistributedAttention takes tensors of 4 dimensions, not {tuple(query.shape)}")
        order = (
            batch_dim_idx,
            self.scatter_idx,
            self.gather_idx,
            6 - batch_dim_idx - self.scatter_idx - self.gather_idx,
        )
        tokens_first = (order[0], order[2], order[1], order[3])

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: int) -> torch.Tensor:
            q, k, v = (part.permute(_undone(order)) for part in (q, k, v))
            q, k = _rotated((q, k), rotary_pos_emb)
            return self.local_attn(q, k, v, *args, **kwargs).permute(tokens_first)

        rows, lengths = query.shape[batch_dim_idx], (query.shape[self.gather_idx],) * group.size
        q, k, v = (part.permute(order) for part in (query, key, value))
        context = Layout(group, rows, lengths, (), query.device).attend(q, k, v, attend, whole=True)
        return context.permute(_undone(tokens_first))


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
