"""What of the optimizer's state is read from a drive during the backward is what the update needs: a later write to it,
through any door, counts, and no buffer is left behind.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state
from deepspeed.zero import GatheredParameters
from tests.harness.offload import CASES
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, start

pytestmark = pytest.mark.timeout(60)


def _train(folder: str | None, door: str) -> dict[str, Any]:
    """Three steps, with a write through ``door`` between the last backward and its update."""
    place = {} if folder is None else {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    case = CASES["wide"]()
    engine = start(case.build().train(), make_config(3, zero=place))
    ahead = []
    for step in range(3):
        for loss in case.seeded_loss(engine, here(step)):
            engine.backward(loss)
        ahead.append(len(getattr(engine.runtime.update, "_ahead", ())))
        param = next(p for p in engine.module.parameters() if p.dim() > 1)
        if step == 2 and door == "master":
            safe_set_full_fp32_param(param, 2.0 * safe_get_full_fp32_param(param))
        elif step == 2 and door == "slot":
            safe_set_full_optimizer_state(param, torch.full(param.ds_shape, 0.25), "exp_avg")
        elif step == 2 and door == "gathered":
            with GatheredParameters([param], modifier_rank=0):
                param.data.mul_(0.5)
        engine.step()
        engine.runtime.update.wait()
    out = engine.runtime.update._staging._out if hasattr(engine.runtime.update, "_staging") else 0
    values = [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]
    for loss in case.seeded_loss(engine, here(3)):  # read ahead for an update that never comes
        engine.backward(loss)
    engine.destroy()
    return {"ahead": ahead, "out": out, "values": values}


@pytest.mark.parametrize("door", ["none", "master", "slot", "gathered"])
def test_writes_between_backward_and_update_count(pool2: RankPool, tmp_path: Path, door: str) -> None:
    plain = pool2.run(_train, None, door)
    for seen, wanted in zip(pool2.run(_train, str(tmp_path), door), plain, strict=True):
        assert min(seen["ahead"]) > 0 and seen["out"] == 0
        for ours, theirs in zip(seen["values"], wanted["values"], strict=True):
            assert torch.equal(ours, theirs)
