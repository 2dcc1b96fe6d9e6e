"""Weights of experts over ranks, seen from outside: the functions for access, streams, reallocation, files, Muon."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.optim.muon import orthogonalize
from deepspeed.reallocate import ParameterReallocation
from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.dist.test_experts import ADAMW, DROPLESS, config_of, model_of
from tests.dist.test_lora_plan import RANK, ByHand
from tests.harness.experts import HIDDEN, tokens_of
from tests.harness.training import outcome, start

pytestmark = pytest.mark.timeout(180)
SLOTS = ("exp_avg", "exp_avg_sq")


def engine_step(engine: Any, step: int) -> None:
    engine.backward(engine(tokens_of(step, dist.get_rank())))
    engine.step()


def plain_gradients(plain: nn.Module, step: int) -> None:
    """Gradients of one process with the batches of all ranks; zeros where an expert got no token."""
    plain.zero_grad()
    world = dist.get_world_size()
    (sum(plain(tokens_of(step, rank)) for rank in range(world)) / world).backward()  # type: ignore[union-attr]
    for param in plain.parameters():
        if param.requires_grad and param.grad is None:
            param.grad = torch.zeros_like(param)


def every_access(kind: str, ep: int, stage: int, folder: str) -> list[str]:
    """Read and write through every function after a step; what differs from one process."""
    options = DROPLESS if kind == "layered" else {}
    plain = model_of(kind, 1, **options)
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    config = {**config_of(kind, ep, stage, zero=gathers), "gradient_clipping": 0.0}
    engine = start(model_of(kind, ep, **options), config)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW["params"])  # type: ignore[arg-type]
    plain_gradients(plain, 0)
    optimizer.step()
    engine_step(engine, 0)
    want, own = dict(plain.named_parameters()), dict(engine.module.named_parameters())
    faults: list[str] = []

    def compare(what: str, read: Any, wanted: Any) -> None:
        faults.extend(f"{what}: {n}" for n, p in own.items() if scaled_error(read(p), wanted(want[n])) > 1e-6)

    def states() -> None:
        compare("master", safe_get_full_fp32_param, lambda w: w.detach())
        for slot in SLOTS:
            read = lambda p, slot=slot: safe_get_full_optimizer_state(p, slot)  # noqa: E731
            compare(slot, read, lambda w, slot=slot: optimizer.state[w][slot])

    states()
    with deepspeed.zero.GatheredParameters(list(own.values()), modifier_rank=0), torch.no_grad():
        compare("gathered", lambda p: p, lambda w: w.detach())
        for param in own.values():
            param.mul_(0.5)
    for name, param in own.items():
        with torch.no_grad():
            want[name].mul_(0.5)
        safe_set_full_fp32_param(param, want[name].detach() + 0.01)
        for slot in SLOTS:
            safe_set_full_optimizer_state(param, optimizer.state[want[name]][slot] * 2, slot)
    for value in want.values():
        with torch.no_grad():
            value.add_(0.01)
        for slot in SLOTS:
            optimizer.state[value][slot].mul_(2)
    if kind == "layered":  # the other rank's experts, which this rank does not name, were halved there too
        for name in want.keys() - own.keys():
            with torch.no_grad():
                want[name].sub_(0.01).mul_(0.5).add_(0.01)
    states()
    plain_gradients(plain, 1)
    engine.backward(engine(tokens_of(1, dist.get_rank())))
    compare("gradient", safe_get_full_grad, lambda w: w.grad)
    for name, param in own.items():
        safe_set_full_grad(param, want[name].grad * 3)  # type: ignore[operator]
    for value in want.values():
        value.grad *= 3  # type: ignore[operator]
    optimizer.step()
    engine.step()
    states()
    wanted = {name: value.detach() for name, value in want.items()}
    with engine.stream_weights() as flow:
        streamed = {name: value.clone() for bucket in flow for name, value in bucket}
    faults += [f"streamed {n}" for n in wanted if n not in streamed or scaled_error(streamed[n], wanted[n]) > 1e-6]
    other = model_of(kind, 1, **options)
    with torch.no_grad():
        for param in other.parameters():
            param.fill_(-3.0)
    ParameterReallocation(engine, other).run()
    faults += [f"moved {n}" for n, p in other.named_parameters() if scaled_error(p.detach(), wanted[n]) > 1e-6]
    engine.save_16bit_model(folder)
    saved = torch.load(f"{folder}/pytorch_model.bin")
    faults += [f"saved {n}" for n in wanted if n not in saved or scaled_error(saved[n], wanted[n]) > 1e-6]
    engine.destroy()
    return faults


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["stacked", "layered"])
def test_every_access_sees_and_writes_whole_experts(pool2: Any, tmp_path: Path, kind: str, stage: int) -> None:
    assert pool2.run(every_access, kind, 2, stage, str(tmp_path)) == [[], []]


MUON = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}


def of_muon(stage: int) -> dict[str, float]:
    """Two steps of Muon beside a plain Muon that turns the matrix of each expert on its own; the largest errors."""
    plain, engine_model = model_of("stacked", 1), model_of("stacked", 1)
    config = config_of("stacked", 2, stage)
    config |= {"gradient_clipping": 0.0, "optimizer": {"type": "Muon", "params": MUON}}
    engine = start(engine_model, config)
    experts = {n: p for n, p in plain.named_parameters() if "experts" in n}
    # the others follow the engine, whose Muon of single matrices has tests of its own
    momenta = {name: [torch.zeros(p.shape[1:]) for _ in p] for name, p in experts.items()}
    own, worst = dict(engine.module.named_parameters()), {"gradient": 0.0, "expert": 0.0}
    for step in range(2):
        plain_gradients(plain, step)
        engine.backward(engine(tokens_of(step, dist.get_rank())))
        for name, stack in experts.items():
            assert stack.grad is not None
            worst["gradient"] = max(worst["gradient"], scaled_error(safe_get_full_grad(own[name]), stack.grad))
            for matrix, grad, momentum in zip(stack.detach(), stack.grad, momenta[name], strict=True):
                momentum.lerp_(grad, 1 - MUON["momentum"])
                turned = orthogonalize(grad.lerp(momentum, MUON["momentum"]))
                scale = max(1.0, grad.shape[0] / grad.shape[1]) ** 0.5
                matrix.mul_(1 - MUON["lr"] * MUON["weight_decay"]).sub_(turned, alpha=MUON["lr"] * scale)
        engine.step()
        for name, param in plain.named_parameters():
            value = safe_get_full_fp32_param(own[name])
            if name in experts:
                worst["expert"] = max(worst["expert"], scaled_error(value, param.detach()))
            else:
                param.data.copy_(value)
    engine.destroy()
    return worst


@pytest.mark.in_make_test("1", "3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_turns_the_matrix_of_each_expert_on_its_own(pool4: Any, stage: int) -> None:
    for found in pool4.run(of_muon, stage):
        assert max(found.values()) < 2e-6, found


def moved_with_muon(before: tuple[int, int], after: tuple[int, int], folder: str) -> float:
    """Train with Muon, save, train on; load into other (stage, ep), train on: the largest difference of losses."""
    runs = []
    for first, (stage, ep) in zip((True, False), (before, after), strict=True):
        config = {**config_of("stacked", ep, stage), "optimizer": {"type": "Muon", "params": MUON}}
        engine = start(model_of("stacked", 1), config)
        for step in range(2) if first else ():
            engine_step(engine, step)
        engine.save_checkpoint(folder) if first else engine.load_checkpoint(folder)
        losses = []
        for step in range(2, 4):
            losses.append(float(engine(tokens_of(step, dist.get_rank())).detach()))
            engine_step(engine, step)
        runs.append(losses)
        engine.destroy()
    return max(abs(a - b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 2), (3, 4)), pytest.param((3, 4), (2, 1), marks=pytest.mark.exhaustive)],
)
def test_momentum_of_muon_follows_its_expert_to_another_rank(
    pool4: Any, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    assert max(pool4.run(moved_with_muon, before, after, str(tmp_path))) <= 1e-6


def refused() -> list[str]:
    said = []
    for kind, etp in (("Muon", 2), ("Lamb", 1)):
        config = {**config_of("stacked", 2, 1, etp=etp), "optimizer": {"type": kind, "params": {"lr": 1e-2}}}
        said.append(outcome(lambda config=config: start(model_of("stacked", 1), config)))
    return said


def test_an_optimizer_of_whole_tensors_is_told_that_experts_are_divided(pool4: Any) -> None:
    for said in pool4.run(refused):
        assert all("looks at whole tensors, of which a rank has some experts" in s for s in said)


def adapted_layers(stage: int) -> dict[str, float]:
    """Two steps of adapters on experts that have a name each, beside one process; the largest errors."""
    plain, model = (model_of("layered", ways, **DROPLESS) for ways in (1, 2))
    for made in (plain, model):
        made.requires_grad_(False)
        torch.manual_seed(3)
        start_of_each = torch.randn(RANK, HIDDEN) / 4  # whichever experts a rank has
        for expert in [m for m in made.modules() if type(m).__name__ == "Expert"]:
            expert.up = ByHand(expert.up)
            expert.up.first.data.copy_(start_of_each)
    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    config = {**config_of("layered", 2, stage), "gradient_clipping": 0.0}
    engine = start(model, config, model_parameters=[p for p in model.parameters() if p.requires_grad])
    optimizer = torch.optim.AdamW(trained.values(), **ADAMW["params"])  # type: ignore[arg-type]
    worst = {"gradient": 0.0, "parameter": 0.0}
    for step in range(2):
        plain_gradients(plain, step)
        engine.backward(engine(tokens_of(step, dist.get_rank())))
        own = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
        assert len(own) == len(trained) // 2
        for name, param in own.items():
            worst["gradient"] = max(worst["gradient"], scaled_error(safe_get_full_grad(param), trained[name].grad))
        optimizer.step()
        engine.step()
        for name, param in own.items():
            error = scaled_error(safe_get_full_fp32_param(param), trained[name].detach())
            worst["parameter"] = max(worst["parameter"], error)
    engine.destroy()
    return worst


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_on_single_experts_belong_to_their_ranks(pool4: Any, stage: int) -> None:
    for found in pool4.run(adapted_layers, stage):
        assert max(found.values()) < 2e-6, found
