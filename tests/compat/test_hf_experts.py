"""Mixture-of-experts models of Transformers, unmodified, with experts over ranks: equal to one process, or to DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.common import (
    apart,
    forget_clients,
    losses_of,
    micro_batches,
    need,
    settings,
    weights_apart,
    whole,
)
from tests.compat.test_hf_trainer import arguments, auto_config, history, trainer
from tests.harness.beside import CLIP, Beside
from tests.harness.pool import RankPool

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(240)
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip
QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK,
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "lfm2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1,
        "layer_types": ["full_attention"] * 2,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}  # fmt: skip
MANY = {**QWEN, "num_experts": 128, "num_experts_per_tok": 8}


def model_of(family: str, experts: str = "eager", **changes: Any) -> Any:
    """A random model, the same on every call; ``experts``: how it multiplies its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config, experts_implementation=experts).train()


def over_ranks(ep: int, **more: Any) -> dict[str, Any]:
    """The block of a configuration."""
    return {"expert_parallel": {"enabled": ep > 1, "autoep_size": ep, **more}}


def parity(
    family: str,
    ep: int,
    stage: int,
    tp: int,
    experts: str,
    skewed: bool,
    changes: dict[str, Any],  # noqa: FBT001
) -> dict[str, float]:
    """Three steps beside one process that sees the batches of all ranks; the largest errors."""
    import deepspeed

    rank, world = dist.get_rank() // tp, dist.get_world_size() // tp
    adam = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    plain, model = model_of(family, experts, **changes), model_of(family, experts, **changes)
    for made in (plain, model) if skewed else ():
        with torch.no_grad():
            for name, param in made.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    param[8:] *= 0.1  # most choices are experts of the first rank
    parts = {**over_ranks(ep), "tensor_parallel": {"autotp_size": tp}}
    engine = deepspeed.initialize(model=model, config=settings(stage, adam, gradient_clipping=CLIP, **parts))[0]
    worst = Beside(engine, plain, torch.optim.AdamW(plain.parameters(), **adam))
    for every in micro_batches(3, world):
        losses = [plain(**batch).loss for batch in every]
        plain.zero_grad()
        (sum(losses) / world).backward()
        loss = engine(**every[rank]).loss
        engine.backward(loss)
        worst.loss(loss, losses[rank])
        worst.gradients()
        worst.update()
    worst.parameters()
    engine.destroy()
    return worst


CELLS: dict[str, tuple[Any, ...]] = {
    "qwen3_moe, stage 0": ("qwen3_moe", 2, 0, 1, "eager", False, {}),
    "qwen3_moe, stage 3, folded over tensor-parallel ranks": ("qwen3_moe", 4, 3, 2, "grouped_mm", False, {}),
    "qwen3_moe, 128 experts, skewed": ("qwen3_moe", 4, 3, 1, "grouped_mm", True, MANY),
    "mixtral, stage 2": ("mixtral", 4, 2, 1, "grouped_mm", False, {}),
    "mixtral, experts beside tensor parallelism": ("mixtral", 2, 3, 2, "eager", False, {}),
    "deepseek_v3, stage 3, shared experts": ("deepseek_v3", 2, 3, 1, "batched_mm", False, {}),
    "gpt_oss, stage 1, biases": ("gpt_oss", 2, 1, 1, "eager", False, {}),
    "gpt_oss, stage 3": ("gpt_oss", 4, 3, 1, "grouped_mm", False, {}),
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_family_trains_as_one_process(cell: str, pool4: RankPool) -> None:
    for found in pool4.run(parity, *CELLS[cell], time_limit=120):
        assert max(found.values()) < 2e-6, found


def evened(family: str, ep: int) -> tuple[list[float], list[str], str]:
    """Distance of each bias from the formula after two updates in bf16, their dtypes, what a router without is told."""
    import deepspeed

    config = settings(3, {"lr": 1e-2}, bf16={"enabled": True}, **over_ranks(ep, load_balance_coeff=1e-3))
    engine = deepspeed.initialize(model=model_of(family), config=config)[0]
    loads = []
    for every in micro_batches(2):
        losses_of(engine, [every[dist.get_rank()]])
        loads.append(engine.expert_loads())
    biases = {name: buffer for name, buffer in engine.module.named_buffers() if name.endswith("bias")}
    wanted = []
    for path in loads[0]:
        counts = [torch.tensor(window[path].experts, dtype=torch.float64) for window in loads]
        wanted.append(sum(1e-3 * torch.sign(count.mean() - count) for count in counts))
    errors = [(a.double() - b).abs().max().item() for a, b in zip(biases.values(), wanted, strict=True)]
    said = [str(buffer.dtype) for buffer in biases.values()]
    engine.destroy()
    try:
        deepspeed.initialize(model=model_of("mixtral"), config=config)
    except ValueError as error:
        return errors, said, str(error)
    return errors, said, ""


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "lfm2_moe"])
def test_the_bias_of_a_router_evens_out_loads_in_fp32(family: str, pool2: RankPool) -> None:
    for errors, said, refused in pool2.run(evened, family, 2, time_limit=120):
        assert set(said) == {"torch.float32"} and max(errors) < 1e-7, (said, errors)
        assert "MixtralSparseMoeBlock) has no bias" in refused and "DeepSeek-V3" in refused


def against_ddp(folder: str, stage: int, ep: int) -> dict[str, Any]:
    """The Trainer with and without the package, on the same rows."""
    forget_clients()  # a model that is born in shards draws other numbers
    model = model_of("qwen3_moe")
    plain = trainer(arguments(folder, None), model_of("qwen3_moe"))
    plain.train()
    expected, want = whole(plain.model), {key: history(plain, key) for key in ("loss", "grad_norm")}
    config = auto_config(stage, own_optimizer=True) | over_ranks(ep)
    made = trainer(arguments(folder, config), model)
    made.train()
    found = {key: apart(history(made, key), want[key]) for key in want}
    found["weights"] = weights_apart(made.model, expected)
    made.accelerator.free_memory(made.model_wrapped)
    return found


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_the_trainer_equals_its_own_plain_run(stage: int, tmp_path: Path, pool: RankPool) -> None:
    for found in pool.run(against_ddp, str(tmp_path), stage, 2, time_limit=180):
        assert max(found.values()) < 2e-4, found


def adapted(ep: int) -> list[float]:
    """Losses of a LoRA on the attention of a model whose experts are frozen."""
    from peft import LoraConfig, get_peft_model

    import deepspeed

    torch.manual_seed(4)
    model = get_peft_model(model_of("qwen3_moe"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    engine = deepspeed.initialize(model=model, config=settings(3, {"lr": 1e-2}, **over_ranks(ep)))[0]
    losses = losses_of(engine, [every[dist.get_rank()] for every in micro_batches(3)])
    engine.destroy()
    return losses


def test_a_lora_of_peft_trains_alike_over_any_ranks(pool2: RankPool) -> None:
    pytest.importorskip("peft")
    for one, two in zip(pool2.run(adapted, 1), pool2.run(adapted, 2), strict=True):
        assert apart(one, two) < 1e-5
