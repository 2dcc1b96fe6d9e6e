"""Fine-tune a byte-level GPT whose weights, gradients and optimizer state rest on a drive, in little memory.

    deepspeed --num_gpus 2 examples/nvme_finetune.py --nvme /local_nvme
    deepspeed --num_gpus 2 examples/nvme_finetune.py --weights out/nvme_finetune.bin --text notes.txt    # from there on

takes three quarters of a minute on two CPU cores that do nothing else.
Without ``--weights`` the model is built straight on the drive. With them each rank reads its own part of the file.
Memory holds a few blocks at a time, so it does not grow with the number of layers; ``--host-limit`` is kept to, or
refused with a setting that would fit. Writes the weights and the plot of the loss to <out>. ``make train-nvme`` does it
for a billion parameters.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig
from shared import ON_CPU, checked, command_line, mean_over_ranks, read_text, report, rows
from tqdm import tqdm

import deepspeed
import deepspeed.comm as dist


def configuration(nvme: Path, batch: int, lr: float, host_limit: str) -> dict[str, Any]:
    """Every state on the drive: shards of weights, fp32 weights and moments; gradients on the way."""
    drive = {"device": "nvme", "nvme_path": str(nvme)}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 1000,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": drive,
            "offload_param": {**drive, "max_in_cpu": 0},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.01}},
        "memory": {"host_limit": host_limit},
    }


def build(shape: GPTConfig, weights: Path | None, config: dict[str, Any]) -> GPT:
    """The model with its values on the drive, or still in the file."""
    if weights is None:
        with deepspeed.zero.Init(remote_device="nvme", config_dict_or_path=config):
            return GPT(shape)
    with torch.device("meta"):
        model = GPT(shape)
    # Mapped, not read: initialize reads of each weight what this rank keeps.
    model.load_state_dict(torch.load(weights, mmap=True, weights_only=True), assign=True)
    return model


def main() -> None:
    """Build, train, evaluate, save."""
    parser = command_line(__doc__, steps=40, lr=1e-3)
    parser.add_argument("--nvme", type=Path, default=Path(tempfile.gettempdir()), help="folder on a local drive")
    parser.add_argument("--host-limit", default="1GiB", help="most host memory of a rank's states and buffers")
    parser.add_argument("--weights", type=Path, help="file that an earlier run has written; the sizes must be the same")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192, help="a multiple of 32")
    args = checked(parser)
    if args.layers < 1 or args.width < 32 or args.width % 32:
        parser.error(f"--layers {args.layers} --width {args.width}: at least 1 layer, of a multiple of 32")
    if not args.nvme.absolute().parent.is_dir() or args.nvme.is_file():
        parser.error(f"--nvme {args.nvme}: there is no such place; name a folder on a local drive")
    if args.weights is not None and not args.weights.is_file():
        parser.error(f"--weights {args.weights} is no file; a run without it writes <out>/nvme_finetune.bin")

    config = configuration(args.nvme, args.batch, args.lr, args.host_limit)
    shape = GPTConfig(256, args.context, args.width, args.layers, args.width // 32, checkpoint=True)
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    engine, *_ = deepspeed.initialize(model=build(shape, args.weights, config), config=config)
    text = torch.frombuffer(bytearray(read_text(args.text).encode()), dtype=torch.uint8).long()
    data, held_out = rows(text, args.context + 1, at_least=args.batch * dist.get_world_size())
    loader = iter(deepspeed.utils.RepeatingLoader(engine.deepspeed_io(data)))

    losses: list[float] = []
    with tqdm(total=args.steps, unit="step", disable=dist.get_rank() != 0, dynamic_ncols=True) as bar:
        for _ in range(args.steps):
            ids = next(loader)["input_ids"].to(engine.device)
            loss = engine(ids[:, :-1], ids[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(mean_over_ranks(loss.detach()))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}")
            bar.update()

    engine.eval()
    with torch.no_grad():
        ids = torch.stack([row["input_ids"] for row in held_out[:16]]).to(engine.device)
        evaluated = float(engine(ids[:, :-1], ids[:, 1:]))
    engine.save_16bit_model(str(args.out), "nvme_finetune.bin")
    title = f"states on a drive, {dist.get_world_size()} {'CPU ' if ON_CPU else ''}rank(s)"
    report(losses, evaluated, title, args.out / "nvme_finetune.png")
    engine.destroy()


if __name__ == "__main__":
    main()
