"""Adapters of PEFT on the tensors of experts over ranks: losses, gradients and saved adapters equal one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat.common import alive, apart, forget_clients, losses_of, micro_batches, need, save_once, settings
from tests.compat.test_hf_experts import model_of
from tests.harness.beside import CLIP, Beside
from tests.harness.pool import RankPool

need("accelerate", "peft", "transformers")
pytestmark = pytest.mark.timeout(240)
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(family: str, experts: str = "eager", base: Any = None) -> Any:
    """A model with adapters on its experts and its attention, none of them zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    chosen = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=EXPERTS)
    model = get_peft_model(model_of(family, experts) if base is None else base, chosen)
    for name, param in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(param, std=0.02, generator=torch.Generator().manual_seed(len(name)))
    return model.train()


def config_of(stage: int, ep: int, etp: int = 1, **more: Any) -> dict[str, Any]:
    block = {"enabled": ep * etp > 1, "autoep_size": ep, "expert_tensor_parallel_size": etp}
    return settings(stage, ADAM, expert_parallel=block, **more)


def saved(engine: Any, folder: str) -> dict[str, torch.Tensor]:
    """Save the adapter as clients do; return what the file has."""
    from safetensors.torch import load_file

    state = engine._zero3_consolidated_16bit_state_dict() if engine.zero_optimization_stage() == 3 else None
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state or engine.module_state_dict())
    dist.barrier()
    return load_file(f"{folder}/adapter_model.safetensors")


def parity(folder: str, family: str, experts: str, stage: int, ep: int, etp: int) -> dict[str, float]:
    """Two steps beside one process that sees the batches of all ranks; the largest errors."""
    import deepspeed
    from deepspeed.tools.verify.grads import scaled_error

    forget_clients()
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = adapted(family, experts)
    config = config_of(stage, ep, etp, gradient_clipping=CLIP)
    engine = deepspeed.initialize(model=adapted(family, experts), config=config)[0]
    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    worst = Beside(engine, plain, torch.optim.AdamW(trained.values(), **ADAM))
    for every in micro_batches(2):
        losses = [plain(**batch).loss for batch in every]
        plain.zero_grad()
        (sum(losses) / world).backward()
        loss = engine(**every[rank]).loss
        engine.backward(loss)
        worst.loss(loss, losses[rank])
        worst.gradients()
        worst.update()
    found = saved(engine, folder)
    wanted = {n.replace(".default", ""): p.detach() for n, p in trained.items()}
    worst.note("adapter", max(scaled_error(found[name], value) for name, value in wanted.items()))
    worst.note("names", float(found.keys() != wanted.keys()))
    engine.destroy()
    return worst


CELLS: dict[str, tuple[Any, ...]] = {
    "qwen3_moe, stage 0": ("qwen3_moe", "eager", 0, 2, 1),
    "qwen3_moe, stage 3": ("qwen3_moe", "grouped_mm", 3, 4, 1),
    "qwen3_moe, two ranks share an expert": ("qwen3_moe", "eager", 3, 2, 2),
    "gpt_oss, experts of other order, stage 2": ("gpt_oss", "eager", 2, 2, 1),
}


@pytest.mark.parametrize("cell", CELLS)
def test_adapters_on_experts_train_as_one_process(cell: str, tmp_path: Path, pool4: RankPool) -> None:
    for found in pool4.run(parity, str(tmp_path), *CELLS[cell], time_limit=120):
        assert max(found.values()) < 2e-6, found


def moved(folder: str, family: str, layouts: list[tuple[int, int, int]]) -> float:
    """Train, save, train on; load into another layout, train on: the largest difference of losses and adapters."""
    import deepspeed

    forget_clients()
    runs = []
    for first, (stage, ep, etp) in zip((True, False), layouts, strict=True):
        engine = deepspeed.initialize(model=adapted(family), config=config_of(stage, ep, etp))[0]
        mine = [every[dist.get_rank()] for every in micro_batches(4)]
        if first:
            losses_of(engine, mine[:2])
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        runs.append(losses_of(engine, mine[2:]))
        engine.destroy()
    return apart(*runs)


def test_a_checkpoint_of_adapters_loads_with_experts_over_other_ranks(pool4: RankPool, tmp_path: Path) -> None:
    assert max(pool4.run(moved, str(tmp_path), "qwen3_moe", [(3, 2, 1), (1, 2, 2)], time_limit=120)) < 1e-6
    assert max(pool4.run(moved, f"{tmp_path}/back", "qwen3_moe", [(0, 4, 1), (3, 1, 1)], time_limit=120)) < 1e-6


def merged(family: str, stage: int) -> float:
    """The largest error of weights that leave with the adapters merged in, beside PEFT's own merging."""
    import deepspeed

    forget_clients()
    wanted = adapted(family).merge_and_unload().state_dict()
    engine = deepspeed.initialize(model=adapted(family), config=config_of(stage, 2))[0]
    found = {n: t.clone() for bucket in engine.stream_weights(merge_adapters=True) for n, t in bucket}
    engine.destroy()
    assert found.keys() == wanted.keys()
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted)


def test_streamed_experts_have_the_adapters_of_all_ranks(pool2: RankPool) -> None:
    assert max(pool2.run(merged, "qwen3_moe", 3, time_limit=120)) < 1e-6


def on_files(folder: str, ep: int) -> list[float]:
    """Losses of two steps of adapters on experts that were born in shards, from files."""
    from transformers import AutoModelForCausalLM

    import deepspeed

    forget_clients()
    save_once(model_of("qwen3_moe"), folder)
    living = alive(config_of(3, ep))
    model = adapted("qwen3_moe", base=AutoModelForCausalLM.from_pretrained(folder))
    engine = deepspeed.initialize(model=model, config=config_of(3, ep))[0]
    losses = losses_of(engine, [every[dist.get_rank()] for every in micro_batches(2)])
    engine.destroy()
    del living
    forget_clients()
    return losses


def test_adapters_on_experts_from_files_train_alike_over_any_ranks(pool2: RankPool, tmp_path: Path) -> None:
    runs = [pool2.run(on_files, f"{tmp_path}/{ep}", ep, time_limit=120) for ep in (1, 2)]
    for one, two in zip(*runs, strict=True):
        assert apart(one, two) < 1e-5
