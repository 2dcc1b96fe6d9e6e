"""The recorded schedule: perfect on repetition, harmless on surprise, one trace per phase."""

import random

from deepspeed.zero.schedule import Schedule


def _record(schedule: Schedule, phase: str, uses: list[int]) -> list[list[int]]:
    """Run one phase; what was foreseen after each use."""
    schedule.begin(phase)
    seen = []
    for unit in uses:
        schedule.use(unit)
        seen.append(schedule.upcoming())
    schedule.end()
    return seen


def test_the_first_pass_foresees_nothing_and_the_second_everything() -> None:
    schedule = Schedule()
    uses = [0, 1, 2, 2, 1, 0]
    assert _record(schedule, "train", uses) == [[]] * 6
    assert _record(schedule, "train", uses) == [uses[i:] for i in range(1, 7)]
    assert (schedule.hits, schedule.uses) == (6, 12)


def test_phases_keep_traces_of_their_own() -> None:
    schedule = Schedule()
    for _ in range(3):
        train = _record(schedule, "train", [0, 1, 1, 0])
        evaluation = _record(schedule, "eval", [2, 3])
    assert train == [[1, 1, 0], [1, 0], [0], []]
    assert evaluation == [[3], []]


def test_an_eval_inside_a_train_phase_suspends_it() -> None:
    schedule = Schedule()
    for _ in range(2):
        schedule.begin("train")
        schedule.use(0)
        _record(schedule, "eval", [5, 6])
        assert schedule.phase == "train"
        schedule.use(1)
        schedule.use(0)
        schedule.end()
    schedule.begin("train")
    schedule.use(0)
    assert schedule.upcoming() == [1, 0]


def test_a_surprise_resynchronises_or_falls_silent() -> None:
    schedule = Schedule()
    _record(schedule, "train", [0, 1, 2, 3, 4])
    assert _record(schedule, "train", [0, 2, 3]) == [[1, 2, 3, 4], [3, 4], [4]]
    _record(schedule, "other", [0, 1, 2])
    assert _record(schedule, "other", [0, 9, 1]) == [[1, 2], [], []], "silent until the phase ends"
    assert _record(schedule, "other", [0, 9, 1]) == [[9, 1], [1], []], "and learnt from"


def test_a_surprise_in_the_backward_half_stays_in_it() -> None:
    schedule = Schedule()
    _record(schedule, "train", [0, 1, 2, 2, 1, 0])
    assert _record(schedule, "train", [0, 1, 2, 1])[-1] == [0], "unit 1 was used in the forward half too, which is over"


def test_an_abandoned_phase_teaches_nothing() -> None:
    schedule = Schedule()
    _record(schedule, "train", [0, 1, 2])
    schedule.begin("train")
    schedule.begin("eval")
    schedule.use(2)
    schedule.abandon()
    assert schedule.phase is None
    assert _record(schedule, "train", [0, 1, 2])[0] == [1, 2]


def test_outside_a_phase_nothing_happens() -> None:
    schedule = Schedule()
    schedule.use(3)
    schedule.end()
    assert schedule.upcoming() == [] and schedule.uses == 0 and schedule.phase is None


def test_an_empty_phase_keeps_the_trace() -> None:
    schedule = Schedule()
    _record(schedule, "train", [0, 1])
    _record(schedule, "train", [])
    assert _record(schedule, "train", [0, 1])[0] == [1]


def test_ahead_fills_a_window_with_distinct_units() -> None:
    schedule = Schedule()
    uses = [0, 1, 1, 2, 0, 3]
    _record(schedule, "train", uses)
    schedule.begin("train")
    schedule.use(0)
    sizes = [10, 20, 30, 5]
    ahead = lambda first, window: schedule.ahead(sizes, first_numel=first, window_numel=window)  # noqa: E731
    assert ahead(100, 100) == [1, 2, 0, 3]
    assert ahead(100, 50) == [1, 2]
    assert ahead(20, 0) == [1], "one large unit may come alone"
    assert ahead(19, 1000) == []


def test_reuse_distance_counts_what_lies_between() -> None:
    schedule = Schedule()
    _record(schedule, "train", [0, 1, 2, 0])
    schedule.begin("train")
    schedule.use(0)
    assert schedule.reuse_distance(0, [10, 20, 30]) == 50
    assert schedule.reuse_distance(1, [10, 20, 30]) == 0
    assert schedule.reuse_distance(7, [10, 20, 30]) is None


def test_random_walks_never_fail_and_forecasts_only_move_on_along_the_trace() -> None:
    """What is foreseen is what the trace has behind this very use, and nothing that an earlier forecast of the pass had left behind."""
    draw = random.Random(0)
    schedule = Schedule()
    trace: list[int] = []
    for _ in range(200):
        uses = [draw.randrange(5) for _ in range(draw.randrange(9))]
        left = len(trace)
        for use, foreseen in zip(uses, _record(schedule, "train", uses), strict=True):
            assert not foreseen or (len(foreseen) < left and [use, *foreseen] == trace[-1 - len(foreseen) :])
            left = len(foreseen)
        trace = uses or trace
