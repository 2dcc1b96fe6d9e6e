"""Wrong uses raise the exception types that programs written for DeepSpeed 0.19 catch. Those of schedules are in
test_lr_schedules.py, of optimizers in test_optim_update_rules.py, of leaf modules in test_memory_pools.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from tests.harness.rows import for_each
from tests.pure.test_public_api import make_engine

Engines = Callable[[str], Any]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """An engine of each kind, made once."""
    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in made:
            made[kind] = make_engine(kind)
        return made[kind]

    yield get
    for engine in made.values():
        engine.destroy()


def _initialize(model: Any = None, arguments: dict[str, Any] | None = None, **keys: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 1, **keys}
    return deepspeed.initialize(model=model or nn.Linear(2, 2), config=config, **arguments or {})


def _weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


ADAM = {"type": "Adam", "params": {"lr": 1e-3}}
CONFIGURATIONS: dict[str, tuple[type[BaseException], dict[str, Any]]] = {
    "a batch that does not close": (AssertionError, {"train_batch_size": 7, "gradient_accumulation_steps": 2}),
    "an unknown key of a block": (ValueError, {"zero_optimization": {"stagee": 1}}),
    "keys that cannot be combined": (
        AssertionError,
        {"managed_gradient_accumulation": False, "zero_optimization": {"overlap_comm": True}},
    ),
    "a sum of gradients that stage 3 has not": (
        ValueError,
        {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
    ),
    "stage 2 without an optimizer": (AssertionError, {"zero_optimization": {"stage": 2}}),
    "an unknown optimizer": (AssertionError, {"optimizer": {"type": "Adamm"}}),
    "max_grad_norm": (ValueError, {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}),
    "an unknown schedule": (AssertionError, {"optimizer": ADAM, "scheduler": {"type": "warmuplr", "params": {}}}),
}
WITHOUT_ENGINE: dict[str, tuple[type[BaseException], Callable[[], Any]]] = {
    **{name: (error, partial(_initialize, **keys)) for name, (error, keys) in CONFIGURATIONS.items()},
    "no model": (AssertionError, lambda: deepspeed.initialize(config={"train_batch_size": 1})),
    "no configuration": (AssertionError, lambda: deepspeed.initialize(model=nn.Linear(2, 2))),
    "two configurations": (AssertionError, lambda: _initialize(arguments={"args": {"deepspeed_config": "a.json"}})),
    "parameters listed twice": (
        ValueError,
        lambda: _initialize(arguments={"model_parameters": _weights() * 2}, optimizer=ADAM),
    ),
    "what optimizer= returns": (AssertionError, lambda: _initialize(arguments={"optimizer": lambda given: [*given]})),
    "a pipeline of no stages": (RuntimeError, lambda: PipelineModule([nn.Linear(2, 2)])),
    "a layer that is none": (RuntimeError, lambda: LayerSpec(int)),
    "an external parameter that is none": (
        RuntimeError,
        lambda: deepspeed.zero.register_external_parameter(nn.Linear(2, 2), torch.ones(2)),
    ),
}


@for_each("case", WITHOUT_ENGINE)
def test_without_an_engine(case: str) -> None:
    kind, call = WITHOUT_ENGINE[case]
    with pytest.raises(kind):
        call()


def _nested(engine: Any) -> None:
    with engine.no_sync(), engine.no_sync():
        pass


def _step_inside(engine: Any) -> None:
    with engine.no_sync():
        engine.step()


WITH_ENGINE: dict[str, tuple[str, type[BaseException], Callable[[Any], Any]]] = {
    "a loss that is no scalar": ("2", AssertionError, lambda e: e.backward(e(torch.ones(2, 4)))),
    "a loss without a graph": ("2", AssertionError, lambda e: e.backward(torch.ones(()))),
    "backward without an optimizer": ("infer", AssertionError, lambda e: e.backward(e(torch.ones(2, 4)).sum())),
    "step inside no_sync": ("1", AssertionError, _step_inside),
    "no_sync inside no_sync": ("1", AssertionError, _nested),
    "a batch that no accumulation makes": ("1", ValueError, lambda e: e.set_train_batch_size(3)),
    "states to a drive": ("1", ValueError, lambda e: e.offload_states(device=OffloadDeviceEnum.nvme)),
    "all weights of a model that is whole": ("2", ValueError, lambda e: e._zero3_consolidated_16bit_state_dict()),
    "and by its other name": ("0", ValueError, lambda e: e._consolidated_16bit_state_dict()),
    "a forward of a pipeline": ("pipe", deepspeed.pipe.PipelineError, lambda e: e(torch.ones(2, 4))),
    "a backward of a pipeline": ("pipe", deepspeed.pipe.PipelineError, lambda e: e.backward(torch.ones(()))),
    "a step of a pipeline": ("pipe", deepspeed.pipe.PipelineError, lambda e: e.step()),
    "a batch without gradients": ("pipe", RuntimeError, lambda e: torch.no_grad()(e.train_batch)(iter(()))),
    "an unknown reduction": ("pipe", NotImplementedError, lambda e: e.eval_batch(iter(()), reduce_output="sum")),
}


@pytest.mark.parametrize("case", WITH_ENGINE)
def test_with_an_engine(engines: Engines, case: str) -> None:
    kind, error, call = WITH_ENGINE[case]
    with pytest.raises(error):
        call(engines(kind))


def test_a_gradient_under_a_loss_scale_has_to_come_through_scale() -> None:
    engine, *_ = _initialize(nn.Linear(4, 2), optimizer=ADAM, fp16={"enabled": True})
    with pytest.raises(RuntimeError, match=r"engine.scale\(loss\)"):
        engine(torch.ones(2, 4).half()).sum().backward()
    engine.destroy()


def test_an_unmanaged_window_has_no_boundary() -> None:
    engine, *_ = _initialize(nn.Linear(4, 2), optimizer=ADAM, managed_gradient_accumulation=False)
    with pytest.raises(AssertionError):
        engine.set_gradient_accumulation_boundary(True)
    engine.destroy()


def test_a_folder_without_checkpoints_is_no_error(engines: Engines, tmp_path: Path) -> None:
    assert engines("2").load_checkpoint(str(tmp_path)) == (None, None)


def test_states_that_stay(engines: Engines) -> None:
    engines("2").offload_states(device=OffloadDeviceEnum.none)
    x = torch.ones(2, 4)
    assert engines("2")(x).shape == (2, 2)
