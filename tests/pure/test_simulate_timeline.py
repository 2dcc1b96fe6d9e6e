"""The clock, on sequences short enough to reckon by hand, and the machine's constants."""

import json
from pathlib import Path

import pytest

from deepspeed.errors import PipelineError, UsageError
from deepspeed.tools.simulate.costs import CONSTANTS, Machine, load_machine, machines
from deepspeed.tools.simulate.events import COMPUTE, HOST, Event, HostWait, Launch, Phase, Record, Talk, Wait, Work
from deepspeed.tools.simulate.timeline import Meetings, Timeline, together
from tests.harness.rows import for_each

SIDE = 1
# One flop or byte a second, nothing for launches: times are what the work says.
NOTHING = ("launch_s", "wait_s", "kernel_s", "copy_s", "node_hop_s", "network_hop_s", "matmul_half")
PLAIN = dict.fromkeys(CONSTANTS, 1.0) | dict.fromkeys(NOTHING, 0.0)
PLAIN |= {"processors": 4.0, "gpus_per_node": 8.0, "memory_rate": 1e30}


def kernel(stream: int, seconds: float, name: str = "work", label: str = "") -> Launch:
    return Launch(stream, name, (), (), Work("kernel", flops=seconds), label=label)


def play(*events: Event, **constants: float) -> Timeline:
    timeline = Timeline(Machine("plain", PLAIN | constants), keep=True)
    for event in events:
        timeline.feed(event)
    return timeline


def test_streams_run_beside_each_other_and_each_in_order() -> None:
    timeline = play(kernel(COMPUTE, 3), kernel(SIDE, 4), kernel(COMPUTE, 2))
    assert timeline.end == 5
    assert timeline.busy == {COMPUTE: 5, SIDE: 4}


def test_what_the_compute_stream_waits_for_is_exposed_by_cause() -> None:
    gather = kernel(SIDE, 5, "all_gather", "block"), Record(1, SIDE), Wait(COMPUTE, 1)
    timeline = play(kernel(COMPUTE, 3), *gather, kernel(COMPUTE, 1))
    assert timeline.end == 6
    assert timeline.exposed == {("all_gather", "block"): 2}


def test_a_cause_travels_through_a_side_stream() -> None:
    timeline = play(kernel(2, 5, "all_gather", "block"), Record(1, 2), Wait(SIDE, 1), Record(2, SIDE), Wait(COMPUTE, 2))
    assert timeline.exposed == {("all_gather", "block"): 5}


def test_a_wait_for_what_is_done_costs_nothing() -> None:
    timeline = play(kernel(SIDE, 1), Record(1, SIDE), kernel(COMPUTE, 3), Wait(COMPUTE, 1), Wait(COMPUTE, 99))
    assert timeline.end == 3 and not timeline.exposed


def test_the_program_runs_ahead_until_it_waits() -> None:
    read = HostWait("read", stream=COMPUTE)
    timeline = play(kernel(COMPUTE, 3), kernel(COMPUTE, 3), read, kernel(COMPUTE, 1), launch_s=1.0)
    assert timeline.waited == {("read", "(outside of any file)"): 5}  # launched at 1 and 2, done at 7
    assert timeline.end == 9  # the next launch takes until 8
    assert timeline.late == {"": 1, "read": 1}


def test_launches_bound_small_kernels() -> None:
    timeline = play(*(kernel(COMPUTE, 1) for _ in range(10)), launch_s=2.0)
    assert timeline.end == 21 and sum(timeline.late.values()) == 11


def test_work_of_the_program_is_not_exposed_transfer_but_lateness() -> None:
    timeline = play(kernel(COMPUTE, 1), Launch(HOST, "adam", (), (), Work("adam", nbytes=4)), kernel(COMPUTE, 1))
    assert timeline.end == 5 and not timeline.exposed and timeline.late == {"": 3}


def test_lateness_and_exposure_are_told_apart() -> None:
    """The program comes at 4, what it waits for at 6."""
    own = Launch(HOST, "own", (), (), Work("host", nbytes=4))
    transfer = (kernel(SIDE, 6, "all_gather"), Record(1, SIDE))
    timeline = play(kernel(COMPUTE, 1), *transfer, own, Wait(COMPUTE, 1), kernel(COMPUTE, 1))
    assert timeline.late == {"": 3} and timeline.exposed == {("all_gather", ""): 2} and timeline.end == 7


def test_phases_begin_when_the_device_gets_there() -> None:
    timeline = play(Phase("forward"), kernel(COMPUTE, 3), Phase("backward"), kernel(COMPUTE, 2))
    assert timeline.phases == [("forward", 0), ("backward", 3)]


def test_a_restart_counts_from_an_idle_device() -> None:
    timeline = play(kernel(COMPUTE, 3))
    timeline.restart()
    assert timeline.now == 3 and timeline.end == 3 and not timeline.busy and timeline.spans == []


def test_events_are_done_at_the_program_s_time() -> None:
    timeline = play(kernel(COMPUTE, 3), Record(1, COMPUTE))
    assert not timeline.done(1)
    timeline.feed(HostWait("event", event=1))
    assert timeline.done(1)


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("all_gather", range(8), 8 * 7 / 8),  # a ring inside a node
        ("all_reduce", range(8), 2 * 8 * 7 / 8),
        ("all_gather", range(16), 8 * 15 / 16 / 1),  # 8 devices a node share the network: as fast as inside
        ("all_gather", range(0, 16, 8), 8 * 1 / 2 / 0.5),  # one a node: its own share only
        ("all_to_all", range(8), 8 * 7 / 8),  # each sends an eighth to each of the others
        ("all_to_all", range(16), 8 * 8 / 16 / 1),  # half leaves the node, by each device's own way
        ("all_gather", range(1), 0.0),
        ("all_gather", range(12), 8 * 11 / 12),  # 8 and 4 a node: all passes through the 4
    ],
)
def test_a_collective_takes_a_ring_s_time(name: str, ranks: range, expected: float) -> None:
    machine = Machine("plain", PLAIN | {"network_rate": 0.5 if len(ranks) == 2 else 1.0})
    assert machine.collective(name, 8, tuple(ranks)) == pytest.approx(expected)


def test_a_network_slows_with_every_doubling_of_its_nodes() -> None:
    machine = Machine("plain", PLAIN | {"gpus_per_node": 1.0, "network_crowding": 0.5})
    seconds = [machine.collective("all_gather", 1_000_000, tuple(range(nodes))) for nodes in (2, 4, 8)]
    per_byte = [s / (nodes - 1) * nodes for s, nodes in zip(seconds, (2, 4, 8), strict=True)]
    assert per_byte == pytest.approx([1e6, 1.5e6, 2e6])


def test_a_ring_crosses_the_network_once_a_node() -> None:
    machine = Machine("plain", PLAIN | {"node_hop_s": 1.0, "network_hop_s": 100.0})
    assert machine.collective("all_gather", 0, tuple(range(8))) == 7
    assert machine.collective("all_gather", 0, tuple(range(32))) == 28 + 300  # 7 links in each of 4 nodes, 3 between
    assert machine.collective("all_gather", 0, tuple(range(0, 32, 8))) == 300


def test_the_node_with_the_fewest_ranks_is_the_narrowest() -> None:
    machine = Machine("plain", PLAIN | {"network_rate": 0.1})
    seconds = [machine.collective("all_gather", 8, tuple(range(world))) for world in (9, 12, 16)]
    assert seconds == pytest.approx([8 * 8 / 9 / 0.1, 8 * 11 / 12 / 0.4, 8 * 15 / 16 / 0.8])


def test_fewer_ranks_than_devices_share_the_host_and_its_drives_among_them() -> None:
    """The optimizer as far as the cores of one rank go."""
    machine = Machine("plain", PLAIN | {"adam_rank_rate": 4.0})
    for world, times in ((1, 8), (2, 4), (8, 1), (12, 1), (512, 1)):  # of 12, 8 share a node, and the rest wait
        used = machine.used_by(world)
        for kind, share in (("host", times), ("adam", min(times, 4)), ("read", times), ("write", times)):
            assert used.seconds(Work(kind, nbytes=64)) == 64 / share, (world, kind)
        for kind in ("up", "down", "kernel"):  # each device's own
            assert used.seconds(Work(kind, nbytes=64, flops=2)) == machine.seconds(Work(kind, nbytes=64, flops=2))


def test_where_the_host_computes_the_program_waits_for_what_it_starts() -> None:
    """Kernels run one after the other with the program's own time between them; collectives beside it."""
    beside = Launch(SIDE, "sum", (), (), Work("collective", nbytes=4, ranks=(0, 1)))
    machine = Machine("plain", PLAIN | {"launch_s": 1.0}, on_host=True)
    timeline = Timeline(machine)
    for event in (kernel(COMPUTE, 3), beside, Record(1, SIDE), kernel(COMPUTE, 1)):
        timeline.feed(event)
    assert timeline.now == 7 and timeline.end == 7  # launch 1, kernel 3, launch 1, launch 1, kernel 1
    timeline.feed(Wait(COMPUTE, 1))
    timeline.feed(kernel(COMPUTE, 1))
    assert timeline.now == 9


def test_an_all_reduce_of_little_over_many_ranks_takes_a_tree_s_time() -> None:
    machine = Machine("plain", PLAIN | {"node_hop_s": 1.0, "network_hop_s": 1.0})
    assert machine.collective("all_reduce", 0, tuple(range(512))) == pytest.approx(2 * 9)
    assert machine.collective("all_gather", 0, tuple(range(512))) == pytest.approx(511)


@for_each(
    ("ranks", "rounds", "crossings"),
    [
        (1, 0, 0),
        (2, 1, 0),
        (5, 3, 0),
        (8, 3, 0),
        (9, 4, 2),  # 7 to 8 in the first round, and 0 to 8 in the last
        (16, 4, 2),
        (64, 6, 4),  # once on the way through a node, then in every round
        (1024, 10, 8),
        (4096, 12, 10),
    ],
)
def test_a_message_of_all_ranks_takes_its_rounds_and_what_the_longest_way_crosses(
    ranks: int, rounds: int, crossings: int
) -> None:
    machine = Machine("plain", PLAIN | {"agreement_s": 1.0, "agreement_hop_s": 100.0})
    assert machine.agreement(ranks) == rounds + 100 * crossings


def test_the_slowest_of_arithmetic_memory_and_the_kernel_itself_decides() -> None:
    machine = Machine("plain", PLAIN | {"memory_rate": 2.0, "kernel_s": 3.0})
    assert machine.seconds(Work("kernel", flops=1)) == 3
    assert machine.seconds(Work("kernel", flops=5)) == 5
    assert machine.seconds(Work("kernel", flops=5, nbytes=12)) == 6


def product(rows: int, depth: int, columns: int, pieces: int = 1) -> Work:
    return Work("matmul", 2.0 * rows * depth * columns * pieces, shape=(rows, depth, columns))


def test_a_product_reaches_its_share_with_its_depth_and_in_whole_waves() -> None:
    """Four processors, so that four tiles of 256 x 128 are a wave."""
    machine = Machine("plain", PLAIN | {"matmul_share": 0.5, "matmul_half": 100.0})
    assert machine.product_share(product(256, 100, 512)) == 0.25
    assert machine.product_share(product(256, 10**9, 512)) == pytest.approx(0.5)
    assert machine.product_share(product(128, 100, 256, pieces=4)) == 0.25  # as many of the same tiles
    wave, next_one = (machine.product_share(product(256, 100, 128 * n)) for n in (4, 5))
    assert wave / 2 <= next_one <= 0.8 * wave  # a fifth tile has a wave of its own, unless smaller ones share it out
    assert machine.product_share(product(2560, 100, 128 * 5)) == pytest.approx(wave, rel=0.05)


def test_a_thin_product_leaves_processors_without_work_whatever_its_other_sides() -> None:
    machine = Machine("plain", PLAIN | {"processors": 100.0})
    thin, square = (machine.product_share(product(*shape)) for shape in ((64, 4096, 4096), (512, 4096, 4096)))
    assert thin < 0.6 * square
    assert machine.product_share(Work("kernel", flops=3.0)) == 1


@pytest.mark.parametrize("name", machines())
def test_every_constant_of_every_machine_has_a_source(name: str) -> None:
    assert set(load_machine(name).values) == set(CONSTANTS)
    document = json.loads((Path(__file__).parents[2] / f"deepspeed/tools/simulate/machines/{name}.json").read_text())
    assert all(len(source) > 3 for _, source in document["constants"].values())


def test_a_machine_may_be_like_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "like": "h100", "constants": {"bus_rate": [1e9, "measured"]}}))
    machine = load_machine(str(path))
    assert machine.name == "mine" and machine["bus_rate"] == 1e9
    assert machine["flops_bf16"] == load_machine("h100")["flops_bf16"] and not machine.on_host


def test_a_machine_says_whether_its_host_computes(tmp_path: Path) -> None:
    first = str(tmp_path / "first.json")
    likes = {"first": {"like": "h100", "device": "cpu"}, "second": {"like": first}}
    likes |= {"third": {"like": first, "device": "cuda"}}
    for name, words in likes.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "constants": {}, **words}))
    assert [load_machine(str(tmp_path / f"{name}.json")).on_host for name in likes] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no machine '.*': there are .*h100.*, or a file"),
        ("{", "is no machine"),
        ('{"constants": {"bus_rate": 3}}', "is no machine"),
        ('{"constants": {"bus_rat": [3, "x"]}}', "'bus_rat' is no constant"),
        ('{"constants": {"bus_rate": [3, "x"]}}', "'node_rate' is missing"),
        ('{"like": "h100", "constants": {"bus_rate": [0, "x"]}}', "'bus_rate' must be a positive number, not 0"),
        ('{"like": "h1", "constants": {}}', "no machine 'h1'"),
        ('{"like": "mine.json", "constants": {}}', "mine.json, which is like itself in the end"),
        ('{"like": "h100", "constants": {"gpus_per_node": [0.5, "x"]}}', "'gpus_per_node' must be a whole number"),
    ],
)
def test_a_wrong_machine_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=expected):
        load_machine(str(path))


def message(name: str, source: int, target: int, nbytes: int = 2, *, stream: int = SIDE) -> Launch:
    work = Work("collective", nbytes=nbytes, ranks=(source, target), channel=f"group: {source}>{target}")
    return Launch(stream, name, (), (), work, label="F0.0")


def play_together(*events: list[Event]) -> list[Timeline]:
    """Of ranks 0, 1, ...; a byte a second goes from one to another."""
    meetings = Meetings(range(len(events)))
    machine = Machine("plain", PLAIN)
    timelines = [Timeline(machine, keep=True, rank=rank, meetings=meetings) for rank in range(len(events))]
    together(timelines, events)
    return timelines


def test_a_message_begins_when_both_ends_have_come_to_it() -> None:
    first = [kernel(COMPUTE, 3), Record(1, COMPUTE), Wait(SIDE, 1), message("send", 0, 1)]
    second = [message("recv", 0, 1), Record(1, SIDE), Wait(COMPUTE, 1), kernel(COMPUTE, 4)]
    sender, receiver = play_together(first, second)
    assert sender.end == 5 and receiver.end == 9
    assert receiver.exposed == {("recv", "F0.0"): 5}


def test_ranks_may_need_each_other_in_turn() -> None:
    """The first receives early what the second makes from what the first sends later."""
    first = [message("recv", 1, 0, stream=2), Record(1, 2), kernel(COMPUTE, 1), Record(2, COMPUTE), Wait(SIDE, 2)]
    first += [message("send", 0, 1), Wait(COMPUTE, 1), HostWait("read", stream=COMPUTE), kernel(COMPUTE, 1)]
    second = [message("recv", 0, 1), Record(1, SIDE), Wait(COMPUTE, 1), kernel(COMPUTE, 1), Record(2, COMPUTE)]
    second += [Wait(2, 2), message("send", 1, 0, stream=2)]
    timelines = play_together(first, second)
    assert [timeline.end for timeline in timelines] == [1 + 2 + 1 + 2 + 1, 6]
    assert timelines[0].waited == {("read", "(outside of any file)"): 6}  # its program had launched all at once


def test_ranks_that_wait_for_each_other_for_ever_are_named() -> None:
    both = [[message("send", me, 1 - me), message("recv", 1 - me, me)] for me in (0, 1)]  # on one stream each
    with pytest.raises(PipelineError, match=r"for ever: rank 0: send F0.0 .*, rank 1: send F0.0"):
        play_together(*both)


def test_programs_that_talk_wait_for_the_last() -> None:
    talk = Talk(1.0, (0, 1), "all")
    early, late = play_together([talk], [Launch(HOST, "work", (), (), Work("host", nbytes=5)), talk])
    assert early.now == late.now == 6


def test_a_message_takes_one_link() -> None:
    machine = Machine("plain", PLAIN | {"network_rate": 0.5})
    near, far = Work("collective", nbytes=4, ranks=(0, 1)), Work("collective", nbytes=4, ranks=(0, 8))
    assert machine.seconds(near, "send") == 4 and machine.seconds(far, "recv") == 8
