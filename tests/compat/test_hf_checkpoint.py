"""Checkpoints of the Hugging Face Trainer: resumed runs, rotation, the best model, weights for from_pretrained,
LoRA.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.compat.common import apart, equal, everything, llama_config, need, sentences
from tests.compat.test_hf_trainer import arguments, auto_config, history, model_for
from tests.harness.pool import RankPool

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]
STEPS, SAVED = 4, 2


def made_trainer(folder: str, stage: int, model: Any = None, *, own_optimizer: bool = True, **changes: Any) -> Any:
    """A Trainer over shuffled rows; its model has dropout, so that a generator that is not restored shows."""
    from transformers import Trainer

    config = auto_config(stage, own_optimizer=own_optimizer)
    config["zero_optimization"].update(changes.pop("zero", {}))
    config["checkpoint"] = changes.pop("checkpoint", {})
    args = arguments(folder, config, **{"save_strategy": "steps", "save_steps": SAVED, **changes})
    made = model_for(args) if model is None else model(args)
    for part in made.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.2
    rows = sentences(32)
    return Trainer(model=made, args=args, train_dataset=rows, eval_dataset=rows[:8])


def finished(made: Any, resume: Any = None) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Train to the end and give the engine back: losses, weights, learning rates."""
    made.train(resume_from_checkpoint=resume)
    found = history(made, "loss"), everything(made.model), history(made, "learning_rate")
    made.accelerator.free_memory(made.model_wrapped)
    return found


def resumed(folder: str, stage: int, own_optimizer: bool, changes: dict[str, Any]) -> dict[str, Any]:
    def made() -> Any:
        return made_trainer(folder, stage, own_optimizer=own_optimizer, **changes)

    straight = finished(made())
    files = sorted(p.name for p in Path(folder, f"checkpoint-{SAVED}").iterdir())
    by_path = finished(made(), f"{folder}/checkpoint-{SAVED}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint-{STEPS}")
    dist.barrier()
    newest = finished(made(), True)
    return {
        "by path": by_path[0] == straight[0] and by_path[2] == straight[2] and equal(by_path[1], straight[1]),
        "newest": newest[0] == straight[0] and newest[2] == straight[2] and equal(newest[1], straight[1]),
        "losses": (straight[0], by_path[0], newest[0]),
        "files": files,
    }


OFFLOADED = {"zero": {"offload_optimizer": {"device": "cpu"}}, "checkpoint": {"async": True}, "bf16": True}


@pytest.mark.parametrize(
    ("stage", "own_optimizer", "changes"), [(2, True, {}), (3, True, {}), (3, False, {}), (3, False, OFFLOADED)]
)
def test_resumed_training_equals_an_uninterrupted_run_bit_for_bit(
    stage: int, own_optimizer: bool, changes: dict[str, Any], tmp_path: Path, pool2: RankPool
) -> None:
    for found in pool2.run(resumed, str(tmp_path), stage, own_optimizer, changes, time_limit=200):
        assert found["by path"] and found["newest"], found["losses"]
        assert {f"global_step{SAVED}", "latest", "zero_to_fp32.py", "model.safetensors", "trainer_state.json"} <= set(
            found["files"]
        )
        assert ("scheduler.pt" in found["files"]) == own_optimizer, (
            "the engine keeps the schedule of its own configuration"
        )
    assert os.access(tmp_path / f"checkpoint-{STEPS}" / "zero_to_fp32.py", os.X_OK)


def half(folder: str, stage: int, resume: str = "", **changes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train without dropout, to the end."""
    made = made_trainer(folder, stage, gradient_accumulation_steps=1, **changes)
    for part in made.model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0
    return finished(made, resume or None)[:2]


@pytest.mark.parametrize(("stage", "then"), [(2, 3), (3, 2)])
def test_one_rank_goes_on_where_two_stopped(
    stage: int, then: int, tmp_path: Path, pool2: RankPool, pool1: RankPool
) -> None:
    losses, weights = pool2.run(half, str(tmp_path / "two"), stage, time_limit=120)[0]
    resume, rest = str(tmp_path / "two" / f"checkpoint-{SAVED}"), {"per_device_train_batch_size": 4}
    ((found, after),) = pool1.run(half, str(tmp_path / "one"), then, resume, save_strategy="no", **rest, time_limit=120)
    assert apart(found, losses) < 1e-4
    assert max(float((after[n] - weights[n]).abs().max()) for n in weights) < 1e-4


def kept(folder: str) -> None:
    made = made_trainer(folder, 2, save_steps=1, save_total_limit=2, max_steps=4)
    finished(made)


def test_save_total_limit_removes_the_oldest(tmp_path: Path, pool2: RankPool) -> None:
    pool2.run(kept, str(tmp_path), time_limit=120)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["checkpoint-3", "checkpoint-4"]
    assert (tmp_path / "checkpoint-4" / "latest").read_text(encoding="utf-8") == "global_step4"


def only_model(folder: str, stage: int) -> str:
    finished(made_trainer(folder, stage, save_only_model=True, max_steps=2))
    again = made_trainer(folder, stage, max_steps=4)
    try:
        again.train(resume_from_checkpoint=True)
    except ValueError as error:
        return str(error)
    finally:
        again.accelerator.free_memory(again.model_wrapped)
    return ""


@pytest.mark.parametrize("stage", [2, 3])
def test_save_only_model_leaves_no_state_of_the_engine(stage: int, tmp_path: Path, pool2: RankPool) -> None:
    for text in pool2.run(only_model, str(tmp_path), stage, time_limit=120):
        assert "Can't find a valid checkpoint" in text
    folder = tmp_path / "checkpoint-2"
    assert (folder / "model.safetensors").is_file() and not list(folder.glob("global_step*"))


def best(folder: str, stage: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    made = made_trainer(folder, stage, metric_for_best_model="eval_loss", greater_is_better=True, **changes)
    made.train()
    weights = everything(made.model)
    seen = history(made, "eval_loss")
    evaluated = made.evaluate()["eval_loss"]
    named = Path(made.state.best_model_checkpoint)
    saved = load_file(named / "model.safetensors")
    made.accelerator.free_memory(made.model_wrapped)
    same = all(torch.equal(weights[n], saved[n]) for n in weights)
    return {"same": same, "value": evaluated, "worst": max(seen), "last": seen[-1], "name": named.name}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_best_model_is_loaded_at_the_end(stage: int, tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(best, str(tmp_path), stage, time_limit=120):
        assert found["same"] and found["value"] == pytest.approx(found["worst"], abs=1e-6), found
        assert found["value"] > found["last"] and found["name"] != f"checkpoint-{STEPS}", (
            "the highest loss was asked for"
        )


def ungathered(folder: str, bits: str) -> dict[str, Tensor]:
    """Without the gathering switch the Trainer saves the engine twice into one folder and no weights."""

    def tied(args: Any) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(llama_config(tie_word_embeddings=True))

    changes = {"bf16": True} if bits == "bf16" else {}
    zero = {"stage3_gather_16bit_weights_on_model_save": False}
    made = made_trainer(folder, 3, tied, zero=zero, max_steps=2, own_optimizer=False, **changes)
    return finished(made)[1]


@pytest.mark.parametrize("bits", ["fp32", "bf16"])
def test_the_script_in_the_folder_writes_weights_for_from_pretrained(
    bits: str, tmp_path: Path, pool2: RankPool
) -> None:
    from transformers import AutoModelForCausalLM

    weights = pool2.run(ungathered, str(tmp_path), bits, time_limit=120)[0]
    folder, out = tmp_path / "checkpoint-2", tmp_path / "out"
    assert not (folder / "model.safetensors").exists()
    prefix = "bf16_" if bits == "bf16" else ""
    for rank in (0, 1):
        assert (folder / "global_step2" / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").is_file()
        assert (folder / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").is_file()
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": search, "OMP_NUM_THREADS": "1"}
    for extra in ([], ["--safe_serialization"]):
        command = [str(folder / "zero_to_fp32.py"), str(folder), str(out), *extra]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        shutil.copy(folder / "config.json", out)
        loaded = dict(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).named_parameters())
        assert all(p.dtype == torch.float32 for p in loaded.values()) and set(loaded) == set(weights)
        # The engine's own weights are the saved ones rounded to its dtype.
        assert all(torch.equal(loaded[n].to(weights[n].dtype), weights[n]) for n in weights)
        shutil.rmtree(out)


def taken_into_the_model(folder: str, stage: int) -> tuple[bool, bool]:
    """What the manual of Transformers shows for getting fp32 weights after training."""
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    made = made_trainer(folder, stage, max_steps=2, bf16=True)
    losses, weights, _ = finished(made)
    model = load_state_dict_from_zero_checkpoint(made.model, f"{folder}/checkpoint-2").eval()
    found = dict(model.named_parameters())
    with torch.no_grad():
        loss = model(**{k: torch.stack([row[k] for row in sentences(8)]) for k in ("input_ids", "labels")}).loss
    return equal(found, weights), float(loss) < losses[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_makes_the_trained_model_a_plain_one(stage: int, tmp_path: Path, pool2: RankPool) -> None:
    for same, trained in pool2.run(taken_into_the_model, str(tmp_path), stage, time_limit=120):
        assert same and trained


def with_adapters(folder: str, stage: int) -> dict[str, Any]:
    import json

    from tests.compat.test_peft import lora

    def adapted(args: Any) -> Any:
        return lora(model_for(args))

    straight = finished(made_trainer(folder, stage, adapted))
    again = finished(made_trainer(folder, stage, adapted), f"{folder}/checkpoint-{SAVED}")
    manifest = json.loads(Path(folder, f"checkpoint-{SAVED}", f"global_step{SAVED}", "manifest.json").read_bytes())
    stored = [(t["state"], t["name"]) for t in manifest["tensors"]]
    return {
        "same": again[0] == straight[0] and equal(again[1], straight[1]),
        "losses": (straight[0], again[0]),
        "frozen": [name for state, name in stored if state == "param"],
        "trained": all("lora_" in name for state, name in stored if state == "master"),
        "moved": straight[0][0] != straight[0][-1],
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_resume_over_a_base_that_is_not_in_the_checkpoint(stage: int, tmp_path: Path, pool2: RankPool) -> None:
    pytest.importorskip("peft")
    for found in pool2.run(with_adapters, str(tmp_path), stage, time_limit=200):
        assert found["same"] and found["moved"], found["losses"]
        assert found["trained"] and found["frozen"] == []
