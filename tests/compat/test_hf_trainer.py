"""The Hugging Face Trainer with all-auto configurations: same losses as its own DDP run, evaluation, saving, 16
bits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.common import (
    LR,
    apart,
    everything,
    fill,
    forget_clients,
    llama,
    llama_config,
    need,
    sentences,
    weights_apart,
    whole,
)
from tests.harness.pool import RankPool

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(180)
STEPS = 4


def auto_config(stage: int, *, own_optimizer: bool) -> dict[str, Any]:
    """What the documentation of Transformers tells people to write."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if stage == 3:
        zero.update(stage3_prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto")
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    window = {"loss_scale_window": 1000, "hysteresis": 2}
    config: dict[str, Any] = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, **window},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    if not own_optimizer:
        adam = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": adam}
        names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        warmup = {**dict.fromkeys(names, "auto"), "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": warmup}
    return config


def arguments(folder: str, config: dict[str, Any] | None, **changes: Any) -> Any:
    from transformers import TrainingArguments

    forget_clients()
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": LR,
        "lr_scheduler_type": "linear",
        "adam_epsilon": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "deepspeed": config,
    }
    return TrainingArguments(**{**settings, **changes})


def trainer(args: Any, model: Any) -> Any:
    from transformers import Trainer

    rows = sentences(2 * 2 * dist.get_world_size() * STEPS)
    return Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])


def history(made: Any, key: str) -> list[float]:
    return [entry[key] for entry in made.state.log_history if key in entry]


def model_for(args: Any) -> Any:
    """The random model of ``llama()``; under a living stage-3 configuration it is born sharded."""
    from transformers import LlamaForCausalLM
    from transformers.integrations import deepspeed as integration, is_deepspeed_zero3_enabled

    if not is_deepspeed_zero3_enabled():
        return llama()
    integration.unset_hf_deepspeed_config()
    values = whole(llama())
    integration.set_hf_deepspeed_config(args.hf_deepspeed_config)
    return fill(LlamaForCausalLM._from_config(llama_config()), values)


def against_ddp(folder: str, stage: int) -> dict[str, Any]:
    """Four steps with accumulation and clipping; the client's own AdamW and linear schedule."""
    args = arguments(folder, None)
    plain = trainer(args, llama())
    plain.train()
    expected = whole(plain.model)
    want = {key: history(plain, key) for key in ("loss", "grad_norm", "learning_rate")}
    plain_eval = plain.evaluate()["eval_loss"]

    args = arguments(folder, auto_config(stage, own_optimizer=True))
    made = trainer(args, model_for(args))
    made.train()
    found = {key: apart(history(made, key), want[key]) for key in want}
    found["weights"] = weights_apart(made.model, expected)
    found["eval"] = abs(made.evaluate()["eval_loss"] - plain_eval)
    made.accelerator.free_memory(made.model_wrapped)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_trainer_equals_its_own_plain_run(stage: int, tmp_path: Path, pool: RankPool) -> None:
    for found in pool.run(against_ddp, str(tmp_path), stage, time_limit=120):
        assert max(found.values()) < 2e-4, found


def configured_optimizer(folder: str, stage: int, bits: str) -> dict[str, Any]:
    """Optimizer and schedule from the configuration; train twice in a row with the same Trainer, then save the whole
    model.
    """
    from safetensors.torch import load_file

    changes = {"bf16": True} if bits == "bf16" else {}
    args = arguments(folder, auto_config(stage, own_optimizer=False), **changes)
    model = model_for(args)
    made = trainer(args, model)
    made.train()
    losses = history(made, "loss")
    evaluated = made.evaluate()["eval_loss"]
    engine = made.model_wrapped
    made.save_model(folder)
    dist.barrier()
    weights = load_file(Path(folder) / "model.safetensors")
    same = all(torch.equal(value, weights[n]) for n, value in everything(made.model).items() if n in weights)
    facts = {"engine": type(engine).__name__, "losses": losses, "eval": evaluated, "same": same}
    facts |= {"kinds": {str(v.dtype) for v in weights.values()}, "rate": made.lr_scheduler.get_last_lr()[0]}
    made.accelerator.free_memory(engine)
    return facts


@pytest.mark.parametrize("bits", ["fp32", "bf16"])
def test_configured_optimizer_trains_and_the_whole_model_is_saved(bits: str, tmp_path: Path, pool2: RankPool) -> None:
    tolerance, kind = (1e-5, "torch.float32") if bits == "fp32" else (2e-2, "torch.bfloat16")
    runs = [
        pool2.run(configured_optimizer, str(tmp_path / str(stage)), stage, bits, time_limit=120) for stage in (2, 3)
    ]
    for found in [*runs[0], *runs[1]]:
        assert found["engine"] == "DeepSpeedEngine" and found["kinds"] == {kind}
        assert found["eval"] < found["losses"][0] - 0.1, "the rows evaluated were trained on"
        assert found["same"], "the file holds what the engine trained"
        assert apart(found["losses"], runs[0][0]["losses"]) < tolerance and found["rate"] == runs[0][0]["rate"]


def evaluate_only(folder: str, stage: int) -> tuple[str, float, float]:
    plain = llama()
    batch = {k: torch.stack([r[k] for r in sentences(8)]) for k in ("input_ids", "labels")}
    expected = float(plain(**batch).loss.detach())
    args = arguments(folder, auto_config(stage, own_optimizer=False))
    made = trainer(args, model_for(args))
    try:
        value = made.evaluate()["eval_loss"]
    except ValueError as error:
        return str(error), 0.0, expected
    made.accelerator.free_memory(made.model_wrapped)
    return "", value, expected


def test_evaluation_without_training(pool2: RankPool, tmp_path: Path) -> None:
    for text, value, expected in pool2.run(evaluate_only, str(tmp_path), 3, time_limit=90):
        assert text == "" and value == pytest.approx(expected, abs=1e-4)
    for text, *_ in pool2.run(evaluate_only, str(tmp_path), 2, time_limit=90):
        assert "ZeRO Stage 3" in text


def mismatch(folder: str) -> str:
    config = {**auto_config(2, own_optimizer=True), "gradient_accumulation_steps": 3}
    args = arguments(folder, config)
    try:
        trainer(args, llama()).train()
    except ValueError as error:
        return str(error)
    return ""


def test_contradiction_with_the_arguments_is_reported(pool1: RankPool, tmp_path: Path) -> None:
    (text,) = pool1.run(mismatch, str(tmp_path), time_limit=90)
    assert "gradient_accumulation_steps" in text
