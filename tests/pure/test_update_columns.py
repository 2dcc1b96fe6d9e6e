"""Columns of parameters in a flat range: whatever the range cuts off, they are those of the matrix."""

import pytest
import torch

from deepspeed.zero.update.selective.columns import Band, bands_of, chosen_of, width_of

SHAPES = [(5, 7), (3,), (4, 2, 3), (1, 9), (6, 1), ()]


def placed() -> list[tuple[int, tuple[int, ...]]]:
    """Parameters one behind the other, with gaps."""
    places, offset = [], 0
    for shape in SHAPES:
        places.append((offset, shape))
        offset += torch.Size(shape).numel() + 3
    return places


@pytest.mark.parametrize("cuts", [(0, 200), (0, 3, 5, 6, 20, 41, 42, 60, 200), tuple(range(0, 210, 4))])
def test_parts_of_all_ranges_together_are_the_whole(cuts: tuple[int, ...]) -> None:
    places, whole = placed(), torch.arange(1.0, 201.0)
    marked, squares = torch.zeros(200), [torch.zeros(width_of(shape)) for shape in SHAPES]
    columns = [torch.arange(width_of(shape))[:: 2 if len(shape) > 1 else 1] for shape in SHAPES]
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        flat, target = whole[start:stop], marked[start:stop]
        for band in bands_of(places, start, min(stop, 200)):
            some = columns[band.segment]
            compact = torch.full((band.rows * some.numel(),), float("nan"))
            band.take(flat, some, compact)
            assert torch.isfinite(compact).all()
            band.put(target, some, compact)
            band.squares(flat, squares[band.segment])
    wanted = torch.zeros(200)
    for (offset, shape), some, found in zip(places, columns, squares, strict=True):
        matrix = whole[offset : offset + torch.Size(shape).numel()].view(-1, width_of(shape))
        wanted[offset : offset + matrix.numel()].view(-1, width_of(shape))[:, some] = matrix[:, some]
        torch.testing.assert_close(found, matrix.square().sum(0))
    assert torch.equal(marked, wanted)


def test_how_many_are_chosen() -> None:
    assert [chosen_of(shape, 0.25) for shape in ((8, 8), (8, 3), (4, 2, 6), (9,), (), (0, 4))] == [2, 1, 3, 1, 1, 0]
    assert chosen_of((1 << 21,), 0.25) == 0, "a large vector is the host's"
    assert Band(0, 0, 10, 3, 4).rows == 4, "the end of a row, two rows, the begin of one"
