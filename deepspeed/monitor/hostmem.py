"""Memory of this process and what it may still have, in bytes; and how glibc gives it back."""

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")
_BOOT = "proc/sys/kernel/random/boot_id"
_UNLIMITED = 1 << 60  # groups of the first kind write "no limit" as a number near 2**63
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGE_BYTES, _KEEP_BYTES = 4 << 20, 32 << 20
_MADV_HUGEPAGE, _HUGE_BYTES = 14, 2 << 20  # <sys/mman.h>
_LIBC = ctypes.CDLL(None)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _numbers(file: Path) -> dict[str, int]:
    """Return the file's lines "name number" (or "name: number kB") as a dict, in the file's units."""
    rows = (line.replace(":", " ").split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def rss_bytes() -> int:
    """Return the resident set size of this process."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


def peak_rss_bytes() -> int:
    """Return the largest resident set since the process started or since ``reset_peak_rss`` last worked."""
    peak = _numbers(ROOT / "proc/self/status").get("VmHWM", 0) << 10
    return peak or rss_bytes()  # some kernels do not tell


def reset_peak_rss() -> bool:
    """Start a new peak measurement; return False where the system cannot (then the peak is since the process start)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def host_total_bytes() -> int:
    """Return the physical memory of the machine."""
    return int(psutil.virtual_memory().total)


def host_available_bytes() -> int:
    """Return the memory that could be given to processes without swapping."""
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True)
class Pool:
    """Memory that processes share, in bytes: ``free`` is still available. ``key`` is equal for all who share it."""

    key: tuple[str | int, ...]
    name: str
    limit: float
    free: int


def groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups, innermost first, and whether each is of cgroup v1."""
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
        # In a container the path may be the host's, or lead out of what is mounted: then the tree begins at its own
        # group.
        inside = path.removeprefix(within) if f"{path}/".startswith(f"{within.rstrip('/')}/") else path
        inner = top / inside.lstrip("/") if ".." not in inside else top
        for folder in dict.fromkeys([inner, *inner.parents, top]):
            if folder.is_relative_to(top):
                yield folder, bool(names)


def memory_groups(root: Path = ROOT) -> list[Pool]:
    """Return control groups that limit this process's memory, innermost first. Reclaimable page cache is free."""
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
    """Return every bound of this process's memory: its control groups, and the machine."""
    free, total = host_available_bytes(), host_total_bytes()
    name = f"available memory of the machine ({free / 2**20:,.0f} of {total / 2**20:,.0f} MiB)"
    return [*memory_groups(root), Pool((_text(root / _BOOT),), name, total, free)]


def _libc(name: str) -> Callable[..., int]:
    """Return a function of the C library, or a function that does nothing where the library lacks it (musl, macOS)."""
    return getattr(_LIBC, name, lambda *_: 0)


def return_large_blocks() -> None:
    """Have glibc serve blocks of 4 MiB and more by mmap, so that a freed gather buffer goes back to the system at once.

    glibc raises that threshold by itself up to 32 MiB as soon as such a block is freed; gathered units then live in the
    heap, between long-lived shards, and the process keeps a quarter more memory than it uses. Nothing is changed when
    the user has tuned malloc or preloads another allocator.
    """
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if not tuned and "malloc" not in os.environ.get("LD_PRELOAD", ""):
        _libc("mallopt")(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        _libc("mallopt")(_M_TRIM_THRESHOLD, _KEEP_BYTES)


class HeapTrimmer:
    """Give freed heap memory back to the system after every 64 MiB that went through it.

    glibc up to 2.37 does not find a freed aligned block again when the same size is asked for with alignment, as torch
    does, so a loop over the tensors of a model leaves a heap as large as the model behind it, all of it free.
    """

    _passed = 0

    def passed(self, nbytes: int) -> None:
        """Note that ``nbytes`` were allocated and freed."""
        self._passed += nbytes
        if self._passed >= 64 << 20:
            self.trim()

    def trim(self) -> None:
        """Give freed heap memory back now."""
        self._passed = 0
        _libc("malloc_trim")(0)


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask the kernel to back the 2 MiB-aligned inside of a fresh host buffer with huge pages; only a hint.

    Page faults otherwise dominate buffers that come and go with every unit. Blocks below 4 MiB may lie in the heap and
    are skipped: the heap would keep their huge pages, however little of them is used next.
    """
    start = -(-address // _HUGE_BYTES) * _HUGE_BYTES
    inside = (address + nbytes) // _HUGE_BYTES * _HUGE_BYTES - start
    if inside > 0 and nbytes >= _LARGE_BYTES:
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(inside), _MADV_HUGEPAGE)
