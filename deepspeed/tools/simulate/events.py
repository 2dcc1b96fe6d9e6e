"""What a run did, as a sequence of events in the order of the host's program. Pure: no torch, no device.

A recorder emits them; order, memory and time are found by consumers that read the sequence once. A stream is a number:
``COMPUTE``, those that the program makes, those of communicators and drives, ``HOST``, the program itself, and
``BEHIND`` and ``WORKER``, the threads of its save and of its update.
"""

from typing import NamedTuple

HOST, COMPUTE = -1, 0
DRIVE_READS, DRIVE_WRITES, BEHIND, WORKER = -2, -3, -4, -5

# Where a buffer lies: memory of the device; host memory that the driver's caching allocator pinned; that the program
# itself registered; ordinary host memory; a drive.
DEVICE, PINNED, REGISTERED, PAGEABLE, FILE = "device", "pinned", "registered", "pageable", "file"

# Frames outside torch, innermost first: (file, line, function).
Site = tuple[tuple[str, int, str], ...]


def place_of(site: Site) -> str:
    """Format the site for people."""
    return " <- ".join(f"{file}:{line} {function}" for file, line, function in site) or "(outside of any file)"


class Touch(NamedTuple):
    """Bytes [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int


class Work(NamedTuple):
    """Cost of one launch: arithmetic, bytes to and from memory, and for collectives the ranks that take part.

    ``kind``: "kernel", "matmul", "attention", "up" (host to device), "down", "collective", "host", "adam", "read",
    "write".
    ``nbytes`` of a collective is the size of the whole tensor. ``shape``: rows, depth and columns of a product, the
    lengths of queries and keys and the channels of a head of attention.
    ``channel``: what all ``ranks`` take part in one after the other: a process group, or of one that from the first
    to the second rank.
    """

    kind: str
    flops: float = 0.0
    nbytes: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    pinned: bool = True
    channel: str = ""


class Launch(NamedTuple):
    """Launch of ``name`` on ``stream``, which reads and writes parts of buffers; on HOST it runs at once.

    ``label``: the unit or phase that the launch is for.
    """

    stream: int
    name: str
    reads: tuple[Touch, ...]
    writes: tuple[Touch, ...]
    work: Work
    site: Site = ()
    label: str = ""


class Record(NamedTuple):
    """Record of ``event``, which stands for all that ``stream`` has been given so far."""

    event: int
    stream: int


class Wait(NamedTuple):
    """Wait of ``stream`` for ``event``; an event that was never recorded orders nothing."""

    stream: int
    event: int
    site: Site = ()


class HostWait(NamedTuple):
    """Stop of the program until ``event``, or all of ``stream``, or (both None) the whole device is done; or about as
    long, which it cannot rely on (not ``orders``).
    """

    what: str
    stream: int | None = None
    event: int | None = None
    site: Site = ()
    orders: bool = True


class Seen(NamedTuple):
    """Answer to the program, which has not waited, that ``event`` has happened."""

    event: int


class Allocate(NamedTuple):
    """Begin of a buffer; a device buffer comes from the pool of ``stream``."""

    buffer: int
    nbytes: int
    place: str
    stream: int
    category: str = ""
    site: Site = ()


class Free(NamedTuple):
    """End of a buffer, which frees its memory at once. ``covered``: streams whose work the allocator waits for."""

    buffer: int
    covered: frozenset[int] = frozenset()
    site: Site = ()


class Talk(NamedTuple):
    """Talk of the program with ``ranks`` for ``seconds``; with a ``channel`` once all have come so far."""

    seconds: float
    ranks: tuple[int, ...] = ()
    channel: str = ""


class Phase(NamedTuple):
    """Begin of the program's phase ``name``."""

    name: str


Event = Launch | Record | Wait | HostWait | Seen | Allocate | Free | Talk | Phase
