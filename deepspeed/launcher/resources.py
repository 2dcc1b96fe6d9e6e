"""From flags, hostfile and devices to the world of a job: which hosts, which devices there, and who reaches them. Pure.

The rules, in one place:

- A slot is a device number, counted as in the visible-devices variable (CUDA_VISIBLE_DEVICES), whose restriction always
  holds on this machine: ``--num_gpus 2`` with ``CUDA_VISIBLE_DEVICES=4,5,6`` uses 4 and 5, and ``--include
  localhost:1`` is refused then. Where no accelerator is used, slots are only counted.
- Without a hostfile the job runs on this machine. With one it runs on the hosts listed there, and is only run here,
  without a runner, when a single host is left and that is this machine.
- What was asked for is what starts, or nothing does.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from deepspeed.errors import UsageError
from deepspeed.launcher.hostfile import filter_hosts, parse_filter

LOCALHOST = "localhost"
BY_HAND_PORT = 29500
World = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class LocalDevices:
    """Accelerators that this process can use; ``visible`` is what ``variable`` restricts them to, None when not set."""

    count: int
    variable: str = ""
    visible: str | None = None

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """Device numbers as in the variable; None when it names devices in another way (by UUID)."""
        if self.visible is None:
            return tuple(range(self.count))
        names = [name.strip() for name in self.visible.split(",")][: self.count]
        return tuple(map(int, names)) if all(name.isascii() and name.isdigit() for name in names) else None

    @property
    def described(self) -> str:
        """For messages."""
        return f"{self.variable}={self.visible}" if self.visible is not None else f"{self.count} accelerator(s)"


@dataclass(frozen=True)
class Selection:
    """What the flags ask for; -1 and empty texts mean that a flag was not given."""

    include: str = ""
    exclude: str = ""
    num_nodes: int = -1
    num_gpus: int = -1
    node_rank: int = -1
    no_ssh: bool = False
    force_multi: bool = False
    master_addr: str = ""

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Selection":
        """The request of a parsed command line."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    @property
    def selected_by(self) -> tuple[str, ...]:
        """Flags that choose hosts or devices."""
        names = ("include", "exclude", "num_nodes", "num_gpus")
        return tuple(f"--{name}" for name in names if getattr(self, name) not in ("", -1))

    def check(self) -> None:
        """Raise UsageError for numbers that mean nothing and flags that contradict each other."""
        for name, effect in (("num_gpus", "starts no rank"), ("num_nodes", "leaves no node")):
            if (value := getattr(self, name)) == 0 or value < -1:
                raise UsageError(f"--{name} {value} {effect}; give a number from 1 on, or leave it out")
        if self.node_rank < -1:
            raise UsageError(f"--node_rank {self.node_rank} is no node; nodes are counted from 0")
        if self.include and self.exclude:
            raise UsageError("--include and --exclude were both given; use one of them")
        if (self.include or self.exclude) and len(self.selected_by) > 1:
            first, second, *_ = self.selected_by
            raise UsageError(f"{first} already says which devices are used, so {second} cannot be given too")
        if self.no_ssh and self.node_rank == -1:
            raise UsageError("--no_ssh means that you start every node yourself; say which this is with --node_rank")
        if self.force_multi and self.node_rank != -1:
            raise UsageError("--force_multi uses a runner and --node_rank uses none; leave one of them out")


@dataclass(frozen=True)
class Location:
    """Where a job runs. ``node_rank`` is the node whose ranks this process runs; None: a runner reaches the hosts.

    ``on_devices`` as in :class:`deepspeed.launcher.job.Job`; ``uses_devices`` is false where ranks run on the CPU.
    """

    world: World
    node_rank: int | None
    on_devices: bool
    uses_devices: bool


def select(hosts: Mapping[str, int], request: Selection) -> World:
    """Apply the flags to the hostfile's hosts. Raises UsageError or DeepSpeedConfigError rather than start less."""
    slots = {host: tuple(range(count)) for host, count in hosts.items()}
    nodes, each = request.num_nodes, request.num_gpus
    if nodes > len(slots):
        what = f"the hostfile lists {len(slots)} host(s); add hosts, or lower the number"
        raise UsageError(f"--num_nodes {nodes}, but {what}")
    if nodes > 0:
        slots = dict(list(slots.items())[:nodes])
    for host, numbers in slots.items() if each > 0 else ():
        if each > len(numbers):
            what = f"the hostfile gives host {host} {len(numbers)} slot(s); lower the number"
            raise UsageError(f"--num_gpus {each}, but {what}")
        slots[host] = numbers[:each]
    chosen = filter_hosts(slots, include=request.include, exclude=request.exclude)
    if not chosen:
        what = f"leaves no slot of the hostfile's {len(slots)} host(s); exclude less"
        raise UsageError(f"--exclude {request.exclude} {what}")
    return {host: tuple(numbers) for host, numbers in chosen.items()}


def _on_cpu(request: Selection) -> World:
    if request.exclude:
        what = "has nothing to leave out, because no accelerator is used here; give --num_gpus for ranks on the CPU"
        raise UsageError(f"--exclude {what}")
    named = [slot for slots in parse_filter(request.include or LOCALHOST).values() for slot in slots or ()]
    count = request.num_gpus if request.num_gpus > 0 else max(named, default=0) + 1
    chosen = filter_hosts({LOCALHOST: range(count)}, include=request.include)
    return {host: tuple(slots) for host, slots in chosen.items()}


def _on_this_machine(request: Selection, devices: LocalDevices) -> Location:
    """This machine without a hostfile."""
    if devices.count == 0:
        return Location(_on_cpu(request), 0, on_devices=False, uses_devices=False)
    if request.num_gpus > devices.count:
        raise UsageError(
            f"--num_gpus {request.num_gpus}, but {devices.count} accelerator(s) are visible to this process; "
            "lower the number, widen the visible devices, or set DS_ACCELERATOR=cpu for ranks on the CPU"
        )
    numbers, filtered = devices.numbers, request.include or request.exclude
    if numbers is None and filtered:
        what = f"take device numbers, but {devices.described} does not; use --num_gpus"
        raise UsageError(f"--include and --exclude {what}")
    # Devices without numbers: the ranks see all of them, in that order, and each takes the one of its local rank.
    known = range(devices.count) if numbers is None else numbers
    chosen = filter_hosts({LOCALHOST: known}, include=request.include, exclude=request.exclude).get(LOCALHOST)
    if chosen is None:
        raise UsageError(f"--exclude {request.exclude} leaves no device of {devices.described}; exclude less")
    count = request.num_gpus if request.num_gpus > 0 else len(chosen)
    return Location({LOCALHOST: tuple(chosen[:count])}, 0, on_devices=numbers is not None, uses_devices=True)


def _check_slots_here(host: str, slots: Sequence[int], devices: LocalDevices) -> bool:
    """Whether the ranks of this machine are to see just ``slots``. Raises UsageError for slots it does not have."""
    if devices.count == 0:
        return False
    numbers = devices.numbers
    if numbers is None:
        if len(slots) > devices.count or tuple(slots) != tuple(range(len(slots))):
            what = f"cannot be found in {devices.described}, which names no numbers; unset it"
            raise UsageError(f"slots {list(slots)} of host {host} {what}")
        return False
    if missing := [str(slot) for slot in slots if slot not in numbers]:
        raise UsageError(
            f"host {host} is this machine and has no device {', '.join(missing)}: this process sees "
            f"{devices.described}; correct the hostfile or the selection, widen the visible devices, or set "
            "DS_ACCELERATOR=cpu for ranks on the CPU"
        )
    return True


def _by_hand(world: World, request: Selection, devices: LocalDevices) -> Location:
    if not 0 <= request.node_rank < len(world):
        what = f"is not one of the {len(world)} node(s) of this job; count from 0 to {len(world) - 1}"
        raise UsageError(f"--node_rank {request.node_rank} {what}")
    host, slots = list(world.items())[request.node_rank]
    return Location(world, request.node_rank, _check_slots_here(host, slots, devices), devices.count > 0)


def _by_hand_without_hostfile(request: Selection, devices: LocalDevices) -> Location:
    nodes, each = request.num_nodes, request.num_gpus
    given = {"--num_nodes": nodes > 0, "--num_gpus": each > 0, "--master_addr": nodes == 1 or bool(request.master_addr)}
    missing = ", ".join(flag for flag, value in given.items() if not value)
    if missing or request.include or request.exclude:
        needs = "--num_nodes, --num_gpus and --master_addr, the same on every node, and no --include or --exclude"
        why = f"; missing: {missing}" if missing else ""
        raise UsageError(f"--node_rank without a hostfile needs {needs}{why}")
    if 0 < devices.count < each:
        what = f"{devices.count} accelerator(s) are visible to this process; lower the number"
        raise UsageError(f"--num_gpus {each}, but {what}")
    world = {f"node{node}": tuple(range(each)) for node in range(nodes)}
    place = _by_hand(world, request, LocalDevices(devices.count))
    # The nodes must agree on the slots, and each may have another variable; so that holds as it is, and slots are only
    # counted.
    return replace(place, on_devices=place.on_devices and devices.visible is None)


def find_place(
    request: Selection,
    hosts: Mapping[str, int] | None,
    *,
    cpu_only: bool,
    devices: Callable[[], LocalDevices],
    is_here: Callable[[str], bool],
) -> Location:
    """Decide where a job runs; ``hosts`` is the hostfile's content, None without one.

    ``devices`` is asked only where ranks run on this machine, because counting them is slow; ``is_here`` tells whether
    a host is this machine; ``cpu_only`` whether ranks run on the CPU everywhere. Raises UsageError or
    DeepSpeedConfigError when the flags contradict each other or ask for more than there is.
    """
    request.check()
    if hosts is None:
        if request.node_rank != -1:
            return _by_hand_without_hostfile(request, devices())
        if request.num_nodes > 1:
            raise UsageError(
                f"--num_nodes {request.num_nodes}, but no hostfile says which; name one with --hostfile, or start "
                "every node yourself with --node_rank R --num_gpus G --master_addr A"
            )
        place = _on_this_machine(request, devices())
        return replace(place, node_rank=None) if request.force_multi else place
    world = select(hosts, request)
    if request.node_rank != -1:
        return _by_hand(world, request, devices())
    if len(world) == 1 and not request.force_multi and is_here(next(iter(world))):
        return _by_hand(world, replace(request, node_rank=0), devices())
    return Location(world, None, not cpu_only, not cpu_only)


def master_address(
    place: Location, given: str, *, is_here: Callable[[str], bool], own_address: Callable[[str], str]
) -> str:
    """Where the ranks meet: as given; the loopback for one host; else the first host, by its name in the hostfile.

    When this machine is the first host, it is the address by which it reaches the second, ``own_address(second)``: its
    own name often resolves to a loopback. Started by hand the name is used as it is, because every node must come to
    the same. Raises UsageError when that name means another machine on every node.
    """
    names = [host.rpartition("@")[2] for host in place.world]
    if given or len(names) == 1:
        return given or "127.0.0.1"
    first, second = names[:2]
    if place.node_rank is None:
        return own_address(second) if is_here(first) else first
    if first in (LOCALHOST, "127.0.0.1", "::1"):
        what = f"the first host is {first}, which the other nodes cannot reach"
        raise UsageError(f"{what}; name this machine with --master_addr")
    return first
