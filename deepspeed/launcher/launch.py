"""Per-node entry, ``python -m deepspeed.launcher.launch``: what the runners start on every node, and users by hand."""

import argparse
import os
import sys
from collections.abc import Sequence

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.launcher.job import Job, arguments_of_script, decode_world
from deepspeed.observe.log import logger

_LEVELS = ("debug", "info", "warning", "error", "critical")
USAGE_STATUS = 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the per-node flags."""
    parser = argparse.ArgumentParser(
        prog="deepspeed.launcher.launch",
        allow_abbrev=False,
        description="Run one node's ranks of a job; normally started by 'deepspeed'.",
    )
    parser.add_argument("--node_rank", type=int, default=0, metavar="N", help="index of this node")
    parser.add_argument("--master_addr", default="127.0.0.1", metavar="A", help="address of node 0")
    parser.add_argument("--master_port", type=int, default=29500, metavar="P", help="rendezvous port on node 0")
    parser.add_argument(
        "--world_info", default="None", metavar="W", help="URL-safe base64 of the JSON of host -> device ids"
    )
    parser.add_argument("--module", action="store_true", help="run the script as 'python -m NAME'")
    parser.add_argument("--no_python", action="store_true", help="run the script directly, without the interpreter")
    parser.add_argument("--no_local_rank", action="store_true", help="do not add --local_rank=N behind the script")
    parser.add_argument(
        "--save_pid", type=int, default=0, metavar="PID", help="keep this process's id in /tmp/PID.deepspeed"
    )
    parser.add_argument(
        "--enable_each_rank_log", default="None", metavar="DIR", help="one log file per rank instead of the terminal"
    )
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="pin each rank to its own cores")
    parser.add_argument("--bind_core_list", default=None, metavar="LIST", help="cores to share out, as in 0-3,8,10-11")
    parser.add_argument(
        "--on_devices",
        action="store_true",
        help="show the ranks only this node's selected devices (set by the runners)",
    )
    parser.add_argument(
        "--from_runner",
        choices=("", "ssh", "pdsh"),
        default="",
        help="end with the command that reads this output (set by the runners)",
    )
    parser.add_argument("--log_level", choices=_LEVELS, default="info", help="verbosity of the launcher")
    parser.add_argument("-q", "--quiet", action="store_true", help="same as --log_level error")
    parser.add_argument("training_script", help="script to run")
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help="arguments of the script, passed on untouched"
    )
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse ``args`` (default: the command line); a malformed line ends the process with status 2, as argparse does."""
    given = list(sys.argv[1:] if args is None else args)
    options = build_parser().parse_args(given)
    options.training_script_args = arguments_of_script(given, options.training_script, options.training_script_args)
    return options


def make_job(options: argparse.Namespace) -> Job:
    """The job that ``options`` describe. Raises UsageError for a missing or malformed ``--world_info``, or clashing
    flags.
    """
    if options.world_info == "None":
        raise UsageError("--world_info is required: it says which hosts and devices the job has")
    if options.no_python and options.module:
        raise UsageError("--no_python and --module exclude each other; use one of them")
    try:
        world = decode_world(options.world_info)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--world_info is not URL-safe base64 of JSON host -> device ids ({error})") from error
    if not world or not all(world.values()):
        raise UsageError("--world_info names no host, or a host without devices")
    return Job(
        world=world,
        script=options.training_script,
        arguments=tuple(options.training_script_args),
        module=options.module,
        no_python=options.no_python,
        local_rank_argument=not options.no_local_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        # Started by hand nobody says, and where ranks run on the CPU the device layer knows no variable to set.
        on_devices=options.on_devices or not options.from_runner,
        log_dir=None if options.enable_each_rank_log == "None" else options.enable_each_rank_log,
        bind_cores=options.bind_cores_to_rank,
        core_list=options.bind_core_list,
        pid_file=f"/tmp/{options.save_pid}.deepspeed" if options.save_pid else None,
        log_level=options.log_level,
        cwd=os.getcwd(),
        python=sys.executable,
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run this node's part of the job and end the process with the job's exit status (2: the command cannot work)."""
    options = parse_args(args)
    logger.setLevel("ERROR" if options.quiet else options.log_level.upper())
    try:
        job = make_job(options)
        from deepspeed.launcher.node.supervisor import node_job, run_node  # noqa: PLC0415 - needs torch; a wrong command line is refused at once

        status = run_node(node_job(job, options.node_rank, runner=options.from_runner))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # everything is closed; taking torch down in order would cost up to a second more
    except KeyboardInterrupt:
        status = 130  # before there was a rank
    except DeepSpeedError as error:
        sys.stderr.write(f"deepspeed: {error}\n")
        status = USAGE_STATUS
    sys.exit(status)


if __name__ == "__main__":
    main()
