"""Mixture-of-experts models of Transformers from files: each rank reads its own shards, also where files have a tensor
for each expert and the model has them stacked.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.common import alive, everything, forget_clients, need, save_once, settings
from tests.compat.test_hf_experts import FAMILIES, model_of, over_ranks
from tests.harness.pool import RankPool
from tests.harness.training import outcome

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(180)


def read_from(folder: str, family: str) -> dict[str, Any]:
    """Load a saved model under stage 3, then divide its experts: what this rank read and keeps, names that differ."""
    from transformers import AutoModelForCausalLM

    import deepspeed
    from deepspeed.client.zero.incoming import Incoming

    forget_clients()
    saved, config = model_of(family), settings(3, {"lr": 1e-2}, **over_ranks(2))
    save_once(saved, folder)
    loads: list[Incoming] = []
    living, begin = alive(config), Incoming.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Incoming, "__init__", lambda self, *args: (loads.append(self), begin(self, *args))[1])
        model = AutoModelForCausalLM.from_pretrained(folder).train()
    engine = deepspeed.initialize(model=model, config=config)[0]
    wanted = saved.state_dict()
    kept = sum(unit.shard.numel() for unit in engine.runtime.units if unit.movable)
    wrong = [n for n, value in everything(engine.module).items() if not torch.equal(value, wanted[n])]
    engine.destroy()
    del living
    forget_clients()
    (load,) = loads
    return {"wrong": wrong, "kept": kept, "read": load.read_bytes, "sent": load.sent_bytes}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_reads_its_own_part_of_the_experts(pool4: RankPool, tmp_path: Any, family: str) -> None:
    total = sum(p.nbytes for p in model_of(family).parameters())
    found = pool4.run(read_from, str(tmp_path), family, time_limit=120)
    assert all(not one["wrong"] and not one["sent"] for one in found), found
    assert sum(one["read"] for one in found) <= total and max(one["read"] for one in found) < 0.3 * total
    assert max(4 * one["kept"] for one in found) < 0.3 * total


PARTS: dict[str, Any] = {
    "experts": over_ranks(2),
    "layers": {"tensor_parallel": {"autotp_size": 2}},
}


def written(folder: str, stage: int, how: str) -> list[str]:
    """Ways to save a model with divided experts or layers: what is refused or missing."""
    from transformers import AutoModelForCausalLM

    import deepspeed
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

    forget_clients()
    engine = deepspeed.initialize(model=model_of("qwen3_moe"), config=settings(stage, **PARTS[how]))[0]
    model, wanted, faults = engine.module, model_of("qwen3_moe").state_dict(), []

    def read(way: str) -> None:
        dist.barrier()
        found = AutoModelForCausalLM.from_pretrained(f"{folder}/{way}", dtype=torch.float32).state_dict()
        faults.extend(f"{way}: {n}" for n, value in wanted.items() if not torch.equal(found[n], value))

    for save in (lambda: model.save_pretrained(folder), lambda: engine.save_pretrained(folder, is_main_process=True)):
        said = outcome(save)
        if "UsageError" not in said or "would write this rank's parts of layers or experts alone" not in said:
            faults.append(said)
    engine.save_pretrained(f"{folder}/engine")
    read("engine")
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        model.save_pretrained(f"{folder}/gathered", is_main_process=dist.get_rank() == 0)
    read("gathered")
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        state = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(f"{folder}/given", state_dict=state, is_main_process=dist.get_rank() == 0)
    read("given")
    if stage < 3:  # as Accelerate and the Trainer do
        state = clone_tensors_for_torch_save(model.state_dict())
        model.save_pretrained(f"{folder}/cloned", state_dict=state, is_main_process=dist.get_rank() == 0)
        read("cloned")
    engine.destroy()
    model.save_pretrained(f"{folder}/after", is_main_process=dist.get_rank() == 0)
    read("after")
    return faults


@pytest.mark.parametrize("how", PARTS)
@pytest.mark.parametrize("stage", [1, 3])
def test_no_file_of_a_model_has_the_parts_of_one_rank_alone(
    pool2: RankPool, tmp_path: Any, stage: int, how: str
) -> None:
    assert pool2.run(written, str(tmp_path), stage, how, time_limit=120) == [[], []]
