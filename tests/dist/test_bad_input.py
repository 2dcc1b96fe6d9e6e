"""Bad input: each mistake is one sentence that says what and where, of a type that client code catches; nothing
hangs.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedError
from deepspeed.tools.verify.models import case_named
from tests.dist.test_invariant_i8_errors import trained
from tests.harness.lockstep import equal
from tests.harness.patience import too_long
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start

pytestmark = pytest.mark.timeout(60)
LIMIT = 30.0


class Empty(nn.Module):
    """No parameters at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _model() -> nn.Module:
    return case_named("plain").build()


def _foreign() -> Any:
    model, other = _model(), nn.Linear(3, 3)
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), config=_bare(3)
    )


def _bare(stage: int, **more: Any) -> dict[str, Any]:
    return make_config(stage, optimizer=None, **more)


def _twice() -> Any:
    model = _model()
    engine = start(model, make_config(3))
    try:
        return start(model, make_config(2))
    finally:
        engine.destroy()


def _with_engine(act: Callable[[Any], Any], stage: int = 3) -> Any:
    engine = start(_model(), make_config(stage))
    try:
        return act(engine)
    finally:
        engine.destroy()


def _stepped_optimizer() -> Any:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    return deepspeed.initialize(model=model, optimizer=optimizer, config=_bare(2))


def _meta() -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    return start(model, make_config(3))


def _odd_model() -> Any:
    width = 4 + (dist.get_rank() == 1)
    return start(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)), make_config(3))


def _one_more() -> Any:
    return start(nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 + dist.get_rank())]), make_config(1))


def _other_rate() -> Any:
    model = _model()
    rate = 0.1 * (1 + dist.get_rank())
    return start(model, _bare(0), optimizer=torch.optim.SGD(model.parameters(), lr=rate))


def _frozen_on_one_rank() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(dist.get_rank() == 0)
    return start(model, make_config(2))


def _read_released(engine: Any) -> Any:
    return engine.module.layers[1].up.weight.sum()


def _backward_twice(engine: Any) -> Any:
    loss = engine(torch.ones(1, 6)).sum()
    engine.backward(loss)
    engine.backward(loss)


def _inner(engine: Any) -> Any:
    with engine.no_sync():
        engine.step()


def _other_data(engine: Any, *, later: bool = False) -> Any:
    """Of one module alone; ``later`` between a backward and its step, whose weights would not be trained."""
    for step in range(2 * later):
        engine.backward(engine(torch.ones(1, 6)).sum())
        if step:
            engine.module.head.weight.data = engine.module.head.weight.data.clone()
        engine.step()
    if not later:
        engine.module.head.weight.data = engine.module.head.weight.data.clone()
    return engine(torch.ones(1, 6))


def _cast(engine: Any) -> Any:
    engine(torch.ones(1, 6))
    engine.module.double()
    return engine(torch.ones(1, 6))


def _assigned(engine: Any) -> Any:
    engine.module.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()}, assign=True)
    return engine(torch.ones(1, 6))


def _new_group(engine: Any) -> None:
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


# name -> (what the user does, parts of the sentence, a builtin type that catches it)
MISTAKES: dict[str, tuple[Callable[[], Any], list[str], type[BaseException]]] = {
    "no parameters": (lambda: start(Empty(), make_config(3)), ["Empty", "no parameters"], RuntimeError),
    "no model": (lambda: deepspeed.initialize(config=make_config(3)), ["model"], AssertionError),
    "unknown optimizer": (
        lambda: start(_model(), make_config(3, optimizer={"type": "Adamm", "params": {}})),
        ["Adamm"],
        ValueError,
    ),
    "foreign parameters": (_foreign, ["group 0", "(3, 3)", "no parameter of the model", "Stack"], ValueError),
    "no optimizer at stage 1": (lambda: start(_model(), _bare(1)), ["stage 1", "optimizer"], ValueError),
    "used optimizer": (_stepped_optimizer, ["AdamW", "already taken steps"], ValueError),
    "different shapes": (_odd_model, ["ranks hold different models", "rank 1", "0.weight", "(5, 4)"], RuntimeError),
    "different counts": (
        _one_more,
        ["nothing more", "rank 1 has '2.weight'"],
        RuntimeError,
    ),
    "different learning rates": (
        _other_rate,
        ["lr 0.1 in optimizer group 0", "rank 1 has lr 0.2"],
        RuntimeError,
    ),
    "different configurations": (
        lambda: start(_model(), make_config(0, gradient_clipping=1.0 + dist.get_rank())),
        ["different configurations: rank 0 has gradient_clipping 1.0, rank 1 has gradient_clipping 2.0"],
        RuntimeError,
    ),
    "observed on one rank": (
        lambda: start(_model(), make_config(0, observe={"run": "/tmp/run"} if dist.get_rank() == 0 else {})),
        ["different configurations", "rank 1 has observe.run"],
        RuntimeError,
    ),
    "different stages": (
        lambda: start(_model(), make_config(1 + dist.get_rank())),
        ["rank 0 has zero_optimization.stage 1, rank 1 has zero_optimization.stage 2"],
        RuntimeError,
    ),
    "different requires_grad": (_frozen_on_one_rank, ["rank 1", "1.weight", "requires_grad=False"], RuntimeError),
    "meta model": (_meta, ["0.weight", "meta device", "zero.Init"], RuntimeError),
    "initialize twice": (_twice, ["inp.weight", "destroy"], RuntimeError),
    "offload optimizer": (
        lambda: start(
            _model(), make_config(3, zero={"offload_optimizer": {"device": "nvme", "nvme_path": "/no/such/drive"}})
        ),
        ["offload_optimizer.nvme_path", "/no/such/drive", "mounted"],
        RuntimeError,
    ),
    "init on nvme": (lambda: deepspeed.zero.Init(remote_device="nvme"), ["nvme", "folder"], RuntimeError),
    "shard group": (
        lambda: start(_model(), make_config(3, zero={"mics_shard_size": 3})),
        ["mics_shard_size"],
        ValueError,
    ),
    # weights that would silently not be trained
    "other data": (lambda: _with_engine(_other_data, 2), ["given other data"], RuntimeError),
    "other data later": (
        lambda: _with_engine(lambda e: _other_data(e, later=True), 1),
        ["given other data"],
        RuntimeError,
    ),
    "cast": (lambda: _with_engine(_cast, 1), ["moved or cast"], RuntimeError),
    "assigned": (lambda: _with_engine(_assigned, 1), ["assign=True"], RuntimeError),
    "new group": (lambda: _with_engine(_new_group, 1), ["add_param_group"], RuntimeError),
    "lazy": (lambda: start(nn.Sequential(nn.LazyLinear(4)), make_config(3)), ["lazy"], RuntimeError),
    "complex": (lambda: start(nn.Linear(2, 2, dtype=torch.complex64), make_config(3)), ["complex"], RuntimeError),
    "step before backward": (lambda: _with_engine(lambda e: e.step()), ["step()", "backward"], RuntimeError),
    "step inside no_sync": (lambda: _with_engine(_inner), ["no_sync"], AssertionError),
    "released parameter": (
        lambda: _with_engine(_read_released),
        ["layers.1.up.weight", "GatheredParameters"],
        RuntimeError,
    ),
    "non-scalar loss": (
        lambda: _with_engine(lambda e: e.backward(e(torch.ones(2, 6)))),
        ["scalar", "(2, 5)"],
        RuntimeError,
    ),
    "loss without graph": (
        lambda: _with_engine(lambda e: e.backward(torch.ones(()))),
        ["without gradients"],
        AssertionError,
    ),
    "not a loss": (lambda: _with_engine(lambda e: e.backward(3.0)), ["float"], RuntimeError),
    "backward twice": (lambda: _with_engine(_backward_twice), ["second time"], RuntimeError),
    "inference engine": (lambda: start(_model(), _bare(3)).backward(torch.ones(())), ["optimizer"], RuntimeError),
}


def committed(name: str) -> tuple[str, list[str], bool, bool]:
    """(text, class names of the error, is it one of ours, did it take long) of one mistake on every rank."""
    started = time.monotonic()
    try:
        MISTAKES[name][0]()
    except Exception as error:
        return (
            str(error),
            [c.__name__ for c in type(error).__mro__],
            isinstance(error, DeepSpeedError),
            too_long(started, 10),
        )
    return "NO ERROR", [], False, too_long(started, 10)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_on_every_rank(pool2: RankPool, name: str) -> None:
    _, parts, kind = MISTAKES[name]
    for text, classes, ours, late in pool2.run(committed, name, time_limit=LIMIT):
        missing = [part for part in parts if part not in text]
        assert not missing, f"{missing} not in: {text}"
        assert kind.__name__ in classes, classes
        assert ours or name == "backward twice", classes
        assert not late


def after_mistakes(stage: int) -> bool:
    """An engine that met every mistake on the way trains exactly like one that met none."""
    case, config = case_named("plain"), make_config(stage)

    def err(engine: Any, step: int, micro: int) -> None:
        for act in (
            lambda e: e.step(),
            lambda e: e.backward(e(torch.ones(2, 6))),
            lambda e: e(torch.ones(1, 1)),
            _inner,
            lambda e: start(e.module, config),
            lambda e: e.module.layers[1].up.weight.data.add_(1) if stage == 3 else e.step(),
        ):
            with pytest.raises((DeepSpeedError, RuntimeError)):
                act(engine)

    return equal(trained(case, config), trained(case, config, err))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_goes_on_after_mistakes(pool2: RankPool, stage: int) -> None:
    assert pool2.run(after_mistakes, stage) == [True, True]
