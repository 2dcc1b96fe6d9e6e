"""Opening a checkpoint folder, whoever wrote it."""

from pathlib import Path

from deepspeed.checkpoint.foreign.legacy import open_reference
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.load.own import OwnSource
from deepspeed.checkpoint.load.source import Source
from deepspeed.errors import CheckpointError


def open_checkpoint(folder: Path, *, rank: int = 0, allow_pickle: bool = False) -> Source:
    """The checkpoint in ``folder`` (a tag's folder). Raises CheckpointError when it is none, incomplete or damaged.

    ``rank``, ``allow_pickle``: as of ``OwnSource``.
    """
    if folders.is_complete(folder):
        return OwnSource(folder, rank=rank, allow_pickle=allow_pickle)
    if folders.is_any(folder):
        return open_reference(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    raise CheckpointError(
        f"{folder} is no checkpoint: it has no {folders.MANIFEST}, and no files of DeepSpeed's layout"
    )


def located(path: Path, tag: str | None = None) -> Path:
    """The tag's folder that ``path`` and ``tag`` name: ``path`` itself, or as ``find_checkpoint``. Raises
    CheckpointError.
    """
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint in {path} (no such folder)")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; name the folder of a checkpoint")
    found = path if tag is None and folders.is_any(path) else folders.find_checkpoint(path, tag)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found


def find_and_open(load_dir: Path, tag: str | None = None) -> Source:
    """The checkpoint that ``located`` finds."""
    return open_checkpoint(located(load_dir, tag))
