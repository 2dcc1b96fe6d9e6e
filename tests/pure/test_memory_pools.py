"""What may still be had of the memory that processes share: read from trees of control groups, and divided among the
ranks.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed.client.zero import estimate, leaf
from deepspeed.monitor import hostmem
from deepspeed.monitor.hostmem import Pool
from deepspeed.zero.memory.fit import Limits, RankMemory, limits_of, limits_present
from deepspeed.zero.plan import OffloadPlan
from tests.harness.rows import for_each

MIB = 1 << 20
SECOND = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, files: dict[str, str | int]) -> Path:
    """A root folder with ``files``; a boot id unless there is one."""
    for name, text in {"proc/sys/kernel/random/boot_id": "one machine\n", **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def stat(**numbers: int) -> str:
    return "".join(f"{key} {value}\n" for key, value in {"anon": 7, "file": 10**9, **numbers}.items())


def second(root: Path, **groups: dict[str, str | int]) -> Path:
    """A tree of the second kind: nested groups, outermost first, this process in the last one."""
    files: dict[str, str | int] = {"proc/self/mountinfo": SECOND, "sys/fs/cgroup/cgroup.controllers": "cpu memory"}
    path = ""
    for name, inside in groups.items():
        path += f"/{name}"
        files |= {f"sys/fs/cgroup{path}/{file.replace('_', '.', 1)}": text for file, text in inside.items()}
    return tree(root, {**files, "proc/self/cgroup": f"0::{path}\n"})


# -- reading -------------------------------------------------------------------------------------------------------


def test_page_cache_is_not_in_use(tmp_path: Path) -> None:
    """Shared memory, which is a part of "file" too, cannot be taken back."""
    used = stat(active_file=100 * MIB, inactive_file=50 * MIB, slab_reclaimable=MIB, shmem=300 * MIB)
    root = second(tmp_path, job={"memory_max": 3072 * MIB, "memory_current": 1000 * MIB, "memory_stat": used})
    (group,) = hostmem.memory_groups(root)
    assert group.limit == 3072 * MIB and group.free == (3072 - 1000 + 151) * MIB
    assert "/sys/fs/cgroup/job" in group.name and "memory.max 3,072 MiB" in group.name


def test_nested_groups_are_all_read(tmp_path: Path) -> None:
    """The outer one is larger, and fuller."""
    root = second(
        tmp_path,
        slice={"memory_max": 4096 * MIB, "memory_current": 3996 * MIB},
        job={"memory_max": "max", "memory_current": 900 * MIB},
        task={"memory_max": 2048 * MIB, "memory_current": 48 * MIB},
    )
    task, outer = hostmem.memory_groups(root)
    assert (task.limit, task.free) == (2048 * MIB, 2000 * MIB) and (outer.limit, outer.free) == (4096 * MIB, 100 * MIB)
    assert task.key != outer.key


def test_the_lower_of_two_limits_counts_and_leaves_nothing_where_it_is_exceeded(tmp_path: Path) -> None:
    """Above memory.high a process is held back until nothing moves any more."""
    root = second(tmp_path, job={"memory_max": 3 * MIB, "memory_high": 2 * MIB, "memory_current": MIB})
    (group,) = hostmem.memory_groups(root)
    assert group.free == MIB and "memory.high 2 MiB" in group.name
    (group,) = hostmem.memory_groups(second(tmp_path, job={"memory_current": 3 * MIB}))
    assert group.free == 0
    second(tmp_path, job={"memory_max": "max", "memory_high": "max"})
    assert hostmem.memory_groups(root) == [], "without a limit there is no group"


FIRST = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {within} /mnt/memory rw,relatime shared:1 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


@pytest.mark.parametrize(
    ("within", "path", "folder"),
    [
        ("/", "/jobs/a", "jobs/a"),  # on the machine itself
        ("/docker/x", "/docker/x", ""),  # a container that sees the machine's paths
        ("/docker/x", "/docker/x/inner", "inner"),
        ("/", "/docker/x", ""),  # one whose tree begins at its own group
        ("/", "/../other", ""),  # a group outside the namespace
    ],
)
def test_groups_of_the_first_kind_are_where_they_are_mounted(
    tmp_path: Path, within: str, path: str, folder: str
) -> None:
    files: dict[str, str | int] = {
        "proc/self/mountinfo": FIRST.format(within=within),
        "proc/self/cgroup": f"9:name=systemd:/\n4:memory:{path}\n3:cpu,cpuacct:/\n0::/\n",
        f"mnt/memory/{folder}/memory.limit_in_bytes": 2048 * MIB,
        f"mnt/memory/{folder}/memory.usage_in_bytes": 600 * MIB,
        f"mnt/memory/{folder}/memory.stat": stat(
            active_file=1, total_active_file=90 * MIB, total_inactive_file=10 * MIB
        ),
        "mnt/other/memory.limit_in_bytes": 1,
    }
    if folder:
        files["mnt/memory/memory.limit_in_bytes"] = 9223372036854771712
    (group,) = hostmem.memory_groups(tree(tmp_path, files))
    assert group.free == (2048 - 600 + 100) * MIB and "memory.limit_in_bytes 2,048 MiB" in group.name


def test_the_machine_is_a_pool_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = second(tmp_path / "a", job={"memory_max": 6144 * MIB, "memory_current": MIB})
    machine_memory = SimpleNamespace(total=8192 * MIB, available=4096 * MIB)
    monkeypatch.setattr(hostmem.psutil, "virtual_memory", lambda: machine_memory)
    group, machine = hostmem.memory_pools(root)
    assert machine.free == 4096 * MIB and machine.limit == 8192 * MIB and "4,096 of 8,192 MiB" in machine.name
    assert machine.key != group.key
    other = tree(tmp_path / "b", {"proc/sys/kernel/random/boot_id": "another machine\n"})
    assert hostmem.memory_pools(other)[0].key != machine.key


def test_a_c_library_without_glibcs_calls_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmem, "_LIBC", SimpleNamespace())
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))] + ["LD_PRELOAD"]:
        monkeypatch.delenv(name, raising=False)
    hostmem.return_large_blocks()
    hostmem.HeapTrimmer().passed(1 << 30)


def test_this_machine_can_be_read() -> None:
    for pool in hostmem.memory_pools():
        assert 0 <= pool.free <= pool.limit and pool.name and pool.key, pool


# -- dividing ------------------------------------------------------------------------------------------------------


def pool(name: str, free: int) -> Pool:
    return Pool((name,), f"pool {name}", 10**9, free)


def rank(*pools: Pool, host: int = 0, replaced: int = 0) -> RankMemory:
    return RankMemory(host, 0, replaced, pools)


def room(*ranks: RankMemory) -> int:
    found = limits_present(ranks)
    return found.host - found.host_used


def test_one_rank_has_the_pool_less_an_eighth() -> None:
    found = limits_present([rank(pool("a", 8000), host=500)])
    assert found == Limits(host=7000 + 500, host_used=500, source="pool a")


def test_ranks_of_one_machine_share_it_and_of_several_the_fullest_decides() -> None:
    assert room(rank(pool("a", 8000)), rank(pool("a", 8000))) == 3500
    assert "which 2 ranks share" in limits_present([rank(pool("a", 8000)), rank(pool("a", 7000))]).source
    assert room(rank(pool("a", 8000)), rank(pool("b", 1600))) == 1400
    assert room(rank(pool("a", 8000)), rank(pool("a", 8000)), rank(pool("b", 5000))) == 3500


def test_groups_of_their_own_inside_a_group_they_share() -> None:
    """The tightest one decides, not the smallest."""
    inner = [rank(pool(f"task {i}", 4000), pool("job", 16_000)) for i in range(4)]
    assert room(*inner) == 3500
    tight = [rank(pool(f"task {i}", 4000), pool("job", 8000)) for i in range(4)]
    assert room(*tight) == 1750 and "pool job" in limits_present(tight).source


def test_what_the_models_hold_now_is_theirs_to_use_again() -> None:
    assert room(rank(pool("a", 6000), replaced=2000)) == 7000
    assert room(rank(pool("a", 6000), replaced=2000), rank(pool("a", 6000))) == 3500


def test_a_full_pool_is_a_limit_and_no_pool_is_none() -> None:
    assert limits_present([rank(pool("a", 0))]).host > 0
    assert limits_present([rank(host=900)]) == Limits(host_used=0)


def test_a_stated_limit_counts_by_the_fullest_rank() -> None:
    ranks = [RankMemory(100, 7, 0, (pool("a", 1),)), RankMemory(300, 5, 0, (pool("a", 1),))]
    assert limits_of(OffloadPlan(host_limit=1000, device_limit=50), ranks) == Limits(1000, 50, 300, 7)


# -- estimate -------------------------------------------------------------------------------------------------------
P, L, N_PER, NODES, F = 1_000_000, 10_000, 4, 2, 1.5
G = N_PER * NODES


@for_each(
    ("choices", "cpu", "gpu"),
    [
        ((True, True, True), 18 * P / NODES * F, 4 * L),
        ((True, True, False), max(4 * P * N_PER, 18 * P / NODES) * F, 4 * L),
        ((True, False, True), 16 * P / NODES * F, 4 * L + 2 * P / G),
        ((True, False, False), max(4 * P * N_PER, 16 * P / NODES) * F, 4 * L + 2 * P / G),
        ((False, False, True), 4 * L * N_PER * F, 4 * L + 18 * P / G),
        ((False, False, False), 4 * P * N_PER * F, 4 * L + 18 * P / G),
    ],
)
def test_zero3(choices: tuple[bool, bool, bool], cpu: float, gpu: float) -> None:
    assert estimate.estimate_zero3_model_states_mem_needs(P, L, N_PER, NODES, *choices) == (int(cpu), int(gpu), 4 * L)


def test_zero2() -> None:
    needs = estimate.estimate_zero2_model_states_mem_needs
    assert needs(P, N_PER, NODES, True) == (P * max(4 * G, 16) * F, 2 * P)
    assert needs(P, 1, 1, True) == (P * 16 * F, 2 * P)
    assert needs(P, N_PER, NODES, False) == (4 * P * N_PER * F, 2 * P + 18 * P // G)


def test_live_counts_shared_parameters_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.Linear(4, 3))
    model[1].weight = model[0].weight
    assert estimate.model_size(model) == (40 + 15, 40)
    estimate.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    estimate.estimate_zero2_model_states_mem_needs_all_live(model)
    out = capsys.readouterr().out
    assert out.count("offload_optimizer=") == 8 and "1 node, 2 GPUs per node" in out


class Expert(nn.Linear):
    pass


def _model() -> nn.Module:
    return nn.ModuleDict({"experts": nn.ModuleList([Expert(2, 2), Expert(2, 2)]), "head": nn.Linear(2, 2)})


@for_each("wanted", [[Expert], ["Expert"], [f"{__name__}.Expert"]])
def test_leaf_by_class_or_name(wanted: list) -> None:
    model = _model()
    found = leaf.set_z3_leaf_modules(model, wanted)
    assert found == list(model["experts"]) == leaf.get_z3_leaf_modules(model)
    assert model["experts"][0]._z3_leaf and not leaf.z3_leaf_module(model["head"])
    assert leaf.unset_z3_leaf_modules(model, wanted) == found and leaf.get_z3_leaf_modules(model) == []


def test_leaf_by_module_name() -> None:
    model = _model()
    assert leaf.set_z3_leaf_modules_by_name(model, ["experts.1", "none"]) == ([model["experts"][1]], ["none"])
    assert leaf.set_z3_leaf_modules_by_suffix(model, ["0", "ead"]) == ([model["experts"][0]], ["ead"])
    leaf.set_z3_leaf_modules_by_name(model, "experts.1", flag=False)
    assert leaf.get_z3_leaf_modules(model) == [model["experts"][0]]
    assert not leaf.z3_leaf_parameter(nn.Parameter(torch.zeros(1)))


def test_leaf_nothing_found() -> None:
    for call, wanted in (
        (leaf.set_z3_leaf_modules, [nn.Conv2d]),
        (leaf.unset_z3_leaf_modules, ["Missing"]),
        (leaf.set_z3_leaf_modules_by_name, ["nowhere"]),
        (leaf.set_z3_leaf_modules_by_suffix, ["nowhere"]),
    ):
        with pytest.raises(ValueError, match="No module of ModuleDict"):
            call(_model(), wanted)
        none = call(_model(), wanted, raise_if_not_found=False)
        assert none in ([], ([], ["nowhere"]))
    assert len(leaf.set_z3_leaf_modules(_model(), "Expert")) == 2
    with pytest.raises(TypeError):
        leaf.set_z3_leaf_modules(_model(), 3)
