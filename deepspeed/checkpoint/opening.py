"""Opening a checkpoint folder, whoever wrote it."""

from pathlib import Path

from deepspeed.checkpoint import folders
from deepspeed.checkpoint.legacy import open_reference
from deepspeed.checkpoint.own import OwnSource
from deepspeed.checkpoint.source import Source
from deepspeed.errors import CheckpointError


def open_checkpoint(folder: Path, *, rank: int = 0, allow_pickle: bool = False) -> Source:
    """The checkpoint in ``folder`` (a tag's folder). Raises CheckpointError when it is none, incomplete or damaged.

    ``rank``, ``allow_pickle``: as of ``OwnSource``.
    """
    if folders.is_complete(folder):
        return OwnSource(folder, rank=rank, allow_pickle=allow_pickle)
    if folder.is_dir() and (any(folder.glob("*_model_states.pt")) or (folder / "zero").is_dir()):
        return open_reference(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    raise CheckpointError(f"{folder} is no checkpoint: it has no {folders.MANIFEST}, and no files of DeepSpeed's layout")


def find_and_open(load_dir: Path, tag: str | None = None) -> Source:
    """The checkpoint ``tag`` of ``load_dir``, else the one ``latest`` names, else ``load_dir`` itself when it is a tag's folder."""
    if tag is None and (folders.is_complete(load_dir) or folders.is_reference(load_dir) or (load_dir / "zero").is_dir()):
        return open_checkpoint(load_dir)
    found = folders.find_checkpoint(load_dir, tag) if load_dir.is_dir() else None
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {load_dir}" + ("" if load_dir.is_dir() else " (no such folder)"))
    return open_checkpoint(found)
