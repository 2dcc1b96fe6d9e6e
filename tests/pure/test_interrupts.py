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
from deepspeed import engine as engines
from deepspeed.comm import interrupts
from deepspeed.errors import UsageError
from deepspeed.zero import runtime as engines_own

STEPS = 3
# What runs here counts as the runtime's, as the name of the file says so.
WITHIN = """
def profile(frame, event, what):
    calls[0] += event == "call" and frame.f_code.co_filename.startswith(package)
    if calls[0] == moment:
        calls[0] += 1
        os.kill(os.getpid(), signal.SIGINT)
def wait(seconds):
    os.kill(os.getpid(), signal.SIGINT)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
"""


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


def _engine(stage: int = 3) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2}}
    return deepspeed.initialize(model=model, config=config)[0]


def _patiently(call: Callable[[], Any], interrupted: list[int]) -> Any:
    try:
        return call()
    except KeyboardInterrupt:
        interrupted.append(1)
        return call()


def _trained(moment: int) -> tuple[list[torch.Tensor], int, int]:
    """Parameters after steps of which every call that raises Ctrl-C is made again; interrupts; calls of the package."""
    engine, interrupted, calls = _engine(), [], [0]
    package = os.path.dirname(os.path.abspath(deepspeed.__file__))
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    sys.setprofile(_within(calls=calls, moment=moment, package=package)["profile"])
    try:
        for _ in range(STEPS):
            loss = _patiently(lambda: engine(x), interrupted).square().mean()
            _patiently(lambda loss=loss: engine.backward(loss), interrupted)
            _patiently(engine.step, interrupted)
    finally:
        sys.setprofile(None)
    _patiently(lambda: engine(x), interrupted)  # what has come in the last step
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        values = [p.detach().clone() for p in engine.module.parameters()]
    engine.destroy()
    return values, len(interrupted), calls[0]


def test_ctrl_c_at_any_moment_leaves_no_half_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts.Postponed, "_ask_again", lambda self: None)  # only where the engine is called
    expected, interrupted, calls = _trained(-1)
    assert not interrupted and calls > 300
    for moment in range(5, calls, calls // 40):
        values, interrupted, _ = _trained(moment)
        assert interrupted == 1, f"call {moment} of {calls}"
        assert all(map(torch.equal, values, expected)), f"call {moment} of {calls}"


def test_ctrl_c_inside_the_engine_ends_a_sleep_of_the_programs() -> None:
    engine = _engine(0)
    engine(torch.randn(2, 4))
    _within()["wait"](0.02)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(30)
    assert time.monotonic() - begun < 20
    engine.destroy()


def test_ctrl_c_in_the_programs_own_lines_comes_at_once() -> None:
    engine = _engine(0)
    engine(torch.randn(2, 4))
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
        pytest.fail("it came later")
    engine.destroy()


def test_a_second_ctrl_c_comes_through_inside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 0.0)
    engine = _engine(0)
    engine(torch.randn(2, 4))
    over = threading.Event()

    def press() -> None:
        while not over.wait(0.3):  # one that comes just when the handler is asked again is not told from that
            os.kill(os.getpid(), signal.SIGINT)

    presses, begun = threading.Thread(target=press), time.monotonic()
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            _within()["wait"](30.0)
        finally:
            over.set()
            presses.join()
    assert time.monotonic() - begun < 20
    engine.destroy()


def test_ctrl_c_while_the_engine_is_destroyed_comes_behind_that(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(0)
    engine(torch.randn(2, 4))
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
