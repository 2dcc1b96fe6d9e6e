"""One rank raises: the others hear its name and its error instead of waiting for it, and all go on with the next batch
as if this one had not happened.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import DivergenceError, RankFailedError, UsageError
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.zero.sync import failures
from deepspeed.zero.unit import Unit
from tests.dist.test_invariant_i8_errors import trained
from tests.harness.cases import case_named
from tests.harness.faults import Faults, InjectedFault, no_room
from tests.harness.lockstep import equal, not_at_rest
from tests.harness.logs import logged
from tests.harness.patience import too_long
from tests.harness.pool import PatientPool, RankPool
from tests.harness.training import STAGES, here, make_config, start, train_step

pytestmark = pytest.mark.timeout(120)
ZERO = {"param_persistence_threshold": 0}
FAILS = 1  # the rank that does
STEADY = 7  # equal steps, after which the ranks no longer send messages in between
LIMIT = 60.0


class Outcome(NamedTuple):
    """What a rank has raised, as ``kind: text``, and whether late; whether training went on as if nothing had been."""

    error: str
    late: bool
    same: bool
    restless: list[str]


def _out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("injected: out of memory")


@contextlib.contextmanager
def replaced(owner: Any, name: str, count: int, raising: Callable[..., Any] = _out_of_memory) -> Iterator[None]:
    """The ``count``-th call of a method on this rank raises."""
    real, left = getattr(owner, name), [count]

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return raising() if left[0] == 0 else real(*args, **kwargs)

    with patch.object(owner, name, call):
        yield


def fault(place: str, engine: Any) -> contextlib.AbstractContextManager[Any]:
    """What goes wrong once on the rank that fails."""
    what, _, where = place.partition(":")
    if what == "gather":
        return no_room(int(where))
    if what == "reduce":
        return replaced(engine.runtime.gradients, "_rest", int(where))
    if what == "pack":
        return replaced(engine.runtime.gradients, "pack", int(where))
    if what == "norm":
        return replaced(Unit, "gradient_square", 2)
    if what == "collapse":
        return replaced(engine.runtime.gradients, "collapse", 1)
    if what == "optimizer":
        return replaced(engine.basic_optimizer, "step", 1)
    faults = Faults(engine.module, rank=dist.get_rank())
    faults.raise_in(where, phase=what, step=0, rank=dist.get_rank())
    return faults


def one_fails(place: str, config: dict[str, Any], before: int, fails: int = FAILS) -> Outcome:
    """``before`` good steps, one in which rank ``fails`` does, three good ones; against a run without that one."""
    case = case_named("plain")
    raised, late, restless = "", False, list[str]()

    def fail(engine: Any, step: int, micro: int) -> None:
        nonlocal raised, late
        if step != before:
            return
        mine = fault(place, engine) if dist.get_rank() == fails else contextlib.nullcontext()
        started = time.monotonic()
        try:
            with mine:
                train_step(engine, case, 90)
        except (RankFailedError, InjectedFault, torch.OutOfMemoryError) as error:
            raised = f"{type(error).__name__}: {error}"
        late = too_long(started, 20.0)
        restless.extend(not_at_rest(engine))

    steps = before + 3
    same = equal(trained(case, config, steps=steps), trained(case, config, fail, steps=steps))
    return Outcome(raised, late, same, restless)


PLACES = ["gather:1", "gather:3", "gather:6", "gather:8", "forward:inp", "forward:layers.1", "forward:head"]
PLACES += ["backward:inp", "backward:layers.1", "backward:head", "pack:1", "pack:9", "reduce:1", "reduce:2"]
PLACES += ["norm", "collapse"]


def check(outcomes: list[Outcome], place: str, fails: int = FAILS) -> None:
    """The failing rank raises what happened, the others its name and that, soon; all go on."""
    memory = place.partition(":")[0] not in ("forward", "backward")
    cause = "injected: out of memory" if memory else "injected fault"
    for rank, outcome in enumerate(outcomes):
        if rank == fails:
            assert outcome.error.startswith("OutOfMemoryError: injected" if memory else "InjectedFault: "), outcome
        else:
            assert outcome.error.startswith("RankOutOfMemoryError" if memory else "RankFailedError"), outcome
            assert f"rank {fails} failed" in outcome.error and cause in outcome.error, outcome
        assert not outcome.late, outcome
        assert outcome.same and outcome.restless == [], outcome


# stage, place, good steps before: by message, by prediction
MATRIX = [(s, p, b) for s in STAGES for p in PLACES for b in (0, STEADY) if s == 3 or not p.startswith("gather")]


@pytest.mark.in_make_test(
    *("3-gather:3-0", f"3-gather:8-{STEADY}", f"3-forward:layers.1-{STEADY}", f"0-backward:layers.1-{STEADY}"),
    *(f"2-reduce:2-{STEADY}", f"1-norm-{STEADY}", "3-collapse-0"),
)
@pytest.mark.parametrize(("stage", "place", "before"), MATRIX)
def test_the_others_hear_who_failed_and_all_go_on(pool2: RankPool, stage: int, place: str, before: int) -> None:
    check(pool2.run(one_fails, place, make_config(stage, zero=ZERO), before, time_limit=LIMIT), place)


TIERS = {
    "optimizer_on_host": {"offload_optimizer": {"device": "cpu"}},
    "all_on_host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "all_on_a_drive": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}


def _offloaded(tiers: str, folder: Any) -> dict[str, Any]:
    zero = {key: {**block} for key, block in TIERS[tiers].items()}
    for block in zero.values():
        if block["device"] == "nvme":
            block["nvme_path"] = str(folder)
    return make_config(3, zero={**ZERO, **zero})


ON_TIERS = [
    (t, p, b)
    for t in TIERS
    for p in ("gather:3", "gather:8", "forward:layers.1", "backward:layers.1", "reduce:2", "norm")
    for b in (0, STEADY)
]


@pytest.mark.in_make_test("all_on_a_drive-gather:8-0", "all_on_host-reduce:2-0")
@pytest.mark.parametrize(("tiers", "place", "before"), ON_TIERS)
def test_wherever_the_states_rest(pool2: RankPool, tmp_path: Any, tiers: str, place: str, before: int) -> None:
    check(pool2.run(one_fails, place, _offloaded(tiers, tmp_path), before, time_limit=LIMIT), place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fails", [0, 2])
@pytest.mark.parametrize("place", ["gather:3", "forward:layers.1", "backward:inp", "reduce:1", "norm"])
def test_of_three_ranks(pool3: RankPool, place: str, fails: int) -> None:
    check(pool3.run(one_fails, place, make_config(3, zero=ZERO), STEADY, fails, time_limit=LIMIT), place, fails)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["gather:3", "forward:layers.1", "backward:inp", "norm"])
@pytest.mark.parametrize("zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=str)
def test_of_ranks_on_two_axes(pool4: RankPool, zero: dict[str, Any], place: str) -> None:
    check(pool4.run(one_fails, place, make_config(3, zero={**ZERO, **zero}), STEADY, time_limit=LIMIT), place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", [0, STEADY], ids=["by_message", "by_prediction"])
@pytest.mark.parametrize("place", ["gather:3", "forward:layers.1", "backward:layers.1", "norm"])
def test_where_divergence_is_an_error(pool2: RankPool, place: str, before: int) -> None:
    config = make_config(3, zero={**ZERO, "divergence": "error"})
    check(pool2.run(one_fails, place, config, before, time_limit=LIMIT), place)


def failed_window(stage: int, place: str, before: int) -> tuple[bool, list[int], list[str]]:
    """Windows of three micro-batches, in the second of which one rank fails; everyone goes on where its engine says.

    Are the weights those without a failure; where each rank went on; what it raised.
    """
    case = case_named("plain", accumulation=3)
    weights, at, raised = [], [], []
    for attempt in range(2):
        engine = start(case.build(), make_config(stage, zero=ZERO, gradient_accumulation_steps=3))
        while engine.global_steps < before + 2:
            step, micro = engine.global_steps, engine.micro_steps % 3
            now = attempt and not raised and (step, micro) == (before, 1)
            mine = fault(place, engine) if now and dist.get_rank() == FAILS else contextlib.nullcontext()
            try:
                with mine:
                    engine.backward(case.seeded_loss(engine, here(step, micro))[0])
                    engine.step()
            except (RankFailedError, InjectedFault, torch.OutOfMemoryError) as error:
                raised.append(type(error).__name__)
                at.append(engine.micro_steps % 3)
        weights.append(full_parameters(engine.module))
        engine.destroy()
    return equal(*weights), at, raised


WINDOWS = [
    (s, p, b)
    for s in STAGES
    for p in ("forward:inp", "forward:head", "backward:layers.1", "pack:3", "gather:3")
    for b in (0, 3)
    if s == 3 or p != "gather:3"
]


@pytest.mark.in_make_test("1-forward:head-0", "3-forward:head-3", "2-pack:3-3")
@pytest.mark.parametrize(("stage", "place", "before"), WINDOWS)
def test_all_ranks_go_on_at_the_same_place_of_the_window(pool2: RankPool, stage: int, place: str, before: int) -> None:
    (same, at, _), (other, elsewhere, _) = pool2.run(failed_window, stage, place, before, time_limit=LIMIT)
    assert same and other
    assert at == elsewhere and len(at) == 1


def failed_update(stage: int) -> tuple[str, str]:
    """One rank's optimizer raises after the others have updated; what that and the next batch raise."""
    case = case_named("plain")
    engine = start(case.build(), make_config(stage, zero=ZERO))
    errors = []
    with fault("optimizer", engine) if dist.get_rank() == FAILS else contextlib.nullcontext():
        for step in range(2):
            try:
                train_step(engine, case, step)
            except (RankFailedError, UsageError, torch.OutOfMemoryError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    with pytest.raises(UsageError, match="parts of two states"):
        train_step(engine, case, 3)
    engine.destroy()
    return errors[0], errors[-1]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.exhaustive), 1, 3])
def test_a_step_that_some_have_taken_and_others_not_is_named(pool2: RankPool, stage: int) -> None:
    (others, _), (mine, after) = pool2.run(failed_update, stage, time_limit=LIMIT)
    assert others.startswith("RankOutOfMemoryError: rank 1 failed") and "load a checkpoint" in others
    assert mine == "OutOfMemoryError: injected: out of memory"
    assert "parts of two states" in after and "load a checkpoint" in after


def over_a_group_of_its_own(config: dict[str, Any]) -> Any:
    """An engine whose data ways are all ranks, over a group that a test may break."""
    group = dist.new_group(list(range(dist.get_world_size())))
    return start(case_named("plain").build(), config, mpu=SimpleNamespace(get_data_parallel_group=lambda: group))


def no_memory_for_anything(before: int) -> tuple[str, str]:
    """A rank can gather nothing any more, not even as a dummy; what it and the others raise, also at the next batch."""
    case = case_named("plain")
    engine = over_a_group_of_its_own(make_config(3, zero=ZERO))
    for step in range(before):
        train_step(engine, case, step)
    errors = []
    if dist.get_rank() == FAILS:
        Unit.fetch = _out_of_memory  # type: ignore[method-assign]
    for step in (90, 91):
        try:
            train_step(engine, case, step)
        except (RankFailedError, UsageError, torch.OutOfMemoryError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors[0], errors[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", [1, STEADY], ids=["by_message", "by_prediction"])
def test_a_rank_that_cannot_keep_its_word_is_named_too(pool2: RankPool, before: int) -> None:
    (others, next_), (mine, after) = pool2.run(no_memory_for_anything, before, time_limit=LIMIT)
    assert others.startswith("RankFailedError: rank 1 failed: OutOfMemoryError: injected"), others
    assert mine == "OutOfMemoryError: injected: out of memory"
    assert "Start the job again" in next_ and "Start the job again" in after
    pool2.close(at_once=True)  # the ranks' engines wait for each other


def without_messages(place: str, *, alone: bool) -> tuple[list[str], bool]:
    """``assume_none``: what a batch in which one rank or all fail raises, and the next one; whether that went well."""
    case = case_named("plain")
    engine = over_a_group_of_its_own(make_config(3, zero={**ZERO, "divergence": "assume_none"}))
    train_step(engine, case, 0)
    errors = []
    for step in (90, 91):
        wrong = step == 90 and (not alone or dist.get_rank() == FAILS)
        with fault(place, engine) if wrong else contextlib.nullcontext():
            try:
                train_step(engine, case, step)
            except (RankFailedError, UsageError, InjectedFault, torch.OutOfMemoryError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    at_rest = not_at_rest(engine) == []
    if not alone:
        engine.destroy()
    return errors, at_rest


@pytest.mark.parametrize("place", ["gather:3", "forward:layers.1", "backward:inp"])
def test_without_messages_ranks_that_all_skip_a_batch_go_on(pool2: RankPool, place: str) -> None:
    for errors, at_rest in pool2.run(without_messages, place, alone=False, time_limit=LIMIT):
        assert len(errors) == 1 and "injected" in errors[0], errors
        assert at_rest


@pytest.mark.exhaustive
def test_without_messages_a_rank_that_skips_alone_is_refused_and_named(pool2: RankPool) -> None:
    (others, _), (mine, _) = pool2.run(without_messages, "forward:layers.1", alone=True, time_limit=LIMIT)
    assert mine[0].startswith("InjectedFault: ") and "failed alone" in mine[1] and "'tolerate'" in mine[1], mine
    assert others[0].startswith("RankFailedError: rank 1 failed: InjectedFault"), others
    pool2.close(at_once=True)  # the ranks' engines wait for each other


def _takes_one_micro_batch_more(stage: int) -> tuple[str, list[str]]:
    """On one rank, where by prediction all step; what each rank raises, and the errors that it logs."""
    case = case_named("plain")
    with patch.multiple(failures, _LOUD_AFTER_S=0.2, _DOUBT_S=1.0), logged(logging.ERROR) as lines:
        engine = start(case.build(), make_config(stage, zero=ZERO))
        try:
            for step in range(STEADY + 3):
                for _ in range(2 if step == STEADY and dist.get_rank() == FAILS else 1):
                    engine.backward(case.seeded_loss(engine, here(step))[0])
                engine.step()
        except (DivergenceError, RankFailedError) as error:
            with pytest.raises(UsageError, match="it cannot go on"):
                case.seeded_loss(engine, here(0))
            return f"{type(error).__name__}: {error}", lines
        finally:
            with contextlib.suppress(RuntimeError):  # its groups are closed
                engine.destroy()
    return "", lines


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_micro_batch_that_only_one_rank_takes_where_all_step_by_prediction_ends_in_an_error_that_names_it(
    stage: int,
) -> None:
    """No message reaches ranks that wait in the step, or in what follows it."""
    with PatientPool(2, time_limit=LIMIT) as ranks:
        (waits, _), (asks, said) = ranks.run(_takes_one_micro_batch_more, stage)
    assert waits.startswith(f"RankFailedError: rank {FAILS} failed: step {STEADY}"), waits
    assert asks.startswith(f"DivergenceError: step {STEADY}") and "as many micro-batches a step" in asks
    assert any("does what the others may not do" in line and "waits for the others" in line for line in said), said
