"""Fine-tune a causal language model with the Trainer of Transformers, under any ZeRO stage.

    deepspeed --num_gpus 2 examples/finetune_hf_trainer.py
    deepspeed --num_gpus 8 examples/finetune_hf_trainer.py --model ./llama --text book.txt --stage 3

The first takes half a minute on two CPU cores that do nothing else.
Nothing in the script but one argument, ``TrainingArguments(deepspeed=...)``, is about DeepSpeed: what the configuration
leaves "auto" is taken from the other arguments. Without ``--model`` a tiny Llama that reads bytes is made from its
configuration. Writes the model, its tokenizer and the plot of the loss to <out>.
"""

from pathlib import Path
from typing import Any

import torch
from shared import ON_CPU, checked, command_line, llama_and_tokenizer, need, read_text, report, rows

import deepspeed.comm as dist

need("transformers", "accelerate")
from transformers import (  # noqa: E402 - behind the sentence that it is missing
    ProgressCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Bar(ProgressCallback):
    """The Trainer's bar, without a line for each step, of which the plot tells."""

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Show the loss behind the bar."""
        if self.training_bar is not None and "loss" in (logs := more.get("logs") or {}):
            self.training_bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")


def configuration(stage: int) -> dict[str, Any]:
    """The Trainer fills in every "auto"."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto", "weight_decay": "auto"}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 1000,  # by default 100,000: the tiny model would stay whole
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def main() -> None:
    """Build, train, evaluate, save."""
    parser = command_line(__doc__, steps=60, lr=3e-3)
    parser.add_argument("--model", type=Path, help="folder with a model and its tokenizer")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of ZeRO: what is sharded over ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="forwards before one optimizer step")
    args = checked(parser)

    # Before the model: under stage 3 Transformers then builds it, or reads it, in shards.
    training = TrainingArguments(
        output_dir=str(args.out),
        deepspeed=configuration(args.stage),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 10,
        bf16=not ON_CPU,
        use_cpu=ON_CPU,
        dataloader_pin_memory=not ON_CPU,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    set_seed(args.seed)
    model, tokenizer = llama_and_tokenizer(args.model, args.seed)
    ids = torch.tensor(tokenizer(read_text(args.text), add_special_tokens=False, verbose=False)["input_ids"])
    data, held_out = rows(ids, args.context, at_least=args.batch * dist.get_world_size())

    trainer = Trainer(model=model, args=training, train_dataset=data, eval_dataset=held_out)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # whole weights, gathered over the ranks: from_pretrained(out) reads them
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(args.out)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    title = f"Trainer, ZeRO-{args.stage}, {dist.get_world_size()} rank(s)"
    report(losses, evaluated, title, args.out / "finetune_hf_trainer.png")


if __name__ == "__main__":
    main()
