"""Engines load what DeepSpeed saved in parts, the documented reader reads ours, processes convert at the same time."""

import os
import re
import runpy
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.checkpoint.format.folders import temporary_for, write_atomically
from deepspeed.client.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.tools.checkpoint.cli import main as tool
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import case_named
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.data import make_reference_parts as made
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start, train_step
from tests.pure.checkpoint_samples import checkpoint

ARCHIVE = Path(made.__file__).parent / "reference_parts.tar.xz"
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


def engine_of(kind: str, stage: int, ep: int, *, linear_class: type[nn.Linear] = nn.Linear) -> Any:
    """An engine of other weights for the model of ``kind``."""
    torch.manual_seed(7)
    config = make_config(stage, optimizer=ADAMW)
    if kind == "pipe":
        size = made.WORDS, made.HIDDEN
        linear = LayerSpec(linear_class, made.HIDDEN, made.HIDDEN)
        last = TiedLayerSpec("embed", nn.Embedding, *size, forward_fn=made.through_table)
        layers = [TiedLayerSpec("embed", nn.Embedding, *size), linear, torch.tanh, linear, last]
        return start(PipelineModule(layers, num_stages=2, loss_fn=made.pipe_loss), config)
    if kind == "moe":
        model: nn.Module = made.Layered(ep)
        groups = deepspeed.moe.utils.configure_moe_param_groups(model.parameters())
        return start(model, config, model_parameters=groups)
    if kind == "autoep":
        block = {"enabled": ep > 1, "autoep_size": ep, "moe_layer_pattern": r"layers\.\d+\.mlp"}
        return start(made.Stacked(), {**config, "expert_parallel": block})
    return start(made.Cut(), config)


def loaded(case: str, stage: int, ep: int, root: str) -> list[str]:
    """Names of what differs from the engine that saved, after loading."""
    kind, folder = case.split("_")[0], Path(root) / case
    arrays = {key: torch.from_numpy(value) for key, value in np.load(folder / "expected.npz").items()}
    engine = engine_of(kind, stage, ep)
    alone = case.startswith("autoep_s0")
    path, client = engine.load_checkpoint(str(folder / "saved"), load_optimizer_states=not alone)
    assert path is not None and client["epoch"] == 2 and engine.global_steps == 2
    wrong = []
    for name, param in engine.module.named_parameters():
        found = {"master": safe_get_full_fp32_param(param)}
        for slot in () if alone else ("exp_avg", "exp_avg_sq"):
            found[f"optim.{slot}"] = safe_get_full_optimizer_state(param, slot)
        wrong += [f"{s} of {name}" for s, value in found.items() if not torch.equal(value, arrays[f"{s}|{name}"])]
    engine.destroy()
    return wrong


CELLS = [
    ("moe_s1_fp32_r4", 3, 2), ("moe_s0_fp32_r2", 1, 1), ("moe_s0_fp32_r2", 3, 2), ("moe_s1_fp32_r4_data", 0, 2),
    ("autoep_s2_fp32_r4", 3, 2), ("autoep_s3_fp32_r4", 1, 1), ("autoep_s0_fp32_r2", 2, 2), ("pipe_s1_fp32_r4", 1, 1),
    ("tp_s1_fp32_r4", 3, 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed saved, a folder a case."""
    folder = tmp_path_factory.mktemp("parts")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.in_make_test(
    "moe_s1_fp32_r4-3-2",
    "moe_s1_fp32_r4_data-0-2",
    "autoep_s3_fp32_r4-1-1",
    "autoep_s0_fp32_r2-2-2",
    "pipe_s1_fp32_r4-1-1",
    "tp_s1_fp32_r4-3-1",
)
@pytest.mark.parametrize(("case", "stage", "ep"), CELLS)
def test_an_engine_of_another_layout_has_the_state_that_was_saved(
    pool2: RankPool, parts: Path, case: str, stage: int, ep: int
) -> None:
    assert pool2.run(loaded, case, stage, ep, str(parts)) == [[], []]


class Scaled(nn.Linear):
    """A linear layer with a buffer."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.register_buffer("scale", torch.ones(3))


def with_buffers(folder: str) -> list[bool]:
    engine = engine_of("pipe", 1, 1, linear_class=Scaled)
    engine.load_checkpoint(folder)
    found = [bool((buffer == 7).all()) for buffer in engine.module.buffers()]
    engine.destroy()
    return found


def test_buffers_are_found_in_the_files_of_a_pipeline_s_layers(pool2: RankPool, parts: Path, tmp_path: Path) -> None:
    saved = shutil.copytree(parts / "pipe_s1_fp32_r4" / "saved", tmp_path / "saved")
    for layer in ("01", "03"):
        path = saved / "global_step2" / f"layer_{layer}-model_states.pt"
        torch.save({**torch.load(path), "scale": torch.full((3,), 7.0)}, path)
    assert pool2.run(with_buffers, str(saved)) == [[True], [True]]


# -- checkpoint format doc ------------------------------------------------------------------------------------------
DOC = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


def reader(folder: Path) -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    assert len(code.splitlines()) <= 60
    script = folder / "reader.py"
    script.write_text(code)
    return runpy.run_path(str(script))


def save(folder: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    case = case_named("plain")
    engine = start(case.build(), config)
    for step in range(2):
        train_step(engine, case, step)
    engine.save_checkpoint(folder, "t", {"state": {1, 2}})
    found = {n: p.float() for n, p in full_parameters(engine.module).items()}
    engine.destroy()
    return found


@pytest.mark.parametrize("bf16", [False, True])
def test_the_reader_in_the_document_reads_a_checkpoint(pool2: RankPool, tmp_path: Path, bf16: bool) -> None:  # noqa: FBT001
    saved = pool2.run(save, str(tmp_path), make_config(3, **({"bf16": {"enabled": True}} if bf16 else {})))[0]
    found = reader(tmp_path)["read_weights"](tmp_path / "t")
    for name, value in saved.items():
        weights = torch.from_numpy(np.ascontiguousarray(found[name]))
        assert torch.equal(weights.bfloat16().float() if bf16 else weights, value), name


def test_the_reader_in_the_document_refuses_a_flipped_byte(pool1: RankPool, tmp_path: Path) -> None:
    pool1.run(save, str(tmp_path), make_config(2))
    read = reader(tmp_path)["read_weights"]
    for name in ("rank_00000.bin", "manifest.json"):
        path = tmp_path / "t" / name
        content = path.read_bytes()
        path.write_bytes(content[:70] + bytes([content[70] ^ 1]) + content[71:])
        with pytest.raises(ValueError, match=r"damaged|Expecting|delimiter|Invalid"):
            read(tmp_path / "t")
        path.write_bytes(content)
    assert read(tmp_path / "t")


# -- conversion at once ---------------------------------------------------------------------------------------------
def _convert(folder: str, out: str, rounds: int) -> None:
    for _ in range(rounds):
        dist.barrier()
        convert_zero_checkpoint_to_fp32_state_dict(folder, out, max_shard_size="200B")


def test_conversion_by_all_ranks_into_one_folder(pool4: RankPool, tmp_path: Path) -> None:
    folder, out = checkpoint(tmp_path / "c"), tmp_path / "out"
    pool4.run(_convert, str(folder), str(out), 4)
    assert not [p.name for p in out.iterdir() if p.name.startswith(".")]
    found = {name: value for path in out.glob("*.bin") for name, value in torch.load(path).items()}
    alone = tmp_path / "alone"
    convert_zero_checkpoint_to_fp32_state_dict(folder, alone)
    expected = torch.load(alone / "pytorch_model.bin")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _export(folder: str, out: str) -> int:
    dist.barrier()
    return tool(["export", folder, out, "--format", "torch", "--overwrite"])


def test_export_by_all_ranks_into_one_folder(pool4: RankPool, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    for number in range(3):
        assert pool4.run(_export, str(folder), str(tmp_path / f"out{number}")) == [0] * 4
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_what_a_dead_process_left_of_a_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    with temporary_for(path) as own:
        own.write_bytes(b"half")
        dead = path.with_name(own.name.replace(f"-{os.getpid()}-", "-4194305-"))
        other = tmp_path / dead.name.replace("model", "other")
        dead.write_bytes(b"half")
        other.write_bytes(b"half")
        write_atomically(path, b"whole")
        assert sorted(tmp_path.iterdir()) == sorted([path, own, other])
    assert sorted(tmp_path.iterdir()) == sorted([path, other])
