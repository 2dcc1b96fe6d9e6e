"""Files that users write for other hosts: hostfiles with their filters, and variables in ``.deepspeed_env``.

A hostfile has one ``name slots=N`` per line; blank lines and lines starting with ``#`` are skipped and
text behind the slot count is ignored. A filter is ``NODE[@NODE...]`` with ``NODE = name[:slot[,slot...]]``.

The ranks on other hosts are given variables with certain prefixes, and those of ``.deepspeed_env``. Later sources win:
this process's variables, the file in the home directory, the file in the current directory.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.errors import DeepSpeedConfigError, nearest_hint

# A leading minus would be an option of ssh, and a comma separates hosts there.
_LINE = re.compile(r"^([^\s,-][^\s,]*)\s+slots=(\d+)")

DEFAULT_HOSTFILE = "/job/hostfile"
# A list on purpose, although it is module state: clients append the prefixes they want forwarded (as
# runner.EXPORT_ENVS). Of CUDA only what changes how programs run: devices and toolkits differ.
EXPORT_ENVS = [
    *("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "TORCH_", "PYTORCH_", "OMP_"),
    *("CUDA_DEVICE_", "CUDA_LAUNCH", "CUDA_MODULE"),
]
# What decides how the launchers themselves behave must be the same on all hosts.
_OUR_OWN = ("DS_ACCELERATOR", "DS_HANG_NOTICE", "DS_HOST_TIMEOUT_S", "DS_JOIN_TIMEOUT_S")
# Microsoft's AISC platform sets these on each host by itself.
_SET_BY_AISC = ("NCCL_IB_HCA", "UCX_NET_DEVICES")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def read_entries(path: str, kind: str) -> list[tuple[str, str]]:
    """Return place (for messages) and text of every line that is neither blank nor a comment; ``kind`` names the file.

    Raises DeepSpeedConfigError (a ValueError) when the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = list(file)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise DeepSpeedConfigError(f"{kind} {path} cannot be read ({why}); check the path and its lines") from error
    return numbered_lines(lines, f"{kind} {path}")


def numbered_lines(lines: Iterable[str], name: str) -> list[tuple[str, str]]:
    """Return place, in the file ``name``, and text of every line that is neither blank nor a comment."""
    stripped = enumerate(map(str.strip, lines), start=1)
    return [(f"{name}, line {number}", line) for number, line in stripped if line and not line.startswith("#")]


def load_hostfile(path: str) -> dict[str, int]:
    """Return host -> number of slots in file order (the order gives the node ranks).

    Raises DeepSpeedConfigError (a ValueError) when the file cannot be read, and as ``hosts_of``.
    """
    return hosts_of(read_entries(path, "hostfile"), f"hostfile {path}")


def hosts_of(entries: Iterable[tuple[str, str]], name: str) -> dict[str, int]:
    """Return host -> number of slots, from (place, line) of the file ``name``.

    Raises DeepSpeedConfigError on a line of another form, a host without a slot, a repeated host or no host at all.
    """
    hosts: dict[str, int] = {}
    for where, line in entries:
        match = _LINE.match(line)
        if match is None:
            raise DeepSpeedConfigError(f"{where} is {line[:80]!r}; expected one host per line, 'name slots=N'")
        host, slots = match.group(1), int(match.group(2))
        if host in hosts:
            raise DeepSpeedConfigError(f"{where} names host {host!r} a second time; merge the two lines")
        if slots == 0:
            raise DeepSpeedConfigError(f"{where} gives host {host!r} no slot; delete the line, or --exclude the host")
        hosts[host] = slots
    if not hosts:
        raise DeepSpeedConfigError(f"{name} names no host; add at least one line 'name slots=N'")
    return hosts


def parse_range_list(text: str) -> list[int]:
    """Return the numbers of ``"0-3,6"``, sorted, each once. DeepSpeedConfigError for anything else."""
    numbers: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and (not high.isdecimal() or int(high) < int(low))):
            raise DeepSpeedConfigError(f"{text!r} is no list of numbers and ranges; write it like 0-3,6")
        numbers |= set(range(int(low), int(high if dash else low) + 1))
    return sorted(numbers)


def parse_filter(spec: str) -> dict[str, list[int] | None]:
    """Return host -> sorted slots, or None for the whole host; slots of a host named twice are united."""
    chosen: dict[str, list[int] | None] = {}
    for node in spec.split("@"):
        host, colon, slot_text = node.strip().partition(":")
        if not host:
            raise DeepSpeedConfigError(f"filter {spec!r} has an empty host name; expected name[:slot,...][@name...]")
        try:
            slots = {int(slot) for slot in slot_text.split(",")} if colon else set()
        except ValueError as error:
            message = f"filter {spec!r}: slots of host {host!r} must be numbers, got {slot_text!r}"
            raise DeepSpeedConfigError(message) from error
        previous = chosen.get(host, [])
        chosen[host] = None if previous is None or not colon else sorted(slots | set(previous))
    return chosen


def filter_hosts(hosts: Mapping[str, Sequence[int]], *, include: str = "", exclude: str = "") -> dict[str, list[int]]:
    """Return host -> chosen slots, in the order of ``hosts``; hosts left without a slot vanish.

    Raises DeepSpeedConfigError (a ValueError) for both filters at once, an unknown host or an unknown slot.
    """
    if include and exclude:
        raise DeepSpeedConfigError("include and exclude were both given; use one of them")
    chosen = parse_filter(include or exclude) if include or exclude else {}
    for host, wanted in chosen.items():
        if host not in hosts:
            hint = nearest_hint(host, hosts) or f"; known: {', '.join(list(hosts)[:10])}{', ...' * (len(hosts) > 10)}"
            problem = f"which is not one of the {len(hosts)} host(s) of this job{hint}"
            raise DeepSpeedConfigError(f"the filter names host {host!r}, {problem}")
        if missing := [slot for slot in wanted or () if slot not in hosts[host]]:
            problem = f"slot {missing[0]} of host {host!r}, which has slots {list(hosts[host])}"
            raise DeepSpeedConfigError(f"the filter names {problem}")
    result: dict[str, list[int]] = {}
    for host, slots in hosts.items():
        named = chosen.get(host, [])
        matched = list(slots) if named is None else named
        kept = matched if include else [slot for slot in slots if slot not in matched]
        if kept:
            result[host] = list(kept)
    return result


def environment_file_name(env: Mapping[str, str]) -> str:
    """Return the name of the file with variables to forward: ``DS_ENV_FILE``, or ``.deepspeed_env``."""
    return env.get("DS_ENV_FILE") or ".deepspeed_env"


def read_environment_files(name: str, folders: Sequence[str]) -> dict[str, str]:
    """Read variables of the files ``name`` in ``folders``, later folders winning; folders without the file are skipped.

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
                problem = "is not a variable name; use letters, digits and underscores"
                raise DeepSpeedConfigError(f"{where}: {key!r} {problem}")
            if "\0" in value:
                raise DeepSpeedConfigError(f"{where}: the value of {key} has a zero byte, which no variable can hold")
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
    """Return the variables with ``***`` for the values of names that look secret."""
    return {name: "***" if _SECRET.search(name) else value for name, value in variables.items()}
