"""What one command line asks to run, independent of how the nodes are reached. Pure."""

import argparse
import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.errors import UsageError

USAGE_STATUS = 2  # of a command line that cannot work
INTERRUPTED = 130
_LEVELS = ("debug", "info", "warning", "error", "critical")
_SWITCH = {"action": "store_true"}
# What both the command and the launcher of one node understand: flag -> what argparse is told.
COMMON_FLAGS: Mapping[str, dict[str, Any]] = {
    "--module": {**_SWITCH, "help": "run the script as 'python -m NAME'"},
    "--no_python": {**_SWITCH, "help": "run the script directly, without the interpreter"},
    "--no_local_rank": {**_SWITCH, "help": "do not add --local_rank=N behind the script"},
    "--bind_cores_to_rank": {**_SWITCH, "help": "give each rank CPU cores of its own"},
    "--bind_core_list": {"metavar": "LIST", "help": "the cores to give out, as in 0-3,8,10-11; implies binding"},
    "--enable_each_rank_log": {"default": "None", "metavar": "DIR", "help": "one log file per rank in this directory"},
    "--log_level": {"choices": _LEVELS, "default": "info", "help": "verbosity of the launcher"},
    "-q --quiet": {**_SWITCH, "help": "same as --log_level error"},
}


@dataclass(frozen=True)
class Job:
    """One distributed job.

    ``world`` maps host -> device ids (slots) used there; its order gives the node ranks, and global ranks count through
    it. ``script`` is a path, a module name (``module``) or a program (``no_python``); ``arguments`` follow it
    untouched. ``master_port`` 0 lets the launcher of the first node choose a free one; an empty ``master_addr`` leaves
    both to the ranks, who ask their scheduler. ``exports`` are the variables that remote nodes are given beside those
    of their own login. ``on_devices``: each node shows its ranks the devices of ``world`` only; false on the CPU, where
    slots are only counted, and where the ranks are to see what the launcher sees.
    """

    world: Mapping[str, tuple[int, ...]]
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    local_rank_argument: bool = True
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    on_devices: bool = False
    log_dir: str | None = None
    bind_cores: bool = False
    core_list: str | None = None
    pid_file: str | None = None
    log_level: str = "info"
    cwd: str = ""
    python: str = "python3"
    exports: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.world and all(self.world.values()), "a host without a slot is left out before a job is made"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names in node-rank order."""
        return tuple(self.world)

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return sum(map(len, self.world.values()))

    def first_rank(self, node_rank: int) -> int:
        """Global rank of the first rank on node ``node_rank``."""
        return sum(len(slots) for slots in list(self.world.values())[:node_rank])


def add_flags(group: argparse._ActionsContainer, flags: Mapping[str, dict[str, Any]]) -> None:
    """Add flags given as a table; several names of one are separated by blanks."""
    for names, what in flags.items():
        group.add_argument(*names.split(), **what)


def job_of(options: argparse.Namespace, script: str, arguments: Sequence[str], pid: int, **rest: Any) -> Job:
    """The job of a parsed command line; ``rest`` are its fields that ``COMMON_FLAGS`` do not give."""
    return Job(
        script=script,
        arguments=tuple(arguments),
        module=options.module,
        no_python=options.no_python,
        local_rank_argument=not options.no_local_rank,
        log_dir=None if options.enable_each_rank_log == "None" else options.enable_each_rank_log,
        bind_cores=options.bind_cores_to_rank,
        core_list=options.bind_core_list,
        pid_file=f"/tmp/{pid}.deepspeed" if pid else None,
        log_level="error" if options.quiet else options.log_level,
        cwd=os.getcwd(),
        python=sys.executable,
        **rest,
    )


def check_kind(options: argparse.Namespace) -> None:
    """Raise UsageError for a script that is to be two things at once."""
    if options.no_python and options.module:
        raise UsageError("--no_python and --module exclude each other; use one of them")


def encode_world(world: Mapping[str, Sequence[int]]) -> str:
    """URL-safe base64 of the JSON of host -> device ids, the form of ``--world_info``."""
    return base64.urlsafe_b64encode(json.dumps({host: list(slots) for host, slots in world.items()}).encode()).decode()


def decode_world(text: str) -> dict[str, tuple[int, ...]]:
    """Inverse of :func:`encode_world`. Raises ValueError when ``text`` is not such an encoding."""
    world = json.loads(base64.urlsafe_b64decode(text))
    if not isinstance(world, dict):
        raise ValueError("--world_info must encode an object of host -> device ids")
    return {str(host): tuple(int(slot) for slot in slots) for host, slots in world.items()}


def arguments_of_script(given: Sequence[str], script: str, parsed: Sequence[str]) -> list[str]:
    """What follows ``script`` in ``given``; ``parsed`` lacks a ``--`` directly behind it, which argparse drops."""
    rest = len(parsed)
    dropped = list(given[len(given) - rest - 2 : len(given) - rest]) == [script, "--"]
    return ["--", *parsed] if dropped else list(parsed)
