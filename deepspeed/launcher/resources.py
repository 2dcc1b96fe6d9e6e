"""From flags, hostfile and devices to the world of a job: which hosts, which devices there, and who reaches them. Pure.

The rules, in one place:

- A slot is a device number, counted as in the visible-devices variable (CUDA_VISIBLE_DEVICES), whose restriction always
  holds on this machine: ``--num_gpus 2`` with ``CUDA_VISIBLE_DEVICES=4,5,6`` uses 4 and 5, and ``--include
  localhost:1`` is refused then. Where no accelerator is used, slots are only counted.
- Without a hostfile the job runs on this machine. With one it runs on the hosts listed there, and is only run here,
  without a runner, when a single host is left and that is this machine.
- What was asked for is what starts, or nothing does.

``options`` are the flags of ``cli``; -1 and empty texts mean that one was not given.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.errors import UsageError
from deepspeed.launcher.hostfile import filter_hosts, parse_filter
from deepspeed.launcher.job import check_node_rank

LOCALHOST = "localhost"
_ON_CPU = "set DS_ACCELERATOR=cpu for ranks on the CPU"
World = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class LocalDevices:
    """Accelerators that this process can use; ``visible`` is the value of ``variable``, None when not set."""

    count: int
    variable: str = ""
    visible: str | None = None

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """Return device numbers as in the variable; None when it names devices in another way (by UUID)."""
        if self.visible is None:
            return tuple(range(self.count))
        names = [name.strip() for name in self.visible.split(",")][: self.count]
        return tuple(map(int, names)) if all(name.isascii() and name.isdigit() for name in names) else None

    @property
    def described(self) -> str:
        """Describe the devices for messages."""
        return f"{self.variable}={self.visible}" if self.visible is not None else f"{self.count} accelerator(s)"


class Location(NamedTuple):
    """Place of a job. ``node_rank`` is the node whose ranks this process runs; None: a runner reaches the hosts.

    ``on_devices`` as in :class:`deepspeed.launcher.job.Job`; ``uses_devices`` is false where ranks run on the CPU.
    """

    world: World
    node_rank: int | None
    on_devices: bool
    uses_devices: bool


def selected_by(options: Namespace) -> tuple[str, ...]:
    """Return the given flags that choose hosts or devices."""
    names = ("include", "exclude", "num_nodes", "num_gpus")
    return tuple(f"--{name}" for name in names if getattr(options, name) not in ("", -1))


def _check(options: Namespace) -> None:
    """Raise UsageError for numbers that mean nothing and flags that contradict each other."""
    for name, effect in (("num_gpus", "starts no rank"), ("num_nodes", "leaves no node")):
        if (value := getattr(options, name)) == 0 or value < -1:
            raise UsageError(f"--{name} {value} {effect}; give a number from 1 on, or leave it out")
    if options.node_rank < -1:
        raise UsageError(f"--node_rank {options.node_rank} is no node; nodes are counted from 0")
    if (options.include or options.exclude) and len(flags := selected_by(options)) > 1:
        raise UsageError(f"{flags[0]} already says which devices are used, so {flags[1]} cannot be given too")
    if options.no_ssh and options.node_rank == -1:
        raise UsageError("--no_ssh means that you start every node yourself; say which this is with --node_rank")
    if options.force_multi and options.node_rank != -1:
        raise UsageError("--force_multi uses a runner and --node_rank uses none; leave one of them out")


def _filtered(slots: Mapping[str, Sequence[int]], options: Namespace, leaves: str) -> World:
    """Apply --include or --exclude. Raises UsageError, with what the flag ``leaves`` nothing of."""
    chosen = filter_hosts(slots, include=options.include, exclude=options.exclude)
    if not chosen:
        raise UsageError(f"--exclude {options.exclude} leaves {leaves}; exclude less")
    return {host: tuple(numbers) for host, numbers in chosen.items()}


def select(hosts: Mapping[str, int], options: Namespace) -> World:
    """Apply the flags to the hostfile's hosts. Raises UsageError or DeepSpeedConfigError rather than start less."""
    nodes, gpus = options.num_nodes, options.num_gpus
    if nodes > len(hosts):
        raise UsageError(f"--num_nodes {nodes}, but the hostfile lists {len(hosts)} host(s); add some, or ask for less")
    slots = {host: range(count) for host, count in list(hosts.items())[: nodes if nodes > 0 else None]}
    for host, numbers in slots.items() if gpus > 0 else ():
        if gpus > len(numbers):
            problem = f"--num_gpus {gpus}, but the hostfile gives host {host} {len(numbers)} slot(s)"
            raise UsageError(f"{problem}; lower the number")
        slots[host] = numbers[:gpus]
    return _filtered(slots, options, f"no slot of the hostfile's {len(slots)} host(s)")


def _check_count(options: Namespace, devices: LocalDevices) -> None:
    if options.num_gpus > devices.count > 0:
        raise UsageError(
            f"--num_gpus {options.num_gpus}, but {devices.count} accelerator(s) are visible to this process; "
            f"lower the number, widen the visible devices, or {_ON_CPU}"
        )


def _on_this_machine(options: Namespace, devices: LocalDevices) -> Location:
    node_rank, gpus = None if options.force_multi else 0, options.num_gpus
    if devices.count == 0:
        if options.exclude:
            why = "no accelerator is used here; give --num_gpus for ranks on the CPU"
            raise UsageError(f"--exclude has nothing to leave out, because {why}")
        named = [slot for slots in parse_filter(options.include or LOCALHOST).values() for slot in slots or ()]
        count = gpus if gpus > 0 else max(named, default=0) + 1
        world = _filtered({LOCALHOST: range(count)}, options, "nothing")
        return Location(world, node_rank, on_devices=False, uses_devices=False)
    _check_count(options, devices)
    numbers = devices.numbers
    if numbers is None and (options.include or options.exclude):
        raise UsageError(f"filters take device numbers, but {devices.described} does not; use --num_gpus")
    # Devices without numbers: the ranks see all of them, in that order, and each takes the one of its local rank.
    available = range(devices.count) if numbers is None else numbers
    chosen = _filtered({LOCALHOST: available}, options, f"no device of {devices.described}")[LOCALHOST]
    world = {LOCALHOST: chosen[: gpus if gpus > 0 else None]}
    return Location(world, node_rank, on_devices=numbers is not None, uses_devices=True)


def _by_hand(world: World, node_rank: int, devices: LocalDevices) -> Location:
    """Place this machine as node ``node_rank``. Raises UsageError for slots that it does not have."""
    check_node_rank(node_rank, len(world))
    host, slots = list(world.items())[node_rank]
    if devices.count == 0:
        return Location(world, node_rank, on_devices=False, uses_devices=False)
    numbers = devices.numbers
    if numbers is None and (len(slots) > devices.count or slots != tuple(range(len(slots)))):
        problem = f"slots {list(slots)} of host {host} cannot be found in {devices.described}"
        raise UsageError(f"{problem}, which names no numbers; unset it")
    if numbers is not None and (missing := [str(slot) for slot in slots if slot not in numbers]):
        raise UsageError(
            f"host {host} is this machine and has no device {', '.join(missing)}: this process sees "
            f"{devices.described}; correct the hostfile or the selection, widen the visible devices, or {_ON_CPU}"
        )
    return Location(world, node_rank, on_devices=numbers is not None, uses_devices=True)


def _by_hand_without_hostfile(options: Namespace, devices: LocalDevices) -> Location:
    nodes, gpus = options.num_nodes, options.num_gpus
    given = {"--num_nodes": nodes > 0, "--num_gpus": gpus > 0, "--master_addr": nodes == 1 or bool(options.master_addr)}
    missing = ", ".join(flag for flag, value in given.items() if not value)
    if missing or options.include or options.exclude:
        needs = "--num_nodes, --num_gpus and --master_addr, the same on every node, and no --include or --exclude"
        why = f"; missing: {missing}" if missing else ""
        raise UsageError(f"--node_rank without a hostfile needs {needs}{why}")
    _check_count(options, devices)
    world = {f"node{node}": tuple(range(gpus)) for node in range(nodes)}
    # The nodes must agree on the slots, and each may have another variable: slots are only counted, and that one holds.
    place = _by_hand(world, options.node_rank, LocalDevices(devices.count))
    return place._replace(on_devices=place.on_devices and devices.visible is None)


def find_place(
    options: Namespace,
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
    _check(options)
    if hosts is None:
        if options.node_rank != -1:
            return _by_hand_without_hostfile(options, devices())
        if options.num_nodes > 1:
            raise UsageError(
                f"--num_nodes {options.num_nodes}, but no hostfile says which; name one with --hostfile, or start "
                "every node yourself with --node_rank R --num_gpus G --master_addr A"
            )
        return _on_this_machine(options, devices())
    world = select(hosts, options)
    if options.node_rank != -1:
        return _by_hand(world, options.node_rank, devices())
    if len(world) == 1 and not options.force_multi and is_here(next(iter(world))):
        return _by_hand(world, 0, devices())
    return Location(world, None, not cpu_only, not cpu_only)


def master_address(
    place: Location, given: str, *, is_here: Callable[[str], bool], own_address: Callable[[str], str]
) -> str:
    """Return where the ranks meet: as given; the loopback for one host; else the first host, by its hostfile name.

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
        raise UsageError(
            f"the other nodes cannot reach the first host as {first}; name this machine with --master_addr"
        )
    return first
