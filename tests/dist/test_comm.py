"""``deepspeed.comm`` over two ranks, with the log off and on, and the group getters."""

import contextlib
import io
import os
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import deepspeed
import deepspeed.comm as comm
from deepspeed.client.comm import calls, comms_log, groups
from deepspeed.client.comm.norms import clip_grad_norm_
from deepspeed.client.comm.partitioned import PartitionedTensor
from deepspeed.comm import collectives
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.monitor import log
from deepspeed.monitor.log import logger
from tests.harness.patience import slowdown
from tests.harness.pool import RankPool


def _every_call() -> dict[str, list]:
    rank = comm.get_rank()
    own = torch.tensor([rank + 1.0, 10.0 * (rank + 1)])
    out: dict[str, list] = {}

    def fresh(numel: int) -> torch.Tensor:
        return torch.zeros(numel)

    tensor = own.clone()
    comm.all_reduce(tensor)
    out["all_reduce"] = tensor.tolist()
    tensor = own.clone()
    comm.all_reduce(tensor, comm.ReduceOp.MAX, async_op=True).wait()
    out["max"] = tensor.tolist()
    tensor = own.clone()
    comm.broadcast(tensor, 1, prof=True, log_name="mine")
    out["broadcast"] = tensor.tolist()
    gathered = fresh(4)
    comm.all_gather_into_tensor(gathered, own)
    out["all_gather"] = gathered.tolist()
    pair = [fresh(2), fresh(2)]
    comm.all_gather(pair, own)
    assert torch.equal(torch.cat(pair), gathered)
    part = fresh(1)
    comm.reduce_scatter_tensor(part, own)
    out["reduce_scatter"] = part.tolist()
    swapped = fresh(2)
    comm.all_to_all_single(swapped, own)
    out["all_to_all"] = swapped.tolist()
    many = [own.clone(), own.clone()]
    handle = comm.all_reduce_coalesced(many, async_op=True)
    assert handle.is_completed() in (True, False)
    handle.wait()
    assert handle.is_completed()
    assert many[0].tolist() == many[1].tolist() == out["all_reduce"]
    inbox = fresh(2)
    ops = [comm.P2POp(comm.isend, own, 1 - rank), comm.P2POp(comm.irecv, inbox, 1 - rank)]
    for work in comm.batch_isend_irecv(ops):
        work.wait()
    out["p2p"] = inbox.tolist()
    objects = [None, None]
    comm.all_gather_object(objects, {"rank": rank})
    out["objects"] = objects
    assert comm.get_all_ranks_from_group() == [0, 1] and comm.get_global_rank(comm.get_world_group(), 1) == 1
    comm.barrier()
    return out


def _logged() -> tuple[dict, dict | None, list[str]]:
    comm.configure(enabled=True)
    try:
        comm.reset_log()
        results = _every_call()
        summary = comm.log_summary(show_straggler=True, return_dict=True)
        return results, summary, comm.get_logged_comm_ops()
    finally:
        comm.configure(enabled=False)
        comm.reset_log()


EXPECTED = {
    "all_reduce": [[3.0, 30.0]] * 2,
    "max": [[2.0, 20.0]] * 2,
    "broadcast": [[2.0, 20.0]] * 2,
    "all_gather": [[1.0, 10.0, 2.0, 20.0]] * 2,
    "reduce_scatter": [[3.0], [30.0]],
    "all_to_all": [[1.0, 2.0], [10.0, 20.0]],
    "p2p": [[2.0, 20.0], [1.0, 10.0]],
    "objects": [[{"rank": 0}, {"rank": 1}]] * 2,
}


def test_every_call(pool2: RankPool) -> None:
    left, right = pool2.run(_every_call)
    assert {name: [left[name], right[name]] for name in left} == EXPECTED


def test_the_log_changes_no_result(pool2: RankPool) -> None:
    for index, (results, summary, ops) in enumerate(pool2.run(_logged)):
        assert {name: values[index] for name, values in EXPECTED.items()} == results
        assert {"all_reduce", "mine", "all_gather_into_tensor", "barrier"} <= set(ops)
        assert summary["summary"]["all_reduce"][8]["count"] == 2
        assert summary["straggler_analysis"]["all_reduce"][8]["total_straggler_ms"] >= 0
        assert summary["metadata"]["world_size"] == 2 and summary["metadata"]["rank"] == index


def _latencies_with_bf16_as_the_default() -> float:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return comms_log._Stragglers({("all_reduce", 8)}).row("all_reduce", 8, [1.001, 2.003])["total_comm_lat_ms"]
    finally:
        torch.set_default_dtype(torch.float32)


def test_latencies_are_compared_in_fp32_whatever_the_default_dtype(pool2: RankPool) -> None:
    assert pool2.run(_latencies_with_bf16_as_the_default) == [pytest.approx(3.004)] * 2


def _messages_beside_another_default_device() -> list:
    group = plain_mesh("gloo").zero
    with torch.device("meta"):
        return list(collectives.merge([group.index, -group.index, 7], [1 << group.index, 1 << 61], group))


def test_ranks_agree_in_host_memory_whatever_the_default_device(pool2: RankPool) -> None:
    assert pool2.run(_messages_beside_another_default_device) == [[[1, 0, 7], [3, 1 << 61]]] * 2


def _getters() -> list:
    groups.register_topology(None)  # an engine of another test that cut these ranks may still be there
    groups.register_mpu(None)
    alone = groups.get_sequence_parallel_group()
    assert alone is groups.get_tensor_model_parallel_group()
    return [
        comm.get_world_size(alone),
        groups.get_sequence_parallel_world_size(),
        groups.get_data_parallel_world_size(),
        groups.get_data_parallel_rank(),
        groups.get_sequence_data_parallel_world_size(),
        groups.get_broadcast_src_rank(),
        groups.get_tensor_model_parallel_src_rank(),
    ]


def _of_others() -> tuple[int, str]:
    """Rank and number of ranks as logs and monitors find them, in a group that was started with arguments alone."""
    with patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        deepspeed.init_distributed()
        return log.rank(), os.environ["WORLD_SIZE"]


def test_the_ranks_of_a_group_of_others_know_who_they_are(pool2: RankPool) -> None:
    """Else each is taken for the first one: lines of logs, and rows of monitors, come twice."""
    assert pool2.run(_of_others) == [(0, "2"), (1, "2")]


def test_group_getters(pool2: RankPool) -> None:
    assert pool2.run(_getters) == [[1, 1, 2, 0, 2, 0, 0], [1, 1, 2, 1, 2, 0, 1]]


def _getters_of_experts() -> list:
    groups.register_topology(None)
    groups.register_mpu(None)
    return [
        comm.get_all_ranks_from_group(groups.get_expert_parallel_group("ep_size_2")),
        comm.get_all_ranks_from_group(groups.get_expert_data_parallel_group("ep_size_2")),
        groups.get_expert_parallel_rank("ep_size_2"),
        groups.get_expert_data_parallel_rank("ep_size_2"),
        groups.get_expert_parallel_world_size("ep_size_4"),
    ]


def test_the_getters_of_experts_cut_the_world(pool4: RankPool) -> None:
    expected = [
        [[0, 1], [0, 2], 0, 0, 4],
        [[0, 1], [1, 3], 1, 0, 4],
        [[2, 3], [0, 2], 0, 1, 4],
        [[2, 3], [1, 3], 1, 1, 4],
    ]
    assert pool4.run(_getters_of_experts) == expected


def _misnamed() -> str:
    with pytest.raises(UsageError, match="ep_size_") as error:
        groups.get_expert_parallel_group("experts")
    with pytest.raises(DeepSpeedConfigError, match="3"):
        groups.get_expert_parallel_group("ep_size_3")
    return str(error.value)


def test_unknown_expert_groups_are_refused(pool2: RankPool) -> None:
    assert all("'experts'" in text for text in pool2.run(_misnamed))


class _SequenceHalves:
    """An mpu whose sequence is split in two and whose experts are in one group."""

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    get_expert_parallel_group = get_data_parallel_group

    def get_sequence_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_rank(self) -> int:
        return 7


def _told_by_the_mpu() -> list[int]:
    engine = deepspeed.initialize(
        model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1}, mpu=_SequenceHalves()
    )[0]
    try:
        names = ("sequence_parallel_world_size", "model_parallel_rank", "data_parallel_world_size")
        experts = deepspeed.utils.groups._get_expert_parallel_world_size("ep_size_1")
        asked = [*(getattr(deepspeed.utils.groups, f"_get_{name}")() for name in names), experts]
    finally:
        engine.destroy()
    return [*asked, deepspeed.utils.groups._get_sequence_parallel_world_size()]


def test_the_getters_ask_the_mpu_of_initialize_until_its_engine_ends(pool2: RankPool) -> None:
    assert pool2.run(_told_by_the_mpu) == [[2, 7, 2, 2, 1]] * 2


def _told_beside_others() -> list[Any]:
    """What the getters tell of a sequence's ranks as the younger of two engines ends, and then the older one: of two
    with one mpu; and of one that shares sequences beside one that does not, and what these tell themselves.
    """
    config, told = {"train_micro_batch_size_per_gpu": 1}, []
    mpu = _SequenceHalves()
    for cuts in (({"mpu": mpu}, {"mpu": mpu}), ({"mesh_param": (1, 2)}, {})):
        engines = [deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config, **cut)[0] for cut in cuts]
        shares = [engine.seq_parallel_group is not None for engine in engines]
        engines[1].destroy()
        older = deepspeed.utils.groups._get_sequence_parallel_world_size()
        engines[0].destroy()
        told += [shares, older, deepspeed.utils.groups._get_sequence_parallel_world_size()]
    return told


def test_an_engine_that_ends_leaves_the_getters_to_those_that_live(pool2: RankPool) -> None:
    assert pool2.run(_told_beside_others) == [[[False, False], 2, 1, [True, False], 2, 1]] * 2


def _cut_and_whole() -> None:
    rank, whole = comm.get_rank(), torch.arange(15.0).reshape(3, 5)
    part = PartitionedTensor(whole, dist.group.WORLD)
    assert part.data().tolist() == whole.flatten()[(slice(0, 8), slice(8, 15))[rank]].tolist()
    assert torch.equal(part.full(), whole)
    again = PartitionedTensor.from_meta(part.to_meta(), part.data().clone(), dist.group.WORLD)
    assert again.full_size() == [3, 5]
    assert torch.equal(again.full(), whole)
    meta = part.to_meta()
    meta[3] = 3
    with pytest.raises(ValueError, match="cut into 3 parts, the group has 2 ranks"):
        PartitionedTensor.from_meta(meta, part.data(), dist.group.WORLD)


def test_a_tensor_in_parts_is_whole_again(pool2: RankPool) -> None:
    pool2.run(_cut_and_whole)


class _Ranks:
    """The part of an mpu that clipping asks for."""

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


def _clipped_over_two() -> None:
    rank = comm.get_rank()
    whole, cut = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    cut.model_parallel = True
    whole.grad, cut.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0 * rank, 0.0])
    norm = clip_grad_norm_([whole, cut], 1.0, mpu=_Ranks())
    assert float(norm) == 5.0  # what is whole counts once
    assert whole.grad.tolist() == pytest.approx([0.6, 0.0])
    assert cut.grad.tolist() == pytest.approx([0.8 * rank, 0.0])


def test_a_norm_over_model_parallel_ranks_counts_what_is_whole_once(pool2: RankPool) -> None:
    pool2.run(_clipped_over_two)


def _scattered(accumulate: bool) -> tuple[bool, int]:  # noqa: FBT001 - of a rank's function
    """Whether the sum has the bits of an addition in member order; bytes of memory that it took besides."""
    world = dist.get_world_size()
    group = plain_mesh("gloo").job
    everyone = [torch.randn(6 * world, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    out = torch.full((6,), 0.1 if accumulate else float("nan"))
    expected, taken = torch.full((6,), 0.1) if accumulate else None, []
    for piece in (e[6 * group.index : 6 * (group.index + 1)] for e in everyone):
        expected = piece.clone() if expected is None else expected + piece
    plain = collectives.fresh
    with patch.object(collectives, "fresh", lambda *how: (taken.append(how[0]), plain(*how))[1]):
        collectives.reduce_scatter(everyone[group.index], out, group, accumulate=accumulate).wait()
    return torch.equal(out, expected), sum(taken)


def test_a_scattered_sum_is_in_member_order_and_needs_memory_for_all_but_two_pieces(
    pool2: RankPool, pool3: RankPool
) -> None:
    """The first of the others' pieces comes to where the sum will be, unless that holds something already."""
    for pool, world in ((pool2, 2), (pool3, 3)):
        assert pool.run(_scattered, False) == [(True, 6 * (world - 2))] * world
        assert pool.run(_scattered, True) == [(True, 6 * (world - 1))] * world


def _with_a_late_rank(late_s: float) -> tuple[dict[str, Any], str]:
    """The table where rank 1 comes late to ten calls, and rank 0 alone makes one more."""
    comm.configure(enabled=True)
    rank, written = comm.get_rank(), io.StringIO()
    try:
        comm.reset_log()
        for _ in range(10):
            time.sleep(late_s * rank)
            comm.all_reduce(torch.ones(2))
        if rank == 0:
            comms_log.LOG.record("all_reduce", 4096, 1.0)
        with contextlib.redirect_stdout(written):
            summary = comm.log_summary(show_straggler=True, return_dict=True)
        assert summary is not None
        return summary["straggler_analysis"]["all_reduce"], written.getvalue()
    finally:
        comm.configure(enabled=False)
        comm.reset_log()


def test_the_rank_that_comes_last_is_named(pool2: RankPool) -> None:
    late_s = 0.03 * slowdown()  # more than rank 0 comes late by chance on a busy machine
    (first, text), (second, _) = pool2.run(_with_a_late_rank, late_s)
    assert "calls to which a rank came last, of 10: rank 1" in text
    assert first[8]["total_straggler_ms"] > 5000 * late_s > second[8]["total_straggler_ms"]
    assert first[4096]["total_straggler_ms"] == 0  # a call of one rank alone is not compared


def test_bus_bandwidth_goes_by_the_ranks_of_the_group() -> None:
    log = comms_log.CommsLog()
    log.record("all_reduce", 10**6, 1.0, 4)
    log.record("all_gather", 10**6, 1.0, 2)
    log.record("scatter", 10**6, 1.0, 2)
    log.record("send", 10**6, 1.0, 2)
    shares = {op: rows[10**6]["busbw_avg_gbps"] / rows[10**6]["tput_avg_gbps"] for op, rows in log.summary(64).items()}
    assert shares == pytest.approx({"all_reduce": 1.5, "all_gather": 0.5, "scatter": 0.5, "send": 1.0})


def test_the_log_knows_the_names_of_all_calls() -> None:
    assert set(calls._COLLECTIVES) | {"merge", "receive"} == comms_log.KNOWN_OPS


def test_an_operation_that_does_not_exist_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    log = vars(comms_log.LOG).copy()
    try:
        comm.configure(prof_ops=["all_gathr"])
    finally:
        vars(comms_log.LOG).update(log)
    assert "comms_logger.prof_ops names 'all_gathr'" in caplog.text and "did you mean 'all_gather'?" in caplog.text
