"""Doors beside updates that go on behind the program or begin before their step: contexts that edit, in each other,
with errors inside, between backward and step; saves and streams there; two engines in turn. Not one bit differs.

What each loop is compared with: early updates with updates at once; delayed ones, of which a thread may be late, with
delayed ones that the program waits for.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.native.build import try_load
from deepspeed.native.spec import CPU_ADAM
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from deepspeed.zero import GatheredParameters
from tests.dist.test_update_behind import behind
from tests.harness.offload import CASES, CPU, PRECISION, same, snapshot
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, start

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(try_load(CPU_ADAM) is None, reason="no C++ compiler: no kernel leaves the interpreter free"),
]
STEPS = 5
EARLY, DELAYED = {**CPU, "super_offload": True}, {**CPU, "delayed_update": True}
Seen = list[Tensor]


def engine_of(stage: int, offload: dict[str, Any], precision: str = "bf16") -> Any:
    zero = {"offload_optimizer": offload, "reduce_bucket_size": 5000}
    config = make_config(stage, zero=zero, gradient_clipping=1000.0, **PRECISION[precision])
    return start(CASES["wide"]().build().train(), config)


def backward(engine: Any, step: int) -> None:
    (loss,) = CASES["wide"]().seeded_loss(engine, here(step))
    engine.backward(loss)


def shown(engine: Any) -> Seen:
    return [param.detach().clone() for param in engine.module.parameters()]


def _edited_between(engine: Any, step: int, seen: Seen, _: str) -> None:
    backward(engine, step)
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=step % 2), torch.no_grad():
        seen += shown(engine)
        engine.module.inp.weight.mul_(0.5)
    engine.step()


def _edited_behind(engine: Any, step: int, seen: Seen, _: str) -> None:
    backward(engine, step)
    engine.step()
    with GatheredParameters([engine.module.inp.weight], modifier_rank=0), torch.no_grad():
        seen.append(engine.module.inp.weight.detach().clone())
        engine.module.inp.weight.add_(0.25)


def _in_each_other(engine: Any, step: int, seen: Seen, _: str) -> None:
    params = list(engine.module.parameters())
    backward(engine, step)
    with GatheredParameters(params), GatheredParameters(params[:2], modifier_rank=1), torch.no_grad():
        seen += shown(engine)
        with GatheredParameters(params[:1], modifier_rank=0):
            params[0].mul_(0.5)
        params[1].add_(0.125)
    engine.step()
    with GatheredParameters(params[2:], modifier_rank=0), GatheredParameters(params):
        seen += shown(engine)


def _stepped_inside(engine: Any, step: int, seen: Seen, _: str) -> None:
    """A step inside a context that edits: what is shown then is what the edit is made to, and stays."""
    backward(engine, step)
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        engine.step()
        seen += shown(engine)
        weight = engine.module.inp.weight
        assert torch.equal(weight, safe_get_full_fp32_param(weight).to(weight.dtype)), "of an older update"
        weight.mul_(0.75)


def _raised_inside(engine: Any, step: int, seen: Seen, _: str) -> None:
    backward(engine, step)
    whole = GatheredParameters(list(engine.module.parameters()), modifier_rank=0)
    with contextlib.suppress(ArithmeticError), torch.no_grad(), whole:
        engine.module.inp.weight.mul_(0.5)
        raise ArithmeticError("planted")
    engine.step()
    with contextlib.suppress(ArithmeticError), GatheredParameters(list(engine.module.parameters())):
        seen += shown(engine)
        raise ArithmeticError("planted")


def _one_raised_inside(engine: Any, step: int, seen: Seen, _: str) -> None:
    def edit() -> None:
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
            engine.module.inp.weight.mul_(0.5)
            if engine.global_rank == 1:
                raise ArithmeticError("planted")

    backward(engine, step)
    said = outcome(edit)
    assert "planted" in said, said
    engine.step()
    said = outcome(edit)
    seen.append(torch.tensor(float("planted" in said)))


def _saved(engine: Any, step: int, seen: Seen, folder: str) -> None:
    """A save between backward and step, and one behind it; every other time the first is loaded again."""
    backward(engine, step)
    engine.save_checkpoint(folder, tag="between")
    engine.step()
    if step % 2:
        engine.load_checkpoint(folder, tag="between")
        engine.step()
    engine.save_checkpoint(folder, tag="behind")


def _streamed(engine: Any, step: int, seen: Seen, _: str) -> None:
    backward(engine, step)
    seen += [values.clone() for bucket in engine.stream_weights("16KB") for _, values in bucket]
    engine.step()
    with engine.unsharded() as module, torch.no_grad():
        seen += [param.detach().clone() for param in module.parameters()]


def _masters_inside(engine: Any, step: int, seen: Seen, _: str) -> None:
    weight, bias = engine.module.inp.weight, engine.module.inp.bias
    backward(engine, step)
    with GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        seen.append(safe_get_full_fp32_param(bias))
        safe_set_full_fp32_param(bias, torch.full_like(seen[-1], 0.125 * step))
        weight[0] = 0.5
    engine.step()
    seen.append(safe_get_full_fp32_param(weight))


LOOPS: dict[str, Callable[[Any, int, Seen, str], None]] = {
    "edited between": _edited_between,
    "edited behind": _edited_behind,
    "in each other": _in_each_other,
    "stepped inside": _stepped_inside,
    "raised inside": _raised_inside,
    "one raised inside": _one_raised_inside,
    "saved": _saved,
    "streamed": _streamed,
    "masters inside": _masters_inside,
}


def trained(name: str, stage: int, offload: dict[str, Any], folder: str, engines: int) -> dict[str, Tensor]:
    """States of ``engines``, which take turns, after the loop, and what it has seen of the weights."""
    all_of_them = [engine_of(stage, offload) for _ in range(engines)]
    found: dict[str, Tensor] = {}
    seen: Seen = []
    for step, (number, engine) in itertools.product(range(STEPS), enumerate(all_of_them)):
        LOOPS[name](engine, step + 10 * number, seen, f"{folder}/{number}")
    for number, engine in enumerate(all_of_them):
        engine.eval()
        found |= {f"{number} {key}": copy.copy(value) for key, value in snapshot(engine).items()}
        masters = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
        with GatheredParameters(list(engine.module.parameters())):
            for key, param in engine.module.named_parameters():
                assert torch.equal(param.detach(), masters[key].to(param.dtype)), f"{key} is not of its master"
    for engine in all_of_them:
        engine.destroy()
    return {**found, **{f"seen {i}": value for i, value in enumerate(seen)}}


def differs(name: str, stage: int, way: str, folder: str, engines: int) -> list[str]:
    """What is not the same, bit for bit. Collective."""
    offload = EARLY if way == "early" else DELAYED
    wanted = trained(name, stage, CPU if way == "early" else DELAYED, f"{folder}/a", engines)
    with behind(0.004) as turns:
        found = trained(name, stage, offload, f"{folder}/b", engines)
    keys = wanted.keys() | found.keys()
    bad = [k for k in keys if not all(k in f for f in (wanted, found)) or not same(wanted[k], found[k])]
    return sorted(bad)[:8] + ([] if turns else ["nothing was done behind"])


@pytest.mark.in_make_test(
    "edited between-early", "in each other-early", "stepped inside-delayed", "one raised inside-delayed"
)
@pytest.mark.parametrize("way", ["early", "delayed"])
@pytest.mark.parametrize("name", LOOPS)
def test_no_door_sees_or_loses_an_update_that_is_under_way(pool2: RankPool, tmp_path: Any, name: str, way: str) -> None:
    assert pool2.run(differs, name, 3, way, str(tmp_path), 1) == [[], []]


@pytest.mark.in_make_test("edited between-delayed")
@pytest.mark.parametrize("way", ["early", "delayed"])
@pytest.mark.parametrize("name", ["edited between", "saved", "streamed", "in each other"])
def test_nor_do_two_engines_that_take_turns(pool2: RankPool, tmp_path: Any, name: str, way: str) -> None:
    assert pool2.run(differs, name, 3, way, str(tmp_path), 2) == [[], []]


@pytest.mark.in_make_test("saved-early")
@pytest.mark.parametrize("way", ["early", "delayed"])
@pytest.mark.parametrize("name", ["saved", "streamed"])
def test_nor_where_parameters_are_whole(pool2: RankPool, tmp_path: Any, name: str, way: str) -> None:
    assert pool2.run(differs, name, 2, way, str(tmp_path), 1) == [[], []]
