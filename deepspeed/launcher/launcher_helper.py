"""Becomes one rank under mpirun: turns MPI's variables into RANK and LOCAL_RANK, which scripts read themselves.

python -m deepspeed.launcher.launcher_helper --launcher mpich SCRIPT [ARGUMENTS...]
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from deepspeed.errors import UsageError
from deepspeed.launcher.job import USAGE_STATUS, arguments_of_script

# PMIX and PALS: MPICH of HPE Cray systems.
_SOURCES = {"RANK": ("PMIX_RANK", "PMI_RANK"), "LOCAL_RANK": ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID")}


def rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """RANK and LOCAL_RANK from what MPI set in ``env``. Raises UsageError when it set nothing."""
    variables = {}
    for name, sources in _SOURCES.items():
        variables[name] = next((env[source] for source in sources if env.get(source)), "")
        if not variables[name]:
            what = "so this process was not started by MPICH's mpirun; start it with that"
            raise UsageError(f"none of {', '.join(sources)} is set, {what}")
    return variables


def main(args: Sequence[str] | None = None) -> None:
    """Replace this process by the rank's."""
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launcher_helper", allow_abbrev=False)
    parser.add_argument("--launcher", choices=("mpich",), required=True)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--no_python", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = list(sys.argv[1:] if args is None else args)
    options = parser.parse_args(given)
    head = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    command = [*head, options.script, *arguments_of_script(given, options.script, options.arguments)]
    try:
        variables = rank_variables(os.environ)
        os.execvpe(command[0], command, {**os.environ, **variables})
    except UsageError as error:
        sys.stderr.write(f"deepspeed: {error}\n")
    except OSError as error:
        sys.stderr.write(f"deepspeed: cannot start {command[0]}: {error.strerror}\n")
    sys.exit(USAGE_STATUS)


if __name__ == "__main__":
    main()
