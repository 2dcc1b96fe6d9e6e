"""State that rests on a drive is saved and loaded exactly as state in memory, and takes the room that was planned. What
is read and edited there, tests/fuzz compares with plain torch.
"""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepspeed.tier.drive import Drive
from deepspeed.tier.staging import Staging
from deepspeed.tier.transfer import Transfer
from deepspeed.tools.verify.reference import trainable
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_set_full_grad,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)
from deepspeed.zero.plan import StateKind
from tests.harness.offload import (
    CASES,
    PRECISION,
    check,
    differences,
    engine_for,
    snapshot,
    variants,
)
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, start, train_step
from tests.ops.test_staging_and_stored import held_bytes

pytestmark = pytest.mark.timeout(120)


# -- saving and loading ------------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Saved and read again, as a checkpoint does."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def continues(ways: tuple[str, str], precision: str, folder: str) -> list[str]:
    """What differs from going on where states from before are loaded: into the same engine, those of the middle and
    those from before the first step; and into a new one under the second way. A state that was cut otherwise is
    refused, and changes nothing. Collective.
    """
    case = CASES["wide"]()

    def train(steps: range) -> dict[str, Tensor]:
        for step in steps:
            train_step(engine, case, step)
        return snapshot(engine)

    engine = engine_for(ways[0], folder, **PRECISION[precision])
    first = through_a_file(engine.optimizer.state_dict())
    middle = train(range(2))
    saved = through_a_file(engine.optimizer.state_dict())
    wanted = train(range(2, 4))
    cut = through_a_file(saved)
    cut["fp32_flat"] = cut["fp32_flat"][:-1]
    said = outcome(lambda: engine.optimizer.load_state_dict(cut))
    bad = [] if "another layout" in said else [f"another layout: {said!r}"]
    bad += differences(wanted, snapshot(engine), "refused: ")
    engine.optimizer.load_state_dict(through_a_file(saved))
    bad += differences(wanted, train(range(2, 4)), "same engine: ")
    engine.optimizer.load_state_dict(first)
    bad += differences(middle, train(range(2)), "from the first step: ")
    engine.destroy()
    engine = engine_for(ways[1], folder, **PRECISION[precision])
    engine.optimizer.load_state_dict(saved)
    bad += differences(wanted, train(range(2, 4)), "new engine: ")
    engine.destroy()
    return bad


@pytest.mark.in_make_test("ways1-bf16", "ways2-fp32", "ways4-fp32")
@pytest.mark.parametrize(
    ("ways", "precision"),
    [
        (("grads nvme", "grads nvme"), "fp16"),
        (("one buffer", "one buffer"), "bf16"),
        (("half nvme", "half nvme"), "fp32"),
        (("none", "both nvme"), "bf16"),
        (("both nvme", "none"), "fp32"),
    ],
)
def test_optimizer_state_round_trip(pool2: RankPool, tmp_path: Path, ways: tuple[str, str], precision: str) -> None:
    check(pool2.run(continues, ways, precision, str(tmp_path)))


def loaded_twice(folder: str) -> list[str]:
    """What differs where the same dict is loaded twice, and in the dict itself."""
    case, engine = CASES["wide"](), engine_for("tiles", folder)
    train_step(engine, case, 0)
    saved = engine.optimizer.state_dict()
    before, after = through_a_file(saved), list[dict[str, Tensor]]()
    for _ in range(2):
        engine.optimizer.load_state_dict(saved)
        for step in range(1, 3):
            train_step(engine, case, step)
        after.append(snapshot(engine))
    pairs = zip(tree_leaves(before["base_optimizer_state"]), tree_leaves(saved["base_optimizer_state"]), strict=True)
    bad = ["the caller's dict"] if any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in pairs) else []
    engine.destroy()
    return [*bad, *differences(*after, "again: ")]


def test_a_state_dict_that_is_loaded_to_a_drive_stays_the_callers(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(loaded_twice, str(tmp_path)))


# -- never stale -------------------------------------------------------------------------------------------------


def what_is_away(folder: str) -> list[str]:
    """What can be reached without a getter is not-a-number and refuses writes, before and after steps."""
    case = CASES["wide"]()
    engine = engine_for("grads nvme", folder)
    bad = []
    for step in range(2):
        train_step(engine, case, step)
        away = {f"master {i}": p for i, p in enumerate(engine.optimizer.fp32_partitioned_groups_flat)}
        for number, state in enumerate(engine.optimizer.state.values()):
            away |= {f"{k} {number}": v for k, v in state.items() if v.dim()}
        away |= {f"shard {u.name}": u.shard for u in engine.runtime.units if u.movable}
        for name, tensor in away.items():
            if tensor.numel() and not bool(tensor.detach().isnan().all()):
                bad.append(f"{name} shows numbers")
            if tensor.numel() > 1 and "RuntimeError" not in outcome(lambda t=tensor: t.detach().add_(1)):
                bad.append(f"{name} can be written")
        for name, param in engine.module.named_parameters():
            if (
                param._ds_unit.movable
                and not outcome(lambda p=param: p.sum().item())
                and not bool(param.detach().isnan().all())
            ):
                bad.append(f"parameter {name} shows numbers")
    model = engine.module
    engine.destroy()
    bad += [
        n
        for n, p in model.named_parameters()
        if not bool(p.detach().isfinite().all()) or p.untyped_storage().nbytes() == 0
    ]
    return bad


def test_released_values_are_never_stale(pool2: RankPool, tmp_path: Path) -> None:
    check(pool2.run(what_is_away, str(tmp_path)))


def zeroed(way: str, folder: str, setter: str) -> list[str]:
    """Gradients set to zero right after the backward, while reductions may be under way, are zero at the step."""
    case = CASES["wide"]()
    engine = engine_for(way, folder)
    bad = []
    for step in range(3):
        engine.backward(case.seeded_loss(engine, here(step))[0])
        for param in reversed(list(trainable(engine.module).values())):
            if setter == "local":
                safe_set_local_grad(param, torch.zeros(safe_get_local_fp32_param(param).numel()))  # type: ignore[union-attr]
            else:
                safe_set_full_grad(param, torch.zeros(param.ds_shape))
        engine.step()
        if engine.get_global_grad_norm() != 0.0:
            bad.append(f"step {step}: the norm is {engine.get_global_grad_norm()}")
    engine.destroy()
    return bad


@pytest.mark.parametrize("setter", ["full", "local"])
@pytest.mark.parametrize("way", ["none", "grads nvme"])
def test_setting_gradients_waits_for_their_reduction(pool2: RankPool, tmp_path: Path, way: str, setter: str) -> None:
    check(pool2.run(zeroed, way, str(tmp_path), setter))


class Watched(Transfer):
    """A write under way, and whether anybody has waited for it."""

    def __init__(self, values: Tensor, inner: Transfer) -> None:
        self.values, self.inner, self.waited = values, inner, False

    def wait(self) -> None:
        self.inner.wait()
        self.waited = True

    def done(self) -> bool:
        return self.inner.done()


def lent(folder: str) -> list[str]:
    """A value that lies in memory as it will lie on the drive, which is therefore written from where it is."""
    engine, seen = engine_for("one buffer", folder), list[Watched]()
    param = engine.module.get_parameter("inp.weight")
    unit, local = param._ds_unit, safe_get_local_fp32_param(param)
    assert local is not None
    offset = unit.layout.overlap(unit.layout.segments[param._ds_position], *unit.range_of(StateKind.OPTIM))[0]
    at = (offset - unit.range_of(StateKind.PARAM)[0]) * local.itemsize
    memory = torch.zeros(local.numel() + PAGE)
    first = (at - memory.data_ptr()) % PAGE // local.itemsize
    value = memory[first : first + local.numel()]
    real = Drive.write

    def write(drive: Drive, region: Any, start_: int, values: Tensor) -> Transfer:
        seen.append(Watched(values, real(drive, region, start_, values)))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drive, "write", write)
        safe_set_local_fp32_param(param, value)
        mine = [w for w in seen if w.values.data_ptr() == value.data_ptr()]
        bad = [] if mine else ["nothing was written from the value's own memory"]
        bad += ["the caller has the value back while it is being written"] * any(not w.waited for w in mine)
    engine.destroy()
    return bad


def test_a_local_value_belongs_to_the_caller_again(pool1: RankPool, tmp_path: Path) -> None:
    check(pool1.run(lent, str(tmp_path)))


def reused_model(folder: str) -> list[str]:
    """A destroyed engine gives the model back whole; a second engine over it goes on as if the first had been in
    memory.
    """
    case, results = CASES["wide"](), []
    for way in ("none", "grads nvme"):
        variant = variants(folder)[way]
        model = case.build().train()
        for stage, steps in ((3, 2), (2, 2)):
            zero = {k: v for k, v in variant.zero.items() if stage == 3 or k != "offload_param"}
            engine = start(model, make_config(stage, zero=zero))
            for step in range(steps):
                train_step(engine, case, step)
            engine.destroy()
        with torch.no_grad():
            results.append(
                {n: p.detach().clone() for n, p in model.named_parameters()} | {"out": model(torch.ones(2, 6))}
            )
    return differences(*results)


def test_the_model_is_whole_after_destroy(pool2: RankPool, tmp_path: Path) -> None:
    check(pool2.run(reused_model, str(tmp_path)))


# -- what is held, against the plan ------------------------------------------------------------------------------

PAGE = 4096


def plan_against_reality(folder: str, way: str, precision: str) -> list[str]:
    """What rests on drives and what the staging buffers hold at most, against the plan of before the start."""
    case, bad, peak = CASES["wide"](), [], dict[int, int]()
    with pytest.MonkeyPatch.context() as patch:
        real_take, real_give = Staging.take, Staging.give
        out: dict[int, int] = {}

        def take(self: Staging, nbytes: int) -> torch.Tensor:
            buffer = real_take(self, nbytes)
            out[id(self)] = out.get(id(self), 0) + buffer.numel()
            peak[id(self)] = max(peak.get(id(self), 0), out[id(self)] + held_bytes(self))
            return buffer

        def give(self: Staging, buffer: torch.Tensor, *, after: Any = None) -> None:
            out[id(self)] -= buffer.numel()
            real_give(self, buffer, after=after)

        patch.setattr(Staging, "take", take)
        patch.setattr(Staging, "give", give)
        engine = engine_for(way, folder, **PRECISION[precision])
        for step in range(3):
            train_step(engine, case, step)
    planned = {line.what: line for line in engine.memory_plan().lines}
    held = sum(d.used_bytes for d in engine._parts.tiers.drives)
    regions = 3 * len(engine.runtime.units) + 3 * len(engine._views)
    on_drives = engine.memory_plan().drive
    if not on_drives <= held <= on_drives + regions * 2 * PAGE:
        bad.append(f"the drives hold {held}, planned {on_drives}")
    pages = 2 * PAGE * sum(d.staging._count for d in engine._parts.tiers.drives)  # where buffers begin and end
    if sum(peak.values()) > planned["staging buffers"].host + pages:
        bad.append(f"staging held {sum(peak.values())}, planned {planned['staging buffers'].host}")
    engine.destroy()
    return bad


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["both nvme", "one buffer", "tiles", "some in cpu", "grads nvme", "half nvme"])
def test_the_plan_is_kept(pool1: RankPool, tmp_path: Path, way: str, precision: str) -> None:
    check(pool1.run(plan_against_reality, str(tmp_path), way, precision))


def inference(folder: str) -> list[str]:
    """Parameters on the drive without any optimizer."""
    case, outputs = CASES["wide"](), []
    for way in ("none", "pieces"):
        engine = engine_for(way, folder, optimizer=None)
        engine.eval()
        with torch.no_grad():
            outputs += [case.seeded_loss(engine, here(step))[0] for step in range(3)]
        engine.destroy()
    return [f"forward {i}" for i in range(3) if not torch.equal(outputs[i], outputs[3 + i])]


def test_forward_only(pool2: RankPool, tmp_path: Path) -> None:
    check(pool2.run(inference, str(tmp_path)))
