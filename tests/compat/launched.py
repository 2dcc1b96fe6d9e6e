"""Scripts for test_launched.py: started as fresh processes, so that nobody has made a process group for them.

``python -m tests.compat.launched KIND FOLDER``; the first rank writes ``FOLDER/result.json``.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def hf_trainer(folder: str) -> dict[str, Any]:
    """TrainingArguments makes the process group; no line of this script names deepspeed."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from tests.compat.common import LR, llama_config, sentences
    from tests.compat.test_hf_trainer import auto_config

    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        deepspeed=auto_config(3, own_optimizer=False),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=LR,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_config(llama_config())
    sharded = all(hasattr(p, "ds_id") for p in model.parameters())
    trainer = Trainer(model=model, args=args, train_dataset=sentences(12))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(folder)
    return {"losses": losses, "sharded": sharded, "batch": trainer.model_wrapped.train_batch_size()}


def accelerate_script(folder: str) -> dict[str, Any]:
    """Everything about DeepSpeed comes from ``accelerate launch``."""
    from tests.compat.common import LR, gloo_accelerator, llama, sentences

    acc = gloo_accelerator(None)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-2)
    loader = torch.utils.data.DataLoader(sentences(12), batch_size=2)
    model, optimizer, loader = acc.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(acc.gather(loss.detach()).mean()))
    return {"losses": losses, "sharded": model.zero_optimization_stage() == 3, "batch": model.train_batch_size()}


def init_first(folder: str) -> dict[str, Any]:
    """``zero.Init`` is the first thing that happens; it starts the process group from the environment."""
    import deepspeed

    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    sharded = all(hasattr(p, "ds_id") for p in model.parameters())
    engine = deepspeed.initialize(model=model, config=config)[0]
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "sharded": sharded, "batch": engine.train_batch_size()}


KINDS = {"hf_trainer": hf_trainer, "accelerate": accelerate_script, "init_first": init_first}

if __name__ == "__main__":
    kind, folder = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    torch.set_num_threads(1)
    outcome = KINDS[kind](folder)
    if int(os.environ.get("RANK", "0")) == 0:
        (Path(folder) / "result.json").write_text(json.dumps(outcome), encoding="utf-8")
    if torch.distributed.is_initialized():
        # Nothing may keep the group alive: its threads are joined when it dies, and one that still runs while the
        # interpreter shuts down aborts the process.
        gc.collect()
        torch.distributed.destroy_process_group()
