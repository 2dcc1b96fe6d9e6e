"""``ds_checkpoint prune``: remove older complete checkpoints and what dead saves have left behind."""

from pathlib import Path

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.tool.common import say, sized
from deepspeed.errors import CheckpointError


def _bytes(folder: Path) -> int:
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file())


def doomed(save_dir: Path, keep_last: int) -> list[Path]:
    """Complete checkpoints that would go, newest first: all but the newest ``keep_last``, never the one that ``latest``
    names.
    """
    named = folders.read_latest(save_dir)
    return [p for p in folders.complete_tags(save_dir)[keep_last:] if p.name != named]


def run(save_dir: Path, keep_last: int, *, dry_run: bool) -> int:
    """Remove and say what; 0. Raises CheckpointError when ``save_dir`` holds no checkpoint."""
    if not save_dir.is_dir():
        raise CheckpointError(f"there is no folder {save_dir}")
    if folders.is_complete(save_dir):
        raise CheckpointError(f"{save_dir} is itself a checkpoint; name the folder that holds the checkpoints")
    if not dry_run:
        folders.repair(save_dir)
    left = folders.left_behind(save_dir)
    gone = doomed(save_dir, keep_last)
    if not folders.complete_tags(save_dir) and not left:
        raise CheckpointError(f"there is no checkpoint in {save_dir}")
    verb = "would remove" if dry_run else "removed"
    total = sum(_bytes(path) for path in [*gone, *left])
    tags = [p.name for p in gone] if dry_run else folders.prune(save_dir, keep_last)
    for tag in tags:
        say(f"{verb} {tag}")
    for path in left:
        if not dry_run:
            folders.discard(path)
        say(f"{verb} {path.name}, left behind by a save that died")
    kept = [p.name for p in folders.complete_tags(save_dir) if not dry_run or p not in gone]
    say(f"{verb} {sized(total)}; kept: {', '.join(kept) or 'none'}")
    return 0
