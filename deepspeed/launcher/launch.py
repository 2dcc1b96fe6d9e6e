"""Per-node entry, ``python -m deepspeed.launcher.launch``: what the runners start on every node, and users by hand."""

import argparse
import os
import sys
from collections.abc import Sequence

from deepspeed.errors import UsageError
from deepspeed.launcher.job import COMMON_FLAGS, Flags, Job, add_flags, decode_world, job_of, parse_line
from deepspeed.monitor.log import logger
from deepspeed.monitor.program import guarded

_FLAGS: Flags = {
    "--node_rank": (0, "N", "index of this node"),
    "--master_addr": ("127.0.0.1", "A", "address of node 0"),
    "--master_port": (29500, "P", "rendezvous port on node 0"),
    "--world_info": ("None", "W", "base64 of the JSON of host -> device ids"),
    "--save_pid": (0, "PID", "keep this process's id in /tmp/PID.deepspeed"),
    "--on_devices": "show the ranks only the selected devices (set by the runners)",
    "--from_runner": ("", ("", "ssh", "pdsh"), "who reads the output (set by them)"),
}


def build_parser() -> argparse.ArgumentParser:
    description = "Run one node's ranks of a job; normally started by 'deepspeed'."
    parser = argparse.ArgumentParser("deepspeed.launcher.launch", allow_abbrev=False, description=description)
    add_flags(parser, {**COMMON_FLAGS, **_FLAGS})
    return parser


def make_job(options: argparse.Namespace) -> Job:
    """Make the job that ``options`` describe. Raises UsageError for a bad ``--world_info``."""
    if options.world_info == "None":
        raise UsageError("--world_info is required: it says which hosts and devices the job has")
    try:
        world = decode_world(options.world_info)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--world_info is not URL-safe base64 of JSON host -> device ids ({error})") from error
    return job_of(
        options,
        world=world,
        save_pid=options.save_pid,
        master_addr=options.master_addr,
        master_port=options.master_port,
        # Started by hand nobody says, and where ranks run on the CPU the device layer knows no variable to set.
        on_devices=options.on_devices or not options.from_runner,
    )


def run_here(job: Job, node_rank: int, *, runner: str = "") -> int:
    """Run ``run_node`` for this kind of job. Needs torch; a wrong command line is refused before its import."""
    if job.elastic is not None:
        from deepspeed.launcher.elastic.agent import run_elastic_node as run_node  # noqa: PLC0415
    else:
        from deepspeed.launcher.node.supervisor import run_node  # noqa: PLC0415

    return run_node(job, node_rank, runner=runner)


def _run(options: argparse.Namespace) -> int:
    status = run_here(make_job(options), options.node_rank, runner=options.from_runner)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # everything is closed; taking torch down in order would cost up to a second more


def main(args: Sequence[str] | None = None) -> None:
    """Run this node's part of the job and end the process with the job's exit status (2: the command cannot work)."""
    options = parse_line(build_parser(), args)
    logger.setLevel(options.log_level.upper())
    sys.exit(guarded("deepspeed", lambda: _run(options)))


if __name__ == "__main__":
    main()
