"""Saving as all ranks see it: they agree where to, each writes its part, the first publishes, and a failure of one is
told to all.
"""

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

from deepspeed.checkpoint.agree import gather, together
from deepspeed.checkpoint.foreign.pickled import save_pickled
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.files import unwritable
from deepspeed.checkpoint.format.manifest import Manifest
from deepspeed.checkpoint.save.client_files import write_script
from deepspeed.checkpoint.save.collect import Part, in_rows
from deepspeed.checkpoint.save.save import (
    Background,
    RankFile,
    Snapshots,
    drained,
    join_lists,
    publish,
    until,
    wait_for_ranks,
)
from deepspeed.errors import CheckpointError, DeepSpeedError
from deepspeed.mesh.groups import Mesh
from deepspeed.observe.log import logger

_LONG_S = 3.0  # a bar appears when it takes longer
_GLANCE_S = 0.05  # between looks at the other ranks


@dataclass(frozen=True)
class SaveOrder:
    """What to save where. ``rates``: bytes a second in the background, 0 for no limit. ``extra``: writes further
    files.
    """

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

    ``hold(hurry)``: from here on those are of this moment, until ``release``; ``hurry`` is called when an update waits
    for that. ``facts``: this rank's, and ``common``: the first rank's for all. ``pickled``: client state by path that
    the user lets be pickled.
    """

    parts: Iterable[Part]
    away: Iterable[Part] = ()
    hold: Callable[[Callable[[], None]], None] = lambda hurry: None
    release: Callable[[], None] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    pickled: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def progress(label: str, nbytes: int, *, show: bool = True) -> Iterator[Callable[[int], None]]:
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

    def save(self, order: SaveOrder, content: Content) -> None:
        """Save now; returns when the checkpoint has its name. Collective. Raises CheckpointError on every rank."""
        self.settle(wait=True)
        with self._begin(order) as folder:
            with together(self._mesh, f"saving checkpoint {order.tag}"), contextlib.ExitStack() as stack:
                stack.callback(content.release)
                told = stack.enter_context(progress(f"saving {order.tag}", content.nbytes, show=self._mesh.first))
                stack.enter_context(_explained(folder))
                file = stack.enter_context(self._file(folder, content))
                file.told = told
                file.write(content.away)
                file.write(content.parts)
                file.close()
            with together(self._mesh, f"saving checkpoint {order.tag}"), _explained(folder):
                self._finish(folder, order, None)

    def save_behind(self, order: SaveOrder, content: Content) -> None:
        """Copy what training will change and return; the rest happens in a thread. Collective. An earlier one is waited
        for.
        """
        self.settle(wait=True)
        with self._begin(order) as folder, contextlib.ExitStack() as undone:
            undone.callback(content.release)  # also when it is interrupted: an update would wait for ever
            with together(self._mesh, f"saving checkpoint {order.tag}"), _explained(folder):
                file = undone.enter_context(self._file(folder, content))
                file.limit(order.rate_bytes)
                content.hold(functools.partial(file.limit, 0))
                held = deque(self._snapshots.copy(content.parts))
            work = functools.partial(self._work, folder, order, file, content, held)
            self._running = Background(order.tag, folder, work, hurry=functools.partial(file.limit, 0))
            undone.pop_all()

    def _work(
        self,
        folder: Path,
        order: SaveOrder,
        file: RankFile,
        content: Content,
        held: "deque[Part]",
        stop: threading.Event,
    ) -> None:
        with file, _explained(folder):
            try:
                file.write(until(content.away, stop))  # first, as an update may wait for it
            finally:
                content.release()
            file.write(until(drained(held), stop))
            file.close()
            self._finish(folder, order, stop)

    def settle(self, *, wait: bool) -> None:
        """Bring a background save to its end: raise on every rank when it failed on some; with ``wait`` until it has
        ended.

        Collective while one is running, which every rank knows of; nothing otherwise.
        """
        while self._running is not None:
            own = self._running
            said = gather(self._mesh, (own.finished, None if own.error is None else str(own.error)))
            failed = [(r, text) for r, (_, text) in zip(self._mesh.job.ranks, said, strict=True) if text is not None]
            if failed:
                own.told = True
                own.give_up()
                own.wait(None)
                self._running = None
                gather(self._mesh, None)  # nobody writes any more
                if self._mesh.first:
                    shutil.rmtree(own.folder, ignore_errors=True)
                rank, text = failed[0]
                raise CheckpointError(
                    f"the background save of checkpoint {own.tag} failed on rank {rank}: {text}. The training "
                    "state is untouched, and the "
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

    @contextlib.contextmanager
    def _begin(self, order: SaveOrder) -> Iterator[Path]:
        """The folder to fill, made by the first rank and seen by all; removed after an error. Collective."""
        with together(self._mesh, f"saving checkpoint {order.tag}") as made, _explained(order.save_dir):
            made.mine = folders.begin(order.save_dir, order.tag).name if self._mesh.first else None
        folder = order.save_dir / made.all[0]
        try:
            with together(self._mesh, f"saving checkpoint {order.tag}"):
                if not folder.is_dir():
                    raise CheckpointError(
                        f"{order.save_dir} is not shared: the folder that the first rank made in it is not "
                        "there; use a shared one"
                    )
            yield folder
        except BaseException:  # interrupted: whatever the other ranks do, this save is none
            if self._mesh.first:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _file(self, folder: Path, content: Content) -> RankFile:
        """This rank's file in ``folder``."""
        if content.pickled:
            content.facts["pickled"] = save_pickled(folder, self._mesh.job.index, content.pickled)
        facts = {"rank": content.facts, "common": content.common}
        return RankFile(folder, self._mesh.job.index, facts=facts, expect_bytes=content.nbytes)

    def _finish(self, folder: Path, order: SaveOrder, stop: threading.Event | None) -> None:
        """The first rank's end of a save: one manifest, the name, ``latest``, old ones away. Nothing on the others."""
        if not self._mesh.first:
            return
        ranks = self._mesh.job.size
        wait_for_ranks(folder, ranks, stop=stop)
        manifest = join_lists(folder, ranks)
        manifest.facts = _join_facts(manifest.facts["ranks"])
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


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Where an error is the bare word of the system it gets the path and advice."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DeepSpeedError):
            raise
        raise unwritable(Path(error.filename) if isinstance(error.filename, str) else path, error) from error


def _join_facts(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's facts: the first rank's, what ranks with other parameters add to them, and every rank's own, equal
    ones together.
    """
    facts: dict[str, Any] = {**ranks[0]["common"], "ranks": [rank["rank"] for rank in ranks]}
    for more in (rank["common"] for rank in ranks[1:]):
        for name in ("shared", "extra_state") if more else ():
            facts[name] = {**facts[name], **{key: value for key, value in more[name].items() if key not in facts[name]}}
        for group, names in zip((facts.get("optimizer") or {}).get("groups", []), more.get("groups", []), strict=False):
            group["names"] = list(dict.fromkeys((*group["names"], *names)))
    if facts.setdefault("optimizer", None) is not None:
        facts["optimizer"]["scalars"] = in_rows(
            pair for rank in facts["ranks"] for pair in rank.pop("scalars", {}).items()
        )
    return facts
