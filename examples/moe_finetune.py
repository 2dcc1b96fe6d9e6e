"""Fine-tune a mixture-of-experts model of Transformers with its experts divided over the ranks.

    deepspeed --num_gpus 2 examples/moe_finetune.py
    deepspeed --num_gpus 8 examples/moe_finetune.py --model ./qwen3-moe --text book.txt --experts 8

The first takes a minute on two CPU cores that do nothing else.
The block "expert_parallel" is all that is about experts: the model stays as it is. Without ``--model`` a tiny Qwen3-MoE
of 16 experts that reads bytes is made from its configuration. Writes whole weights and the plot of the loss to <out>.
"""

from pathlib import Path
from typing import Any

import torch
from shared import ON_CPU, checked, command_line, mean_over_ranks, need, read_text, report, rows

import deepspeed
import deepspeed.comm as dist

need("transformers")
from transformers import (  # noqa: E402 - behind the sentence that it is missing
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    Qwen3MoeConfig,
)


def model_and_tokenizer(folder: Path | None, seed: int) -> tuple[Any, Any]:
    """A folder of Transformers, or a random model of 1.4 million parameters, of which a token uses 0.3 million."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "head_dim": 24}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **experts, **words)), tokenizer


def configuration(args: Any) -> dict[str, Any]:
    """Experts over ranks, everything else over all of them by ZeRO."""
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
        "expert_parallel": {"enabled": True, "autoep_size": args.experts},
    }


def main() -> None:
    """Build, train, evaluate, save."""
    parser = command_line(__doc__, steps=60, lr=3e-3)
    parser.add_argument("--model", type=Path, help="folder with a model and its tokenizer")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of ZeRO: what is sharded over ranks")
    parser.add_argument("--experts", type=int, help="ranks that divide the experts of a layer; all of them by default")
    args = checked(parser)
    deepspeed.init_distributed()
    args.experts = args.experts or dist.get_world_size()

    model, tokenizer = model_and_tokenizer(args.model, args.seed)
    ids = torch.tensor(tokenizer(read_text(args.text), add_special_tokens=False, verbose=False)["input_ids"])
    data, held_out = rows(ids, args.context, at_least=args.batch * dist.get_world_size())
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
        tokens = torch.stack([row["input_ids"] for row in held_out[:16]]).to(engine.device)
        evaluated = mean_over_ranks(engine(input_ids=tokens, labels=tokens).loss)
    engine.save_16bit_model(str(args.out))  # the experts of all ranks, under the names of Transformers
    title = f"{args.experts} ranks divide the experts, ZeRO-{args.stage}, {dist.get_world_size()} rank(s)"
    report(losses, evaluated, title, args.out / "moe_finetune.png")


if __name__ == "__main__":
    main()
