"""The recorded schedule: perfect on repetition, harmless on surprise, one trace per phase."""

import random

from deepspeed.zero.schedule import IntervalPredictor, Schedule


def _record(schedule: Schedule, phase: str, uses: list[int]) -> list[list[int]]:
    """Run one phase; what was foreseen after each use."""
    schedule.begin(phase)
    seen = []
    for unit in uses:
        schedule.use(unit)
        seen.append(list(schedule.upcoming()))
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
    assert list(schedule.upcoming()) == [1, 0]


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
    assert list(schedule.upcoming()) == [] and schedule.uses == 0 and schedule.phase is None


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
    assert schedule.ahead(sizes, window_numel=100) == [1, 2, 0, 3]
    assert schedule.ahead(sizes, window_numel=50) == [1, 2]
    assert schedule.ahead(sizes, window_numel=100, most=3) == [1, 2, 0]
    assert schedule.ahead(sizes, window_numel=100, besides=(0, 1)) == [2, 3], (
        "what is here is neither named nor counted"
    )


def test_the_next_unit_comes_early_however_large_it_is() -> None:
    """A block of width 2048 has more elements than the default prefetch_bucket_size: then nothing was ever fetched
    early.
    """
    schedule = Schedule()
    block = 12 * 2048**2
    _record(schedule, "train", [*range(8), *range(7, -1, -1)])
    schedule.begin("train")
    for unit in range(7):
        schedule.use(unit)
        assert schedule.ahead([block] * 8, window_numel=50_000_000, besides=(unit,)) == [unit + 1]


def test_needed_within_counts_what_lies_between() -> None:
    schedule = Schedule()
    _record(schedule, "train", [0, 1, 2, 0])
    schedule.begin("train")
    schedule.use(0)
    assert schedule.needed_within(0, [10, 20, 30], 50) and not schedule.needed_within(0, [10, 20, 30], 49)
    assert schedule.needed_within(1, [10, 20, 30], 0)
    assert not schedule.needed_within(7, [10, 20, 30], 1000)


def test_a_gather_starts_at_the_first_use_inside_a_block() -> None:
    """Blocks of several modules need their unit several times in a row: those uses must not stand for the next unit."""
    blocks, uses_each = 32, 6
    trace = [block for block in [*range(blocks), *range(blocks - 1, -1, -1)] for _ in range(uses_each)]
    schedule = Schedule()
    _record(schedule, "train", trace)
    schedule.begin("train")
    early: dict[int, int] = {}
    here = {0}
    for position, unit in enumerate(trace[: blocks * uses_each]):
        schedule.use(unit)
        assert unit in here
        ahead = schedule.ahead([100] * blocks, window_numel=100, besides=(unit,))
        if ahead and ahead[0] not in here:
            early.setdefault(ahead[0], position)
            here.add(ahead[0])
    assert early == {block: (block - 1) * uses_each for block in range(1, blocks)}


class _Counted(list[int]):
    """A trace that counts how often it is read."""

    reads = 0

    def __getitem__(self, index: object) -> int:  # type: ignore[override]
        assert isinstance(index, int), "the rest of the trace is copied"
        _Counted.reads += 1
        return super().__getitem__(index)


def test_a_pass_reads_its_trace_a_few_times_whatever_its_length() -> None:
    for length in (100, 3200):
        schedule = Schedule()
        uses = [*range(length), *range(length - 1, -1, -1)]
        _record(schedule, "train", uses)
        schedule._phases["train"].trace = _Counted(uses)
        schedule.begin("train")
        _Counted.reads = 0
        for unit in uses:
            schedule.use(unit)
            schedule.ahead([10] * length, window_numel=25, besides=(unit,))
            schedule.needed_within(unit, [10] * length, 0)
        assert _Counted.reads < 10 * len(uses)


def _predicted(order: str, *, wrong: int = 0) -> str:
    """What an ``IntervalPredictor`` predicts before each of the intervals in ``order``; "." is nothing."""
    predictor = IntervalPredictor()
    for _ in range(wrong):
        predictor.close(None, predicted=True)
    seen = ""
    for interval in order:
        foreseen = predictor.forecast()
        seen += foreseen[0] if foreseen else "."
        predictor.close((interval,), predicted=bool(foreseen))
    return seen


def test_what_repeats_is_predicted() -> None:
    assert _predicted("itttttt") == "....ttt"
    assert _predicted("tetetetete") == "....tetete"
    assert _predicted("teeteeteetee")[-6:] == "teetee"
    assert _predicted("aaab" * 5)[-8:] == "aaabaaab", "an accumulation window"
    assert _predicted("abcdefgh") == "." * 8


def test_wrong_predictions_make_the_predictor_cautious() -> None:
    assert _predicted("t" * 12, wrong=2) == "." * 9 + "ttt"


def test_an_interval_that_is_not_learnt_breaks_the_chain() -> None:
    predictor = IntervalPredictor()
    for interval in (("t",), ("t",), None, ("t",), ("t",)):
        predictor.close(interval, predicted=False)
        assert predictor.forecast() == ()


def test_random_walks_never_fail_and_forecasts_only_move_on_along_the_trace() -> None:
    """What is foreseen is what the trace has behind this very use, and nothing that an earlier forecast of the pass had
    left behind.
    """
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
