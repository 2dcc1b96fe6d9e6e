"""Balanced batches of mixed lengths beside padding-free data parallelism: by the cost model, and on four gloo ranks.

    python benchmarks/balanced_batches.py             # both tables; about two minutes on two cores
    python benchmarks/balanced_batches.py --model     # the cost model alone

Padding-free data parallelism deals whole sequences so that ranks get equally many tokens. Where the longest sequence
does not fit one rank, all sequences are shared by as many ranks as that one needs (the column "dp degree").
"""

import argparse
import heapq
import statistics
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed.sequence.lengths.balanced_loader import BalancedLoader
from deepspeed.sequence.lengths.dealing import CostModel, Plan, draw_lengths, plan_batch
from deepspeed.sequence.lengths.degrees import DegreeGroups
from deepspeed.tools.verify.ranks import RankPool

# Llama-3.1-8B; 64K tokens fit a rank. An update: tokens a rank, in so many micro-batches. Ranks wait for each other
# once an update, as under ZeRO 0 and 1; with one micro-batch that holds for every level.
COST = CostModel.of_transformer(parameters=8e9, layers=32, hidden=4096, kv_hidden=1024)
ROOM = 65_536
UPDATES = ((32_768, 1), (65_536, 4))
HISTOGRAMS = (
    ("byted", 131_072),
    ("byted", 2_097_153),
    ("lmsys_chat", 131_072),
    ("wikipedia", 131_072),
    ("chatqa2", 131_072),
)
RANKS = (64, 256, 1024)


def update_of(histogram: str, longest: int, tokens: int) -> list[int]:
    """Return lengths of about ``tokens`` together."""
    lengths = draw_lengths(histogram, tokens // 300, longest=longest)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens))]


def data_parallel(lengths: list[int], ranks: int) -> tuple[float, int]:
    """Return the seconds and the degree of padding-free data parallelism."""
    degree = 1
    while max(lengths) > degree * ROOM:
        degree *= 2
    seconds = COST.seconds(np.array(lengths, dtype=np.float64), degree).tolist()
    heap = [(0, group) for group in range(ranks // degree)]
    times = [0.0] * len(heap)
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, group = heap[0]
        heapq.heapreplace(heap, (tokens + lengths[place], group))
        times[group] += seconds[place]
    return max(times), degree


def timed(lengths: list[int], ranks: int, steps: int) -> tuple[float, Plan]:
    """Return the processor seconds of planning, the best of three, and the plan."""
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        plan = plan_batch(lengths, ranks, ROOM, cost=COST, steps=steps)
        seconds.append(time.process_time() - begin)
    return min(seconds), plan


def model_table() -> None:
    """Print what the cost model says, and how long 1,024 sequences take to plan."""
    print(
        "| histogram | longest | tokens a rank | ranks | to the bound | over dp | dp degree | groups |\n"
        + "|---" * 8
        + "|"
    )
    for (histogram, longest), (tokens, steps) in ((h, u) for h in HISTOGRAMS for u in UPDATES):
        for ranks in RANKS:
            lengths = update_of(histogram, longest, ranks * tokens)
            plan = plan_batch(lengths, ranks, ROOM, cost=COST, steps=steps)
            seconds, degree = data_parallel(lengths, ranks)
            groups = " ".join(f"{n}x{d}" for d, n in sorted(Counter(g.degree for g in plan.groups).items()))
            print(
                f"| {histogram} | {max(lengths):,} | {tokens // 1024}K in {steps} | {ranks} | "
                f"{plan.seconds / plan.bound:.3f} | {seconds / plan.seconds:.2f}x | {degree} | {groups} |",
                flush=True,
            )
    slowest = max(
        (timed(draw_lengths(name, 1024, longest=longest), ranks, 4)[0], name, ranks)
        for name, longest in HISTOGRAMS
        for ranks in RANKS
    )
    print(f"\nplanning 1,024 sequences: at most {1e3 * slowest[0]:.1f} ms ({slowest[1]}, {slowest[2]} ranks)\n")


class Blocks(nn.Module):
    """Two blocks of a language model without positions, which the time does not depend on."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.embed = heads, nn.Embedding(64, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, 64)
        self.groups: DegreeGroups | None = None

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert self.groups is not None
        layout, x = self.groups.layout(position_ids), self.embed(input_ids)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, dim=-1))
            x = x + layout.attend(q, k, v, _causal).flatten(2)
            x = x + mlp(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _groups: int) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# Seconds of ``Blocks`` a token (and token before it) on one core, and gloo's exchanges; only ratios count.
GLOO = CostModel(1.4e-8, 2.1e-5, exchange_bytes=4096, node_bandwidth=3e8)


def run_rank(lengths: list[int], *, dp: bool) -> tuple[float, float]:
    """Return the seconds of the second epoch, and the processor seconds of this rank in it; ``dp``: ranks get equally
    many tokens.
    """
    model = Blocks()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "normalize": "tokens",
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    cost, degree = (CostModel(0.0, 1.0), 1) if dp else (GLOO, 4)
    data = [torch.zeros(length, dtype=torch.int64) for length in lengths]
    how: dict[str, Any] = {"batch_tokens": 16_384, "cost": cost, "max_degree": degree, "lengths": lengths}
    loader = BalancedLoader(data, engine, 16_384, **how)
    model.groups = loader.groups
    wall = busy = 0.0
    for _ in range(2):  # the first is a warm-up
        wall, busy = time.perf_counter(), time.process_time()
        for batch in loader:
            engine.backward(engine(**batch))
            engine.step()
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
    engine.destroy()
    return wall, busy


def gloo_table(rounds: int) -> None:
    """Print tokens/s of four gloo ranks; the two ways alternate.

    Where ranks share cores the wall clock has their sum: the busiest rank's processor time is what cores of their own
    would wait for.
    """
    lengths = [max(8, min(length // 32, 8192)) for length in draw_lengths("byted", 160, seed=3)]
    found: dict[str, list[tuple[float, float]]] = {"padding-free dp": [], "balanced": []}
    with RankPool(4) as pool:
        for _ in range(rounds):
            for name, turns in found.items():
                ranks = pool.run(run_rank, lengths, dp=name == "padding-free dp", time_limit=120)
                turns.append((sum(lengths) / ranks[0][0], sum(lengths) / max(busy for _, busy in ranks)))
    print("| four gloo ranks | tokens/s | by the busiest rank's processor time |\n|---|---|---|")
    for name, turns in found.items():
        print(f"| {name} | {' | '.join(f'{statistics.median(column):,.0f}' for column in zip(*turns, strict=True))} |")
    ratios = zip(
        *([b / a for a, b in zip(*pair, strict=True)] for pair in zip(*found.values(), strict=True)), strict=True
    )
    print("\nbalanced over dp: " + ", ".join(f"{statistics.median(ratio):.2f}x" for ratio in ratios))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", action="store_true", help="the cost model alone")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds of four gloo ranks")
    args = parser.parse_args()
    model_table()
    if not args.model:
        gloo_table(args.rounds)


if __name__ == "__main__":
    main()
