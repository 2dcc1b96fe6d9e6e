"""Where built libraries are kept: which file is good, who may build it now, and how it gets there whole or not at
all.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.errors import BuildError
from deepspeed.observe.log import logger

SHIPPED = Path(__file__).resolve().parent / "prebuilt"
LOCK_LIMIT_S = 600.0
TELL_AFTER_S = 10.0
POLL_S = 0.05
FORGOTTEN_AFTER_S = 86400.0


def wanted_folder() -> Path:
    """``TORCH_EXTENSIONS_DIR``, else ``~/.cache/torch_extensions``, and in it this package's folder."""
    base = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not base:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        if not os.path.isabs(caches):  # a user without a home
            return temporary_folder()
        base = os.path.join(caches, "torch_extensions")
    return Path(base).absolute() / "deepspeed"


def writable_folder() -> Path:
    """The wanted folder where one can write to it, else a temporary one of this user (said in the log)."""
    folder = wanted_folder()
    if folder == temporary_folder():
        return _own_temporary_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        instead = _own_temporary_folder()
        logger.warning(
            "native ops are built in %s, because %s cannot be written (%s); set TORCH_EXTENSIONS_DIR to a "
            "folder that can",
            instead,
            folder,
            error.strerror,
        )
        return instead


def temporary_folder() -> Path:
    """This user's folder for the case that the wanted one cannot be written; it need not exist."""
    return Path(tempfile.gettempdir()) / f"deepspeed_ops_{os.getuid()}"


def is_own(folder: Path) -> bool:
    """Whether only this user can have written to ``folder``: code is loaded from it, and anyone can make names in
    /tmp.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _own_temporary_folder() -> Path:
    folder = temporary_folder()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return folder if is_own(folder) else Path(tempfile.mkdtemp(prefix="deepspeed_ops_"))


def known_folders() -> list[Path]:
    """Folders where a library may lie already."""
    own = temporary_folder()
    return [folder for folder in dict.fromkeys((wanted_folder(), own)) if folder != own or is_own(own)]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """One library and the note beside it with its size and hash; the library is good only while both agree."""

    folder: Path
    stem: str

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.folder / f"{self.stem}.so"

    @property
    def note(self) -> Path:
        """Size, hash and origin of the library, as JSON."""
        return self.folder / f"{self.stem}.json"

    def is_good(self) -> bool:
        """Whether the library is there and is what was built: loading a truncated one can kill the process."""
        try:
            said = json.loads(self.note.read_text(encoding="utf-8"))
            return self.library.stat().st_size == said["size"] and _sha256(self.library) == said["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def discard(self) -> None:
        """Make the entry invalid."""
        self.note.unlink(missing_ok=True)

    def publish(self, built: Path, origin: dict[str, Any]) -> None:
        """Move ``built`` (on the same file system) into place; the note goes last, so a kill in between leaves no good
        entry.
        """
        note = built.with_suffix(".json")
        note.write_text(
            json.dumps({"size": built.stat().st_size, "sha256": _sha256(built), **origin}), encoding="utf-8"
        )
        for path in (built, note):
            _sync(path)
        os.replace(built, self.library)
        os.replace(note, self.note)
        _sync(self.folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        # some file systems refuse to sync a folder; the hash in the note still guards the content
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def good_entries(folder: Path, prefix: str) -> list[Entry]:
    """Good entries whose names start with ``prefix``, newest first."""
    notes = [path for path in folder.glob(f"{prefix}*.json") if path.is_file()]
    entries = [Entry(folder, path.stem) for path in sorted(notes, key=os.path.getmtime, reverse=True)]
    return [entry for entry in entries if entry.is_good()]


def _owner(handle: int) -> dict[str, Any]:
    try:
        said = json.loads(os.pread(handle, 65536, 0))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def read_owner(folder: Path, name: str) -> dict[str, Any]:
    """What the last owner of the lock of op ``name`` wrote, without taking the lock; empty where there was none."""
    try:
        with (folder / f"{name}.lock").open("rb") as file:
            return _owner(file.fileno())
    except OSError:
        return {}


class BuildLock:
    """The right to build one op in one folder.

    The kernel holds the lock with the open file, so the death of its owner, whatever the cause, releases it.
    The file's text is for people (owner, start) and for those who waited while a build failed: it would fail for them
    too.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def read(self) -> dict[str, Any]:
        """What the last owner wrote; empty when it wrote nothing readable."""
        return _owner(self._handle)

    def write(self, **said: Any) -> None:
        """Replace the text."""
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), **said}).encode()
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text, 0)

    def acquire(self, name: str, *, limit_s: float = LOCK_LIMIT_S) -> None:
        """Wait for the lock; after ``limit_s`` (a stopped owner), or where files cannot be locked, go on without it.

        That is safe: a build has a folder to itself and its result appears in one step.
        """
        begin = time.monotonic()
        tell = TELL_AFTER_S
        while True:
            try:
                return fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = time.monotonic() - begin
            except OSError as error:
                return logger.debug("op %s: files cannot be locked here (%s); building without a lock", name, error)
            if waited > limit_s:
                return logger.warning("op %s: waited %.0f s for %s; building without it", name, waited, self.read())
            if waited > tell:
                logger.info("op %s: waiting for its build by %s", name, self.read())
                tell = limit_s
            time.sleep(POLL_S)


def _lock_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        # made by another user of a shared folder: good enough to lock
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def build_lock(folder: Path, name: str) -> Iterator[BuildLock]:
    """Hold the lock of op ``name`` in ``folder``; its file stays, because removing it would let two owners in."""
    try:
        handle = _lock_file(folder / f"{name}.lock")
    except OSError as error:
        raise BuildError(
            f"op {name}: its lock file cannot be made ({error}); set TORCH_EXTENSIONS_DIR to a folder of your own"
        ) from error
    try:
        lock = BuildLock(handle)
        lock.acquire(name)
        yield lock
    finally:
        os.close(handle)


def _is_dead(work: Path) -> bool:
    """Whether the process of a work folder is gone; one of another machine counts as gone after a day."""
    _, host, pid, _ = work.name.rsplit("@", 3)
    if host == socket.gethostname() and os.path.isdir("/proc/self"):
        return not os.path.exists(f"/proc/{pid}")
    return time.time() - work.stat().st_mtime > FORGOTTEN_AFTER_S


@contextlib.contextmanager
def work_folder(folder: Path, name: str) -> Iterator[Path]:
    """A folder for one build, removed afterwards, and with it those of builds that were killed."""
    for left in folder.glob(f".{name}@*@*@*"):
        with contextlib.suppress(OSError):
            if _is_dead(left):
                shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}@{socket.gethostname()}@{os.getpid()}@", dir=folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
