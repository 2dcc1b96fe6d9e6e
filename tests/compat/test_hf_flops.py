"""Operations and MFU of Transformers models, as the flops profiler finds them, are those of the formula by hand."""

import importlib
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.common import forget_clients, need, zero_block
from tests.harness.logs import logged
from tests.harness.pool import RankPool

need("transformers")
pytestmark = pytest.mark.timeout(180)
LAYERS, WIDTH, HEADS, KEY_HEADS, INNER, VOCABULARY = 2, 64, 4, 2, 176, 128
MICRO, LENGTH = 2, 32
PEAK_TFLOPS = 0.01


def model_of(kind: str, attention: str) -> nn.Module:
    """Random, from a configuration alone."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(5)
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH}
        sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes)
    else:
        sizes = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": INNER}
        sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": LENGTH}
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def by_hand(kind: str) -> int:
    """Operations of forward and backward of one micro-batch: 6 a weight and token, without the tables of tokens and
    places, and 12 times layers, width and length a token for attention (PaLM, Chowdhery et al. 2022, appendix B).
    """
    if kind == "gpt2":
        layer = 12 * WIDTH * WIDTH
    else:
        layer = 2 * WIDTH * WIDTH + 2 * WIDTH * (WIDTH * KEY_HEADS // HEADS) + 3 * WIDTH * INNER
    weights = LAYERS * layer + VOCABULARY * WIDTH
    return MICRO * LENGTH * (6 * weights + 12 * LAYERS * WIDTH * LENGTH)


def profiled(kind: str, attention: str) -> tuple[float, float | None, list[str]]:
    """Operations of an update of this rank, the MFU of one that takes two seconds, and the report."""
    import deepspeed

    forget_clients()
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": zero_block(3),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "flops_profiler": {"enabled": True, "peak_tflops": PEAK_TFLOPS, "detailed": False},
    }
    with logged(set_level=logging.INFO) as lines:
        engine = deepspeed.initialize(model=model_of(kind, attention), config=config)[0]
        tokens = torch.randint(3, VOCABULARY, (MICRO, LENGTH), generator=torch.Generator().manual_seed(5))
        for _ in range(4):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        found = engine.step_profile.flops_per_update, engine.step_profile.mfu(2.0)
        engine.destroy()
    return (*found, [line for line in lines if "Flops profile" in line])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_operations_and_mfu_of_transformers_models_are_those_of_the_formula(
    kind: str, attention: str, pool2: RankPool
) -> None:
    results, expected = pool2.run(profiled, kind, attention), by_hand(kind)
    for flops, mfu, _ in results:
        assert flops == pytest.approx(expected, rel=0.02)
        assert mfu == pytest.approx(expected / 2.0 / (PEAK_TFLOPS * 1e12), rel=0.02)
    (report,) = results[0][2]
    update, share = re.search(r"an update on rank 0: ([0-9.]+) ms", report), re.search(r"MFU ([0-9.]+)%", report)
    assert update is not None and share is not None, report
    by_report = expected / (float(update[1]) / 1e3) / (PEAK_TFLOPS * 1e12)
    assert float(share[1]) / 100 == pytest.approx(by_report, rel=0.02, abs=1e-4)
