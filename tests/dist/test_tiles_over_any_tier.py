"""The update in tiles equals the update at once, bit for bit, wherever the states rest."""

import pytest
import torch

from deepspeed.tier.staging import Staging
from deepspeed.tools.verify.models import case_named
from deepspeed.zero.update.tiled import TiledUpdate
from tests.harness.pool import RankPool
from tests.harness.training import full_parameters, make_config, start, train_step


def _trained(config: dict, *, tiled: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    case = case_named("plain")
    torch.manual_seed(0)
    engine = start(case.build(), config)
    if tiled:
        engine.runtime.update = TiledUpdate(engine.runtime, engine.basic_optimizer, engine._views, Staging(2))
    losses = [value for step in range(3) for value in train_step(engine, case, step)]
    values = full_parameters(engine)
    engine.destroy()
    return losses, values


def _compare(config: dict) -> tuple[bool, bool, bool]:
    plain, tiled = _trained(config, tiled=False), _trained(config, tiled=True)
    return (
        plain[0] == tiled[0],
        plain[1].keys() == tiled[1].keys(),
        all(torch.equal(plain[1][n], tiled[1][n]) for n in plain[1]),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tiles_of_what_rests_in_memory(pool2: RankPool, stage: int, precision: str) -> None:
    config = make_config(stage, gradient_clipping=0.1, **({"bf16": {"enabled": True}} if precision == "bf16" else {}))
    assert pool2.run(_compare, config) == [(True, True, True)] * 2
