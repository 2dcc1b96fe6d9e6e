"""A limit that the kernel keeps: what a rank takes beyond it ends the rank."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from deepspeed.monitor import hostmem


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[bool]:
    """Inside, memory that this process takes anew counts in a control group inside its present one, which may have
    ``nbytes``. False, and no limit, where such a group cannot be made.
    """
    home, first = next(hostmem.groups(Path("/"), "memory"), (Path("/none"), True))
    group, made = home / f"deepspeed-test-{os.getpid()}", False
    try:
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(nbytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            made = True
        yield made
    finally:
        if made:
            (home / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            group.rmdir()
