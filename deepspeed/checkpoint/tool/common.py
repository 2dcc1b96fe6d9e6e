"""What the commands share: opening what was named, and folders that appear whole."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.load.reader import located, open_checkpoint
from deepspeed.checkpoint.load.source import Source


def opened(path: str | Path, tag: str | None = None, *, allow_pickle: bool = False) -> contextlib.closing[Source]:
    """The checkpoint, closed afterwards. ``allow_pickle``: may unpickle client state. Raises CheckpointError."""
    return contextlib.closing(open_checkpoint(located(Path(path), tag), allow_pickle=allow_pickle))


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``; what it holds moves into ``out`` when the body ends well, else it vanishes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with folders.temporary_for(out) as hidden:
        hidden.mkdir()
        yield hidden
        if not out.exists():
            try:
                os.rename(hidden, out)
            except OSError:  # another process may have been faster
                if not out.is_dir():
                    raise
        for path in hidden.iterdir() if hidden.exists() else ():
            if (target := out / path.name).is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        folders.sync(out)
