"""Without a stated limit, offloaded states keep within the memory there is: more of them rest on the drive, or the run
is refused.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.monitor import hostmem
from deepspeed.monitor.hostmem import Pool
from deepspeed.tools.verify.models import ResidualBlock, case_named
from deepspeed.zero import Init, build as zero_build
from deepspeed.zero.memory.fit import MemoryPlan
from deepspeed.zero.plan import StateKind
from tests.harness.logs import logged
from tests.harness.offload import WIDTH, Wide, same, snapshot, wide_case
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start, train_step

STEPS = 2
GROUP = "control group /job (memory.max 9 MiB)"


class Deep(Wide):
    """Gradients of twelve equal blocks are more than the buffers that lead to a drive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ResidualBlock(WIDTH) for _ in range(12)])


@contextlib.contextmanager
def memory_left(room: int, ranks: int) -> Iterator[list[str]]:
    """As if ``ranks`` ranks shared a control group that leaves ``room`` bytes to each of them; yields the warnings."""
    with logged(logging.WARNING) as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_build.hostmem, "rss_bytes", lambda: 0)
        patch.setattr(
            zero_build.hostmem, "memory_pools", lambda: [Pool(("job",), GROUP, 9 << 20, ranks * (room * 8 // 7))]
        )
        yield said


def trained(zero: dict[str, Any]) -> tuple[MemoryPlan, list[bool], dict[str, Tensor]]:
    """The plan, whether each block's parameters are on a drive, and everything that can be known after training.
    Collective.
    """
    case = wide_case(Deep)
    zero = {"prefetch_bucket_size": 0, "sub_group_size": 4096, **zero}
    engine = start(case.build().train(), make_config(3, zero=zero))
    for step in range(STEPS):
        train_step(engine, case, step)
    stored = [u.on_drive(StateKind.PARAM) for u in engine.runtime.units if u.movable]
    plan, found = engine.memory_plan(), snapshot(engine)
    engine.destroy()
    return plan, stored, found


def keeps_within(folder: str, ranks: int) -> list[str]:
    """Ever less room: everything in memory, then gradients on the drive, then ever more parameters; the same bits each
    time.
    """
    bad: list[str] = []
    drive = {"device": "nvme", "nvme_path": folder}
    *_, wanted = trained({})
    for zero in ({"offload_optimizer": drive, "offload_param": drive}, {"offload_optimizer": drive}):
        whole, *_ = trained(zero)
        need, moved = whole.host, {line.what: line for line in whole.lines}
        params = moved["parameters"].host + moved["parameters"].device
        for less, grads, some in ((0, False, False), (1, True, False), (moved["gradients"].host - 1, True, True)):
            with memory_left(need - less, ranks) as said:
                plan, stored, found = trained(zero)
            memory = {line.what: line for line in plan.lines}
            if plan.host > need - less or bool(memory["gradients"].drive) != grads:
                bad.append(f"{need - less} of {need}: {plan.table()}")
            if not (0 < memory["parameters"].drive < params if some else memory["parameters"].drive == 0):
                bad.append(f"{need - less} of {need}: {memory['parameters']} of {params}")
            if any(stored) != some or (some and all(stored)):
                bad.append(f"{need - less} of {need}: on the drive {stored}")
            told = [text for text in said if GROUP in text]
            if len(told) != (grads and torch.distributed.get_rank() == 0) or any(
                "gradients rest on the drive" not in t for t in told
            ):
                bad.append(f"{need - less} of {need}: the log says {said}")
            bad += [f"{need - less} of {need}: {key}" for key in wanted if not same(wanted[key], found[key])]
    return bad


@pytest.mark.in_make_test("1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_states_go_to_the_drive_until_they_fit(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    assert pool.run(keeps_within, str(tmp_path), ranks, time_limit=100) == [[]] * ranks


def refused(zero: dict[str, Any]) -> tuple[str, bool]:
    """No room at all: an error on every rank, and the model is as it was."""
    model = wide_case(Deep).build().train()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with memory_left(1000, 2):
        said = outcome(lambda: start(model, make_config(3, zero=zero)))
    whole = all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    return said, whole


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_what_cannot_fit_is_refused_on_every_rank(pool2: RankPool, tmp_path: Path, device: str) -> None:
    place = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    told = pool2.run(refused, {"offload_optimizer": place, "offload_param": place})
    for said, whole in told:
        assert "DeepSpeedConfigError" in said and "memory.host_limit" in said, said
        assert f": {GROUP}, which 2 ranks share, leaves a rank 0 MiB, but" in said, said
        assert whole
    assert told[0] == told[1] and list(tmp_path.iterdir()) == []


def without_offload() -> list[list[str]]:
    """Where nothing is offloaded, where it fits, and where the user has stated a limit."""
    told = []
    for room, config in ((1000, {}), (1 << 30, {}), (1000, {"memory": {"host_limit": "1GiB"}})):
        with memory_left(room, 2) as said:
            start(case_named("plain").build(), make_config(3, **config)).destroy()
        told.append([text for text in said if GROUP in text])
    return told


def test_without_offload_there_is_a_warning_and_no_refusal(pool2: RankPool) -> None:
    told, quiet = pool2.run(without_offload)
    assert [len(texts) for texts in told] == [1, 0, 1] and quiet == [[], [], []]
    assert "may end the run" in told[0][0] and "may end the run" in told[2][0]


def born(folder: str, limit: int | None) -> int:
    """Bytes of the parameters that ``zero.Init`` leaves in memory."""
    config = make_config(3, zero={"offload_param": {"device": "nvme", "nvme_path": folder}}, optimizer=None)
    config |= {"memory": {"host_limit": limit}} if limit else {}
    with memory_left(400_000, 1), Init(config_dict_or_path=config):
        model = nn.ModuleList(nn.Linear(200, 200, bias=False) for _ in range(6))  # 160,000 bytes each
    return sum(
        p._ds_unit.shard.untyped_storage().nbytes()
        for p in model.parameters()
        if not p._ds_unit.on_drive(StateKind.PARAM)
    )


def test_a_model_is_born_within_half_of_what_there_is(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(born, str(tmp_path), None) == [160_000]
    assert pool1.run(born, str(tmp_path), 1 << 30) == [960_000], "a stated limit counts"


def over_the_limit() -> list[int]:
    """How often it is said before this process grows, and in two steps after that."""
    case, real = case_named("plain"), hostmem.rss_bytes
    engine, found = start(case.build(), make_config(3, memory={"host_limit": real() + (1 << 30)})), []
    for steps, more in (((0,), 0), ((1, 2), 2 << 30)):
        with logged() as said, pytest.MonkeyPatch.context() as patch:
            patch.setattr(hostmem, "rss_bytes", lambda more=more: real() + more)
            for step in steps:
                train_step(engine, case, step)
        found.append(sum("more than memory.host_limit" in text for text in said))
    engine.destroy()
    return found


def test_memory_beyond_the_limit_is_said_once(pool1: RankPool) -> None:
    assert pool1.run(over_the_limit) == [[0, 1]]
