"""A host runs ahead of its device, so where it waits it waits for the device, and that in a collective mostly: the
watch takes such a wait for one in the collective that the device has not done yet, and for none where all are done.
"""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.accelerator.device import Accelerator, NullEvent, set_accelerator
from deepspeed.comm.hang.explain import RUNS
from deepspeed.comm.hang.ledger import Ledger
from deepspeed.comm.hang.stacks import COLLECTIVE, Spot, outwards, spot_of
from deepspeed.comm.hang.watch import HangWatch
from deepspeed.tier.store import Landing
from deepspeed.zero.update.result import norm_of

Frames = list[FrameType]


def _of_torch(function: str) -> Callable[..., Any]:
    """A function whose frame is in a file of torch's, as the Python part of torch's events is."""
    names: dict[str, Any] = {"sys": sys, "outwards": outwards}
    file = os.path.join(os.path.dirname(torch.__file__), "cuda", "streams.py")
    exec(compile(function, file, "exec"), names)
    made: Callable[..., Any] = names["wait"]
    return made


class _Waits:
    """A tensor or an event: to read it is to wait, and where ``frames`` are seen, the innermost first."""

    def __init__(self) -> None:
        self.frames: Frames = []
        self.spots: list[Spot] = []

    def _look(self, frames: Frames) -> list[float]:
        self.spots = [spot_of(frames, {}, busy=busy) for busy in (True, False)]
        return [4.0, 0.0, 0.0]

    tolist = synchronize = _of_torch("def wait(self):\n    return self._look(list(outwards(sys._getframe())))\n")


def _norm(device: Any) -> None:
    norm_of(device)


def _landing(device: Any) -> None:
    landing = Landing(4)
    landing._event = device
    landing.wait()


@pytest.mark.parametrize(("wait", "words"), [(_norm, "sums.tolist()"), (_landing, "event.synchronize()")])
def test_a_wait_of_ours_for_the_device_is_one_in_the_collective_under_way(
    wait: Callable[[Any], None], words: str
) -> None:
    wait(device := _Waits())
    behind, alone = device.spots
    assert (behind.kind, behind.waits) == (COLLECTIVE, words)
    assert (alone.kind, alone.waits) == ("", "")


def test_a_call_through_the_device_layer_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Waits()
    monkeypatch.setattr(Accelerator, "_module", property(lambda self: mock.Mock(synchronize=device.synchronize)))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    Accelerator("cuda").synchronize()
    assert device.spots[0].kind == COLLECTIVE and ".synchronize()" in device.spots[0].waits


class _Late(Accelerator):
    """A device that has not done what it was given, until ``done``."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.done = 0
        self.made = 0
        self.asked_on: list[int | None] = []

    def is_synchronized_device(self) -> bool:
        return False

    def current_device(self) -> int:
        return 3

    def device(self, device_index: Any = None) -> Any:
        self.asked_on.append(device_index)
        return mock.MagicMock()

    def Event(self, **_: Any) -> Any:
        self.made += 1
        event, number = NullEvent(), self.made
        event.query = lambda: number <= self.done  # type: ignore[method-assign]
        return event


@pytest.fixture
def late() -> Any:
    set_accelerator(device := _Late())
    yield device
    set_accelerator(None)


def test_a_collective_is_under_way_until_the_device_has_done_it(late: Any) -> None:
    ledger = Ledger()
    begin = ledger.listener("zero")
    ends = [begin("all_gather", numel, torch.float32, 2) for numel in (10, 20)]
    for end in ends:
        assert end is not None
        end()  # the host has waited: nccl has ordered its stream, no more
    assert ledger.waiting is not None and ledger.waiting.numel == 10 and set(late.asked_on) == {3}
    late.done = 1
    assert ledger.waiting is not None and ledger.waiting.numel == 20
    late.done = 2
    assert ledger.waiting is None


def test_on_the_cpu_it_has_ended_when_the_host_has_waited() -> None:
    ledger = Ledger()
    end = ledger.listener("zero")("all_gather", 10, torch.float32, 2)
    assert end is not None and ledger.waiting is not None
    end()
    assert ledger.waiting is None


def _spots(*_: Any, busy: bool, **__: Any) -> Spot:
    return Spot(COLLECTIVE, "sums.tolist()") if busy else Spot()


def test_the_report_names_the_collective_that_the_device_is_in(late: Any) -> None:
    with (
        mock.patch("deepspeed.comm.hang.watch.job_channel"),
        mock.patch("deepspeed.comm.hang.watch.dist.get_rank", lambda: 0),
        mock.patch("deepspeed.comm.hang.watch.dist.get_world_size", lambda: 2),
        mock.patch("deepspeed.comm.hang.watch.torch_numbers", dict),
        mock.patch("deepspeed.comm.hang.watch.spots", _spots),
    ):
        watch = HangWatch(10.0, "test")
        assert watch._report().state == RUNS
        end = watch.ledger.listener("zero")("reduce_scatter", 4096, torch.bfloat16, 2)
        assert end is not None
        end()
        report = watch._report()
    assert (report.state, report.what) == (COLLECTIVE, "reduce_scatter of 4096 bfloat16 on zero")
