"""An update that goes on in a thread behind the program: no bit differs, and whoever reads or writes a state waits.

Ranks on the CPU do that behind a private switch only, as two threads on one core help nobody.
"""

import contextlib
import copy
import gc
import io
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from deepspeed.accelerator.native.build import try_load
from deepspeed.accelerator.native.spec import CPU_ADAM
from deepspeed.errors import UsageError
from deepspeed.tier.behind import Turn, Worker
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
)
from deepspeed.zero import GatheredParameters
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import UnitState
from deepspeed.zero.update.publish import Publication
from deepspeed.zero.update.speculative import EarlyUpdate
from tests.harness.aio import in_a_child
from tests.harness.offload import (
    CASES,
    CPU,
    PRECISION,
    Plan,
    check,
    differences,
    engine_for,
    same,
    started,
    train,
    variants,
)
from tests.harness.pool import RankPool
from tests.harness.training import outcome, train_step

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(try_load(CPU_ADAM) is None, reason="no C++ compiler: no kernel leaves the interpreter free"),
]
SWITCH = "DEEPSPEED_UPDATE_BEHIND"
ON_HOST = {"offload_optimizer": CPU}


@contextlib.contextmanager
def behind(delay_s: float = 0.002) -> Iterator[list[Turn]]:
    """Inside, engines update in a thread, which takes its time; the turns."""
    real, turns = Worker.hand_over, []

    def slowly(worker: Worker, call: Callable[[], Any], **options: Any) -> Turn:
        turns.append(real(worker, lambda: (time.sleep(delay_s), call())[1], **options))
        return turns[-1]

    with patch.dict(os.environ, {SWITCH: "1"}), patch.object(Worker, "hand_over", slowly):
        yield turns


@contextlib.contextmanager
def held_back() -> Iterator[list[Turn]]:
    """Inside, engines update in a thread, where no update begins before somebody waits for one; the turns."""
    real, until, gates, turns = Worker.hand_over, Turn._until_ended, list[threading.Event](), list[Turn]()

    def hand_over(worker: Worker, call: Callable[[], Any], **options: Any) -> Turn:
        gates.append(gate := threading.Event())
        turns.append(real(worker, lambda: (gate.wait(60), call())[1], **options))
        return turns[-1]

    def until_ended(turn: Turn) -> None:
        for gate in gates:
            gate.set()
        until(turn)

    hold = patch.object(Worker, "hand_over", hand_over), patch.object(Turn, "_until_ended", until_ended)
    with patch.dict(os.environ, {SWITCH: "1"}), hold[0], hold[1]:
        yield turns


def both(plan: Plan, folder: str, names: tuple[str, ...]) -> list[str]:
    """What differs from updates that the program waits for, per variant. Collective."""
    bad = []
    for name in names:
        wanted = train(plan, variants(folder)[name])
        with behind() as turns:
            found = train(plan, variants(folder)[name])
        bad += differences(wanted, found, f"{name}: ")
        bad += [] if turns else [f"{name}: nothing was done behind"]
    return bad


HOST = ("optim cpu", "both cpu", "half cpu")


@pytest.mark.in_make_test("1-fp32-0.0", "2-bf16-0.05", "3-fp16-0.0", "3-bf16-0.0")
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_not_one_bit_differs_on_one_rank(pool1: RankPool, stage: int, precision: str, clip: float) -> None:
    plan = Plan("wide_accumulation", stage=stage, config={**PRECISION[precision], "gradient_clipping": clip}, steps=4)
    check(pool1.run(both, plan, "", HOST if stage == 3 else HOST[:1]))


@pytest.mark.in_make_test("fp32")
@pytest.mark.parametrize("precision", PRECISION)
def test_nor_on_two_where_parameters_are_sharded(pool2: RankPool, tmp_path: Path, precision: str) -> None:
    plan = Plan(config={**PRECISION[precision], "gradient_clipping": 0.05}, steps=4)
    check(pool2.run(both, plan, str(tmp_path), HOST[1:]))


# -- doors -----------------------------------------------------------------------------------------------------------
def _first(engine: Any) -> Any:
    return engine.module.inp.weight


def _saved(engine: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(engine.module.state_dict(), file)
    file.seek(0)
    return torch.load(file)["inp.weight"]


def _whole(engine: Any) -> Tensor:
    with GatheredParameters(_first(engine)):
        return _first(engine).detach().clone()


def _edited(engine: Any) -> Tensor:
    with GatheredParameters(_first(engine), modifier_rank=0), torch.no_grad():
        _first(engine).mul_(2)
    return safe_get_full_fp32_param(_first(engine))


def _set(engine: Any) -> Tensor:
    safe_set_full_fp32_param(_first(engine), torch.ones_like(safe_get_full_fp32_param(_first(engine))))
    return engine.optimizer.state_dict()["fp32_flat"][0]


def _evaluated(engine: Any) -> Tensor:
    with torch.no_grad():
        return engine(torch.ones(3, engine.module.inp.in_features, dtype=next(iter(_dtypes(engine)))))


def _dtypes(engine: Any) -> set[torch.dtype]:
    return {unit.dtype for unit in engine.runtime.units}


def _lent(engine: Any) -> Tensor:
    engine.offload_states()
    engine.reload_states()
    return safe_get_full_fp32_param(_first(engine))


def _destroyed(engine: Any) -> Tensor:
    engine.destroy()
    return _first(engine).detach().clone()


def _reloaded(engine: Any) -> Tensor:
    folder = os.environ["FOLDER_OF_THIS_TEST"]
    engine.save_checkpoint(folder, tag=str(os.getpid()))
    master = safe_get_full_fp32_param(_first(engine)).clone()
    safe_set_full_fp32_param(_first(engine), torch.zeros_like(master))
    engine.load_checkpoint(folder, tag=str(os.getpid()))
    assert torch.equal(master, safe_get_full_fp32_param(_first(engine)))
    return master


def _flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in values])


def _slots(states: Iterable[dict[str, Tensor]]) -> Tensor:
    return _flat(state["exp_avg"] for state in states)


def _begun_again(engine: Any) -> Tensor:
    engine.basic_optimizer.state = defaultdict(dict)
    train_step(engine, CASES["wide"](), 2)
    return _flat(engine.optimizer.state_dict()["fp32_flat"])


DOORS: dict[str, Callable[[Any], Tensor]] = {
    "safe_get_full": lambda e: safe_get_full_fp32_param(_first(e)),
    "safe_get_local": lambda e: safe_get_local_fp32_param(_first(e)).clone(),
    "a slot": lambda e: safe_get_full_optimizer_state(_first(e), "exp_avg"),
    "state": lambda e: _slots(e.optimizer.state.values()),
    "the client's own optimizer": lambda e: _slots(e.basic_optimizer.state.values()),
    "new state": _begun_again,
    "its state_dict": lambda e: _slots(e.basic_optimizer.state_dict()["state"].values()),
    "param_groups": lambda e: _flat([p for g in e.optimizer.param_groups for p in g["params"]]),
    "one of param_groups": lambda e: e.optimizer.param_groups[0]["params"][0].detach().clone(),
    "state_dict of the optimizer": lambda e: _flat(e.optimizer.state_dict()["fp32_flat"]),
    "gathered": _whole,
    "edited": _edited,
    "set": _set,
    "evaluated": _evaluated,
    "lent": _lent,
    "destroyed": _destroyed,
    "saved and loaded": _reloaded,
}  # fmt: skip
WHOLE: dict[str, Callable[[Any], Tensor]] = {  # where parameters are never released
    "a parameter": lambda e: _first(e).detach().clone(),
    "data": lambda e: _first(e).data.clone(),
    "arithmetic": lambda e: (_first(e) * 2).detach(),
    "a copy of the model": lambda e: copy.deepcopy(e.module).inp.weight.detach(),
    "a norm over all": lambda e: torch.stack([p.detach().float().norm() for p in e.module.parameters()]),
    "saved": _saved,
    "module_state_dict": lambda e: e.module_state_dict()["inp.weight"].clone(),
    "changed": lambda e: (_first(e).data.mul_(2), _first(e).detach().clone())[1],
}


CUT: dict[str, Callable[[Any], Tensor]] = {  # where parameters are
    "its shard": lambda e: _first(e).ds_tensor.clone(),
    "all shards": lambda e: _flat([p.ds_tensor for p in e.module.parameters()]),
}


def opened(stage: int, precision: str, folder: str, offload: dict[str, Any]) -> list[str]:
    """Doors through which something else is seen while an update is on its way than after it."""
    os.environ["FOLDER_OF_THIS_TEST"] = folder
    bad = []
    for name, door in {**DOORS, **(WHOLE if stage < 3 else CUT)}.items():
        values = []
        for late in (False, True):
            with held_back() if late else contextlib.nullcontext([]) as turns:
                engine = started(stage, {"offload_optimizer": offload}, **PRECISION[precision])
                for step in range(2):
                    train_step(engine, CASES["wide"](), step)
                bad += [f"{name}: done already"] if late and turns[-1].done() else []
                values.append(door(engine).clone())
                engine.destroy()
        bad += [] if same(*values) else [name]
    return bad


@pytest.mark.in_make_test("False-3-bf16", "True-3-bf16")
@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16"), (2, "fp32"), (3, "bf16")])
@pytest.mark.parametrize("delayed", [False, True])
def test_every_door_waits(pool1: RankPool, tmp_path: Path, stage: int, precision: str, delayed: bool) -> None:
    offload = {**CPU, "delayed_update": delayed}
    assert pool1.run(opened, stage, precision, str(tmp_path), offload) == [[]]


@contextlib.contextmanager
def gated() -> Iterator[threading.Event]:
    """Inside, the thread computes nothing before the event."""
    gate, real = threading.Event(), Worker.hand_over
    held = lambda self, call, **options: real(self, lambda: (gate.wait(60), call())[1], **options)  # noqa: E731
    with patch.object(Worker, "hand_over", held):
        yield gate


def returned() -> dict[str, Any]:
    """What is true when ``step`` has returned, before anything of the update is done; and after."""
    case, found = CASES["wide"](), {}
    with patch.dict(os.environ, {SWITCH: "1"}), gated() as gate:
        engine = started(2, ON_HOST)
        before = [p.detach().clone() for p in engine.module.parameters()]
        train_step(engine, case, 0)
        units = engine.runtime.units
        found["under way"] = [unit.buffer.hidden and unit.state is UnitState.READY for unit in units]
        found["settings are read"] = engine.get_lr() == [engine.optimizer.param_groups[0]["lr"]]
        # a unit is waited for alone
        threading.Timer(0.1, gate.set).start()
        engine.module.inp.weight.sum()
        found["after a reader"] = units[0].buffer.hidden
        changed = [not torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True)]
        found["changed"] = all(changed)
        engine.destroy()
    return found


def test_step_returns_before_the_update(pool1: RankPool) -> None:
    (found,) = pool1.run(returned)
    assert all(found["under way"]) and not found["after a reader"]
    assert found["settings are read"] and found["changed"]


def left_to_the_thread(folder: str) -> list[Any]:
    """Of units on a drive: which are updated when ``step`` has returned and the thread is held up; and afterwards."""
    case = CASES["wide"]()
    with patch.dict(os.environ, {SWITCH: "1"}):
        engine = engine_for("both nvme", folder)

    def done() -> list[bool]:
        return [u.pending.until(StateKind.PARAM).done() for u in engine.runtime.units if u.movable]

    train_step(engine, case, 0)
    first = done()  # slots find their place in the step
    with gated() as gate:
        train_step(engine, case, 1)
        late = done()
        master = engine.runtime.units[0].rest[StateKind.OPTIM].changes
        gate.set()
        engine.runtime.update.wait()
    changed = engine.runtime.units[0].rest[StateKind.OPTIM].changes > master
    found = [all(first), late != [] and not any(late), changed, all(done())]
    engine.destroy()
    return found


def test_tiles_on_a_drive_are_updated_behind_the_step(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(left_to_the_thread, str(tmp_path)) == [[True] * 4]


# -- what goes wrong -------------------------------------------------------------------------------------------------
def ended() -> list[Any]:
    """The thread of an engine that is dropped, of one that is destroyed after a failure; and a forked child."""
    case, found = CASES["wide"](), []
    with behind():
        engine = started(2, ON_HOST)
        with gated() as gate:
            train_step(engine, case, 0)

        def use() -> None:  # in a child, which has no thread
            with pytest.raises(UsageError, match="forked"):
                engine.module.inp.weight.sum()

        found.append(in_a_child(use))
        gate.set()
        engine.destroy()
        del engine
        gc.collect()
        found.append([t.name for t in threading.enumerate() if t.name == "deepspeed-update"])
        engine = started(2, ON_HOST)
        with patch.object(type(engine.basic_optimizer), "_update_group", side_effect=ArithmeticError("planted")):
            train_step(engine, case, 0)
            found.append(outcome(engine.destroy))
        found.append([u.params for u in engine.runtime.units if u.params])
    return found


def test_threads_end_and_a_forked_child_does_not_wait_for_ever(pool1: RankPool) -> None:
    ((child, threads, text, left),) = pool1.run(ended)
    assert child == 0 and threads == [] and "UsageError" in text and "planted" in text and left == []


def hooked() -> tuple[int, bool]:
    """A client's hook behind ``optimizer.step`` sees the update, in the program."""
    case, seen = CASES["wide"](), []
    with behind() as turns:
        engine = started(2, ON_HOST)
        before = engine.optimizer.state_dict()["fp32_flat"][0].clone()
        engine.basic_optimizer.register_step_post_hook(
            lambda o, *_: seen.append(_flat(o.param_groups[0]["params"][:1]))
        )
        train_step(engine, case, 0)
        engine.destroy()
    return len(turns), bool(seen) and not torch.equal(seen[-1].view(-1), before.view(-1))


def test_a_hook_behind_the_update_sees_it(pool1: RankPool) -> None:
    assert pool1.run(hooked) == [(0, True)]


def unfinished() -> list[bool]:
    """Whether who looks at the optimizer's state waits: behind a step that fails once turns are handed over, and behind
    a late update that is published.
    """
    case, seen = CASES["wide"](), []
    with behind():
        engine = started(2, ON_HOST)
        train_step(engine, case, 0)
        engine.runtime.update.wait()
        failing = patch.object(Publication, "finish", side_effect=RuntimeError("planted"))
        with failing, contextlib.suppress(RuntimeError):
            train_step(engine, case, 1)
        seen.append(engine.runtime.update.pending)
        engine.destroy()
        engine = started(2, {"offload_optimizer": {**CPU, "delayed_update": True}})
        for step in range(3):
            train_step(engine, case, step)
        engine.runtime.update.publish()
        seen.append(engine.runtime.update.pending)
        engine.destroy()
    return seen


def test_who_looks_waits_behind_a_step_that_failed_and_behind_a_publication(pool1: RankPool) -> None:
    assert pool1.run(unfinished) == [[True, True]]


def looked_at_each_step() -> list[bool]:
    """Of updates that began beside the backward, whether the first that a step took is kept under a look at states."""
    case, kept = CASES["wide"](), []
    real = EarlyUpdate.finish

    def finish(early: EarlyUpdate, ordinary: Any) -> Any:
        early.wait()  # as who looks at a state meanwhile
        kept.append(early._place is not None)
        return real(early, ordinary)

    with behind(), patch.object(EarlyUpdate, "finish", finish):
        engine = started(2, {"offload_optimizer": {**CPU, "super_offload": True}}, **PRECISION["bf16"])
        for step in range(4):
            train_step(engine, case, step)
        engine.destroy()
    return kept


def test_an_early_update_that_a_step_took_survives_a_look(pool1: RankPool) -> None:
    (kept,) = pool1.run(looked_at_each_step)
    assert kept and any(kept)
