"""I8: an error leaves a runtime that goes on as if the batch had not happened; destroy() returns every byte and removes
every hook.
"""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import Case, seeded
from deepspeed.tools.verify.reference import gate_optimizer
from deepspeed.zero.param import ReleasedFace
from tests.harness.cases import case_named
from tests.harness.faults import Faults, InjectedFault, no_room
from tests.harness.lockstep import TOLERANCE, equal, live_bytes, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, start, train_step

pytestmark = pytest.mark.timeout(60)
ZERO = {"param_persistence_threshold": 0}


def _run(case: Case, stage: int, *, phase: str, module: str, plain: bool) -> dict[str, Tensor]:
    """Three steps; with a ``phase``, a batch before each of them fails in ``module`` and is given up."""
    engine = start(case.build(), make_config(stage, zero=ZERO, gradient_accumulation_steps=case.accumulation))
    with Faults(engine.module, rank=dist.get_rank()) as faults:
        for rank in range(dist.get_world_size()):
            if phase:
                faults.raise_in(module, phase=phase, step=-1, rank=rank)
        for step in range(3):
            if phase:
                faults.step = -1
                with pytest.raises(InjectedFault):
                    loss = case.seeded_loss(engine, here(90 + step))[0]
                    if plain:
                        loss.backward()
                    else:
                        engine.backward(loss)
            faults.step = step
            if plain:
                for micro in range(case.accumulation):
                    case.seeded_loss(engine, here(step, micro))[0].backward()
                    engine.step()
            else:
                train_step(engine, case, step)
    assert not_at_rest(engine) == []
    weights = full_parameters(engine.module)
    engine.destroy()
    return weights


def failed_batches(name: str, stage: int, phase: str, plain: bool) -> dict[str, bool]:
    """For faults in early, middle and late modules: are the weights those of a run without the failed batches, bit by
    bit?
    """
    case = case_named(name)
    expected = _run(case, stage, phase="", module="", plain=plain)
    where = ["inp", "layers.1.up", "head"]
    return {module: equal(expected, _run(case, stage, phase=phase, module=module, plain=plain)) for module in where}


@pytest.mark.in_make_test("0-forward-engine_backward", "3-backward-engine_backward")
@pytest.mark.parametrize("plain", [False, True], ids=["engine_backward", "loss_backward"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_invariant_i8_a_failed_batch_has_not_happened(pool2: RankPool, stage: int, phase: str, plain: bool) -> None:
    for same in pool2.run(failed_batches, "plain", stage, phase, plain):
        assert all(same.values()), same


@pytest.mark.in_make_test("checkpoint_nonreentrant")
@pytest.mark.parametrize("name", ["checkpoint_reentrant", "checkpoint_nonreentrant"])
def test_invariant_i8_with_recomputation(pool2: RankPool, name: str) -> None:
    for same in pool2.run(failed_batches, name, 3, "backward", False):
        assert all(same.values()), same


def failed_in_a_window(stage: int, phase: str) -> tuple[bool, int]:
    """A fault in the middle of an accumulation window: a forward loses only its batch, a backward restarts the
    window.
    """
    case = case_named("plain", accumulation=3)
    weights = []
    for fail in (False, True):
        engine = start(case.build(), make_config(stage, zero=ZERO, gradient_accumulation_steps=3))
        with Faults(engine.module, rank=dist.get_rank()) as faults:
            for rank in range(dist.get_world_size()):
                faults.raise_in("layers.1", phase=phase, step=-1, rank=rank)
            micros = [0, 1, 2] if not fail else ([0, -1, 1, 2] if phase == "forward" else [0, 1, -1, 0, 1, 2])
            for micro in micros:
                faults.step = min(micro, 0)
                try:
                    engine.backward(case.seeded_loss(engine, here(0, max(micro, 0)))[0])
                    engine.step()
                except InjectedFault:
                    assert micro == -1
        weights.append(full_parameters(engine.module))
        steps = engine.global_steps
        engine.destroy()
    return equal(*weights), steps


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_invariant_i8_inside_an_accumulation_window(pool2: RankPool, stage: int, phase: str) -> None:
    for same, steps in pool2.run(failed_in_a_window, stage, phase):
        assert same
        assert steps == 1


def failed_step(stage: int) -> bool:
    """An optimizer that raises once: the update is given up, the next one is as if nothing had been."""
    case = case_named("plain")
    weights = []
    for fail in (False, True):
        engine = start(case.build(), make_config(stage, zero=ZERO))
        for step in range(2):
            if fail:
                engine.backward(case.seeded_loss(engine, here(50))[0])
                step_of = engine.basic_optimizer.step
                engine.basic_optimizer.step = _raise
                with pytest.raises(InjectedFault):
                    engine.step()
                engine.basic_optimizer.step = step_of
            train_step(engine, case, step)
        weights.append(full_parameters(engine.module))
        engine.destroy()
    return equal(*weights)


def _raise(*_: Any, **__: Any) -> None:
    raise InjectedFault("in the optimizer")


@pytest.mark.parametrize("stage", STAGES)
def test_invariant_i8_a_failed_step(pool2: RankPool, stage: int) -> None:
    assert pool2.run(failed_step, stage) == [True, True]


def checkpoint_around_the_engine(stage: int) -> float:
    """Early stop leaves a recomputation by an exception; it passes through the engine's forward and is no error."""
    case = case_named("plain")
    plain, engine = case.build(), start(case.build(), make_config(stage, zero=ZERO))
    x, y = case.batch(here(0))
    for model, back in ((plain, Tensor.backward), (engine, engine.backward)):
        out = checkpoint(lambda z, model=model: model(z) * 1.0, x.clone().requires_grad_(), use_reentrant=False)
        back((out - y).square().mean())
    engine.step()
    norm = [p.grad.clone() for p in plain.parameters()]
    for grad in norm:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    expected = float(sum(g.square().sum() for g in norm) ** 0.5)
    error = abs(engine.get_global_grad_norm() - expected)
    engine.destroy()
    return error


@pytest.mark.parametrize("stage", STAGES)
def test_invariant_i8_early_stop_is_no_error(pool2: RankPool, stage: int) -> None:
    assert max(pool2.run(checkpoint_around_the_engine, stage)) <= TOLERANCE


def _hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return on_modules + sum(
        len(p._backward_hooks or {}) + len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()
    )


def tensor_bytes() -> int:
    """Bytes of all tensors that live in this process."""
    gc.collect()
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and not thing.is_meta:  # isinstance() would ask a dead weak proxy
                storage = thing.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def destroyed(stages: list[int], fail_first: bool) -> dict[str, Any]:
    """What is left of each engine after destroy(), and whether the model goes on as plain torch and under the next
    plan.
    """
    case = case_named("tied")
    model, plain = case.build(), case.build()
    clean = _hooks(model)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    whole = live_bytes(model)
    base = tensor_bytes()
    report: dict[str, Any] = {"error": 0.0, "leaks": []}
    for stage in stages:
        engine = start(model, make_config(stage, zero=ZERO))
        if fail_first:
            loss = case.seeded_loss(engine, here(0))[0]
            engine.runtime.begin_backward()
            del loss
        train_step(engine, case, 0)
        weights = full_parameters(model)
        engine.destroy()
        engine.destroy()  # a second time is nothing
        for name, param in model.named_parameters():
            report["error"] = max(report["error"], scaled_error(param.detach(), weights[name]))
        del engine, weights
        found = {
            "hooks": _hooks(model) - clean,
            "parameter bytes": live_bytes(model) - whole,
            "all tensor bytes": max(0, tensor_bytes() - base),
            "faces": sum(isinstance(p, ReleasedFace) for p in model.parameters()),
            "parameter attributes": sorted(
                key for p in model.parameters() for key in vars(p) if key.startswith(("ds_", "_ds"))
            ),
            "gradients": sum(p.grad is not None for p in model.parameters()),
        }
        for name, module in model.named_modules():
            if set(vars(module)) != attributes[name]:
                found[f"attributes of {name!r}"] = sorted(set(vars(module)) - attributes[name])
        report["leaks"] += [f"stage {stage}: {key} {value}" for key, value in found.items() if value]
        plain.load_state_dict(model.state_dict())
        losses = [case.seeded_loss(m, here(1))[0] for m in (model, plain)]
        for loss in losses:
            loss.backward()
        report["plain"] = torch.equal(*losses) and all(
            torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )
        for each in (model, plain):
            each.zero_grad()
        del losses, loss
    return report


@pytest.mark.in_make_test("[3, 2]-amid_a_backward", "[0, 3]-amid_a_backward", "[1, 3, 0]-amid_a_backward")
@pytest.mark.parametrize("fail_first", [False, True], ids=["at_rest", "amid_a_backward"])
@pytest.mark.parametrize("stages", [[3, 2], [0, 3], [1, 3, 0]], ids=str)
def test_invariant_i8_destroy_leaves_a_plain_model(pool2: RankPool, stages: list[int], fail_first: bool) -> None:
    for report in pool2.run(destroyed, stages, fail_first):
        assert report["leaks"] == []
        assert report["error"] == 0.0
        assert report["plain"]


def destroyed_in_flight() -> tuple[list[str], bool]:
    """destroy() between forward and backward, with a graph alive and a prefetch under way."""
    case = case_named("plain")
    model = case.build()
    engine = start(model, make_config(3, zero={**ZERO, "prefetch_bucket_size": 10_000}))
    train_step(engine, case, 0)
    weights = full_parameters(model)
    loss = case.seeded_loss(engine, here(1))[0]
    engine.destroy()
    del loss
    said = []
    for call in (
        lambda: engine(torch.ones(1, 6)),
        engine.step,
        lambda: engine.backward(torch.ones((), requires_grad=True)),
    ):
        with pytest.raises(RuntimeError, match="destroyed") as error:
            call()
        said.append(str(error.value))
    return said, equal(weights, dict(model.named_parameters()))


def test_invariant_i8_destroy_amid_an_iteration(pool2: RankPool) -> None:
    for said, same in pool2.run(destroyed_in_flight):
        assert len(said) == 3
        assert same


def out_of_memory(count: int) -> tuple[str, bool, list[str]]:
    """What a batch without memory raises; are the weights those of a run without it, bit by bit; what is not at rest
    afterwards.
    """
    case = case_named("plain")
    expected = _run(case, 3, phase="", module="", plain=False)
    engine = start(case.build(), make_config(3, zero=ZERO))
    said, restless = "", []
    for step in range(3):
        try:
            with no_room(count):
                engine.backward(case.seeded_loss(engine, here(90))[0])
        except torch.OutOfMemoryError as error:
            said, restless = str(error), [*restless, *not_at_rest(engine)]
        train_step(engine, case, step)
    weights = full_parameters(engine.module)
    engine.destroy()
    return said, equal(expected, weights), restless


@pytest.mark.in_make_test("1", "8")
@pytest.mark.parametrize("count", [1, 3, 6, 8])
def test_invariant_i8_no_memory_for_a_gather(pool2: RankPool, count: int) -> None:
    """The error is the allocator's own, in forward (1, 3) and backward, and a loop that skips such batches goes on."""
    for said, same, restless in pool2.run(out_of_memory, count):
        assert said == "injected: out of memory"
        assert same and restless == []


class Interrupted(nn.Module):
    """Two blocks, in the second of which somebody presses Ctrl-C while ``armed``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
            if self.armed and block is self.blocks[-1]:
                raise KeyboardInterrupt
        return x


def _samples(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def _interrupted_module(stage: int) -> float:
    engine = start(seeded(Interrupted)(), make_config(stage, gradient_accumulation_steps=2))
    for step in range(3):
        for micro in range(2):
            if micro == 1:  # what the first micro-batch has accumulated stays
                engine.module.armed = True
                with pytest.raises(KeyboardInterrupt):
                    engine.module(_samples(step, 0))
                engine.module.armed = False
            engine.backward(engine.module(_samples(2 * step + micro, engine.global_rank)).pow(2).mean())
            engine.step()
    found = {name: value.clone() for name, value in full_parameters(engine.module).items()}
    engine.destroy()
    model = seeded(Interrupted)()
    optimizer = gate_optimizer(model)
    for step in range(3):
        for micro, rank in ((m, r) for m in range(2) for r in range(2)):
            (model(_samples(2 * step + micro, rank)).pow(2).mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(float((found[n] - p).abs().max()) for n, p in model.named_parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_that_an_interrupt_ended_is_over_when_the_next_begins(pool2: RankPool, stage: int) -> None:
    """Also where the client calls ``engine.module``, whose interrupts no code of the engine's sees."""
    assert max(pool2.run(_interrupted_module, stage)) < 1e-6
