"""Saving as all ranks see it: they agree where to, each writes its part, the first publishes, and a failure of one is told to all."""

import contextlib
import functools
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspeed.checkpoint import folders
from deepspeed.checkpoint.client_files import copy_for_later, write_client_files, write_script
from deepspeed.checkpoint.collect import Part, in_rows
from deepspeed.checkpoint.files import unwritable
from deepspeed.checkpoint.manifest import Manifest
from deepspeed.checkpoint.pickled import save_pickled
from deepspeed.checkpoint.save import Background, RankFile, Snapshots, drained, join_lists, publish, until, wait_for_ranks
from deepspeed.comm import collectives
from deepspeed.errors import CheckpointError, DeepSpeedError
from deepspeed.mesh.groups import Mesh
from deepspeed.observe.log import logger

_LONG_S = 3.0  # a bar appears when it takes longer
_GLANCE_S = 0.05  # between looks at the other ranks


@dataclass(frozen=True)
class SaveOrder:
    """What to save where. ``rates``: bytes a second in the background, 0 for no limit. ``extra``: writes further files."""

    save_dir: Path
    tag: str
    latest: bool = True
    keep_last: int | None = None
    rate_bytes: int = 0
    extra: Callable[[Path, Manifest], None] = lambda folder, manifest: None

    def __post_init__(self) -> None:
        # A background save must not follow the process into another working directory.
        object.__setattr__(self, "save_dir", self.save_dir.absolute())


@dataclass
class Content:
    """What one rank saves. ``away``: parts that are read from a drive when their turn comes.

    ``hold(hurry)``: from here on those are of this moment, until ``release``; ``hurry`` is called when an update waits for that.
    ``facts``: this rank's, and ``common``: the first rank's for all. ``pickled``: client state by path that the user lets be pickled.
    """

    parts: Iterable[Part]
    away: Iterable[Part] = ()
    hold: Callable[[Callable[[], None]], None] = lambda hurry: None
    release: Callable[[], None] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    pickled: dict[str, Any] = field(default_factory=dict)


def agree(mesh: Mesh, error: BaseException | None, what: str) -> None:
    """Raise on every rank when some rank has an ``error``. Collective."""
    said = collectives.gather_objects(None if error is None else f"{error}", mesh.talk)
    failed = {rank: text for rank, text in zip(mesh.job.ranks, said, strict=True) if text is not None}
    if not failed:
        return
    if error is not None and isinstance(error, CheckpointError):
        raise error
    rank, text = next(iter(failed.items()))
    raise CheckpointError(f"{what} failed on rank {rank}: {text}") from error


def one_answer(mesh: Mesh, value: Any) -> list[Any]:
    """What every rank says, in rank order. Collective."""
    return collectives.gather_objects(value, mesh.talk)


@contextlib.contextmanager
def progress(label: str, nbytes: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar over bytes, on a terminal, for what takes long."""
    if not (show and sys.stderr.isatty()):  # tqdm takes semaphores even for a bar that is never shown
        yield lambda _: None
        return
    with tqdm(desc=label, total=nbytes, unit="B", unit_scale=True, delay=_LONG_S) as bar:
        yield lambda n: None if bar.update(n) is None else None


class Saver:
    """The saves of one engine: one at a time, in the foreground or behind the training."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._running: Background | None = None
        self._snapshots = Snapshots()

    @property
    def busy(self) -> bool:
        """Whether a background save has not been settled yet (the same on every rank)."""
        return self._running is not None

    def save(self, order: SaveOrder, content: Content) -> None:
        """Save now; returns when the checkpoint has its name. Collective. Raises CheckpointError on every rank."""
        self.settle(wait=True)
        folder = self._begin(order)
        try:
            error = self._write_now(folder, order, content)
        except BaseException:  # interrupted: whatever the other ranks do, this save is none
            if self._first:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        final = functools.partial(self._finish, folder, order)
        self._agreed(folder, error, order)
        error = None
        if self._first:
            try:
                final(None)
            except Exception as failure:  # whatever it is, the other ranks wait for the answer
                error = _explained(folder, failure)
        self._agreed(folder, error, order)

    def save_behind(self, order: SaveOrder, content: Content) -> None:
        """Copy what training will change and return; the rest happens in a thread. Collective. An earlier one is waited for."""
        self.settle(wait=True)
        folder = self._begin(order)
        error: BaseException | None = None
        rank = self._mesh.job.index
        file: RankFile | None = None
        held: deque[Part] = deque()
        with contextlib.ExitStack() as undone:
            undone.callback(content.release)  # also when it is interrupted: an update would wait for ever
            try:
                file = RankFile(folder, rank, facts=self._facts(content, folder), expect_bytes=content.nbytes)
                file.limit(order.rate_bytes)
                content.hold(functools.partial(file.limit, 0))
                held.extend(self._snapshots.copy(content.parts))
            except BaseException as failure:
                error = _explained(folder, failure)
                if file is not None:
                    file.fail(failure)
                if not isinstance(failure, Exception):
                    if self._first:
                        shutil.rmtree(folder, ignore_errors=True)
                    raise
            self._agreed(folder, error, order)
            assert file is not None
            work = functools.partial(self._work, folder, order, file, content, held)
            self._running = Background(order.tag, folder, work, hurry=functools.partial(file.limit, 0))
            undone.pop_all()

    def _work(self, folder: Path, order: SaveOrder, file: RankFile, content: Content, held: "deque[Part]", stop: threading.Event) -> None:
        try:
            try:
                file.write(until(content.away, stop))  # first, as an update may wait for it
            finally:
                content.release()
            file.write(until(drained(held), stop))
            file.close()
            if self._first:
                self._finish(folder, order, stop)
        except BaseException as failure:
            error = _explained(folder, failure)
            file.fail(error)
            if error is failure:
                raise
            raise error from failure

    def settle(self, *, wait: bool) -> None:
        """Bring a background save to its end: raise on every rank when it failed on some; with ``wait`` until it has ended.

        Collective while one is running, which every rank knows of; nothing otherwise.
        """
        while self._running is not None:
            own = self._running
            said = one_answer(self._mesh, (own.finished, None if own.error is None else str(own.error)))
            failed = [(r, text) for r, (_, text) in zip(self._mesh.job.ranks, said, strict=True) if text is not None]
            if failed:
                own.told = True
                own.give_up()
                own.wait(None)
                self._running = None
                one_answer(self._mesh, None)  # nobody writes any more
                if self._first:
                    shutil.rmtree(own.folder, ignore_errors=True)
                rank, text = failed[0]
                raise CheckpointError(
                    f"the background save of checkpoint {own.tag} failed on rank {rank}: {text}. The training state is untouched, and the "
                    "checkpoint before it is intact"
                )
            if all(finished for finished, _ in said):
                self._running = None
            elif wait:
                own.hurry()
                own.wait(_GLANCE_S)  # not to its end: a failure elsewhere may be what it waits for
            else:
                return

    @property
    def running(self) -> bool:
        """Whether a background save has not been settled."""
        return self._running is not None

    def finish_alone(self) -> None:
        """Bring this rank's part of a background save to its end without the other ranks; raise when it failed."""
        own, self._running = self._running, None
        if own is not None:
            own.hurry()
            own.wait(None)
            if own.error is not None:
                own.told = True
                raise CheckpointError(f"the background save of checkpoint {own.tag} failed: {own.error}") from own.error

    @property
    def _first(self) -> bool:
        return self._mesh.first

    def _begin(self, order: SaveOrder) -> Path:
        """The folder to fill, made by the first rank and seen by all."""
        error: BaseException | None = None
        folder: Path | None = None
        if self._first:
            try:
                folder = folders.begin(order.save_dir, order.tag)
            except Exception as failure:  # whatever it is, the other ranks wait for the answer
                error = _explained(order.save_dir, failure)
                error.__cause__ = failure if error is not failure else None
        agree(self._mesh, error, f"saving checkpoint {order.tag}")
        name = next(n for n in one_answer(self._mesh, folder.name if folder is not None else None) if n is not None)
        folder = order.save_dir / name
        if not folder.is_dir():
            error = CheckpointError(
                f"{order.save_dir} is not shared: the folder that the first rank made in it is not there; use a shared one"
            )
        self._agreed(folder, error, order)
        return folder

    def _facts(self, content: Content, folder: Path) -> dict[str, Any]:
        if content.pickled:
            content.facts["pickled"] = save_pickled(folder, self._mesh.job.index, content.pickled)
        return {"rank": content.facts, **({"common": content.common} if self._first else {})}

    def _write_now(self, folder: Path, order: SaveOrder, content: Content) -> BaseException | None:
        file: RankFile | None = None
        try:
            with progress(f"saving {order.tag}", content.nbytes, show=self._first) as told:
                file = RankFile(folder, self._mesh.job.index, facts=self._facts(content, folder), expect_bytes=content.nbytes, told=told)
                file.write(content.away)
                file.write(content.parts)
                file.close()
        except BaseException as error:
            if file is not None:
                file.fail(error)
            if not isinstance(error, Exception):
                raise
            return _explained(folder, error)
        finally:
            content.release()
        return None

    def _agreed(self, folder: Path, error: BaseException | None, order: SaveOrder) -> None:
        try:
            agree(self._mesh, error, f"saving checkpoint {order.tag}")
        except CheckpointError:
            if self._first:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _finish(self, folder: Path, order: SaveOrder, stop: threading.Event | None) -> None:
        """The first rank's end of a save: one manifest, the name, ``latest``, old ones away."""
        ranks = self._mesh.job.size
        wait_for_ranks(folder, ranks, stop=stop)
        manifest = join_lists(folder, ranks)
        manifest.facts = {**manifest.facts["ranks"][0]["common"], "ranks": [r["rank"] for r in manifest.facts["ranks"]]}
        manifest.facts["optimizer"] = _join_optimizer(manifest.facts)
        final = publish(folder, manifest, order.tag, order.extra)
        if order.latest:
            folders.write_latest(order.save_dir, order.tag)
        with contextlib.suppress(OSError):
            write_script(order.save_dir)
        if order.keep_last is not None:
            gone = folders.prune(order.save_dir, order.keep_last, protect=(order.tag,))
            if gone:
                logger.info("removed older checkpoints: %s", ", ".join(gone))
        logger.info("saved checkpoint %s", final)


def _explained(path: Path, error: BaseException) -> BaseException:
    """``error``, with the path and advice where it is the bare word of the system."""
    if not isinstance(error, OSError) or isinstance(error, DeepSpeedError):
        return error
    return unwritable(Path(error.filename) if isinstance(error.filename, str) else path, error)


def _join_optimizer(facts: dict[str, Any]) -> dict[str, Any] | None:
    """The optimizer's facts with the numbers that every rank has for its own parameters, equal ones together."""
    found: dict[str, Any] | None = facts.get("optimizer")
    if found is None:
        return None
    return {**found, "scalars": in_rows(pair for rank in facts["ranks"] for pair in rank.pop("scalars", {}).items())}


def client_files(state: dict[str, Any], *, level: int, whole: bool, bf16: bool) -> Callable[[Path, Manifest], None]:
    """``extra`` of an order that leaves files for other programs."""
    kept = copy_for_later(state)
    return lambda folder, manifest: write_client_files(folder, manifest, kept, level=level, whole=whole, bf16=bf16)
