"""The thread that updates behind the program is on the program's device before it asks anything of it: what a thread
that has chosen no device asks makes a context on device 0, half a gigabyte of every rank's.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from deepspeed.accelerator.device import NullEvent, NullStream, set_accelerator
from deepspeed.comm.collectives import Collective
from deepspeed.config import load_config
from deepspeed.errors import UsageError
from deepspeed.tier.behind import Worker
from deepspeed.tier.store import TierStore
from deepspeed.tier.transfer import ARRIVED, PendingWork, Several, Transfer
from deepspeed.zero.memory.fit import UnitSize, Widths, memory_plan
from deepspeed.zero.plan import AT_ONCE, StateKind, Tier, every_so_many, make_plan
from deepspeed.zero.update.delayed import DelayedSettings
from deepspeed.zero.update.registry import settings_of
from deepspeed.zero.update.staged import Rates, StagedSettings, slowest
from tests.harness.devices import TwoDevices


class _PerThread(TwoDevices):
    """As the drivers have it: every thread begins on device 0, and chooses for itself."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    def current_device(self) -> int:
        return getattr(self._of_thread, "index", 0)

    def set_device(self, device_index: int) -> None:
        super().set_device(device_index)
        self._of_thread.index = device_index

    @contextlib.contextmanager
    def device(self, device_index: Any = None) -> Iterator[None]:
        before = self.current_device()
        self._of_thread.index = device_index
        yield
        self._of_thread.index = before

    def Event(self, **_: Any) -> NullEvent:
        return NullEvent()

    def urgent_stream(self) -> NullStream:
        return NullStream()

    def current_stream(self, _: Any = None) -> NullStream:
        return NullStream()

    def stream(self, _: Any) -> Any:
        return contextlib.nullcontext()


class _Data(Transfer):
    """Says on which device it was asked whether it has come."""

    def __init__(self, accelerator: _PerThread) -> None:
        self.nbytes, self.accelerator, self.asked = 0, accelerator, list[tuple[str, int]]()

    def wait(self) -> None:
        """It has come."""

    def done(self) -> bool:
        self.asked.append((threading.current_thread().name, self.accelerator.current_device()))
        return True


def test_the_thread_of_updates_is_on_its_device_before_it_asks_for_data() -> None:
    accelerator = _PerThread()
    set_accelerator(accelerator)
    try:
        accelerator.set_device(1)
        data, worker = _Data(accelerator), Worker(torch.device("cuda", 1))
        for _ in range(2):  # what a turn puts back, it puts back to that, too
            worker.hand_over(lambda: ARRIVED, after=data).wait()
        worker.forget()
    finally:
        set_accelerator(None)
    assert data.asked and set(data.asked) == {("deepspeed-update", 1)}


def test_of_the_cpu_there_is_nothing_to_choose() -> None:
    worker, took = Worker(torch.device("cpu")), list[str]()

    def call() -> Transfer:
        took.append(threading.current_thread().name)
        return ARRIVED

    worker.hand_over(call).wait()
    worker.forget()
    assert took == ["deepspeed-update"]


class _Gate(NullEvent):
    """An event whose record takes until it is let through; ``Event()`` of the accelerator below makes nothing else."""

    closed = threading.Event()
    reached = threading.Event()

    def record(self, stream: Any = None) -> None:
        if threading.current_thread().name == "deepspeed-update":
            _Gate.reached.set()
            assert _Gate.closed.wait(30)


class _WithGates(_PerThread):
    def Event(self, **_: Any) -> NullEvent:
        return _Gate()


class _Held:
    """What a call keeps alive."""


def test_a_turn_has_ended_when_its_call_has_and_not_before() -> None:
    """A real thread, held up in the call: whoever asks is told no, and whoever waits goes on waiting."""
    worker, begun, gate, order = Worker(torch.device("cpu")), threading.Event(), threading.Event(), list[str]()

    def call() -> Transfer:
        begun.set()
        assert gate.wait(30)
        order.append("the call has ended")
        return ARRIVED

    turn = worker.hand_over(call)
    assert begun.wait(30) and not turn.done()

    def wait() -> None:
        turn.wait()
        order.append("the wait has ended")

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and not turn.done() and not order
    gate.set()
    waiting.join(30)
    worker.forget()
    assert turn.done() and order == ["the call has ended", "the wait has ended"]


def test_a_turn_has_ended_when_what_it_launched_has_its_event_and_nothing_is_kept_alive() -> None:
    accelerator, held = _WithGates(), _Held()
    gone = weakref.ref(held)
    set_accelerator(accelerator)
    _Gate.closed.clear()
    _Gate.reached.clear()
    try:
        worker = Worker(torch.device("cuda", 0))

        def call(kept: _Held = held) -> Transfer:
            return ARRIVED

        turn = worker.hand_over(call)
        del held, call
        assert _Gate.reached.wait(30) and not turn.done()  # the event that others wait for is not recorded yet
        _Gate.closed.set()
        turn.wait()
        assert turn.done() and gone() is None
        worker.forget()
    finally:
        _Gate.closed.set()
        set_accelerator(None)


def test_a_turn_that_fails_has_ended_too_and_the_next_is_not_taken() -> None:
    worker, took = Worker(torch.device("cpu")), list[int]()

    def fail() -> Transfer:
        raise OSError("planted")

    def call() -> Transfer:
        took.append(1)
        return ARRIVED

    first, second = worker.hand_over(fail), worker.hand_over(call)
    for turn in (first, second):
        with pytest.raises(UsageError, match="an update that went on behind the program has failed .*planted"):
            turn.wait()
        assert turn.done()
    worker.forget()
    assert not took


class _Broken(Transfer):
    """Data of a device that has failed: whoever asks for them hears of that."""

    def wait(self) -> None:
        raise RuntimeError("planted")

    done = wait  # type: ignore[assignment]


def test_a_device_that_fails_while_a_turn_waits_ends_the_turn_and_not_the_thread() -> None:
    worker, data = Worker(torch.device("cpu")), _Broken()
    turn = worker.hand_over(lambda: data, after=data)
    assert turn._ended.wait(30)
    with pytest.raises(UsageError, match="planted"):
        turn.wait()
    worker.forget()


def test_a_thread_that_cannot_start_leaves_no_turn_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(torch.device("cpu"))
    monkeypatch.setattr(threading.Thread, "start", lambda _: _Broken().wait())
    with pytest.raises(RuntimeError, match="planted"):
        worker.hand_over(lambda: ARRIVED)
    assert worker._last is None
    worker.forget()


# -- update shares --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("every", [2, 3, 5, 7])
def test_a_share_of_one_in_k_is_every_kth_of_equal_units(every: int) -> None:
    assert every_so_many([64] * 70, 1 - (1 - 1 / every)) == [i % every == every - 1 for i in range(70)]


@given(st.lists(st.integers(0, 10**9), max_size=40), st.floats(0, 1))
def test_it_is_never_more_than_the_share_of_the_units_so_far(numels: list[int], share: float) -> None:
    chosen = every_so_many(numels, share)
    for stop in range(1, len(numels) + 1):
        taken = sum(n for n, there in zip(numels[:stop], chosen, strict=False) if there)
        if chosen[stop - 1]:
            assert taken <= share * sum(numels[:stop]) * (1 + 1e-8)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.floats(0, 1))
def test_what_is_missing_to_the_share_is_less_than_the_largest_unit(numels: list[int], share: float) -> None:
    chosen = every_so_many(numels, share)
    taken = sum(n for n, there in zip(numels, chosen, strict=True) if there)
    assert share * sum(numels) - taken < max(numels) + 1e-6


def test_nothing_and_everything() -> None:
    assert every_so_many([3, 4], 0.0) == [False, False] and every_so_many([3, 4], 1.0) == [True, True]
    assert every_so_many([], 0.5) == []


def test_host_and_bus_end_together_with_the_share_of_their_rates() -> None:
    rates = Rates(host=3.0, up=1.0, down=0.5)
    share = rates.device_share()
    assert share * max(rates.up, rates.down) == pytest.approx((1 - share) * rates.host) and share == 0.75


def test_the_slowest_rank_decides_in_each_respect() -> None:
    assert slowest([Rates(1, 5, 3), Rates(2, 4, 6)]) == Rates(2, 5, 6)


def test_the_row_of_a_unit_that_visits_keeps_its_gradient_on_the_device_and_two_are_planned_there() -> None:
    offload = {"device": "cpu", "ratio": 0.5, "device_states": "travel"}
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    loaded = load_config(config, world_size=2)
    plan = make_plan(loaded, 2, settings_of(loaded))
    row = plan.row(trainable=True, persistent=False)
    there = row.updated_on_device(loads=plan.offload.update.loads_states)
    assert there.loads_states and not row.loads_states and plan.offload.device_share == 0.5
    assert there.grad is not None and there.optim is not None
    assert (there.grad.tier, there.optim.tier) == (Tier.DEVICE, Tier.HOST)
    sizes = [UnitSize(8192, 2, there), UnitSize(8192, 2, row)]
    memory = memory_plan(sizes, [2], plan.offload, Widths(), prefetch=0, shared=False)
    lines = {line.what: line for line in memory.lines}
    assert lines["optimizer state on a visit"].device == 2 * 4096 * 12
    assert lines["optimizer state"].host == 2 * 4096 * 12 and lines["gradients"].device == 4096 * 4


def test_without_a_ratio_the_share_of_states_that_travel_is_measured() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "device_states": "travel"}}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
    assert settings_of(config) == StagedSettings(measured=True)


def test_a_delayed_update_has_its_gradients_while_new_ones_come_and_a_master_of_its_own() -> None:
    offload = {"device": "cpu", "delayed_update": True, "delayed_update_warm_up": 3}
    zero = {"stage": 1, "offload_optimizer": offload}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
    plan = make_plan(config, 1, settings_of(config))
    assert plan.offload.update == DelayedSettings(first=4)
    at_once = replace(plan.offload, update=AT_ONCE)
    sizes = [UnitSize(4096, 4, plan.row(trainable=True, persistent=False))]
    late, now = (
        {line.what: line for line in memory_plan(sizes, [1], o, Widths(), prefetch=0, shared=True).lines}
        for o in (plan.offload, at_once)
    )
    assert late["gradients"].host == 2 * now["gradients"].host == 2 * 4096 * 4
    assert late["optimizer state"].host - now["optimizer state"].host == 4096 * 4


# -- pending work ---------------------------------------------------------------------------------------------------
PARAM, GRAD, OPTIM = StateKind.PARAM, StateKind.GRAD, StateKind.OPTIM


class Slow(Transfer):
    """Ends when it is waited for, with ``error`` if there is one; ``then`` is what happens meanwhile."""

    def __init__(
        self, nbytes: int = 0, then: Callable[[], object] = lambda: None, *, error: Exception | None = None
    ) -> None:
        self.nbytes, self.waits, self._then, self._error = nbytes, 0, then, error

    def wait(self) -> None:
        self.waits += 1
        then, self._then = self._then, lambda: None
        then()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self.waits > 0

    def failed(self) -> bool:
        return self.done() and self._error is not None


@pytest.mark.parametrize(
    ("kind", "write", "waits"),
    [(PARAM, False, 0), (OPTIM, False, 1), (OPTIM, True, 1), (GRAD, False, 0), (GRAD, True, 1)],
)
def test_a_reader_waits_for_writers_and_a_writer_for_readers(kind: StateKind, write: bool, waits: int) -> None:  # noqa: FBT001
    pending, work = PendingWork(), Slow()
    pending.note(work, reads=(GRAD,), writes=(OPTIM,))
    assert pending.until(kind, write=write).done() is (waits == 0)
    pending.wait(kind, write=write)
    assert work.waits == waits


def test_a_copy_that_an_update_begins_is_waited_for_as_well() -> None:
    """The thread of an update notes the copy of the masters while the program waits for the update."""
    pending, copy = PendingWork(), Slow()
    pending.note(Slow(then=lambda: pending.note(copy, reads=(OPTIM,), copy=True)), writes=(OPTIM,))
    pending.wait(OPTIM, write=True)
    assert copy.waits == 1


def test_who_is_ordered_behind_copies_waits_for_updates_only() -> None:
    pending, copy, update = PendingWork(), Slow(), Slow()
    pending.note(copy, writes=(GRAD,), copy=True)
    pending.note(update, writes=(GRAD,))
    pending.wait(GRAD, copies=False)
    assert (copy.waits, update.waits) == (0, 1)


def test_what_has_failed_is_told_at_every_door_until_it_is_forgotten() -> None:
    pending = PendingWork()
    pending.note(Slow(error=UsageError("it has failed")), writes=(OPTIM,))
    for _ in range(2):
        with pytest.raises(UsageError):
            pending.wait(OPTIM)
        pending.note(Slow(), writes=(PARAM,))
    pending.forget_ended()
    pending.wait(OPTIM)


# -- transfer -------------------------------------------------------------------------------------------------------
def test_several_end_with_the_last_one_and_tell_its_failure() -> None:
    first, second = Slow(3), Slow(4, error=OSError("the drive is gone"))
    both = Several([first, ARRIVED, second])
    assert both.nbytes == 7 and not both.done()
    first.wait()
    assert not both.done()
    with pytest.raises(OSError, match="the drive is gone"):
        both.wait()
    assert both.done()


def test_all_are_waited_for_though_one_fails() -> None:
    """What they read from must not be used again before."""
    failing, slow = Slow(1, error=OSError("no space")), Slow(1)
    with pytest.raises(OSError, match="no space"):
        Several([failing, slow]).wait()
    assert slow.done()


def test_several_have_failed_when_one_has_and_all_have_ended() -> None:
    """So that whoever keeps what is under way does not forget it before its error has been raised."""
    torn, slow = Slow(1, error=UsageError("an update has failed")), Slow(1)
    both, work = Several([torn, slow]), PendingWork()
    work.note(both, writes=(PARAM,))
    with contextlib.suppress(UsageError):
        torn.wait()
    assert not both.failed() and not both.done()
    slow.wait()
    assert both.failed()
    work.note(Slow(1), reads=(PARAM,))
    with pytest.raises(UsageError, match="has failed"):
        work.wait(PARAM)


def test_a_collective_finishes_once_and_keeps_its_price() -> None:
    calls: list[str] = []
    full = torch.zeros(8)
    transfer = Collective([], full, then=(lambda: calls.append("end"), lambda: calls.append("finish")))
    assert transfer.nbytes == 32 and transfer.done()
    transfer.wait()
    transfer.wait()
    assert calls == ["end", "finish"] and transfer.nbytes == 32


def test_memory_is_a_store() -> None:
    store = TierStore(torch.arange(10.0))
    store.put(torch.full((3,), 7.0, dtype=torch.bfloat16), start=4).wait()
    out = torch.zeros(5)
    store.get(out, start=3).wait()
    assert out.tolist() == [3.0, 7.0, 7.0, 7.0, 7.0]
    with store.open(write=True) as inside:
        inside[0] = -1.0
    assert store.tensor[0] == -1.0 and not store.read_ahead()
    assert store.beside(16).tensor.nbytes == 16
