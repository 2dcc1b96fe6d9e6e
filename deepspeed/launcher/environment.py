"""Which variables the ranks on other hosts are given: those with certain prefixes, and those of ``.deepspeed_env``.

Later sources win: this process's variables, the file in the home directory, the file in the current directory.
"""

import os
import re
from collections.abc import Mapping, Sequence

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.launcher.hostfile import read_entries

# A list on purpose, although it is module state: clients append the prefixes they want forwarded (as
# runner.EXPORT_ENVS). Of CUDA only what changes how programs run: which devices and toolkit there are differs between
# machines.
EXPORT_ENVS = [
    *("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "TORCH_", "PYTORCH_", "OMP_"),
    *("CUDA_DEVICE_", "CUDA_LAUNCH", "CUDA_MODULE"),
]
# What decides how the launchers themselves behave must be the same on all hosts.
_OUR_OWN = ("DS_ACCELERATOR", "DS_JOIN_TIMEOUT_S", "DS_HOST_TIMEOUT_S")
# Microsoft's AISC platform sets these on each host by itself.
_SET_BY_AISC = ("NCCL_IB_HCA", "UCX_NET_DEVICES")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def environment_file_name(env: Mapping[str, str]) -> str:
    """Name of the file with variables to forward: ``DS_ENV_FILE``, or ``.deepspeed_env``."""
    return env.get("DS_ENV_FILE") or ".deepspeed_env"


def read_environment_files(name: str, folders: Sequence[str]) -> dict[str, str]:
    """Variables of the files ``name`` in ``folders``, later folders winning; a folder without the file is skipped.

    A line is ``KEY=VALUE``, and a value everything behind the first ``=``, taken literally. Raises DeepSpeedConfigError
    for a file that cannot be read, and a line without ``=`` or with a name that no shell accepts.
    """
    variables: dict[str, str] = {}
    paths = dict.fromkeys(os.path.join(folder, name) for folder in folders)
    for path in filter(os.path.exists, paths):
        for where, line in read_entries(path, "environment file"):
            key, equals, value = line.partition("=")
            key = key.strip()
            if not equals:
                # Not the line itself: what has lost its name may be a password.
                raise DeepSpeedConfigError(f"{where} has no '='; expected KEY=VALUE")
            if not _NAME.match(key):
                what = f"{key!r} is not a variable name; use letters, digits and underscores"
                raise DeepSpeedConfigError(f"{where}: {what}")
            if "\0" in value:
                what = f"the value of {key} has a zero byte, which no variable can hold"
                raise DeepSpeedConfigError(f"{where}: {what}")
            variables[key] = value
    return variables


def exported(
    env: Mapping[str, str], *, prefixes: Sequence[str], cwd: str, from_files: Mapping[str, str]
) -> dict[str, str]:
    """Return name -> value of everything that other hosts are given, sorted by name.

    ``PYTHONPATH`` begins with ``cwd``, as it does for a script that is started here; a file's value replaces it.
    """
    withheld = _SET_BY_AISC if "AISC_JOB_NAME" in env else ()
    chosen = {name: value for name, value in env.items() if name.startswith(tuple(prefixes)) or name in _OUR_OWN}
    chosen["PYTHONPATH"] = os.pathsep.join([cwd, env["PYTHONPATH"]]) if env.get("PYTHONPATH") else cwd
    kept = {name: value for name, value in chosen.items() if name not in withheld and _NAME.match(name)}
    return dict(sorted((kept | dict(from_files)).items()))


def masked(variables: Mapping[str, str]) -> dict[str, str]:
    """The same with ``***`` for the values of names that look secret."""
    return {name: "***" if _SECRET.search(name) else value for name, value in variables.items()}
