"""Training that is saved and resumed goes on bit for bit: losses, weights, optimizer state, learning rates, generators,
counters.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.tools.verify.models import Case
from deepspeed.tools.verify.resume import built_in_cells, interrupted, resume_on_rank
from deepspeed.tools.verify.runs import Setup, seed_everything, snapshot, train_case
from tests.harness.cases import case_named
from tests.harness.offload import PRECISION
from tests.harness.plain_optim import PlainOptimizer, UserElementwise
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, start

STEPS, AT = 5, 3


def identical(answers: list[str]) -> None:
    """No rank met a difference."""
    assert not any(answers), answers


def resumes(engine_of: Callable[[], Any], case: Case, folder: str, *, cut: int = AT, last: int = STEPS) -> str:
    """The first difference of a resumed run of ``case``."""

    def begin(seed: int) -> Any:
        engine = engine_of()
        seed_everything(seed + dist.get_rank())
        return engine

    return interrupted(begin, lambda engine, numbers: train_case(engine, case, numbers), folder, cut=cut, last=last)


# -- stage by stage ----------------------------------------------------------------------------------------------


@pytest.mark.in_make_test(
    "stage 0 bf16",
    "stage 0 open window",
    "stage 1 fp32",
    "stage 1 nvme",
    "stage 3 fp16, dynamic scale",
    "stage 3 dropout",
    "stage 3 open window",
    "stage 3 uneven shards",
    "stage 3 async save",
)
@pytest.mark.parametrize("cell", built_in_cells(), ids=lambda cell: cell.label)
def test_every_stage_and_precision(pool2: RankPool, tmp_path: Path, cell: Setup) -> None:
    identical(pool2.run(resume_on_rank, cell, str(tmp_path), STEPS, AT))


@pytest.mark.parametrize("cell", [c for c in built_in_cells((1, 3)) if c.label.endswith("fp32")], ids=lambda c: c.label)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_offload_with_an_open_window_on_one_rank(pool1: RankPool, tmp_path: Path, cell: Setup, tier: str) -> None:
    config = {**cell.config, **PRECISION["bf16"], "gradient_accumulation_steps": 2}
    identical(pool1.run(resume_on_rank, replace(cell, config=config, tier=tier, cut=1), str(tmp_path), 4, 2))


def unsynced(stage: int, cut: int, folder: str) -> str:
    """Two backwards inside ``no_sync``, one outside; saved between two of them."""
    case = case_named("used_twice")

    def train(engine: Any, numbers: range) -> list[float]:
        told = []
        for number in numbers:
            micro = number % 3
            with engine.no_sync() if micro < 2 else contextlib.nullcontext():
                loss = case.seeded_loss(engine, here(number))[0]
                engine.backward(loss)
                told.append(float(loss.detach()))
            if micro == 2:
                engine.step()
        return told

    def begin(seed: int) -> Any:
        engine = start(case.build(), make_config(stage))
        seed_everything(seed)
        return engine

    return interrupted(begin, train, folder, cut=3 + cut, last=9)


@pytest.mark.in_make_test("2-3")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cut", [1, 2])
def test_windows_under_no_sync(pool2: RankPool, tmp_path: Path, stage: int, cut: int) -> None:
    identical(pool2.run(unsynced, stage, cut, str(tmp_path)))


def on_mesh(zero: dict[str, int], precision: str, folder: str) -> str:
    """A window cut on a mesh of two axes."""
    case = case_named("plain", accumulation=2)
    config = make_config(3, zero=zero, gradient_accumulation_steps=2, **PRECISION[precision])
    return resumes(lambda: start(case.build(), config), case, folder, cut=3, last=6)


@pytest.mark.in_make_test("mics-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=["mics", "hpz"])
def test_meshes_of_four_ranks(pool4: RankPool, tmp_path: Path, zero: dict[str, int], precision: str) -> None:
    identical(pool4.run(on_mesh, zero, precision, str(tmp_path)))


# -- optimizers --------------------------------------------------------------------------------------------------


class OddState(PlainOptimizer):
    """A user's class whose state has everything: lists, text, None, flags, numbers, a tensor of another shape and dtype
    than the parameter, and a global entry.
    """

    defaults_of = {"lr": 1e-2, "names": ("a", "b"), "note": None}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["history"] = [*state.get("history", []), len(state.get("history", []))]
        state["word"], state["nothing"] = f"seen {len(state['history'])}", None
        state["flag"] = len(state["history"]) % 2 == 0
        state["largest"] = max(state.get("largest", 0.0), float(g.abs().max()) if g.numel() else 0.0)
        rows = g.flatten(1) if g.ndim > 1 else g.reshape(-1, 1)
        state["squares"] = state.get("squares", 0) + (rows @ rows.T).double()
        state["count"] = state.get("count", torch.zeros((), dtype=torch.int64)) + 1
        self.state["rounds"] = self.state.get("rounds", 0) + 1
        group["note"] = state["word"]
        damped = 1 + state["largest"] + 0.01 * len(state["history"]) + state["squares"].diagonal().sum()
        p.sub_(group["lr"] * torch.tanh(g) / damped)


class OddElements(UserElementwise):
    """The same on parts of parameters."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["history"] = [*state.get("history", []), "step"]
        state["sums"] = state.get("sums", torch.zeros(3)) + 1.0
        super().update(p, g / (len(state["history"]) + state["sums"][0]), state, group)


CONFIGURED: dict[str, dict[str, Any]] = {
    "Lamb": {"lr": 1e-2},
    "Lion": {"lr": 1e-3},
    "Adagrad": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5, "centered": True},
    "Muon": {"lr": 1e-2},
    "SGD": {"lr": 0.05, "momentum": 0.9},
}
CLIENT: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW_amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    **{
        name: partial(getattr(torch.optim, name), lr=1e-2)
        for name in ("Adafactor", "NAdam", "RAdam", "Adamax", "Rprop")
    },
    "OddState": OddState,
    "OddElements": OddElements,
}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and the rest under another rate."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim < 2], "lr": 3e-3}]


def with_optimizer(name: str, stage: int, folder: str) -> str:
    """A resumed run under an optimizer of the configuration or of the client."""
    case = case_named("plain")

    def engine() -> Any:
        model = case.build()
        if name in CONFIGURED:
            block = {"type": name, "params": CONFIGURED[name]}
            return start(model, make_config(stage, optimizer=block, zero_allow_untested_optimizer=True))
        config = make_config(stage, optimizer=None, zero_allow_untested_optimizer=True)
        return start(model, config, optimizer=CLIENT[name](two_groups(model)))

    return resumes(engine, case, folder)


@pytest.mark.in_make_test("Muon-3", "Adafactor-3", "OddState-3")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", [*CONFIGURED, *CLIENT])
def test_optimizers(pool2: RankPool, tmp_path: Path, name: str, stage: int) -> None:
    identical(pool2.run(with_optimizer, name, stage, str(tmp_path)))


# -- models --------------------------------------------------------------------------------------------------------


def with_model(name: str, folder: str) -> str:
    """A resumed run of one model."""
    case = case_named(name)
    return resumes(lambda: start(case.build(), make_config(3, **PRECISION["bf16"])), case, folder)


@pytest.mark.in_make_test("frozen", "tied")
@pytest.mark.parametrize("name", ["frozen", "tied", "odd_shapes", "batch_norm"])
def test_models_in_bf16_on_three_ranks(pool3: RankPool, tmp_path: Path, name: str) -> None:
    identical(pool3.run(with_model, name, str(tmp_path)))


def born_sharded(precision: str, folder: str) -> str:
    """A model that never was whole on any rank."""
    case = case_named("plain")
    config = make_config(3, **PRECISION[precision])

    def engine() -> Any:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = case.build()
        return start(model, config)

    return resumes(engine, case, folder)


@pytest.mark.in_make_test("bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_of_zero_init(pool2: RankPool, tmp_path: Path, precision: str) -> None:
    identical(pool2.run(born_sharded, precision, str(tmp_path)))


# -- engines -------------------------------------------------------------------------------------------------------


def without_optimizer(stage: int, folder: str) -> bool:
    """An engine for inference saves its weights, and another one with other weights takes them."""
    digests = []
    for change in (0.0, 1.0):
        model = case_named("plain").build()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(change)
        engine = start(model, make_config(stage, optimizer=None))
        digests.append(snapshot(engine)["params"])
        engine.load_checkpoint(folder) if change else engine.save_checkpoint(folder)
        digests.append(snapshot(engine)["params"])
        engine.destroy()
    saved, _, other, loaded = digests
    return loaded == saved != other


@pytest.mark.parametrize("stage", [0, 3])
def test_engines_without_an_optimizer(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    assert pool2.run(without_optimizer, stage, str(tmp_path)) == [True, True]


def two_engines(folder: str) -> list[str]:
    """Two engines under other stages in turns; each has its own folder, and both save behind the training."""
    behind = {"checkpoint": {"async": True}}
    configs = {"plain": make_config(2, **behind), "tied": make_config(3, **PRECISION["bf16"], **behind)}
    cases = [case_named(name) for name in configs]

    def pair() -> list[Any]:
        return [start(case.build(), config) for case, config in zip(cases, configs.values(), strict=True)]

    def train(engines: list[Any], numbers: range) -> list[list[float]]:
        turns = [(number, both) for number in numbers for both in zip(engines, cases, strict=True)]
        return [train_case(*both, range(number, number + 1)) for number, both in turns]

    def rest(engines: list[Any]) -> dict[str, Any]:
        """Train to the end; what decides how it would go on."""
        found: dict[str, Any] = {"loss": train(engines, range(3, 6))}
        snapshots = [snapshot(engine) for engine in engines]
        found |= {field: [each[field] for each in snapshots] for field in ("params", "opt", "lr", "scaler")}
        for engine in engines:
            engine.destroy()
        return found

    engines = pair()
    train(engines, range(3))
    for index, engine in enumerate(engines):
        engine.save_checkpoint(f"{folder}/{index}")
    wanted = rest(engines)
    engines = pair()
    for index, engine in enumerate(engines):
        assert engine.load_checkpoint(f"{folder}/{index}")[0] is not None
    found = rest(engines)
    return [field for field in wanted if wanted[field] != found[field]]


def test_two_engines_in_one_process(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(two_engines, str(tmp_path)) == [[], []]


class Speaks(nn.Module):
    """A module with a state that is no tensor."""

    words: tuple[str, ...] = ("kept",)

    def get_extra_state(self) -> Any:
        return {"words": self.words}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]


def with_odd_state(folder: str, background: bool) -> list[str]:  # noqa: FBT001
    """Buffers that torch holds with a conjugate or a negative bit, and extra state; what comes back otherwise."""
    model = case_named("plain").build()
    model.register_buffer("rotation", torch.tensor([1 + 2j, 3 - 1j]).conj())
    model.register_buffer("negative", torch._neg_view(torch.arange(3.0)))
    model.speaks = Speaks()
    assert model.rotation.is_conj() and model.negative.is_neg() and model.negative.is_contiguous()
    engine = start(model, make_config(1, checkpoint={"async": background}))
    wanted = {name: buffer.clone() for name, buffer in model.named_buffers()}
    engine.save_checkpoint(folder)
    model.rotation.zero_()
    model.speaks.words = ()
    engine.load_checkpoint(folder)
    found = dict(model.named_buffers())
    engine.destroy()
    wrong = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    return wrong if model.speaks.words == ("kept",) else [*wrong, "extra state"]


@pytest.mark.parametrize("background", [False, True])
def test_odd_buffers_and_extra_state_come_back(pool1: RankPool, tmp_path: Path, *, background: bool) -> None:
    assert pool1.run(with_odd_state, str(tmp_path), background) == [[]]
