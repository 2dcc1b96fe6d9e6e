"""The ``deepspeed`` command: read the flags, refuse what cannot work, start the ranks."""

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import NoReturn

from deepspeed.errors import DeepSpeedError, NotYetError, UsageError
from deepspeed.launcher.backend import run_backend
from deepspeed.launcher.dry_run import describe
from deepspeed.launcher.environment import EXPORT_ENVS, environment_file_name, exported, read_environment_files
from deepspeed.launcher.fanout import run_over_ssh
from deepspeed.launcher.hostfile import DEFAULT_HOSTFILE, load_hostfile, nearest_hint
from deepspeed.launcher.job import Job, arguments_of_script
from deepspeed.launcher.machine import (
    check_programs,
    check_reachable,
    is_this_machine,
    local_devices,
    own_address,
    remove_stale_pid_file,
)
from deepspeed.launcher.resources import BY_HAND_PORT, Place, Request, find_place, master_address
from deepspeed.launcher.runners import RUNNERS, RunnerOptions, build, find_runner, split_arguments
from deepspeed.observe.log import logger

_LEVELS = ("debug", "info", "warning", "error", "critical")
USAGE_STATUS = 2
INTERRUPTED = 130
# For runners that cannot be told a port later: below those from which Linux serves outgoing connections.
_SOME_PORTS = range(20000, 29973)

_DESCRIPTION = (
    "Start a training script on the accelerators of one or many hosts; what follows the script belongs to it."
)
_RULES = """\
hosts and devices:
  Without a hostfile the job runs on this machine: one rank per accelerator that CUDA_VISIBLE_DEVICES leaves visible,
  or one on the
  CPU. --num_gpus N takes the first N visible ones; slots in --include and --exclude are device numbers as in
  CUDA_VISIBLE_DEVICES,
  and never one that it hides. Without accelerators, or with DS_ACCELERATOR=cpu, --num_gpus N starts N ranks on the CPU.
  A hostfile has lines 'name slots=N'. FILTER is name[:slot,...][@name...], as in 'node1@node2:0,2'.
  The ranks meet on the first host, by its name in the hostfile, unless --master_addr says otherwise.
  Other hosts are given variables starting with MLFLOW, PYTHON, MV2, UCX, NCCL,
  GLOO, TORCH_, PYTORCH_, OMP_, CUDA_DEVICE_, CUDA_LAUNCH or CUDA_MODULE, and those of .deepspeed_env files (lines
  KEY=VALUE; in the home directory, then here; DS_ENV_FILE names another file).

exit status:
  0 when every rank returned 0; that of the rank that failed first, 128 + S after signal S; 2 when the command line
  cannot work.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As argparse, and with the flag that a mistyped one resembles."""
        kind, _, rest = message.partition("unrecognized arguments: ")
        flags = [flag for action in self._actions for flag in action.option_strings]
        mistyped = (
            next((word.partition("=")[0] for word in rest.split() if word.startswith("-")), None) if not kind else None
        )
        hint = nearest_hint(mistyped, flags) if mistyped else ""
        super().error(f"{message}; {hint}" if hint.startswith("did you") else message)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    # Without abbreviations, so that nothing of the script's own arguments is ever matched.
    parser = _Parser(
        prog="deepspeed",
        allow_abbrev=False,
        description=_DESCRIPTION,
        epilog=_RULES,
        usage="deepspeed [flags] script [arguments of the script...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_selection(parser.add_argument_group("which hosts and devices"))
    _add_meeting(parser.add_argument_group("where the ranks meet, and nodes started by hand"))
    _add_script(parser.add_argument_group("how the script runs"))
    _add_runner(parser.add_argument_group("how other hosts are reached"))
    _add_output(parser.add_argument_group("what is shown and kept"))
    _add_absent(parser.add_argument_group("not in this release (refused)"))
    parser.add_argument("user_script", metavar="script", help="path of the script (or a module or program, see above)")
    parser.add_argument("user_args", metavar="arguments", nargs=argparse.REMAINDER, help="passed on to it untouched")
    return parser


def _add_selection(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-H",
        "--hostfile",
        default=DEFAULT_HOSTFILE,
        metavar="FILE",
        help=f"hosts (default {DEFAULT_HOSTFILE}, if there)",
    )
    group.add_argument("-i", "--include", default="", metavar="FILTER", help="only these hosts and slots")
    group.add_argument("-e", "--exclude", default="", metavar="FILTER", help="all but these hosts and slots")
    group.add_argument("--num_nodes", type=int, default=-1, metavar="N", help="only the first N hosts")
    group.add_argument(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        metavar="N",
        help="N ranks on every host (default: all slots)",
    )


def _add_meeting(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--master_addr", default="", metavar="A", help="address of the first host (default: 127.0.0.1 for one host)"
    )
    port = f"port there (default: a free one; {BY_HAND_PORT} when nodes are started by hand)"
    group.add_argument("--master_port", type=int, default=None, metavar="P", help=port)
    by_hand = (
        "run the ranks of node R only: you start this command on every node, with --hostfile or with "
        "--num_nodes, --num_gpus, --master_addr"
    )
    group.add_argument("--node_rank", type=int, default=-1, metavar="R", help=by_hand)
    group.add_argument(
        "--no_ssh",
        action="store_true",
        help="you start every node yourself; needs --node_rank, which alone says the same",
    )


def _add_script(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--module", action="store_true", help="run the script as 'python -m NAME'")
    group.add_argument("--no_python", action="store_true", help="run the script directly, without the interpreter")
    group.add_argument("--no_local_rank", action="store_true", help="do not add --local_rank=N behind the script")
    group.add_argument("--bind_cores_to_rank", action="store_true", help="give each rank CPU cores of its own")
    group.add_argument(
        "--bind_core_list",
        default=None,
        metavar="LIST",
        help="the cores to give out, as in 0-3,8,10-11; implies binding",
    )


def _add_runner(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--launcher", default="ssh", metavar="NAME", help=f"one of {', '.join(RUNNERS)} (default ssh)")
    group.add_argument(
        "--launcher_args",
        default="",
        metavar="ARGS",
        help="more arguments for that program, as one quoted text after an equals sign (--launcher_args='-a -b')",
    )
    group.add_argument("--force_multi", action="store_true", help="use the runner even for one host")
    group.add_argument("--no_ssh_check", action="store_true", help="do not test first that ssh reaches all hosts")
    group.add_argument("--ssh_port", type=int, default=None, metavar="P", help="ssh port of the hosts")
    group.add_argument(
        "--venv_script", default=None, metavar="FILE", help="file that bash reads on every host first (ssh, pdsh)"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="show hosts, ranks, variables and commands; start nothing"
    )
    group.add_argument(
        "--enable_each_rank_log", default="None", metavar="DIR", help="one log file per rank instead of the terminal"
    )
    group.add_argument(
        "--save_pid",
        action="store_true",
        help="keep each launcher's process id in /tmp/PID.deepspeed, PID being this command's",
    )
    group.add_argument("--log_level", choices=_LEVELS, default="info", help="verbosity of the launcher")
    group.add_argument("-q", "--quiet", action="store_true", help="same as --log_level error")


def _add_absent(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--autotuning", choices=("", "tune", "run"), default="", help="search for a configuration")
    group.add_argument("--elastic_training", action="store_true", help="change the number of nodes while running")
    group.add_argument("--min_elastic_nodes", type=int, default=-1, metavar="N", help="with --elastic_training")
    group.add_argument("--max_elastic_nodes", type=int, default=-1, metavar="N", help="with --elastic_training")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse ``args`` (default: the command line); a malformed line ends the process with status 2, as argparse does."""
    given = list(sys.argv[1:] if args is None else args)
    options = build_parser().parse_args(given)
    options.user_args = arguments_of_script(given, options.user_script, options.user_args)
    return options


def refuse_absent(options: argparse.Namespace) -> None:
    """Raise NotYetError for a flag whose effect this release does not have, UsageError for numbers out of range."""
    if options.autotuning:
        raise NotYetError(
            "--autotuning is not in this release; leave it out, and set batch and bucket sizes in the "
            "configuration yourself"
        )
    if options.elastic_training or options.min_elastic_nodes != -1 or options.max_elastic_nodes != -1:
        raise NotYetError(
            "--elastic_training and its limits are not in this release; leave them out, and resume a "
            "checkpoint to go on with other nodes"
        )
    for flag, port in (("--master_port", options.master_port), ("--ssh_port", options.ssh_port)):
        if port is not None and not 0 <= port <= 65535:
            raise UsageError(f"{flag} {port} is no port number; ports go from 1 to 65535")


def check_target(options: argparse.Namespace) -> None:
    """Raise UsageError when the script, module or program to run does not exist."""
    target = options.user_script
    if options.no_python and options.module:
        raise UsageError("--no_python and --module exclude each other; use one of them")
    if options.no_python:
        if shutil.which(target) is None:
            raise UsageError(f"program {target!r} does not exist or is not executable (--no_python runs it directly)")
    elif options.module:
        # Only the top-level package is looked up: finding more would import it.
        if PathFinder.find_spec(target.partition(".")[0], [os.getcwd(), *sys.path]) is None:
            raise UsageError(
                f"module {target!r} was not found from {os.getcwd()} or in the Python environment; check the "
                "name after --module"
            )
    elif not os.path.exists(target):
        raise UsageError(f"script {target!r} does not exist in {os.getcwd()}; check the path")


def _hosts(path: str) -> dict[str, int] | None:
    """Content of the hostfile; None when only the default one is meant and there is none."""
    return None if path == DEFAULT_HOSTFILE and not os.path.exists(path) else load_hostfile(path)


def _find_place(options: argparse.Namespace, request: Request) -> Place:
    cpu_only = os.environ.get("DS_ACCELERATOR") == "cpu"
    hosts = _hosts(options.hostfile)
    place = find_place(
        request, hosts, cpu_only=cpu_only, devices=lambda: local_devices(os.environ), is_here=is_this_machine
    )
    if hosts is not None and place.node_rank is None and place.uses_devices and os.environ.get("CUDA_VISIBLE_DEVICES"):
        logger.warning(
            "CUDA_VISIBLE_DEVICES of this shell is not passed on to the hosts; choose devices with --include "
            "or --exclude"
        )
    return place


def _port(options: argparse.Namespace, place: Place, launcher: str) -> int:
    """The port as given; else 0 where node 0 can choose and tell, a fixed one by hand, and any one for other
    runners.
    """
    if options.master_port is not None:
        return int(options.master_port)
    if len(place.world) == 1 and place.node_rank is not None:
        return 0
    if place.node_rank is not None:
        return BY_HAND_PORT
    return 0 if launcher in ("ssh", "slurm") else random.choice(_SOME_PORTS)


def _exports(place: Place) -> dict[str, str]:
    if place.node_rank is not None:
        return {}
    folders = [os.path.expanduser("~"), os.getcwd()]
    from_files = read_environment_files(environment_file_name(os.environ), folders)
    return exported(os.environ, prefixes=EXPORT_ENVS, cwd=os.getcwd(), from_files=from_files)


def make_job(options: argparse.Namespace, place: Place, launcher: str) -> Job:
    """The job that ``options`` describe at ``place``. Raises UsageError or DeepSpeedConfigError, with the user's
    words.
    """
    # Slurm orders the hosts in its own way, so only the ranks know which is the first.
    slurm = place.node_rank is None and launcher == "slurm"
    address = options.master_addr
    if not slurm:
        address = master_address(place, address, is_here=is_this_machine, own_address=own_address)
    return Job(
        world=place.world,
        script=options.user_script,
        arguments=tuple(options.user_args),
        module=options.module,
        no_python=options.no_python,
        local_rank_argument=not options.no_local_rank,
        master_addr=address,
        master_port=_port(options, place, launcher),
        on_devices=place.on_devices,
        log_dir=None if options.enable_each_rank_log == "None" else options.enable_each_rank_log,
        bind_cores=options.bind_cores_to_rank,
        core_list=options.bind_core_list,
        pid_file=f"/tmp/{os.getpid()}.deepspeed" if options.save_pid else None,
        log_level="error" if options.quiet else options.log_level,
        cwd=os.getcwd(),
        python=sys.executable,
        exports=_exports(place),
    )


def _runner_options(options: argparse.Namespace, request: Request, launcher: str) -> RunnerOptions:
    return RunnerOptions(
        launcher=launcher,
        launcher_args=split_arguments(options.launcher_args),
        ssh=split_arguments(os.environ.get("DS_SSH", ""), source="DS_SSH") or ("ssh",),
        ssh_port=options.ssh_port,
        venv_script=options.venv_script,
        save_pid=os.getpid() if options.save_pid else 0,
        hostfile=options.hostfile if os.path.exists(options.hostfile) else None,
        selected_by=request.selected_by,
        scratch=os.path.join(tempfile.gettempdir(), f"deepspeed_{os.getpid()}_"),
        env=os.environ,
    )


def _run_here(job: Job, node_rank: int, *, on_cpu: bool) -> int:
    if on_cpu:
        ranks = len(job.world[job.hosts[node_rank]])
        logger.info("no accelerator is used; starting %d rank%s on the CPU", ranks, "" if ranks == 1 else "s")
    if job.pid_file is not None:
        remove_stale_pid_file(job.pid_file)
    # Needs torch; a wrong command line is refused at once.
    from deepspeed.launcher.node.supervisor import node_job, run_node  # noqa: PLC0415

    logger.debug("starting %s", job)
    return run_node(node_job(job, node_rank))


def _run_elsewhere(job: Job, runner: RunnerOptions, *, check: bool) -> int:
    command = build(job, runner) if runner.launcher != "ssh" else None
    check_programs(runner)
    if check and RUNNERS[runner.launcher].per_host:
        check_reachable(job.hosts, runner)
    if command is None:
        return run_over_ssh(job, options=runner)
    logger.info("starting %d ranks on %d hosts through %s", job.world_size, len(job.hosts), runner.launcher)
    return run_backend(command)


def _launch(options: argparse.Namespace) -> int:
    refuse_absent(options)
    check_target(options)
    launcher = find_runner(options.launcher)
    request = Request(
        include=options.include,
        exclude=options.exclude,
        num_nodes=options.num_nodes,
        num_gpus=options.num_gpus,
        node_rank=options.node_rank,
        no_ssh=options.no_ssh,
        force_multi=options.force_multi,
        master_addr=options.master_addr,
    )
    runner = _runner_options(options, request, launcher)
    place = _find_place(options, request)
    job = make_job(options, place, launcher)
    if options.dry_run:
        # Values of variables may hold bytes that are no text.
        sys.stdout.write(describe(job, place, options=runner).encode(errors="backslashreplace").decode())
        return 0
    if place.node_rank is None:
        return _run_elsewhere(job, runner, check=not options.no_ssh_check)
    for flag, given in (
        ("--launcher_args", options.launcher_args),
        ("--venv_script", options.venv_script),
        ("--ssh_port", options.ssh_port),
    ):
        if given:
            logger.warning(
                "%s has no effect here, because no other host is reached; --force_multi uses the runner", flag
            )
    return _run_here(job, place.node_rank, on_cpu=not place.uses_devices)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args`` and end the process with the job's exit status (2: the command cannot work)."""
    options = parse_args(args)
    logger.setLevel("ERROR" if options.quiet else options.log_level.upper())
    try:
        status = _launch(options)
    except DeepSpeedError as error:
        sys.stderr.write(f"deepspeed: {error}\n")
        status = USAGE_STATUS
    except KeyboardInterrupt:
        status = INTERRUPTED  # before there was a rank
    # Clients call main() and go on after a good run, as they do with the reference launcher.
    if status != 0:
        sys.exit(status)


if __name__ == "__main__":
    main()
