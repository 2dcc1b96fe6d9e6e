"""Shared pieces of the file IO tests: bytes to move, the file as others see it, work in a process of its own."""

import contextlib
import errno
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed.tier import aio
from deepspeed.tier.aio import AioEngine, DirectFile, TransferError, aligned_empty
from tests.budget.source import ROOT

BACKENDS = ("io_uring", "libaio", "threads", "python")
KIB, MIB = 1 << 10, 1 << 20
Make = Callable[..., AioEngine]


def refuse_direct(patch: pytest.MonkeyPatch) -> None:
    """A filesystem without O_DIRECT."""
    real = os.open

    def refusing(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, *more)

    patch.setattr(aio.os, "open", refusing)


def noise(nbytes: int, *, seed: int = 0, shift: int = 0) -> torch.Tensor:
    """Random bytes, ``shift`` bytes behind a page boundary."""
    memory = aligned_empty(nbytes + shift)[shift:]
    return memory.copy_(
        torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    )


def content(file: DirectFile) -> bytes:
    """The file as another program sees it."""
    return Path(file.path).read_bytes()


def python(script: str, *arguments: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a script that imports this package, with a time limit."""
    return subprocess.run(
        [*wrapper, sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def in_a_child(work: Callable[[], object]) -> int:
    """Call ``work`` in a forked child; return its status: 1 if that raises, else what it ends with, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def usable() -> list[str]:
    """The backends of this machine."""
    found = []
    for name in BACKENDS[:3]:
        with contextlib.suppress(TransferError), AioEngine(backend=name):
            found.append(name)
    return [*found, "python"]
