"""Attention over a sequence that ranks divide, by passing keys and values around a ring (Liu et al. 2023).

Each rank keeps its queries. Keys and values of all ranks come by, one part a turn, while the part before is used; the
outputs of the parts are merged by their log-sum-exp, as Milakov and Gimelshein 2018 merge softmaxes. The backward goes
around once more, and carries the gradients of keys and values home, beside the computation of the next ones.

A rank has runs of consecutive tokens. Where it has one of the front and one of the end of the sequence, all ranks
compute as much under a causal mask (Brandon et al. 2023).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from deepspeed.comm.collectives import AxisGroup, Collective
from deepspeed.comm.row_exchange import start_shift
from deepspeed.sequence.heads import share_heads, to_tokens
from deepspeed.sequence.layout import Layout

_TILE = 1 << 24  # scores at once, where no kernel of torch serves
_aten = torch.ops.aten


class RingMask(NamedTuple):
    """Who sees whom. ``documents`` [batch, length]: the document of each token of the whole sequence, which sees its
    own alone; ``window``: how many tokens back one sees, itself counted. None: no limit.
    """

    causal: bool = True
    documents: torch.Tensor | None = None
    window: int | None = None


class RingBlock:
    """Attention of a run of ``queries`` to a run of ``keys``, numbers in the sequence, with its backward."""

    def __init__(self, mask: RingMask, queries: range, keys: range, scale: float) -> None:
        self._mask, self._scale, self.queries, self.keys = mask, scale, queries, keys
        self._plain = mask.documents is None and (mask.window is None or queries.stop - keys.start <= mask.window)
        self.is_diagonal = mask.causal and queries == keys
        nearest = queries.start - (keys.stop - 1)  # tokens between the first query and the last key
        none = not queries or not keys or (mask.causal and keys.start > queries.start)
        self.is_empty = none or (mask.window is not None and nearest >= mask.window)  # no query sees any key

    def _fused(self, q: torch.Tensor) -> bool:
        """Return whether the flash kernel of torch computes the block: called by itself it pads no width of heads."""
        fits = self._plain and q.element_size() == 2 and q.shape[-1] in range(8, 257, 8)
        if fits and q.device.type == "cuda":  # which not every GPU and not every build of torch has
            return can_use_flash_attention(SDPAParams(q, q, q, None, 0.0, self.is_diagonal, False))  # noqa: FBT003
        return fits and q.device.type != "cpu"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [b, h, n, d] and log-sum-exps [b, h, n] in fp32."""
        if self._fused(q):
            fused = _aten._scaled_dot_product_flash_attention
            out, total, *_ = fused(q, k, v, 0.0, self.is_diagonal, scale=self._scale)
            return out.float(), total
        out, total = torch.empty_like(q, dtype=torch.float32), q.new_empty(q.shape[:-1], dtype=torch.float32)
        for part, scores in self._scores(q, k):
            total[:, :, part] = lse = scores.logsumexp(-1)
            shown = torch.where(lse.isfinite(), lse, 0.0)  # a query that sees nothing here has weights of zero
            out[:, :, part] = (scores - shown[..., None]).exp() @ v.float()
        return out, total

    def backward(
        self, grad: torch.Tensor, tensors: tuple[torch.Tensor, ...], out: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return this block's part of the gradients of the ``tensors`` (q, k, v); ``out``, ``total`` of all blocks."""
        q, k, v = tensors
        if self._fused(q):
            none, seed = q.new_empty(0, dtype=torch.int32), q.new_zeros(2, dtype=torch.uint64)
            sizes = (None, None, q.shape[2], k.shape[2])  # any bounds, even none, would say that sequences are packed
            parts: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, total, *sizes, 0.0, self.is_diagonal, seed, none, scale=self._scale
            )
            return parts
        wide, seen = grad.float(), torch.where(total.isfinite(), total, 0.0)
        delta = (wide * out.float()).sum(-1)
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in tensors)
        for part, scores in self._scores(q, k):
            weights = (scores - seen[:, :, part, None]).exp()
            dv += weights.transpose(-1, -2) @ wide[:, :, part]
            inner = weights * (wide[:, :, part] @ v.float().transpose(-1, -2) - delta[:, :, part, None])
            dq[:, :, part] = inner @ k.float() * self._scale
            dk += inner.transpose(-1, -2) @ q[:, :, part].float() * self._scale
        return dq, dk, dv

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield rows of queries and their scaled scores, -inf for what they do not see."""
        step = max(1, _TILE // (q.shape[0] * q.shape[1] * k.shape[2]))
        keys, places = k.float().transpose(-1, -2), torch.arange(k.shape[2], device=k.device) + self.keys.start
        for begin in range(0, q.shape[2], step):
            part = slice(begin, min(begin + step, q.shape[2]))
            rows = torch.arange(part.start, part.stop, device=q.device) + self.queries.start
            back = rows[:, None] - places
            seen = (back >= 0) if self._mask.causal else torch.ones_like(back, dtype=torch.bool)
            if self._mask.window is not None:
                seen = seen & (back < self._mask.window)
            if self._mask.documents is not None:
                seen = seen & (self._mask.documents[:, rows, None] == self._mask.documents[:, None, places])
            scores = q[:, :, part].float() @ keys * self._scale
            yield part, scores.masked_fill(~(seen[:, None] if seen.dim() == 3 else seen), float("-inf"))


def blocks_of(
    mask: RingMask, queries: Sequence[range], keys: Sequence[range], scale: float = 1.0
) -> list[tuple[RingBlock, slice, slice]]:
    """Return the blocks of runs of ``queries`` and runs of ``keys`` that see each other, with the place of either."""
    blocks = ((RingBlock(mask, *pair, scale), pair) for pair in product(queries, keys))
    rows, places = _places(queries), _places(keys)
    return [(block, rows[q], places[k]) for block, (q, k) in blocks if not block.is_empty]


def _places(runs: Sequence[range]) -> dict[range, slice]:
    """Return where each of the ``runs`` is among the tokens of them all."""
    edges = pairwise([0, *accumulate(len(run) for run in runs)])
    return {run: slice(*pair) for run, pair in zip(runs, edges, strict=True)}


class _Way(NamedTuple):
    """What all turns need. ``runs``: numbers of the tokens of each rank."""

    group: AxisGroup
    runs: Sequence[Sequence[range]]
    mask: RingMask
    scale: float


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, kv: torch.Tensor, way: _Way) -> Any:
        ctx.way = way
        out = torch.zeros_like(q, dtype=torch.float32)
        total = q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
        for blocks, pair in _turns(kv, way):
            for block, rows, keys in blocks:
                part, lse = block.forward(q[:, :, rows], *_repeated(pair[:, :, :, keys], q.shape[1]))
                before = total[:, :, rows]
                after = torch.logaddexp(before, lse)
                shown = torch.where(after.isfinite(), after, 0.0)
                out[:, :, rows] *= (before - shown).exp()[..., None]
                out[:, :, rows] += part * (lse - shown).exp()[..., None]
                total[:, :, rows] = after
        ctx.save_for_backward(q, kv, out, total)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        way: _Way = ctx.way
        q, kv, out, total = ctx.saved_tensors
        grad, out = grad.contiguous(), out.to(q.dtype)
        dq, carried, moving = torch.zeros_like(q, dtype=torch.float32), torch.empty(0), list[Collective]()
        for blocks, pair in _turns(kv, way):
            added = torch.zeros_like(kv, dtype=torch.float32)
            for block, rows, keys in blocks:
                tensors = (q[:, :, rows], *_repeated(pair[:, :, :, keys], q.shape[1]))
                above, *of_all = (x[:, :, rows].contiguous() for x in (grad, out, total))
                parts = block.backward(above, tensors, *of_all)
                dq[:, :, rows] += parts[0]
                of_heads = torch.stack(parts[1:]).unflatten(2, (kv.shape[2], -1))
                added[:, :, :, keys] += of_heads.sum(3, dtype=torch.float32)
            for transfer in moving:
                transfer.wait()
                added += carried
            carried = torch.empty_like(added)
            moving = [start_shift(added, carried, way.group)]
        for transfer in moving:
            transfer.wait()
        return dq.to(q.dtype), carried.to(kv.dtype), None


def _repeated(pair: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Return keys and values for each of the ``heads`` of queries: each head of keys travels once."""
    many = heads // pair.shape[2]
    return (pair.repeat_interleave(many, dim=2) if many > 1 else pair).unbind(0)


def _turns(kv: torch.Tensor, way: _Way) -> Iterator[tuple[list[tuple[RingBlock, slice, slice]], torch.Tensor]]:
    """Yield the blocks of each turn and the keys and values of it, while the next ones are on their way."""
    group, pair = way.group, kv
    for turn in range(group.size):
        arriving, moving = pair, list[Collective]()
        if turn < group.size - 1:
            arriving = torch.empty_like(pair)
            moving.append(start_shift(pair, arriving, group))
        keys = way.runs[(group.index - turn) % group.size]
        yield blocks_of(way.mask, way.runs[group.index], keys, way.scale), pair
        for transfer in moving:
            transfer.wait()
        pair = arriving


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AxisGroup,
    *,
    mask: RingMask,
    runs: Sequence[Sequence[range]],
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention [b, h, n, d] of this rank's queries to the keys of all ranks of ``group``.

    ``q`` [b, h, n, d] and ``k``, ``v`` [b, kv heads, n, d] are of this rank's tokens. ``runs``: the tokens of each rank
    in order, as numbers in the sequence. Softmax and sums are in fp32. Collective, in the backward too.
    Memory beside the arguments: two parts of keys and values, and three of their gradients in the backward.
    """
    missing = max(sum(map(len, tokens)) for tokens in runs) - q.shape[2]
    # One size travels, as a rank has to know what comes.
    kv = torch.stack([F.pad(x, (0, 0, 0, missing)) if missing else x for x in (k, v)])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: torch.Tensor = _Ring.apply(q, kv, _Way(group, runs, mask, scale))
    return result


def inner_ranks(ranks: int, heads: int, attention: str) -> int:
    """Return how many neighbours among the ``ranks`` of one sequence divide its ``heads``; keys go around the others.

    ``attention`` is the key ``sequence.attention``: "ulysses": all of them; "ring": none; "both": the most that leave a
    ring; "auto": the most.
    """
    if attention == "ulysses":
        return ranks
    fit = [ways for ways in range(1, ranks + 1) if ranks % ways == 0 and ways <= heads]
    return {"ring": 1, "both": max(ways for ways in fit if ways < ranks)}.get(attention, fit[-1])


def attend_around(
    layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: RingMask, scale: float | None
) -> torch.Tensor:
    """Return the attention of this rank's tokens [rows, tokens, heads, width] from [rows, heads, tokens, width].

    Neighbours divide the heads of their tokens, whose keys go around the others. Collective, in the backward too.
    """
    assert layout.ring is not None
    inner, outer = layout.ring
    near = layout.members[outer.index]
    qkv, plan = share_heads((q, k, v), inner, near)
    out = ring_attention(*qkv, outer, mask=mask, runs=layout.runs, scale=scale)
    return to_tokens(out.transpose(1, 2), plan.queries, inner, near)
