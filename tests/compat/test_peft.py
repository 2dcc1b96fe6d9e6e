"""PEFT: LoRA on a frozen base at every stage, with both kinds of gradient checkpointing, alone and through the
Trainer.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.compat.common import (
    LR,
    apart,
    batches,
    forget_clients,
    llama,
    losses_of,
    mean_over_ranks,
    mine,
    need,
    plain_run,
    save_once,
    sentences,
    settings,
    weights_apart,
    whole,
    zero_block,
)
from tests.harness.pool import RankPool
from tests.harness.training import outcome

need("accelerate", "peft", "transformers")
pytestmark = pytest.mark.timeout(180)
STEPS = 3


def lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    made = get_peft_model(model, adapters)
    for name, param in made.named_parameters():
        if "lora_B" in name and not hasattr(param, "ds_id"):
            nn.init.normal_(param, std=0.02)  # zero, as PEFT leaves it, would hide errors in lora_A
    return made


def expected_run() -> tuple[list[float], dict[str, Tensor]]:
    model = lora(llama())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=1e-2)
    data = batches(sentences(2 * STEPS * dist.get_world_size()))
    return plain_run(model, optimizer, data, per_step=dist.get_world_size()), whole(model)


def training(stage: int, checkpointing: str) -> dict[str, Any]:
    import deepspeed

    forget_clients()
    losses, weights = expected_run()
    base = llama()
    if checkpointing:
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"}
        )
    model = lora(base).train()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": zero_block(stage)}
    config["zero_allow_untested_optimizer"] = True
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=LR, eps=1e-2), config=config)[0]
    found = losses_of(engine, mine(batches(sentences(2 * STEPS * dist.get_world_size()))))
    result = {"loss": apart(mean_over_ranks(found), losses), "weights": weights_apart(model, weights)}
    counts = model.get_nb_trainable_parameters()
    result["counts"] = counts == lora(llama()).get_nb_trainable_parameters()
    if stage == 3:
        consolidated = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if dist.get_rank() == 0:
            result["exported"] = all("lora_" in name for name in consolidated) and len(consolidated) == len(trained)
        else:
            result["exported"] = consolidated is None
    engine.destroy()
    return result


CASES = [(1, 3, ""), (2, 0, "")]
CASES += [(2, stage, how) for stage in (2, 3) for how in ("", "reentrant", "not reentrant")]


@pytest.mark.parametrize(("world", "stage", "checkpointing"), CASES)
def test_lora_equals_plain_torch(stage: int, checkpointing: str, pool: RankPool) -> None:
    for found in pool.run(training, stage, checkpointing, time_limit=90):
        assert found["loss"] < 1e-5 and found["weights"] < 1e-5, found
        assert found["counts"] and found.get("exported", True)


def through_trainer(folder: str) -> dict[str, Any]:
    """A base loaded under zero.Init, adapters on top of sharded weights, the Trainer, and an adapter file that
    reloads.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.compat import test_hf_trainer as shared

    forget_clients()
    base_folder, out = str(Path(folder) / "base"), str(Path(folder) / "out")
    save_once(llama(), base_folder)
    args = shared.arguments(out, shared.auto_config(3, own_optimizer=True), gradient_checkpointing=True)
    model = lora(AutoModelForCausalLM.from_pretrained(base_folder))
    made = shared.trainer(args, model)
    made.train()
    evaluated = made.evaluate()["eval_loss"]
    losses = shared.history(made, "loss")
    made.save_model(out)
    dist.barrier()
    made.accelerator.free_memory(made.model_wrapped)
    forget_clients()
    del made, args, model
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), out).eval()
    rows = sentences(8)
    with torch.no_grad():
        again = float(reloaded(**{k: torch.stack([r[k] for r in rows]) for k in rows[0]}).loss)
    return {"losses": losses, "eval": evaluated, "again": again}


def test_lora_through_the_trainer_saves_adapters_that_reload(pool2: RankPool, tmp_path: Path) -> None:
    for found in pool2.run(through_trainer, str(tmp_path), time_limit=120):
        assert found["eval"] < found["losses"][0]
        assert found["again"] == pytest.approx(found["eval"], abs=1e-4)


def gathered_adapters(folder: str) -> dict[str, Any]:
    """Adapters that are written by one engine, loaded into another and merged there, where weights are gathered."""
    import deepspeed

    forget_clients()
    expected = lora(llama())
    save_once(expected, folder)
    engine = deepspeed.initialize(model=lora(llama()), config=settings(3))[0]
    model, batch = engine.module, batches(sentences(2))[0]
    adapters = [p for n, p in model.named_parameters() if "lora_" in n]
    with deepspeed.zero.GatheredParameters(adapters, modifier_rank=0):
        for param in adapters:
            nn.init.zeros_(param)
    without = float(engine(**batch).loss.detach())
    refused = outcome(model.merge_and_unload)
    with deepspeed.zero.GatheredParameters(adapters, modifier_rank=0):
        model.load_adapter(folder, "default", is_trainable=True)
    loaded = float(engine(**batch).loss.detach())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        merged = model.merge_and_unload()
    plain = float(expected(**batch).loss.detach())
    result = {"refused": refused, "loaded": abs(loaded - plain), "moved": abs(loaded - without)}
    result["merged"] = weights_apart(merged, whole(expected.merge_and_unload()))
    engine.destroy()
    return result


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_load_and_merge_where_weights_are_gathered(pool2: RankPool, tmp_path: Path) -> None:
    for found in pool2.run(gathered_adapters, str(tmp_path), time_limit=120):
        assert "ReleasedParameterError" in found["refused"] and "GatheredParameters" in found["refused"]
        assert found["moved"] > 1e-3 and found["loaded"] < 1e-5 and found["merged"] < 1e-6, found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:fan_in_fan_out")  # of peft and transformers
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj", r".*layers\.1\..*_proj", "c_attn,c_proj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_adapters_are_pefts(targets: str, dtype: torch.dtype) -> None:
    """``ds_plan --lora``: names, shapes and dtypes of what trains."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    from deepspeed.tools.simulate.plan.adapters import Lora, adapt

    def base() -> nn.Module:
        if "c_attn" not in targets:
            return llama().to(dtype)
        return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)).to(dtype)

    def trained(model: nn.Module) -> dict[str, tuple[Any, torch.dtype]]:
        return {
            n.removeprefix("base_model.model."): (p.shape, p.dtype)
            for n, p in model.named_parameters()
            if p.requires_grad
        }

    wanted: Any = targets.split(",") if "," in targets else targets
    planned = base()
    adapt(planned, Lora(3, targets), "it")
    theirs = get_peft_model(base(), LoraConfig(r=3, target_modules=wanted, task_type="CAUSAL_LM"))
    assert trained(planned) == trained(theirs) and trained(planned)
    assert [*dict(theirs.base_model.model.named_parameters())] == [*dict(planned.named_parameters())]
