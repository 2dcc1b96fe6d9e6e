"""Hostfile text and include/exclude filters, as pure functions of their arguments.

A hostfile has one ``name slots=N`` per line; blank lines and lines starting with ``#`` are skipped and
text behind the slot count is ignored. A filter is ``NODE[@NODE...]`` with ``NODE = name[:slot[,slot...]]``.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.errors import DeepSpeedConfigError

# A leading minus would be an option of ssh, and a comma separates hosts there.
_LINE = re.compile(r"^([^\s,-][^\s,]*)\s+slots=(\d+)")

DEFAULT_HOSTFILE = "/job/hostfile"
_LISTED = 10  # hosts named in a message


def nearest_hint(name: str, candidates: Iterable[str]) -> str:
    """What a message about the unknown ``name`` ends with: the candidate that resembles it, or the first few of
    them.
    """
    known = list(candidates)
    close = difflib.get_close_matches(name, known, n=1)
    return (
        f"did you mean {close[0]!r}?"
        if close
        else f"known: {', '.join(known[:_LISTED])}{', ...' * (len(known) > _LISTED)}"
    )


def parse_hostfile(lines: Iterable[str], *, name: str = "hostfile") -> dict[str, int]:
    """Return host -> number of slots in file order (the order gives the node ranks); ``name`` is for messages.

    Raises DeepSpeedConfigError (a ValueError) on a line of another form, a host without a slot, a repeated host or no
    host at all.
    """
    hosts: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise DeepSpeedConfigError(
                f"{name}, line {number} is {line[:80]!r}; expected one host per line, 'name slots=N'"
            )
        host, slots = match.group(1), int(match.group(2))
        if host in hosts:
            raise DeepSpeedConfigError(f"{name}, line {number} names host {host!r} a second time; merge the two lines")
        if slots == 0:
            raise DeepSpeedConfigError(
                f"{name}, line {number} gives host {host!r} no slot; delete the line, or leave the host out "
                "with --exclude"
            )
        hosts[host] = slots
    if not hosts:
        raise DeepSpeedConfigError(f"{name} names no host; add at least one line 'name slots=N'")
    return hosts


def read_hostfile(path: str) -> dict[str, int] | None:
    """Parse the file at ``path``; None when there is no such file. Raises as :func:`parse_hostfile` does."""
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return parse_hostfile(file, name=f"hostfile {path}")


def load_hostfile(path: str) -> dict[str, int]:
    """Parse the file that the user named. Raises DeepSpeedConfigError when it cannot be read, in addition to
    :func:`parse_hostfile`.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return parse_hostfile(file, name=f"hostfile {path}")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise DeepSpeedConfigError(
            f"hostfile {path} cannot be read ({why}); check the path, and its lines 'name slots=N'"
        ) from error


def parse_filter(spec: str) -> dict[str, list[int] | None]:
    """Return host -> sorted slots, or None for the whole host; slots of a host named twice are united."""
    chosen: dict[str, list[int] | None] = {}
    for node in spec.split("@"):
        host, colon, slot_text = node.strip().partition(":")
        if not host:
            raise DeepSpeedConfigError(
                f"filter {spec!r} has an empty host name; expected NODE[@NODE...] with NODE = name[:slot[,slot...]]"
            )
        if not colon:
            chosen[host] = None
            continue
        try:
            slots = {int(slot) for slot in slot_text.split(",")}
        except ValueError as error:
            raise DeepSpeedConfigError(
                f"filter {spec!r}: slots of host {host!r} must be numbers, got {slot_text!r}"
            ) from error
        known = chosen.get(host, [])
        chosen[host] = None if known is None else sorted(slots | set(known))
    return chosen


def _check_filter(chosen: Mapping[str, list[int] | None], hosts: Mapping[str, Sequence[int]]) -> None:
    for host, slots in chosen.items():
        if host not in hosts:
            raise DeepSpeedConfigError(
                f"the filter names host {host!r}, which is not one of the {len(hosts)} host(s) of this job; "
                f"{nearest_hint(host, hosts)}"
            )
        for slot in slots or ():
            if slot not in hosts[host]:
                raise DeepSpeedConfigError(
                    f"the filter names slot {slot} of host {host!r}, which has slots {list(hosts[host])}"
                )


def filter_hosts(hosts: Mapping[str, Sequence[int]], *, include: str = "", exclude: str = "") -> dict[str, list[int]]:
    """Return host -> chosen slots, in the order of ``hosts``; hosts left without a slot vanish.

    Raises DeepSpeedConfigError (a ValueError) for both filters at once, an unknown host or an unknown slot.
    """
    if include and exclude:
        raise DeepSpeedConfigError("include and exclude were both given; use one of them")
    if not include and not exclude:
        return {host: list(slots) for host, slots in hosts.items()}
    chosen = parse_filter(include or exclude)
    _check_filter(chosen, hosts)
    result: dict[str, list[int]] = {}
    for host, slots in hosts.items():
        named = chosen.get(host, [])
        matched = list(slots) if named is None else named
        kept = matched if include else [slot for slot in slots if slot not in matched]
        if kept:
            result[host] = list(kept)
    return result
