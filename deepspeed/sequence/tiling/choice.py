"""Which activations of each block stay on the device, go to host memory, or are computed again. Pure.

MEMO's rule (Zhao et al. 2025, section 4.2): swap what hides behind the block's own computation, recompute the rest,
keep what fits. A block keeps its inputs, or what attention returned too, which takes longest to compute, or everything;
of what it keeps, a share of the tokens goes to the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

_CELLS = 64  # on each axis: of the choices that end in one cell the fastest goes on


class Keep(IntEnum):
    """What a block keeps until its backward."""

    INPUTS = 0
    ATTENTION = 1
    EVERYTHING = 2


@dataclass(frozen=True)
class BlockCost:
    """Forward of one block. ``nbytes``: that it keeps, in the order of ``Keep``. ``attention``: the seconds of the
    attention kernels within ``seconds``.
    """

    nbytes: tuple[int, int, int]
    seconds: float
    attention: float = 0.0

    def recomputed(self, keep: Keep) -> float:
        """Return the seconds that the backward computes again."""
        return (self.seconds, self.seconds - self.attention, 0.0)[keep]


@dataclass(frozen=True)
class Room:
    """Bytes that activations may take on the device and in host memory; bytes a second between them, one way."""

    device: int
    host: int = 0
    link: float = 0.0


class Choice(NamedTuple):
    """What one block keeps, and of that the share that is in host memory meanwhile."""

    keep: Keep
    share: float = 0.0


class _State(NamedTuple):
    """Choices for the first blocks: seconds of recomputation, bytes kept, of which bytes that no copy can hide."""

    seconds: float = 0.0
    kept: int = 0
    bare: int = 0
    keep: Keep | None = None
    before: "_State | None" = None

    def keeps(self) -> Iterator[Keep]:
        """Yield the choices, the last block's first."""
        if self.keep is not None and self.before is not None:
            yield self.keep
            yield from self.before.keeps()


def choose(blocks: Sequence[BlockCost], room: Room) -> list[Choice]:
    """Return the choice of each block that recomputes least, where all copies hide behind the forward of their block.

    Where not even the inputs of all blocks fit so, these alone are kept, and copied as far as host memory reaches.
    """
    together = room.device + room.host if room.link else room.device
    best = _fastest(blocks, room, together)
    keeps = [Keep.INPUTS] * len(blocks) if best is None else [*best.keeps()][::-1]
    away = max(0, sum(block.nbytes[keep] for block, keep in zip(blocks, keeps, strict=True)) - room.device)
    away = min(away, room.host if room.link else 0)
    choices = []
    for block, keep in zip(blocks, keeps, strict=True):  # from the first on: the backward begins with the last
        nbytes = block.nbytes[keep]
        goes = min(away, nbytes if best is None else nbytes - _bare(block, keep, room))
        away -= goes
        choices.append(Choice(keep, goes / nbytes if goes else 0.0))
    return choices


def _bare(block: BlockCost, keep: Keep, room: Room) -> int:
    """Return the bytes of ``block`` whose copies would take longer than its forward."""
    return max(0, block.nbytes[keep] - int(block.seconds * room.link))


def _fastest(blocks: Sequence[BlockCost], room: Room, together: int) -> _State | None:
    kept_after = sum(block.nbytes[0] for block in blocks)
    bare_after = sum(_bare(block, Keep.INPUTS, room) for block in blocks)
    states = [_State()]
    for block in blocks:
        options = [(keep, block.recomputed(keep), block.nbytes[keep], _bare(block, keep, room)) for keep in Keep]
        kept_after, bare_after = kept_after - options[0][2], bare_after - options[0][3]
        cells: dict[tuple[int, int], _State] = {}
        for state in states:
            for keep, seconds, nbytes, bare in options:
                grown = _State(state.seconds + seconds, state.kept + nbytes, state.bare + bare, keep, state)
                if grown.kept + kept_after > together or grown.bare + bare_after > room.device:
                    continue
                cell = grown.kept * _CELLS // (together + 1), grown.bare * _CELLS // (room.device + 1)
                if cell not in cells or grown[:3] < cells[cell][:3]:
                    cells[cell] = grown
        states = [*cells.values()]
    return min(states, key=lambda state: state[:3], default=None)
