"""Where checkpoints lie: tags, the one that ``latest`` names, and how a new one takes its place in one step.

A save fills ``.TAG.saving-HOST-PID-BORN-NONCE`` and renames it when every byte is on the disk: a folder with a manifest
is complete. What goes is ``.TAG.removed-NONCE`` first. What a dead process has left is removed by the next save.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from deepspeed.errors import CheckpointError
from deepspeed.monitor.log import logger

MANIFEST = "manifest.json"
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_EXCHANGE, _AT_FDCWD = 2, -100  # RENAME_EXCHANGE of renameat2; paths are relative to the working folder
_HIDDEN = re.compile(
    r"\.(?P<tag>.+)\.(?P<what>saving|replaced|removed)-((?P<host>[^-]*)-(?P<pid>\d+)-((?P<born>\d+)-)?)?[0-9a-f]+"
)


def check_tag(tag: str) -> str:
    """Return ``tag``. Raises CheckpointError unless it can be the name of a visible folder."""
    foreign = {"/", os.sep, "\0"} & set(tag) or tag.startswith(".")
    if not tag or foreign or tag != tag.strip() or tag in (LATEST, LATEST_UNIVERSAL):
        rules = "no slash, no leading dot, no blanks around, not 'latest'"
        raise CheckpointError(f"checkpoint tag {tag!r} cannot be a folder name: {rules}")
    return tag


def is_complete(folder: Path) -> bool:
    """Tell whether a save into ``folder`` was finished (its contents may still be damaged)."""
    return (folder / MANIFEST).is_file()


def is_any(folder: Path) -> bool:
    """Tell whether ``folder`` looks like a complete checkpoint, of this package or in DeepSpeed's own layouts."""
    return is_complete(folder) or any(folder.glob("*_model_states.pt")) or (folder / "zero").is_dir()


def begin(save_dir: Path, tag: str) -> Path:
    """Make the folder that a save fills, after removing those of dead processes. Raises OSError."""
    if save_dir.exists() and not save_dir.is_dir():
        raise CheckpointError(f"{save_dir} is a file, not a folder; save to another one")
    save_dir.mkdir(parents=True, exist_ok=True)
    repair(save_dir)
    for leftover in left_behind(save_dir):
        logger.warning("removing %s, which a process that died while saving has left behind", leftover)
        discard(leftover)
    folder = _hidden_name(save_dir / tag)
    folder.mkdir()
    return folder


def publish(folder: Path, tag: str) -> Path:
    """Rename the finished ``folder`` to checkpoint ``tag``, replacing one of that name; return the final path."""
    final, old = folder.parent / tag, folder.with_name(f".{tag}.replaced-{uuid.uuid4().hex[:12]}")
    sync(folder)
    if os.path.lexists(final) and _swap(folder, final):
        old = folder
    else:
        _rename_twice(folder, final, old)
    sync(folder.parent)
    if os.path.lexists(old):
        discard(old)
    return final


def _swap(a: Path, b: Path) -> bool:
    """Exchange two names atomically; return False where the kernel or the filesystem cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:  # an older C library
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.ENOENT):
        return False  # EPERM: sandboxes that do not know the call
    raise OSError(code, os.strerror(code), str(b))


def _rename_twice(folder: Path, final: Path, old: Path) -> None:
    """Replace ``final`` by two renames; between them only the old one exists, under ``old``, where ``repair`` looks."""
    while True:
        try:
            if os.path.lexists(final):
                os.rename(final, old)
            os.rename(folder, final)
            return
        except BaseException as error:
            back = isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            if back and not os.path.lexists(old):  # a reader gave the old one its name back
                continue
            if os.path.lexists(old) and not os.path.lexists(final):
                os.rename(old, final)
            raise


def discard(path: Path) -> bool:
    """Remove a folder or file if possible; rename it first, in one step, if readers know or would restore its name."""
    match = _HIDDEN.fullmatch(path.name)
    with contextlib.suppress(OSError):
        if match is None or match["what"] == "replaced":
            gone = path.with_name(f".{path.name.strip('.')[:99]}.removed-{uuid.uuid4().hex[:12]}")
            os.rename(path, gone)
            path = gone
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
        return True
    return False


def repair(save_dir: Path) -> None:
    """Restore the name of a checkpoint whose replacement died between two renames."""
    for path, match in _hidden(save_dir):
        final = save_dir / match["tag"]
        if match["what"] == "replaced" and is_any(path) and not final.exists():
            with contextlib.suppress(OSError):
                os.rename(path, final)


def unfinished(save_dir: Path) -> list[Path]:
    """Return folders of saves that have not ended (yet)."""
    return sorted(path for path, match in _hidden(save_dir) if match["what"] == "saving" and path.is_dir())


def left_behind(save_dir: Path) -> list[Path]:
    """Return folders and files to remove: of saves by dead processes of this host, and replaced or removed ones."""
    return [path for path, match in _hidden(save_dir) if match["what"] != "saving" or _is_dead(match)]


def _is_dead(match: re.Match[str]) -> bool:
    """Tell whether the save belongs to a process of this host that has ended."""
    if match["host"] != _host():
        return False
    pid = int(match["pid"])
    try:
        os.kill(pid, 0)
    except OSError as error:  # or another user's
        return error.errno == errno.ESRCH
    # Numbers are used again, in containers by the very next run: a process that began at another time is another one.
    return match["born"] is not None and _began(pid) != int(match["born"])


def _hidden(save_dir: Path) -> list[tuple[Path, re.Match[str]]]:
    try:
        return [(path, match) for path in save_dir.iterdir() if (match := _HIDDEN.fullmatch(path.name))]
    except OSError:
        return []


def _hidden_name(path: Path) -> Path:
    """Return a unique temporary name that tells the host and process that own it."""
    pid = os.getpid()
    return path.with_name(f".{path.name}.saving-{_host()}-{pid}-{_began(pid)}-{uuid.uuid4().hex[:12]}")


@contextlib.contextmanager
def temporary_for(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside ``path``, removed at the end if it exists; remove dead processes' leftovers first."""
    for leftover in left_behind(path.parent):
        if leftover.name.startswith(f".{path.name}.saving-"):
            discard(leftover)
    hidden = _hidden_name(path)
    try:
        yield hidden
    finally:
        discard(hidden)


def _began(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; -1: the process has ended; 0: unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return -1 if fields[0] in ("Z", "X") else int(fields[19])


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())


@contextlib.contextmanager
def finished(path: Path) -> Iterator[Path]:
    """Yield a name to write to; rename it to ``path`` when the body ends well and the bytes are on the disk."""
    with temporary_for(path) as partial:
        yield partial
        sync(partial)
        os.replace(partial, path)
    sync(path.parent)


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by a file with ``content`` that is on the disk when this returns."""
    with finished(path) as partial:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            file.write(content)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_latest(save_dir: Path, tag: str) -> None:
    """Make ``latest`` name ``tag``."""
    write_atomically(save_dir / LATEST, tag.encode())


def read_latest(save_dir: Path) -> str | None:
    """Return the tag in ``latest``; None without such a file, or when it is empty: a disk may have lost its content."""
    try:
        return (save_dir / LATEST).read_text(encoding="utf-8").strip().strip("\0") or None
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise CheckpointError(f"{save_dir} is a file; name the folder of the checkpoints") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{save_dir / LATEST} cannot be read: {error}; pass tag=") from error


def complete_tags(save_dir: Path) -> list[Path]:
    """Return the complete checkpoints of this package in ``save_dir``, newest first by the time of their manifests."""
    try:
        complete = [p for p in save_dir.iterdir() if not p.name.startswith(".") and is_complete(p)]
    except OSError:
        return []
    return sorted(complete, key=lambda p: (_saved_at(p), p.name), reverse=True)


def _saved_at(folder: Path) -> int:
    try:
        return (folder / MANIFEST).stat().st_mtime_ns
    except OSError:  # it is being replaced or removed
        return 0


def find_checkpoint(load_dir: Path, tag: str | None = None) -> Path | None:
    """Find the checkpoint of ``tag``, else of ``latest``, or raise CheckpointError; without both the newest or None."""
    repair(load_dir)
    if waiting := unfinished(load_dir):
        logger.warning("%s: skipping saves that were never finished: %s", load_dir, ", ".join(p.name for p in waiting))
    named = str(tag) if tag is not None else read_latest(load_dir)
    if named is None:
        newest, lost = next(iter(complete_tags(load_dir)), None), (load_dir / LATEST).exists()
        if newest is None and is_any(load_dir):
            place = load_dir.absolute()
            raise CheckpointError(
                f"{load_dir} is itself a checkpoint; pass the folder around it, {place.parent}, with tag={place.name!r}"
            )
        if newest is not None:
            text = "%s has %s file 'latest'; loading its newest complete checkpoint, %s"
            logger.warning(text, load_dir, "nothing in its" if lost else "no", newest.name)
        elif lost:
            raise CheckpointError(
                f"{load_dir / LATEST} is empty, and there is no complete checkpoint here; remove it to begin anew"
            )
        return newest
    folder = load_dir / check_tag(named)
    if is_any(folder):
        since = _saved_at(folder) if tag is None else 0
        newer = [p.name for p in complete_tags(load_dir) if _saved_at(p) > since] if since else []
        if newer:
            logger.warning("'latest' names %s; complete and newer, but not named: %s", named, ", ".join(newer))
        return folder
    reason = "is not there" if not folder.exists() else f"is not a complete checkpoint (it has no {MANIFEST})"
    tags = ", ".join(p.name for p in complete_tags(load_dir))
    advice = f"complete ones here: {tags}" if tags else "there is no complete checkpoint here"
    origin = "" if tag is not None else f", which {load_dir / LATEST} names,"
    raise CheckpointError(f"checkpoint {folder}{origin} {reason}; {advice}")


def prune(save_dir: Path, keep: int, *, protect: Iterable[str] = ()) -> list[str]:
    """Remove all but the newest ``keep`` checkpoints, never one in ``protect`` or ``latest``; return removed tags."""
    safe = {*protect, read_latest(save_dir)}
    return [path.name for path in complete_tags(save_dir)[keep:] if path.name not in safe and discard(path)]
