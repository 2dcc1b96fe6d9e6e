"""What processes tell each other through a store: in memory, and with clocks that the test moves."""

import threading
import time
from dataclasses import dataclass

import pytest
from torch.distributed import HashStore

from deepspeed.comm.channel import Channel, Heard, SteadyClock
from deepspeed.launcher.elastic.beats import BEAT_S, Beats, beat


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_key_has_its_value_or_none_and_names_keep_channels_apart() -> None:
    store = HashStore()
    one, other = Channel(store, "one"), Channel(store, "other")
    one.put("a/0", {"step": 3})
    one.put("a/2", [1, "x"])
    assert one.get("a/0") == {"step": 3} and one.get("a/1") is None and other.get("a/0") is None
    assert one.of("a", range(3)) == {0: {"step": 3}, 2: [1, "x"]}
    assert one.has("a/0", "a/2") and not one.has("a/0", "a/1")
    one.drop("a/0")
    assert one.get("a/0") is None and [one.add("n"), one.add("n", 2), one.add("n")] == [0, 2, 2]
    assert one.apart().get("a/2") == [1, "x"]


def test_the_first_claim_holds_until_it_is_given_up_or_taken_over() -> None:
    channel = Channel(HashStore(), "job")
    assert channel.claim("leader", [1, 7]) == [1, 7] == channel.claim("leader", [2, 9])
    assert channel.swap("leader", [2, 9], [2, 10]) == [1, 7]
    assert channel.swap("leader", [1, 7], [2, 9]) == [2, 9]
    assert channel.swap("leader", [2, 9], None) is None and channel.claim("leader", [3, 1]) == [3, 1]


def test_of_many_that_claim_at_once_one_is_first() -> None:
    channel, seen = Channel(HashStore(), "job"), list[int]()
    claimants = [threading.Thread(target=lambda n=n: seen.append(channel.claim("first", n))) for n in range(1, 9)]
    for claimant in claimants:
        claimant.start()
    for claimant in claimants:
        claimant.join()
    assert len(seen) == 8 and len(set(seen)) == 1


def test_messages_of_a_queue_come_in_order_and_an_empty_one_keeps_nobody() -> None:
    channel = Channel(HashStore(), "job")
    channel.push("up", [1, {"kind": "join"}])
    channel.push("up", [2, {"kind": "beat"}])
    assert [channel.pop("up") for _ in range(3)] == [[1, {"kind": "join"}], [2, {"kind": "beat"}], None]


def test_a_wait_ends_with_the_keys_its_limit_or_when_it_is_stopped() -> None:
    channel = Channel(HashStore(), "job")
    assert not channel.wait("a", seconds=0.0) and not channel.wait("a", seconds=60.0, stop=lambda: True)
    threading.Timer(0.05, channel.put, ("a",)).start()
    assert channel.wait("a", seconds=60.0) and channel.wait(seconds=0.0)


def test_time_in_which_a_process_was_suspended_does_not_count() -> None:
    clock = Clock()
    steady = SteadyClock(2.0, clock)
    clock.now += 1.5
    assert steady() == 1.5
    clock.now += 3600.0
    assert steady() == 3.5


def test_one_that_says_the_same_as_before_is_silent() -> None:
    clock = Clock()
    heard = Heard(clock)
    assert heard.hear("a", 1) == 0.0
    clock.now += 4.0
    assert (heard.hear("a", 1), heard.hear("b", 1)) == (4.0, 0.0)
    clock.now += 1.0
    assert (heard.hear("a", 2), heard.hear("b", 1)) == (0.0, 1.0)


def _round(channel: Channel, clock: Clock) -> Beats:
    """Node 0 of three, each of which has given one beat."""
    for node in range(3):
        beat(channel, node)
    beats = Beats(channel, 0, ("a", "b", "c"), clock=clock)
    beats.look()
    return beats


def _pass(beats: Beats, clock: Clock, seconds: float) -> None:
    for _ in range(round(seconds / BEAT_S)):
        clock.now += BEAT_S
        beats.look()


def test_a_silent_node_ends_the_round_unless_it_has_ended() -> None:
    channel, clock = Channel(HashStore(), "round"), Clock()
    beats = _round(channel, clock)
    channel.put("ended/1")
    _pass(beats, clock, 10.0)
    assert not beats.silent and not channel.has("over")
    _pass(beats, clock, 1.0)
    assert beats.silent == {1, 2}
    assert channel.get("over") == "host c (node 2) has not been heard for 10 s"


def test_a_node_that_was_suspended_takes_no_other_for_silent() -> None:
    channel, clock = Channel(HashStore(), "round"), Clock()
    beats = _round(channel, clock)
    _pass(beats, clock, 5.0)
    clock.now += 3600.0
    beats.look()
    assert not beats.silent
    for node in (1, 2):
        beat(channel, node)
    _pass(beats, clock, 10.0)
    assert not beats.silent and not channel.has("over")


def test_a_round_that_is_over_already_keeps_its_reason() -> None:
    channel, clock = Channel(HashStore(), "round"), Clock()
    beats = _round(channel, clock)
    channel.claim("over", "a rank failed")
    _pass(beats, clock, 11.0)
    assert beats.silent == {1, 2} and channel.get("over") == "a rank failed"


def test_clocks_that_differ_are_known_and_waiting_is_no_difference() -> None:
    channel, clock = Channel(HashStore(), "round"), Clock()
    for node, behind_s in enumerate((0.0, 50.0, 0.5)):
        channel.put(f"beat/{node}", time.time() - behind_s)
    beats = Beats(channel, 0, ("a", "b", "c"), clock=clock)
    _pass(beats, clock, 2.0)
    assert 49.0 < beats.ahead_s(1) < 60.0 and beats.ahead_s(2) == beats.ahead_s(0) == 0.0


def test_the_thread_of_a_round_beats_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.launcher.elastic.beats.BEAT_S", 0.01)
    channel = Channel(HashStore(), "round")
    for node in range(2):
        beat(channel, node)
    first, beats = channel.get("beat/0"), Beats(channel, 0, ("a", "b"))
    beats.start()
    end = time.monotonic() + 30
    while channel.get("beat/0") == first and time.monotonic() < end:
        time.sleep(0.01)
    beats.stop()
    assert channel.get("beat/0") != first
