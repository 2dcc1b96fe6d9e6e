"""The rates of this machine's update and bus, with which the share of the device is chosen."""

import torch

from deepspeed.zero.update.staged import _measure


def test_every_rate_is_a_time_an_element_and_rules_with_other_slots_are_measured_too() -> None:
    rates = _measure(12, torch.device("cpu"))
    assert all(0 < seconds < 1e-5 for seconds in (rates.host, rates.up, rates.down)), rates
    assert 0 < rates.device_share() < 1
    assert _measure(8, torch.device("cpu")).host > 0
