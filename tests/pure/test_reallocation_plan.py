"""The plan of a reallocation: every element that a rank needs comes to it exactly once, from a rank that has it, and no
byte travels that need not; ranks that have the same share the work, those of the same node first.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.reallocate.flow import FlowPiece, FlowTensor, inside, messages, put, sources
from deepspeed.reallocate.moves import GlobalShape, ReallocationPlan, RegionTransfer, in_rounds, plan_reallocation
from deepspeed.zero.regions import Region, Span
from tests.harness.rows import for_each

Layout = dict[int, dict[str, list[Span]]]
SHAPES = {"embed": GlobalShape((7, 6), 4), "row": GlobalShape((5, 9), 2), "deep": GlobalShape((3, 4, 5), 2)}
SHAPES |= {"norm": GlobalShape((6,), 4), "number": GlobalShape((), 8), "empty": GlobalShape((0, 4), 4)}


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(*region, strict=True))


def marked(shape: tuple[int, ...], spans: Sequence[Span]) -> np.ndarray:
    """How often each element of a tensor is in ``spans``, counted element by element."""
    times = np.zeros(shape, dtype=int)
    for lo, hi, region in spans:
        region = region or Region((0,) * len(shape), shape)
        flags = np.zeros(prod(region.shape), dtype=int)
        flags[lo:hi] = 1
        times[slices(region)] += flags.reshape(region.shape)
    return times


def check(plan: ReallocationPlan, shapes: Mapping[str, GlobalShape], held: Layout, needed: Layout) -> None:
    """Everything that a plan promises, against masks of single elements."""
    bound = 0
    for name, (shape, width) in shapes.items():
        for rank, needs in needed.items():
            wanted, times = marked(shape, needs.get(name, [])), np.zeros(shape, dtype=int)
            mine = marked(shape, held.get(rank, {}).get(name, []))
            for source, target, _, region in (t for t in (*plan.transfers, *plan.copies) if t[1:3] == (rank, name)):
                assert (marked(shape, held[source].get(name, []))[slices(region)] > 0).all(), "the source has it"
                assert source == target or not mine[slices(region)].any(), "nothing travels that is there"
                times[slices(region)] += 1
            assert (times == wanted).all(), (name, rank)
            bound += width * int(((wanted > 0) & (mine == 0)).sum())
    assert plan.bytes_moved == plan.lower_bound == sum(plan.received.values()) == bound
    assert all(t.source != t.target for t in plan.transfers) and all(t.source == t.target for t in plan.copies)


def flat(shape: tuple[int, ...], ways: int, way: int, region: Region | None = None) -> list[Span]:
    """One of ``ways`` uneven flat shards of ``region``."""
    numel = prod(region.shape if region is not None else shape)
    lo, hi = numel * way // ways, numel * (way + 1) // ways
    return [Span(lo, hi, region)] if lo < hi else []


def part(shape: tuple[int, ...], dim: int, ways: int, way: int) -> Region | None:
    if not shape:
        return None
    dim = min(dim, len(shape) - 1)
    lo, hi = shape[dim] * way // ways, shape[dim] * (way + 1) // ways
    start = tuple(lo if d == dim else 0 for d in range(len(shape)))
    return Region(start, tuple(hi - lo if d == dim else n for d, n in enumerate(shape)))


def packed(shape: tuple[int, ...], ways: int, way: int) -> list[Span]:
    """Of each half of dimension 0 one share, as of queries and keys in one weight."""
    if not shape or shape[0] < 2 * ways:
        return flat(shape, 1, 0)
    half, spans = shape[0] // 2, []
    for begin, size in ((0, half), (half, shape[0] - half)):
        lo, hi = size * way // ways, size * (way + 1) // ways
        region = Region((begin + lo, *(0 for _ in shape[1:])), (hi - lo, *shape[1:]))
        spans.append(Span(0, prod(region.shape), region))
    return spans


def of_each(ranks: Sequence[int], spans: Callable[[int, tuple[int, ...]], list[Span]]) -> Layout:
    return {rank: {name: spans(i, s.shape) for name, s in SHAPES.items()} for i, rank in enumerate(ranks)}


def grid(ranks: Sequence[int], tp: int, dim: int, *, cut_by_zero: bool) -> Layout:
    """data x tensor-parallel ranks."""
    data = len(ranks) // tp if cut_by_zero else 1
    return of_each(ranks, lambda i, shape: flat(shape, data, i // tp % data, part(shape, dim, tp, i % tp)))


def staged(ranks: Sequence[int], *, replicas: int = 1) -> Layout:
    """Each tensor on one pipeline stage, but for one that is on all."""
    stages = len(ranks) // replicas
    return {
        rank: {
            name: flat(s.shape, 1, 0)
            for number, (name, s) in enumerate(SHAPES.items())
            if name == "norm" or number % stages == i // replicas
        }
        for i, rank in enumerate(ranks)
    }


def layouts(ranks: Sequence[int]) -> Iterator[tuple[str, Layout]]:
    yield "whole", of_each(ranks, lambda _, shape: flat(shape, 1, 0))
    yield "shards", of_each(ranks, lambda i, shape: flat(shape, len(ranks), i))
    yield "shards on one", of_each(ranks, lambda i, shape: flat(shape, 1, 0) if i == 0 else [])
    yield "groups of two", of_each(ranks, lambda i, shape: flat(shape, 2, i % 2))
    yield "rows", grid(ranks, len(ranks), 0, cut_by_zero=False)
    yield "columns", grid(ranks, len(ranks), 1, cut_by_zero=False)
    yield "columns in two", grid(ranks, 2, 1, cut_by_zero=False)
    yield "shards of columns", grid(ranks, 2, 1, cut_by_zero=True)
    yield "packed", of_each(ranks, lambda i, shape: packed(shape, len(ranks), i))
    yield "last dim", grid(ranks, 2, 2, cut_by_zero=True)
    yield "stages", staged(ranks)
    yield "stages of two", staged(ranks, replicas=2)


FOUR = dict(layouts(range(4)))


@for_each(("first", "ranks"), itertools.product(FOUR, [(0, 1, 2, 3), (2, 3, 4, 5), (3, 1), (9, 0, 4, 2, 7, 5)]))
def test_every_layout_becomes_every_other(first: str, ranks: tuple[int, ...]) -> None:
    for nbytes, (_, needed) in zip(itertools.cycle((8, 1 << 20, 64)), layouts(ranks), strict=False):
        plan = plan_reallocation(SHAPES, FOUR[first], needed, piece_bytes=nbytes)
        check(plan, SHAPES, FOUR[first], needed)
    same = plan_reallocation(SHAPES, FOUR[first], FOUR[first])
    assert same.bytes_moved == 0 and not same.transfers, "nothing moves where all lies right"


def random_side(draw: random.Random, shapes: Mapping[str, GlobalShape], *, complete: bool) -> Layout:
    """Every tensor cut another way, on ranks of its own, in several copies that need not be cut alike."""
    side: Layout = {rank: {} for rank in draw.sample(range(9), draw.randint(1, 6))}
    for name, (shape, _) in shapes.items():
        for copy in range(draw.randint(1, 3)):
            ranks = [r for r in side if name not in side[r]]
            if not ranks or (copy and draw.random() < 0.3):
                break
            ranks = draw.sample(ranks, draw.randint(1, len(ranks)))
            if not complete and draw.random() < 0.3:
                continue
            tp = draw.choice([n for n in (1, 2, 3) if len(ranks) % n == 0])
            dim = draw.randint(0, 2)
            for i, rank in enumerate(ranks):
                side[rank][name] = flat(shape, len(ranks) // tp, i // tp, part(shape, dim, tp, i % tp))
    return side


def test_random_layouts_of_random_tensors() -> None:
    draw = random.Random(5)
    for _ in range(150):
        shapes = {}
        for i in range(draw.randint(1, 4)):
            shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 3)))
            shapes[f"t{i}"] = GlobalShape(shape, draw.choice([1, 2, 4, 8]))
        held, needed = random_side(draw, shapes, complete=True), random_side(draw, shapes, complete=False)
        nodes = {rank: rank // draw.randint(1, 4) for rank in range(9)}
        plan = plan_reallocation(shapes, held, needed, nodes=nodes, piece_bytes=draw.choice([8, 40, 1 << 20]))
        check(plan, shapes, held, needed)
        assert plan.across_nodes == across(shapes, held, needed, nodes), "only what no rank of the node has"
        most = draw.choice([64, 1 << 20])
        check_rounds(plan, shapes, most)


def across(shapes: Mapping[str, GlobalShape], held: Layout, needed: Layout, nodes: Mapping[int, int]) -> int:
    """Bytes that are on no rank of the node that needs them."""
    total = 0
    for (name, (shape, width)), rank in itertools.product(shapes.items(), needed):
        near = [s for other, has in held.items() if nodes[other] == nodes[rank] for s in has.get(name, [])]
        total += width * int(((marked(shape, needed[rank].get(name, [])) > 0) & (marked(shape, near) == 0)).sum())
    return total


def check_rounds(plan: ReallocationPlan, shapes: Mapping[str, GlobalShape], most: int) -> None:
    rounds = in_rounds(plan, shapes, most)
    assert sorted(t for each in rounds for t, _ in each) == sorted(plan.transfers)
    for each in rounds:
        assert each
        for at in (0, 1):  # as the sender, as the receiver
            loads: dict[int, int] = {}
            count: dict[int, int] = {}
            for transfer, nbytes in each:
                assert nbytes == prod(transfer.region.shape) * shapes[transfer.name].width
                loads[transfer[at]] = loads.get(transfer[at], 0) + nbytes
                count[transfer[at]] = count.get(transfer[at], 0) + 1
            assert all(loads[rank] <= most or count[rank] == 1 for rank in loads)


def test_no_rank_is_sent_or_sends_more_than_a_round_may_hold() -> None:
    shapes = {f"t{i}": GlobalShape((50, 20), 4) for i in range(10)}
    held = {r: {n: flat(s.shape, 4, r) for n, s in shapes.items()} for r in range(4)}
    needed = {r: {n: flat(s.shape, 1, 0) for n, s in shapes.items()} for r in range(2, 6)}
    plan = plan_reallocation(shapes, held, needed, piece_bytes=500)
    rounds = in_rounds(plan, shapes, 2000)
    check_rounds(plan, shapes, 2000)
    least = max(max(plan.sent.values()), max(plan.received.values())) / 2000
    assert least <= len(rounds) <= 1.5 * least, "rounds are full"


@for_each(("replicas", "targets"), itertools.product([2, 3, 4], [1, 2, 5]))
def test_ranks_that_have_the_same_send_the_same(replicas: int, targets: int) -> None:
    shapes = {f"t{i}": GlobalShape((3 + 7 * i, 11), 2) for i in range(12)}
    held = {r: {n: flat(s.shape, 1, 0) for n, s in shapes.items()} for r in range(replicas)}
    needed = {10 + r: {n: flat(s.shape, targets, r) for n, s in shapes.items()} for r in range(targets)}
    plan = plan_reallocation(shapes, held, needed, piece_bytes=128)
    assert max(plan.sent.values()) - min(plan.sent.values()) <= 128
    assert max(plan.sent.values()) <= plan.bytes_moved / replicas + 128


def test_replicas_of_shards_share_too() -> None:
    """Two data ways of two tensor-parallel parts, to four shards elsewhere."""
    shapes = {f"t{i}": GlobalShape((64, 64), 2) for i in range(6)}
    held = {r: {n: flat(s.shape, 1, 0, part(s.shape, 1, 2, r % 2)) for n, s in shapes.items()} for r in range(4)}
    needed = {r: {n: flat(s.shape, 4, r % 4) for n, s in shapes.items()} for r in range(4, 8)}
    plan = plan_reallocation(shapes, held, needed, piece_bytes=512)
    check(plan, shapes, held, needed)
    assert max(plan.sent.values()) <= plan.bytes_moved / 4 + 512
    assert max(plan.received.values()) == plan.bytes_moved / 4


def test_a_plan_follows_from_what_it_is_given_alone() -> None:
    held, needed = dict(layouts(range(4)))["shards of columns"], dict(layouts((5, 2, 6)))["whole"]
    first = plan_reallocation(SHAPES, held, needed, nodes={r: r // 4 for r in range(9)}, piece_bytes=16)
    turned = {r: held[r] for r in reversed(held)}, {r: needed[r] for r in sorted(needed)}
    assert plan_reallocation(SHAPES, *turned, nodes={r: r // 4 for r in range(9)}, piece_bytes=16) == first


def test_what_nobody_has_is_named() -> None:
    held = {0: {"w": [Span(0, 5)]}, 1: {"w": [Span(5, 9)]}}
    with pytest.raises(UsageError, match=r"no rank of the source has w\[1, 4\], which rank 7 needs"):
        plan_reallocation({"w": GlobalShape((2, 5), 4)}, held, {7: {"w": [Span(0, 10)]}})


def test_a_transfer_says_who_what_and_where() -> None:
    plan = plan_reallocation({"w": GlobalShape((4,), 2)}, {3: {"w": [Span(0, 4)]}}, {1: {"w": [Span(1, 3)]}})
    assert plan.transfers == (RegionTransfer(3, 1, "w", Region((1,), (2,))),)
    assert (plan.sent, plan.received, plan.across_nodes) == ({3: 4}, {1: 4}, 0)


# -- weight flow ----------------------------------------------------------------------------------------------------
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


@for_each(("layout", "target", "most"), itertools.product(LAYOUTS, [None, 0, 1], [16, 64, 1 << 20]))
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


@for_each("shape", [(5,), (4, 6), (3, 4, 5)])
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
