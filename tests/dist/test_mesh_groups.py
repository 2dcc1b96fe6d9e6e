"""The groups of an engine are made by its ranks alone, under names of their own, and where no messages are sent there
are none.
"""

import os
import random
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import deepspeed
from deepspeed import comm
from deepspeed.comm.init import take_turns
from deepspeed.comm.mesh.groups import _new_group, build_mesh, destroy_mesh, meet_at_end
from deepspeed.comm.mesh.topology import Axis
from deepspeed.errors import UsageError
from deepspeed.tools.verify.models import case_named
from deepspeed.utils import groups
from tests.harness import pipes
from tests.harness.decoders import Llama
from tests.harness.pool import RankPool
from tests.harness.training import ADAMW, make_config, start, train_step

pytestmark = pytest.mark.timeout(90)


def _sums(rounds: int) -> list[tuple[float, ...]]:
    """Sums of ranks over control, inner and outer axis of meshes over [0, 2] and [1, 3], made and given back again and
    again.
    """
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    uneven = dist.new_group([0, 1])  # torch names local groups by how many a rank has
    rank = dist.get_rank()
    found = []
    for _ in range(rounds):
        time.sleep(random.Random(rank + 10 * len(found)).random() / 2)  # ranks do not arrive together
        mesh = build_mesh("gloo", inner_size=1, group=halves[rank % 2])
        assert mesh.control is not None
        sums = []
        for group in (mesh.control, *mesh.groups):
            value = torch.tensor(float(rank))
            dist.all_reduce(value, group=group.pg)
            sums.append(float(value))
        found.append(tuple(sums))
        destroy_mesh(mesh)
    for group in (*halves, uneven):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return found


def test_shard_groups_inside_a_callers_groups_are_made_by_each_on_its_own_and_again(pool4: RankPool) -> None:
    found = pool4.run(_sums, 3)
    assert found == [[(float(2 * (rank % 2) + 2), float(rank), float(2 * (rank % 2) + 2))] * 3 for rank in range(4)]


def _comes_to_the_end() -> tuple[bool, bool]:
    """Whether this rank is to end its engine with the other of its half, where rank 0 cannot come; whether it did."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    mesh = build_mesh("gloo", group=halves[rank % 2])
    comes = rank != 0
    dist.barrier()
    together = meet_at_end(mesh, comes=comes)
    destroy_mesh(mesh)
    dist.destroy_process_group(halves[rank % 2])
    return rank % 2 == 1, together


def test_engines_on_other_ranks_end_without_each_other(pool4: RankPool) -> None:
    for expected, together in pool4.run(_comes_to_the_end):
        assert together == expected


def _groups_made(divergence: str) -> list[bool]:
    case = case_named("plain")
    engine = start(case.build(), make_config(3, zero={"divergence": divergence}))
    train_step(engine, case, 0)
    there = engine.mesh.control is not None
    engine.destroy()
    return [there]


def test_no_control_group_where_no_messages_are_sent(pool2: RankPool) -> None:
    assert pool2.run(_groups_made, "assume_none") == [[False]] * 2
    assert pool2.run(_groups_made, "tolerate") == [[True]] * 2


def _unreachable() -> str:
    with (
        mock.patch.object(
            dist.distributed_c10d, "ProcessGroupGloo", side_effect=RuntimeError("connectFullMesh failed\nframe #0")
        ),
        mock.patch.dict("os.environ", GLOO_SOCKET_IFNAME="lo7"),
        pytest.raises(UsageError) as caught,
    ):
        build_mesh("gloo")
    return str(caught.value)


def test_a_group_that_cannot_be_made_names_the_variable_to_set(pool2: RankPool) -> None:
    for text in pool2.run(_unreachable):
        assert "connectFullMesh failed. If" in text and "set GLOO_SOCKET_IFNAME" in text and "'lo7'" in text


def _limits(minutes: int) -> set[timedelta]:
    """How long calls wait in the groups of a mesh, where those of the job wait for ``minutes``."""
    job = c10d._get_default_group()._get_backend(torch.device("cpu"))
    before = job.options._timeout
    c10d._set_pg_timeout(timedelta(minutes=minutes))
    assert job.options._timeout == timedelta(minutes=minutes)
    try:
        mesh = build_mesh("gloo", inner_size=1, reducing=True)
    finally:
        c10d._set_pg_timeout(before)
    limits = [group.pg._get_backend(torch.device("cpu")).options._timeout for group in mesh.made if group.pg]
    destroy_mesh(mesh)
    return {
        timedelta(seconds=round(limit.total_seconds())) for limit in limits
    }  # torch 2.15 takes off some milliseconds


def test_groups_wait_as_long_as_the_user_chose_for_the_job(pool2: RankPool) -> None:
    assert pool2.run(_limits, 300) == [{timedelta(hours=5)}] * 2
    assert pool2.run(_limits, 1) == [{timedelta(minutes=1)}] * 2
    assert pool2.run(_limits, 10) == [{timedelta(minutes=30)}] * 2, "torch's own for gloo, where nobody chose one"


def _policies() -> tuple[set[int], set[int], int]:
    """Of gloo's threads, where the machine does not allow it and where it does; that of this one."""
    found = []
    take_turns(os.SCHED_OTHER)
    for refused in (True, False):
        with mock.patch("os.sched_setscheduler", side_effect=PermissionError) if refused else nullcontext():
            mesh = build_mesh("gloo")
        threads = [comm.parent for comm in Path("/proc/self/task").glob("*/comm") if "gloo_tcp" in comm.read_text()]
        found.append({os.sched_getscheduler(int(thread.name)) for thread in threads})
        destroy_mesh(mesh)
    return found[0], found[1], os.sched_getscheduler(0)


def test_gloos_threads_wait_for_their_turn_on_a_processor_where_the_machine_allows_it(pool2: RankPool) -> None:
    ours = os.SCHED_OTHER
    assert pool2.run(_policies) == [({ours}, {os.SCHED_BATCH}, ours)] * 2


class _Nccl(dist.ProcessGroupGloo):
    """Stands in for torch's class: notes what a communicator would be split from, and talks over gloo."""

    Options = SimpleNamespace
    split_from: list[object] = []

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        self.split_from.append(getattr(options, "split_from", None))


def _plugins() -> dict[str, Any]:
    """From torch 2.15 on "nccl" is registered as others are."""
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        return {}
    dist.Backend._ensure_backend_registered("nccl")

    def make(job: Any, _: object) -> _Nccl:
        options = SimpleNamespace(_timeout=job.timeout, split_from=job.split_from)
        return _Nccl(job.store, job.group_rank, job.group_size, options)

    return {"NCCL": dist.Backend._plugins["NCCL"]._replace(creator_fn=make)}


def _made_of_one_rank() -> tuple[list[object], str]:
    """What rank 0's own group of a job with a bound device is split from, and the device bound afterwards."""
    if dist.get_rank() == 0:
        world = dist.group.WORLD
        world.bound_device_id = torch.device("cuda", 0)
        job = SimpleNamespace(supports_splitting=True)
        try:
            with (
                mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=job),
                mock.patch.object(c10d, "is_nccl_available", return_value=True),
                mock.patch.object(c10d, "ProcessGroupNCCL", _Nccl, create=True),
                mock.patch.object(dist, "get_backend", return_value="nccl"),
                mock.patch.dict(dist.Backend._plugins, _plugins()),
            ):
                name = f"deepspeed/alone/{time.monotonic_ns()}"  # not one that was made before
                group = _new_group(name, Axis("", 1, 0, (0,)), "nccl").pg
            bound = str(world.bound_device_id)
        finally:
            world.bound_device_id = None
        dist.destroy_process_group(group)
        return _Nccl.split_from, bound
    return [], ""


def test_a_group_of_some_ranks_is_no_split_of_a_job_that_is_bound_to_its_device(pool2: RankPool) -> None:
    """A split is a call of all ranks of the job, and the ranks outside of the group make none."""
    assert pool2.run(_made_of_one_rank)[0] == ([None], "cuda:0")


# -- group getters --------------------------------------------------------------------------------------------------
_AXES = ("pp", "dp", "sp", "tp")
_FAMILIES = {
    "data_parallel": "dp",
    "sequence_parallel": "sp",
    "sequence_data_parallel": "dp sp",
    "tensor_model_parallel": "tp",
    "model_parallel": "tp",
    "pipe_parallel": "pp",
}
# Sizes of the axes, the last of which has neighbours.
_CUTS = {"alone": (1, 4, 1, 1), "tp": (1, 2, 1, 2), "sp": (1, 2, 2, 1), "pp": (2, 2, 1, 1)}
_EXPERTS = {"alone": ([0, 1], [0, 2]), "tp": ([0, 1], [0, 2]), "sp": ([0, 1], [0, 2]), "pp": ([0, 1], [0])}


def _engine(cut: str) -> Any:
    if cut == "pp":
        return pipes.engine_of(pipes.layers(4), pipes.config(1, 2))
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
    if cut == "tp":
        settings["tensor_parallel"] = {"autotp_size": 2}
    mesh = (2, 2) if cut == "sp" else None
    return deepspeed.initialize(model=Llama(), config=settings, mesh_param=mesh)[0]


def _answers(cut: str) -> dict[str, tuple[list[int], int, int]]:
    """Of each family the ranks of its group, its size, and this rank's place; both spellings say the same."""
    engine, said = _engine(cut), {}
    for family in _FAMILIES:
        of = {what: getattr(groups, f"get_{family}_{what}")() for what in ("group", "world_size", "rank")}
        hidden = {what: getattr(groups, f"_get_{family}_{what}")() for what in of}
        assert hidden == of
        ranks = comm.get_all_ranks_from_group(of["group"])
        assert (comm.get_world_size(of["group"]), comm.get_rank(of["group"])) == (of["world_size"], of["rank"])
        said[family] = ranks, of["world_size"], of["rank"]
    experts = [groups._get_expert_parallel_group("ep_size_2"), groups._get_expert_data_parallel_group("ep_size_2")]
    said["experts"] = [comm.get_all_ranks_from_group(group) for group in experts], 0, 0
    said["firsts"] = [groups._get_broadcast_src_rank(), groups.get_tensor_model_parallel_src_rank()], 0, 0
    sequence = engine.get_sequence_parallel_group()
    assert (sequence is None) == (_CUTS[cut][2] == 1) and sequence is engine.seq_parallel_group
    assert engine.dp_world_size == _CUTS[cut][1] and engine.mp_world_size == _CUTS[cut][3]
    engine.destroy()
    return said


def test_every_family_under_every_cut(pool4: RankPool) -> None:
    for cut, sizes in _CUTS.items():
        places = list(product(*map(range, sizes)))
        for rank, said in enumerate(pool4.run(_answers, cut)):
            for family, names in _FAMILIES.items():
                apart = [i for i, axis in enumerate(_AXES) if axis not in names.split()]
                ranks = [r for r, place in enumerate(places) if all(place[i] == places[rank][i] for i in apart)]
                assert said[family] == (ranks, len(ranks), ranks.index(rank)), (cut, rank, family)
            if rank == 0:
                assert tuple(said["experts"][0]) == _EXPERTS[cut], cut
            firsts = [said[family][0][0] for family in ("sequence_data_parallel", "tensor_model_parallel")]
            assert said["firsts"][0] == firsts
