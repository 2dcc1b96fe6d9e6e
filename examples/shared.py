"""What the examples that fine-tune share: the command line, text as rows of tokens, a tiny Llama, the plot."""

import argparse
import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_gpt import plot

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

Row = dict[str, Tensor]
ON_CPU = get_accelerator().device_name() == "cpu"


def need(*packages: str) -> None:
    """End with a sentence, of the first rank, where a client is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("RANK", "0") != "0":
        raise SystemExit(1)
    if missing:
        say = f"this example needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        raise SystemExit(f"{say} (of all examples: pip install '.[examples]')")


def command_line(description: str | None, *, steps: int, lr: float) -> argparse.ArgumentParser:
    """The options that all of these examples take."""
    parser = argparse.ArgumentParser(
        description=(description or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=4, help="rows of each rank in one forward")
    parser.add_argument("--context", type=int, default=128, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=lr, help="largest learning rate")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to learn; none: Python's own sources")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for weights and the plot of the loss")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of rows")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    return parser


def checked(parser: argparse.ArgumentParser) -> Any:
    """The parsed command line; what cannot work is a sentence and status 2."""
    args = parser.parse_args()
    for name in ("steps", "batch", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.lr <= 0:
        parser.error(f"--lr {args.lr} must be above 0")
    for path in args.text:
        if not path.is_file():
            parser.error(f"--text {path} is no file (looked from {Path.cwd()})")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is no folder")
    model = getattr(args, "model", None)
    if model is not None and not (model / "config.json").is_file():
        parser.error(f"--model {model} holds no config.json; give a folder that save_pretrained has written")
    return args


def read_text(files: list[Path], at_most: int = 400_000) -> str:
    """The files' text; without any, the top-level modules of the standard library."""
    sources = files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)[:at_most]


def rows(ids: Tensor, context: int, at_least: int) -> tuple[list[Row], list[Row]]:
    """Rows of ``context`` tokens in a random, fixed order, each its own labels: to train on, and a tenth held out."""
    count = len(ids) // context
    if count < at_least + 1:
        raise SystemExit(f"the text has {len(ids)} tokens, {count} rows of {context}; {at_least + 1} rows are needed")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    made = [{"input_ids": row, "labels": row.clone()} for row in ids[: count * context].view(count, context)[order]]
    held_out = max(1, min(64, count // 10))
    return made[held_out:], made[:held_out]


def llama_and_tokenizer(folder: Path | None, seed: int) -> tuple[Any, Any]:
    """A folder of Transformers, or a random Llama of 1.3 million parameters that reads bytes; nothing is downloaded.

    Under a living ZeRO-3 configuration of Transformers either is built, or read, in shards.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig

    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 5}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends)), tokenizer


def mean_over_ranks(value: torch.Tensor) -> float:
    """The loss of the whole batch."""
    total = value.float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def report(losses: list[float], held_out: float, title: str, path: Path) -> None:
    """On the first rank: the loss curve as a picture, and where it is."""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        curve, last = list(enumerate(losses, 1)), [(len(losses), held_out)]
        plot({"training": curve, "held out": last}, title, path, unit="nats per token")
        course = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps, held out {held_out:.3f}"
        print(f"\n{course}; see {path.parent}")
