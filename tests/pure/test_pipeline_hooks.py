"""What hooks of a client do with gradients in the middle of a pipeline's batch counts as it does in plain torch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.pipe import DualPipeVModule, PipelineModule

MICROS, STEPS = 3, 3
Hook = Callable[[nn.Parameter], None]


def _model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)]


def _loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, labels)


def _batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(2, 4, generator=generator), torch.randn(2, 2, generator=generator)


def _config(gas: int = MICROS) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.0, "torch_adam": True}}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": gas}
    return sizes | {"gradient_clipping": 0.0, "optimizer": optimizer}


def _piped(hook: Hook, *, stage: int, early: bool) -> list[torch.Tensor]:
    """The parameters after some batches; ``early``: the hook is there before the engine's own."""
    module = PipelineModule(_model(), num_stages=1, loss_fn=_loss)
    parameters = list(module.parameters())
    handles = [p.register_post_accumulate_grad_hook(hook) for p in parameters] if early else []
    engine, *_ = deepspeed.initialize(model=module, config=_config() | {"zero_optimization": {"stage": stage}})
    handles += [] if early else [p.register_post_accumulate_grad_hook(hook) for p in parameters]
    data = _batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.destroy()
    return [p.detach().clone() for p in parameters]


def _plain(hook: Hook) -> list[torch.Tensor]:
    model = nn.Sequential(*_model())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    data = _batches()
    for _ in range(STEPS):
        for _ in range(MICROS):
            inputs, labels = next(data)
            (_loss(model(inputs), labels) / MICROS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def _halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


def _halve_in_place(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _add_a_constant(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad + 0.25


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("hook", [_halve, _halve_in_place, _add_a_constant])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_hook_puts_in_the_place_of_a_gradient_is_the_gradient(stage: int, hook: Hook, early: bool) -> None:
    for mine, plain in zip(_piped(hook, stage=stage, early=early), _plain(hook), strict=True):
        assert torch.allclose(mine, plain, atol=1e-6)


def test_a_gradient_that_a_hook_takes_away_is_zero() -> None:
    def drop(parameter: nn.Parameter) -> None:
        parameter.grad = None

    before = [p for layer in _model() for p in layer.parameters()]
    for mine, start in zip(_piped(drop, stage=1, early=False), before, strict=True):
        assert torch.equal(mine, start)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_that_a_hook_keeps_is_no_memory_of_later_batches(stage: int) -> None:
    runs: list[list[torch.Tensor]] = []

    def keep(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter.grad.data_ptr() not in {grad.data_ptr() for grad in runs[-1]}:
            runs[-1].append(parameter.grad)

    for run in (lambda: _piped(keep, stage=stage, early=False), lambda: _plain(keep)):
        runs.append([])
        run()
    mine, plain = runs
    assert len(mine) >= 4 * STEPS - 3 and len(plain) == 4 * STEPS
    for grad in mine[:4]:  # of the first batch
        assert any(grad.shape == other.shape and torch.allclose(grad, other, atol=1e-6) for other in plain[:4])


def test_a_v_shaped_pipeline_wants_two_micro_batches_a_stage() -> None:
    module = DualPipeVModule(_model(), 1, None, _loss)
    with pytest.raises(AssertionError, match="needs gradient_accumulation_steps of 2 or more, not 1"):
        deepspeed.initialize(model=module, config=_config(1))
    engine, *_ = deepspeed.initialize(model=module, config=_config(2))
    engine.train_batch(_batches())
    engine.set_train_batch_size(2)
    with pytest.raises(AssertionError, match="needs gradient_accumulation_steps"):
        engine.train_batch(_batches())
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_pipeline_trains_as_it_does_without(stage: int) -> None:
    runs = []
    for compiled in (False, True):
        graphs: list[Any] = []
        module = PipelineModule(_model(), num_stages=1, loss_fn=_loss)
        engine, *_ = deepspeed.initialize(model=module, config=_config() | {"zero_optimization": {"stage": stage}})
        if compiled:
            engine.compile(backend=lambda graph, _, seen=graphs: seen.append(graph) or graph.forward)
        data = _batches()
        runs.append([float(engine.train_batch(data)) for _ in range(STEPS)] + [float(engine.eval_batch(data))])
        assert engine.is_compiled is compiled is bool(graphs)
        engine.destroy()
    assert runs[0] == runs[1]
