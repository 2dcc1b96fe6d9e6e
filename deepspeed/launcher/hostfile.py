"""Hostfiles and include/exclude filters.

A hostfile has one ``name slots=N`` per line; blank lines and lines starting with ``#`` are skipped and
text behind the slot count is ignored. A filter is ``NODE[@NODE...]`` with ``NODE = name[:slot[,slot...]]``.
"""

import re
from collections.abc import Mapping, Sequence

from deepspeed.errors import DeepSpeedConfigError, nearest_hint

# A leading minus would be an option of ssh, and a comma separates hosts there.
_LINE = re.compile(r"^([^\s,-][^\s,]*)\s+slots=(\d+)")

DEFAULT_HOSTFILE = "/job/hostfile"


def read_entries(path: str, what: str) -> list[tuple[str, str]]:
    """Place (for messages) and text of every line that is neither blank nor a comment; ``what`` the file is.

    Raises DeepSpeedConfigError (a ValueError) when the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise DeepSpeedConfigError(f"{what} {path} cannot be read ({why}); check the path and its lines") from error
    kept = [(number, line) for number, line in enumerate(lines, start=1) if line and not line.startswith("#")]
    return [(f"{what} {path}, line {number}", line) for number, line in kept]


def load_hostfile(path: str) -> dict[str, int]:
    """Return host -> number of slots in file order (the order gives the node ranks).

    Raises DeepSpeedConfigError (a ValueError) when the file cannot be read, and on a line of another form, a host
    without a slot, a repeated host or no host at all.
    """
    hosts: dict[str, int] = {}
    for where, line in read_entries(path, "hostfile"):
        match = _LINE.match(line)
        if match is None:
            raise DeepSpeedConfigError(f"{where} is {line[:80]!r}; expected one host per line, 'name slots=N'")
        host, slots = match.group(1), int(match.group(2))
        if host in hosts:
            raise DeepSpeedConfigError(f"{where} names host {host!r} a second time; merge the two lines")
        if slots == 0:
            what = "delete the line, or leave the host out with --exclude"
            raise DeepSpeedConfigError(f"{where} gives host {host!r} no slot; {what}")
        hosts[host] = slots
    if not hosts:
        raise DeepSpeedConfigError(f"hostfile {path} names no host; add at least one line 'name slots=N'")
    return hosts


def parse_filter(spec: str) -> dict[str, list[int] | None]:
    """Return host -> sorted slots, or None for the whole host; slots of a host named twice are united."""
    chosen: dict[str, list[int] | None] = {}
    for node in spec.split("@"):
        host, colon, slot_text = node.strip().partition(":")
        if not host:
            form = "expected NODE[@NODE...] with NODE = name[:slot[,slot...]]"
            raise DeepSpeedConfigError(f"filter {spec!r} has an empty host name; {form}")
        try:
            slots = {int(slot) for slot in slot_text.split(",")} if colon else set()
        except ValueError as error:
            what = f"slots of host {host!r} must be numbers, got {slot_text!r}"
            raise DeepSpeedConfigError(f"filter {spec!r}: {what}") from error
        known = chosen.get(host, [])
        chosen[host] = None if known is None or not colon else sorted(slots | set(known))
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
            what = f"which is not one of the {len(hosts)} host(s) of this job{hint}"
            raise DeepSpeedConfigError(f"the filter names host {host!r}, {what}")
        if missing := [slot for slot in wanted or () if slot not in hosts[host]]:
            what = f"slot {missing[0]} of host {host!r}, which has slots {list(hosts[host])}"
            raise DeepSpeedConfigError(f"the filter names {what}")
    result: dict[str, list[int]] = {}
    for host, slots in hosts.items():
        named = chosen.get(host, [])
        matched = list(slots) if named is None else named
        kept = matched if include else [slot for slot in slots if slot not in matched]
        if kept:
            result[host] = list(kept)
    return result
