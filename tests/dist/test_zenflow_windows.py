"""In the middle of a window of ZenFlow settings change, parameters are frozen, batches are lost, ranks fail, and states
are looked at, saved and loaded.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import IN_FEATURES
from deepspeed.tools.verify.reference import GATE_ADAM
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.zero.update.selective import columns, policy as zenflow
from tests.dist.test_offload_zenflow import STEPS, errors_against, rule_of, stated, zenflow_engine
from tests.dist.test_update_behind import behind
from tests.harness.faults import raise_planted
from tests.harness.offload import CASES, CPU, PRECISION, at_the_end, check, differences, plain_steps
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, start, train_step

# -- settings and freezing -------------------------------------------------------------------------------------------
RATES = {1: (3e-3, 0.0), 4: (1e-2, 0.2), 7: (2e-3, 0.1)}  # from a step on: learning rate, decay


def with_other_rates(stage: int, overlap: bool) -> list[float]:
    """Errors against the rule where settings change in the middle of windows. Collective."""
    wanted, case = rule_of(overlap=overlap), CASES["wide"]()
    engine = zenflow_engine(stage, wanted)
    for step in range(STEPS):
        for group in engine.optimizer.param_groups if step in RATES else ():
            group["lr"], group["weight_decay"] = RATES[step]
        train_step(engine, case, step)

    def change(step: int, _: nn.Module) -> None:
        if step in RATES:
            GATE_ADAM["lr"], GATE_ADAM["weight_decay"] = RATES[step]

    with mock.patch.dict(GATE_ADAM):
        stated(wanted, "wide", world=engine.world_size, before=change)
    errors = errors_against(wanted, engine)
    engine.destroy()
    return errors


@pytest.mark.in_make_test("2-True")
@pytest.mark.parametrize(("stage", "overlap"), [(2, True), (3, False)])
def test_settings_that_change_in_a_window_are_the_devices_of_the_step_and_the_hosts_of_the_last(
    pool2: RankPool, stage: int, overlap: bool
) -> None:
    assert max(max(errors) for errors in pool2.run(with_other_rates, stage, overlap)) < 2e-5


# A window is three steps: frozen behind the first of one, and back in the middle of the next.
FROZEN, THAWED = 4, 7


def _freeze(step: int, model: nn.Module) -> None:
    if step in (FROZEN, THAWED):
        for module in (model.inp, model.head):
            module.requires_grad_(step == THAWED)


def frozen_in_a_window(stage: int, overlap: bool, folder: str, look: str) -> list[float]:
    """Errors against the rule where layers are frozen in the middle of a window. ``look``: what happens when they are,
    or a step later. Collective.
    """
    wanted, case = rule_of(overlap=overlap), CASES["wide"]()
    engine = zenflow_engine(stage, wanted)
    if look == "hook":
        engine.basic_optimizer.register_step_post_hook(lambda *_: None)
    for step in range(STEPS):
        if look == "save" and step == FROZEN + 1:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = zenflow_engine(stage, wanted)
            _freeze(FROZEN, engine.module)
            engine.load_checkpoint(folder)
        _freeze(step, engine.module)
        if look == "read" and step == FROZEN:
            safe_get_full_optimizer_state(engine.module.inp.weight, "exp_avg")
        train_step(engine, case, step)
    stated(wanted, "wide", world=engine.world_size, before=_freeze)
    errors = errors_against(wanted, engine)
    engine.destroy()
    return errors


@pytest.mark.in_make_test("3-False-save", "2-False-hook")
@pytest.mark.parametrize(
    ("stage", "overlap", "look"), [(2, True, ""), (3, False, "read"), (3, False, "save"), (2, False, "hook")]
)
def test_what_is_frozen_in_a_window_gets_its_sum_at_the_end_of_it(
    pool2: RankPool, tmp_path: Path, stage: int, overlap: bool, look: str
) -> None:
    for errors in pool2.run(frozen_in_a_window, stage, overlap, str(tmp_path), look):
        assert max(errors) < 2e-5, errors


def watched(stage: int, overlap: bool) -> list[float]:
    """How far masters that hooks see at the ends of windows are from what is read then; and how far from what one has
    written what is read behind the next step. Collective.
    """
    engine, seen, far = zenflow_engine(stage, rule_of(overlap=overlap)), [], []

    def look(optimizer: Any, *_: Any) -> None:
        seen[:] = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]

    def halve(optimizer: Any, *_: Any) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            param.data.mul_(0.5)

    def distance(factor: float) -> float:
        now = [param for group in engine.basic_optimizer.param_groups for param in group["params"]]
        assert len(now) == len(seen) > 0
        return max(float((a * factor - b).abs().max()) for a, b in zip(seen, now, strict=True))

    plain_steps(engine, "wide", 0, 2)
    handle = engine.basic_optimizer.register_step_post_hook(look)
    plain_steps(engine, "wide", 2, 3)
    far.append(distance(1.0))
    handle.remove()
    plain_steps(engine, "wide", 3, 5)
    handles = [engine.basic_optimizer.register_step_post_hook(call) for call in (look, halve)]
    plain_steps(engine, "wide", 5, 6)
    far.append(distance(0.5))
    for handle in handles:
        handle.remove()
    engine.destroy()
    return far


@pytest.mark.in_make_test("2-True")
@pytest.mark.parametrize(("stage", "overlap"), [(2, True), (3, False)])
def test_a_hook_sees_the_columns_of_the_device_as_they_are_and_may_write_them(
    pool2: RankPool, stage: int, overlap: bool
) -> None:
    assert pool2.run(watched, stage, overlap) == [[0.0, 0.0]] * 2


# -- lost batches, looks, loads --------------------------------------------------------------------------------------
def _overflow(engine: Any, _: str) -> None:
    dtype = next(iter({unit.dtype for unit in engine.runtime.units}))
    engine.backward(engine(torch.full((2, IN_FEATURES), float("inf"), dtype=dtype)).float().sum())
    engine.step()
    assert not engine.was_step_applied()


def _lost(engine: Any, _: str) -> None:
    """A forward fails on one rank, and none takes the batch."""

    def fail(*_: Any) -> None:
        raise ValueError("this batch of mine")

    with contextlib.ExitStack() as stack:
        if engine.global_rank == engine.world_size - 1:
            stack.callback(engine.module.head.register_forward_pre_hook(fail).remove)
        assert "this batch of mine" in outcome(lambda: train_step(engine, CASES["wide"](), 40))


def _evaluated(engine: Any, _: str) -> None:
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(2, IN_FEATURES, dtype=next(iter({unit.dtype for unit in engine.runtime.units}))))
    engine.train()


def _generated(engine: Any, _: str) -> None:
    with engine.unsharded() as module, torch.no_grad():
        module(torch.ones(2, IN_FEATURES, dtype=next(module.parameters()).dtype))


def _loaded(engine: Any, folder: str) -> None:
    """Back to here from somewhere else."""
    engine.save_checkpoint(folder)
    plain_steps(engine, "wide", 30, 32)
    engine.load_checkpoint(folder)


def _restored(engine: Any, _: str) -> None:
    state = copy.deepcopy(engine.optimizer.state_dict())
    plain_steps(engine, "wide", 30, 32)
    engine.optimizer.load_state_dict(state)


def _stopped(engine: Any, _: str) -> None:
    """Gradients that no step takes."""
    (loss,) = CASES["wide"]().seeded_loss(engine, here(41))
    engine.backward(loss)
    engine.zero_grad()


def _read(engine: Any, _: str) -> None:
    """Between a backward and its step, which no other test does."""
    (loss,) = CASES["wide"]().seeded_loss(engine, here(42))
    engine.backward(loss)
    safe_get_full_fp32_param(engine.module.inp.weight)
    engine.zero_grad()


def _lent(engine: Any, _: str) -> None:
    engine.offload_states()
    engine.reload_states()


BETWEEN: dict[str, Callable[[Any, str], None]] = {
    "overflow": _overflow,
    "lost": _lost,
    "evaluated": _evaluated,
    "generated": _generated,
    "loaded": _loaded,
    "restored": _restored,
    "stopped": _stopped,
    "read": _read,
    "lent": _lent,
}
FP16 = {"fp16": {"enabled": True, "loss_scale": 64.0}}


def behind_all(
    stage: int, precision: dict[str, Any], overlap: bool, at: int, names: list[str], folder: str
) -> list[str]:
    """What differs where all those have happened after so many steps. Collective."""
    found = []
    for happens in ([], names):
        engine = zenflow_engine(stage, rule_of(overlap=overlap), **precision)
        losses = plain_steps(engine, "wide", 0, at)
        engine.save_checkpoint(f"{folder}/{bool(happens)}") if overlap else None  # publishes what has begun
        for name in happens:
            BETWEEN[name](engine, folder)
        losses += plain_steps(engine, "wide", at, STEPS)
        found.append(at_the_end(engine, losses))
    return differences(*found)


@pytest.mark.in_make_test("2-fp16-all", "3-bf16-all")
@pytest.mark.parametrize("names", [list(BETWEEN), *([name] for name in BETWEEN)], ids=["all", *BETWEEN])
@pytest.mark.parametrize(
    ("stage", "precision", "overlap", "at"),
    [(2, FP16, False, 4), (3, PRECISION["bf16"], True, 5)],
    ids=["2-fp16", "3-bf16"],
)
def test_the_window_goes_on_bit_for_bit_behind(
    pool2: RankPool, tmp_path: Path, stage: int, precision: dict[str, Any], overlap: bool, at: int, names: list[str]
) -> None:
    """All of it in a row, and each alone."""
    check(pool2.run(behind_all, stage, precision, overlap, at, names, str(tmp_path)))


# -- other numbers of ranks ------------------------------------------------------------------------------------------
class Uneven(nn.Module):
    """A small matrix and a vector of which, as of a large one, nothing is chosen: some rank has only of that."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(6, 4, bias=False)
        self.long = nn.Parameter(torch.linspace(-1, 1, 120))

    def forward(self, x: Tensor) -> Tensor:
        return self.small(x).sum() * self.long.square().mean() + self.long[:40].sum()


def uneven(folder: str, begin: int, end: int, stage: int) -> dict[str, Tensor]:
    """Masters and moments after steps, from what the folder has to what it gets. Collective."""
    with mock.patch.object(columns, "MOST_OF_VECTOR", 100):
        torch.manual_seed(1)
        zero = {"offload_optimizer": CPU, "zenflow": {"topk_ratio": 0.3, "update_interval": 4, "overlap_step": True}}
        engine = start(Uneven(), make_config(stage, zero=zero))
        if begin:
            engine.load_checkpoint(folder)
        for step in range(begin, end):
            engine.backward(engine(torch.linspace(-1, 1, 12).view(2, 6) + 0.1 * step))
            engine.step()
        engine.save_checkpoint(folder)
        found = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
        found |= {f"{n}.m": safe_get_full_optimizer_state(p, "exp_avg") for n, p in engine.module.named_parameters()}
        engine.destroy()
    return found


@pytest.mark.in_make_test("2")
@pytest.mark.parametrize("at", [2, 5])
def test_a_rank_with_nothing_chosen_saves_and_others_go_on(
    pool1: RankPool, pool2: RankPool, pool3: RankPool, tmp_path: Path, at: int
) -> None:
    for begin, end in ((0, at), (at, 8), (8, 11)):  # a save brings weights up to date
        (alone,) = pool1.run(uneven, str(tmp_path / "alone"), begin, end, 2)
    pool2.run(uneven, str(tmp_path / "several"), 0, at, 2)
    several = pool3.run(uneven, str(tmp_path / "several"), at, 8, 3)
    several = pool1.run(uneven, str(tmp_path / "several"), 8, 11, 1)
    assert all(torch.allclose(several[0][name], value, atol=1e-6) for name, value in alone.items())


# -- what fails ------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def planted(engine: Any, part: str, *, rank: int = 1) -> Iterator[None]:
    """Inside, that part of a step fails on one rank."""
    if engine.global_rank == rank:
        with mock.patch.object(zenflow.SelectiveUpdate, part, raise_planted):
            yield
    else:
        yield


def failing(part: str, at: int, stage: int, overlap: bool, folder: str, way: str) -> list[Any]:
    """What this rank hears in the step that fails on the second one or, if that hears of it later, in the next; behind
    that; and whether it goes on from a checkpoint. Collective.
    """
    with behind() if way == "thread" else contextlib.nullcontext():
        engine = zenflow_engine(stage, rule_of(overlap=overlap), **PRECISION["bf16"])
        plain_steps(engine, "wide", 0, at)
        engine.save_checkpoint(folder)
        before = full_parameters(engine.module)
        if part == "_take_states":  # what has not come home needs not be taken
            safe_get_full_fp32_param(engine.module.inp.weight)
        elif part != "_bring_out":
            plain_steps(engine, "wide", at, at + 1)
        with planted(engine, part):
            heard = [outcome(lambda: plain_steps(engine, "wide", at + 1, at + 2))]
        heard += [outcome(lambda: plain_steps(engine, "wide", at + 2, at + 3)) for _ in range(2)]
        engine.load_checkpoint(folder)
        loaded = all(torch.equal(before[n], p) for n, p in full_parameters(engine.module).items())
        losses = plain_steps(engine, "wide", at, at + 4)
        engine.destroy()
    return [heard, loaded and len(losses) == 4]


@pytest.mark.in_make_test("_bring_out-0-2-False-program")
@pytest.mark.parametrize(
    ("part", "at", "stage", "overlap", "way"),
    [
        ("_take_states", 4, 2, False, "program"),
        ("_bring_out", 4, 2, True, "program"),
        ("_bring_out", 0, 2, False, "program"),
        ("_square_all", 5, 2, False, "program"),
        ("_take_largest", 5, 1, True, "program"),
        ("_update_chosen", 3, 3, False, "program"),
        ("_add_all", 3, 2, True, "thread"),
        ("_until_all_ended", 4, 2, True, "thread"),
        ("_until_all_ended", 4, 3, True, "thread"),
        ("_until_all_ended", 4, 2, True, "program"),
    ],
)
def test_a_step_that_fails_on_one_rank_is_an_error_of_all_until_a_checkpoint_is_loaded(
    pool2: RankPool, tmp_path: Path, part: str, at: int, stage: int, overlap: bool, way: str
) -> None:
    (other, ahead), (own, again) = pool2.run(failing, part, at, stage, overlap, str(tmp_path), way, time_limit=40)
    assert "planted" in own[0], own
    assert "rank 1" in other[0] + other[1] and "planted" in other[0] + other[1], other
    for texts in (own, other):
        assert "load a checkpoint" in texts[2] and "planted" in texts[2], (own, other)
    assert ahead and again


# -- what it takes, and gives back -----------------------------------------------------------------------------------
def planned_and_kept(stage: int, overlap: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the plan, and what there is in the middle of a window with all states at home. Collective."""
    engine = zenflow_engine(stage, rule_of(overlap=overlap))
    plain_steps(engine, "wide", 0, 7)
    policy = engine.runtime.update
    chosen = list(policy._chosen.values())
    out = [[c.grad, c.param, *(policy._on_device.state[c.param][n] for n in zenflow._MOMENTS)] for c in chosen]
    numbers = [near for c in chosen for _, near, _ in c.parts]
    safe_get_full_fp32_param(engine.module.inp.weight)
    masks = [s[zenflow.CHOSEN] for s in vars(engine.basic_optimizer)["state"].values() if zenflow.CHOSEN in s]
    kept = {
        "states of chosen columns": _bytes(tensor for those in out for tensor in those),
        "choice of columns": _bytes([*numbers, *policy._squares.values(), *masks]),
        "sums of gradients of a window": _bytes(total for those in policy._sums.values() for total in those)
        + _bytes(begun.store.tensor for begun in policy._begun),
    }
    planned = {line.what: line.host + line.device for line in engine.memory_plan().lines if line.what in kept}
    engine.destroy()
    return planned, kept


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.in_make_test("3-True")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_memory_plan_has_what_the_fullest_rank_has(
    pool1: RankPool, pool2: RankPool, stage: int, overlap: bool
) -> None:
    for ranks in (pool1.run(planned_and_kept, stage, overlap), pool2.run(planned_and_kept, stage, overlap)):
        planned = ranks[0][0]
        assert all(other == planned for other, _ in ranks)
        most = {what: max(kept[what] for _, kept in ranks) for what in planned}
        assert len(planned) == 3
        for what in planned:  # of a unit's padding nothing is chosen
            exact = len(ranks) == 1 and what != "choice of columns"
            assert (1.0 if exact else 0.98) * planned[what] <= most[what] <= planned[what], (what, most, planned)


def cores_of_an_optimizer(zero: dict[str, Any]) -> list[float]:
    """The share of the cores that a client's optimizer takes in an engine, and behind it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = CASES["wide"]().build()
    optimizer = DeepSpeedCPUAdam(model.parameters())
    engine = start(model, make_config(2, zero=zero, optimizer=None), optimizer=optimizer)
    shares = [optimizer.host_cores]
    engine.destroy()
    return [*shares, optimizer.host_cores]


def test_the_end_of_an_engine_gives_the_cores_back(pool1: RankPool) -> None:
    chosen = {"overlap_step": True, "pt_reserved_cores_perc": 0.25}
    assert pool1.run(cores_of_an_optimizer, {"offload_optimizer": CPU, "zenflow": chosen}) == [[0.75, 1.0]]
    early = {**CPU, "super_offload": True, "cpuadam_cores_perc": 0.5}
    assert pool1.run(cores_of_an_optimizer, {"offload_optimizer": early}) == [[0.5, 1.0]]
