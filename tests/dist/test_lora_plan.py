"""``ds_plan --lora`` says what each rank of a LoRA fine-tune holds: to the byte, per state and tier, at every stage."""

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.zero.layout import ALIGNMENT_NUMEL
from deepspeed.zero.plan import StateKind, Tier
from tests.harness.commands import Ended, run_all
from tests.harness.decoders import Llama
from tests.harness.pool import RankPool
from tests.harness.training import start

RANK, PAGE = 6, 4096
TOP = 100  # elements of a parameter that stays whole at stage 3: some of the adapters, and not others
BF16 = {"bf16": {"enabled": True}}
HOST = {"device": "cpu"}


class Tower(Llama):
    """A decoder that says which layer is its head."""

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class ByHand(nn.Module):
    """A frozen linear layer with two trained matrices of ``RANK`` beside it, as the papers draw it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.first = nn.Parameter(torch.randn(RANK, layer.in_features) / 8)
        self.second = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + x @ self.first.t() @ self.second.t()
        return out


def build() -> nn.Module:
    """What ``--model`` names: the base."""
    return Tower()


def adapted(model: nn.Module, names: list[str]) -> list[str]:
    """Paths of the layers of these names."""
    return [path for path, _ in model.named_modules() if path.rpartition(".")[2] in names]


def fine_tuned(names: list[str]) -> nn.Module:
    """The base frozen, with adapters by hand."""
    model = Tower().requires_grad_(requires_grad=False)
    for path in adapted(model, names):
        home, _, name = path.rpartition(".")
        setattr(model.get_submodule(home), name, ByHand(model.get_submodule(path)))
    return model


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj"]
# the adapted layers, the block of the configuration, the rest of it
CASES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "1": (ALL, {"stage": 1}, BF16),
    "2": (SOME, {"stage": 2}, BF16),
    "3": (ALL, {"stage": 3, "param_persistence_threshold": TOP}, BF16),
    "3, adapters in shards": (SOME, {"stage": 3, "param_persistence_threshold": 0}, BF16),
    "3, fp32": (ALL, {"stage": 3, "param_persistence_threshold": TOP}, {}),
    "2, states on the host": (ALL, {"stage": 2, "offload_optimizer": HOST}, BF16),
    "3, all on the host": (
        ALL,
        {"stage": 3, "param_persistence_threshold": 0, "offload_optimizer": HOST, "offload_param": HOST},
        BF16,
    ),
    "3, base on a drive": (
        ALL, {"stage": 3, "param_persistence_threshold": TOP, "offload_param": {"device": "nvme", "max_in_cpu": 0}},
        BF16,
    ),
}  # fmt: skip


def config_of(name: str, folder: Path) -> dict[str, Any]:
    _, zero, more = CASES[name]
    if zero.get("offload_param", {}).get("device") == "nvme":
        zero = {**zero, "offload_param": {**zero["offload_param"], "nvme_path": str(folder)}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": optimizer, **more}


Bytes = dict[str, dict[str, int]]
STATES = ("parameters", "gradients", "optimizer state")
COLUMNS = dict(zip(Tier, ("device", "host", "drive"), strict=True))


def held(name: str, folder: str) -> tuple[Bytes, Bytes, int, list[str]]:
    """Bytes at rest on this rank by state and tier, counted where they are; all lines of the engine's own plan;
    trained elements; frozen units that hold more than parameters.
    """
    engine = start(fine_tuned(CASES[name][0]), config_of(name, Path(folder)))
    rests: dict[str, Counter[str]] = {what: Counter() for what in STATES}

    def note(what: str, kind: StateKind, unit: Any) -> None:
        store, tier = unit.rest[kind], unit.plan.of(kind).tier
        assert store.on_drive == (tier is Tier.NVME), (unit.name, kind)
        nbytes = store.numel * store.dtype.itemsize if store.on_drive else store.tensor.nbytes
        # beside a device each state in host memory is a piece of whole pages; here the device is the host
        rests[what][COLUMNS[tier]] += -(-nbytes // PAGE) * PAGE if tier is Tier.HOST else nbytes

    engine.backward(engine(torch.arange(12).view(2, 6)).float().square().mean())
    wrong = []
    for unit in engine.runtime.units:
        note("parameters", StateKind.PARAM, unit)
        if StateKind.GRAD in unit.rest:
            note("gradients", StateKind.GRAD, unit)
        if unit.trainable and not unit.master_is_param:
            note("optimizer state", StateKind.OPTIM, unit)
        if not unit.trainable and set(unit.rest) != {StateKind.PARAM}:
            wrong.append(unit.name)
    engine.step()
    for view in engine._views:
        slots = [v for k, v in engine.basic_optimizer.state[view.param].items() if k != "step" and torch.is_tensor(v)]
        rests["optimizer state"][COLUMNS[view.unit.plan.optim.tier]] += sum(slot.nbytes for slot in slots)
    for unit in (unit for unit in engine.runtime.units if unit.trainable):
        first, last = unit.range_of(StateKind.OPTIM)
        unused = last - first - sum(view.stop - view.start for view in unit.views)
        assert 0 <= unused < 2 * ALIGNMENT_NUMEL, (unit.name, unused)
        # padding at the end of a range has no slots, and the plan counts it: 8 bytes an element
        rests["optimizer state"][COLUMNS[unit.plan.optim.tier]] += 8 * unused
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters() if p.requires_grad)
    lines = {x.what: {"device": x.device, "host": x.host, "drive": x.drive} for x in engine.memory_plan().lines}
    engine.destroy()
    return {what: dict(tiers) for what, tiers in rests.items()}, lines, trained, wrong


MORE = {
    "too large": ["--gpu", "1K"],
    "large enough": ["--gpu", "80GiB", "--lora_targets", ".*layers\\.1\\..*(q|v)_proj"],
    "none": [],
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Ended]:
    """What the commands of the tests that run said: one process, as torch knows the simulated device once."""
    folder, commands = tmp_path_factory.mktemp("plan"), {}
    rows = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    chosen = {row.params["name"] for row in rows if row is not None}
    base = ["simulate.plan", "--model", f"{__name__}:build", "--gpus", "2", "--config"]
    for number, (name, (names, _, _)) in enumerate(CASES.items()):
        file = folder / f"{number}.json"
        file.write_text(json.dumps(config_of(name, folder)))
        targets = [] if names == ALL else ["--lora_targets", ",".join(names)]
        if name in chosen:
            commands[name] = [*base, str(file), "--lora", f"r={RANK}" if number else str(RANK), *targets, "--json"]
    for name, options in MORE.items():
        commands[name] = [*base, str(folder / "2.json"), *(["--lora", str(RANK)] if options else []), *options]
    return run_all(commands, folder, limit_s=300)


@pytest.mark.in_make_test("2", "3, all on the host", "3, base on a drive")
@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_are_what_a_rank_holds(
    planned: dict[str, Any], pool2: RankPool, tmp_path: Path, name: str
) -> None:
    code, out, err = planned[name]
    assert code == 0, err
    reality = pool2.run(held, name, str(tmp_path))
    facts = json.loads(out)
    assert facts["bytes"].pop("communicators: 1, assumed")["device"]  # the CPU has none
    for what in STATES:
        known = {tier: n for tier, n in facts["bytes"][what].items() if n}
        by_rank = [ours[0][what] for ours in reality]
        assert all(known == tiers for tiers in by_rank), (what, known, by_rank)
    base = Tower()
    paths = adapted(base, CASES[name][0])
    for _, lines, trained, wrong in reality:
        assert not wrong
        if "host" not in name and "drive" not in name:  # where the device is the host these differ by pages
            assert facts["bytes"] == lines
        adapters = sum(sum(base.get_submodule(path).weight.shape) for path in paths)
        assert facts["trained"] == trained == RANK * adapters
    assert facts["parameters"] == sum(prod(p.shape) for p in base.parameters()) + facts["trained"]
    assert facts["lora"] == {"rank": RANK, "layers": paths}


def test_the_table_says_who_trains_and_the_limit_is_a_gate(planned: dict[str, Any]) -> None:
    code, out, err = planned["too large"]
    assert code == 1 and f"LoRA of rank 6 on 14 layers ({', '.join(sorted(ALL))})" in out
    assert "optimizer state" in out and "--gpu: the states of a rank need" in err and "not 1 KiB" in err
    code, out, err = planned["large enough"]
    assert code == 0 and not err and "on 2 layers (q_proj, v_proj)" in out
    code, out, _ = planned["none"]
    total = sum(p.numel() for p in Tower().parameters())
    assert code == 0 and f"{total:,} of {total:,} parameters are trained" in out and "LoRA" not in out
    assert "communicators: 1, assumed" in out  # all ranks in one group
