"""Control groups of this process, of both kinds, and the memory that it may still have; from the kernel's files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_BOOT = "proc/sys/kernel/random/boot_id"
_UNLIMITED = 1 << 60  # groups of the first kind write "no limit" as a number near 2**63


@dataclass(frozen=True)
class Pool:
    """Memory that processes share, in bytes: ``free`` can still be had. ``key`` is the same for all who share it."""

    key: tuple[str | int, ...]
    name: str
    limit: float
    free: int


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _numbers(file: Path) -> dict[str, int]:
    """The file's lines "name number" (or "name: number kB"), in its own units."""
    rows = (line.replace(":", " ").split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's groups, innermost first, and whether they are of the first kind (one tree each)."""
    # what part of each controller's tree is mounted, and where; "" is that of the second kind
    mounts: dict[str, tuple[str, str]] = {}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        place, _, source = line.partition(" - ")
        kind, *_, options = source.split()
        for name in {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, []):
            mounts.setdefault(name, (place.split()[3], place.split()[4]))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        name = names and controller
        within, point = mounts.get(name, ("/", f"/sys/fs/cgroup/{name}"))
        top = root / point.lstrip("/")
        # In a container the path may be the host's, or lead out of what is mounted: then the mounted tree begins at its
        # own group.
        inside = path.removeprefix(within) if f"{path}/".startswith(f"{within.rstrip('/')}/") else path
        inner = top / inside.lstrip("/") if ".." not in inside else top
        for folder in dict.fromkeys([inner, *inner.parents, top]):
            if folder.is_relative_to(top):
                yield folder, bool(names)


def memory_groups(root: Path = ROOT) -> list[Pool]:
    """The groups that limit this process's memory, innermost first. Page cache is free: the kernel takes it back."""
    machine, pools = _text(root / _BOOT), []
    for folder, first in groups(root, "memory"):
        files = ("memory.limit_in_bytes",) if first else ("memory.max", "memory.high")
        texts = [(_text(folder / file), file) for file in files]
        if limits := [(int(text), file) for text, file in texts if text.isdigit() and int(text) < _UNLIMITED]:
            limit, file = min(limits)
            stat, prefix = _numbers(folder / "memory.stat"), "total_" if first else ""
            used = int(_text(folder / ("memory.usage_in_bytes" if first else "memory.current")) or 0)
            used -= sum(stat.get(prefix + name, 0) for name in ("active_file", "inactive_file", "slab_reclaimable"))
            name = f"control group {folder} ({file} {limit / 2**20:,.0f} MiB)"
            key = (machine, folder.stat().st_dev, folder.stat().st_ino)
            pools.append(Pool(key, name, limit, max(0, limit - max(0, used))))
    return pools


def memory_pools(root: Path = ROOT) -> list[Pool]:
    """Everything that bounds this process's memory: its control groups, and the machine. Empty where unknown."""
    pools, kib = memory_groups(root), _numbers(root / "proc/meminfo")
    if "MemAvailable" in kib:
        free, total = kib["MemAvailable"] << 10, kib["MemTotal"] << 10
        name = f"available memory of the machine ({free / 2**20:,.0f} of {total / 2**20:,.0f} MiB)"
        pools.append(Pool((_text(root / _BOOT),), name, total, free))
    return pools
