"""Fine-tune low-rank adapters (LoRA, with PEFT) on a frozen base that ZeRO-3 shards over the ranks.

    deepspeed --num_gpus 2 examples/lora_zero3.py
    deepspeed --num_gpus 2 examples/lora_zero3.py --model out --text notes.txt     # what an earlier example has saved

takes half a minute on two CPU cores that do nothing else.
No rank ever holds the base whole: it is built, or read, in shards, and each block is gathered while it computes. Frozen
weights have neither gradients nor optimizer state. Without ``--model`` the base is a tiny random Llama that reads
bytes. Writes the adapters and the plot of the loss to <out>.
"""

from pathlib import Path

import torch
from shared import ON_CPU, checked, command_line, llama_and_tokenizer, mean_over_ranks, need, read_text, report, rows
from tqdm import tqdm

import deepspeed
import deepspeed.comm as dist

need("transformers", "accelerate", "peft")
from peft import LoraConfig, get_peft_model  # noqa: E402 - behind the sentence that it is missing
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402


def main() -> None:
    """Build, train, evaluate, save."""
    parser = command_line(__doc__, steps=60, lr=1e-2)
    parser.add_argument("--model", type=Path, help="folder with the base and its tokenizer")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters' matrices")
    parser.add_argument("--recompute", action="store_true", help="recompute each block in the backward, for memory")
    args = checked(parser)
    if args.rank < 1:
        parser.error(f"--rank {args.rank} must be at least 1")

    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": not ON_CPU},
        # By default parameters of up to 100,000 elements stay whole on every rank: all of the tiny model.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.0}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": args.steps, "warmup_num_steps": max(1, args.steps // 10)},
        },
    }
    deepspeed.init_distributed()
    alive = HfDeepSpeedConfig(config)  # while it lives, Transformers builds and reads models in shards
    base, tokenizer = llama_and_tokenizer(args.model, args.seed)
    if args.recompute:
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # A random base has nothing to say with its old head: train that too. One from a folder keeps it.
    head = None if args.model else ["lm_head"]
    adapters = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", modules_to_save=head, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)

    ids = torch.tensor(tokenizer(read_text(args.text), add_special_tokens=False, verbose=False)["input_ids"])
    data, held_out = rows(ids, args.context, at_least=args.batch * dist.get_world_size())
    loader = iter(deepspeed.utils.RepeatingLoader(engine.deepspeed_io(data)))
    losses: list[float] = []
    with tqdm(total=args.steps, unit="step", disable=dist.get_rank() != 0, dynamic_ncols=True) as bar:
        for _ in range(args.steps):
            batch = {name: value.to(engine.device) for name, value in next(loader).items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(mean_over_ranks(loss.detach()))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}")
            bar.update()

    engine.eval()
    with torch.no_grad():  # every rank reads the same rows, so that all gather the same blocks
        evaluated = [engine(**{n: v[None].to(engine.device) for n, v in row.items()}).loss for row in held_out[:16]]
    with deepspeed.zero.GatheredParameters(trained):  # only these are ever whole
        if dist.get_rank() == 0:
            model.save_pretrained(args.out)
            count, every = model.get_nb_trainable_parameters()
            print(f'\n{count:,} of {every:,} parameters trained; PeftModel.from_pretrained(base, "{args.out}")')
    title = f"LoRA of rank {args.rank}, ZeRO-3, {dist.get_world_size()} rank(s)"
    report(losses, float(torch.stack(evaluated).mean()), title, args.out / "lora_zero3.png")
    engine.destroy()
    del alive


if __name__ == "__main__":
    main()
