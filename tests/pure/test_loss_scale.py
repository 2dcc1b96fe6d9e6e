"""Loss scaling: traces of the state machine, written out by hand."""

import pytest

from deepspeed.config import load_config
from deepspeed.engine.loss_scale import DynamicLossScaler, LossScaler, build_loss_scaler
from deepspeed.errors import UsageError


def trace(scaler, events):
    """Scale after each step; ``x`` is an overflow and ``.`` a good step."""
    out = []
    for event in events:
        scaler.update(event == "x")
        out.append(scaler.cur_scale)
    return out


@pytest.mark.parametrize(
    ("settings", "events", "scales"),
    [
        ({"hysteresis": 3}, "xxxx", [64, 64, 32, 16]),  # the first overflows are let pass
        ({"hysteresis": 1}, "xx.x", [32, 16, 16, 8]),
        # what is used up stays so until a doubling
        ({"hysteresis": 2, "scale_window": 2}, "x.x...x", [64, 64, 32, 32, 32, 64, 64]),
        # unless every good step gives it back
        ({"hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [64, 64, 64, 64, 64, 32]),
        # iteration i doubles when i - last_overflow - 1 is a positive multiple of the window
        ({"hysteresis": 1, "scale_window": 3}, ".......", [64, 64, 64, 128, 128, 128, 256]),
        ({"hysteresis": 1, "scale_window": 3}, "x....x...", [32, 32, 32, 32, 64, 32, 32, 32, 32]),
        ({"hysteresis": 1, "scale_window": 1}, "....", [64, 128, 256, 512]),
    ],
)
def test_overflows_halve_and_quiet_windows_double(settings, events, scales):
    assert trace(DynamicLossScaler(64, **{"scale_window": 100, **settings}), events) == scales


def test_floor_raises_with_advice_and_changes_nothing():
    scaler = DynamicLossScaler(8, min_scale=3, hysteresis=1)
    assert trace(scaler, "xx") == [4, 3]
    before = scaler.state_dict()
    with pytest.raises(UsageError, match="minimum 3.*learning rate"):
        scaler.update(True)
    assert scaler.state_dict() == before
    with pytest.raises(UsageError):  # an initial scale under the floor is not raised
        DynamicLossScaler(1, min_scale=2, hysteresis=1).update(True)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("events", ["x..x....x.x....", "xxxx"])
def test_resume_anywhere_continues_the_trace(events, hysteresis):
    """Also between two overflows, where part of the let-pass credit is used up."""
    straight = trace(DynamicLossScaler(2**10, scale_window=3, hysteresis=hysteresis), events)
    for cut in range(len(events)):
        first = DynamicLossScaler(2**10, scale_window=3, hysteresis=hysteresis)
        head = trace(first, events[:cut])
        second = DynamicLossScaler(2**16, scale_window=3, hysteresis=hysteresis)
        second.load_state_dict(first.state_dict())
        assert head + trace(second, events[cut:]) == straight, cut


def test_static_scale_never_moves():
    scaler = LossScaler(128)
    assert trace(scaler, "x.xx") == [128] * 4 and scaler.cur_iter == 4 and not scaler.dynamic
    other = LossScaler(64)
    other.load_state_dict(scaler.state_dict())
    assert (other.loss_scale, other.cur_iter) == (64, 4)


def test_a_state_of_the_other_kind_is_no_obstacle():
    dynamic, static = DynamicLossScaler(), LossScaler(8)
    dynamic.load_state_dict(static.state_dict())
    static.load_state_dict(dynamic.state_dict())
    assert dynamic.loss_scale == 2**16 and static.loss_scale == 8


def build(dtype="fp16", **fp16):
    blocks = {"fp16": {"enabled": dtype == "fp16", **fp16}, "bf16": {"enabled": dtype == "bf16"}}
    return build_loss_scaler(load_config({"train_micro_batch_size_per_gpu": 1, **blocks}, world_size=1))


def test_build_from_config():
    words = {"initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 2}
    dynamic = build(**words, consecutive_hysteresis=True)
    assert isinstance(dynamic, DynamicLossScaler) and dynamic.loss_scale == 32
    assert (dynamic.scale_window, dynamic.delayed_shift, dynamic.min_scale) == (7, 3, 2)
    assert dynamic.consecutive_hysteresis
    static = build(loss_scale=512)
    assert static.loss_scale == 512 and not static.dynamic
    for dtype in ("bf16", "fp32"):
        scaler = build(dtype, loss_scale=512)
        assert isinstance(scaler, LossScaler) and scaler.loss_scale == 1
