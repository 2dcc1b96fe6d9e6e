"""Which tokens of a sequence each rank has, and which documents the whole of it consists of."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup, all_gather, failures
from deepspeed.errors import SequenceError
from deepspeed.sequence.heads import HeadPlan, plan_heads, share_heads, to_tokens

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Attention of whole documents: q, k, v [documents, heads, tokens, width], and how many heads of q follow each other on
one of k; 0: there are as many. Returns [documents, tokens, heads, width].
"""
_PADDING = -2  # in place of a position; it does not follow on itself, nor does position 0 follow on it


class RingGroups(NamedTuple):
    """Ranks of one sequence as a grid: neighbours divide heads (``inner``), and keys go around the others (``outer``,
    with the same number among their neighbours).
    """

    inner: AxisGroup
    outer: AxisGroup


def runs_of(lengths: Sequence[int], *, from_ends: bool) -> list[list[range]]:
    """Return for each member of a ring the runs of tokens that are its own, of these ``lengths`` together.

    ``from_ends``: a run from the front of the sequence and one from its end, so that under a causal mask all members
    compute as much. Else the tokens are in the order of the members.
    """
    runs, first, last = list[list[range]](), 0, sum(lengths)
    for length in lengths:
        behind = length // 2 if from_ends else 0
        runs.append([range(first, first + length - behind), range(last - behind, last)])
        first, last = first + length - behind, last - behind
    return runs


@dataclass(frozen=True)
class Layout:
    """Cut of the sequences of one batch. ``lengths``: tokens of each rank. ``documents``: (first token, length) of each
    among all tokens of all rows, row after row; no token attends to one outside its own. ``ring``: the
    groups where keys go around ranks; ``from_ends``: which of the tokens their members have (``runs_of``).
    """

    group: AxisGroup
    rows: int
    lengths: tuple[int, ...]
    documents: tuple[tuple[int, int], ...]
    device: torch.device = field(compare=False)
    ring: RingGroups | None = field(default=None, compare=False)
    from_ends: bool = False

    @cached_property
    def members(self) -> list[tuple[int, ...]]:
        """Return the tokens of each rank, for each member of the ring; all ranks are one member without a ring."""
        ways = self.group.size if self.ring is None else self.ring.inner.size
        return [self.lengths[first : first + ways] for first in range(0, self.group.size, ways)]

    @cached_property
    def runs(self) -> list[list[range]]:
        """Return the runs of tokens of each member of the ring, which its ranks divide in this order."""
        return runs_of([sum(lengths) for lengths in self.members], from_ends=self.from_ends)

    def tokens_of(self, rank: int) -> Iterator[range]:
        """Yield the runs of tokens of ``rank``."""
        member, place = divmod(rank, len(self.members[0]))
        start = sum(self.members[member][:place])
        stop = start + self.lengths[rank]
        for run in self.runs[member]:
            yield run[max(start, 0) : max(stop, 0)]
            start, stop = start - len(run), stop - len(run)

    @property
    def tokens(self) -> int:
        """Return the length of the whole sequences."""
        return sum(self.lengths)

    @property
    def plain(self) -> bool:
        """Return whether each row is one document."""
        return len(self.documents) == self.rows

    def heads(self, queries: int, keys: int) -> HeadPlan:
        """Return which of so many heads each rank computes."""
        return plan_heads(queries, keys, self.group.size)

    @cached_property
    def by_length(self) -> list[torch.Tensor]:
        """Return the token numbers [documents, length] of the documents of each length."""
        firsts: dict[int, list[int]] = {}
        for first, length in self.documents:
            firsts.setdefault(length, []).append(first)
        numbers = torch.arange(self.tokens, device=self.device)
        return [torch.tensor(at, device=self.device)[:, None] + numbers[:length] for length, at in firsts.items()]

    @cached_property
    def document_of(self) -> torch.Tensor | None:
        """Return the document of each token [rows, tokens]; None where each row is one."""
        if self.plain:
            return None
        numbers = torch.arange(self.rows * self.tokens, dtype=torch.int32, device=self.device)
        return torch.bucketize(numbers, self.ends, right=True).view(self.rows, self.tokens)

    @cached_property
    def ends(self) -> torch.Tensor:
        """Return where documents begin, and the end of the last, as kernels for documents of any length want them."""
        edges = [first for first, _ in self.documents] + [self.rows * self.tokens]
        return torch.tensor(edges, dtype=torch.int32, device=self.device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, core: Core, *, whole: bool = False
    ) -> torch.Tensor:
        """Return the attention of this rank's tokens [rows, tokens, heads, width] from [rows, heads, tokens, width].

        ``core`` runs once for the documents of each length; with ``whole`` it gets the rows as they are, and has to
        keep documents apart by itself. Collective, in the backward too.
        """
        qkv, plan = share_heads((query, key, value), self.group, self.lengths)
        run = core if whole or self.plain else self._in_documents(core)
        return to_tokens(run(*qkv, plan.groups(self.group.index)), plan.queries, self.group, self.lengths)

    def _in_documents(self, core: Core) -> Core:
        def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: int) -> torch.Tensor:
            flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
            outputs = []
            for numbers in self.by_length:
                q, k, v = (part[numbers].transpose(1, 2) for part in flat)
                outputs.append(core(q, k, v, groups).flatten(0, 1))
            order = torch.cat([numbers.flatten() for numbers in self.by_length])
            return torch.cat(outputs)[torch.argsort(order)].unflatten(0, (self.rows, self.tokens))

        return run


def in_turn(numbers: Sequence[int | torch.Tensor], group: AxisGroup, device: torch.device) -> torch.Tensor:
    """Return the integers of all ranks [ranks, numbers]. Collective; waits for nothing where ``device`` has them."""
    mine = torch.stack(
        [
            number.to(device, torch.int64)
            if isinstance(number, torch.Tensor)
            else torch.full((), number, dtype=torch.int64, device=device)
            for number in numbers
        ]
    )
    full = mine.new_empty(group.size * len(numbers))
    all_gather(full, mine, group).wait()
    return full.view(group.size, -1)


def agreed(
    numbers: Sequence[int | torch.Tensor], fault: Exception | None, group: AxisGroup, device: torch.device
) -> tuple[torch.Tensor, list[list[int]]]:
    """Return ``in_turn``, and its numbers read, which waits for the device; where a rank has a ``fault``, raise it
    there, and SequenceError with its text elsewhere.
    """
    answers = in_turn([*numbers, int(fault is not None)], group, device)
    read = answers.tolist()
    if any(row.pop() for row in read):
        texts = failures(fault, group)
        raise fault or SequenceError("; ".join(f"rank {rank}: {text}" for rank, text in texts.items()))
    return answers[:, :-1], read


def codes_of(position_ids: torch.Tensor, mask: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Return positions [rows, tokens] with padding, where ``mask`` is zero, marked."""
    codes = position_ids.to(torch.int64).expand(rows, -1)
    return codes if mask is None else codes.masked_fill(~mask.bool(), _PADDING)


def joined(codes: torch.Tensor, group: AxisGroup, lengths: Sequence[int]) -> torch.Tensor:
    """Return the codes of whole sequences from those of this rank's part of each. Collective."""
    padded = nn.functional.pad(codes, (0, max(lengths) - codes.shape[1])).contiguous()
    full = padded.new_empty(group.size, *padded.shape)
    all_gather(full.view(-1), padded.view(-1), group).wait()
    return torch.cat([part[:, :length] for part, length in zip(full, lengths, strict=True)], dim=1)


def layout_of(
    codes: torch.Tensor,
    group: AxisGroup,
    lengths: Sequence[int],
    ring: RingGroups | None = None,
    *,
    from_ends: bool = False,
) -> Layout:
    """Return the layout of whole sequences with these ``codes`` [rows, tokens]: a document begins where positions do
    not go on. Waits for the device.
    """
    rows, tokens = codes.shape
    begins = torch.ones_like(codes, dtype=torch.bool)
    before, after = codes[:, :-1], codes[:, 1:]
    begins[:, 1:] = (after != before + 1) & ~((before == _PADDING) & (after == _PADDING))
    firsts = begins.view(-1).nonzero().view(-1).tolist()
    sizes = [stop - first for first, stop in zip(firsts, [*firsts[1:], rows * tokens], strict=True)]
    documents = tuple(zip(firsts, sizes, strict=True))
    return Layout(group, rows, tuple(lengths), documents, codes.device, ring, from_ends)
