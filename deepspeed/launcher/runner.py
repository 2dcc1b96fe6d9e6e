"""The ``deepspeed`` command: read the flags, refuse what cannot work, start the ranks.

``deepspeed.launcher.runner`` is also the import path that other projects use for the launcher.
"""

import argparse
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from typing import NoReturn

from deepspeed.errors import NotYetError, UsageError, counted, nearest_hint
from deepspeed.launcher.elastic.sizes import named_configs
from deepspeed.launcher.fanout import check_programs, check_reachable, run_backend, run_over_ssh
from deepspeed.launcher.hostfile import (
    DEFAULT_HOSTFILE,
    EXPORT_ENVS,
    environment_file_name,
    exported,
    filter_hosts,
    hosts_of,
    load_hostfile,
    numbered_lines,
    parse_range_list as parse_range_list,
    read_environment_files,
)
from deepspeed.launcher.job import COMMON_FLAGS, Flags, Job, add_flags, encode_world, job_of, parse_line
from deepspeed.launcher.launch import run_here
from deepspeed.launcher.machine import is_this_machine, local_devices, own_address
from deepspeed.launcher.resources import Location, find_place, master_address
from deepspeed.launcher.runners import RUNNERS, describe, prepare
from deepspeed.monitor.log import logger
from deepspeed.monitor.program import CommandLine, guarded

# What other projects take from here, beside functions.
DLTS_HOSTFILE, encode_world_info = DEFAULT_HOSTFILE, encode_world
# Programs append the lines KEY=VALUE that they want on all hosts to the file of this name.
DEEPSPEED_ENVIRONMENT_NAME = environment_file_name(os.environ)
BY_HAND_PORT = 29500
# For runners that cannot be told a port later: below those from which Linux serves outgoing connections.
_SOME_PORTS = range(20000, 29973)
_DESCRIPTION = "Start a script on the accelerators of one or many hosts; what follows the script belongs to it."
_RULES = """\
hosts and devices:
  Without a hostfile the job runs on this machine: one rank per accelerator that CUDA_VISIBLE_DEVICES leaves visible,
  or one on the CPU. --num_gpus N takes the first N visible ones; slots in --include and --exclude are device numbers
  as in CUDA_VISIBLE_DEVICES, and never one that it hides. Without accelerators, or with DS_ACCELERATOR=cpu,
  --num_gpus N starts N ranks on the CPU.
  A hostfile has lines 'name slots=N'. FILTER is name[:slot,...][@name...], as in 'node1@node2:0,2'.
  The ranks meet on the first host, by its name in the hostfile, unless --master_addr says otherwise. Other hosts are
  given variables starting with MLFLOW, PYTHON, MV2, UCX, NCCL, GLOO, TORCH_, PYTORCH_, OMP_, CUDA_DEVICE_, CUDA_LAUNCH
  or CUDA_MODULE, and those of .deepspeed_env files (lines KEY=VALUE; in the home directory, then in the current one;
  DS_ENV_FILE names another file).

exit status:
  0 when every rank returned 0; that of the rank that failed first, 128 + S after signal S; 2 for a wrong command line.
"""
_BY_HAND = (
    "run the ranks of node R only: you start this command on every node, with --hostfile or with --num_nodes, "
    "--num_gpus, --master_addr"
)
_PORT_THERE = f"port there (default: a free one; {BY_HAND_PORT} when nodes are started by hand)"
_SELDOM_OF_SCRIPTS = {"--num_gpus", "--num_accelerators", "--hostfile", "--include", "--exclude", "--hang_timeout"}
_MORE = "more arguments for it, one quoted text after an equals sign (--launcher_args='-a -b')"
_FLAGS: Mapping[str, Flags] = {
    "which hosts and devices": {
        "-H --hostfile": (DEFAULT_HOSTFILE, "FILE", f"hosts (default {DEFAULT_HOSTFILE}, if there)"),
        "-i --include": ("", "FILTER", "only these hosts and slots"),
        "-e --exclude": ("", "FILTER", "all but these hosts and slots"),
        "--num_nodes": (-1, "N", "only the first N hosts"),
        "--num_gpus --num_accelerators": (-1, "N", "N ranks on every host"),
    },
    "where the ranks meet, and nodes started by hand": {
        "--master_addr": ("", "A", "address of the first host (one host: 127.0.0.1)"),
        "--master_port": (None, "P", _PORT_THERE),
        "--node_rank": (-1, "R", _BY_HAND),
        "--no_ssh": "you start every node yourself; needs --node_rank, which alone says the same",
    },
    "how the script runs, and what is shown": COMMON_FLAGS,
    "how other hosts are reached": {
        "--launcher": ("ssh", "NAME", f"one of {', '.join(RUNNERS)} (default ssh)"),
        "--launcher_args": ("", "ARGS", _MORE),
        "--force_multi": "use the runner even for one host",
        "--no_ssh_check": "do not test first that ssh reaches all hosts",
        "--ssh_port": (None, "P", "ssh port of the hosts"),
        "--venv_script": (None, "FILE", "file that bash reads on every host first (ssh, pdsh)"),
    },
    "a dry run, and process ids": {
        "--dry_run --dry-run": "show hosts, ranks, variables and commands; start nothing",
        "--save_pid": "keep process ids of launchers in /tmp/PID.deepspeed (PID: this command's)",
    },
    "not in this release (refused)": {"--autotuning": ("", ("", "tune", "run"), "search for a configuration")},
}


class _Parser(CommandLine):
    def error(self, message: str) -> NoReturn:
        """End as argparse does, and name the flag that a mistyped one resembles."""
        rest = message.partition("unrecognized arguments: ")[2]
        flags = [flag for action in self._actions for flag in action.option_strings]
        mistyped = next((word.partition("=")[0] for word in rest.split() if word.startswith("-")), None)
        super().error(message + (nearest_hint(mistyped, flags) if mistyped else ""))


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="deepspeed",
        allow_abbrev=False,  # so that nothing of the script's own arguments is ever matched
        description=_DESCRIPTION,
        epilog=_RULES,
        usage="deepspeed [flags] script [arguments of the script...]",
    )
    for title, flags in _FLAGS.items():
        add_flags(parser.add_argument_group(title), flags)
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse ``args`` (default: the command line); a malformed line ends the process with status 2, as argparse does."""
    return parse_line(build_parser(), args)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return host -> slot count, or None (with a warning) when there is no such file."""
    if os.path.isfile(hostfile_path):
        return load_hostfile(hostfile_path)
    logger.warning("hostfile %s does not exist; only the local machine is used", hostfile_path)
    return None


def _parse_hostfile(hostfile_lines: Sequence[str]) -> dict[str, int]:
    """Return host -> slot count, from the lines of a hostfile; cluster tools call this."""
    return hosts_of(numbered_lines(hostfile_lines, "hostfile"), "hostfile")


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Apply one filter to host -> slot list."""
    return filter_hosts(host_info, include=include_str, exclude=exclude_str)


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Apply one filter to host -> slot count and return host -> chosen slots."""
    slots = {host: range(count) for host, count in resource_pool.items()}
    return filter_hosts(slots, include=inclusion, exclude=exclusion)


def refuse_absent(options: argparse.Namespace) -> None:
    """Raise NotYetError for a flag whose effect this release does not have, UsageError for numbers out of range."""
    if options.autotuning:
        raise NotYetError("--autotuning is not in this release; leave it out, and set batch and bucket sizes yourself")
    for flag, port in (("--master_port", options.master_port), ("--ssh_port", options.ssh_port)):
        if port is not None and not 0 <= port <= 65535:
            raise UsageError(f"{flag} {port} is no port number; ports go from 1 to 65535")


def check_target(options: argparse.Namespace) -> None:
    """Raise UsageError when the script, module or program to run does not exist."""
    target, folder = options.user_script, os.getcwd()
    if options.no_python:
        if shutil.which(target) is None:
            raise UsageError(f"program {target!r} does not exist or is not executable (--no_python runs it directly)")
    elif options.module:
        # Only the top-level package is looked up: finding more would import it. Editable installs bring finders.
        top = target.partition(".")[0]
        finders = (finder.find_spec(top, None) for finder in sys.meta_path)
        if PathFinder.find_spec(top, [folder, *sys.path]) is None and not any(finders):
            raise UsageError(f"module {target!r} was not found from {folder} or in the environment; check the name")
    elif not os.path.exists(target):
        raise UsageError(f"script {target!r} does not exist in {folder}; check the path")


def _find_place(options: argparse.Namespace) -> Location:
    if options.elastic_training and options.node_rank != -1 and options.num_nodes == -1:
        options.num_nodes = options.max_elastic_nodes
    # The default hostfile need not be there.
    absent = options.hostfile == DEFAULT_HOSTFILE and not os.path.exists(options.hostfile)
    hosts = None if absent else load_hostfile(options.hostfile)
    place = find_place(
        options,
        hosts,
        cpu_only=os.environ.get("DS_ACCELERATOR") == "cpu",
        devices=local_devices,
        is_here=is_this_machine,
    )
    if hosts is not None and place.node_rank is None and place.uses_devices and os.environ.get("CUDA_VISIBLE_DEVICES"):
        logger.warning("CUDA_VISIBLE_DEVICES of this shell is not passed on to the hosts; use --include or --exclude")
    return place


def make_job(options: argparse.Namespace, place: Location) -> Job:
    """Make the job that ``options`` describe at ``place``. Raises UsageError or DeepSpeedConfigError."""
    elsewhere, launcher = place.node_rank is None, options.launcher
    address, port, exports = options.master_addr, options.master_port, {}
    # Slurm orders the hosts in its own way, so only the ranks know which is the first.
    if not (elsewhere and launcher == "slurm"):
        address = master_address(place, address, is_here=is_this_machine, own_address=own_address)
    if port is None and elsewhere:  # 0 where node 0 can choose and tell
        port = 0 if launcher in ("ssh", "slurm") else random.choice(_SOME_PORTS)
    elif port is None:
        port = 0 if len(place.world) == 1 else BY_HAND_PORT
    if elsewhere:
        folders = [os.path.expanduser("~"), os.getcwd()]
        from_files = read_environment_files(environment_file_name(os.environ), folders)
        exports = exported(os.environ, prefixes=EXPORT_ENVS, cwd=os.getcwd(), from_files=from_files)
    return job_of(
        options,
        world=place.world,
        save_pid=os.getpid() if options.save_pid else 0,
        master_addr=address,
        master_port=port,
        on_devices=place.on_devices,
        exports=exports,
    )


def _run_here(job: Job, node_rank: int, options: argparse.Namespace, *, on_cpu: bool) -> int:
    for flag in ("launcher_args", "venv_script", "ssh_port"):
        if getattr(options, flag):
            logger.warning("--%s has no effect here, because no other host is reached; --force_multi uses it", flag)
    if on_cpu:
        logger.info("no accelerator is used; starting %s on the CPU", counted(len(job.devices(node_rank)), "rank"))
    return run_here(job, node_rank)


def _run_elsewhere(job: Job, options: argparse.Namespace) -> int:
    build = RUNNERS[options.launcher].build
    command = build(job, options) if build else None
    check_programs(options)
    if options.launcher in ("ssh", "pdsh") and not options.no_ssh_check:
        check_reachable(job.hosts, options)
    if command is None:
        return run_over_ssh(job, options)
    logger.info("starting %d ranks on %d hosts through %s", job.world_size, len(job.hosts), options.launcher)
    return run_backend(command)


def check_ranks(options: argparse.Namespace, ranks: int) -> None:
    """Raise UsageError for a number of ranks that the script's configuration (--deepspeed_config) cannot divide."""
    for name, config in named_configs(options.user_args).items():
        block = config.get("tensor_parallel")
        tp_size = block.get("autotp_size") if isinstance(block, dict) else None
        if isinstance(tp_size, int) and tp_size > 1 and ranks % tp_size:
            raise UsageError(
                f"{name}: tensor_parallel.autotp_size {tp_size} does not divide the {ranks} ranks of this job; "
                f"start a multiple of {tp_size}"
            )


def _launch(options: argparse.Namespace) -> int:
    refuse_absent(options)
    check_target(options)
    prepare(options)
    late = [word for word in options.user_args if word.partition("=")[0] in _SELDOM_OF_SCRIPTS]
    if late:
        logger.warning("%s comes after the script, which gets it; flags of deepspeed go before the script", late[0])
    place = _find_place(options)
    job = make_job(options, place)
    if job.elastic is None:
        check_ranks(options, job.world_size)
    elif place.node_rank is None and options.launcher != "ssh":
        raise UsageError(f"--elastic_training needs --launcher ssh or nodes started by hand, not {options.launcher}")
    cores = len(os.sched_getaffinity(0))
    if not place.uses_devices and place.node_rank is not None and len(job.devices(place.node_rank)) > cores:
        logger.warning(
            "%d ranks share %s of this machine; start fewer (--num_gpus)", job.world_size, counted(cores, "core")
        )
    if options.dry_run:
        sys.stdout.write(describe(job, place, options))
        return 0
    if place.node_rank is None:
        return _run_elsewhere(job, options)
    return _run_here(job, place.node_rank, options, on_cpu=not place.uses_devices)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args`` and end the process with the job's exit status (2: the command cannot work)."""
    options = parse_args(args)
    logger.setLevel(options.log_level.upper())
    # Clients call main() and go on after a good run, as they do with the reference launcher.
    if (status := guarded("deepspeed", lambda: _launch(options))) != 0:
        sys.exit(status)


if __name__ == "__main__":
    main()
