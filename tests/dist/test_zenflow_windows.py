"""In the middle of a window of ZenFlow settings change, parameters are frozen, batches are lost, ranks fail, and states
are looked at, saved and loaded.
"""

from typing import Any

from tests.harness.offload import CASES, CPU
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start


# -- what it takes, and gives back -----------------------------------------------------------------------------------
def cores_of_an_optimizer(zero: dict[str, Any]) -> list[float]:
    """The share of the cores that a client's optimizer takes in an engine, and behind it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = CASES["wide"]().build()
    optimizer = DeepSpeedCPUAdam(model.parameters())
    engine = start(model, make_config(2, zero=zero, optimizer=None), optimizer=optimizer)
    shares = [optimizer.host_cores]
    engine.destroy()
    return [*shares, optimizer.host_cores]


def test_the_end_of_an_engine_gives_the_cores_back(pool1: RankPool) -> None:
    chosen = {"overlap_step": True, "pt_reserved_cores_perc": 0.25}
    assert pool1.run(cores_of_an_optimizer, {"offload_optimizer": CPU, "zenflow": chosen}) == [[0.75, 1.0]]
    early = {**CPU, "super_offload": True, "cpuadam_cores_perc": 0.5}
    assert pool1.run(cores_of_an_optimizer, {"offload_optimizer": early}) == [[0.5, 1.0]]
