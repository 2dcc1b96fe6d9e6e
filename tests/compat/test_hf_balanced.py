"""A model of Transformers, unmodified, trained from balanced batches: equal to its samples one by one."""

from typing import Any

import pytest
import torch

from tests.compat.common import need
from tests.harness.pool import RankPool

need("transformers")
pytestmark = pytest.mark.timeout(240)
SIZES = [3, 5, 38, 4, 7, 2, 9, 4, 40, 6, 3, 5, 8, 4, 11, 3]
LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def model_of() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="sdpa")).train()


def run(stage: int, max_degree: int, recompute: bool) -> tuple[float, list[int], int]:  # noqa: FBT001
    """The largest error of gradients over an epoch, the degrees of this rank, and its micro-batches without a label."""
    import deepspeed
    from deepspeed.errors import DeepSpeedConfigError
    from deepspeed.sequence.lengths.balanced_loader import BalancedLoader
    from deepspeed.sequence.lengths.dealing import CostModel
    from deepspeed.tools.verify.grads import scaled_error
    from deepspeed.utils import safe_get_full_grad

    draw = torch.Generator().manual_seed(2)
    data = [{"input_ids": torch.randint(1, 64, (size,), generator=draw)} for size in SIZES]
    for sample in (
        one for number, one in enumerate(data) if number % 5 != 2
    ):  # so that some rank has no label in a micro-batch
        sample["labels"] = torch.full_like(sample["input_ids"], -100)
    model, plain = model_of(), model_of()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "normalize": "tokens",
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    cost = CostModel(0.01, 1.0, exchange_bytes=8.0, node_bandwidth=1.0)
    how = {"batch_tokens": 90, "max_degree": max_degree, "cost": cost, "seed": None}
    loader = BalancedLoader(data, engine, 24 if max_degree > 1 else 48, **how)
    with pytest.raises(DeepSpeedConfigError, match="an engine has one BalancedLoader"):
        BalancedLoader(data, engine, 48)
    worst, degrees, begin, empty = 0.0, [], 0, 0
    for batch in loader:
        degrees.append(loader.groups.current.size)
        loss = engine(**batch).loss
        assert bool(loss.isfinite())
        empty += int(batch["labels"].ne(-100).sum() == 0)
        engine.backward(loss)
        end = loader.state_dict()["samples"]
        plain.zero_grad()
        labelled = [sample for sample in data[begin:end] if "labels" not in sample]
        total = sum(len(sample["input_ids"]) - 1 for sample in labelled)
        for sample in labelled:
            ids = sample["input_ids"][None]
            (plain(input_ids=ids, labels=ids).loss * ((ids.shape[1] - 1) / total)).backward()
        for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            worst = max(worst, scaled_error(safe_get_full_grad(mine), theirs.grad))
        engine.step()
        begin = end
    engine.destroy()
    assert model.config._attn_implementation == "sdpa"
    return worst, degrees, empty


@pytest.mark.parametrize(("stage", "max_degree", "recompute"), [(1, 1, False), (3, 4, False), (1, 4, True)])
def test_an_update_is_that_of_its_samples_one_by_one(
    pool4: RankPool,
    stage: int,
    max_degree: int,
    recompute: bool,  # noqa: FBT001
) -> None:
    ranks = pool4.run(run, stage, max_degree, recompute)
    assert max(error for error, *_ in ranks) <= 1e-6 and sum(empty for *_, empty in ranks) > 0
    together = [len(set(degrees)) for degrees in zip(*(degrees for _, degrees, _ in ranks), strict=True)]
    assert max(together) == (2 if max_degree > 1 else 1), ranks
