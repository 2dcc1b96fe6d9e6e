"""One rank of ``benchmarks/lora.py``: low-rank adapters on a frozen Llama that ZeRO shards, by PEFT, Transformers and a
package of the ``deepspeed`` interface, this project's or the reference's; both run these very calls.
"""

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import memory_mib
from torch import Tensor, nn

SIZES = {
    # name: width, layers, heads, inner width, vocabulary, context, micro-batch
    "tiny": (64, 2, 4, 128, 512, 32, 2),
    "134m": (768, 12, 12, 2048, 32_000, 128, 1),
}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config_for(args: argparse.Namespace) -> dict[str, Any]:
    """What both packages are given; ``auto`` has no place here, as no client fills it in."""
    return {
        "train_micro_batch_size_per_gpu": SIZES[args.model][-1],
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": args.dtype == "bf16"},
        "zero_optimization": {"stage": args.level},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
    }


def build(args: argparse.Namespace) -> nn.Module:
    """The base in random bf16 weights, as large as ``SIZES`` says, with adapters of rank 8 on all its projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    width, layers, heads, inner, vocabulary, context, _ = SIZES[args.model]
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=context,
        use_cache=False,
    )
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    base = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    if args.recompute:
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=MODULES, task_type="CAUSAL_LM")).train()


def tokens(args: argparse.Namespace) -> Tensor:
    """Sources of the standard library, two bytes a token. [rows, context]"""
    *_, vocabulary, context, _ = SIZES[args.model]
    text = b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
    pairs = torch.frombuffer(bytearray(text[: len(text) // 2 * 2]), dtype=torch.uint8).view(-1, 2).long()
    ids = (pairs[:, 0] * 256 + pairs[:, 1]) % vocabulary
    return ids[: len(ids) // context * context].view(-1, context)


def main() -> None:
    """Build, train, print one JSON line on rank 0."""
    args = parse_arguments()
    torch.set_num_threads(1)
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed

    here = Path(__file__).resolve().parents[2]
    if Path(deepspeed.__file__).resolve().is_relative_to(here) is args.reference:
        raise SystemExit(f"deepspeed is {deepspeed.__file__}: the wrong one of the two; see benchmarks/README.md")
    warnings.simplefilter("ignore")
    import peft  # noqa: F401 - part of the base, as both need it
    from transformers.models.llama import modeling_llama  # noqa: F401 - the same

    deepspeed.init_distributed(dist_backend="gloo")
    rank, world, micro = dist.get_rank(), dist.get_world_size(), SIZES[args.model][-1]
    data, config = tokens(args), config_for(args)
    base_mib, started = memory_mib("VmRSS"), time.perf_counter()
    alive = HfDeepSpeedConfig(config) if args.level == 3 else None
    model = build(args)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
    dist.barrier()
    setup_s, built_mib = time.perf_counter() - started, memory_mib("VmHWM")
    seconds, processor, losses, at = [], [], [], 0
    for _ in range(args.warmup + args.steps):
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        total = torch.zeros(())
        for _ in range(args.accumulate):
            batch = data[(at * world + rank) * micro :][:micro]
            at += 1
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / args.accumulate
        processor.append(time.process_time() - busy)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        dist.all_reduce(total)
        losses.append(total.item() / world)
    run_s = time.perf_counter() - started
    figures = torch.tensor([base_mib, built_mib, memory_mib("VmHWM")])
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    busy_s = torch.tensor(processor)
    dist.all_reduce(busy_s)
    if rank == 0:
        frozen = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if not p.requires_grad)
        row = {
            "framework": f"DeepSpeed {deepspeed.__version__}" if args.reference else "this project",
            "frozen": frozen,
            "trained": sum(getattr(p, "ds_numel", p.numel()) for p in trained),
            "setup_s": setup_s,
            "run_s": run_s,
            "step_s": seconds[args.warmup :],
            "cpu_s": busy_s.tolist()[args.warmup :],
            "losses": losses,
            **dict(zip(("base_mib", "built_mib", "peak_mib"), figures.tolist(), strict=True)),
        }
        sys.stdout.write("RESULT " + json.dumps(row) + "\n")
        sys.stdout.flush()
    del alive
    with contextlib.suppress(Exception):
        dist.barrier()
    os._exit(0)  # frameworks' exit handlers are no part of the measurement


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--level", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--recompute", action="store_true", help="recompute each block in the backward")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock counts")
    parser.add_argument("--reference", action="store_true", help="the package must be the reference, not this tree")
    return parser.parse_args()


if __name__ == "__main__":
    main()
