"""Loss scaling: traces of the state machine, written out by hand."""

from types import SimpleNamespace

import pytest

from deepspeed.engine.loss_scale import DynamicLossScaler, LossScaler, build_loss_scaler
from deepspeed.errors import UsageError


def trace(scaler, events):
    """Scale after each step; ``x`` is an overflow and ``.`` a good step."""
    out = []
    for event in events:
        scaler.update(event == "x")
        out.append(scaler.cur_scale)
    return out


def test_first_overflows_are_let_pass():
    assert trace(DynamicLossScaler(64, scale_window=100, hysteresis=3), "xxxx") == [64, 64, 32, 16]


def test_hysteresis_one_halves_at_once():
    assert trace(DynamicLossScaler(64, hysteresis=1), "xx.x") == [32, 16, 16, 8]


def test_used_up_hysteresis_stays_used_up_until_a_doubling():
    assert trace(DynamicLossScaler(64, scale_window=2, hysteresis=2), "x.x...x") == [64, 64, 32, 32, 32, 64, 64]


def test_consecutive_hysteresis_is_given_back_by_every_good_step():
    assert trace(DynamicLossScaler(64, scale_window=100, hysteresis=2, consecutive_hysteresis=True), "x.x.xx") == [
        64,
        64,
        64,
        64,
        64,
        32,
    ]


def test_doubles_after_each_quiet_window():
    # iteration i doubles when i - last_overflow - 1 is a positive multiple of the window
    assert trace(DynamicLossScaler(4, scale_window=3, hysteresis=1), ".......") == [4, 4, 4, 8, 8, 8, 16]
    assert trace(DynamicLossScaler(4, scale_window=3, hysteresis=1), "x....x...") == [2, 2, 2, 2, 4, 2, 2, 2, 2]
    assert trace(DynamicLossScaler(4, scale_window=1, hysteresis=1), "....") == [4, 8, 16, 32]


def test_floor_raises_with_advice_and_changes_nothing():
    scaler = DynamicLossScaler(8, min_scale=3, hysteresis=1)
    assert trace(scaler, "xx") == [4, 3]
    before = scaler.state_dict()
    with pytest.raises(UsageError, match="minimum 3.*learning rate"):
        scaler.update(True)
    assert scaler.state_dict() == before


def test_an_initial_scale_under_the_floor_is_not_raised_by_an_overflow():
    with pytest.raises(UsageError):
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


@pytest.mark.parametrize("bad", [{"init_scale": 0}, {"scale_window": 0}, {"hysteresis": 0}, {"min_scale": 0}])
def test_settings_out_of_range(bad):
    with pytest.raises(ValueError, match="loss"):
        DynamicLossScaler(**bad)


def test_static_scale_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        LossScaler(-1)


def config(dtype="fp16", **changes):
    fp16 = {
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    }
    return SimpleNamespace(compute_dtype=dtype, fp16=SimpleNamespace(**(fp16 | changes)))


def test_build_from_config():
    dynamic = build_loss_scaler(
        config(initial_scale_power=5, loss_scale_window=7, hysteresis=3, consecutive_hysteresis=True, min_loss_scale=2)
    )
    assert isinstance(dynamic, DynamicLossScaler) and dynamic.loss_scale == 32
    assert (dynamic.scale_window, dynamic.delayed_shift, dynamic.consecutive_hysteresis, dynamic.min_scale) == (
        7,
        3,
        True,
        2,
    )
    assert build_loss_scaler(config(loss_scale=512)).loss_scale == 512
    assert not build_loss_scaler(config(loss_scale=512)).dynamic
    for dtype in ("bf16", "fp32"):
        scaler = build_loss_scaler(config(dtype, loss_scale=512))
        assert isinstance(scaler, LossScaler) and scaler.loss_scale == 1
