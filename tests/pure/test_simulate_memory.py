"""Bytes by category, and what PyTorch's allocators make of them."""

import random

import pytest

from deepspeed.tools.simulate.events import COMPUTE, DEVICE, PAGEABLE, PINNED, Allocate, Free
from deepspeed.tools.simulate.memory import CachingAllocator, Memory, pinned_bytes

MIB = 1 << 20


def test_peak_and_categories_at_the_peak() -> None:
    memory = Memory()
    for event in (
        Allocate(1, 100, DEVICE, COMPUTE, "states"),
        Allocate(2, 50, DEVICE, COMPUTE, "gathered"),
        Free(2),
        Allocate(3, 40, DEVICE, COMPUTE, "gradients"),
    ):
        memory.feed(event)
    usage = memory.of(DEVICE)
    assert (usage.now, usage.peak) == (140, 150)
    assert usage.at_peak == {"states": 100, "gathered": 50}
    memory.restart()
    assert usage.peak == 140 and usage.at_peak == {"states": 100, "gradients": 40}


def test_places_are_apart_and_empty_buffers_nothing() -> None:
    memory = Memory()
    for event in (Allocate(1, 3, PAGEABLE, -1), Allocate(2, 0, DEVICE, COMPUTE), Free(2), Free(99)):
        memory.feed(event)
    assert memory.of(PAGEABLE).now == 3 and memory.of(DEVICE).now == 0 and memory.allocator.allocated == 0


@pytest.mark.parametrize(("asked", "taken"), [(0, 1), (1, 1), (4096, 4096), (4097, 8192), (3 * MIB, 4 * MIB)])
def test_pinned_memory_is_rounded_to_a_power_of_two(asked: int, taken: int) -> None:
    assert pinned_bytes(asked) == taken
    memory = Memory()
    memory.feed(Allocate(1, asked, PINNED, -1))
    assert memory.of(PINNED).now == (taken if asked else 0)


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # small ones share segments of 2 MiB
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),  # middling ones those of 20 MiB
        (10 * MIB, 10 * MIB, 10 * MIB),  # large ones have their own, in steps of 2 MiB
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_segments_as_the_allocator_of_cuda_takes_them(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, asked, COMPUTE)
    # a remainder of at most 1 MiB stays with a large block
    assert allocator.allocated in (allocated, reserved if reserved - allocated <= MIB else allocated)
    assert allocator.reserved == reserved


def test_a_freed_block_serves_again_on_its_own_stream_only() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 12 * MIB, COMPUTE)
    allocator.free(1)
    allocator.allocate(2, 12 * MIB, COMPUTE)
    assert allocator.reserved == 12 * MIB
    allocator.free(2)
    allocator.allocate(3, 12 * MIB, 1)
    assert allocator.reserved == 24 * MIB


def test_best_fit_splits_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 40 * MIB, COMPUTE)
    allocator.free(1)
    for buffer in (2, 3, 4):
        allocator.allocate(buffer, 10 * MIB, COMPUTE)
    assert allocator.reserved == 40 * MIB
    for buffer in (3, 2, 4):
        allocator.free(buffer)
    allocator.allocate(5, 40 * MIB, COMPUTE)  # all four pieces are one again
    assert (allocator.reserved, allocator.allocated) == (40 * MIB, 40 * MIB)


def test_an_unlucky_hole_costs_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 40 * MIB, COMPUTE)
    allocator.free(1)
    allocator.allocate(2, 2 * MIB, COMPUTE)  # sits in the middle of what was free
    allocator.allocate(3, 40 * MIB, COMPUTE)
    assert allocator.reserved == 80 * MIB


def test_an_emptied_cache_gives_whole_segments_back() -> None:
    allocator = CachingAllocator()
    for buffer in (1, 2):
        allocator.allocate(buffer, 12 * MIB, COMPUTE)
    allocator.free(1)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 12 * MIB


def test_a_full_device_takes_back_what_is_cached_before_it_is_out_of_memory() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.allocate(1, 60 * MIB, 0)
    allocator.free(1)
    allocator.allocate(2, 80 * MIB, 0)  # the block of 60 is no help
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (80 * MIB, 80 * MIB, 1)
    allocator.allocate(3, 60 * MIB, 0)
    assert allocator.peak_reserved == 140 * MIB and allocator.retries == 2  # which is more than there is


def test_any_sequence_ends_with_nothing_allocated_and_everything_in_whole_segments() -> None:
    rng, allocator, live = random.Random(3), CachingAllocator(), list[int]()
    for buffer in range(2000):
        allocator.allocate(buffer, rng.choice([100, 5_000, 700_000, 3 * MIB, 30 * MIB]), rng.randrange(2))
        live.append(buffer)
        while len(live) > 40:
            allocator.free(live.pop(rng.randrange(len(live))))
        assert allocator.allocated <= allocator.reserved
    for buffer in live:
        allocator.free(buffer)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0
