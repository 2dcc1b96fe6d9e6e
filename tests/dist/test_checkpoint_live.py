"""``ds_checkpoint diff live`` and ``diff_live``: would a checkpoint load completely, and does an engine hold what it
says?
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.checkpoint import diff_live
from deepspeed.tools.checkpoint.cli import main
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start

HERE = "tests.dist.test_checkpoint_live"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adafactor": {"lr": 1e-2},
    "Muon": {"lr": 1e-2},
    "Lion": {"lr": 1e-2},
    "Lamb": {"lr": 1e-2},
}


class Net(nn.Module):
    """Tied, frozen and zero-dimensional weights, buffers that differ between ranks, and one that is not saved."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.body[2].requires_grad_(False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("temporary", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.head(self.body(self.emb(tokens))) * self.scale).square().mean()


def build() -> Net:
    """The model that was saved."""
    return Net()


def build_wider() -> tuple[Net, None]:
    """Other shapes, by the long form of the contract."""
    return Net(12), None


def build_more() -> nn.Module:
    """One weight more, one buffer fewer; needs values, so that the meta device will not do."""
    model = Net()
    model.more = nn.Linear(int(torch.ones(2).sum()), 2, bias=False)
    model.body[1] = nn.BatchNorm1d(8, track_running_stats=False)
    return model


def build_untied() -> nn.Module:
    """Two weights where the checkpoint has one for both."""
    model = Net()
    model.head.weight = nn.Parameter(torch.zeros(11, 8))
    return model


def build_trains_all() -> nn.Module:
    """What was frozen is trained."""
    return Net().requires_grad_()


def build_lazy() -> nn.Module:
    """No shapes yet."""
    return nn.LazyLinear(3)


def build_lazy_buffers() -> nn.Module:
    """No shapes of buffers yet."""
    return nn.LazyBatchNorm1d(affine=False)


def build_broken() -> nn.Module:
    """An error of the user's."""
    raise KeyError("weights.bin")


def build_number() -> int:
    """No model."""
    return 3


def engine_of(stage: int, optimizer: str = "AdamW", **changes: Any) -> Any:
    """An engine of the model, the same weights every time."""
    torch.manual_seed(5)
    block = {"type": optimizer, "params": OPTIMIZERS[optimizer]}
    return start(Net(), make_config(stage, optimizer=block, train_micro_batch_size_per_gpu=4, **changes))


def train(engine: Any, steps: int = 2) -> None:
    """Different data on every rank."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        engine.backward(engine(torch.randint(11, (4,), generator=generator)))
        engine.step()


def save(folder: str, stage: int, optimizers: list[str], steps: int = 2) -> None:
    """A checkpoint per optimizer, tagged with its name."""
    for name in optimizers:
        engine = engine_of(stage, name)
        train(engine, steps)
        engine.save_checkpoint(folder, tag=name)
        engine.destroy()


@pytest.fixture(scope="module")
def saved(pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks that shard everything."""
    folder = tmp_path_factory.mktemp("live")
    pool2.run(save, str(folder), 3, list(OPTIMIZERS), time_limit=100)
    return folder


def run(capsys: pytest.CaptureFixture[str], folder: Path, build: str, *more: object) -> tuple[int, list[str], str]:
    """Exit status, lines, and standard error of ``diff live``."""
    status = main(["diff", "live", str(folder), "--model", f"{HERE}:{build}", *map(str, more)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def config_of(folder: Path, **blocks: Any) -> Path:
    """A configuration file."""
    path = folder / "config.json"
    path.write_text(
        json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}, **blocks})
    )
    return path


def test_the_model_that_was_saved_fits(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, saved, "build", "--tag", "AdamW")
    assert status == 0 and lines[-1] == "11 fits, 0 different, 0 missing, 0 extra"
    names = {line.split()[1] for line in lines[:-1]}
    assert {"emb.weight", "scale", "body.2.weight", "body.1.running_mean", "body.1.num_batches_tracked"} < names
    assert not {"head.weight", "temporary"} & names and "equal" not in "".join(lines)
    assert run(capsys, saved, "build", "--tag", "AdamW", "--quiet")[1] == lines[-1:]
    assert run(capsys, saved, "build_untied", "--tag", "AdamW")[1][-1] == "12 fits, 0 different, 0 missing, 0 extra"


def test_what_does_not_fit_is_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, saved, "build_wider", "--tag", "AdamW", "-q")
    assert status == 1 and "different emb.weight  (shape [11, 12] and [11, 8])" in lines
    status, lines, _ = run(capsys, saved, "build_more", "--tag", "AdamW", "-q")
    assert status == 1
    assert lines == [
        "missing   more.weight  (only in the model)",
        *(
            f"extra     body.1.{name}  (only in the checkpoint)"
            for name in ("running_mean", "running_var", "num_batches_tracked")
        ),
        "8 fits, 0 different, 1 missing, 3 extra",
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_fits_itself_alone(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = config_of(tmp_path, optimizer={"type": name, "params": OPTIMIZERS[name]})
    status, lines, err = run(capsys, saved, "build", "--tag", name, "--config", config)
    assert status == 0, (lines, err)
    assert any(line.startswith("fits      optim.") and line.endswith(" body.0.weight") for line in lines)
    other = "SGD" if name != "SGD" else "AdamW"
    status, lines, _ = run(capsys, saved, "build", "--tag", other, "--config", config, "-q")
    assert (
        status == 1
        and any(line.startswith("missing   optim.") for line in lines)
        and any(line.startswith("extra     optim.") for line in lines)
    )


def test_optimizer_state_of_what_is_newly_trained(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        tmp_path, optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}, train_batch_size="auto"
    )
    lines = run(capsys, saved, "build_trains_all", "--tag", "AdamW", "--config", config, "-q")[1]
    assert lines[0] == "missing   optim.exp_avg body.2.weight  (only in the optimizer)"
    assert lines[-1].endswith("0 different, 4 missing, 0 extra")


def test_a_checkpoint_without_a_step_has_nothing_missing(
    pool1: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool1.run(save, str(tmp_path), 1, ["AdamW"], 0)
    config = config_of(tmp_path, optimizer={"type": "AdamW", "params": OPTIMIZERS["AdamW"]})
    assert run(capsys, tmp_path, "build", "--config", config)[0] == 0


def save_unlike(folder: str) -> None:
    """Checkpoints of one engine with an optimizer of two groups, and of one without any."""
    save(folder, 0, ["AdamW"])
    engine = start(Net(), make_config(0, optimizer=None))
    engine.save_checkpoint(folder, tag="without")
    engine.destroy()
    model = Net()
    first, *rest = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=1e-2)
    engine = start(model, make_config(0, optimizer=None), optimizer=optimizer)
    train(engine)
    engine.save_checkpoint(folder, tag="groups")
    engine.destroy()


def test_state_that_loading_refuses_as_a_whole(
    pool1: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a load says to these is in test_checkpoint_complete.py."""
    pool1.run(save_unlike, str(tmp_path))
    config = config_of(tmp_path, optimizer={"type": "RAdam", "params": {"lr": 1e-2}})
    status, lines, _ = run(capsys, tmp_path, "build", "--tag", "AdamW", "--config", config, "-q")
    assert status == 1 and len(lines) == 2 and lines[0].startswith("different optimizer  (RAdam and ")
    config = config_of(tmp_path, optimizer={"type": "SGD", "params": {"lr": 1e-2}})
    status, lines, _ = run(capsys, tmp_path, "build", "--tag", "without", "--config", config, "-q")
    assert status == 1 and lines[0] == "missing   optimizer  (the checkpoint is of an engine without one)"
    config = config_of(tmp_path, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    status, lines, _ = run(capsys, tmp_path, "build", "--tag", "groups", "--config", config, "-q")
    assert status == 1 and lines[0] == "different optimizer parameter groups  (1 and 2)" and len(lines) == 2


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("build_lazy", "tensor 'weight' of a lazy module has no shape yet"),
        ("build_lazy_buffers", "tensor 'running_mean' of a lazy module has no shape yet"),
        ("build_broken", "KeyError: 'weights.bin'"),
        ("build_number", "must return a module"),
        ("OPTIMIZERS", "is a dict, not a function"),
        ("nobody", "has no attribute 'nobody'"),
    ],
)
def test_a_model_that_cannot_be_had_is_a_sentence(
    saved: Path, capsys: pytest.CaptureFixture[str], build: str, said: str
) -> None:
    status, lines, err = run(capsys, saved, build, "--tag", "AdamW")
    assert status == 2 and not lines and said in err and err.count("\n") == 1


def test_wrong_usage_is_a_sentence(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, saved, "build", "--tag", "AdamW", "--config", tmp_path / "none.json")[0] == 2
    status, _, err = run(capsys, saved, "build", "--tag", "AdamW", "--config", config_of(tmp_path))
    assert status == 2 and "has no 'optimizer' block" in err
    assert run(capsys, tmp_path, "build")[0] == 2
    assert main(["diff", "live", str(saved)]) == 2 and "needs --model" in capsys.readouterr().err
    assert main(["diff", str(saved), str(saved), "--values"]) == 2 and "belong to" in capsys.readouterr().err
    monkeypatch.chdir(saved.parent)
    Path("live").symlink_to(saved)
    assert main(["diff", "./live", str(saved), "--tag", "SGD", "-q"]) == 0
    assert re.fullmatch(r"[1-9]\d* equal, 0 different, 0 missing, 0 extra\n", capsys.readouterr().out)
    Path("live").unlink()


def test_values_of_a_model_that_loads_its_weights(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, saved, "build", "--tag", "AdamW", "--values")
    verdicts = {line.split()[1]: line.split()[0] for line in lines[:-1]}
    assert status == 1 and verdicts["emb.weight"] == "different" and " equal, " in lines[-1]
    assert verdicts["body.2.weight"] == "different" and "max abs diff" in lines[0]


# -- a running engine -----------------------------------------------------------------------------------------------


def verdicts(rows: list[Any]) -> dict[str, str]:
    """By name."""
    return {row.name: row.verdict for row in rows}


def lives(folder: str, kind: str) -> list[Any]:
    """Rows right after loading, and after a step."""
    place = {"device": "nvme", "nvme_path": folder}
    changes: dict[str, Any] = {"bf16": {"enabled": True}} if kind == "2 bf16" else {}
    changes |= (
        {"zero": {"offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}} if kind == "3 nvme" else {}
    )
    engine = engine_of(int(kind[0]), **changes)
    engine.load_checkpoint(folder, tag="AdamW", load_module_only=True)
    found = [diff_live(engine, folder, "AdamW")]
    train(engine, 1)
    found.append(diff_live(engine, folder, "AdamW"))
    engine.destroy()
    return found


@pytest.mark.parametrize("kind", ["0", "2 bf16", "3", "3 nvme"])
def test_an_engine_equals_what_it_loaded_until_it_trains(pool2: RankPool, saved: Path, kind: str) -> None:
    both = pool2.run(lives, str(saved), kind)
    assert both[0] == both[1]
    loaded, trained = both[0]
    assert set(verdicts(loaded).values()) == {"equal"} and len(loaded) == 11
    assert [row.detail for row in loaded if row.name == "emb.weight"] == [
        "after rounding bfloat16 and float32 to the narrower" if kind == "2 bf16" else ""
    ]
    assert verdicts(trained)["emb.weight"] == verdicts(trained)["body.1.running_mean"] == "different"
    assert verdicts(trained)["body.2.weight"] == "equal"


def lives_elsewhere(folder: str) -> list[Any]:
    """Another model; a tag that is not there; damage; then the engine goes on."""
    torch.manual_seed(5)
    model = build_more()
    engine = start(model, make_config(3))
    found: list[Any] = [verdicts(diff_live(engine, folder, "SGD"))]
    for where in ((f"{folder}/empty",), (folder, "none"), (folder, "damaged")):
        found.append(outcome(lambda where=where: diff_live(engine, *where)))
    engine.destroy()
    return found


def test_names_that_only_one_side_has_and_what_cannot_be_read(pool2: RankPool, saved: Path, tmp_path: Path) -> None:
    for tag in ("SGD", "damaged"):
        shutil.copytree(saved / "SGD", tmp_path / tag)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "damaged").glob("rank_*.bin"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    both = pool2.run(lives_elsewhere, str(tmp_path))
    assert both[0][0] == both[1][0]
    assert both[0][0]["more.weight"] == "missing" and both[0][0]["body.1.running_var"] == "extra"
    for _, nowhere, absent, damaged in both:
        assert "there is no checkpoint in" in nowhere and "none" in absent
        assert all("CheckpointError" in said for said in (nowhere, absent, damaged))
