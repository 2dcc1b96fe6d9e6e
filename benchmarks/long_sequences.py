"""Measure the memory of a training step over long sequences: a Llama of toy size with a whole vocabulary, on two ranks.

    python benchmarks/long_sequences.py

Needs transformers. Hidden size 256, 2 blocks, 4 heads, 128,256 words, fp32, ZeRO-3, AdamW. Each row is a run of its
own: a short step first, which makes the optimizer's state, then one of all tokens. Memory is resident memory of a rank
above that before the model was built; "above weights" leaves out what stays after the short step. About two minutes on
two cores.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RANKS, WORDS, GIB = 2, 128_256, 2**30
LIMIT_GIB, LIMIT_GROWTH = 1.2, 2.2


def rank(case: dict[str, Any]) -> None:
    """Train on this rank; the first one prints its numbers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import deepspeed
    from deepspeed.monitor import hostmem

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": case["tokens"]}
    config = LlamaConfig(vocab_size=WORDS, attn_implementation="sdpa", tie_word_embeddings=False, **shape, **heads)
    before = hostmem.rss_bytes()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0, "overlap_comm": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "sequence": {"loss": case["loss"]},
        "sequence_parallel_size": case["sp"],
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    engine = deepspeed.initialize(model=model, config=settings)[0]
    stays = 0
    for tokens in (512, case["tokens"]):
        length = tokens // RANKS
        whole = torch.randint(0, WORDS, (1, tokens), generator=torch.Generator().manual_seed(1))
        mine = slice(engine.global_rank * length, (engine.global_rank + 1) * length)
        ids, labels = whole[:, mine], whole.roll(-1, 1)[:, mine]
        places = torch.arange(tokens)[None, mine] if case["sp"] > 1 else None
        hostmem.reset_peak_rss()
        loss = engine(input_ids=ids, position_ids=places, labels=labels, shift_labels=labels, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        stays = stays or hostmem.rss_bytes() - before
    peak = hostmem.peak_rss_bytes() - before
    if engine.global_rank == 0:
        print(json.dumps({"peak": peak, "stays": stays, "before": before, "loss": float(loss)}), flush=True)
    engine.destroy()


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return what the first rank prints. Raises SystemExit with the output of a run that fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}", "--master_port=29656"]
    command += [__file__, "--rank", json.dumps(case)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peak"')]
    if not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Measure, print a table, and fail where a limit is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384], help="of all ranks together")
    parser.add_argument("--loss", choices=["auto", "tiled", "whole"], default="auto", help="key sequence.loss")
    parser.add_argument("--sp", type=int, choices=[1, RANKS], default=RANKS, help="key sequence_parallel_size")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(json.loads(args.rank))
        return
    print("| tokens | logits and gradient (GiB a rank) | peak (GiB a rank) | above weights | growth |")
    print("|---|---|---|---|---|", flush=True)
    above: list[float] = []
    wrong = []
    for tokens in args.tokens:
        found = measure({"tokens": tokens, "loss": args.loss, "sp": args.sp})
        peak = found["peak"] / GIB
        above.append((found["peak"] - found["stays"]) / GIB)
        growth = above[-1] / above[-2] if len(above) > 1 else 0.0
        logits = 2 * tokens / RANKS * WORDS * 4 / GIB
        print(f"| {tokens:,} | {logits:.1f} | {peak:.2f} | {above[-1]:.2f} | {growth:.2f} |", flush=True)
        if (tokens <= 16384 and peak > LIMIT_GIB) or growth > LIMIT_GROWTH:
            wrong.append(tokens)
    if wrong and args.loss != "whole":
        raise SystemExit(
            f"over {LIMIT_GIB} GiB at 16,384 tokens, or more than {LIMIT_GROWTH} times per doubling: {wrong}"
        )


if __name__ == "__main__":
    main()
