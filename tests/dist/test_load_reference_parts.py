"""Engines of any layout load what DeepSpeed saved with experts, pipeline stages or tensor-parallel parts."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.data import make_reference_parts as made
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start

pytestmark = pytest.mark.timeout(120)
ARCHIVE = Path(made.__file__).parent / "reference_parts.tar.xz"
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


def engine_of(kind: str, stage: int, ep: int) -> Any:
    """An engine of other weights for the model of ``kind``."""
    torch.manual_seed(7)
    config = make_config(stage, optimizer=ADAMW)
    if kind == "pipe":
        size = made.WORDS, made.HIDDEN
        linear = LayerSpec(nn.Linear, made.HIDDEN, made.HIDDEN)
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


@pytest.mark.parametrize(("case", "stage", "ep"), CELLS)
def test_an_engine_of_another_layout_has_the_state_that_was_saved(
    pool2: RankPool, tmp_path: Path, case: str, stage: int, ep: int
) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, [m for m in archive if m.name.split("/")[0] == case], filter="data")
    assert pool2.run(loaded, case, stage, ep, str(tmp_path)) == [[], []]


class Scaled(nn.Linear):
    """A linear layer with a buffer."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.register_buffer("scale", torch.ones(3))


def with_buffers(folder: str) -> list[bool]:
    size = made.WORDS, made.HIDDEN
    layers = [TiedLayerSpec("embed", nn.Embedding, *size), LayerSpec(Scaled, made.HIDDEN, made.HIDDEN), torch.tanh]
    last = TiedLayerSpec("embed", nn.Embedding, *size, forward_fn=made.through_table)
    model = PipelineModule([*layers, LayerSpec(Scaled, *size[1:] * 2), last], num_stages=2, loss_fn=made.pipe_loss)
    engine = start(model, make_config(1, optimizer=ADAMW))
    engine.load_checkpoint(folder)
    found = [bool((buffer == 7).all()) for buffer in engine.module.buffers()]
    engine.destroy()
    return found


def test_buffers_are_found_in_the_files_of_a_pipeline_s_layers(pool2: RankPool, tmp_path: Path) -> None:
    case = "pipe_s1_fp32_r4"
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, [m for m in archive if m.name.split("/")[0] == case], filter="data")
    for layer in ("01", "03"):
        path = tmp_path / case / "saved" / "global_step2" / f"layer_{layer}-model_states.pt"
        torch.save({**torch.load(path), "scale": torch.full((3,), 7.0)}, path)
    assert pool2.run(with_buffers, str(tmp_path / case / "saved")) == [[True], [True]]
