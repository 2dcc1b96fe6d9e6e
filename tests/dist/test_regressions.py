"""Faults that were found by review, each with the guarantee that it had broken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import seeded
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, make_config, outcome, start

pytestmark = pytest.mark.timeout(120)
WIDTH = 8
LAYERS = 2


def samples(step: int, rank: int) -> Tensor:
    """A small batch."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Mean square of the output."""
    return model(x).pow(2).mean()


def plain() -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Pair(nn.Module):
    """Two matrices that are used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.v = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)


class Slot:
    """An output object without ``__dict__``."""

    __slots__ = ("h",)

    def __init__(self, h: Any) -> None:
        self.h = h


class Slotted(Pair):
    """The output hides in an object with slots, beside a visible one that no loss uses."""

    def forward(self, x: Tensor) -> Any:
        """A slot object and a tensor."""
        return Slot(F.linear(torch.tanh(F.linear(x, self.w)), self.v)), x.sum() * self.w.sum()


class Hidden(Pair):
    """The output hides in a closure, where nobody can find it."""

    def forward(self, x: Tensor) -> Any:
        """A function that returns the output."""
        y = F.linear(torch.tanh(F.linear(x, self.w)), self.v)
        return lambda: y


class Stashing(Pair):
    """An auxiliary loss stays on the module."""

    def forward(self, x: Tensor) -> Tensor:
        """The output; ``self.extra`` is the auxiliary loss."""
        y = torch.tanh(F.linear(x, self.w))
        self.extra = F.linear(torch.tanh(F.linear(y, self.v)), self.v).pow(2).mean()
        return y


class Detaching(Pair):
    """A first use of the weight that does not differentiate it: its backward is the last to run."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return F.linear(torch.tanh(F.linear(F.linear(x, self.w.detach()), self.v)), self.w)


class Chain(nn.Module):
    """A linear layer, then the same block twice."""

    def __init__(
        self, block: Callable[[], nn.Module], unwrap: Callable[[Any], Tensor], *, extra: bool, evaluate: bool
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(LAYERS)])
        self.unwrap = unwrap
        self.extra = extra
        self.evaluate = evaluate

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the output, plus what the blocks have stashed."""
        x = self.first(x)
        for block in self.blocks:
            x = self.unwrap(block(x))
        loss = x.pow(2).mean()
        return loss + sum(block.extra for block in self.blocks) if self.extra else loss  # type: ignore[misc]


CHAINS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], bool, bool]] = {
    "slots": (Slotted, lambda out: out[0].h, False, False),
    "closure": (Hidden, lambda out: out(), False, False),
    "closure and an evaluation before backward": (Hidden, lambda out: out(), False, True),
    "stash": (Stashing, lambda out: out, True, False),
    "detach": (Detaching, lambda out: out, False, False),
}


def chain(name: str) -> Chain:
    """One of the models above."""
    block, unwrap, extra, evaluate = CHAINS[name]
    return seeded(lambda: Chain(block, unwrap, extra=extra, evaluate=evaluate))()


def worst_error(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Tensor], Tensor],
    config: dict[str, Any],
    *,
    window: int = 1,
) -> float:
    """Largest absolute difference to plain one-process AdamW after three steps."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.manual_seed(1)
    reference = build()
    options = config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(reference.parameters(), **options)
    torch.manual_seed(1)
    engine = start(build(), config)
    for step in range(3 * window):
        for other in range(world):
            (loss(reference, samples(step, other)) / (world * window)).backward()
        if step % window == window - 1:
            optimizer.step()
            optimizer.zero_grad()
        engine.backward(loss(engine, samples(step, rank)))
        engine.step()
    expected = dict(reference.named_parameters())
    found = max(
        float((value - expected[name].detach()).abs().max()) for name, value in full_parameters(engine.module).items()
    )
    engine.destroy()
    return found


def chain_error(name: str, stage: int) -> float:
    """Error of one of the chains."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x)
        if CHAINS[name][3]:
            with torch.no_grad():
                model(x)
        return value

    return worst_error(lambda: chain(name), loss, make_config(stage, zero={"param_persistence_threshold": 0}))


@pytest.mark.parametrize("name", list(CHAINS))
def test_a_backward_never_reads_released_weights(pool2: Any, name: str) -> None:
    """Outputs nobody sees, stashed losses and detached uses find their weights (these raised, or crashed the
    process).
    """
    assert max(pool2.run(chain_error, name, 3)) < 1e-6


def regularised(view: bool) -> tuple[float, float]:
    """Norms of the gradient with a regulariser built inside GatheredParameters, and by hand."""
    model = seeded(plain)()
    engine = start(model, make_config(3, zero={"param_persistence_threshold": 0}))
    x = samples(0, 0)
    loss = square_loss(engine, x)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        penalty = sum(((p.t() if view and p.dim() > 1 else p) ** 2).sum() for p in model.parameters())
    engine.backward(loss + penalty)
    engine.step()
    reference = seeded(plain)()
    (square_loss(reference, x) + sum((p**2).sum() for p in reference.parameters())).backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    got = engine.get_global_grad_norm()
    engine.destroy()
    return got, float(norm)


@pytest.mark.parametrize("view", [False, True])
def test_a_regulariser_built_in_gathered_parameters_has_its_gradient(pool2: Any, view: bool) -> None:
    """What autograd saves inside GatheredParameters is read after it (was: NaN gradients, or a crash of the
    process).
    """
    for got, expected in pool2.run(regularised, view):
        assert got == pytest.approx(expected, rel=1e-5)


def gradients_of_released() -> list[tuple[int, ...]]:
    """Shapes of ``torch.autograd.grad`` with respect to sharded parameters."""
    model = seeded(plain)()
    engine = start(model, make_config(3, zero={"param_persistence_threshold": 0}))
    found = torch.autograd.grad(square_loss(engine, samples(0, 0)), list(model.parameters()))
    engine.zero_grad()
    engine.destroy()
    return [tuple(g.shape) for g in found]


def test_autograd_grad_accepts_released_parameters(pool2: Any) -> None:
    """Differentiating with respect to a released parameter reads none of its values."""
    assert pool2.run(gradients_of_released) == [[(WIDTH, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,)]] * 2


def reductions_of_a_window(stage: int) -> tuple[float, float]:
    """Reductions per unit and update with an accumulation of four, and the parameter error."""
    config = make_config(stage, gradient_accumulation_steps=4)
    error = worst_error(plain, square_loss, config, window=4)
    engine = start(plain(), config)
    for step in range(8):
        engine.backward(square_loss(engine, samples(step, 0)))
        engine.step()
    count = engine.runtime.counts.reductions / 2 / len(engine.runtime.units)
    engine.destroy()
    return count, error


@pytest.mark.parametrize("stage", [0, 1])
def test_a_window_is_reduced_once_where_gradients_stay_local(pool2: Any, stage: int) -> None:
    """One reduction per unit and update (was two: the first gradient of the last backward sent the unit off)."""
    for count, error in pool2.run(reductions_of_a_window, stage):
        assert count == 1.0
        assert error < 1e-6


def small_gradient_step(accumulation: str) -> float:
    """How far one update moves a weight whose gradient is below fp16's range."""
    model = seeded(plain)()
    engine = start(
        model,
        make_config(
            2, fp16={"enabled": True, "initial_scale_power": 12}, data_types={"grad_accum_dtype": accumulation}
        ),
    )
    before = full_masters(model)
    engine.backward((engine(samples(0, 0).half()).float() * 1e-3).pow(2).mean())
    engine.step()
    moved = float((full_masters(model) - before).abs().sum())
    engine.destroy()
    return moved


def full_masters(model: nn.Module) -> Tensor:
    """The master of the first weight."""
    found = deepspeed.utils.safe_get_full_fp32_param(next(model.parameters()))
    assert found is not None
    return found.clone()


def test_unscaling_does_not_underflow_in_the_accumulation_dtype(pool2: Any) -> None:
    """fp16 gradients are divided by the loss scale after they are converted (small ones vanished)."""
    half, single = (pool2.run(small_gradient_step, dtype)[0] for dtype in ("fp16", "fp32"))
    assert half == pytest.approx(single, rel=1e-2)


class Doubles(nn.Module):
    """A float64 parameter between float32 ones, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.h = nn.Linear(WIDTH, WIDTH)
        kinds = [torch.bool, torch.int16, torch.uint8, torch.float64, torch.complex64, torch.bfloat16]
        for index, dtype in enumerate(kinds):
            self.register_buffer(f"scalar{index}", torch.ones((), dtype=dtype))
            self.register_buffer(f"matrix{index}", torch.ones(3, 2, dtype=dtype).t())

    def forward(self, x: Tensor) -> Tensor:
        """A float64 output."""
        return self.h(x).double() @ self.w


def doubles_error(stage: int) -> float:
    """Error of the model above."""
    return worst_error(Doubles, square_loss, make_config(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_float64_parameters_and_buffers_of_any_dtype(pool2: Any, stage: int) -> None:
    """Every buffer dtype and shape travels (0-dim bool and int16 failed on gloo); float64 gradients keep their
    precision.
    """
    assert max(pool2.run(doubles_error, stage)) < 1e-7


def refusals() -> dict[str, str]:
    """What each mistake raises, and what is left of the model after a failed initialize."""
    said = {}
    engine = start(model := plain(), make_config(2))
    model[2].weight.data = model[2].weight.data.clone()
    said["data"] = outcome(lambda: engine(samples(0, 0)))
    engine.destroy()
    engine = start(model := plain(), make_config(1))
    for step in range(2):
        engine.backward(square_loss(engine, samples(step, 0)))
        if step == 1:  # between forward and step, and of one module only
            model[2].weight.data = model[2].weight.data.clone()
        engine.step()
    said["data later"] = outcome(lambda: engine(samples(0, 0)))
    engine.destroy()
    engine = start(model := plain(), make_config(1, gradient_accumulation_steps=4))
    engine(samples(0, 0))
    model.double()
    said["cast"] = outcome(lambda: engine(samples(0, 0)))
    engine.destroy()
    engine = start(model := plain(), make_config(1))
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    said["assign"] = outcome(lambda: engine(samples(0, 0)))
    said["group"] = outcome(lambda: engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}))
    engine.destroy()
    said["lazy"] = outcome(lambda: start(nn.Sequential(nn.LazyLinear(4)), make_config(3)))
    twisted = nn.Linear(2, 2, dtype=torch.complex64)
    said["complex"] = outcome(lambda: start(twisted, make_config(3)))
    model = plain()
    said["schedule"] = outcome(
        lambda: start(model, make_config(3, scheduler={"type": "OneCycle", "params": {"nope": 1}}))
    )
    said["left"] = str(
        [len(m._forward_hooks) for m in model.modules()] + [type(p).__name__ for p in model.parameters()]
    )
    used = torch.optim.Adam(model.parameters())
    square_loss(model, samples(0, 0)).backward()
    used.step()
    said["stepped"] = outcome(lambda: start(model, make_config(3, optimizer=None), optimizer=used))
    said["left again"] = str(
        [len(m._forward_hooks) for m in model.modules()] + [type(p).__name__ for p in model.parameters()]
    )
    return said


def test_weights_that_would_silently_not_be_trained_are_refused(pool2: Any) -> None:
    """New data, new Parameter objects, late groups, lazy and complex parameters: a sentence each; a failed initialize
    leaves no trace.
    """
    for said in pool2.run(refusals):
        for case, words in {
            "data": "given other data",
            "data later": "given other data",
            "cast": "moved or cast",
            "assign": "assign=True",
            "group": "add_param_group",
            "lazy": "lazy",
            "complex": "complex",
            "schedule": "nope",
            "stepped": "already taken steps",
        }.items():
            assert words in said[case], (case, said[case])
        assert said["left"] == said["left again"] == str([0] * 4 + ["Parameter"] * 4)


def modes() -> tuple[bool, ...]:
    """``training`` of engine and module after eval() and train()."""
    engine = start(plain(), make_config(1))
    engine.eval()
    off = engine.training, engine.module.training
    engine.train()
    on = engine.training, engine.module.training
    engine.destroy()
    return *off, *on


def test_the_engine_itself_knows_its_mode(pool2: Any) -> None:
    """``engine.training`` follows ``eval()`` and ``train()``."""
    assert pool2.run(modes) == [(False, False, True, True)] * 2


class Interrupted(nn.Module):
    """Two blocks, in the second of which somebody presses Ctrl-C while ``armed``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
            if self.armed and block is self.blocks[-1]:
                raise KeyboardInterrupt
        return x


def _interrupted_module(stage: int) -> float:
    engine = start(seeded(Interrupted)(), make_config(stage, gradient_accumulation_steps=2))
    for step in range(3):
        for micro in range(2):
            if micro == 1:  # what the first micro-batch has accumulated stays
                engine.module.armed = True
                with pytest.raises(KeyboardInterrupt):
                    engine.module(samples(step, 0))
                engine.module.armed = False
            engine.backward(engine.module(samples(2 * step + micro, engine.global_rank)).pow(2).mean())
            engine.step()
    found = {name: value.clone() for name, value in full_parameters(engine.module).items()}
    engine.destroy()
    model = seeded(Interrupted)()
    optimizer = torch.optim.AdamW(model.parameters(), **make_config(0)["optimizer"]["params"])
    for step in range(3):
        for micro, rank in ((m, r) for m in range(2) for r in range(2)):
            (square_loss(model, samples(2 * step + micro, rank)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(float((found[n] - p).abs().max()) for n, p in model.named_parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_that_an_interrupt_ended_is_over_when_the_next_begins(pool2: RankPool, stage: int) -> None:
    """Also where the client calls ``engine.module``, whose interrupts no code of the engine's sees."""
    assert max(pool2.run(_interrupted_module, stage)) < 1e-6
