"""Accelerate's usual loop on a model with experts over ranks: losses, weights and what it saves equal plain torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.common import LR, apart, batches, forget_clients, need, plain_run, sentences, weights_apart, whole
from tests.compat.test_accelerate import ACCUMULATE, CLIP, STEPS, accelerator, loader, run
from tests.compat.test_hf_experts import model_of, over_ranks
from tests.harness.pool import RankPool

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(180)


def trained(stage: int, ep: int) -> dict[str, float]:
    forget_clients()  # no zero.Init of another test
    world = dist.get_world_size()
    rows = sentences(2 * world * ACCUMULATE * STEPS)
    plain, model = model_of("qwen3_moe"), model_of("qwen3_moe")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, eps=1e-2)
    expected = plain_run(plain, optimizer, batches(rows), per_step=world * ACCUMULATE, clip=CLIP)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        **over_ranks(ep),
    }
    acc = accelerator(stage, config)
    made = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-2)
    model, made, data = acc.prepare(model, made, loader(rows))
    losses, _ = run(acc, model, made, data)
    found = {"loss": apart(losses, expected), "weights": weights_apart(acc.unwrap_model(model), whole(plain))}
    state = acc.get_state_dict(model)
    if state is not None:
        found["saved"] = max(float((v - plain.state_dict()[k]).abs().max()) for k, v in state.items())
    acc.free_memory(model)
    return found


@pytest.mark.parametrize(("world", "stage", "ep"), [(2, 2, 2), (4, 3, 2)])
def test_accelerate_trains_experts_over_ranks_as_plain_torch(stage: int, ep: int, pool: RankPool) -> None:
    for found in pool.run(trained, stage, ep, time_limit=120):
        assert max(found.values()) < 1e-5, found
