"""``torch.save(engine.module)``, pickles and copies: the plain module with whole parameters, or a sentence."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from tests.harness.decoders import Llama
from tests.harness.experts import Stacked
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, make_config, outcome, start

WIDTH = 12


def count_calls(module: nn.Module, args: Any, output: Any) -> None:
    """A hook of the client's, which is part of its module."""
    module.calls = getattr(module, "calls", 0) + 1  # type: ignore[assignment]


class Part(nn.Module):
    """A block with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x)) + x


class Model(nn.Module):
    """Blocks between tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.first.weight.note = "tied"  # type: ignore[attr-defined]
        self.register_forward_hook(count_calls)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        out: Tensor = self.last(x)
        return out


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def saved(thing: Any) -> Any:
    """``thing`` through a file in memory."""
    stream = io.BytesIO()
    torch.save(thing, stream)
    return torch.load(io.BytesIO(stream.getvalue()), weights_only=False)


def faults_of(made: Model, expected: Tensor) -> list[str]:
    """What of ``made`` is not as in a plain model."""
    wrong = []
    if any(len(m._forward_hooks) != (m is made) or m._forward_pre_hooks for m in made.modules()):
        wrong.append("hooks")
    if any("__reduce_ex__" in vars(m) for m in made.modules()):
        wrong.append("attributes of modules")
    known = [{"note": "tied"} if p is made.first.weight else {} for p in made.parameters()]
    if [{k: v for k, v in vars(p).items() if k != "use_muon"} for p in made.parameters()] != known:
        wrong.append("attributes of parameters")
    if any(type(p) is not nn.Parameter or p.untyped_storage().nbytes() != p.nbytes for p in made.parameters()):
        wrong.append("parameters over memory of others")
    if made.first.weight is not made.last.weight:
        wrong.append("untied")
    if not made(inputs()).equal(expected) or made.calls < 1:
        wrong.append("another output")
    before = made.first.weight.detach().clone()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made(inputs()).square().sum().backward()
    optimizer.step()
    if made.first.weight.equal(before):
        wrong.append("does not train")
    return wrong


def copied(config: dict[str, Any], whole: bool, folder: str) -> dict[str, list[str]]:
    """Every way to a copy of the module of an engine that has trained a step, by what is wrong with it."""
    engine = start(Model(), config)
    step(engine)
    with torch.no_grad():
        expected = engine(inputs())
    found = {}
    with deepspeed.zero.GatheredParameters([] if whole else [*engine.module.parameters()]):
        found["torch.save"] = faults_of(saved(engine.module), expected)
        data = pickle.dumps(engine.module)
        found["pickle"] = faults_of(pickle.loads(data), expected)
        found["needs this package"] = ["yes"] if b"deepspeed" in data else []
        found["deepcopy"] = faults_of(copy.deepcopy(engine.module), expected)
        found["deepcopy"] = [x for x in found["deepcopy"] if x != "attributes of parameters"]
        part = saved(engine.module.parts[1])
        found["a part"] = [] if part.inner.weight.equal(engine.module.parts[1].inner.weight) else ["other weights"]
    if dist.get_rank() == 0 and whole:  # nobody else takes part
        torch.save(engine.module, Path(folder) / "alone.pt")
    step(engine)
    with torch.no_grad():
        found["goes on"] = ["does not train"] if engine(inputs()).equal(expected) else []
    engine.destroy()
    found["afterwards"] = ["attributes"] if any("__reduce_ex__" in vars(x) for x in every(engine.module)) else []
    return found


def every(model: nn.Module) -> list[Any]:
    return [*model.modules(), *model.parameters()]


def step(engine: Any) -> None:
    engine.backward(engine(inputs()).square().mean())
    engine.step()


@pytest.mark.in_make_test("0", "2", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_a_pickled_module_is_the_plain_one(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    """At stage 3 inside GatheredParameters."""
    for found in pool2.run(copied, make_config(stage), stage < 3, str(tmp_path)):
        assert not {how: wrong for how, wrong in found.items() if wrong}
    if stage < 3:
        alone = torch.load(tmp_path / "alone.pt", weights_only=False)
        assert alone.first.weight is alone.last.weight and (tmp_path / "alone.pt").stat().st_size < 30_000


def without_tiles(folder: str) -> tuple[bool, bool, bool]:
    """A decoder whose MLPs compute in tiles: are there any, does a pickle name this package, do copies agree."""
    engine = start(Llama(), make_config(1, sequence={"mlp_tiles": 2}))
    wired = any("forward" in vars(module) for module in engine.module.modules())
    data, words = pickle.dumps(engine.module), torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected, copies = engine(words), [pickle.loads(data), copy.deepcopy(engine.module)]
        same = all((made(words) - expected).abs().max() < 1e-6 for made in copies)
    engine.destroy()
    return wired, b"deepspeed" in data, same


def test_a_pickled_decoder_needs_nothing_of_this_package(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(without_tiles, str(tmp_path)) == [(True, False, True)]


def refused(folder: str) -> dict[str, str]:
    engine, target = start(Model(), make_config(3)), Path(folder) / f"{dist.get_rank()}"
    said = {
        "module": outcome(lambda: torch.save(engine.module, target)),
        "pickle": outcome(lambda: pickle.dumps(engine.module)),
        "engine": outcome(lambda: torch.save(engine, target)),
        "copy of the engine": outcome(lambda: copy.deepcopy(engine)),
        "loads": outcome(lambda: torch.load(target, weights_only=False)),
    }
    step(engine)
    engine.destroy()
    engine = start(Llama(), make_config(1, tensor_parallel={"autotp_size": 2}))
    said["parts"] = outcome(lambda: pickle.dumps(engine.module))
    engine.destroy()
    engine = start(Stacked(), make_config(1, expert_parallel={"enabled": True, "autoep_size": 2}))
    said["experts"] = outcome(lambda: copy.deepcopy(engine.module))  # whose forward would compute with the engine's
    engine.destroy()
    return said


def test_what_is_not_whole_is_refused_by_name(pool2: RankPool, tmp_path: Path) -> None:
    for said in pool2.run(refused, str(tmp_path)):
        for way in ("module", "pickle"):
            assert "'first.weight'" in said[way] and "a pickle (torch.save) cannot read" in said[way], said[way]
            assert "GatheredParameters" in said[way] and "engine.save_16bit_model()" in said[way]
        for way in ("engine", "copy of the engine"):
            assert "UsageError" in said[way] and "engine.save_checkpoint() keeps all of it" in said[way], said[way]
        assert said["loads"], "a file that loads"
        for way, name in (("parts", "Llama"), ("experts", "Stacked")):
            assert f"{name} is of a model whose layers are in parts over ranks" in said[way], said[way]
        assert "save_16bit_model" in said["parts"]
