"""Becomes one rank under mpirun: turns MPI's variables into RANK and LOCAL_RANK, which scripts read before they call
anything of ours.

python -m deepspeed.launcher.launcher_helper --launcher mpich SCRIPT [ARGUMENTS...]
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from deepspeed.errors import UsageError
from deepspeed.launcher.job import arguments_of_script

# PMIX and PALS: MPICH of HPE Cray systems.
RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK")
LOCAL_RANK_VARIABLES = ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID")
USAGE_STATUS = 2


def rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """RANK and LOCAL_RANK from what MPI set in ``env``. Raises UsageError when it set nothing."""
    rank = next((env[name] for name in RANK_VARIABLES if env.get(name)), None)
    local_rank = next((env[name] for name in LOCAL_RANK_VARIABLES if env.get(name)), None)
    if rank is None or local_rank is None:
        missing = RANK_VARIABLES if rank is None else LOCAL_RANK_VARIABLES
        raise UsageError(
            f"none of {', '.join(missing)} is set, so this process was not started by MPICH's mpirun; start it "
            "with that"
        )
    return {"RANK": rank, "LOCAL_RANK": local_rank}


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
