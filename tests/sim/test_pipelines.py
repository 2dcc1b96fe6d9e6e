"""Every schedule on the simulated device: nothing is without order, and what the stages wait for and keep is what the
formulas of docs/parallelism.md say.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deepspeed.pipe.orders import Program, Timed, bubble, chunks_and_style, most_alive, timeline
from deepspeed.pipe.torch_pipelining import make_order
from deepspeed.tools.simulate.costs import MESSAGES
from deepspeed.tools.simulate.pipeline.run import PipelineOutcome, simulate_pipeline
from deepspeed.tools.verify.ranks import RankPool
from tests.sim.pipelines import LAYERS, ROW, WEIGHT, equal_parts, job, without_waits

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved", "breadth_first", "zero_bubble", "zbv", "dualpipev")
CLOSE = 0.05


def chunks_of(schedule: str) -> tuple[int, str]:
    return chunks_and_style(schedule, 2 if schedule in ("interleaved", "breadth_first") else 1)


def idle_of(schedule: str, stages: int, costs: dict[str, float]) -> float:
    """Seconds that each stage waits. ``costs``: of a chunk, forward F, backward B = I + W."""
    f, i, w = costs["F"], costs["I"], costs["W"]
    if schedule in ("gpipe", "1f1b", "eager_1f1b"):  # Huang et al. 2019, Narayanan et al. 2019
        return (stages - 1) * (f + i + w)
    if schedule in ("interleaved", "breadth_first"):  # Narayanan et al. 2021, Lamy-Poirier 2022: of one chunk alone
        return (stages - 1) * (f + i + w)
    return (stages - 1) * (
        i + max(0.0, f - w)
    )  # Qi et al. 2023 and 2024, DeepSeek-AI 2024 without its half of the ranks


def kept_of(schedule: str, stages: int, micros: int, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at most, in chunks."""
    match schedule:
        case "gpipe":
            return micros
        case "1f1b":
            return min(stages - stage, micros)
        case "eager_1f1b":
            return min(2 * (stages - stage) - 1, micros)
        case "interleaved":
            return 2 * (stages - stage - 1) + stages + 1
        case "breadth_first":
            return 2 * micros
        case "zero_bubble":
            return stages
        case "zbv":
            return 2 * stages
    return 2 * stages + 1


def simulated(pool: RankPool, schedule: str, stages: int, micros: int) -> PipelineOutcome:
    chunks, style = chunks_of(schedule)
    make = functools.partial(equal_parts, stages, chunks, style)
    return simulate_pipeline(make, job(schedule, stages, micros), pool=pool)


def costs_of(whole: PipelineOutcome, stage: int) -> dict[str, float]:
    """What an action of each kind took; of a backward that is always whole, its halves are taken to be equal."""
    times: dict[str, list[float]] = {}
    for one in whole.actions[stage]:
        times.setdefault(one.action.op, []).append(one.end - one.start)
    means = {op: sum(each) / len(each) for op, each in times.items()}
    half = means.get("B", 0.0) / 2
    return {"I": half, "W": half, "B": 2 * half} | means


def peak_of(order: Program, stage: int, states: int) -> float:
    """Bytes: states, fp32 sums of the gradients, what layers keep of all micro-batches under way, and work in hand."""
    rows = most = 0
    for op, chunk, _ in order.actions[stage]:
        # inputs of the layers, of which the first takes none, and the output, until it has its gradient; for a chunk on
        # the same rank that is its input
        kept = LAYERS - (chunk == 0) + (order.homes[chunk + 1 :][:1] not in ((), (stage,)))
        # inputs, and the gradients of all outputs (the loss gives one that needs no memory), for those of the weights
        waiting = 2 * LAYERS - (chunk + 1 == order.chunks) if chunk else kept + 1
        rows += {"F": kept, "B": -kept, "I": waiting - kept, "W": -waiting}[op]
        most = max(most, rows)
    weights = LAYERS * order.chunks // order.ranks * WEIGHT
    # one message received early from each neighbour, one of each kind on its way to it, and what is between two layers;
    # the gradient of one weight
    kinds = {
        (order.homes[c + step], step)
        for c in range(order.chunks)
        for step in (1, -1)
        if order.homes[c] == stage and 0 <= c + step < order.chunks
    }
    sent = {(rank, step) for rank, step in kinds if rank != stage}
    under_way = 1 + len({rank for rank, _ in sent}) + len(sent)
    if order.name == "eager_1f1b" and stage:  # whose messages tell of the arrival of a gradient one micro-batch later
        under_way += 1
    return states + 4 * weights + (most + under_way) * ROW + 2 * WEIGHT


def check(whole: PipelineOutcome, schedule: str, stages: int, micros: int, *, memory: float = CLOSE) -> None:
    """Order, bubble and memory of every stage; ``memory``: how close the peaks are."""
    chunks, _ = chunks_of(schedule)
    order = make_order(schedule, stages, micros, chunks_per_rank=chunks)
    costs = costs_of(whole, 1)
    planned = timeline(order, costs)
    for stage, outcome in enumerate(whole.steps):
        assert not outcome.unordered, "\n".join(map(str, outcome.unordered))
        idle_inputs = sum(op == "I" and chunk == 0 for op, chunk, _ in order.actions[stage])  # which nobody wants
        assert len(whole.actions[stage]) + idle_inputs == len(order.actions[stage])
        assert whole.bubble(stage) == pytest.approx(idle_of(schedule, stages, costs), rel=CLOSE)
        assert most_alive(order.actions[stage]) == kept_of(schedule, stages, micros, stage)
        assert outcome.peak == pytest.approx(peak_of(order, stage, outcome.states), rel=memory)
    shares = [whole.bubble(stage) / whole.window for stage in range(stages)]
    assert sum(shares) / stages == pytest.approx(bubble(planned), rel=CLOSE)


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4, time_limit=300) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    with RankPool(8, time_limit=900) as ranks:
        yield ranks


@pytest.mark.in_make_test("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_four_stages_wait_and_keep_what_the_formulas_say(four: RankPool, schedule: str) -> None:
    """Little is kept, so that a message more or less on its way is a tenth of the peak."""
    check(simulated(four, schedule, 4, 8), schedule, 4, 8, memory=CLOSE)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_eight_stages_wait_and_keep_what_the_formulas_say(eight: RankPool, schedule: str) -> None:
    check(simulated(eight, schedule, 8, 32), schedule, 8, 32)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev"])
def test_every_access_is_ordered_at_every_level(four: RankPool, schedule: str, level: int) -> None:
    chunks, style = chunks_of(schedule)
    make = functools.partial(equal_parts, 4, chunks, style)
    for outcome in simulate_pipeline(make, job(schedule, 4, 8, level=level), pool=four).steps:
        assert not outcome.unordered, "\n".join(map(str, outcome.unordered))


def beside(messages: list[tuple[float, float]], actions: list[Timed]) -> float:
    """The share of the time of a stage's ``messages`` in which it computes, of those that leave before it has ended."""
    early = [(start, end) for start, end in messages if start < actions[-1].end]
    both = sum(max(0.0, min(e, one.end) - max(s, one.start)) for s, e in early for one in actions)
    return both / sum(end - start for start, end in early)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b"])
def test_messages_travel_beside_kernels(four: RankPool, schedule: str) -> None:
    """Each takes half as long as a forward, and a step as much longer as its program makes inevitable. A stage computes
    meanwhile as much as if every message left when its value was there.
    """
    plain, forward = job(schedule, 4, 8), costs_of(simulated(four, schedule, 4, 8), 1)["F"]
    slow = replace(
        plain, machine=replace(plain.machine, values=plain.machine.values | {"node_rate": 2 * ROW / forward})
    )
    whole = simulate_pipeline(functools.partial(equal_parts, 4, 1, "loop"), slow, pool=four)
    costs, order = costs_of(whole, 1), make_order(schedule, 4, 8)
    spans = timeline(order, costs, hop=forward / 2)
    assert whole.window == pytest.approx(max(one.end for row in spans for one in row), rel=CLOSE)
    for stage, outcome in enumerate(whole.steps):
        assert not outcome.unordered, "\n".join(map(str, outcome.unordered))
        made = [(m.start, m.start + m.seconds) for m in outcome.spans if m.name in MESSAGES]
        wanted = [
            (one.end, one.end + forward / 2)
            for home, row in enumerate(spans)
            for one in row
            if (target := order.sends(one.action)) is not None and stage in (home, target)
        ]
        assert beside(made, whole.actions[stage]) == pytest.approx(beside(wanted, spans[stage]), abs=0.1)


@pytest.mark.exhaustive
def test_a_stage_that_does_not_wait_for_its_messages_is_seen() -> None:
    with RankPool(2, time_limit=300) as ranks:
        whole = simulate_pipeline(functools.partial(without_waits, 2), job("1f1b", 2, 4), pool=ranks)
    for outcome in whole.steps:
        assert any("recv" in str(problem) for problem in outcome.unordered), outcome.unordered
