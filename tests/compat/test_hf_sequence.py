"""Models of Transformers, unmodified, with sequences over ranks, by the configuration alone: equal to one process."""

import gc
from typing import Any

import pytest
import torch

from tests.compat.common import need, settings
from tests.harness.beside import CLIP, Beside
from tests.harness.pool import RankPool
from tests.harness.sequences import batch_of

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(240)
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
GEMMA = {"sliding_window": 5, "num_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"]}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one head of keys": ("llama", {"num_key_value_heads": 1}),
    "llama, six heads": ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2}),
    "mistral": ("mistral", {"sliding_window": 5, "num_key_value_heads": 2}),
    "gemma3": ("gemma3_text", GEMMA),
    "mixtral": ("mixtral", MIXTRAL),
    "deepseek": (
        "deepseek_v3",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "qk_nope_head_dim": 8, "n_shared_experts": 1,
        },
    ),
    "stablelm": ("stablelm", {}),  # its attention has a configuration, and takes positions
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
}  # fmt: skip


def model_of(family: str, **changes: Any) -> Any:
    """A random model, the same on every call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = FAMILIES[family]
    gc.collect()  # of an earlier Trainer, whose configuration of ZeRO-3 would have the model born in shards
    torch.manual_seed(3)
    common = {"vocab_size": 64, "use_cache": False} if kind == "gpt2" else COMMON
    config = AutoConfig.for_model(kind, **{**common, **options, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def parity(family: str, sp: int, stage: int, kind: str, how: str) -> dict[str, float]:
    """Three steps beside one process that sees the batches of all ranks; the largest errors."""
    import deepspeed

    plain, model = model_of(family), model_of(family)
    if how == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if how == "adapters":
        from peft import LoraConfig, get_peft_model

        made = []
        for one in (plain, model):
            torch.manual_seed(4)
            made.append(
                get_peft_model(one, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
            )
        plain, model = made
    config = settings(stage, ADAM, gradient_clipping=CLIP, sequence_parallel_size=sp)
    engine = deepspeed.initialize(model=model, config=config)[0]
    feeds, feed = engine.mesh.data.size, engine.mesh.data.index
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAM)
    worst = Beside(engine, plain, optimizer)
    for step in range(3):
        losses = [plain(**batch_of(kind, step, f)).loss for f in range(feeds)]
        optimizer.zero_grad()
        (sum(losses) / feeds).backward()
        loss = engine(**batch_of(kind, step, feed)).loss
        engine.backward(loss)
        worst.loss(loss, losses[feed])
        worst.gradients()
        worst.update()
    worst.parameters()
    engine.eval()
    with torch.no_grad():  # each rank by itself: batches may differ
        batch = batch_of("plain", 9, feed)
        worst.note("evaluation", abs(float(engine(**batch).loss - plain(**batch).loss)))
    engine.destroy()
    worst.note("given back", float(model.config._attn_implementation != "sdpa"))
    return worst


CELLS: dict[str, tuple[Any, ...]] = {
    "llama": ("llama", 2, 1, "plain", ""),
    "llama, packed, a head of keys for four ranks": ("llama, one head of keys", 4, 3, "packed", ""),
    "llama, odd length, six heads on four ranks": ("llama, six heads", 4, 2, "odd", ""),
    "llama, padded": ("llama", 2, 0, "padded", ""),
    "llama, padded left, recomputed": ("llama", 2, 3, "padded left", "recomputed"),
    "llama, adapters": ("llama", 2, 3, "odd", "adapters"),
    "qwen3, packed": ("qwen3", 2, 2, "packed", ""),
    "mistral, windows": ("mistral", 2, 3, "odd", ""),
    "gemma3, windows in packed rows": ("gemma3", 4, 1, "packed", ""),
    "mixtral, balanced over the sequence": ("mixtral", 2, 3, "odd", ""),
    "deepseek": ("deepseek", 2, 1, "plain", ""),
    "stablelm, recomputed": ("stablelm", 2, 2, "plain", "recomputed"),
    "gpt2": ("gpt2", 4, 2, "plain", ""),
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_family_trains_as_one_process(cell: str, pool4: RankPool) -> None:
    for found in pool4.run(parity, *CELLS[cell], time_limit=120):
        assert max(found.values()) < 3e-6, found


def staged(family: str, stage: int, kind: str, changes: dict[str, Any]) -> dict[str, float]:
    """A model that is cut into two stages, each of two ranks a sequence: three steps beside one process."""
    import deepspeed
    from deepspeed.pipe import cut_model

    plain, model = model_of(family, **changes), model_of(family, **changes)
    if kind == "odd":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = {"gradient_accumulation_steps": 2, "sequence_parallel_size": 2}
    config = settings(stage, ADAM, gradient_clipping=CLIP, **parts)
    engine = deepspeed.initialize(model=cut_model(model, 2), config=config)[0]
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    worst = Beside(engine, plain)
    for step in range(3):
        batches = [batch_of(kind, step, micro) for micro in range(2)]
        optimizer.zero_grad()
        whole = sum(plain(**batch).loss for batch in batches) / 2
        whole.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
        optimizer.step()
        worst.loss(engine.train_batch(iter(batches)), whole)
        worst.note("norm", abs(engine.get_global_grad_norm() / norm - 1))
    worst.parameters()
    engine.destroy()
    return worst


STAGED: dict[str, tuple[Any, ...]] = {
    "llama, packed, a tied head": ("llama", 1, "packed", {"tie_word_embeddings": True}),
    "qwen3, recomputed": ("qwen3", 3, "odd", {}),
    "gemma3, windows": ("gemma3", 2, "padded", {}),
    "mixtral": ("mixtral", 1, "plain", {"output_router_logits": False}),
}


@pytest.mark.parametrize("cell", STAGED)
def test_stages_of_a_model_that_is_cut_train_as_one_process(cell: str, pool4: RankPool) -> None:
    for found in pool4.run(staged, *STAGED[cell], time_limit=120):
        assert max(found.values()) < 3e-6, found
