"""What the commands share: opening what was named, and a progress bar where someone looks."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from deepspeed.checkpoint import folders
from deepspeed.checkpoint.opening import open_checkpoint
from deepspeed.checkpoint.source import Source
from deepspeed.errors import CheckpointError

Progress = Callable[[int], None]


def located(path: Path, tag: str | None) -> Path:
    """The tag's folder that ``path`` and ``tag`` name. Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"there is no {path}")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; name the folder of a checkpoint")
    if tag is None and (folders.is_complete(path) or folders.is_reference(path) or (path / "zero").is_dir()):
        return path
    found = folders.find_checkpoint(path, tag)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found


@contextlib.contextmanager
def opened(path: Path, tag: str | None = None, *, allow_pickle: bool = False) -> Iterator[Source]:
    """The checkpoint, closed afterwards. ``allow_pickle``: may unpickle client state. Raises CheckpointError."""
    source = open_checkpoint(located(path, tag), allow_pickle=allow_pickle)
    try:
        yield source
    finally:
        source.close()


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``; what it holds moves into ``out`` at the end, and vanishes when something goes wrong."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with folders.temporary_for(out) as hidden:
        hidden.mkdir()
        yield hidden
        if not out.exists():
            with contextlib.suppress(OSError):  # another process may have been faster
                os.rename(hidden, out)
        for path in hidden.iterdir() if hidden.exists() else ():
            target = out / path.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        folders.sync_folder(out)


@contextlib.contextmanager
def progress(label: str, nbytes: int) -> Iterator[Progress]:
    """A bar on standard error that counts bytes, when standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _bytes: None
        return
    from tqdm import tqdm  # noqa: PLC0415 - not needed without a terminal

    with tqdm(total=nbytes, desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:
        yield lambda count: bar.update(count) and None


def sized(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def say(text: str) -> None:
    """A line on standard output."""
    sys.stdout.write(text + "\n")
