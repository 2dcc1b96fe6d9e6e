"""Decoders of experts on many devices under several layouts, simulated: nobody has run them.

    python benchmarks/experts_simulated.py [--only NAME ...]

The real engine runs as one rank on the simulated device (docs/simulator.md): sequences of 4,096 tokens, every block
recomputed, ZeRO-3, bf16 AdamW, experts chosen equally often. "Folded" experts are whole on one rank and divided over
all ranks of a node; experts that are not folded are cut over the tensor-parallel ranks too, as attention is.

The second table sends tokens of 8 of 128 experts once to each rank (as the package does), or once for each expert.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from deepspeed.moe import exchange, spread
from deepspeed.tools.simulate.costs import ALL_TO_ALL, load_machine
from deepspeed.tools.simulate.models import Shape, decoder_subject
from deepspeed.tools.simulate.run import Outcome, simulate

TOKENS, DEVICE = 4096, "h100"
GATED: dict[str, Any] = {"gated": True, "positions": TOKENS}
MODELS = {
    "Mixtral 8x22B": Shape(6144, 56, 48, 16384, 32768, key_heads=8, experts=8, choices=2, expert=16384, **GATED),
    "Qwen2-57B-A14B": Shape(
        3584, 28, 28, 18944, 151936, key_heads=4, experts=64, choices=8, expert=2560, shared=20480, **GATED
    ),
}
# Four blocks of 128 experts, of which a token has eight, as in Qwen3-30B-A3B.
MANY = Shape(2048, 4, 32, 6144, 151936, key_heads=4, head=128, experts=128, choices=8, expert=768, **GATED)


class Layout(NamedTuple):
    """``micro`` sequences a micro-batch of ``ranks``; ``tp`` share attention, ``ep`` x ``etp`` the experts."""

    model: str
    ranks: int
    micro: int
    tp: int = 1
    etp: int = 1
    ep: int = 8

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.micro,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            # the experts of a block are the next unit but one
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1.5e9},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "tensor_parallel": {"autotp_size": self.tp},
            "expert_parallel": {"enabled": True, "autoep_size": self.ep, "expert_tensor_parallel_size": self.etp},
        }

    def title(self) -> str:
        how = "" if self.tp == 1 else ", folded" if self.etp == 1 else ", not folded"
        return f"{self.model}, {self.ranks} ranks, tp {self.tp}, ep {self.ep}, etp {self.etp}{how}"


LAYOUTS = {
    "mixtral": Layout("Mixtral 8x22B", 128, 8),
    "mixtral-folded": Layout("Mixtral 8x22B", 128, 12, tp=2),
    "mixtral-unfolded": Layout("Mixtral 8x22B", 128, 12, tp=2, etp=2),
    "qwen": Layout("Qwen2-57B-A14B", 64, 6),
    "qwen-folded": Layout("Qwen2-57B-A14B", 64, 6, tp=2),
    "qwen-unfolded": Layout("Qwen2-57B-A14B", 64, 6, tp=2, etp=2),
}


def operations(shape: Shape, sequences: int) -> float:
    """Operations of forward and backward without recomputation: 6 for each weight that a token meets, and attention."""
    attention = 2 * shape.width * shape.channels * (shape.heads + shape.key_heads)
    experts = 3 * shape.width * (shape.expert * shape.choices + shape.shared) + shape.width * shape.experts
    weights = shape.blocks * (attention + experts) + shape.vocabulary * shape.width
    scores = 6 * shape.blocks * shape.heads * shape.channels * TOKENS**2  # of half the square
    return sequences * (6.0 * weights * TOKENS + scores)


def played(shape: Shape, layout: Layout, *, recompute: bool = True) -> Outcome:
    subject = decoder_subject(layout.model, shape, samples=layout.micro, sequence=TOKENS, recompute=recompute)
    return simulate(subject, layout.config(), load_machine(DEVICE), world=layout.ranks, steps=3, keep=True)


def exchanged(outcome: Outcome) -> float:
    """Seconds of all exchanges of tokens in a step."""
    return sum(span.seconds for span in outcome.spans if span.name == ALL_TO_ALL)


def row(name: str) -> str:
    layout = LAYOUTS[name]
    outcome = played(MODELS[layout.model], layout)
    share = operations(MODELS[layout.model], layout.micro) / layout.tp / outcome.seconds
    share /= load_machine(DEVICE)["flops_bf16"]
    counted = sum(times for (what, _), times in outcome.waits.items())
    times = f"{outcome.seconds:.1f} s | {share:.1%} | {outcome.exposed_seconds / outcome.seconds:.1%}"
    return (
        f"| {layout.title()} | {layout.micro} | {times} | {exchanged(outcome) / outcome.seconds:.1%} | "
        f"{outcome.peak / 2**30:.0f} GiB | {counted} | {len(outcome.unordered)} |"
    )


def once_for_each_expert(apply: Callable[..., torch.Tensor], hidden: torch.Tensor, index: torch.Tensor,
                         weights: torch.Tensor, **where: Any) -> torch.Tensor:  # fmt: skip
    """Apply ``through_experts`` to each choice as if it were a token of its own."""
    choices = index.shape[1]
    each = hidden.repeat_interleave(choices, 0), index.reshape(-1, 1), weights.reshape(-1, 1)
    return apply(*each, **where).unflatten(0, (-1, choices)).sum(1)


def compare() -> str:
    lines = ["| top-8 of 128, ep 8 | exchanges | step |", "|---|---|---|"]
    layout = Layout("four blocks", 64, 4)
    found = []
    for title, apply in (
        ("once to each rank", exchange.through_experts),
        ("once for each expert", functools.partial(once_for_each_expert, exchange.through_experts)),
    ):
        with patch.object(spread, "through_experts", apply):
            outcome = played(MANY, layout)
        found.append(exchanged(outcome))
        lines.append(f"| {title} | {1e3 * found[-1]:.1f} ms | {1e3 * outcome.seconds:.0f} ms |")
    return "\n".join([*lines, f"\nexchanges take {found[1] / found[0]:.2f} times as long"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*LAYOUTS, "exchange"], choices=[*LAYOUTS, "exchange"])
    chosen = parser.parse_args().only
    print("| layout | sequences | step | of the peak | exposed | exchanges | peak | waits | unordered |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in LAYOUTS:
        if name in chosen:
            print(row(name), flush=True)
    if "exchange" in chosen:
        print("\n" + compare())
