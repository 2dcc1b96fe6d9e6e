"""The plan of a stream of weights: every element once, from somebody who has it, and messages of bounded size."""

from math import prod

import pytest
import torch

from deepspeed.reallocate.flow import FlowPiece, FlowTensor, inside, messages, put, sources
from deepspeed.zero.regions import Region, Span

SHAPE = (6, 8)
WHOLE = FlowTensor(torch.float32, SHAPE, (Span(0, 48),))


def entry(*spans: Span) -> FlowTensor:
    return FlowTensor(torch.float32, SHAPE, spans)


def halves(rows: int, start: int) -> Region:
    return Region((0, start), (rows, 4))


LAYOUTS: dict[str, list[FlowTensor | None]] = {
    "whole on all": [WHOLE, WHOLE, WHOLE],
    "shards": [entry(Span(0, 17)), entry(Span(17, 40)), entry(Span(40, 48))],
    "nothing on one": [entry(Span(0, 48)), entry(), None],
    "two replicas of two shards": [entry(Span(0, 24)), entry(Span(24, 48))] * 2,
    "columns, each in two shards": [
        entry(Span(0, 5, halves(6, 0))), entry(Span(5, 24, halves(6, 0))),
        entry(Span(0, 12, halves(6, 4))), entry(Span(12, 24, halves(6, 4))),
    ],
    "several boxes": [
        entry(Span(0, 16, Region((0, 0), (2, 8))), Span(0, 8, Region((4, 0), (1, 8)))),
        entry(Span(0, 16, Region((2, 0), (2, 8))), Span(0, 8, Region((5, 0), (1, 8)))),
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", [None, 0, 1])
@pytest.mark.parametrize("most", [16, 64, 1 << 20])
def test_every_element_comes_once_from_a_rank_that_has_it(layout: str, target: int | None, most: int) -> None:
    entries = LAYOUTS[layout]
    model, got, sent = torch.arange(48.0).view(SHAPE), torch.full(SHAPE, -1.0), 0
    pieces = sources("w", entries, target)
    cut = [p for message in messages([p for p in pieces if p.source >= 0], {"w": 4}, most) for p in message]
    for source, _, span in [*cut, *(p for p in pieces if p.source < 0)]:
        has = entries[source if source >= 0 else target or 0]
        assert has is not None
        assert any(h.region == span.region and h.lo <= span.lo and span.hi <= h.hi for h in has.spans)
        place = inside(got, span.region)
        old = place.reshape(-1)[span.lo : span.hi]
        assert bool((old == -1).all()), "twice"
        put(place, span.lo, inside(model, span.region).reshape(-1)[span.lo : span.hi])
        sent += (span.hi - span.lo) if source >= 0 else 0
    assert torch.equal(got, model)
    mine = entries[target] if target is not None else WHOLE if layout == "whole on all" else None
    assert sent == 48 - sum(h.hi - h.lo for h in (mine.spans if mine is not None else ())), "the least there can be"


def test_messages_are_of_bounded_size() -> None:
    pieces = [FlowPiece(0, "w", Span(0, 100)), FlowPiece(0, "b", Span(3, 7)), FlowPiece(0, "w", Span(200, 333))]
    made = list(messages(pieces, {"w": 4, "b": 2}, 64))
    assert all(sum((h.hi - h.lo) * {"w": 4, "b": 2}[n] for _, n, h in message) <= 64 for message in made)
    assert sum(h.hi - h.lo for message in made for _, _, h in message) == 237


@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 4, 5)])
def test_flat_values_are_put_into_views_with_gaps(shape: tuple[int, ...]) -> None:
    numel = prod(shape)
    for lo in range(numel):
        for hi in range(lo + 1, numel + 1):
            base = torch.zeros(*(2 * n for n in shape))
            view = base[tuple(slice(0, n) for n in shape)]
            put(view, lo, torch.arange(lo, hi, dtype=torch.float32))
            flat = view.reshape(-1)
            assert torch.equal(flat[lo:hi], torch.arange(lo, hi, dtype=torch.float32))
            assert not flat[:lo].any() and not flat[hi:].any()
