"""What one command line asks to run, independent of how the nodes are reached."""

import argparse
import base64
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.errors import UsageError
from deepspeed.launcher.elastic.sizes import Elastic, plan

_LEVELS = ("debug", "info", "warning", "error", "critical")
_NUMBERS = ("N", "P", "PID", "R")

# Names of a flag -> its help, if it is a switch; else default, what its value is called (or may be), and help.
Flags = Mapping[str, str | tuple[Any, str | tuple[str, ...], str]]
# What both the command and the launcher of one node understand.
COMMON_FLAGS: Flags = {
    "--module": "run the script as 'python -m NAME'",
    "--no_python": "run the script directly, without the interpreter",
    "--no_local_rank": "do not add --local_rank=N behind the script",
    "--bind_cores_to_rank": "give each rank CPU cores of its own",
    "--bind_core_list": (None, "LIST", "the cores to give out, as in 0-3,8,10-11; implies binding"),
    "--hang_timeout": (None, "S", "end the job, and say why, when no rank makes progress for S seconds"),
    "--enable_each_rank_log": ("None", "DIR", "one log file per rank in this directory"),
    "--signal_grace": (None, "S", "seconds that ranks may take to end after a signal (default 10)"),
    "--elastic_training": "go on with the ranks that are left when some are lost (docs/elastic.md)",
    "--min_elastic_nodes": (-1, "N", "fewest nodes of an elastic job (default 1)"),
    "--max_elastic_nodes": (-1, "N", "most nodes of it (default: those of the hostfile)"),
    "--min_ranks": (-1, "N", "fewest ranks of it (default 1)"),
    "--max_ranks": (-1, "N", "most ranks of it (default: one per slot)"),
    "--max_restarts": (3, "N", "how often in a row to start again without a new checkpoint (default 3)"),
    "--log_level": ("info", _LEVELS, "verbosity of the launcher"),
    "-q --quiet": "same as --log_level error",
}


@dataclass(frozen=True)
class Job:
    """Distributed job.

    ``world`` maps host -> device ids (slots) used there; its order gives the node ranks, and global ranks count through
    it. ``script`` is a path, a module name (``module``) or a program (``no_python``); ``arguments`` follow it
    untouched. ``master_port`` 0 lets the launcher of the first node choose a free one; an empty ``master_addr`` leaves
    both to the ranks, who ask their scheduler. ``exports`` are the variables that remote nodes are given beside those
    of their own login. ``on_devices``: each node shows its ranks the devices of ``world`` only; false on the CPU, where
    slots are only counted, and where the ranks are to see what the launcher sees. ``save_pid``: the process id that
    names the pid files, 0 for none. ``hang_timeout``: seconds in which no rank comes further before the job ends.
    ``signal_grace``: seconds that the ranks may take to end after a signal. ``elastic``: the limits of a job whose
    number of ranks may change; ``world`` then is the most that it can have.
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
    save_pid: int = 0
    hang_timeout: float | None = None
    signal_grace: float = 10.0
    elastic: Elastic | None = None
    log_level: str = "info"
    cwd: str = ""
    python: str = "python3"
    exports: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.world and all(self.world.values()), "a host without a slot is left out before a job is made"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return host names in node-rank order."""
        return tuple(self.world)

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the whole job."""
        return sum(map(len, self.world.values()))

    @property
    def pid_file(self) -> str | None:
        """Return the file in which the launcher of a node keeps its process id, or None."""
        return f"/tmp/{self.save_pid}.deepspeed" if self.save_pid else None

    def devices(self, node_rank: int) -> tuple[int, ...]:
        """Return device ids that all ranks of node ``node_rank`` may use; there are as many as ranks."""
        return self.world[self.hosts[node_rank]]

    def first_rank(self, node_rank: int) -> int:
        """Return the global rank of the first rank on node ``node_rank``."""
        return sum(len(self.devices(node)) for node in range(node_rank))


def add_flags(group: argparse._ActionsContainer, flags: Flags) -> None:
    """Add flags given as a table."""
    for names, spec in flags.items():
        if isinstance(spec, str):
            group.add_argument(*names.split(), action="store_true", help=spec)
        elif isinstance(spec[1], tuple):
            group.add_argument(*names.split(), default=spec[0], choices=spec[1], help=spec[2])
        else:
            default, metavar, text = spec
            kind = int if metavar in _NUMBERS else str
            group.add_argument(*names.split(), default=default, metavar=metavar, type=kind, help=text)


def parse_line(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``args`` (default: the command line); a malformed line ends the process with status 2, as argparse does."""
    parser.add_argument("user_script", metavar="script", help="path of the script (or a module with --module)")
    remainder = parser.add_argument(
        "user_args", metavar="arguments", nargs=argparse.REMAINDER, help="passed on to it as is"
    )
    remainder.required = False  # so that an error names the script alone
    given = list(sys.argv[1:] if args is None else args)
    options = parser.parse_args(given)
    if options.no_python and options.module:
        parser.error("--no_python and --module exclude each other; use one of them")
    rest = len(given) - len(options.user_args)
    if given[rest - 2 : rest] == [options.user_script, "--"]:  # argparse drops it there
        options.user_args.insert(0, "--")
    options.log_level = "error" if options.quiet else options.log_level
    return options


def _seconds(flag: str, text: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        if text is None or 0 < float(text) < float("inf"):
            return None if text is None else float(text)
    raise UsageError(f"{flag} {text} is not a positive number of seconds")


def job_of(options: argparse.Namespace, *, world: Mapping[str, tuple[int, ...]], **rest: Any) -> Job:
    """Make the job of a parsed command line; ``rest``: the fields without a flag in ``COMMON_FLAGS``."""
    return Job(
        script=options.user_script,
        arguments=tuple(options.user_args),
        module=options.module,
        no_python=options.no_python,
        local_rank_argument=not options.no_local_rank,
        log_dir=None if options.enable_each_rank_log == "None" else options.enable_each_rank_log,
        bind_cores=options.bind_cores_to_rank,
        core_list=options.bind_core_list,
        hang_timeout=_seconds("--hang_timeout", options.hang_timeout),
        signal_grace=_seconds("--signal_grace", options.signal_grace) or Job.signal_grace,
        elastic=plan(options, nodes=len(world), ranks=sum(map(len, world.values()))),
        world=world,
        log_level=options.log_level,
        cwd=os.getcwd(),
        python=sys.executable,
        **rest,
    )


def check_node_rank(node_rank: int, nodes: int) -> None:
    """Raise UsageError for a node that a job of ``nodes`` does not have."""
    if not 0 <= node_rank < nodes:
        raise UsageError(f"--node_rank {node_rank} is not one of the {nodes} node(s) of this job; count from 0")


def encode_world(world: Mapping[str, Sequence[int]]) -> str:
    """Encode host -> device ids as URL-safe base64 of JSON, the form of ``--world_info``."""
    return base64.urlsafe_b64encode(json.dumps({host: list(slots) for host, slots in world.items()}).encode()).decode()


def decode_world(text: str) -> dict[str, tuple[int, ...]]:
    """Invert :func:`encode_world`. Raises ValueError or TypeError when ``text`` is not such an encoding."""
    world = json.loads(base64.urlsafe_b64decode(text))
    if not isinstance(world, dict) or not world or not all(world.values()):
        raise ValueError("it names no host, or a host without devices")
    return {host: tuple(map(int, slots)) for host, slots in world.items()}
