"""Full and local access to masters, gradients and optimizer state; GatheredParameters; whole 16-bit weights."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import Case, MicroBatch, case_named
from deepspeed.tools.verify.reference import gate_optimizer, trainable
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from tests.harness.lockstep import TOLERANCE, equal, live_bytes, not_at_rest
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.reference16 import rounded
from tests.harness.training import STAGES, here, make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(60)
ZERO = {"param_persistence_threshold": 20}
SLOTS = ("exp_avg", "exp_avg_sq")


def _plain_run(case: Case, steps: int) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """A plain run over all ranks' data; the parameters with the gradients of the last step, and the optimizer."""
    world = dist.get_world_size()
    model = case.build()
    optimizer = gate_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            for micro in range(case.accumulation):
                loss = case.seeded_loss(model, MicroBatch(step, micro, rank, world))[0]
                (loss / (world * case.accumulation)).backward()
        optimizer.step()
    return trainable(model), optimizer


def read_everything(stage: int, accumulation: int) -> dict[str, float]:
    """The largest error of each kind of value."""
    case = case_named("tied", accumulation=accumulation)
    plain, optimizer = _plain_run(case, 2)
    engine = start(case.build(), make_config(stage, zero=ZERO, gradient_accumulation_steps=accumulation))
    errors: dict[str, float] = {}

    def note(kind: str, full: Tensor | None, local: Tensor | None, expected: Tensor | None) -> None:
        assert full is not None and full.dtype is torch.float32 and expected is not None
        found = scaled_error(full, expected.detach()), _local_error(local, full)
        errors[kind] = max(errors.get(kind, 0.0), *found)

    train_step(engine, case, 0)
    mine = trainable(engine.module)
    assert all(safe_get_full_grad(p) is None for p in mine.values())
    assert all(safe_get_full_optimizer_state(p, "no_such_slot") is None for p in mine.values())
    for micro in range(accumulation):
        if micro:
            engine.step()
        engine.backward(case.seeded_loss(engine, here(1, micro))[0])
    for name, p in mine.items():
        note("grad", safe_get_full_grad(p), safe_get_local_grad(p), plain[name].grad)
    engine.step()
    for name, p in mine.items():
        note("master", safe_get_full_fp32_param(p), safe_get_local_fp32_param(p), plain[name])
        for slot in SLOTS:
            full, local = safe_get_full_optimizer_state(p, slot), safe_get_local_optimizer_state(p, slot)
            note(slot, full, local, optimizer.state[plain[name]][slot])
    assert not_at_rest(engine) == []
    engine.destroy()
    return errors


def _local_error(local: Tensor | None, full: Tensor) -> float:
    """The local parts of all ranks, put together, are the full tensor (or each is all of it)."""
    assert local is not None and local.dim() == 1
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local.detach().clone())
    if all(part.numel() == full.numel() for part in parts):
        return max(scaled_error(part.view(full.shape), full) for part in parts)
    whole = torch.cat(parts)
    return scaled_error(whole.view(full.shape), full) if whole.numel() == full.numel() else float("inf")


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_full_and_local_reads_equal_the_plain_run(pool2: RankPool, stage: int, accumulation: int) -> None:
    for errors in pool2.run(read_everything, stage, accumulation):
        assert errors.keys() == {"grad", "master", *SLOTS} and max(errors.values()) <= TOLERANCE, errors


def written_while_gathered(stage: int, modifier: int | None) -> None:
    engine = start(case_named("plain").build(), make_config(stage, zero={"param_persistence_threshold": 0}))
    p = engine.module.layers[1].up.weight
    with deepspeed.zero.GatheredParameters([p], modifier_rank=modifier):
        value = torch.linspace(-1, 1, p.numel()).view(p.shape)
        safe_set_full_fp32_param(p, value)
        assert torch.equal(p, value), "not seen inside"
    assert torch.equal(full_parameters(engine.module)["layers.1.up.weight"], value), "does not stay"
    assert torch.equal(safe_get_full_fp32_param(p), value), "not the master"
    engine.destroy()


@pytest.mark.parametrize("modifier", [None, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_master_written_while_gathered_is_seen_and_stays(pool2: RankPool, stage: int, modifier: int | None) -> None:
    pool2.run(written_while_gathered, stage, modifier)


def gathered_semantics() -> dict[str, bool]:
    """The list of what callers rely on."""
    engine = start(case_named("tied").build(), make_config(3, zero={"param_persistence_threshold": 0}))
    model = engine.module
    everything = list(model.parameters())
    ordinary = nn.Parameter(torch.ones(3))
    gathered = deepspeed.zero.GatheredParameters
    released = lambda: live_bytes(model) == 0  # noqa: E731
    found: dict[str, bool] = {}
    for name, what in {
        "empty list": [],
        "ordinary only": [ordinary],
        "None": [None],
        "buffers": [torch.ones(2)],
    }.items():
        with gathered(what, modifier_rank=0):
            found[name] = released()
    with gathered(p for p in everything if p.dim() > 1):
        found["generator"] = bool(model.embed.weight.isfinite().all())
    with gathered(model.parameters(), modifier_rank=None):
        found["parameters()"] = all(bool(p.isfinite().all()) for p in everything)
    with gathered(model.embed.weight):
        found["one parameter"] = model.embed.weight.sum().item() == model.embed.weight.sum().item()
    with gathered([model.embed.weight, ordinary, model.head.weight, model.embed.weight, *everything], modifier_rank=0):
        found["mixed, tied and duplicated"] = model.head.weight is model.embed.weight and ordinary.sum().item() == 3
    with gathered(everything, enabled=False):
        found["enabled=False"] = released()
    with gathered(everything, fwd_module=model):
        found["fwd_module"] = not released()
    with gathered(everything):
        with gathered(everything[:2], modifier_rank=1):
            pass
        found["nested stays"] = all(bool(p.isfinite().all()) for p in everything)
        found["status"] = model.embed.weight.ds_status is deepspeed.zero.ZeroParamStatus.AVAILABLE
        found["class"] = type(model.embed.weight) is nn.Parameter
    found["status after"] = model.embed.weight.ds_status is deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    found["released after"] = released()
    with contextlib.suppress(KeyError), gathered(everything, modifier_rank=0):
        with torch.no_grad():
            model.embed.weight.fill_(9.0)
        raise KeyError
    found["released after an error"] = released() and float(full_parameters(model)["embed.weight"].max()) < 9.0
    once = gathered(everything)
    for _ in range(2):
        with once:
            found["the same object again"] = not released()
    with torch.no_grad(), gathered(everything):
        model.embed.weight.add_(0)
    for rank in range(2):
        with gathered(model.layers[0].norm.weight, modifier_rank=rank), torch.no_grad():
            model.layers[0].norm.weight.fill_(10.0 + dist.get_rank())
        found[f"modifier {rank} wins"] = bool((full_parameters(model)["layers.0.norm.weight"] == 10.0 + rank).all())
        found[f"modifier {rank} reaches the master"] = bool(
            (safe_get_full_fp32_param(model.layers[0].norm.weight) == 10.0 + rank).all()
        )
    with gathered(model.layers[0].up.bias, modifier_rank=0):
        model.layers[0].up.bias.data = torch.full((model.layers[0].up.bias.numel(),), 3.0)
    found["data assigned inside"] = bool((full_parameters(model)["layers.0.up.bias"] == 3.0).all())
    train_step(engine, case_named("tied"), 0)
    found["training goes on"] = not_at_rest(engine) == []

    def unknown() -> None:
        with gathered(everything, modifier_rank=5):
            pass

    said = outcome(unknown)
    found["unknown modifier"] = "UsageError" in said and "modifier_rank 5" in said
    found["released after a bad modifier"] = released()
    engine.destroy()
    with gathered(everything, modifier_rank=0):
        found["plain again"] = all(bool(p.isfinite().all()) for p in everything)
    return found


def test_gathered_parameters_keeps_what_callers_rely_on(pool2: RankPool) -> None:
    for found in pool2.run(gathered_semantics):
        assert all(found.values()), [name for name, good in found.items() if not good]


def consolidated(stage: int, folder: str, save: bool) -> tuple[bool, bool]:
    """Whether a file was written, and whether asking for a state dict was refused; each has the weights."""
    case = rounded(case_named("tied"), torch.bfloat16)
    zero = {**ZERO, "gather_16bit_weights_on_model_save": save}
    model = case.build()
    model.register_buffer("positions", torch.arange(3))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model.norm = model.same_norm = nn.BatchNorm1d(3, affine=False)  # its buffers have two names each
    model.layers[0].norm.weight.requires_grad_(False)
    keys = list(model.state_dict())
    engine = start(model, make_config(stage, zero=zero, bf16={"enabled": True}))
    train_step(engine, case, 0)
    expected = full_parameters(model)
    states, target = [], Path(folder) / "weights.bin"
    with logged(logging.WARNING) as said:
        written = engine.save_16bit_model(folder, target.name)
    warned = any("wrote nothing" in text for text in said)
    assert warned == (not written and dist.get_rank() == 0)
    dist.barrier()
    assert target.exists() == written
    if written:
        states.append(torch.load(target))
    refused = ""
    try:
        state = engine._zero3_consolidated_16bit_state_dict()
        trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        assert (state is None) == (dist.get_rank() != 0), "only the first rank gets the weights"
        if state is not None:
            states.append(state)
            assert set(state) - set(trained) == {"layers.0.norm.weight"}
    except ValueError as error:
        refused = str(error)
    for state in states:
        assert sorted(state) == sorted(keys)
        assert equal({name: state[name] for name in expected}, expected)
        assert all(state[name].dtype is torch.bfloat16 for name in expected)
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr(), "tied names do not share"
    engine.destroy()
    return written, bool(refused)


@pytest.mark.parametrize("save", [True, False], ids=["gather_on_save", "no_gather"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_weights(pool2: RankPool, tmp_path: Path, stage: int, save: bool) -> None:
    for written, refused in pool2.run(consolidated, stage, str(tmp_path), save):
        assert refused == (stage < 3), "ValueError where parameters are not sharded, and only there"
        assert written == (stage < 3 or save)


def _updated_gradients(stage: int) -> bool:
    case = case_named("plain")
    engine = start(case.build(), make_config(stage, zero=ZERO))
    engine.backward(case.seeded_loss(engine, here(0))[0])
    params = dict(engine.module.named_parameters())
    before = {name: safe_get_full_grad(p) for name, p in params.items()}
    met: list[nn.Parameter] = []

    def double(grad: Tensor, param: nn.Parameter) -> Tensor:
        met.append(param)
        assert tuple(grad.shape) == tuple(param.shape)
        return 2 * grad

    safe_update_full_grad_vectorized(params.values(), double)
    same = all(torch.equal(safe_get_full_grad(p), 2 * before[name]) for name, p in params.items())
    engine.destroy()
    return same and all(a is b for a, b in zip(met, params.values(), strict=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_updated_by_a_function_of_value_and_parameter(pool2: RankPool, stage: int) -> None:
    assert pool2.run(_updated_gradients, stage) == [True, True]


def _without_a_backward(stage: int) -> list[str]:
    """Set slots before the first step, and gradients of zeros before each of two, as scripts that clear all do; what is
    said of setting other gradients.
    """
    case = case_named("plain")
    engine = start(case.build(), make_config(stage, zero=ZERO))
    p, said = engine.module.layers[1].up.weight, []
    for slot in (*SLOTS, "no_such_slot"):
        safe_set_local_optimizer_state(p, torch.ones(p.numel()), slot)
        safe_set_full_optimizer_state(p, torch.ones(p.shape), slot)
        found = safe_get_local_optimizer_state(p, slot)
        assert found is None or not found.numel(), slot
    for step in range(2):  # from the second on there is memory of the last gradient
        for setter, shape in ((safe_set_full_grad, p.shape), (safe_set_local_grad, (1,))) if stage else ():
            setter(p, torch.zeros(shape))
            said.append(outcome(lambda s=setter, n=shape: s(p, torch.ones(n))))
        train_step(engine, case, step)
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_slots_that_are_not_there_are_set_in_vain_and_gradients_refused(pool2: RankPool, stage: int) -> None:
    for said in pool2.run(_without_a_backward, stage):
        assert all("UsageError" in text and "layers.1.up.weight' has no gradient" in text for text in said), said


class _Sums(torch.optim.SGD):
    """Keeps something per parameter that is no number of each of its elements, as Adafactor does."""

    def step(self, closure: Any = None) -> Any:
        """As SGD."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["sums"] = torch.ones(7)
        return super().step(closure)


def slots_of_another_size(stage: int) -> str:
    case = case_named("plain")
    model = case.build()
    config = make_config(stage, zero=ZERO, optimizer=None)
    engine = start(model, config, optimizer=_Sums(model.parameters(), lr=0.1))
    train_step(engine, case, 0)
    weight = engine.module.head.weight
    assert safe_get_full_optimizer_state(weight, "sums") is None
    local = safe_get_local_optimizer_state(weight, "sums")
    assert local is None or not local.numel(), local  # of a rank that has no part of it
    safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "sums")
    sums = [state["sums"] for state in engine.basic_optimizer.state.values()]
    assert sums and all(torch.equal(s, torch.ones(7)) for s in sums), "written into"
    said = outcome(lambda: safe_set_full_optimizer_state(weight, torch.zeros(7), "sums"))
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 2])
def test_a_slot_that_has_no_number_of_each_element_is_no_slot(pool2: RankPool, stage: int) -> None:
    """The answer was zeros of the parameter's shape."""
    for said in pool2.run(slots_of_another_size, stage):
        assert "UsageError" in said and "(7,)" in said


def _collated(samples: list[Any]) -> dict[str, Any]:
    return {"n": samples}


def loaders_of_an_engine() -> dict[str, list[int]]:
    config = make_config(0, train_micro_batch_size_per_gpu=2)
    model = nn.Linear(2, 2)
    engine, _, trained, _ = deepspeed.initialize(
        model=model, config=config, training_data=range(8), collate_fn=_collated
    )
    loaders = {route: engine.deepspeed_io(range(8), route=route) for route in ("eval", "predict")} | {"train": trained}
    found = {route: [n for batch in loader for n in batch["n"]] for route, loader in loaders.items()}
    engine.destroy()
    return found


def test_loaders_for_evaluation_have_all_samples_in_order_and_every_one_the_collate_fn(pool2: RankPool) -> None:
    """They were shuffled and in parts, and torch's own function put batches together."""
    first, second = pool2.run(loaders_of_an_engine)
    assert sorted(first.pop("train") + second.pop("train")) == [*range(8)]
    assert first == second == dict.fromkeys(("eval", "predict"), [*range(8)])
