"""What signal handlers raise comes between the engine's operations: an update is done, or has not begun."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.comm import interrupts
from deepspeed.engine import engine as engines
from deepspeed.errors import UsageError
from deepspeed.zero import runtime as engines_own

pytestmark = pytest.mark.ctrl_c
STEPS = 4
# What waits here counts as the runtime's, as the name of its file says so.
WITHIN = """
def wait(seconds):
    os.kill(os.getpid(), signal.SIGINT)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
def insist(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        wait(0.3)  # one that comes just when the handler is asked again is not told from that
"""
# This counts as Python's own: the frame that has made the call decides.
PROFILE = """
def profile(frame, event, what):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(package) and file != own:
        calls.append((file, frame.f_code.co_name))
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGINT)
"""
PACKAGE = os.path.dirname(os.path.abspath(deepspeed.__file__))


def _within(**names: Any) -> dict[str, Any]:
    names |= {"os": os, "signal": signal, "time": time}
    exec(compile(WITHIN, engines_own.__file__, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Python's handler of Ctrl-C, which the workers of the tests do not have."""
    assert threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _engine(stage: int = 3, *, changes: dict[str, Any] | None = None, **words: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    if "optimizer" not in words:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2}}
    return deepspeed.initialize(model=model, config=config | (changes or {}), **words)[0]


@pytest.fixture
def engine() -> Iterator[Any]:
    """Make an engine that has been called, so that it has its handlers."""
    engine = _engine(0)
    engine(torch.randn(2, 4))
    yield engine
    engine.destroy()


def _patiently(call: Callable[[], Any], interrupted: list[int]) -> Any:
    try:
        return call()
    except KeyboardInterrupt:
        interrupted.append(1)
        return call()


def _trained(moment: int) -> tuple[list[torch.Tensor], int, list[tuple[str, str]]]:
    """Parameters after steps of which every call that raises Ctrl-C is made again; interrupts; calls of the package."""
    changes = {"gradient_accumulation_steps": 2, "steps_per_print": 1, "checkpoint": {"async": True}}
    engine, interrupted = _engine(changes=changes), list[int]()
    calls = list[tuple[str, str]]()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    names: dict[str, Any] = {"calls": calls, "moment": moment, "package": PACKAGE, "own": interrupts.__file__}
    exec(compile(PROFILE, "<profile>", "exec"), names := names | {"os": os, "signal": signal})
    sys.setprofile(names["profile"])
    try:
        for _ in range(STEPS):
            loss = _patiently(lambda: engine(x), interrupted).square().mean()
            _patiently(lambda loss=loss: engine.backward(loss), interrupted)
            _patiently(engine.step, interrupted)
    finally:
        sys.setprofile(None)
    _patiently(lambda: engine(x), interrupted)  # what has come in the last step
    assert (engine.micro_steps, engine.global_steps) == (STEPS, STEPS // 2), f"{calls[moment - 1]}"
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        values = [p.detach().clone() for p in engine.module.parameters()]
    engine.destroy()
    return values, len(interrupted), calls


def test_ctrl_c_at_any_moment_leaves_no_half_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """At moments all over, and in each function of what the runtime stands on."""
    monkeypatch.setattr(interrupts.Postponed, "_ask_again", lambda self: None)  # only where the engine is called
    expected, interrupted, calls = _trained(-1)
    assert not interrupted and len(calls) > 300
    runtime, called = interrupts._RUNTIME, interrupts._CALLED
    lower = {c: at for at, c in enumerate(calls, 1) if not c[0].startswith(runtime) or c[0].startswith(called)}
    parts = {os.path.relpath(file, PACKAGE).split(os.sep)[0] for file, _ in lower}
    assert parts >= {"monitor", "comm", "checkpoint"}
    for moment in sorted({*lower.values(), *range(5, len(calls), len(calls) // 25)}):
        values, interrupted, _ = _trained(moment)
        assert interrupted == 1, f"call {moment}: {calls[moment - 1]}"
        assert all(map(torch.equal, values, expected)), f"call {moment}: {calls[moment - 1]}"


class _Sgd(torch.optim.Optimizer):
    """A client's own: it hears Ctrl-C when one of its parameters is updated."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad)
            os.kill(os.getpid(), signal.SIGINT)


def _schedule(step: int) -> float:
    if step:
        os.kill(os.getpid(), signal.SIGINT)
    return 1.0


@pytest.mark.parametrize("whose", ["optimizer", "schedule"])
def test_ctrl_c_in_what_an_update_calls_of_the_programs_comes_behind_the_update(
    whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts.Postponed, "_ask_again", lambda self: None)
    if whose == "optimizer":
        engine = _engine(1, changes={"zero_allow_untested_optimizer": True}, optimizer=_Sgd)
    else:
        engine = _engine(1, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule))
    engine.backward(engine(torch.randn(2, 4)).mean())
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 1)
    with pytest.raises(KeyboardInterrupt):
        engine(torch.randn(2, 4))
    engine.destroy()


def test_ctrl_c_inside_the_engine_ends_a_sleep_of_the_programs(engine: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _within()["wait"](0.0)
        time.sleep(30)
    assert time.monotonic() - begun < 20


def test_ctrl_c_in_the_programs_own_lines_comes_at_once(engine: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
        pytest.fail("it came later")


def test_a_second_ctrl_c_comes_through_inside_the_engine(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 0.0)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _within()["insist"](30.0)
        time.sleep(30)
    assert time.monotonic() - begun < 20


def test_ctrl_c_while_the_engine_is_destroyed_comes_behind_that(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    press, dismantle = _within()["wait"], engines.dismantle
    monkeypatch.setattr(engines, "dismantle", lambda *args, **words: (press(0.01), dismantle(*args, **words)))
    monkeypatch.setattr(interrupts.Postponed, "_ask_again", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        engine.destroy()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(UsageError, match="destroyed"):
        engine(torch.randn(2, 4))


def test_an_end_of_the_engine_gives_the_handlers_back() -> None:
    first, second = _engine(0), _engine(0)
    first(torch.randn(2, 4))
    assert isinstance(signal.getsignal(signal.SIGINT), interrupts.Postponed)
    first.destroy()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    second(torch.randn(2, 4))
    assert isinstance(signal.getsignal(signal.SIGINT), interrupts.Postponed)
    second.destroy()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_programs_own_stays_as_it_is() -> None:
    heard: list[int] = []

    def handler(number: int, _: Any) -> None:
        heard.append(number)

    engine = _engine(0)
    signal.signal(signal.SIGINT, handler)
    engine(torch.randn(2, 4))
    assert signal.getsignal(signal.SIGINT) is handler
    _within()["wait"](0.01)
    assert heard == [signal.SIGINT]
    engine.destroy()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_of_the_programs_own_that_calls_the_engines_hears_ctrl_c_once(engine: Any) -> None:
    heard, placed = list[int](), signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: Any) -> None:
        heard.append(number)
        placed(number, frame)  # type: ignore[misc,operator]

    signal.signal(signal.SIGINT, handler)
    with pytest.raises(KeyboardInterrupt):
        _within()["wait"](0.2)
    time.sleep(0.2)
    assert heard == [signal.SIGINT]


def test_ctrl_c_is_heard_once_where_the_program_replaces_the_handler_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_PAUSE_S", 0.4)
    engine, placed = _engine(0), signal.getsignal(signal.SIGINT)
    for between in (signal.SIG_IGN, signal.default_int_handler):
        engine(torch.randn(2, 4))
        placed = signal.getsignal(signal.SIGINT)
        _within()["wait"](0.0)
        signal.signal(signal.SIGINT, between)
        time.sleep(0.7)
        with pytest.raises(KeyboardInterrupt):
            if between is signal.SIG_IGN:
                signal.signal(signal.SIGINT, placed)
                time.sleep(30)
            engine(torch.randn(2, 4))
        time.sleep(0.7)
        engine(torch.randn(2, 4))
        with pytest.raises(KeyboardInterrupt):  # and so is the next one
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)
    engine.destroy()


def test_a_handler_that_is_put_back_after_the_engines_end_loses_no_ctrl_c() -> None:
    first, second = _engine(0), _engine(0)
    first(torch.randn(2, 4))
    placed = signal.signal(signal.SIGINT, signal.SIG_IGN)
    first.destroy()
    signal.signal(signal.SIGINT, placed)
    with pytest.raises(KeyboardInterrupt):
        _within()["wait"](0.01)
    second(torch.randn(2, 4))
    with pytest.raises(KeyboardInterrupt):
        _within()["wait"](0.0)
        time.sleep(30)
    second.destroy()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_room_for_a_thread_ctrl_c_comes_with_the_next_call_of_the_engine(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    _within()["wait"](0.01)
    with pytest.raises(KeyboardInterrupt):
        engine(torch.randn(2, 4))


class _Pressed:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_a_finalizer_which_python_would_drop_comes_behind_it(engine: Any) -> None:
    begun, thing = time.monotonic(), _Pressed()
    with pytest.raises(KeyboardInterrupt):
        del thing
        time.sleep(30)
    assert time.monotonic() - begun < 20


def test_every_call_of_the_engine_postpones_what_handlers_raise() -> None:
    engine = _engine()
    with engine.unsharded():
        assert isinstance(signal.getsignal(signal.SIGINT), interrupts.Postponed)
    engine.destroy()
