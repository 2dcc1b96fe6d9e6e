"""Updates that begin beside the backward (``super_offload``): no bit differs, and nobody sees one before its step."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.accelerator.native.build import try_load
from deepspeed.accelerator.native.spec import CPU_ADAM
from deepspeed.errors import RankFailedError, UsageError
from deepspeed.optim.rules import AdamBase
from deepspeed.tier.behind import Worker, next_of
from deepspeed.tier.transfer import Transfer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
)
from deepspeed.zero.update.speculative import EarlyUpdate
from tests.dist.test_offload_parity import interrupted
from tests.dist.test_update_behind import behind
from tests.harness.faults import raise_planted
from tests.harness.offload import CASES, CPU, PRECISION, Plan, Variant, differences, started, train
from tests.harness.pool import RankPool
from tests.harness.training import here, train_step

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(try_load(CPU_ADAM) is None, reason="no C++ compiler: no kernel computes it"),
]
EARLY = {**CPU, "super_offload": True}
CASE, STEPS = "wide_accumulation", 5


class Seen:
    """Counts of what has become of the updates that began early."""

    def __init__(self) -> None:
        self.begun = self.taken = self.redone = self.forgotten = 0


@contextlib.contextmanager
def watched(*, delay_s: float = 0.0, finished: bool = True) -> Iterator[Seen]:
    """Inside, updates go on in a thread; with ``finished`` each that begins early has ended before its step."""
    seen, begin, finish, forget = Seen(), EarlyUpdate.__post_init__, EarlyUpdate.finish, EarlyUpdate.forget

    def begins(update: EarlyUpdate) -> None:
        seen.begun += 1
        begin(update)

    def finishes(update: EarlyUpdate, ordinary: Callable[[], Any]) -> Any:
        redone = []
        if finished:
            for _ in range(30_000):
                if update.turn.done():
                    break
                time.sleep(0.001)
        written = finish(update, lambda: (redone.append(1), ordinary())[1])
        seen.redone += len(redone)
        seen.taken += not redone
        return written

    def forgets(update: EarlyUpdate) -> None:
        seen.forgotten += 1
        forget(update)

    changes = {"__post_init__": begins, "finish": finishes, "forget": forgets}
    with mock.patch.multiple(EarlyUpdate, **changes), behind(delay_s):
        yield seen


SEVERAL_UNITS = {"reduce_bucket_size": 5000}  # at every stage


def early_engine(stage: int) -> Any:
    return started(stage, {"offload_optimizer": EARLY, **SEVERAL_UNITS}, **PRECISION["bf16"])


def plainly(engine: Any, case: Any) -> list[float]:
    return [loss for step in range(STEPS) for loss in train_step(engine, case, step)]


Loop = Callable[[Any, Any], list[float]]


def both(stage: int, precision: str, clip: float, loop: Loop = plainly, case: str = CASE, **slow: Any) -> Any:
    """What differs from updates at once, and what was seen of those that began early, ``slow`` as ``watched`` has it.
    Collective.
    """
    config = {**PRECISION[precision], "gradient_clipping": clip, "zero": SEVERAL_UNITS}
    plan = Plan(case, stage, config, loop=loop)
    wanted = train(plan, Variant({"offload_optimizer": CPU}))
    with watched(**slow) as seen:
        found = train(plan, Variant({"offload_optimizer": EARLY}))
    return differences(wanted, found), vars(seen)


@pytest.mark.in_make_test("3-bf16-0.0", "3-fp16-1000.0")
@pytest.mark.parametrize("clip", [0.0, 1000.0])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_not_one_bit_differs_where_the_step_takes_them(
    pool1: RankPool, stage: int, precision: str, clip: float
) -> None:
    ((bad, seen),) = pool1.run(both, stage, precision, clip)
    assert bad == [] and seen["taken"] > 0, seen


@pytest.mark.in_make_test("2-fp16", "3-bf16")
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp16")])
def test_nor_on_two_ranks(pool2: RankPool, stage: int, precision: str) -> None:
    for bad, seen in pool2.run(both, stage, precision, 1000.0):
        assert bad == [] and seen["taken"] > 0, seen


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_none_begins_where_masters_are_the_parameters_that_the_backward_reads(pool1: RankPool, stage: int) -> None:
    """In fp32 on ranks without an accelerator."""
    ((bad, seen),) = pool1.run(both, stage, "fp32", 1000.0)
    assert bad == [] and seen["begun"] == 0, seen


@pytest.mark.in_make_test("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_nor_where_every_step_clips_and_takes_none(pool1: RankPool, stage: int) -> None:
    ((bad, seen),) = pool1.run(both, stage, "bf16", 0.01)
    assert bad == [] and seen["taken"] == seen["redone"] == 0 and seen["forgotten"] > 0, seen


def _looking(engine: Any, case: Any) -> list[float]:
    """States are read, and one is written, between backward and step."""
    seen = []
    for step in range(STEPS):
        for micro in range(case.accumulation):
            (loss,) = case.seeded_loss(engine, here(step, micro))
            engine.backward(loss)
            if micro == case.accumulation - 1 and step > 1:
                weight = engine.module.inp.weight
                slot = safe_get_full_optimizer_state(weight, "exp_avg")
                seen += [float(safe_get_full_fp32_param(weight).sum()), 0.0 if slot is None else float(slot.sum())]
                if step == 3:
                    safe_set_full_fp32_param(weight, torch.full_like(safe_get_full_fp32_param(weight), 0.25))
            engine.step()
    return seen


def _held(engine: Any, case: Any) -> list[float]:
    """A client that has kept the optimizer's dicts puts something there between backward and step."""
    losses, held = [], []
    for step in range(STEPS):
        (loss,) = case.seeded_loss(engine, here(step))
        engine.backward(loss)
        losses.append(float(loss))
        for state in held if step == 3 else ():
            state["step"].fill_(1)
        for state in held if step == 4 else ():
            other = torch.full_like(state["exp_avg"], 0.5)
            while other._version < state["exp_avg"]._version:
                other.mul_(1)
            state["exp_avg"] = other
        engine.step()
        if step == 2:
            held = [*engine.basic_optimizer.state.values()]
    return losses


def _raising(engine: Any, case: Any) -> list[float]:
    """A backward fails when some updates have begun; the batch might not have been."""
    losses = []
    for step in range(STEPS):
        if step == 3:
            handle = engine.module.inp.weight.register_hook(raise_planted)
            (loss,) = case.seeded_loss(engine, here(step))
            with contextlib.suppress(ArithmeticError):
                engine.backward(loss)
            handle.remove()
        losses += train_step(engine, case, step)
    return losses


# What a program does between backward and step otherwise, tests/fuzz draws.
LOOPS: dict[str, tuple[str, Loop]] = {
    "looking": (CASE, _looking),
    "held": ("wide", _held),
    "raising": ("wide", _raising),
    "interrupted": (CASE, interrupted),
}


def looped(name: str, stage: int) -> Any:
    case, loop = LOOPS[name]
    return both(stage, "fp16" if name == "raising" else "bf16", 1000.0, loop, case)


@pytest.mark.in_make_test("looking-3", "held-3", "raising-2", "interrupted-2")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_nor_where_somebody_meddles_before_the_step(pool1: RankPool, name: str, stage: int) -> None:
    ((bad, seen),) = pool1.run(looped, name, stage)
    assert bad == [] and seen["begun"] > 0, seen


def broken(stage: int) -> Any:
    """What differs where the kernel fails in the thread, beside some backwards."""
    with mock.patch.object(AdamBase, "update_beside", raise_planted):
        return both(stage, "bf16", 1000.0)


def test_an_error_in_the_thread_changes_nothing(pool1: RankPool) -> None:
    ((bad, seen),) = pool1.run(broken, 2)
    assert bad == [] and seen["taken"] == 0 < seen["redone"], seen


def _one_raises(engine: Any, case: Any) -> list[float]:
    """The backward of one rank fails when some updates have begun on both."""
    losses = []
    for step in range(STEPS):
        if step in (2, 3):
            handle = engine.module.inp.weight.register_hook(raise_planted) if engine.global_rank else None
            (loss,) = case.seeded_loss(engine, here(step + 100))
            with contextlib.suppress(ArithmeticError, RankFailedError):
                engine.backward(loss)
                raise AssertionError("the error of the other rank is not told")
            if handle is not None:
                handle.remove()
        losses += train_step(engine, case, step)
    return losses


def one_raises(stage: int) -> Any:
    return both(stage, "bf16", 1000.0, _one_raises, "wide")


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_failure_of_one_rank_leaves_the_batch_undone_on_both(pool2: RankPool, stage: int) -> None:
    for bad, seen in pool2.run(one_raises, stage):
        assert bad == [] and seen["begun"] > seen["taken"] > 0, seen


def dropped(stage: int) -> list[str]:
    """What is left of an engine that ends when updates have begun, are slow, and wait for a step."""
    with watched(delay_s=0.05, finished=False) as seen:
        engine, case = early_engine(stage), CASES["wide"]()
        for step in range(2):
            train_step(engine, case, step)
        (loss,) = case.seeded_loss(engine, here(2))
        engine.backward(loss)
        gone = [weakref.ref(thing) for thing in (engine, engine.runtime, engine.runtime.worker)]
        begun = seen.begun
        engine.destroy()
        del engine, loss
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.name == "deepspeed-update"]
    return [str(thing()) for thing in gone if thing() is not None] + threads + ([] if begun else ["none has begun"])


@pytest.mark.in_make_test("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_that_ends_before_the_step_takes_its_thread_along(pool1: RankPool, stage: int) -> None:
    assert pool1.run(dropped, stage) == [[]]


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_nor_where_the_step_comes_in_between(pool1: RankPool, stage: int) -> None:
    """While the thread computes."""
    ((bad, seen),) = pool1.run(both, stage, "bf16", 0.0, delay_s=0.003, finished=False)
    assert bad == [] and seen["begun"] > 0, seen


def local_masters() -> list[bool]:
    """Of what a client has read of every master: whether it still is of that step when the places have changed."""
    case = CASES["wide"]()
    with watched() as seen:
        engine = early_engine(2)
        for step in range(2):
            train_step(engine, case, step)
        read = [safe_get_local_fp32_param(param) for param in engine.module.parameters()]
        copies = [values.clone() for values in read]
        for step in range(2, STEPS):
            train_step(engine, case, step)
        engine.destroy()
    return [seen.taken > 0, all(map(torch.equal, read, copies))]


def test_a_master_that_was_read_shows_no_other_units(pool1: RankPool) -> None:
    assert pool1.run(local_masters) == [[True, True]]


def kept(folder: str) -> list[bool]:
    """Of a save between backward and step: whether it has the states from before the step."""
    case = CASES["wide"]()
    with watched() as seen:
        engine = early_engine(2)
        for step in range(3):
            train_step(engine, case, step)
        weight = engine.module.inp.weight
        before = safe_get_full_fp32_param(weight).clone()
        (loss,) = case.seeded_loss(engine, here(3))
        engine.backward(loss)
        begun = seen.begun
        engine.save_checkpoint(folder)
        engine.step()
        after = safe_get_full_fp32_param(weight).clone()
        engine.load_checkpoint(folder)
        loaded = safe_get_full_fp32_param(weight).clone()
        engine.destroy()
    return [begun > 0, torch.equal(before, loaded), not torch.equal(before, after)]


def test_a_save_before_the_step_has_the_old_states(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(kept, str(tmp_path)) == [[True, True, True]]


def test_a_turn_that_was_never_taken_is_waited_for_when_why_is_forgotten() -> None:
    worker, events = Worker(torch.device("cpu")), []
    turns = [worker.hand_over(raise_planted), worker.hand_over(raise_planted)]
    with pytest.raises(UsageError, match="planted"):
        turns[-1].wait()
    worker.forget()
    with mock.patch.object(type(worker.stream), "wait_event", lambda _, event: events.append(event)):
        for turn in turns:
            turn.wait()
    assert events == []


class _Coming(Transfer):
    def __init__(self, *, here: bool) -> None:
        self._here = here

    def done(self) -> bool:
        return self._here


def test_of_what_has_come_the_first_of_the_forward_is_updated_next() -> None:
    turns = [SimpleNamespace(place=p, after=_Coming(here=h)) for p, h in ((3, True), (2, True), (1, False))]
    assert next_of(turns).place == 2  # type: ignore[arg-type]
    assert next_of([turns[2], SimpleNamespace(place=0, after=_Coming(here=False))]).place == 1  # type: ignore[list-item]
