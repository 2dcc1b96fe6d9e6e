"""Accelerate: torch optimizers and DummyOptim, accumulation, clipping, several plugins; equal to plain torch at every
stage.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.common import (
    LR,
    apart,
    batches,
    fill,
    forget_clients,
    gloo_accelerator,
    llama,
    llama_config,
    mean_over_ranks,
    need,
    plain_run,
    sentences,
    weights_apart,
    whole,
)
from tests.harness.pool import RankPool

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(180)
STEPS, ACCUMULATE, CLIP = 3, 2, 0.5


def accelerator(stage: int, config: dict[str, Any] | None = None, **plugin: Any) -> Any:
    """An Accelerator with one DeepSpeed plugin."""
    from accelerate import DeepSpeedPlugin

    forget_clients()
    keys = {"zero_stage": stage, "gradient_accumulation_steps": ACCUMULATE, "gradient_clipping": CLIP, **plugin}
    return gloo_accelerator(DeepSpeedPlugin(**keys) if config is None else DeepSpeedPlugin(hf_ds_config=config))


def loader(rows: list[Any]) -> Any:
    return torch.utils.data.DataLoader(rows, batch_size=2, shuffle=False)


def run(acc: Any, model: Any, optimizer: Any, data: Any) -> tuple[list[float], list[float]]:
    """The usual Accelerate loop; (mean loss, gradient norm) of every optimizer step."""
    losses, norms, window = [], [], []
    for batch in data:
        with acc.accumulate(model):
            loss = model(**batch).loss
            acc.backward(loss)
            window.append(float(loss.detach()))
            if acc.sync_gradients:
                norm = acc.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if acc.sync_gradients:
            losses.append(sum(window) / len(window))
            norms.append(float(norm))
            window = []
    return mean_over_ranks(losses), norms


def with_torch_adamw(stage: int, zero3_init: bool) -> dict[str, Any]:
    """AdamW and a torch LambdaLR of the client's own, against plain torch on the same data."""
    from accelerate.utils import DistributedType

    import deepspeed

    world = dist.get_world_size()
    rows = sentences(2 * world * ACCUMULATE * STEPS)
    plain = llama()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, eps=1e-2)
    decay = torch.optim.lr_scheduler.LambdaLR(plain_optimizer, lambda step: 1 / (1 + step))
    expected = plain_run(
        plain, plain_optimizer, batches(rows), per_step=world * ACCUMULATE, clip=CLIP, after_step=decay.step
    )

    acc = accelerator(stage, zero3_init_flag=zero3_init, zero3_save_16bit_model=True)
    model = llama() if not zero3_init else _born_sharded(acc)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-2)
    # Accelerate steps a scheduler once per process, on purpose; split_batches apart, that is undone here.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // world))
    model, optimizer, data, schedule = acc.prepare(model, optimizer, loader(rows), schedule)
    facts = {
        "type": acc.distributed_type == DistributedType.DEEPSPEED,
        "engine": type(model) is deepspeed.DeepSpeedEngine,
        "same dict": model.config is acc.deepspeed_config,
        "triangle": model.train_batch_size() == 2 * world * ACCUMULATE,
    }
    losses, window = [], []
    for batch in data:
        with acc.accumulate(model):
            loss = model(**batch).loss
            acc.backward(loss)
            window.append(float(loss.detach()))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if acc.sync_gradients:
            losses.append(sum(window) / len(window))
            window = []
    weights = weights_apart(acc.unwrap_model(model), whole(plain))
    state = acc.get_state_dict(model)
    saved = None if state is None else max(float((v - plain.state_dict()[k]).abs().max()) for k, v in state.items())
    acc.free_memory(model)
    return {"facts": facts, "loss": apart(mean_over_ranks(losses), expected), "weights": weights, "saved": saved}


def _born_sharded(acc: Any) -> Any:
    """A model made while the plugin's zero.Init is in force, holding the same values as ``llama()``."""
    from transformers import AutoModelForCausalLM

    values = whole(llama())
    acc.state.deepspeed_plugin.set_deepspeed_weakref()
    return fill(AutoModelForCausalLM.from_config(llama_config()), values)


CASES = [(0, False), (1, False), (2, False), (3, False), (3, True)]


@pytest.mark.parametrize(("stage", "zero3_init"), CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_torch_adamw_equals_plain_torch(stage: int, zero3_init: bool, pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(with_torch_adamw, stage, zero3_init, time_limit=90)):
        assert all(found["facts"].values()), found["facts"]
        assert found["loss"] < 1e-5 and found["weights"] < 1e-5
        if rank == 0 or stage < 3:
            assert found["saved"] is not None and found["saved"] < 1e-5


def with_dummies(stage: int) -> dict[str, Any]:
    """Optimizer and schedule from the configuration, every number auto; the norm comes from the engine."""
    from accelerate.utils import DummyOptim, DummyScheduler

    world = dist.get_world_size()
    rows = sentences(2 * world * ACCUMULATE * (STEPS + 1))
    plain = llama()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.0, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1)
    # As in the reference, the first two steps of a warmup run at its minimum.
    rates = iter([0.0, LR / 2, LR, LR])

    def next_rate() -> None:
        plain_optimizer.param_groups[0]["lr"] = next(rates)

    expected = plain_run(
        plain, plain_optimizer, batches(rows), per_step=world * ACCUMULATE, clip=CLIP, after_step=next_rate
    )
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    adam = {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.95], "eps": 1e-2}
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupLR", "params": {**warmup, "warmup_type": "linear"}},
    }
    acc = accelerator(stage, config)
    model = llama()
    optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=STEPS + 1, warmup_num_steps=2)
    model, optimizer, data, schedule = acc.prepare(model, optimizer, loader(rows), schedule)
    losses, norms = run(acc, model, optimizer, data)
    found = {
        "loss": apart(losses, expected),
        "weights": weights_apart(acc.unwrap_model(model), whole(plain)),
        "norms": norms,
        "skipped": acc.optimizer_step_was_skipped,
        "rate": schedule.get_last_lr()[0],
        "auto left": "auto" in str(acc.deepspeed_config),
    }
    acc.free_memory(model)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_dummy_optimizer_and_scheduler_take_the_configured_ones(stage: int, pool: RankPool) -> None:
    for found in pool.run(with_dummies, stage, time_limit=90):
        assert found["loss"] < 1e-5 and found["weights"] < 1e-5, found
        assert all(norm > CLIP for norm in found["norms"]), "the norm is the one before clipping"
        assert not found["skipped"] and not found["auto left"]
        assert found["rate"] == pytest.approx(LR)


def student_and_teacher() -> tuple[Any, Any, Any]:
    """An Accelerator, and the models of an engine that trains at stage 2 and of one at stage 3 that does not."""
    from accelerate import DeepSpeedPlugin

    forget_clients()
    student = DeepSpeedPlugin(hf_ds_config={**minimal(2), "optimizer": {"type": "AdamW", "params": {"lr": LR}}})
    plugins = {"student": student, "teacher": DeepSpeedPlugin(hf_ds_config=minimal(3))}
    return gloo_accelerator(plugins), llama(), llama()


def prepared(acc: Any, student: Any, teacher: Any) -> tuple[Any, Any, Any, Any]:
    """Both engines, the optimizer, and batches."""
    from accelerate.utils import DummyOptim

    data = loader(sentences(4 * dist.get_world_size()))
    engine, optimizer, data = acc.prepare(student, DummyOptim(student.parameters(), lr=LR), data)
    acc.state.select_deepspeed_plugin("teacher")
    return engine, acc.prepare(teacher).eval(), optimizer, data


def two_plugins() -> list[bool]:
    """A trained student at stage 2 beside a frozen teacher at stage 3, under one Accelerator."""
    acc, *models = student_and_teacher()
    model, teacher, optimizer, data = prepared(acc, *models)
    steps = []
    for batch in data:
        with torch.no_grad():
            target = teacher(**batch).logits
        logits = model(**batch).logits
        loss = (logits - target).square().mean() + logits.square().mean()
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(bool(torch.isfinite(loss)))
    stages = model.zero_optimization_stage() == 2 and teacher.zero_optimization_stage() == 3
    acc.free_memory(model, teacher)
    return [*steps, stages, acc.unwrap_model(teacher) is teacher.module]


def minimal(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "train_batch_size": "auto",
        "zero_optimization": {"stage": stage},
    }


def test_two_plugins_train_and_infer_side_by_side(pool2: RankPool) -> None:
    for found in pool2.run(two_plugins, time_limit=90):
        assert all(found)
