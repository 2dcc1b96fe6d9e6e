"""An update behind the program that fails on one rank is an error of all ranks at every door that reads or writes a
state together: nobody waits for ever, and nobody is given values of two steps.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.accelerator.native.build import try_load
from deepspeed.accelerator.native.spec import CPU_ADAM
from deepspeed.comm import collectives
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_update_full_grad_vectorized,
)
from deepspeed.zero import GatheredParameters
from tests.dist.test_offload_delayed import DELAYED
from tests.dist.test_update_behind import behind, held_back
from tests.harness.faults import raise_planted
from tests.harness.offload import CASES, CPU, started
from tests.harness.pool import RankPool
from tests.harness.training import here, outcome, train_step

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(try_load(CPU_ADAM) is None, reason="no C++ compiler: no kernel leaves the interpreter free"),
]
COLUMNS = {"topk_ratio": 0.2, "update_interval": 2, "overlap_step": True, "select_strategy": "step"}
ZERO: dict[str, dict[str, Any]] = {
    "behind": {"offload_optimizer": CPU},
    "delayed": {"offload_optimizer": DELAYED},
    "zenflow": {"offload_optimizer": CPU, "zenflow": {**COLUMNS, "select_interval": 4}},
}


def _weight(engine: Any) -> Any:
    return engine.module.inp.weight


def _like(engine: Any) -> torch.Tensor:
    return torch.zeros(tuple(engine.module.inp.weight.shape))


def _read(engine: Any) -> None:
    with GatheredParameters(engine.module.parameters()):
        pass


def _forward(engine: Any) -> None:
    CASES["wide"]().seeded_loss(engine, here(4))


def _entered(context: Any) -> None:
    with context:
        pass


def _edited(engine: Any) -> None:
    _entered(GatheredParameters(engine.module.parameters(), modifier_rank=0))


TOGETHER: dict[str, Callable[[Any], object]] = {
    "master": lambda e: safe_get_full_fp32_param(_weight(e)),
    "slot": lambda e: safe_get_full_optimizer_state(_weight(e), "exp_avg"),
    "gradient": lambda e: safe_get_full_grad(_weight(e)),
    "set master": lambda e: safe_set_full_fp32_param(_weight(e), _like(e)),
    "set slot": lambda e: safe_set_full_optimizer_state(_weight(e), _like(e), "exp_avg"),
    "set gradient": lambda e: safe_set_full_grad(_weight(e), _like(e)),
    "set gradients": lambda e: safe_update_full_grad_vectorized([_weight(e)], lambda grad, _: grad),
    "load": lambda e: e.optimizer.load_state_dict(e.state_of_before),
    "load weights": lambda e: e.load_module_state_dict(e.weights_of_before),
}
ALONE: dict[str, Callable[[Any], object]] = {
    "local master": lambda e: safe_get_local_fp32_param(_weight(e)),
    "local slot": lambda e: safe_get_local_optimizer_state(_weight(e), "exp_avg"),
    "state": lambda e: e.optimizer.state,
    "set local master": lambda e: safe_set_local_fp32_param(_weight(e), safe_get_local_fp32_param(_weight(e))),
}
WEIGHTS: dict[str, Callable[[Any], object]] = {"read": _read, "forward": _forward}  # of what the update publishes
WHOLE: dict[str, Callable[[Any], object]] = {
    "save": lambda e: e.save_checkpoint(e.folder_of_this_test),
    "stream": lambda e: e.stream_weights(),
    "pretrained": lambda e: e.save_pretrained(e.folder_of_this_test),
    "16 bit": lambda e: e.save_16bit_model(e.folder_of_this_test),
    "unsharded": lambda e: _entered(e.unsharded()),
    "edit": _edited,
    "load weights": TOGETHER["load weights"],
}
# heard once
END: dict[str, Callable[[Any], object]] = {"eval": lambda e: e.eval(), "destroy": lambda e: e.destroy()}


@contextlib.contextmanager
def kernels_fail(engine: Any) -> Iterator[None]:
    """Inside, those of the thread behind the program do on the second rank."""
    cls = type(engine.basic_optimizer)
    update = cls._update_group
    if engine.global_rank == 1:
        fails = lambda o, *a: raise_planted() if engine.runtime.worker.inside() else update(o, *a)  # noqa: E731
        with mock.patch.object(cls, "_update_group", fails):
            yield
    else:
        yield


def heard_at(door: str, kind: str, stage: int, folder: str, *, held: bool) -> list[str]:
    """A kernel fails on the second rank behind an update: what this rank hears at ``door``, there again, and in the
    next step. ``held``: the kernel begins when somebody waits for it. Collective.
    """
    case = CASES["wide"]()
    with held_back() if held else behind():
        engine = started(stage, {**ZERO[kind], "stage3_gather_16bit_weights_on_model_save": True})
        windows = 2 if kind == "zenflow" else 1
        for step in range(windows):
            train_step(engine, case, step)
        engine.eval()
        engine.train()
        engine.state_of_before = copy.deepcopy(engine.optimizer.state_dict())
        engine.weights_of_before = full_parameters(engine.module)
        engine.folder_of_this_test = folder
        with kernels_fail(engine):
            for step in range(windows, 2 * windows):
                train_step(engine, case, step)
            if not held:
                until_it_has_failed(engine)
            call = {**TOGETHER, **ALONE, **WEIGHTS, **WHOLE, **END}[door]
            heard = [outcome(lambda: call(engine)) for _ in range(1 if door in END else 2)]
            for step in () if door == "destroy" else (4, 5):
                heard.append(outcome(lambda step=step: train_step(engine, case, step)))
        outcome(engine.destroy)
    return heard


def until_it_has_failed(engine: Any) -> None:
    if (last := engine.runtime.worker._last) is not None:
        last._ended.wait()


CASES_OF_IT = [
    *((door, kind, 2, held) for door in TOGETHER for kind, held in (("delayed", False), ("zenflow", True))),
    *((door, "behind", 3, True) for door in ("master", "set slot", "load", *WEIGHTS)),
    ("master", "behind", 3, False),
    ("forward", "behind", 3, False),
    *((door, kind, 3, False) for door in WHOLE for kind in ("delayed", "behind")),
    *((door, "delayed", 2, False) for door in ("save", *END)),
]


@pytest.mark.in_make_test(
    "gradient-zenflow-2-True",
    "load-delayed-2-False",
    "set slot-behind-3-True",
    "forward-behind-3-True",
    "stream-behind-3-False",
    "save-delayed-3-False",
    "unsharded-delayed-3-False",
    "eval-delayed-2-False",
    "destroy-delayed-2-False",
)
@pytest.mark.parametrize(("door", "kind", "stage", "held"), CASES_OF_IT)
def test_what_has_failed_on_one_rank_is_named_on_all_at_doors_that_they_pass_together(
    pool2: RankPool, tmp_path: Path, door: str, kind: str, stage: int, held: bool
) -> None:
    other, own = pool2.run(heard_at, door, kind, stage, str(tmp_path), held=held, time_limit=40)
    for texts in (own, other):
        assert all("planted" in text and "load a checkpoint" in text for text in texts), (own, other)
    assert all("rank 1" in text for text in other), other


@pytest.mark.in_make_test("behind-state", "zenflow-local slot")
@pytest.mark.parametrize("door", ALONE)
@pytest.mark.parametrize("kind", ["behind", "delayed", "zenflow"])
def test_doors_of_one_rank_raise_there_and_all_hear_of_it_in_the_next_step(
    pool2: RankPool, tmp_path: Path, door: str, kind: str
) -> None:
    other, own = pool2.run(heard_at, door, kind, 3, str(tmp_path), held=False, time_limit=40)
    assert "planted" in own[0] and own[1] == own[0], own
    assert other[:2] == ["", ""], other
    assert "planted" in own[2] and "planted" in own[3]
    assert all("rank 1" in text and "planted" in text for text in other[2:]), other


def agreements(folder: str) -> list[int]:
    """How often the ranks have compared what has become of an update, when all masters are read: behind two updates,
    and behind the second one again, which a checkpoint of the first has brought back. Collective.
    """
    case, counts, real = CASES["wide"](), [], collectives.failures
    with behind():
        engine = started(3, ZERO["behind"])
        asked: list[int] = []
        failures = mock.patch.object(collectives, "failures", lambda *a, **k: (asked.append(1), real(*a, **k))[1])
        for step in (0, 1, 1):
            train_step(engine, case, step)
            with failures:
                for param in engine.module.parameters():
                    safe_get_full_fp32_param(param)
            counts.append(len(asked))
            asked.clear()
            if step == 0:
                engine.save_checkpoint(folder)
            else:
                engine.load_checkpoint(folder)
        engine.destroy()
    return counts


def test_ranks_compare_once_an_update_also_where_it_is_counted_again(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(agreements, str(tmp_path)) == [[1, 1, 1]] * 2


def loaded_in_part(folder: str, kind: str, stage: int, part: dict[str, bool]) -> list[str]:
    """What the ranks hear of a load without the optimizer's states behind an update that has failed on one; in the next
    step; of a load of all; and what then differs from the save. Collective.
    """
    case = CASES["wide"]()
    with behind():
        engine = started(stage, ZERO[kind])
        train_step(engine, case, 0)
        engine.save_checkpoint(folder)
        master = safe_get_full_fp32_param(_weight(engine)).clone()
        with kernels_fail(engine):
            train_step(engine, case, 1)
            until_it_has_failed(engine)
        heard = [outcome(lambda: engine.load_checkpoint(folder, **part))]
        heard.append(outcome(lambda: train_step(engine, case, 2)))
        engine.load_checkpoint(folder)
        assert torch.equal(safe_get_full_fp32_param(_weight(engine)), master)
        heard.append(outcome(lambda: train_step(engine, case, 2)))
        engine.destroy()
    return heard


@pytest.mark.parametrize(
    ("kind", "stage", "part"),
    [("delayed", 2, {"load_module_only": True}), ("behind", 3, {"load_optimizer_states": False})],
    ids=str,
)
def test_weights_alone_do_not_mend_states_of_two_steps(
    pool2: RankPool, tmp_path: Path, kind: str, stage: int, part: dict[str, bool]
) -> None:
    for heard in pool2.run(loaded_in_part, str(tmp_path), kind, stage, part, time_limit=40):
        assert "CheckpointError" in heard[0] and "planted" in heard[0] and "load them, too" in heard[0], heard
        assert "planted" in heard[1] and heard[2] == "", heard


def without_a_checkpoint(folder: str) -> list[str]:
    """What the ranks hear in the next step where a load has found nothing. Collective."""
    case = CASES["wide"]()
    with behind():
        engine = started(2, ZERO["delayed"])
        with kernels_fail(engine):
            train_step(engine, case, 0)
            until_it_has_failed(engine)
        engine.load_checkpoint(folder)
        heard = [outcome(lambda: train_step(engine, case, 1)), outcome(lambda: train_step(engine, case, 1))]
        outcome(engine.destroy)
    return heard


def test_a_load_that_finds_nothing_mends_nothing_on_any_rank(pool2: RankPool, tmp_path: Path) -> None:
    for heard in pool2.run(without_a_checkpoint, str(tmp_path), time_limit=40):
        assert all("planted" in text and "load a checkpoint" in text for text in heard), heard
