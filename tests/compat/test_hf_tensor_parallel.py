"""Hugging Face decoders in two parts, by their own plans or the names of their layers, train as plain ones do."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import deepspeed
from tests.compat.common import need
from tests.harness.beside import CLIP, Beside
from tests.harness.pool import RankPool

need("transformers")
pytestmark = pytest.mark.timeout(300)

WORDS = 67
_LLAMA = {"num_key_value_heads": 2, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
_LLAMA |= {"vocab_size": WORDS, "hidden_size": 32, "max_position_embeddings": 32, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": _LLAMA,
    "Mistral": _LLAMA | {"num_key_value_heads": 1, "sliding_window": None},
    "Qwen2": _LLAMA | {"tie_word_embeddings": True},
    "Qwen3": _LLAMA | {"head_dim": 8, "tie_word_embeddings": True},
    "Phi3": _LLAMA | {"rope_scaling": None},
    "Gemma2": _LLAMA | {"head_dim": 8},
    "GPT2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": WORDS, "n_positions": 32}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "GPTNeoX": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    | {"vocab_size": WORDS, "max_position_embeddings": 32},
    "OPT": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "ffn_dim": 64, "vocab_size": WORDS}
    | {"max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Bloom": {"n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": WORDS}
    | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "GPTJ": {"n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4, "vocab_size": WORDS, "n_positions": 32}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "Falcon": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": WORDS}
    | {"alibi": False, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "Olmo2": _LLAMA,
    "Mixtral": _LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1},
}
_CLASSES = {"GPT2": "GPT2LMHeadModel", "Bloom": "BloomForCausalLM"}


def build(kind: str) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    return getattr(transformers, _CLASSES.get(kind, f"{kind}ForCausalLM"))(config).train()


def tokens(step: int) -> Tensor:
    return torch.randint(3, WORDS, (2, 8), generator=torch.Generator().manual_seed(step))


def split(kind: str, stage: int, block: dict[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
    """The largest errors over three steps; the number of layers of each kind."""
    plain, model = build(kind), build(kind)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 40},
        "tensor_parallel": {"autotp_size": 2, **block},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    kinds = [type(m).__name__ for m in engine.module.modules() if type(m).__module__ == "deepspeed.tensor.layers"]
    worst = Beside(engine, plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for step in range(3):
        ids = tokens(step)
        expected = plain(input_ids=ids, labels=ids).loss
        plain.zero_grad()
        expected.backward()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        worst.loss(loss, expected)
        worst.gradients()
        worst.update()
    worst.parameters()
    engine.destroy()
    return worst, {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@pytest.mark.parametrize("kind", MODELS)
def test_a_decoder_in_two_parts_trains_as_a_whole_one(pool2: RankPool, kind: str) -> None:
    for found, layers in pool2.run(split, kind, 3, {}):
        assert max(found.values()) < 2e-6 and layers.get("LinearAllreduce", 0) >= 2, (found, layers)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2"])
def test_the_loss_over_logits_in_parts_is_that_over_whole_ones(pool2: RankPool, kind: str) -> None:
    for found, layers in pool2.run(split, kind, 1, {"vocab_parallel_lm_head": True}):
        assert max(found.values()) < 2e-6 and layers["VocabParallelLinear"] == 1, (found, layers)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_norms_on_parts_of_the_sequence_change_nothing(pool2: RankPool, kind: str) -> None:
    for found, _ in pool2.run(split, kind, 3, {"sequence_parallel_norms": True}):
        assert max(found.values()) < 2e-6, found
