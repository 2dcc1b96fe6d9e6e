"""The ``deepspeed`` command: read the flags, refuse what cannot work, start the ranks."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from deepspeed.errors import DeepSpeedError, NotYetError, UsageError
from deepspeed.observe.log import logger

DEFAULT_HOSTFILE = "/job/hostfile"
_LEVELS = ("debug", "info", "warning", "error", "critical")
USAGE_STATUS = 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all documented flags; those of several nodes are known so that they can be refused by name."""
    # Without abbreviations, so that nothing of the script's own arguments is ever matched.
    parser = argparse.ArgumentParser(
        prog="deepspeed", allow_abbrev=False, description="Start a training script on several ranks; what follows the script belongs to it."
    )
    ranks_help = "ranks to start (default: one per accelerator, or one on the CPU)"
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N", help=ranks_help)
    parser.add_argument("--master_addr", default="", metavar="A", help="rendezvous address (default: 127.0.0.1)")
    parser.add_argument("--master_port", type=int, default=None, metavar="P", help="rendezvous port (default: a free one)")
    parser.add_argument("--module", action="store_true", help="run the script as 'python -m NAME'")
    parser.add_argument("--no_python", action="store_true", help="run the script directly, without the interpreter")
    parser.add_argument("--no_local_rank", action="store_true", help="do not add --local_rank=N behind the script")
    parser.add_argument("--enable_each_rank_log", default="None", metavar="DIR", help="one log file per rank instead of the terminal")
    parser.add_argument("--log_level", choices=_LEVELS, default="info", help="verbosity of the launcher")
    parser.add_argument("-q", "--quiet", action="store_true", help="same as --log_level error")
    _add_multi_node_flags(parser)
    parser.add_argument("user_script", help="script to run")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="arguments of the script, passed on untouched")
    return parser


def _add_multi_node_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several nodes, autotuning and core binding (not in this release yet)")
    group.add_argument("-H", "--hostfile", default=DEFAULT_HOSTFILE)
    group.add_argument("-i", "--include", default="")
    group.add_argument("-e", "--exclude", default="")
    group.add_argument("--num_nodes", type=int, default=-1)
    group.add_argument("--node_rank", type=int, default=-1)
    group.add_argument("--launcher", default="pdsh")
    group.add_argument("--launcher_args", default="")
    group.add_argument("--no_ssh", action="store_true")
    group.add_argument("--no_ssh_check", action="store_true")
    group.add_argument("--force_multi", action="store_true")
    group.add_argument("--save_pid", action="store_true")
    group.add_argument("--autotuning", choices=("", "tune", "run"), default="")
    group.add_argument("--bind_cores_to_rank", action="store_true")
    group.add_argument("--bind_core_list", default=None)
    group.add_argument("--ssh_port", type=int, default=None)
    group.add_argument("--venv_script", default=None)


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse ``args`` (default: the command line); a malformed line ends the process with status 2, as argparse does."""
    given = list(sys.argv[1:] if args is None else args)
    options = build_parser().parse_args(given)
    # argparse drops a "--" that directly follows the script; it belongs to the script.
    rest = len(options.user_args)
    if given[len(given) - rest - 2 : len(given) - rest] == [options.user_script, "--"]:
        options.user_args.insert(0, "--")
    return options


def refuse_unsupported(options: argparse.Namespace) -> None:
    """Raise NotYetError naming the first flag whose effect this release does not have."""
    wanted = {
        "--include": options.include,
        "--exclude": options.exclude,
        "--num_nodes": options.num_nodes > 1,
        "--node_rank": options.node_rank > 0,
        "--launcher": options.launcher != "pdsh",
        "--launcher_args": options.launcher_args,
        "--no_ssh": options.no_ssh,
        "--force_multi": options.force_multi,
        "--save_pid": options.save_pid,
        "--autotuning": options.autotuning,
        "--bind_cores_to_rank": options.bind_cores_to_rank,
        "--bind_core_list": options.bind_core_list is not None,
        "--ssh_port": options.ssh_port is not None,
        "--venv_script": options.venv_script is not None,
    }
    for flag, given in wanted.items():
        if given:
            raise NotYetError(f"{flag} is not in this release yet; this launcher starts the ranks of one machine, so leave {flag} out")
    if options.hostfile != DEFAULT_HOSTFILE or os.path.exists(options.hostfile):
        raise NotYetError(
            f"hostfile {options.hostfile} was given, and jobs on several nodes are not in this release yet; "
            "start one machine without a hostfile, or use torchrun or srun on every node"
        )


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
                f"module {target!r} was not found from {os.getcwd()} or in the Python environment; check the name after --module"
            )
    elif not os.path.exists(target):
        raise UsageError(f"script {target!r} does not exist in {os.getcwd()}; check the path")


def count_ranks(wanted: int) -> int:
    """Return the number of ranks to start; ``wanted`` -1 means one per accelerator, or one on a machine without.

    Raises UsageError when more ranks are wanted than there are accelerators.
    """
    import torch  # noqa: PLC0415 - takes about a second, and a wrong command line should be refused at once

    found = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.accelerator.device_count()
    if wanted == 0 or wanted < -1:
        raise UsageError(f"--num_gpus {wanted} starts no rank; give a number from 1 on, or leave it out")
    if found == 0:
        ranks = max(wanted, 1)
        logger.info("no accelerator is used; starting %d rank%s on the CPU", ranks, "" if ranks == 1 else "s")
        return ranks
    if wanted > found:
        raise UsageError(
            f"--num_gpus {wanted}, but {found} accelerator(s) are visible to this process; "
            "lower the number, widen the visible devices, or set DS_ACCELERATOR=cpu for ranks on the CPU"
        )
    return found if wanted == -1 else wanted


def _command_head(options: argparse.Namespace) -> tuple[str, ...]:
    if options.no_python:
        return (options.user_script,)
    if options.module:
        return (sys.executable, "-u", "-m", options.user_script)
    return (sys.executable, "-u", options.user_script)


def _launch(options: argparse.Namespace) -> int:
    refuse_unsupported(options)
    check_target(options)
    ranks = count_ranks(options.num_gpus)
    from deepspeed.launcher.node import NodeJob, run_node  # noqa: PLC0415 - needs torch, see count_ranks

    job = NodeJob(
        head=_command_head(options),
        tail=tuple(options.user_args),
        ranks=ranks,
        master_addr=options.master_addr or "127.0.0.1",
        master_port=options.master_port or 0,
        local_rank_argument=not options.no_local_rank,
        log_dir=None if options.enable_each_rank_log == "None" else options.enable_each_rank_log,
    )
    logger.debug("starting %s", job)
    return run_node(job)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args`` and end the process with the job's exit status (2: the command cannot work)."""
    options = parse_args(args)
    logger.setLevel("ERROR" if options.quiet else options.log_level.upper())
    try:
        status = _launch(options)
    except DeepSpeedError as error:
        sys.stderr.write(f"deepspeed: {error}\n")
        status = USAGE_STATUS
    # Clients call main() and go on after a good run, as they do with the reference launcher.
    if status != 0:
        sys.exit(status)


if __name__ == "__main__":
    main()
