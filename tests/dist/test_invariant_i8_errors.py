"""I8: an error leaves a runtime that goes on as if the batch had not happened; destroy() returns every byte and removes
every hook.
"""

import gc
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import Case
from deepspeed.zero.param import ReleasedFace
from tests.harness.cases import case_named
from tests.harness.faults import Faults, InjectedFault, no_room
from tests.harness.lockstep import TOLERANCE, equal, live_bytes, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(60)
ZERO = {"param_persistence_threshold": 0}


def trained(
    case: Case,
    config: dict[str, Any],
    disturb: Callable[[Any, int, int], None] = lambda engine, step, micro: None,
    *,
    steps: int = 3,
    plain: bool = False,
    called: Callable[[Any], Any] = lambda engine: engine,
) -> dict[str, Tensor]:
    """The weights after so many steps, before each micro-batch of which ``disturb(engine, step, micro)`` happens.

    ``plain``: by ``loss.backward()``; ``called``: what has the forward.
    """
    engine = start(case.build(), {**config, "gradient_accumulation_steps": case.accumulation})
    for step in range(steps):
        for micro in range(case.accumulation):
            disturb(engine, step, micro)
            _backward(engine, case.seeded_loss(called(engine), here(step, micro))[0], plain=plain)
            engine.step()
    assert not_at_rest(engine) == [] and engine.global_steps == steps
    weights = full_parameters(engine.module)
    engine.destroy()
    return weights


def _backward(engine: Any, loss: Tensor, *, plain: bool = False) -> None:
    if plain:
        loss.backward()
    else:
        engine.backward(loss)


def _fail(engine: Any, case: Case, module: str, phase: str, step: int = 90, *, plain: bool = False) -> None:
    """A batch that fails in ``module``, and is given up."""
    rank = dist.get_rank()
    with Faults(engine.module, rank=rank) as faults, pytest.raises(InjectedFault):
        faults.raise_in(module, phase=phase, step=0, rank=rank)
        _backward(engine, case.seeded_loss(engine, here(step))[0], plain=plain)


def failed_batches(name: str, stage: int, phase: str, plain: bool) -> dict[str, bool]:
    """For faults in early, middle and late modules: are the weights those of a run without the failed batches, bit by
    bit?
    """
    case, config = case_named(name), make_config(stage, zero=ZERO)
    expected = trained(case, config, plain=plain)

    def same(module: str) -> bool:
        def fail(engine: Any, step: int, micro: int) -> None:
            _fail(engine, case, module, phase, 90 + step, plain=plain)

        return equal(expected, trained(case, config, fail, plain=plain))

    return {module: same(module) for module in ("inp", "layers.1.up", "head")}


ROWS = [("plain", s, p, w) for s in STAGES for p in ("forward", "backward") for w in ("engine", "loss")]
ROWS += [(f"checkpoint_{how}", 3, "backward", "engine") for how in ("reentrant", "nonreentrant")]


@pytest.mark.in_make_test(
    "plain-0-forward-engine", "plain-3-backward-engine", "checkpoint_nonreentrant-3-backward-engine"
)
@pytest.mark.parametrize(("name", "stage", "phase", "whose_backward"), ROWS)
def test_invariant_i8_a_failed_batch_has_not_happened(
    pool2: RankPool, name: str, stage: int, phase: str, whose_backward: str
) -> None:
    for same in pool2.run(failed_batches, name, stage, phase, whose_backward == "loss"):
        assert all(same.values()), same


def failed_in_a_window(stage: int, phase: str) -> bool:
    """A fault in the middle of an accumulation window: a forward loses only its batch, a backward restarts the
    window.
    """
    case, config = case_named("plain", accumulation=3), make_config(stage, zero=ZERO)

    def fail(engine: Any, step: int, micro: int) -> None:
        if phase == "forward" and micro == 1:
            _fail(engine, case, "layers.1", phase)
        if phase == "backward" and micro == 0:
            for lost in range(2):
                engine.backward(case.seeded_loss(engine, here(step, lost))[0])
                engine.step()
            _fail(engine, case, "layers.1", phase)

    return equal(trained(case, config, steps=1), trained(case, config, fail, steps=1))


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_invariant_i8_inside_an_accumulation_window(pool2: RankPool, stage: int, phase: str) -> None:
    assert pool2.run(failed_in_a_window, stage, phase) == [True, True]


def failed_step(stage: int) -> bool:
    """An optimizer that raises once: the update is given up, the next one is as if nothing had been."""
    case, config = case_named("plain"), make_config(stage, zero=ZERO)

    def fail(engine: Any, step: int, micro: int) -> None:
        engine.backward(case.seeded_loss(engine, here(50))[0])
        with patch.object(engine.basic_optimizer, "step", side_effect=InjectedFault), pytest.raises(InjectedFault):
            engine.step()

    return equal(trained(case, config, steps=2), trained(case, config, fail, steps=2))


@pytest.mark.parametrize("stage", STAGES)
def test_invariant_i8_a_failed_step(pool2: RankPool, stage: int) -> None:
    assert pool2.run(failed_step, stage) == [True, True]


def rescued(folder: str, stage: int) -> bool:
    """Whether a save and a load, each right after a plain backward that raised, keep the weights and training."""
    case = case_named("plain")
    engine = start(case.build(), make_config(stage, zero=ZERO))
    train_step(engine, case, 0)
    expected = {name: value.clone() for name, value in full_parameters(engine.module).items()}
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        _fail(engine, case, "layers.1", "backward", plain=True)
        call(folder, tag="t")
    same = equal(expected, full_parameters(engine.module))
    train_step(engine, case, 1)
    steps = engine.global_steps
    engine.destroy()
    return same and steps == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_invariant_i8_a_failed_plain_backward_is_over_for_checkpoints(
    pool2: RankPool, stage: int, tmp_path: Path
) -> None:
    assert pool2.run(rescued, str(tmp_path), stage) == [True, True]


def windows_behind_an_error() -> tuple[str, int]:
    """The error behind an update (the loss scale is at its minimum), and the micro-batches of the next update."""
    case, fp16 = case_named("plain"), {"initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1}
    engine = start(case.build(), make_config(1, gradient_accumulation_steps=3, fp16={"enabled": True, **fp16}))

    def micro(factor: float = 1.0) -> str:
        engine.backward(case.seeded_loss(engine, here(0))[0] * factor)
        return outcome(engine.step)

    said = "".join(micro(float("inf")) for _ in range(3))
    steps, micros = engine.global_steps, 0
    while engine.global_steps == steps and not micro():
        micros += 1
    engine.destroy()
    return said, micros


def test_invariant_i8_an_error_behind_an_update_ends_the_window(pool1: RankPool) -> None:
    ((said, micros),) = pool1.run(windows_behind_an_error)
    assert "already at its minimum" in said and micros == 3


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


def out_of_memory(count: int) -> tuple[set[str], bool, list[str]]:
    """What batches without memory raise; are the weights those of a run without them, bit by bit; what is not at rest
    afterwards.
    """
    case, config = case_named("plain"), make_config(3, zero=ZERO)
    said, restless = set[str](), list[str]()

    def fail(engine: Any, step: int, micro: int) -> None:
        with pytest.raises(torch.OutOfMemoryError) as error, no_room(count):
            engine.backward(case.seeded_loss(engine, here(90))[0])
        said.add(str(error.value))
        restless.extend(not_at_rest(engine))

    return said, equal(trained(case, config), trained(case, config, fail)), restless


@pytest.mark.in_make_test("1", "8")
@pytest.mark.parametrize("count", [1, 3, 6, 8])
def test_invariant_i8_no_memory_for_a_gather(pool2: RankPool, count: int) -> None:
    """The error is the allocator's own, in forward (1, 3) and backward, and a loop that skips such batches goes on."""
    for said, same, restless in pool2.run(out_of_memory, count):
        assert said == {"injected: out of memory"}
        assert same and restless == []


def _interrupted(stage: int) -> bool:
    """Ctrl-C in a late module, in the middle of a window: what the first micro-batch has accumulated stays."""
    case, config = case_named("plain", accumulation=2), make_config(stage)

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    def interrupt(engine: Any, step: int, micro: int) -> None:
        if micro == 1:
            pressed = engine.module.layers[1].register_forward_hook(press)
            with pytest.raises(KeyboardInterrupt):
                case.seeded_loss(engine.module, here(90))
            pressed.remove()

    called = attrgetter("module")
    return equal(trained(case, config, called=called), trained(case, config, interrupt, called=called))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_that_an_interrupt_ended_is_over_when_the_next_begins(pool2: RankPool, stage: int) -> None:
    """Also where the client calls ``engine.module``, whose interrupts no code of the engine's sees."""
    assert pool2.run(_interrupted, stage) == [True, True]


class Rows(nn.Module):
    """Learned tokens, which it returns as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 4), 0.5))

    def forward(self) -> Tensor:
        return self.weight


class Returning(nn.Module):
    """Tokens that go through frozen blocks, and a temperature for the loss: two parameters are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.blocks = Rows(), nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.blocks.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.blocks[1](self.blocks[0](x) + self.blocks[0](2 * self.rows()))
        return y, self.scale


def returned_parameters(stage: int) -> tuple[int, int, float]:
    """How many hooks of parameters and of an input come with a step, and are left by destroy(); the gradients' error of
    a backward that one rank alone runs after that.
    """
    torch.manual_seed(3)
    model, x = Returning(), torch.ones(2, 4, requires_grad=True)
    engine, counts = start(model, make_config(stage, zero={"param_persistence_threshold": 2})), list[int]()
    watched = [x, model.rows.weight, model.scale]
    for _ in range(3):
        y, scale = engine(x)
        counts.append(sum(len(t._backward_hooks or ()) for t in watched[1:]))
        engine.backward((y * scale).square().mean())
        counts[-1] += len(x._backward_hooks or ())
        engine.step()
    y, scale = engine(x)
    loss = (y * scale).square().mean()
    engine.destroy()
    x.grad = None
    left, error = sum(len(t._backward_hooks or ()) for t in watched[1:]), 0.0
    if dist.get_rank() == 0:
        loss.backward()
        grads = [t.grad for t in watched]
        y, scale = model(x)
        plain = torch.autograd.grad((y * scale).square().mean(), watched)
        error = max(float("inf") if g is None else scaled_error(g, p) for g, p in zip(grads, plain, strict=True))
    dist.barrier()
    return counts[-1] - counts[0], left, error


@pytest.mark.parametrize("stage", [0, 3])
def test_invariant_i8_parameters_that_are_outputs_keep_no_hook(pool2: RankPool, stage: int) -> None:
    for more, left, error in pool2.run(returned_parameters, stage):
        assert (more, left) == (0, 0) and error <= TOLERANCE
