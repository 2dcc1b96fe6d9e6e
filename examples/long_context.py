"""Train a model of Transformers on rows that all ranks share, each with a part of the tokens.

    deepspeed --num_gpus 2 examples/long_context.py
    deepspeed --num_gpus 8 examples/long_context.py --model ./llama --text book.txt --context 131072 --sequence 4

The first takes a minute on two CPU cores that do nothing else.
"sequence_parallel_size" is all that is about the ranks of a sequence: the model stays as it is, and each forward takes
the whole batch. Without ``--model`` a tiny Llama that reads bytes is made. Writes weights and the plot of the loss to
<out>.
"""

from pathlib import Path
from typing import Any

import torch
from shared import ON_CPU, checked, command_line, llama_and_tokenizer, mean_over_ranks, need, read_text, report, rows

import deepspeed
import deepspeed.comm as dist

need("transformers")


def configuration(args: Any) -> dict[str, Any]:
    """Sequences over ranks; weights over all of them by ZeRO; logits, MLPs and activations in little memory."""
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": not ON_CPU},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": args.steps, "warmup_num_steps": 5}},
        "zero_optimization": {
            "stage": args.stage,
            "stage3_param_persistence_threshold": 1000,  # by default 100,000: the tiny model would stay whole
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "sequence_parallel_size": args.sequence,
        "sequence": {"offload_activations": not ON_CPU},
    }


def main() -> None:
    """Build, train, evaluate, save."""
    parser = command_line(__doc__, steps=60, lr=3e-3)
    parser.set_defaults(batch=1, context=1024)
    parser.add_argument("--model", type=Path, help="folder with a model and its tokenizer")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of ZeRO: what is sharded over ranks")
    parser.add_argument("--sequence", type=int, help="ranks that share a row; all of them by default")
    args = checked(parser)
    deepspeed.init_distributed()
    args.sequence = args.sequence or dist.get_world_size()

    model, tokenizer = llama_and_tokenizer(args.model, args.seed)
    ids = torch.tensor(tokenizer(read_text(args.text), add_special_tokens=False, verbose=False)["input_ids"])
    data, held_out = rows(ids, args.context, at_least=args.batch * dist.get_world_size())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, _, loader, _ = deepspeed.initialize(
        model=model.train(),
        config=configuration(args),
        training_data=data,  # type: ignore[arg-type]
    )
    losses: list[float] = []
    while len(losses) < args.steps:
        for batch in loader:
            loss = engine(**{name: values.to(engine.device) for name, values in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            losses.append(mean_over_ranks(loss.detach()))
            if dist.get_rank() == 0 and len(losses) % 10 == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.3f}", flush=True)
            if len(losses) == args.steps:
                break

    engine.eval()
    with torch.no_grad():
        tokens = torch.stack([row["input_ids"] for row in held_out[:4]]).to(engine.device)
        evaluated = mean_over_ranks(engine(input_ids=tokens, labels=tokens).loss)
    engine.save_16bit_model(str(args.out))
    title = f"{args.sequence} ranks share a row of {args.context} tokens, ZeRO-{args.stage}"
    report(losses, evaluated, title, args.out / "long_context.png")


if __name__ == "__main__":
    main()
