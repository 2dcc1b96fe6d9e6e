"""The checker of order: what is unordered is said with both places, what is ordered is not."""

from collections.abc import Callable

import pytest

from deepspeed.tools.simulate.events import (
    COMPUTE,
    DEVICE,
    DRIVE_READS,
    DRIVE_WRITES,
    FILE,
    HOST,
    PAGEABLE,
    PINNED,
    REGISTERED,
    Allocate,
    Event,
    Free,
    HostWait,
    Launch,
    Record,
    Touch,
    Wait,
    Work,
)
from deepspeed.tools.simulate.order import OrderCheck, Unordered

SIDE, OTHER = 1, 2
BUFFER = 7


def site(name: str) -> tuple[tuple[str, int, str], ...]:
    return ((f"{name}.py", 1, name),)


def write(stream: int, name: str, start: int = 0, stop: int = 64) -> Launch:
    return Launch(stream, name, (), (Touch(BUFFER, start, stop),), Work("kernel"), site(name))


def read(stream: int, name: str, start: int = 0, stop: int = 64) -> Launch:
    return Launch(stream, name, (Touch(BUFFER, start, stop),), (), Work("kernel"), site(name))


def make(place: str = DEVICE, stream: int = COMPUTE) -> Allocate:
    return Allocate(BUFFER, 64, place, stream, "shard", site("make"))


def problems(*events: Event) -> list[Unordered]:
    order = OrderCheck()
    for event in events:
        order.feed(event)
    return order.problems


HAND_OVER = (Record(1, COMPUTE), Wait(SIDE, 1))


def test_a_read_on_another_stream_needs_an_event_after_the_write() -> None:
    events = make(), write(COMPUTE, "fill"), read(SIDE, "use")
    (problem,) = problems(*events)
    assert problem.problem == "race"
    assert "fill.py:1" in str(problem) and "use.py:1" in str(problem) and "make.py:1" in str(problem)
    assert not problems(*events[:2], *HAND_OVER, events[2])


def test_order_is_transitive_over_a_third_stream() -> None:
    chain = [*HAND_OVER, Record(2, SIDE), Wait(OTHER, 2)]
    assert not problems(make(), write(COMPUTE, "fill"), *chain, read(OTHER, "use"))


def test_a_write_needs_order_after_every_read_and_reads_need_none_among_themselves() -> None:
    reads = make(), write(COMPUTE, "fill"), *HAND_OVER, read(SIDE, "first"), read(COMPUTE, "second")
    assert not problems(*reads)
    (problem,) = problems(*reads, write(COMPUTE, "again"))
    assert problem.first.name == "first" and problem.second.name == "again"


@pytest.mark.parametrize(("start", "stop", "expected"), [(0, 32, 0), (32, 64, 1), (31, 33, 1), (32, 32, 0)])
def test_only_bytes_in_common_conflict(start: int, stop: int, expected: int) -> None:
    events = [make(), write(COMPUTE, "all"), *HAND_OVER, write(SIDE, "upper", 32, 64)]
    assert len(problems(*events, read(COMPUTE, "use", start, stop))) == expected


def test_a_wider_write_takes_the_place_of_what_it_follows() -> None:
    """Or each of the following would be compared with every slice ever read."""
    order = OrderCheck()
    for event in (make(), *(read(COMPUTE, "slice", i, i + 1) for i in range(64)), write(COMPUTE, "all")):
        order.feed(event)
    assert sum(map(len, order._buffers[BUFFER].accesses.values())) == 1


def test_an_access_hidden_behind_an_ordered_wider_one_is_still_ordered_by_it() -> None:
    events = make(), write(COMPUTE, "part", 0, 8), write(COMPUTE, "all"), read(SIDE, "use", 0, 8)
    (problem,) = problems(*events)
    assert problem.first.name == "all"


def test_memory_from_a_pool_is_another_s_until_its_stream_is_waited_for() -> None:
    """The last owner's kernels may run still: the first use on another stream has to wait for the pool's."""
    last = Launch(COMPUTE, "last", (), (), Work("kernel"))
    (problem,) = problems(last, make(), write(SIDE, "first"))
    assert problem.first.name == "the memory's last owner"
    assert not problems(last, make(), *HAND_OVER, write(SIDE, "first"))
    assert not problems(last, make(), write(COMPUTE, "first"))


def test_freed_memory_must_not_be_in_use_by_a_stream_that_its_own_has_not_waited_for() -> None:
    used = make(), *HAND_OVER, write(SIDE, "use")
    (problem,) = problems(*used, Free(BUFFER, site=site("drop")))
    assert problem.problem == "freed while in use" and "drop.py:1" in str(problem)
    assert not problems(*used, Record(2, SIDE), Wait(COMPUTE, 2), Free(BUFFER))
    assert not problems(*used, Free(BUFFER, frozenset({SIDE})))  # record_stream


def test_what_the_program_has_waited_for_is_before_all_that_gets_the_memory_next() -> None:
    used = make(), *HAND_OVER, write(SIDE, "use")
    assert not problems(*used, HostWait("stream", stream=SIDE), Free(BUFFER))


@pytest.mark.parametrize("second", [write(DRIVE_WRITES, "again"), read(DRIVE_READS, "back")])
def test_transfers_of_a_drive_overtake_each_other_unless_the_program_waits_between(second: Launch) -> None:
    first = make(FILE, HOST), write(DRIVE_WRITES, "first"), Record(1, DRIVE_WRITES)
    (problem,) = problems(*first, second)
    assert problem.first.name == "first" and problem.second.name == second.name
    assert not problems(*first, HostWait("drive", event=1), second)
    assert problems(*first, Wait(DRIVE_READS, 1), Wait(DRIVE_WRITES, 1), second)  # a drive knows no events


def test_a_read_of_what_nobody_has_written_is_said() -> None:
    (problem,) = problems(make(), write(COMPUTE, "lower", 0, 32), read(COMPUTE, "use", 32, 64))
    assert problem.problem == "read of what nobody has written" and "use.py:1" in str(problem)
    assert not problems(make(), write(COMPUTE, "lower", 0, 33), read(COMPUTE, "use", 32, 64))
    assert not problems(make(PAGEABLE, HOST), read(HOST, "use"))  # the host's may be real, and not recorded


def test_a_copy_that_goes_on_early_orders_nothing_though_it_takes_time() -> None:
    copy = make(PINNED), write(SIDE, "copy")
    assert problems(*copy, HostWait("staged", stream=SIDE, orders=False), read(HOST, "use"))


def test_use_of_freed_memory_is_said() -> None:
    (problem,) = problems(make(), Free(BUFFER), read(COMPUTE, "late"))
    assert problem.problem == "use of freed memory"


def wait_for_event(stream: int) -> list[Event]:
    return [Record(5, stream), HostWait("event", event=5)]


def wait_for_stream(stream: int) -> list[Event]:
    return [HostWait("stream", stream=stream)]


def wait_for_device(stream: int) -> list[Event]:
    return [HostWait("device")]


@pytest.mark.parametrize("wait", [wait_for_event, wait_for_stream, wait_for_device])
def test_the_program_must_not_write_what_a_copy_under_way_reads(wait: Callable[[int], list[Event]]) -> None:
    copy = make(PINNED), write(HOST, "prepare"), read(SIDE, "copy")
    assert not problems(*copy)  # what the program did before a launch is done
    (problem,) = problems(*copy, write(HOST, "next"))
    assert "by the host" in str(problem)
    assert not problems(*copy, *wait(SIDE), write(HOST, "next"))
    assert problems(*copy, *(event for event in wait(COMPUTE) if event != HostWait("device")), write(HOST, "next"))


@pytest.mark.parametrize(("place", "expected"), [(PINNED, 0), (REGISTERED, 1), (PAGEABLE, 1)])
def test_only_the_driver_s_own_allocator_waits_for_copies_before_it_frees(place: str, expected: int) -> None:
    assert len(problems(make(place, HOST), write(SIDE, "copy"), Free(BUFFER))) == expected


def test_what_the_program_waited_for_is_before_all_it_launches() -> None:
    events = make(), *HAND_OVER, write(SIDE, "fill"), HostWait("stream", stream=SIDE), read(COMPUTE, "use")
    assert not problems(*events)


def test_the_same_two_places_are_said_once() -> None:
    pairs = [event for _ in range(5) for event in (write(COMPUTE, "fill"), read(SIDE, "use"))]
    assert {(p.first.name, p.second.name) for p in problems(make(), *pairs)} == {("fill", "use"), ("use", "fill")}
    assert len(problems(make(), *pairs)) == 2
