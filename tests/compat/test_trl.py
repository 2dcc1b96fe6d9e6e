"""TRL: its generation and reference-model helpers, and its SFT, DPO and GRPO trainers on a random model with a tiny
vocabulary.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.common import (
    LR,
    VOCABULARY,
    apart,
    batches,
    forget_clients,
    gloo_accelerator,
    llama,
    mean_over_ranks,
    mine,
    need,
    plain_run,
    save_once,
    sentences,
    settings,
    weights_apart,
    whole,
)
from tests.harness.pool import RankPool

need("accelerate", "transformers", "trl")
pytestmark = pytest.mark.timeout(240)
STEPS = 3


def prepared(stage: int, model: Any, *, trained: bool = True, **zero: Any) -> tuple[Any, Any, Any]:
    from accelerate import DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    forget_clients()
    adam = {"lr": LR, "eps": 1e-2, "weight_decay": 0.01}
    config = settings(stage, adam, gradient_accumulation_steps=1, train_batch_size="auto", gradient_clipping=0.0)
    config["zero_optimization"] |= zero
    acc = gloo_accelerator(DeepSpeedPlugin(hf_ds_config=config))
    if not trained:
        return acc, None, None
    engine, optimizer = acc.prepare(model, DummyOptim(model.parameters(), lr=LR, weight_decay=0.01))
    return acc, engine, optimizer


def generating(stage: int, gather: bool, checkpointing: bool) -> dict[str, Any]:
    """Train a step, generate with hooks taken away, train on: the same as plain torch that never generated."""
    from trl.models.utils import unwrap_model_for_generation

    forget_clients()
    world = dist.get_world_size()
    data = batches(sentences(2 * STEPS * world))
    prompt = sentences(1)[0]["input_ids"][None, :3]
    plain = llama()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, eps=1e-2)
    answers: list[torch.Tensor] = []

    def answer() -> None:
        answers.append(plain.generate(prompt, max_new_tokens=5, do_sample=False))

    expected = plain_run(plain, optimizer, data, per_step=world, after_step=answer)
    model = llama()
    if checkpointing:
        model.gradient_checkpointing_enable()
    acc, engine, opt = prepared(stage, model)
    losses, same = [], True
    for step, batch in enumerate(mine(data)):
        loss = engine(**batch).loss
        acc.backward(loss)
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
        with torch.no_grad(), unwrap_model_for_generation(engine, acc, gather_deepspeed3_params=gather) as bare:
            same &= bare is model
            found = bare.generate(prompt, max_new_tokens=5, do_sample=False, synced_gpus=stage == 3 and not gather)
        same &= torch.equal(found, answers[step])
    result = {
        "loss": apart(mean_over_ranks(losses), expected),
        "weights": weights_apart(model, whole(plain)),
        "same": same,
    }
    acc.free_memory(engine)
    return result


@pytest.mark.parametrize(
    ("stage", "gather", "checkpointing"), [(0, True, False), (2, True, False), (3, True, True), (3, False, False)]
)
def test_generation_between_training_steps(stage: int, gather: bool, checkpointing: bool, pool2: RankPool) -> None:
    for found in pool2.run(generating, stage, gather, checkpointing, time_limit=120):
        assert found["same"] and found["loss"] < 1e-5 and found["weights"] < 1e-5, found


def reference_model(stage: int, offload: bool) -> dict[str, Any]:
    """``prepare_deepspeed``: an engine without optimizer (at stage 0 or 3), then hooks removed and added as for a
    policy.
    """
    from trl.models.utils import add_hooks, prepare_deepspeed, remove_hooks

    import deepspeed

    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    acc, _, _ = prepared(stage, None, trained=False, **zero)
    batch = batches(sentences(2))[0]
    with torch.no_grad():
        expected = llama().eval()(**batch).logits
        engine = prepare_deepspeed(llama(), acc)
        first = float((engine(**batch).logits - expected).abs().max())
        if stage == 3:
            with deepspeed.zero.GatheredParameters(engine.parameters()):
                remove_hooks(engine)
                second = float((engine.module(**batch).logits - expected).abs().max())
                add_hooks(engine)
        else:
            second = 0.0
        third = float((engine(**batch).logits - expected).abs().max())
    kind = type(engine.optimizer).__name__
    found = {"error": max(first, second, third), "stage": engine.zero_optimization_stage()}
    found.update(kind=kind, eval=not engine.module.training)
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "offload"), [(2, False), (2, True), (3, False)])
@pytest.mark.parametrize("world", [1, 2])
def test_reference_models_need_no_optimizer(stage: int, offload: bool, pool: RankPool) -> None:
    for found in pool.run(reference_model, stage, offload, time_limit=90):
        assert found["error"] < 1e-5 and found["eval"]
        assert (found["stage"], found["kind"]) == ((3, "DeepSpeedZeRoOffload") if stage == 3 else (0, "NoneType"))


def tokenizer() -> Any:
    """Words w3..w63 and three special tokens; nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def text(count: int, seed: int) -> list[str]:
    numbers = torch.randint(3, VOCABULARY, (count, 6), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{int(i)}" for i in row) for row in numbers]


def on_disk(rows: dict[str, list[str]], folder: str) -> Any:
    """Return a dataset in a file, beside which the ranks share what they compute."""
    from datasets import Dataset

    made = str(Path(folder) / "rows")
    if dist.get_rank() == 0 and not Path(made).exists():
        Dataset.from_dict(rows).save_to_disk(made)
    dist.barrier()
    return Dataset.load_from_disk(made)


def arguments_of(folder: str, config: dict[str, Any] | None) -> dict[str, Any]:
    """What the configurations of all trainers have."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "learning_rate": LR,
        "adam_epsilon": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "deepspeed": config,
        "dataloader_pin_memory": False,
    }


def trl_trainer(kind: str, folder: str, config: dict[str, Any] | None, model: Any) -> Any:
    import trl
    from datasets import Dataset

    common = {**arguments_of(folder, config), "max_steps": STEPS, "save_strategy": "no"}
    if kind == "sft":
        args = trl.SFTConfig(**common, max_length=16)
        data = Dataset.from_dict({"text": text(24, 1)})
        return trl.SFTTrainer(model=model(), args=args, train_dataset=data, processing_class=tokenizer())
    if kind.startswith("dpo"):
        before = kind.endswith("before")  # the reference is asked once, before there is an engine that trains
        args = trl.DPOConfig(**common, max_length=16, precompute_ref_log_probs=before)
        rows = {"prompt": text(24, 1), "chosen": text(24, 2), "rejected": text(24, 3)}
        policy, reference = (str(Path(folder) / "base"), None) if before else (model(), model())
        data = on_disk(rows, folder)
        return trl.DPOTrainer(
            model=policy, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer()
        )
    args = trl.GRPOConfig(**common, num_generations=2, max_completion_length=6, beta=0.05)
    data = Dataset.from_dict({"prompt": text(24, 1)})
    return trl.GRPOTrainer(
        model=model(), reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer()
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(words.split()))) for words in completions]


def trained_by(kind: str, folder: str, stage: int) -> dict[str, Any]:
    from tests.compat.test_hf_trainer import auto_config, history

    losses, weights = {}, {}
    base = str(Path(folder) / "base")  # GRPO loads its reference model from where the policy says it comes from
    save_once(llama(), base)

    def model() -> Any:
        made = llama()
        made.config._name_or_path = base
        return made

    for name, config in {"plain": None, "engine": auto_config(stage, own_optimizer=True)}.items():
        forget_clients()
        torch.manual_seed(1)
        made = trl_trainer(kind, folder, config, model)
        made.train()
        losses[name] = history(made, "loss")
        if name == "plain":
            weights = whole(made.accelerator.unwrap_model(made.model))
        else:
            error = weights_apart(made.accelerator.unwrap_model(made.model), weights)
            made.accelerator.free_memory(made.model_wrapped)
    return {"losses": losses, "loss": apart(losses["plain"], losses["engine"]), "weights": error}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["sft", "dpo", "dpo asked before"])
def test_trainers_equal_their_own_plain_run(kind: str, stage: int, tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(trained_by, kind, str(tmp_path), stage, time_limit=150):
        assert found["loss"] < 1e-4 and found["weights"] < 1e-4, found


def test_grpo_generates_and_trains_under_sharded_parameters(tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(trained_by, "grpo", str(tmp_path), 3, time_limit=200):
        assert len(found["losses"]["engine"]) == STEPS, found
