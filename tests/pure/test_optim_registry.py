"""From a name to an optimizer: matching, defaults, refusals with the nearest name, and what sharding may assume."""

import sys
import types

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError, OptimizerConfigError
from deepspeed.optim.muon import MuonWithAuxAdam
from deepspeed.optim.registry import build_optimizer, granularity
from deepspeed.optim.rules import (
    Adagrad,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from tests.harness.rows import for_each


def param(*shape):
    return torch.nn.Parameter(torch.ones(shape or (2, 2)))


def build(name, cfg=None, parameters=None, **kw):
    return build_optimizer(name, cfg or {}, parameters=[param()] if parameters is None else parameters, **kw)


@for_each(
    ("name", "plain", "offloaded"),
    [
        ("Adam", FusedAdam, DeepSpeedCPUAdam),
        ("adamW", FusedAdam, DeepSpeedCPUAdam),
        ("ADAGRAD", Adagrad, DeepSpeedCPUAdagrad),
        ("Lion", FusedLion, DeepSpeedCPULion),
        ("lamb", FusedLamb, FusedLamb),
        ("Muon", MuonWithAuxAdam, MuonWithAuxAdam),
        ("SGD", torch.optim.SGD, torch.optim.SGD),
        ("Adafactor", torch.optim.Adafactor, torch.optim.Adafactor),
    ],
)
def test_class_for_each_name(name, plain, offloaded):
    cfg = {"lr": 0.5}
    built = build(name, cfg)
    assert type(built) is plain and built.param_groups[0]["lr"] == 0.5 and cfg == {"lr": 0.5}
    assert type(build(name, cfg, offload=True)) is offloaded


@for_each(
    ("name", "cfg", "decoupled"),
    [
        ("Adam", {}, True),
        ("Adam", {"adam_w_mode": False}, False),
        ("AdamW", {"adam_w_mode": False}, True),
        ("adam", {"adam_w_mode": True}, True),
    ],
)
def test_decoupled_decay_rule(name, cfg, decoupled):
    for extra in ({}, {"torch_adam": True}):
        for offload in (False, True):
            group = build(name, cfg | extra, offload=offload).param_groups[0]
            assert group["decoupled_weight_decay"] is decoupled, (extra, offload)


def test_adam_defaults():
    def has(optimizer, kind=FusedAdam, **settings):
        group = optimizer.param_groups[0]
        return type(optimizer) is kind and {key: group[key] for key in settings} == settings

    adamw = torch.optim.AdamW
    assert has(build("AdamW", {"betas": [0, 0.99]}), weight_decay=0.0, lr=1e-3, betas=(0.0, 0.99), fused=True)
    assert has(build("AdamW", {"torch_adam": True}), adamw, weight_decay=0.01, fused=True)
    amsgrad = build("AdamW", {"amsgrad": True, "bias_correction": True, "set_grad_none": True})
    assert has(amsgrad, adamw, weight_decay=0.0, amsgrad=True)
    assert type(build("Adam", {"adam_w_mode": False, "fused": False})) is torch.optim.Adam
    foreach = build("AdamW", {"torch_adam": True, "foreach": True}).param_groups[0]
    assert foreach["foreach"] is True and not foreach["fused"]
    assert build("AdamW", {"torch_adam": True, "foreach": False}).param_groups[0]["fused"] is None
    assert type(build("AdamW", {"foreach": None, "fp32_optimizer_states": True})) is FusedAdam
    assert build("Adam", {"bias_correction": False}).param_groups[0]["bias_correction"] is False


NEAR = {"AdmW": "AdamW", "adamax": "Adamax", "sgd": "SGD", "Lamd": "Lamb", "Optimizer": "", "lr_scheduler": ""}


@for_each(("name", "near"), NEAR.items())
def test_unknown_name(name, near):
    with pytest.raises(OptimizerConfigError, match=f'"{name}" is unknown') as info:
        build(name)
    assert f"did you mean '{near}'" in str(info.value) or not near


@for_each("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_removed_names(name):
    with pytest.raises(AssertionError, match="removed"):
        build(name)


def test_unknown_key_names_optimizer_key_and_valid_keys():
    with pytest.raises(OptimizerConfigError, match="weight_decy") as info:
        build("AdamW", {"weight_decy": 0.1})
    assert all(words in str(info.value) for words in ('"AdamW"', "did you mean 'weight_decay'", "betas"))
    with pytest.raises(OptimizerConfigError, match="momentum"):
        build("SGD", {"momentumm": 0.9})


@for_each(
    ("cfg", "words"),
    [
        ({"lr": "1e-3"}, "without quotes: 0.001"),
        ({"betas": ["0.9", 0.99]}, "optimizer.params.betas"),
        ({"lr": "auto"}, "nothing filled it in"),
        ({"max_grad_norm": 1.0}, "gradient_clipping"),
        ({"max_grad_norm": 0.0}, "gradient_clipping"),
        ({"lr": [1]}, "refused"),
    ],
)
def test_bad_values(cfg, words):
    with pytest.raises(ValueError, match=words) as info:
        build("AdamW", cfg)
    assert isinstance(info.value, DeepSpeedConfigError)


def test_parameter_forms():
    first, second = param(), param(3)
    groups = [{"params": iter([first]), "lr": 0.7}, {"params": []}, {"params": second, "weight_decay": 0.2}]
    opt = build("AdamW", {"lr": 0.1}, groups)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in opt.param_groups] == [(0.7, 0.0, 1), (0.1, 0.2, 1)]
    named = build("AdamW", {}, iter([("a", first), ("b", second)]))
    assert named.param_groups[0]["params"] == [first, second]
    for twice in ([first, first], [{"params": [first]}, {"params": [first]}], [("a", first), ("b", first)]):
        with pytest.raises(OptimizerConfigError, match="listed twice"):
            build("AdamW", {}, twice)
    for nothing in ([], [{"params": []}]):
        with pytest.raises(OptimizerConfigError, match="no parameters"):
            build("AdamW", {}, nothing)


def test_mup_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(ImportError, match="pip install mup"):
        build("MuAdam")
    fake = types.ModuleType("mup")
    fake.MuSGD = torch.optim.SGD
    monkeypatch.setitem(sys.modules, "mup", fake)
    assert type(build("musgd", {"lr": 0.3})) is torch.optim.SGD


class Inherited(torch.optim.RAdam):
    pass


class OwnStep(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


class Declared(OwnStep):
    elementwise = True


ELEMENT = ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]


def test_granularity():
    # the subclass first: torch wraps ``step`` of whichever class it meets first
    assert granularity(Inherited([param()])) == "element"
    assert granularity(OwnStep([param()])) == "parameter"
    assert granularity(Declared([param()])) == "element"
    for cls in (FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad, Adagrad):
        assert granularity(cls([param()])) == "element"
    for cls in (FusedLamb, MuonWithAuxAdam, torch.optim.Adafactor, torch.optim.Muon):
        assert granularity(cls([param()])) == "parameter"
    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(OptimizerConfigError, match=cls.__name__):
            granularity(cls([param()]))


@for_each("cls", [*(getattr(torch.optim, n) for n in ELEMENT), FusedAdam, DeepSpeedCPUAdam, FusedLion, Adagrad])
def test_element_granularity_means_that_a_cut_changes_nothing(cls):
    gen = torch.Generator().manual_seed(0)
    start, grads = torch.randn(12, generator=gen), torch.randn(3, 12, generator=gen)
    results = []
    for sizes in ([12], [5, 0, 7]):
        parts = [torch.nn.Parameter(piece.clone()) for piece in start.split(sizes)]
        opt = cls(parts, lr=0.1)
        assert granularity(opt) == "element"
        for grad in grads:
            for part, piece in zip(parts, grad.split(sizes), strict=True):
                part.grad = piece.clone()
            opt.step()
        results.append(torch.cat([part.detach() for part in parts]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
