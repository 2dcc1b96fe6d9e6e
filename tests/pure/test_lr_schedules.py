"""Learning-rate schedules: every value against a closed form written from the published formula, and how they are
stepped.
"""

import argparse
import logging
import math
import sys

import pytest
import torch

from deepspeed.client import lr_schedules
from deepspeed.client.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from deepspeed.errors import OptimizerConfigError
from deepspeed.monitor.log import logger
from tests.harness.rows import for_each


def adam(*rates):
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (0.5,)])


def trace(schedule, count):
    """Rates of the first group at i = -1, 0, ..., count - 2."""
    group = schedule.optimizer.param_groups[0]
    out = [group["lr"]]
    for _ in range(count - 1):
        schedule.step()
        assert schedule.get_last_lr()[0] == group["lr"] == schedule.get_lr()[0]
        out.append(group["lr"])
    return out


@pytest.fixture
def log(caplog):
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("staircase", [True, False])
def test_range_test(staircase):
    schedule = LRRangeTest(adam(), 0.01, 4, 2.0, staircase)
    expected = [0.01 * (1 + 2.0 * (math.floor(k / 4) if staircase else k / 4)) for k in range(12)]
    assert trace(schedule, 12) == pytest.approx(expected)


@for_each("size", [0, -1, 1.5])
def test_range_test_step_size(size):
    with pytest.raises(ValueError, match="lr_range_test_step_size"):
        LRRangeTest(adam(), lr_range_test_step_size=size)


def test_one_cycle_climbs_falls_and_decays():
    opt = adam()
    sizes = {"cycle_first_step_size": 4, "cycle_second_step_size": 8, "decay_step_size": 2}
    schedule = OneCycle(opt, 0.1, 0.5, decay_lr_rate=0.5, decay_mom_rate=0.25, **sizes)
    assert opt.param_groups[0]["betas"] == (0.8, 0.999) and schedule.get_mom() == [(0.9, 0.999)]
    rates, momenta = [], []
    for _ in range(16):
        rates.append(opt.param_groups[0]["lr"])
        schedule.step()
        assert schedule.get_mom() == [opt.param_groups[0]["betas"]]
        momenta.append(schedule.get_mom()[0][0])
    up = [0.1 + 0.4 * k / 4 for k in range(5)]
    down = [0.5 - 0.4 * k / 8 for k in range(1, 8)]
    # i = 11 is the last of the cycle: back at the minimum; i = 12 is one step into the decay
    decay = [0.1 / (1 + 0.5 * d / 2) for d in range(1, 4)]
    assert rates == pytest.approx([*up, *down, 0.1, *decay])
    mom_down = [0.9 - 0.1 * k / 4 for k in range(1, 5)]
    mom_up = [0.8 + 0.1 * k / 8 for k in range(1, 9)]
    assert momenta == pytest.approx([*mom_down, *mom_up, *[0.9 * (1 + 0.25 * d / 2) for d in range(1, 5)]])


def test_settings_are_attributes_that_clients_read_and_change():
    ranged = LRRangeTest(adam(), 0.01, 4, 2.0, True)
    assert (ranged.min_lr, ranged.step_size, ranged.step_rate, ranged.staircase) == ([0.01], 4, 2.0, True)
    cycle = OneCycle(adam(), 0.1, 0.5, decay_lr_rate=0.5, decay_step_size=2, decay_mom_rate=0.25)
    assert (cycle.decay_lr_rate, cycle.decay_step_size, cycle.decay_mom_rate) == (0.5, 2, 0.25)
    cosine = WarmupCosineLR(adam(), 10, 0.2, 4, 0.01)
    assert (cosine.warmup_min_ratio, cosine.cos_min_ratio, cosine.total_num_steps) == (0.2, 0.01, 10)
    cycle.decay_step_size, cosine.cos_min_ratio, ranged.step_rate = 4, 0.5, 1.0
    for schedule, iteration, rate in ((cycle, 4001, 0.1 / (1 + 0.5 * 2 / 4)), (cosine, 20, 0.25), (ranged, 7, 0.03)):
        schedule.step(iteration)
        assert schedule.get_last_lr() == pytest.approx([rate])


def one_cycle_formula(i, first, second, stairs):
    """Place in the cycle, 0 to 1, as it is published: ``stairs`` of both halves."""
    total, done = first + second, i + 1
    if i >= total:
        return 0.0
    if any(stairs):
        place = done % total
        if place <= first:
            return place * stairs[0] // first / stairs[0]
        return (total - place) * stairs[1] // second / stairs[1]
    x = done / total - done // total
    return x * total / first if x * total <= first else (1 - x) * total / second


@pytest.mark.parametrize("stairs", [(0, 0), (3, 5), (100, 7)])
@pytest.mark.parametrize(("first", "second"), [(100, 7), (3, 10), (10, 0), (100, 100)])
def test_one_cycle_with_halves_of_other_lengths_and_stairs(first, second, stairs):
    """Also with none at all of the second; stairs are whole numbers, whatever a quotient of them is in floats."""
    counts = {"cycle_first_stair_count": stairs[0], "cycle_second_stair_count": stairs[1]}
    schedule = OneCycle(
        adam(), 0.1, 0.5, cycle_first_step_size=first, cycle_second_step_size=second, decay_mom_rate=0.0, **counts
    )
    places = [one_cycle_formula(i, first, second, stairs) for i in range(-1, 2 * (first + second))]
    assert trace(schedule, len(places)) == pytest.approx([0.1 + 0.4 * place for place in places])
    assert schedule.get_mom() == [(0.9, 0.999)]


def test_momenta_of_one_cycle_are_pairs_of_each_group():
    opt = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "betas": (0.5, 0.6)})
    schedule = OneCycle(opt, 0.1, 0.5, cycle_first_step_size=4, cycle_min_mom=[0.1, 0.2], cycle_max_mom=[0.5, 0.6])
    for _ in range(2):
        schedule.step()
    assert schedule.get_mom() == [pytest.approx((0.3, 0.999)), pytest.approx((0.4, 0.6))]


def test_one_cycle_without_betas(log):
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = OneCycle(sgd, 0.1, 0.5, cycle_first_step_size=2)
    assert schedule.get_mom() == [] and "no betas" in log.text
    schedule.step()
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.3)


@for_each(("first", "second"), [(0, None), (-1, 3), (2, -1)])
def test_one_cycle_sizes(first, second):
    with pytest.raises(ValueError, match="cycle_first_step_size"):
        OneCycle(adam(), 0.1, 0.5, cycle_first_step_size=first, cycle_second_step_size=second)


def gamma(i, steps, kind):
    w = max(2, steps)
    if i >= w:
        return 1.0
    return math.log(i + 1) / math.log(w) if kind == "log" else i / w


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_warmup(kind, steps):
    expected = [0.1] + [0.1 + 0.4 * gamma(i, steps, kind) for i in range(9)]
    assert expected[:2] == [0.1, 0.1]
    assert trace(WarmupLR(adam(), 0.1, 0.5, steps, kind), 10) == pytest.approx(expected)


def test_warmup_reaches_the_groups_own_rates():
    opt = adam(0.2, 0.6)
    schedule = WarmupLR(opt, 0.0, warmup_num_steps=3)
    assert [g["lr"] for g in opt.param_groups] == [0.0, 0.0]
    for _ in range(4):
        schedule.step()
    assert schedule.get_last_lr() == [0.2, 0.6]


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_decay(kind):
    expected = [0.1] + [0.1 + 0.4 * (gamma(i, 4, kind) if i < 4 else max(0, (10 - i) / 6)) for i in range(13)]
    assert trace(WarmupDecayLR(adam(), 10, 0.1, 0.5, 4, kind), 14) == pytest.approx(expected)


def test_warmup_decay_shorter_than_its_warmup(log):
    schedule = WarmupDecayLR(adam(), 3, 0.0, 1.0, 5, "linear")
    assert "less than" in log.text
    assert trace(schedule, 8) == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.8, 0, 0])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_cosine(kind):
    def ratio(i):
        if i < 0:
            return 0.0
        if i < 4:
            return 0.2 + 0.8 * gamma(i, 4, kind)
        p = min(1.0, (i - 4 + 1) / 6)
        return max(0, 0.05 + 0.95 * (1 + math.cos(math.pi * p)) / 2)

    opt = adam(0.5, 2.0)
    schedule = WarmupCosineLR(opt, 10, 0.2, 4, 0.05, kind)
    assert trace(schedule, 14) == pytest.approx([0.5 * ratio(i) for i in range(-1, 13)])
    assert opt.param_groups[1]["lr"] == pytest.approx(2.0 * ratio(12))
    assert schedule.get_lr_ratio() == pytest.approx(ratio(12))


def test_zero_warmup_is_clamped_with_a_warning(log):
    assert trace(WarmupLR(adam(), 0.0, 1.0, 0), 4) == trace(WarmupLR(adam(), 0.0, 1.0, 1), 4)
    assert "warmup_num_steps is 0" in log.text


@for_each("steps", [-1, 2.5, "10", True, None])
def test_warmup_steps_must_be_a_whole_number(steps):
    for kind, words in ((WarmupLR, ()), (WarmupCosineLR, (10,))):
        with pytest.raises(ValueError, match="warmup_num_steps"):
            kind(adam(), *words, warmup_num_steps=steps)


def test_whole_floats_and_unknown_warmup_type(log):
    assert trace(WarmupLR(adam(), 0.0, 1.0, 3.0, "cubic"), 5) == trace(WarmupLR(adam(), 0.0, 1.0, 3), 5)
    assert "'cubic' is unknown" in log.text


def test_lists_need_one_entry_per_group():
    opt = adam(0.1, 0.1)
    schedule = WarmupLR(opt, [0.0, 0.1], (1.0, 2.0), 2)
    for _ in range(3):
        schedule.step()
    assert schedule.get_last_lr() == [1.0, 2.0]
    with pytest.raises(ValueError, match="warmup_max_lr has 3 entries, the optimizer has 2"):
        WarmupLR(opt, 0.0, [1.0, 2.0, 3.0])


ALL = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 3},
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 4},
}


@pytest.mark.parametrize("name", list(ALL))
def test_resume_jump_and_last_lr(name, log):
    straight = build_scheduler(name, ALL[name], adam())
    assert straight.get_last_lr() == [straight.optimizer.param_groups[0]["lr"]] and log.text == ""
    rates = trace(straight, 7)
    assert straight.state_dict() == {"last_batch_iteration": 5}
    resumed = build_scheduler(name, ALL[name], adam())
    resumed.load_state_dict(straight.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == rates[-1]
    resumed.step()
    straight.step()
    assert resumed.get_last_lr() == straight.get_last_lr()
    resumed.step(1)
    assert resumed.get_last_lr() == [rates[2]] and resumed.last_batch_iteration == 1
    late = build_scheduler(name, ALL[name] | {"last_batch_iteration": 3}, adam())
    assert late.optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(AssertionError, match="need to call step"):
        late.get_last_lr()
    fresh = build_scheduler(name, ALL[name], adam())
    fresh.load_state_dict({"last_batch_iteration": -1})
    assert fresh.get_last_lr() == [rates[0]]


def test_asking_early_warns(log):
    assert WarmupLR(adam(), 0.25).get_lr() == [0.25]
    assert log.records[-1].levelno == logging.WARNING


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_wrapped_optimizers_and_strangers():
    opt = adam()
    WarmupLR(Wrapper(Wrapper(opt)), 0.125)
    assert opt.param_groups[0]["lr"] == 0.125
    for stranger in (None, object(), Wrapper(3)):
        with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
            WarmupLR(stranger)


def test_torch_schedulers_by_name_act_on_the_base_optimizer():
    opt = adam()
    schedule = build_scheduler("StepLR", {"step_size": 1, "gamma": 0.5}, Wrapper(opt))
    opt.step()
    schedule.step()
    assert opt.param_groups[0]["lr"] == 0.25 and schedule.optimizer is opt
    assert type(build_scheduler("ReduceLROnPlateau", None, opt)).__name__ == "ReduceLROnPlateau"


@for_each(
    ("name", "near"),
    [("warmuplr", "WarmupLR"), ("StepLr", "StepLR"), ("OneCicle", "OneCycle"), ("LRScheduler", ""), ("Optimizer", "")],
)
def test_unknown_scheduler(name, near):
    with pytest.raises(OptimizerConfigError, match=f'"{name}" is unknown') as info:
        build_scheduler(name, {}, adam())
    assert f"did you mean '{near}'" in str(info.value) or not near


@for_each(
    ("name", "params", "words"),
    [
        ("WarmupLR", {"warmup_steps": 3}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, "without quotes"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, "nothing filled it in"),
        ("WarmupDecayLR", {}, "needs scheduler.params.total_num_steps"),
        ("LambdaLR", {}, "needs scheduler.params.lr_lambda"),
        ("WarmupLR", {"warmup_max_lr": {}}, "entries"),
    ],
)
def test_bad_scheduler_params(name, params, words):
    with pytest.raises(ValueError, match=words):
        build_scheduler(name, params, adam())


def parse(*argv):
    return lr_schedules.add_tuning_arguments(argparse.ArgumentParser()).parse_args(list(argv))


def test_tuning_arguments_defaults():
    ranged = {"min_lr": 0.001, "step_rate": 1.0, "step_size": 1000, "staircase": False}
    cycle = {"min_lr": 0.01, "max_lr": 0.1, "first_step_size": 1000, "second_step_size": -1}
    cycle |= {"first_stair_count": -1, "second_stair_count": -1, "momentum": False, "min_mom": 0.8, "max_mom": 0.9}
    decay = {"step_size": 1000, "lr_rate": 0.0, "mom_rate": 0.0}
    warmup = {"min_lr": 0, "max_lr": 0.001, "num_steps": 1000, "type": "log", "min_ratio": 0.01}
    blocks = {"lr_range_test": ranged, "cycle": cycle, "decay": decay, "warmup": warmup, "cos": {"min_ratio": 0.01}}
    expected = {f"{prefix}_{name}": value for prefix, block in blocks.items() for name, value in block.items()}
    assert vars(parse()) == {"lr_schedule": None, **expected}
    args = parse("--cycle_momentum", "--lr_range_test_staircase", "true", "--warmup_num_steps", "7")
    assert args.cycle_momentum and args.lr_range_test_staircase and args.warmup_num_steps == 7


def test_config_from_args_builds():
    for name in ("LRRangeTest", "OneCycle", "WarmupLR"):
        config, error = lr_schedules.get_config_from_args(parse("--lr_schedule", name))
        assert error is None and config["type"] == name
        build_scheduler(config["type"], config["params"], adam())
    assert lr_schedules.get_config_from_args(parse()) == (None, "--lr_schedule not specified on command line")
    config, error = lr_schedules.get_config_from_args(parse("--lr_schedule", "WarmUp"))
    assert config is None and "WarmupLR" in error


def test_override_params():
    params = {"warmup_num_steps": 3, "warmup_min_lr": 0.5}
    given = argparse.Namespace(warmup_num_steps=9, warmup_min_lr=0, warmup_type="linear", other=1)
    lr_schedules.override_params(given, params)
    assert params == {"warmup_num_steps": 9, "warmup_min_lr": 0.5, "warmup_type": "linear"}


@for_each(
    ("config", "rate"),
    [
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.1}}, 0.1),
        ({"type": "OneCycle", "params": {"cycle_max_lr": 0.2}}, 0.2),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.3}}, 0.3),
        ({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.4}}, 0.4),
        ({"type": "WarmupCosineLR", "params": {}}, None),
        ({"type": "WarmupLR", "params": {}}, None),
        ({"type": "Nope", "params": {}}, None),
        ({"params": {}}, None),
        ({"type": "WarmupLR"}, None),
    ],
)
def test_lr_from_config(config, rate):
    found, error = lr_schedules.get_lr_from_config(config)
    assert found == rate and bool(error) is (rate is None)


def test_parse_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "--lr_schedule", "OneCycle", "--mine", "3"])
    args, rest = lr_schedules.parse_arguments()
    assert args.lr_schedule == "OneCycle" and rest == ["--mine", "3"]


def test_order_of_the_names():
    assert list(ALL) == lr_schedules.VALID_LR_SCHEDULES
