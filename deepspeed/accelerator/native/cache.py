"""Where built libraries are kept: which is good, who may build it now, and how it gets there whole or not at all."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.errors import BuildError
from deepspeed.monitor.log import logger

SHIPPED = Path(__file__).resolve().parent / "prebuilt"
LOCK_LIMIT_S = 600.0
_DAY_S = 86400.0
ELSEWHERE = "set TORCH_EXTENSIONS_DIR to a folder of your own"


def folder() -> Path:
    """Return the cache folder, in TORCH_EXTENSIONS_DIR, else XDG_CACHE_HOME or ~/.cache; BuildError without a home."""
    base = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not base:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        if not os.path.isabs(caches):
            raise BuildError(f"this user has no home to keep libraries in; {ELSEWHERE}")
        base = os.path.join(caches, "torch_extensions")
    return Path(base).absolute() / "deepspeed"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a note or a lock file; empty when no object can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def note(library: Path) -> dict[str, Any]:
    """Return how ``library`` was built (op, compiler, version, SHA-256); empty without a readable note."""
    return _read_json(library.with_suffix(".json"))


def is_good(library: Path) -> bool:
    """Return whether ``library`` has the SHA-256 in its note: loading a truncated library can kill the process."""
    try:
        return _sha256(library) == note(library).get("sha256")
    except OSError:
        return False


def publish(built: Path, library: Path, origin: dict[str, Any]) -> None:
    """Move ``built`` (on the same file system) to ``library``, then its note, whose hash tells a partial library."""
    note = built.with_suffix(".json")
    note.write_text(json.dumps({"sha256": _sha256(built), **origin}), encoding="utf-8")
    os.replace(built, library)
    os.replace(note, library.with_suffix(".json"))


class BuildLock:
    """Lock one op's builds in one folder; the kernel releases the lock of an owner that died. The file's text is for
    people, and for processes that waited while a build failed. The file stays, or two owners could get in.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self._name = folder / f"{name}.lock", name

    def read(self) -> dict[str, Any]:
        """Return the content that the last owner wrote, whoever holds the lock; empty when unreadable."""
        return _read_json(self.path)

    def write(self, **content: Any) -> None:
        """Replace the file's text: ``content`` with this process's id and host."""
        content = {"pid": os.getpid(), "host": socket.gethostname(), **content}
        with contextlib.suppress(OSError):
            self.path.write_text(json.dumps(content), encoding="utf-8")

    @contextlib.contextmanager
    def owned(self, *, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
        """Hold the lock inside; after ``limit_s``, or without file locks, each process may build, in its own folder."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # one that another user of a shared folder has made is good enough to lock
            mode = "r" if self.path.exists() and not os.access(self.path, os.W_OK) else "a"
            file = self.path.open(mode, encoding="utf-8")
        except OSError as error:
            raise BuildError(f"op {self._name}: its lock file cannot be made ({error}); {ELSEWHERE}") from error
        with file:
            self._acquire(file.fileno(), limit_s)
            yield

    def _acquire(self, handle: int, limit_s: float) -> None:
        begin, tell = time.monotonic(), 10.0
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
            time.sleep(0.05)


def _is_dead(work: Path) -> bool:
    """Return whether the process of a work folder is gone; a process of another machine counts as gone after a day."""
    _, host, pid, _ = work.name.rsplit("@", 3)
    elsewhere = host != socket.gethostname()
    return time.time() - work.stat().st_mtime > _DAY_S if elsewhere else not os.path.exists(f"/proc/{pid}")


@contextlib.contextmanager
def work_folder(folder: Path, name: str) -> Iterator[Path]:
    """Yield a folder for one build and remove it afterwards. Folders of builds that were killed are removed first."""
    for stale in folder.glob(f".{name}@*@*@*"):
        with contextlib.suppress(OSError):
            if _is_dead(stale):
                shutil.rmtree(stale, ignore_errors=True)
    prefix = f".{name}@{socket.gethostname()}@{os.getpid()}@"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True) as work:
        yield Path(work)
