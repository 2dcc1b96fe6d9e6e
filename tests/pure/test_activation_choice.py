"""The choice between keeping, recomputing and host memory: as good as the best of all, and within its limits."""

import itertools
import random
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from torch import nn

from deepspeed.config.model.sequence import SequenceConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.sequence.tiling.blocks import plan_blocks
from deepspeed.sequence.tiling.choice import BlockCost, Choice, Keep, Room, choose
from tests.harness.rows import for_each

GIB = 2**30


def _blocks(draw: random.Random, count: int) -> list[BlockCost]:
    blocks = []
    for _ in range(count):
        inputs, attention, rest = (draw.randint(1, 4) for _ in range(3))
        seconds = draw.randint(1, 6)
        of_attention = draw.randint(0, seconds)
        blocks.append(BlockCost((inputs, inputs + attention, inputs + attention + rest), seconds, of_attention))
    return blocks


def _fits(blocks: list[BlockCost], keeps: tuple[Keep, ...], room: Room) -> bool:
    """Whether some split of what is kept, byte by byte, is within both limits, each copy within its block's forward."""
    ways = []
    for block, keep in zip(blocks, keeps, strict=True):
        ways.append(range(min(block.nbytes[keep], int(block.seconds * room.link)) + 1))
    kept = sum(block.nbytes[keep] for block, keep in zip(blocks, keeps, strict=True))
    return any(sum(away) <= room.host and kept - sum(away) <= room.device for away in itertools.product(*ways))


def _seconds(blocks: list[BlockCost], keeps: tuple[Keep, ...]) -> float:
    return sum(block.recomputed(keep) for block, keep in zip(blocks, keeps, strict=True))


def _bytes(blocks: list[BlockCost], choices: list[Choice]) -> tuple[float, float]:
    """Of the device, and of the host."""
    kept = [block.nbytes[choice.keep] for block, choice in zip(blocks, choices, strict=True)]
    host = sum(nbytes * choice.share for nbytes, choice in zip(kept, choices, strict=True))
    return sum(kept) - host, host


def test_no_choice_is_faster_within_the_limits() -> None:
    draw = random.Random(0)
    for _ in range(150):
        blocks = _blocks(draw, 3)
        room = Room(draw.randint(0, 14), draw.randint(0, 14), draw.choice([0.0, 0.5, 1.0, 2.0]))
        allowed = [keeps for keeps in itertools.product(Keep, repeat=3) if _fits(blocks, keeps, room)]
        choices = choose(blocks, room)
        keeps = tuple(choice.keep for choice in choices)
        device, host = _bytes(blocks, choices)
        if not allowed:  # inputs alone, as much of them on the host as it takes
            inputs = sum(block.nbytes[0] for block in blocks)
            assert keeps == (Keep.INPUTS,) * 3
            assert host == pytest.approx(min(max(0, inputs - room.device), room.host if room.link else 0))
            continue
        assert _seconds(blocks, keeps) == min(_seconds(blocks, found) for found in allowed)
        assert device <= room.device + 1e-9 and host <= room.host + 1e-9
        for block, choice in zip(blocks, choices, strict=True):
            assert block.nbytes[choice.keep] * choice.share <= block.seconds * room.link + 1e-9


def test_each_rule_of_memo_shows() -> None:
    block = BlockCost((1 * GIB, 2 * GIB, 16 * GIB), 1.0, 0.75)
    blocks = [block] * 4
    assert choose(blocks, Room(64 * GIB)) == [Choice(Keep.EVERYTHING)] * 4  # it fits
    # nothing is free on the device: of each block goes to the host what hides, and the rest is computed again
    assert choose(blocks, Room(0, 64 * GIB, 3 * GIB)) == [Choice(Keep.ATTENTION, 1.0)] * 4
    assert choose(blocks, Room(0, 64 * GIB, 20 * GIB)) == [Choice(Keep.EVERYTHING, 1.0)] * 4
    assert choose(blocks, Room(0, 4 * GIB, 20 * GIB)) == [Choice(Keep.INPUTS, 1.0)] * 4
    # a share of the tokens stays where there is room for it
    half = choose(blocks, Room(4 * GIB, 64 * GIB, 1 * GIB))
    assert [choice.keep for choice in half] == [Keep.ATTENTION] * 4 and {choice.share for choice in half} == {0.5}


def test_a_plan_for_many_blocks_of_two_kinds_is_near_its_bound() -> None:
    kinds = [BlockCost((10, 20, 160), 1.0, 0.5), BlockCost((10, 20, 160), 2.0, 1.5)]
    blocks, room = [kinds[number % 6 == 5] for number in range(96)], Room(3000, 5000, 60.0)
    choices = choose(blocks, room)
    device, host = _bytes(blocks, choices)
    assert device <= room.device + 1e-6 and host <= room.host + 1e-6
    found = _seconds(blocks, tuple(choice.keep for choice in choices))
    # the fewest, with parts of blocks: attention of all is kept, and everything of some, as far as no copy shows
    slow, others = 16, (3000 - 16 * 40) / 100
    least = sum(block.seconds - block.attention for block in blocks) - 0.5 * (slow + others)
    assert least <= found <= least * 1.02


@for_each(("stages", "text"), [(1, "Linear has none"), (2, "beside pipeline stages")])
def test_a_plan_of_what_has_no_blocks_is_refused(stages: int, text: str) -> None:
    cfg = SimpleNamespace(sequence=SequenceConfig(plan="auto"), memory=None)
    mesh = SimpleNamespace(pp=SimpleNamespace(size=stages), job=None)
    with pytest.raises(DeepSpeedConfigError, match=text):
        plan_blocks(nn.Linear(1, 1), cfg, mesh, ExitStack())  # type: ignore[arg-type]
