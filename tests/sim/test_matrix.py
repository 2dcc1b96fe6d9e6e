"""The table of configurations on the simulated device: order, memory and waits of the real engine."""

import json
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from deepspeed.tools.simulate.events import Event
from deepspeed.tools.simulate.order import OrderCheck
from deepspeed.tools.simulate.stores import CATEGORIES
from tests.sim.matrix import CASES, PLANTED, PRINTED, TIMED_STEPS, WORLD
from tests.sim.oracle import Conflicts, waits_of
from tests.sim.planted import NOT_IN_BRUTE_FORCE, PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 550  # of a machine that is busy with much else

PUBLISHED = "event.synchronize: tier/store.py wait"
UPDATE = "end of an update: tier/behind.py wait"
SEQUENCES = {
    "a size that depends on data: sequence/tiling/logits.py run",
    "read of numbers on the device: engine/engine.py forward",
    "read of numbers on the device: sequence/tiling/offload.py run",
}
COUNTS = "read of numbers on the device: moe/exchange.py plan_routes"
NORM = "read of numbers on the device: zero/update/result.py norm_of"
UNPINNED = {"blocking copy: tier/store.py round_into", "copy with memory that is not page-locked: tier/store.py get"}
DRIVE = "wait for a drive: tier/aio.py settle"
# Where the program waits for the device in a step, by where states rest. Each further place is a step that got slower.
WAITS = {
    "host": {NORM, PUBLISHED, UPDATE, "blocking copy: zero/update/publish.py _publish"},
    "drive": {NORM, PUBLISHED, DRIVE, UPDATE, "blocking copy: tier/store.py round_into"},
}


# Of what differs most, one each: ``make test`` simulates these, ``make test-all`` every case.
COVERING = {
    "stage0", "stage2-accumulated-unclipped", "stage3-accumulated", "stage3-derived", "stage1-accumulated", "hpz",
    "recomputed-both-on-host", "parameters-on-host", "both-on-host-accumulated", "stage1-optimizer-on-host-unpinned",
    "optimizer-on-drive", "both-on-drive", "skipping", "held", "looking", "failing-on-host", "saving-both-on-host",
    "writing", "setting-on-host", "stage2-optimizer-on-host", "stage2-visiting-on-host-unchecked",
    "single-early-on-host", "experts-folded", "experts-both-on-host-unchecked", "sequences-ring", "sequences-kept",
}  # fmt: skip


def of(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: those that ``make test`` leaves out are marked."""
    return [name if name in COVERING else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


# Two communicators and two side streams, three axes of waiting; its events are what the checker of order is tried on.
EVENTS_OF = "hpz"
AGREE = (8, 1024)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Facts of the cases whose tests run, and events of one, from one process: torch gives a simulated device back at
    its end only.
    """
    out = tmp_path_factory.mktemp("sim") / "facts.json"
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    named = {spec.params.get("name") for spec in chosen if spec is not None}
    cases = [name for name in CASES if name in COVERING | named]
    worlds = {spec.params["world"] for spec in chosen if spec is not None and "world" in spec.params} & {*AGREE}
    faults = [fault for fault in PLANTED if fault in {spec.params.get("fault") for spec in chosen if spec is not None}]
    run_matrix(out, "--only", *cases, "--planted", *faults, "--events", EVENTS_OF, "--agree", *map(str, sorted(worlds)))
    return out


def run_matrix(out: Path, *options: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.sim.matrix", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture(scope="module")
def facts(out: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def conflicts(out: Path) -> Conflicts:
    """Of every two accesses in the events of one case."""
    return Conflicts(pickle.loads(Path(f"{out}.events").read_bytes()))


@pytest.mark.parametrize("name", of(CASES))
def test_every_access_is_ordered(facts: dict[str, dict[str, Any]], name: str) -> None:
    assert not facts[name]["unordered"], "\n".join(facts[name]["unordered"])


# In the first three steps parameters are compared with those at rest, for what a forward has written through ``data``.
LOOKED_FOR = {"blocking copy: zero/module/tree.py _written"}
# Where other columns are chosen, their states change places, and the next update needs them.
CHOOSING = {
    f"blocking copy: zero/update/selective/{where}"
    for where in ("columns.py compact", "columns.py __init__", "policy.py _put_home")
}
# Where the client itself reads and moves states, it waits too.
ALONE = [name for name in CASES if not name.startswith(("looking", "reading", "setting", "slots", "lending", "asking"))]


@pytest.mark.parametrize("name", of(ALONE))
def test_the_program_waits_for_the_device_only_where_it_is_known(facts: dict[str, dict[str, Any]], name: str) -> None:
    allowed = next((waits for where, waits in WAITS.items() if f"-on-{where}" in name), {NORM})
    if name.endswith("unpinned"):
        allowed = allowed | UNPINNED
    if "-on-host" in name:
        allowed = allowed | LOOKED_FOR
    if name.startswith("experts"):
        allowed = allowed | {COUNTS}
    if name.startswith("sequences"):
        allowed = allowed | SEQUENCES
    if name.startswith("zenflow"):
        allowed = allowed | CHOOSING
    if name.startswith("torn"):  # its last step is the one that makes room
        allowed = allowed | {
            "device.synchronize: tier/arena.py _slab",
            "device.synchronize: accelerator/device.py method",
        }
    assert set(facts[name]["waits"]) <= allowed


EXPERTS = [name for name in CASES if name.startswith("experts") and "-on-" not in name]


@pytest.mark.parametrize("name", of(EXPERTS))
def test_an_exchange_of_experts_waits_once_for_the_counts(facts: dict[str, dict[str, Any]], name: str) -> None:
    """In each of two blocks, and once more where it is computed again."""
    forwards = CASES[name]["gradient_accumulation_steps"] * (2 if name.endswith("recomputed") else 1)
    assert (facts[name]["times"], facts[name]["waits"]) == (2 * forwards, [COUNTS])


UNCLIPPED = [name for name in CASES if name.endswith("unclipped") and "-on-" not in name]
# The client has no hand in it, and everything is on the device.
ON_DEVICE = [name for name in CASES if name.startswith(("stage", "mics", "hpz")) and not name.endswith("unclipped")]
ON_DEVICE = [name for name in ON_DEVICE if "offload_optimizer" not in CASES[name]["zero_optimization"]]
ON_DEVICE = [name for name in ON_DEVICE if "offload_param" not in CASES[name]["zero_optimization"]]


@pytest.mark.parametrize("name", of(UNCLIPPED))
def test_without_clipping_the_program_waits_for_nothing(facts: dict[str, dict[str, Any]], name: str) -> None:
    assert not facts[name]["times"], facts[name]["waits"]


@pytest.mark.parametrize("name", of(ON_DEVICE))
def test_with_clipping_either_and_under_a_loss_scale_for_the_norm_once(
    facts: dict[str, dict[str, Any]], name: str
) -> None:
    scaled = "fp16" in CASES[name]
    assert (facts[name]["times"], facts[name]["waits"]) == ((1, [NORM]) if scaled else (0, []))


@pytest.mark.parametrize("name", of(ON_DEVICE))
def test_the_kernel_of_the_update_takes_the_factor_of_clipping_and_no_pass_over_gradients(
    facts: dict[str, dict[str, Any]], name: str
) -> None:
    assert facts[name]["scaled"] == []


# Bytes a parameter: its share of 16-bit weights, fp32 gradients and fp32 master and moments.
PARAM, GRAD, OPTIM = 2.0, 4.0, 12.0
STATES = {
    "stage0": PARAM + GRAD + OPTIM,
    "stage1": PARAM + (GRAD + OPTIM) / WORLD,
    "stage2": PARAM + (GRAD + OPTIM) / WORLD,
    "stage3": (PARAM + GRAD + OPTIM) / WORLD,
    "stage3-accumulated": (PARAM + GRAD + OPTIM) / WORLD,
    "mics": (PARAM + GRAD + OPTIM) / 4,
    "experts-stage3": (PARAM + GRAD + OPTIM) / WORLD,
    "hpz": PARAM / 2 + (GRAD + OPTIM) / WORLD,
    "stage3-fp32": 16.0 / WORLD,
    "optimizer-on-host": PARAM / WORLD,
    "parameters-on-host": (GRAD + OPTIM) / WORLD,
    "both-on-host": 0.0,
    "both-on-drive": 0.0,
}


@pytest.mark.parametrize("name", of(STATES))
def test_model_states_take_the_bytes_of_the_formula(facts: dict[str, dict[str, Any]], name: str) -> None:
    """Zhang et al. 2020, table 1; small parameters stay whole, which is the rest."""
    each = facts[name]["states"] / facts[name]["parameters"]
    assert each == pytest.approx(STATES[name], rel=2e-3, abs=1e-2)


# Of experts that ranks divide it gives back the whole ones.
@pytest.mark.parametrize("name", of(name for name in CASES if not name.startswith("experts")))
def test_destroy_gives_back_all_but_the_weights(facts: dict[str, dict[str, Any]], name: str) -> None:
    zero = CASES[name]["zero_optimization"]
    inner = zero.get("mics_shard_size") or zero.get("zero_hpz_partition_size") or WORLD
    width = PARAM if CASES[name].keys() & {"bf16", "fp16"} else 2 * PARAM
    cut = zero["stage"] == 3 and not name.startswith("single")
    each = 0.0 if "offload_param" in zero else width / (inner if cut else 1)
    assert facts[name]["left"] / facts[name]["parameters"] == pytest.approx(each, abs=2e-2)


def test_parameters_travel_to_the_host_in_their_own_width(facts: dict[str, dict[str, Any]]) -> None:
    """Rounded on the device, not fp32 for the host to round."""
    case = facts["parameters-on-host"]
    assert case["published"] / case["parameters"] == pytest.approx(PARAM / WORLD, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "down"), [("stage2-optimizer-on-host", 2.0), ("stage2-optimizer-on-host-accumulated", 8.0)]
)
def test_gradients_and_weights_cross_the_bus_in_16_bits_where_that_loses_nothing(
    facts: dict[str, dict[str, Any]], name: str, down: float
) -> None:
    """Where a window adds two gradients both sums are fp32."""
    case = facts[name]
    assert case["crossed"]["send_gradient"] / case["parameters"] == pytest.approx(down / WORLD, rel=1e-2)
    assert case["crossed"]["_climb"] / case["parameters"] == pytest.approx(PARAM / WORLD, rel=1e-2)


def test_weights_that_are_updated_in_tiles_travel_to_the_device(facts: dict[str, dict[str, Any]]) -> None:
    """All of them in each of the three steps, also where a gradient of 16 bits leaves room in its memory."""
    case = facts["optimizer-on-drive"]
    assert case["crossed"]["publish_part"] / case["parameters"] == pytest.approx(2 * PARAM / WORLD, rel=1e-2)


def test_local_sums_of_a_window_take_what_the_plan_says(facts: dict[str, dict[str, Any]]) -> None:
    """All of them in fp32, and of the model's only bucket what travels in 16 bits (``memory_plan``)."""
    case = facts["stage1-accumulated"]
    passing = case["at_peak"]["gradients"] + case["at_peak"]["reduction"]
    assert passing / case["parameters"] == pytest.approx(4.0 + 2.0, rel=2e-3)


# fp32 masters have places beside; a save has copies, and an update that fails in its first step is the one that makes
# room
BESIDES = (
    *("stage1-optimizer-on-host-unpinned", "single-stage2-early-on-host-fp32"),
    *("saving", "sooner", "torn", "slots"),
)
ARENA = [name for name in CASES if "-on-" in name and not name.startswith(BESIDES)]


@pytest.mark.parametrize("name", of(ARENA))
def test_the_plan_is_what_is_page_locked(facts: dict[str, dict[str, Any]], name: str) -> None:
    """To the byte where only states are; buffers between memory and a drive are no more than planned."""
    pages, staging = facts[name]["pages"], facts[name]["planned"].get("staging buffers", 0)
    spare = facts[name]["planned"]["gradients"] // 2 if name == "zenflow-on-host" else 0  # if an update is late
    assert pages - spare <= facts[name]["host"].get("registered", 0) <= pages + staging and pages + staging


SAVES = [name for name in CASES if name.startswith("saving")]


@pytest.mark.parametrize("name", of(SAVES))
def test_a_save_in_the_background_keeps_planned_copies_and_makes_nobody_wait(
    facts: dict[str, dict[str, Any]], name: str
) -> None:
    """Its step waits where every step does: see above. The copies are the states and a few numbers."""
    copies = facts[name]["planned"]["copies for asynchronous saves"]
    kept = facts[name]["host"]["registered"] - facts[name]["pages"]
    if "accumulated" not in name:  # saved before the first update has made slots
        assert copies <= kept <= copies + 4096
    assert not [wait for wait in facts[name]["waits"] if "checkpoint" in wait]


def test_nothing_is_page_locked_where_that_is_not_wanted(facts: dict[str, dict[str, Any]]) -> None:
    case = facts["stage1-optimizer-on-host-unpinned"]
    assert "registered" not in case["host"] and case["host"]["pageable"] >= case["pages"] > 0


def test_no_state_is_pinned_by_torch(facts: dict[str, dict[str, Any]]) -> None:
    """Its allocator would round it up to a power of two, and keep it. The late norm is a few numbers."""
    others = [name for name in CASES if name in facts and name != "sequences-kept"]  # whose activations are no states
    assert not [name for name in others if facts[name]["host"].get("pinned", 0) > 64]


@pytest.mark.parametrize("part", ["drive", "arena", "copies"])
def test_parts_alone_are_in_order(facts: dict[str, Any], part: str) -> None:
    assert facts["alone"][part] == []


SLOW = {"keys of a ring are read before they have come", "memory of an activation that is on its way is another's"}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.exhaustive) if fault in SLOW else fault for fault in PLANTED]
)
def test_a_planted_fault_is_seen(facts: dict[str, Any], fault: str) -> None:
    assert facts["planted"][fault]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_planted_race_is_seen_and_the_same_program_in_order_is_not(facts: dict[str, Any], name: str) -> None:
    """Of every kind that streams, copies, collectives and allocators make possible."""
    (planted, pairs), (ordered, none) = facts["raced"][name]
    assert planted, "the race is not seen"
    assert not ordered, "\n".join(ordered)
    assert none == 0 and (pairs > 0 or name in NOT_IN_BRUTE_FORCE)


def check_agreement(facts: dict[str, Any]) -> None:
    """One message a step, and less than 1 % of a step of 32 blocks even if all of it were exposed."""
    assert facts["messages"] == 1 and not facts["unordered"]
    assert 0 < facts["program"] < 0.01 * facts["step"] * 32 / facts["blocks"]
    assert -1e-9 <= facts["exposed"] < 1e-3 * facts["step"]
    learning = facts["learning"]
    assert learning["messages"] > 5 and 0 <= learning["exposed"] < learning["step"]


@pytest.mark.in_make_test("1024")
@pytest.mark.parametrize("world", AGREE)
def test_agreement_is_hidden_in_a_step_whatever_the_number_of_ranks(
    facts: dict[str, dict[str, Any]], world: int
) -> None:
    check_agreement(facts[f"agreement of {world}"])


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("world", [8, 64, 512, 1024, 4096])
def test_agreement_is_hidden_in_a_step_of_7b_parameters(tmp_path: Path, world: int) -> None:
    run_matrix(tmp_path / "facts.json", "--only", "--planted", "--blocks", "32", "--agree", str(world))
    check_agreement(json.loads((tmp_path / "facts.json").read_text())[f"agreement of {world}"])


def test_a_window_that_follows_from_the_batch_is_simulated_whole(facts: dict[str, dict[str, Any]]) -> None:
    assert facts["stage3-derived"]["seconds"] == facts["stage3-accumulated"]["seconds"]


def test_each_wait_for_numbers_and_copies_is_counted_once(facts: dict[str, dict[str, Any]]) -> None:
    assert {name: times for name, (times, _) in facts["reads"].items()} == {
        name: times for name, (_, times) in facts["reads"].items()
    }


def test_samples_per_second_cost_a_wait_only_in_the_update_that_says_them(facts: dict[str, dict[str, Any]]) -> None:
    timed = facts["timed"]
    assert timed["waits"] == list(range(PRINTED, TIMED_STEPS + 1, PRINTED))
    rates = [float(rate) for line in timed["lines"] for rate in re.findall("now ([0-9.]+)", line)]
    assert len(rates) == 2 and rates[-1] == pytest.approx(timed["samples"] / timed["seconds"], rel=0.02)


def test_categories_name_functions_that_are_there() -> None:
    """Or bytes would move to another row of the report without a word."""
    for file, function in CATEGORIES:
        assert f"def {function}(" in (ROOT / "deepspeed" / file).read_text(), (file, function)


def test_parameters_on_a_drive_are_read_in_every_step(facts: dict[str, dict[str, Any]]) -> None:
    """Or the case would say nothing of drives."""
    assert facts["both-on-drive"]["times"] > facts["optimizer-on-drive"]["times"]


def first_problem(events: Sequence[Event], left_out: Collection[int]) -> int | None:
    """The position at which the checker of order says something, if it does."""
    order = OrderCheck()
    for position, event in enumerate(events):
        if position not in left_out:
            order.feed(event)
        if order.problems:
            return position
    return None


def compare(conflicts: Conflicts, left_out: Collection[int]) -> bool:
    """Whether anything is without order then, which the checker has to say at the same event as brute force."""
    expected = min((second for _, second in conflicts.unordered(left_out=left_out)), default=None)
    assert first_problem(conflicts.events, left_out) == expected
    return expected is not None


def test_the_loss_of_a_single_wait_is_said_where_it_shows_unless_others_order_the_same(conflicts: Conflicts) -> None:
    waits = waits_of(conflicts.events)
    assert not conflicts.unordered() and len(waits) > 100
    needed = sum(compare(conflicts, {wait}) for wait in waits)
    assert len(waits) / 2 < needed < len(waits)


@given(share=st.floats(0, 0.2), seed=st.integers(0, 1 << 32))
def test_so_is_the_loss_of_several(conflicts: Conflicts, share: float, seed: int) -> None:
    chance = random.Random(seed)
    compare(conflicts, {wait for wait in waits_of(conflicts.events) if chance.random() < share})
