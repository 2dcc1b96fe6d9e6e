"""Tiles of the loss and of MLPs, by configuration, on models of Transformers as they are."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.sequence.tiling import logits
from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import safe_get_full_grad
from tests.compat.common import VOCABULARY, apart, forget_clients, llama, need, weights_apart, whole
from tests.compat.test_hf_trainer import arguments, auto_config, history, trainer
from tests.harness.training import make_config, start

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(240)
WORDS = 97
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON: dict[str, Any] = {**SIZES, "vocab_size": WORDS, "intermediate_size": 48}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "softcapped and tied": ("Gemma2Config", {**COMMON, "head_dim": 8}),
    "scaled": ("CohereConfig", COMMON),
    "experts": ("MixtralConfig", {**COMMON, "num_local_experts": 4, "output_router_logits": True}),
    "transposed weights": ("GPT2Config", {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}


def _model(kind: str) -> Any:
    import transformers

    name, sizes = CONFIGS[kind]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes, **special))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _batch(rank: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, WORDS, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 2] = -100
    return {"input_ids": ids, "labels": labels}


@mock.patch.object(logits, "TILE_BYTES", 5 * WORDS * 4)
def _apart(kind: str, stage: int, sp: int) -> list[float]:
    """Errors of loss, gradients and logits, beside one process with the batches of both ranks (``sp`` 2: one batch)."""
    rank, plain, model = dist.get_rank(), _model(kind), _model(kind)
    batches = [_batch(0, 12)] if sp > 1 else [_batch(r, 12 + 4 * r) for r in range(2)]
    outputs = [plain(**batch) for batch in batches]
    (sum(out.loss for out in outputs) / len(batches)).backward()
    sequence = {"loss": "tiled", "mlp_tiles": 3}
    config = make_config(stage, sequence=sequence, sequence_parallel_size=sp, train_micro_batch_size_per_gpu=2)
    engine = start(model, config)
    mine = outputs[0 if sp > 1 else rank]
    out = engine(**batches[0 if sp > 1 else rank])
    assert type(out.logits) is logits.LazyLogits
    engine.backward(out.loss)
    errors = [abs(float(out.loss.detach() - mine.loss.detach()))]
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    errors += [scaled_error(safe_get_full_grad(p), torch.zeros_like(q) if q.grad is None else q.grad) for p, q in pairs]
    if sp == 1:
        with torch.no_grad():
            assert torch.equal(out.logits.argmax(-1), mine.logits.argmax(-1))
            errors.append(scaled_error(out.logits.float().softmax(-1), mine.logits.softmax(-1)))
    engine.step()
    engine.destroy()
    return errors


@pytest.mark.parametrize("kind", CONFIGS)
def test_tiles_train_models_of_transformers_as_the_whole_does(pool2: Any, kind: str) -> None:
    for errors in pool2.run(_apart, kind, 3, 1):
        assert max(errors) <= 1e-6, errors


def test_tiles_and_parts_of_sequences_together(pool2: Any) -> None:
    for errors in pool2.run(_apart, "llama", 2, 2):
        assert max(errors) <= 1e-6, errors


@mock.patch.object(logits, "TILE_BYTES", 5 * WORDS * 4)
def _generated() -> bool:
    """Whether words are chosen as without an engine, and evaluation gives the same loss and logits."""
    plain, model = _model("llama").eval(), _model("llama")
    engine = start(model, make_config(0, sequence={"loss": "tiled"}))
    engine.eval()
    batch, ids = _batch(0, 12), _batch(1, 4)["input_ids"]
    with torch.no_grad():
        same = abs(float(engine(**batch).loss - plain(**batch).loss)) <= 1e-6
        logits_of = engine(**batch).logits.detach().numpy()
    same &= scaled_error(torch.from_numpy(logits_of), plain(**batch).logits.detach()) <= 1e-6
    options = {"max_new_tokens": 5, "do_sample": False}
    same &= torch.equal(engine.module.generate(ids, **options), plain.generate(ids, **options))
    engine.destroy()
    return same


def test_generation_and_evaluation_read_lazy_logits(pool1: Any) -> None:
    assert pool1.run(_generated) == [True]


def _metrics(found: Any) -> dict[str, float]:
    """Accuracy, and the mean logit, which needs them all."""
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "mean_logit": float(found.predictions.mean())}


@mock.patch.object(logits, "TILE_BYTES", 5 * VOCABULARY * 4)
def _trained_evaluated_predicted(folder: str, stage: int) -> dict[str, float]:
    """What the Trainer finds with lazy logits, beside its own plain run: the largest differences."""
    runs: list[dict[str, Any]] = []
    tiled = {**auto_config(stage, own_optimizer=True), "sequence": {"loss": "tiled"}}
    lazy: list[bool] = []
    for config in (None, tiled):
        forget_clients()
        made = trainer(arguments(folder, config), llama())
        made.compute_metrics = _metrics
        if config is not None:
            made.model.register_forward_hook(lambda m, a, out: lazy.append(type(out.logits) is logits.LazyLogits))
        made.train()
        evaluated, predicted = made.evaluate(), made.predict(made.eval_dataset)
        numbers = history(made, "loss") + history(made, "grad_norm")
        numbers += [evaluated[f"eval_{name}"] for name in ("loss", "accuracy", "mean_logit")]
        numbers += [predicted.metrics[f"test_{name}"] for name in ("loss", "accuracy", "mean_logit")]
        runs.append({"numbers": numbers, "logits": torch.from_numpy(predicted.predictions)})
        if config is None:
            runs[0]["weights"] = whole(made.accelerator.unwrap_model(made.model))
    found = {
        "numbers": apart(runs[0]["numbers"], runs[1]["numbers"]),
        "logits": float((runs[0]["logits"] - runs[1]["logits"]).abs().max()),
        "weights": weights_apart(made.model, runs[0]["weights"]),
        "whole": float(not lazy or not all(lazy)),
    }
    made.accelerator.free_memory(made.model_wrapped)
    forget_clients()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_trains_evaluates_and_predicts_with_lazy_logits_as_without(
    stage: int, tmp_path: Path, pool2: Any
) -> None:
    for found in pool2.run(_trained_evaluated_predicted, str(tmp_path), stage, time_limit=120):
        assert max(found.values()) < 2e-4, found
