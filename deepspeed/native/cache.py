"""Where built libraries are kept: which is good, who may build it now, and how it gets there whole or not at all."""

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


def temporary_folder() -> Path:
    """This user's folder for the case that the wanted one cannot be written; it need not exist."""
    return Path(tempfile.gettempdir()) / f"deepspeed_ops_{os.getuid()}"


def writable_folder() -> Path:
    """The wanted folder where one can write to it, else a temporary one of this user (said in the log)."""
    folder, temporary = wanted_folder(), temporary_folder()
    if folder != temporary:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            text = "native ops are built in %s, because %s cannot be written (%s); set TORCH_EXTENSIONS_DIR to another"
            logger.warning(text, temporary, folder, error.strerror)
    with contextlib.suppress(FileExistsError):
        temporary.mkdir(mode=0o700)
    return temporary if is_own(temporary) else Path(tempfile.mkdtemp(prefix="deepspeed_ops_"))


def is_own(folder: Path) -> bool:
    """Whether only this user can have written to ``folder``: anyone can make names in /tmp, and code is loaded."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others


def known_folders() -> list[Path]:
    """Folders where a library may lie already."""
    temporary = temporary_folder()
    folders = dict.fromkeys((wanted_folder(), temporary))
    return [folder for folder in folders if folder != temporary or is_own(temporary)]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """What a note or a lock file says; empty where it says nothing readable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class CachedLibrary:
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
        note = _read_json(self.note)
        try:
            return self.library.stat().st_size == note.get("size") and _sha256(self.library) == note.get("sha256")
        except OSError:
            return False

    def publish(self, built: Path, origin: dict[str, Any]) -> None:
        """Move ``built`` (on the same file system) into place, the note last: a kill in between leaves nothing good."""
        note = built.with_suffix(".json")
        content = {"size": built.stat().st_size, "sha256": _sha256(built), **origin}
        note.write_text(json.dumps(content), encoding="utf-8")
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


def good_libraries(folder: Path, prefix: str) -> list[Path]:
    """Good libraries whose names start with ``prefix``, newest first."""
    notes = [path for path in folder.glob(f"{prefix}*.json") if path.is_file()]
    entries = [CachedLibrary(folder, path.stem) for path in sorted(notes, key=os.path.getmtime, reverse=True)]
    return [entry.library for entry in entries if entry.is_good()]


class BuildLock:
    """The right to build one op in one folder.

    The kernel holds the lock with the open file, so the death of its owner, whatever the cause, releases it.
    The file's text is for people (owner, start) and for those who waited while a build failed: it would fail for them
    too. The file stays, because removing it would let two owners in.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self._name = folder / f"{name}.lock", name

    def read(self) -> dict[str, Any]:
        """What the last owner wrote, whoever holds the lock; empty when it wrote nothing readable."""
        return _read_json(self.path)

    def write(self, **content: Any) -> None:
        """Replace the text."""
        content = {"pid": os.getpid(), "host": socket.gethostname(), **content}
        with contextlib.suppress(OSError):
            self.path.write_text(json.dumps(content), encoding="utf-8")

    @contextlib.contextmanager
    def owned(self, *, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
        """Inside, nobody else builds; after ``limit_s`` (a stopped owner), or where files cannot be locked, all may.

        That is safe: a build has a folder to itself and its result appears in one step.
        """
        try:
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except PermissionError:  # made by another user of a shared folder: good enough to lock
                handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            place = "set TORCH_EXTENSIONS_DIR to a folder of your own"
            raise BuildError(f"op {self._name}: its lock file cannot be made ({error}); {place}") from error
        try:
            self._acquire(handle, limit_s)
            yield
        finally:
            os.close(handle)

    def _acquire(self, handle: int, limit_s: float) -> None:
        begin, tell = time.monotonic(), TELL_AFTER_S
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = time.monotonic() - begin
            except OSError as error:
                return logger.debug("op %s: files cannot be locked here (%s)", self._name, error)
            if waited > limit_s:
                text = "op %s: waited %.0f s for %s; building without it"
                return logger.warning(text, self._name, waited, self.read())
            if waited > tell:
                logger.info("op %s: waiting for its build by %s", self._name, self.read())
                tell = limit_s
            time.sleep(POLL_S)


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
