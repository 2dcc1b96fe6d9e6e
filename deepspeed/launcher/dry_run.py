"""What a command line would do, as text. Pure."""

import shlex
from dataclasses import replace

from deepspeed.launcher.environment import masked
from deepspeed.launcher.job import Job
from deepspeed.launcher.resources import Place
from deepspeed.launcher.runners import RunnerCommand, RunnerOptions, build, node_command, ssh_command


def _numbers(numbers: tuple[int, ...] | range) -> str:
    """``0-3`` for consecutive numbers, else ``0,2,3``."""
    consecutive = len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]}-{numbers[-1]}" if consecutive else ",".join(map(str, numbers))


def _world(job: Job, place: Place) -> list[str]:
    lines = [f"world: {job.world_size} rank(s) on {len(job.hosts)} host(s)"]
    kind = "devices" if place.uses_devices else "the CPU, slots"
    for node, (host, slots) in enumerate(job.world.items()):
        first = job.first_rank(node)
        lines.append(f"  {host}: {kind} {_numbers(slots)}; ranks {_numbers(range(first, first + len(slots)))}")
    return lines


def _meeting(job: Job) -> str:
    if not job.master_addr:
        return "meeting point: found by the ranks in their scheduler's variables"
    port = f"port {job.master_port}" if job.master_port else "a free port that node 0 chooses"
    return f"meeting point: {job.master_addr}, {port}"


def _backend(command: RunnerCommand) -> list[str]:
    env = masked(command.env)
    assignments = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    lines = ["command:", f"  {' '.join([*assignments, shlex.join(command.argv)])}"]
    for path, text in command.files.items():
        lines += [f"file {path}:", *(f"  {line}" for line in text.splitlines())]
    return lines


def describe(job: Job, place: Place, *, options: RunnerOptions) -> str:
    """The world, the meeting point, the exported variables and the exact commands; values of secret names are masked
    everywhere.

    Raises UsageError when the runner cannot run the job.
    """
    shown = replace(job, exports=masked(job.exports))
    lines = [*_world(job, place), _meeting(job)]
    if place.node_rank is not None:
        command = node_command(shown, place.node_rank, options=options)
        lines += [f"node {place.node_rank} runs in this process, as with:", f"  {shlex.join(command)}"]
        return "\n".join(lines) + "\n"
    lines += ["variables for the hosts:", *(f"  {name}={value}" for name, value in shown.exports.items())]
    if options.launcher == "ssh":
        for node, host in enumerate(job.hosts):
            lines += [f"command for {host}:", f"  {shlex.join(ssh_command(shown, node, options=options))}"]
    else:
        lines += _backend(build(shown, options))
    return "\n".join(lines) + "\n"
