"""Fine-tune a causal language model in a plain loop with Accelerate, under any ZeRO stage.

    deepspeed --num_gpus 2 examples/finetune_accelerate.py
    accelerate launch --num_processes 2 examples/finetune_accelerate.py --model ./llama --text book.txt

The first takes half a minute on two CPU cores that do nothing else.
The loop is the one you have: ``prepare``, ``accumulate``, ``backward``, ``step``. The plugin says what is sharded.
Without ``--model`` a tiny Llama that reads bytes is made from its configuration. Writes the model, its tokenizer and
the plot of the loss to <out>.
"""

from pathlib import Path

import torch
from shared import ON_CPU, checked, command_line, llama_and_tokenizer, need, read_text, report, rows
from torch.utils.data import DataLoader
from tqdm import tqdm

import deepspeed.comm as dist

need("transformers", "accelerate")
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs  # noqa: E402 - behind that sentence
from accelerate.utils import set_seed  # noqa: E402


def main() -> None:
    """Build, train, evaluate, save."""
    parser = command_line(__doc__, steps=60, lr=3e-3)
    parser.add_argument("--model", type=Path, help="folder with a model and its tokenizer")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="of ZeRO: what is sharded over ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="forwards before one optimizer step")
    args = checked(parser)

    plugin = DeepSpeedPlugin(
        zero_stage=args.stage,
        gradient_accumulation_steps=args.accumulate,
        gradient_clipping=1.0,
        zero3_init_flag=args.stage == 3,  # build the model in shards
        zero3_save_16bit_model=True,
    )
    # Not cpu=True: that would switch DeepSpeed off.
    backend = [InitProcessGroupKwargs(backend="gloo")] if ON_CPU else []
    accelerator = Accelerator(
        deepspeed_plugin=plugin, mixed_precision="no" if ON_CPU else "bf16", kwargs_handlers=backend
    )
    set_seed(args.seed)
    model, tokenizer = llama_and_tokenizer(args.model, args.seed)
    ids = torch.tensor(tokenizer(read_text(args.text), add_special_tokens=False, verbose=False)["input_ids"])
    data, held_out = rows(ids, args.context, at_least=args.batch * accelerator.num_processes)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps * accelerator.num_processes)
    model, optimizer, train_loader, held_out_loader, schedule = accelerator.prepare(
        model,
        optimizer,
        DataLoader(data, args.batch, shuffle=True, drop_last=True),
        DataLoader(held_out, args.batch),
        schedule,
    )
    losses: list[float] = []
    window = torch.zeros((), device=accelerator.device)
    bar = tqdm(total=args.steps, unit="step", disable=not accelerator.is_main_process, dynamic_ncols=True)
    while len(losses) < args.steps:
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                window += loss.detach() / args.accumulate
            if accelerator.sync_gradients:
                losses.append(float(accelerator.gather(window).mean()))
                window.zero_()
                bar.set_postfix_str(f"loss {losses[-1]:.3f}")
                bar.update()
            if len(losses) == args.steps:
                break
    bar.close()

    model.eval()
    with torch.no_grad():
        evaluated = accelerator.gather(torch.stack([model(**batch).loss for batch in held_out_loader])).mean()
    state = accelerator.get_state_dict(model)  # whole weights, gathered over the ranks, on the first one
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.out, state_dict=state)
        tokenizer.save_pretrained(args.out)
    title = f"Accelerate, ZeRO-{args.stage}, {dist.get_world_size()} rank(s)"
    report(losses, float(evaluated), title, args.out / "finetune_accelerate.png")
    accelerator.end_training()


if __name__ == "__main__":
    main()
