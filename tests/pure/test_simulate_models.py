"""A Hugging Face configuration without transformers: the decoder that it describes, or a sentence."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.tools.simulate import models
from deepspeed.tools.simulate.models import Decoder, shape_of, subject_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
# family -> (what its configuration says, parameters of the published model)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3 8B": (LLAMA, 8_030_261_248),
    "Mistral 7B": (LLAMA | {"model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
    "GPT-2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
               "n_positions": 1024}, 124_439_808),
    "GPT-NeoX 20B": ({"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
                      "num_hidden_layers": 44, "num_attention_heads": 64, "vocab_size": 50432,
                      "max_position_embeddings": 2048}, 20_554_567_680),
    "Gemma 7B": ({"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
                  "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000,
                  "max_position_embeddings": 8192}, 8_537_680_896),
    "Qwen3 0.6B": ({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                    "max_position_embeddings": 40960, "tie_word_embeddings": True}, 596_049_920),
    "Qwen2.5 7B": ({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
                    "max_position_embeddings": 32768, "tie_word_embeddings": False}, 7_615_616_512),
    "Mixtral 8x7B": (LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8,
                              "num_experts_per_tok": 2}, 46_702_792_704),
    "Qwen3 30B-A3B": ({"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
                       "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128,
                       "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
                       "max_position_embeddings": 40960}, 30_532_122_624),
    "Qwen2 57B-A14B": ({"model_type": "qwen2_moe", "hidden_size": 3584, "num_hidden_layers": 28, "num_experts": 64,
                        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151936,
                        "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "intermediate_size": 18944,
                        "shared_expert_intermediate_size": 20480, "max_position_embeddings": 32768}, 57_409_210_368),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters(name: str) -> None:
    config, parameters = PUBLISHED[name]
    with torch.device("meta"):
        model = Decoder(shape_of(config, name))
    counted = sum(p.numel() for p in model.parameters())
    assert counted == pytest.approx(parameters, rel=2e-4)  # biases and norms of queries may differ
    assert counted == parameters or not {"Llama", "Qwen3"} & set(name.split())


@pytest.mark.parametrize("head", [0, 24])
def test_heads_may_be_wider_than_their_share_of_the_model(head: int) -> None:
    config = {"model_type": "gemma", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 16, "intermediate_size": 8} | (
        {"head_dim": head} if head else {}
    )
    model = Decoder(shape_of(config, "mine"))
    assert model.blocks[0].attention.query.weight.shape == (4 * (head or 8), 32)
    assert model.blocks[0].attention.key.weight.shape == (2 * (head or 8), 32)
    model(torch.zeros(2, 6, dtype=torch.int64)).backward()
    assert model.blocks[0].attention.out.weight.grad is not None


WRONG: dict[str, tuple[Any, str]] = {
    "an encoder": (LLAMA | {"model_type": "bert"}, "a plain decoder is simulated, which 'bert' is not; install"),
    "a family nobody knows": (LLAMA | {"model_type": "blorp"}, "which 'blorp' is not.*Known: .*llama"),
    "experts": (LLAMA | {"num_local_experts": 8}, r"which experts \(num_local_experts\) is not"),
    "other experts": (LLAMA | {"model_type": "deepseek_v3", "n_routed_experts": 8}, "which experts .n_routed_experts."),
    "no experts": (LLAMA | {"model_type": "qwen3_moe"}, "num_experts_per_tok must be from 1 to the number of its"),
    "layers without experts": (
        LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
        "which experts .num_experts. is not",
    ),
    "two halves": ({"model_type": "t5", "is_encoder_decoder": True, "d_model": 8}, "an encoder-decoder .'t5'."),
    "two halves that do not say so": ({"model_type": "mbart", "d_model": 8}, "an encoder-decoder .'mbart'."),
    "local attention": (LLAMA | {"model_type": "gpt_neo"}, "which 'gpt_neo' is not; install"),
    "a word": (LLAMA | {"hidden_size": "big"}, "mine.json: hidden_size must be a whole number from 1 on, not 'big'"),
    "a negative": (LLAMA | {"hidden_size": -256}, "hidden_size must be a whole number from 1 on, not -256"),
    "a half": (LLAMA | {"num_key_value_heads": 2.5}, "num_key_value_heads must be a whole number from 1 on, not 2.5"),
    "heads that do not divide": (LLAMA | {"num_attention_heads": 30}, "30 heads .8 of keys. do not divide 4096"),
    "a text that is a list": ({"text_config": [1]}, "describes no decoder: hidden_size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_decoder_is_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
    config, expected = WRONG[name]
    Path("mine.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=expected):
        subject_of("mine.json", samples=1, sequence=None, recompute=False)


def test_a_table_of_positions_limits_the_sequence_and_rotations_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
    path = tmp_path / "mine.json"
    for family, fits in (("gpt2", False), ("gpt_neox", True), ("llama", True)):
        path.write_text(json.dumps(LLAMA | {"model_type": family}))
        if fits:
            assert subject_of(str(path), samples=1, sequence=9000, recompute=False).name == str(path)
        else:
            with pytest.raises(UsageError, match="8192 positions, fewer than the sequence of 9000"):
                subject_of(str(path), samples=1, sequence=9000, recompute=False)
