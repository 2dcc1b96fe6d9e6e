"""The memory plan: numbers computed by hand, and the settings that fit within a limit."""

import math
from dataclasses import replace
from typing import Any

import pytest

from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config import load_config
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.memory.fit import (
    Fitted,
    Limits,
    Line,
    MemoryPlan,
    UnitSize,
    Widths,
    fit,
    gradients_on_drive,
    memory_plan,
)
from deepspeed.zero.plan import Tier, ZeroPlan, make_plan
from tests.harness.rows import for_each

N = 8192  # elements of a unit: whole pages in any dtype, also a quarter of it
DRIVE = {"device": "nvme", "nvme_path": "/drive", "buffer_count": 4}
PARAMS = {**DRIVE, "max_in_cpu": 0}


def plan_of(zero: dict[str, Any], ranks: int = 1, **changes: Any) -> ZeroPlan:
    """The plan of a configuration; tiles may be as small as the numbers here."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"prefetch_bucket_size": 0, **zero}, **changes}
    plan = make_plan(load_config(config, world_size=ranks), ranks)
    tile = zero.get("sub_group_size")
    return plan if tile is None else replace(plan, offload=replace(plan.offload, tile_numel=tile))


def sizes(plan: ZeroPlan, *numels: int, width: int = 2, frozen: tuple[int, ...] = ()) -> list[UnitSize]:
    return [UnitSize(n, width, plan.row(trainable=i not in frozen, persistent=False)) for i, n in enumerate(numels)]


def lines(
    plan: ZeroPlan, units: list[UnitSize], ways: tuple[int, ...] = (1,), *, shared: bool = False, **widths: int
) -> dict[str, Line]:
    found = memory_plan(units, ways, plan.offload, Widths(**widths), prefetch=plan.prefetch_numel, shared=shared)
    return {line.what: line for line in found.lines}


# -- by hand -------------------------------------------------------------------------------------------------------


def test_nothing_sharded_in_16_bit() -> None:
    """2 + 4 + 12 bytes an element, all on the device, and one more local sum while the window is open, and at its end a
    unit of it in the width in which it travels. Where each micro-batch is a window, only what travels.
    """
    plan = plan_of({"stage": 0})
    found = lines(plan, sizes(plan, N, N))
    assert found["parameters"] == Line("parameters", device=2 * N * 2)
    assert found["gradients"] == Line("gradients", device=2 * N * 4)
    assert found["optimizer state"] == Line("optimizer state", device=2 * N * 12)
    assert found["gradients on their way"].device == 2 * N * 4 + N * 2
    assert lines(plan, sizes(plan, N, N), window=False)["gradients on their way"].device == 3 * N * 2
    assert lines(plan, sizes(plan, N, N), accumulate=2)["gradients on their way"].device == 2 * N * 2
    assert "units gathered at once" not in found and "staging buffers" not in found


def test_an_fp32_parameter_is_its_own_master() -> None:
    plan = plan_of({"stage": 0})
    assert lines(plan, sizes(plan, N, width=4))["optimizer state"].device == N * 8
    plan = plan_of({"stage": 1, "offload_optimizer": {"device": "cpu"}})
    assert lines(plan, sizes(plan, N, width=4))["optimizer state"] == Line("optimizer state", host=N * 12)
    # Where the device is the host, offloading to it makes no second copy.
    assert lines(plan, sizes(plan, N, width=4), shared=True)["optimizer state"] == Line("optimizer state", host=N * 8)
    # Beside a device both are copies in host memory; what max_in_cpu keeps where that is the device is its own master.
    plan = plan_of({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {**DRIVE, "max_in_cpu": N}})
    assert lines(plan, sizes(plan, N, N, width=4))["optimizer state"].host == 2 * N * 12
    assert lines(plan, sizes(plan, N, N, width=4), shared=True)["optimizer state"].host == N * 8 + N * 12


@pytest.mark.parametrize("numel", [1, 1024, 1025])
def test_states_in_host_memory_take_whole_pages(numel: int) -> None:
    """Each is a piece of the arena of its own; slots are the optimizer's."""
    plan = plan_of({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})
    found = memory_plan(sizes(plan, numel), (1,), plan.offload, Widths(), prefetch=0, shared=False)
    pages = [-(-width * numel // 4096) * 4096 for width in (2, 4, 4)]
    host = {line.what: line.host for line in found.lines}
    assert found.pages == sum(pages)
    assert [host["parameters"], host["gradients"], host["optimizer state"]] == [*pages[:2], pages[2] + 8 * numel]


def test_prefetch_adds_the_next_unit_and_at_most_two_typical_ones() -> None:
    for prefetch, ahead in ((0, 0), (100, N), (N + 100, N + 100), (10**9, 2 * N)):
        plan = plan_of({"stage": 3, "prefetch_bucket_size": prefetch}, 2)
        found = lines(plan, sizes(plan, N, N, N, 5 * N), (2,))
        assert found["units gathered at once"].device == (5 * N + ahead) * 2


ON_HOST = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
RESTS = ("parameters", "gradients", "optimizer state")
# zero, ways, units (a frozen one is negative), widths; bytes of parameters, gradients and states; units whole at a time
# and gradients on their way.
BY_HAND: list[tuple[Any, ...]] = [
    # Over four ranks everything is a quarter, rounded up; two units are whole at times, three gradients travel.
    ({"stage": 3}, (4,), (N + 1, N), {}, [(N // 2 + 1) * w for w in (2, 4, 12)], (N + 1) * 2, 3 * (N + 1) * 2),
    ({"stage": 2}, (4,), (N,), {}, [2 * N, N, 3 * N], 0, 6 * N),
    # Shard groups of two: halves of everything. Secondary shards: halves of parameters, quarters of the rest.
    ({"stage": 3, "mics_shard_size": 2}, (2, 2), (N,), {}, [N, 2 * N, 6 * N], None, None),
    ({"stage": 3, "zero_hpz_partition_size": 2}, (2, 2), (N,), {}, [N, N, 3 * N], None, None),
    ({"stage": 0}, (1,), (-N, 7), {}, [(N + 7) * 2, 7 * 4, 7 * 12], None, None),
    ({"stage": 0}, (1,), (-N,), {}, [2 * N, 0, 0], 0, 0),
    ({"stage": 3}, (2,), (N,), {"accumulate": 2, "slots": 4, "wire": 4}, [N, N, N // 2 * 8], None, 12 * N),
    (ON_HOST, (2,), (N,), {}, [N, 2 * N, 6 * N], 2 * N, None),
]


@for_each(("zero", "ways", "numels", "widths", "rests", "whole", "travel"), BY_HAND)
def test_by_hand(
    zero: Any, ways: Any, numels: Any, widths: Any, rests: list[int], whole: int | None, travel: int | None
) -> None:
    plan = plan_of(zero, math.prod(ways))
    frozen = tuple(i for i, n in enumerate(numels) if n < 0)
    found = lines(plan, sizes(plan, *map(abs, numels), frozen=frozen), ways, **widths)
    place = "host" if zero is ON_HOST else "device"
    for name, wanted in zip(RESTS, rests, strict=True):
        assert found.get(name, Line(name)) == Line(name, **{place: wanted})
    for name, wanted in (("units gathered at once", whole), ("gradients on their way", travel)):
        assert wanted is None or found.get(name, Line(name)).device == wanted
    assert "staging buffers" not in found


def test_offloaded_to_the_drive() -> None:
    """A tile holds master and slots of 400 elements, three of them; parameters pass in pieces of 100 elements, two at
    once.
    """
    blocks = {"offload_optimizer": {**DRIVE, "buffer_count": 3}, "offload_param": {**PARAMS, "buffer_count": 2}}
    plan = plan_of({"stage": 3, "sub_group_size": 400, **blocks}, 2)
    plan = replace(plan, offload=replace(plan.offload, param_piece_numel=100))
    found = lines(plan, sizes(plan, N, 4 * N), (2,))
    assert found["parameters"] == Line("parameters", drive=5 * N)
    assert found["gradients"] == Line("gradients", host=5 * N // 2 * 4)
    assert found["optimizer state"] == Line("optimizer state", drive=5 * N // 2 * 12)
    assert found["staging buffers"] == Line("staging buffers", host=3 * 400 * 12 + 2 * 100 * 2)


def test_buffers_are_no_larger_than_what_passes_through_them() -> None:
    plan = plan_of({"stage": 3, "offload_optimizer": DRIVE, "offload_param": PARAMS})
    found = lines(plan, sizes(plan, N, 10))
    # four of five buffers: three shards ahead and the one in use
    assert found["staging buffers"].host == 4 * N * 12 + 4 * N * 2


def test_gradients_on_the_drive_need_buffers_of_a_whole_shard() -> None:
    plan = plan_of({"stage": 3, "sub_group_size": 100, "offload_optimizer": {**DRIVE, "buffer_count": 2}}, 2)
    units = [replace(u, row=gradients_on_drive(u.row)) for u in sizes(plan, N)]
    found = lines(plan, units, (2,))
    assert found["gradients"] == Line("gradients", drive=N // 2 * 4)
    assert found["staging buffers"].host == 2 * 100 * (12 + 4) + 3 * (N // 2) * 4


def test_gradients_move_only_where_the_state_is_on_the_drive() -> None:
    for block in ({}, {"offload_optimizer": {"device": "cpu"}}):
        row = plan_of({"stage": 3, **block}).regular
        assert gradients_on_drive(row) is row
    frozen = plan_of({"stage": 3, "offload_optimizer": DRIVE}).regular.frozen()
    assert gradients_on_drive(frozen) is frozen


def test_max_in_cpu_fills_up_with_the_first_shards() -> None:
    plan = plan_of({"stage": 3, "offload_param": {**DRIVE, "max_in_cpu": N + 2048}})
    found = lines(plan, sizes(plan, N, N, 2048, 1))
    assert found["parameters"] == Line("parameters", host=(N + 2048) * 2, drive=(N + 1) * 2)


def test_copies_for_asynchronous_saves_are_what_each_rank_writes() -> None:
    """Equal replicas share the writing; what rests on a drive is not copied; a frozen weight is copied as it is."""
    background, copies = {"checkpoint": {"async": True}}, "copies for asynchronous saves"
    for stage in (0, 1, 3):
        plan = plan_of({"stage": stage}, 4, **background)
        found = lines(plan, sizes(plan, N, N, frozen=(1,)), (4,))
        assert found[copies] == Line(copies, host=N // 4 * 12 + N // 4 * 2)
    plan = plan_of({"stage": 3, "offload_optimizer": DRIVE, "offload_param": PARAMS}, 1, **background)
    assert copies not in lines(plan, sizes(plan, N, N, frozen=(1,)))
    assert copies not in lines(plan_of({"stage": 3}), sizes(plan_of({"stage": 3}), N))


def test_on_a_machine_without_accelerator_everything_is_host_memory() -> None:
    plan = plan_of({"stage": 3, "offload_optimizer": DRIVE}, 2)
    units = sizes(plan, N)
    apart = memory_plan(units, (2,), plan.offload, Widths(), prefetch=0, shared=False)
    shared = memory_plan(units, (2,), plan.offload, Widths(), prefetch=0, shared=True)
    landing = 3 * (N // 2) * 4  # gradients that a device holds until they are copied to the host
    assert shared.device == 0 and shared.host == apart.host + apart.device - landing and shared.drive == apart.drive
    assert apart.device and apart.host and apart.drive


def test_every_communicator_of_a_device_is_counted_there() -> None:
    """By an amount that is assumed; of it nothing can move."""
    plan = plan_of({"stage": 3}, 8)
    units = sizes(plan, 800, 800)
    options = {"prefetch": plan.prefetch_numel, "shared": False}
    alone, found = (memory_plan(units, (8,), plan.offload, Widths(), communicators=n, **options) for n in (0, 3))
    assert [line for line in found.lines if line not in alone.lines] == [Line("communicators: 3, assumed", 1200 << 20)]
    assert found.device - alone.device == 1200 << 20 and "communicators: 3, assumed" in found.table()
    limits = Limits(device=1 << 30)
    assert fit(plan, units, (8,), Widths(), limits, shared=False, communicators=2).memory.device > 800 << 20
    with pytest.raises(DeepSpeedConfigError, match=r"(?s)memory.device_limit is 1,024 MiB.*communicators: 3, assumed"):
        fit(plan, units, (8,), Widths(), limits, shared=False, communicators=3)


def test_communicators_are_groups_of_several_ranks_on_the_device_each_once() -> None:
    def group(name: str, backend: str, ranks: int = 8) -> AxisGroup:
        return AxisGroup(name, ranks, 0, tuple(range(ranks)), backend)  # type: ignore[arg-type]

    world, host = group("world", "nccl"), group("host", "gloo")
    plain = Mesh((world,), world, world, world, host, host=host, made=(host,))
    assert plain.communicators == {"world"}
    cut = replace(plain, groups=(group("dp", "nccl", 4),), tp=group("tp", "nccl", 2), pp=group("pp", "nccl", 1))
    assert cut.communicators == {"world", "dp", "tp"}
    more = replace(plain, reducing=group("reductions", "nccl"))
    assert more.communicators == {"world", "reductions"}
    assert not Mesh((host,), host, host, host, host).communicators


def test_the_table_is_for_people() -> None:
    found = MemoryPlan((Line("parameters", device=3 << 20, host=1 << 20, drive=2048 << 20),), shared=False)
    head, row, total = found.table().splitlines()
    assert head.split() == ["model", "states", "of", "one", "rank", "device", "host", "drive"]
    assert row.split() == ["parameters", "3", "MiB", "1", "MiB", "2.0", "GiB"]
    assert total.split() == ["together", "3", "MiB", "1", "MiB", "2.0", "GiB"]
    assert len({len(line) for line in (head, row, total)}) == 1
    shared = replace(found, shared=True).table().splitlines()
    assert shared[1].split() == ["parameters", "-", "4", "MiB", "2.0", "GiB"]
    assert shared[2].split() == ["together", "-", "4", "MiB", "2.0", "GiB"]


# -- limits --------------------------------------------------------------------------------------------------------


def fitted(
    plan: ZeroPlan, units: list[UnitSize], limits: Limits, *, ways: tuple[int, ...] = (1,), shared: bool = True
) -> Fitted:
    return fit(plan, units, ways, Widths(), limits, shared=shared)


def refusal(plan: ZeroPlan, units: list[UnitSize], limits: Limits, *, shared: bool = True) -> str:
    with pytest.raises(DeepSpeedConfigError) as told:
        fitted(plan, units, limits, shared=shared)
    return str(told.value)


def test_without_limits_nothing_moves() -> None:
    plan = plan_of({"stage": 3, "offload_optimizer": DRIVE})
    units = sizes(plan, N)
    assert fitted(plan, units, Limits()).rows == [u.row for u in units]


def test_what_is_in_use_already_counts() -> None:
    plan = plan_of({"stage": 3})
    units = sizes(plan, N)
    need = fitted(plan, units, Limits()).memory.host
    fitted(plan, units, Limits(host=need + 10_000, host_used=10_000))
    said = refusal(plan, units, Limits(host=need + 10_000, host_used=10_001))
    assert "memory.host_limit" in said and "parameters" in said


def settings_in(said: str, zero: dict[str, Any]) -> dict[str, Any]:
    """The zero_optimization keys that an advice names."""
    advice = said.split("It fits with ")[1]
    changes: dict[str, Any] = {}
    for block in ("offload_optimizer", "offload_param"):
        for device in ("cpu", "nvme"):
            if f'zero_optimization.{block}.device "{device}"' in advice:
                changes[block] = {"device": device, **({"nvme_path": "/drive"} if device == "nvme" else {})}
    if "max_in_cpu 0" in advice:
        changes["offload_param"] = {
            **zero.get("offload_param", {}),
            **changes.get("offload_param", {}),
            "max_in_cpu": 0,
        }
    if "sub_group_size 1048576" in advice:
        changes["sub_group_size"] = 1 << 20
    if "buffer_count 2" in advice:
        for block in ("offload_optimizer", "offload_param"):
            if block in {**zero, **changes}:
                changes[block] = {**zero.get(block, {}), **changes.get(block, {}), "buffer_count": 2}
    return changes


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("start", ["none", "cpu", "nvme", "params"])
def test_every_advice_fits(stage: int, width: int, start: str) -> None:
    """For a whole range of limits: it fits, or the advice that is given fits, or nothing does."""
    blocks: dict[str, Any] = {"none": {}, "cpu": {"offload_optimizer": {"device": "cpu"}}}
    blocks |= {"nvme": {"offload_optimizer": DRIVE}, "params": {"offload_optimizer": DRIVE, "offload_param": DRIVE}}
    zero = {"stage": 3 if start == "params" else stage, **blocks[start]}
    plan = plan_of(zero, 2)
    units = sizes(plan, *[1_000_000] * 30, width=width)
    outcomes = set()
    for limit in range(5_000_000, 600_000_000, 34_000_000):
        try:
            found = fitted(plan, units, Limits(host=limit), ways=(2,))
            assert found.memory.host <= limit
            outcomes.add("fits")
        except DeepSpeedConfigError as error:
            said = str(error)
            if "It fits with" not in said:
                outcomes.add("no")
                assert "raise the limit or use more ranks" in said
                continue
            outcomes.add("advice")
            better = plan_of({**zero, **settings_in(said, zero)}, 2)
            after = fitted(better, sizes(better, *[1_000_000] * 30, width=width), Limits(host=limit), ways=(2,))
            assert after.memory.host <= limit, said
    assert {"fits", "no"} <= outcomes


def test_impossible_limits_say_the_least_that_is_possible() -> None:
    plan = plan_of({"stage": 3})
    said = refusal(plan, sizes(plan, 10**9), Limits(host=1 << 20))
    assert "raise the limit or use more ranks" in said and "memory.host_limit is 1 MiB" in said
    assert "It fits with" not in said


def test_the_device_has_its_own_limit() -> None:
    plan = plan_of({"stage": 3})
    units = sizes(plan, *[N] * 1000)
    limits = Limits(device=4_000_000, device_used=100)
    said = refusal(plan, units, limits, shared=False)
    assert "memory.device_limit" in said and 'offload_optimizer.device "cpu"' in said and "of the device" in said, said
    better = plan_of({"stage": 3, **settings_in(said, {})})
    assert fitted(better, sizes(better, *[N] * 1000), limits, shared=False).memory.device <= 4_000_000


def test_parameters_that_stay_whole_are_not_sent_away() -> None:
    plan = plan_of({"stage": 2}, 2)
    with pytest.raises(DeepSpeedConfigError) as told:
        fit(plan, sizes(plan, 1_000_000), (2,), Widths(), Limits(device=100), shared=False)
    assert "offload_param" not in str(told.value)


# -- limits that nobody stated -----------------------------------------------------------------------------------

GROUP = "control group /job (memory.max 3 MiB)"
BIG = (100_000,) * 30


def big(**zero: Any) -> tuple[ZeroPlan, list[UnitSize]]:
    """Plan stage 3 with small tiles, for units that need tens of MB."""
    plan = plan_of({"stage": 3, "sub_group_size": 10_000, **zero})
    return plan, sizes(plan, *BIG)


def present(nbytes: int) -> Limits:
    return Limits(host=nbytes, source=GROUP)


def elements(found: Fitted, what: str) -> tuple[int, int]:
    """Bytes in memory and on the drive."""
    (line,) = (line for line in found.memory.lines if line.what == what)
    return line.device + line.host, line.drive


def test_gradients_go_first_and_the_log_says_so() -> None:
    plan, units = big(offload_optimizer=DRIVE, offload_param=DRIVE)
    whole = fitted(plan, units, Limits())
    assert whole.moved == "" and whole.offload is plan.offload
    found = fitted(plan, units, present(whole.memory.host - 1))
    assert elements(found, "gradients") == (0, 12_000_000) and elements(found, "parameters") == (6_000_000, 0)
    assert found.offload is plan.offload, "parameters stay"
    assert fitted(plan, units, Limits(host=whole.memory.host)).rows == whole.rows, "what fits exactly fits"
    assert found.moved.startswith(f"{GROUP} leaves a rank") and "memory.host_limit" in found.moved
    assert "11 MiB of gradients rest on the drive" in found.moved
    assert fitted(plan, units, Limits(host=whole.memory.host - 1)).moved == "", "the user knows a limit of their own"


def test_then_as_many_parameters_as_have_to() -> None:
    """Every limit between the smallest plan and the one of gradients alone is kept, with no more on the drive than that
    takes.
    """
    plan, units = big(offload_optimizer=DRIVE, offload_param=DRIVE)
    before = elements(fitted(plan, units, present(8_000_000)), "parameters")[0]
    for limit in range(7_900_000, 3_400_000, -100_000):
        found = fitted(plan, units, present(limit))
        here, drive = elements(found, "parameters")
        assert found.memory.host <= limit < found.memory.host + 2 * 200_000
        assert here + drive == 6_000_000 and here <= before
        assert "MiB of parameters and 11 MiB of gradients rest on the drive" in found.moved
        before = here
    assert before < 1_500_000


@pytest.mark.parametrize("param", [{}, {"offload_param": {"device": "cpu"}}], ids=["nothing", "cpu"])
def test_parameters_use_the_folder_of_the_optimizer_state(param: dict[str, Any]) -> None:
    plan, units = big(offload_optimizer=DRIVE, **param)
    found = fitted(plan, units, present(5_000_000))
    assert {row.param.tier for row in found.rows} == {Tier.NVME} and found.offload.param_folder == "/drive"
    assert found.memory.host <= 5_000_000 and elements(found, "parameters")[0] > 0
    # Parameters of an accelerator are not in host memory.
    apart = 5_000_000 if param else 2_000_000
    found = fitted(plan, units, present(apart), shared=False)
    assert {row.param.tier for row in found.rows} == {Tier.NVME if param else Tier.DEVICE}
    assert found.memory.host <= apart


def test_parameters_that_every_rank_holds_whole_stay() -> None:
    """Small ones under stage 3, all under stage 2."""
    plan, units = big(offload_optimizer=DRIVE)
    units.append(UnitSize(50, 2, plan.row(trainable=True, persistent=True)))
    assert fitted(plan, units, present(5_000_000)).rows[-1].param.tier is Tier.DEVICE
    said = refusal(*big(stage=2, offload_optimizer=DRIVE), present(5_000_000))
    assert said.startswith(f"{GROUP} leaves a rank 5 MiB, but") and "offload_param" not in said


def test_a_refusal_names_the_group_and_settings_that_fit() -> None:
    plan, units = big(offload_optimizer={"device": "cpu"})
    said = refusal(plan, units, present(20_000_000))
    assert GROUP in said and "It fits with" in said and "memory.host_limit" in said
    assert 'offload_optimizer.device "nvme"' in said
    assert fitted(*big(offload_optimizer=DRIVE), present(20_000_000)).memory.host <= 20_000_000
    said = refusal(plan, units, present(100_000))
    assert "raise the limit or use more ranks" in said and "A memory.host_limit of yours counts" in said


def test_more_than_there_is_is_a_doubt() -> None:
    plan = plan_of({"stage": 0})
    memory = fitted(plan, sizes(plan, *BIG), Limits()).memory
    assert present(memory.host).doubt(memory) == Limits().doubt(memory) == ""
    said = present(memory.host - 1).doubt(memory)
    assert said.startswith(f"{GROUP} leaves a rank") and "may end the run" in said


# -- configuration -----------------------------------------------------------------------------------------------


@for_each(
    ("text", "nbytes"),
    [(3 << 30, 3 << 30), ("3GiB", 3 << 30), ("3 GiB", 3 << 30), ("500MB", 500_000_000), ("1.5gib", 3 << 29), ("7", 7)],
)
def test_limits_may_be_text(text: str | int, nbytes: int) -> None:
    assert plan_of({"stage": 3}, memory={"host_limit": text}).offload.host_limit == nbytes
    assert plan_of({"stage": 3}, memory={"device_limit": text}).offload.device_limit == nbytes


@for_each("text", ["three", "3 apples", -1, 0, "0GiB", True, [], "", "1e9GiB", "-3GiB", float("nan"), float("inf")])
def test_nonsense_limits_are_refused(text: Any) -> None:
    with pytest.raises(DeepSpeedConfigError, match="host_limit"):
        plan_of({"stage": 3}, memory={"host_limit": text})


def test_no_limit_is_no_limit() -> None:
    for memory in ({}, {"memory": {}}, {"memory": {"host_limit": None}}):
        assert plan_of({"stage": 3}, **memory).offload.host_limit == 0
