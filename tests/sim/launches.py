"""What the simulated device launches: attention, called as users and transformers call it, and a decoder's step. In a
process of its own:

python -m tests.sim.launches     prints facts of ``CALLS``, of a model that asks whether it is traced, and of decoders
"""

import json
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from deepspeed.tools.simulate import models
from deepspeed.tools.simulate.costs import load_machine
from deepspeed.tools.simulate.events import Event, Launch
from deepspeed.tools.simulate.install import recording
from deepspeed.tools.simulate.models import Shape, Subject, decoder_subject, subject_of
from deepspeed.tools.simulate.run import Outcome, RankJob, run_job, simulate

WIDTH, HEADS, LENGTH = 256, 4, 128
# name -> (heads of keys, channels of a head, dtype, mask)
CALLS: dict[str, tuple[int, int, torch.dtype, torch.dtype | None]] = {
    "causal": (8, 64, torch.bfloat16, None),
    "grouped": (2, 64, torch.bfloat16, None),
    "masked": (8, 64, torch.bfloat16, torch.bool),
    "with numbers": (8, 64, torch.float16, torch.float16),
    "fp32": (8, 64, torch.float32, None),
    "wide": (8, 512, torch.bfloat16, None),
    "fp64": (8, 64, torch.float64, None),
    "grouped and masked": (2, 64, torch.bfloat16, torch.bool),
    "odd and masked": (8, 60, torch.bfloat16, torch.bool),
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
WIDE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen2": WIDE | {"num_key_value_heads": 4},
    "qwen3": WIDE | {"head_dim": 128, "num_key_value_heads": 4},
    "gemma": WIDE | {"head_dim": 128},
    "gpt_neox": WIDE,
    "opt": WIDE | {"ffn_dim": 8192, "word_embed_proj_dim": 2048},
    "gpt2": {"n_embd": 2048, "n_layer": 2, "n_head": 16, "vocab_size": 32000, "n_positions": 2048},
}


def called(name: str) -> dict[str, Any]:
    """What one call and its backward launch, and what of it is named as plain."""
    key_heads, channels, dtype, mask_dtype = CALLS[name]
    events: list[Event] = []
    with recording(load_machine("h100"), world=1) as recorder:
        recorder.listeners.append(events.append)
        made = [torch.empty(2, n, LENGTH, channels, device="sim", dtype=dtype) for n in (8, key_heads)]
        query, key = (tensor.requires_grad_() for tensor in made)
        mask = None if mask_dtype is None else torch.ones(LENGTH, LENGTH, device="sim", dtype=mask_dtype)
        out = scaled_dot_product_attention(
            query, key, key, attn_mask=mask, is_causal=mask is None, enable_gqa=key_heads < 8
        )
        out.sum().backward()
    found = [event for event in events if isinstance(event, Launch) and event.work.kind in ("attention", "matmul")]
    return {
        "names": sorted({event.name for event in found}),
        "flops": sum(event.work.flops for event in found),
        "plain": dict(recorder.plain_attention),
    }


class Careful(nn.Module):
    """As transformers' models do, it looks whether the batch is packed, and builds a mask if so, or if it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.into = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        packed = (torch.arange(tokens.shape[1], device=tokens.device)[None].diff(dim=-1) != 1).cumsum(-1)
        traced = isinstance(packed, torch._subclasses.FakeTensor)
        mask = None
        if traced or not bool((packed[:, -1] == 0).all()):
            mask = torch.ones(LENGTH, LENGTH, device=x.device, dtype=torch.bool).tril()
        query, key, value = self.into(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return mixed.square().mean()


def trained(subject: Subject) -> tuple[Outcome, Counter[str]]:
    """Three steps, and what the last launches."""
    events: list[Event] = []
    outcome = run_job(RankJob(CONFIG, load_machine("h100"), 8, steps=3), subject, events=events)
    return outcome, Counter(event.name for event in events if isinstance(event, Launch))


def careful() -> dict[str, Any]:
    subject = Subject(
        "careful", Careful, lambda *_: torch.randint(64, (2, LENGTH), device="sim"), lambda output, _: output
    )
    outcome, names = trained(subject)
    return {"names": names, "waits": [what for what, _ in outcome.waits], "plain": outcome.plain_attention}


def both_ways(family: str) -> dict[str, float]:
    """Seconds of a step with and without transformers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(FAMILIES[family] | {"model_type": family}))
        options: dict[str, Any] = {"samples": 2, "sequence": 2048, "recompute": False}
        seconds = {}
        for way, known in (("with", find_spec), ("without", lambda _: None)):
            with patch.object(models.importlib.util, "find_spec", known):
                subject = subject_of(str(path), **options)
            seconds[way] = simulate(subject, CONFIG, load_machine("h100"), world=8, steps=3).seconds
    return seconds


DECODER = Shape(width=128, blocks=3, heads=4, inner=320, vocabulary=500, positions=64, key_heads=2, gated=True, head=48)
DECODER_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
WORLD = 12


def counted() -> dict[str, float]:
    """Operations and bytes by kind of a decoder's step, the last of four."""
    events: list[Event] = []
    subject = decoder_subject("a decoder", DECODER, samples=2, sequence=64, recompute=False)
    outcome = run_job(RankJob(DECODER_CONFIG, load_machine("h100"), WORLD, steps=4), subject, events=events)
    sums = Counter[str]()
    for event in events:
        if isinstance(event, Launch):
            sums[event.work.kind] += event.work.flops  # type: ignore[assignment]
            sums[event.name] += event.work.nbytes if event.work.kind == "collective" else 0
    return {**sums, "parameters": outcome.parameters, "states": outcome.states}


def main() -> None:
    facts: dict[str, Any] = {"calls": {name: called(name) for name in CALLS}, "careful": careful(), "step": counted()}
    if find_spec("transformers") is not None:
        facts["families"] = {family: both_ways(family) for family in FAMILIES}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
