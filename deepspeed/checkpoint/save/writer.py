"""One save: every rank streams its parts into its file; the first joins their lists and publishes the folder."""

import atexit
import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from tqdm import tqdm

from deepspeed.accelerator.device import get_accelerator
from deepspeed.checkpoint.foreign.unpickle import save_pickled
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.files import ChunkWriter, explained
from deepspeed.checkpoint.format.manifest import Box, Key, Row, box_row, gaps_in, parsed, row_of, text_of
from deepspeed.checkpoint.save.client_files import write_script
from deepspeed.checkpoint.save.collect import TensorPart, in_rows
from deepspeed.checkpoint.save.content import Content, Copies
from deepspeed.comm.collectives import gather_objects
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.errors import CheckpointError, DeepSpeedError
from deepspeed.monitor.log import logger
from deepspeed.tier.arena import Arena
from deepspeed.zero.regions import Span
from deepspeed.zero.sync.failures import together

_LIST = "rank_{:05d}.list"
_DATA = "rank_{:05d}.bin"
_FAILED = "rank_{:05d}.failed"
_NOTE = "DS_CHECKPOINT_NOTE"  # variable: the file in which to leave the name of the newest checkpoint
_GIVEN_UP = "given up, because the save failed on another rank"
_LONG_S = 3.0  # a bar appears when it takes longer
_GLANCE_S = 0.05  # between looks at the other ranks while this one waits
_NAP_S = 0.005  # between looks of the first rank at their files, at least
_PATIENCE_S = 600.0  # without a sign of life from another rank
_LAST_PATIENCE_S = 60.0  # the same when this process wants to end


@contextlib.contextmanager
def progress(label: str, nbytes: int, *, show: bool = True) -> Iterator[Callable[[int], Any]]:
    """Show a bar over bytes, on a terminal, for work that takes long."""
    if not (show and sys.stderr.isatty()):  # tqdm takes semaphores even for a bar that is never shown
        yield lambda _: None
        return
    with tqdm(desc=label, total=nbytes, unit="B", unit_scale=True, delay=_LONG_S) as bar:
        yield bar.update


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Add path and advice to a bare OSError of the system."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DeepSpeedError):
            raise
        with explained(Path(error.filename) if isinstance(error.filename, str) else path):
            raise


class RankFile(ChunkWriter):
    """File that one rank writes, and the list of its tensors."""

    def __init__(self, folder: Path, rank: int, content: Content, *, pinned: Arena | None = None) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder.parent} is not shared: a folder that the first rank made is not in it")
        if content.pickled:
            content.facts["pickled"] = save_pickled(folder, rank, content.pickled)
        super().__init__(folder / _DATA.format(rank), expect_bytes=content.nbytes, pinned=pinned)
        self.rank = rank
        self.tells = False  # of an error, by a file: where no answer of all ranks is waited for
        self._facts = {"rank": content.facts, "common": content.common}
        self._tensors: list[tuple[str, str, torch.dtype, tuple[int, ...]]] = []

    def write(self, parts: Iterable[TensorPart], stop: threading.Event, report: Callable[[int], Any]) -> None:
        """Append ``parts``. Raises CheckpointError (disk full, ...), also once ``stop`` is set."""
        for part in parts:
            if stop.is_set():
                raise CheckpointError(_GIVEN_UP)
            self._tensors.append((part.state, part.name, part.values.dtype, part.shape))
            self.append(part.values, Span(part.lo, part.lo + part.values.numel(), part.region))
            report(part.values.nbytes)

    def limit(self, rate_bytes: int) -> None:
        """Limit the rate to so many bytes a second from here on; 0 for no limit."""
        self.rate_bytes = rate_bytes

    def close(self) -> list[Box]:
        """Bring everything to the disk and leave the list for the first rank."""
        rows: dict[Key, Row] = {}
        boxes = super().close()
        for tensor, box in zip(self._tensors, boxes, strict=True):
            _add(rows, row_of(*tensor), [box_row(box)], self.rank)
        content = text_of([*rows.values()], {self.path.name: self.nbytes}, self._facts, crc32c)
        folders.write_atomically(self.path.with_name(_LIST.format(self.rank)), content)
        return boxes

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Drop the file after an error and, if it ``tells``, report the error to the first rank, as far as possible."""
        if error is not None:
            with contextlib.suppress(OSError, CheckpointError):
                self.abort()
            with contextlib.suppress(OSError):
                if self.tells:
                    self.path.with_name(_FAILED.format(self.rank)).write_text(str(error), encoding="utf-8")


def wait_for_ranks(folder: Path, ranks: int, stop: threading.Event) -> None:
    """Wait until every rank has left its list. CheckpointError when one failed, or wrote nothing for ten minutes."""
    begun, missing, last_write = time.monotonic(), set(range(ranks)), -1
    while missing := {r for r in missing if not (folder / _LIST.format(r)).is_file()}:
        glance = time.monotonic()
        failed = next((r for r in sorted(missing) if (folder / _FAILED.format(r)).is_file()), None)
        if failed is not None:
            raise CheckpointError(f"rank {failed}: {(folder / _FAILED.format(failed)).read_text(encoding='utf-8')}")
        if stop.is_set():
            raise CheckpointError(_GIVEN_UP)
        written = len(missing)  # changes when one of them writes or is done
        for rank in missing:
            with contextlib.suppress(OSError):
                written += (folder / _DATA.format(rank)).stat().st_mtime_ns
        if written != last_write:
            begun, last_write = glance, written
        if (idle := glance - begun) > (_PATIENCE_S if threading.main_thread().is_alive() else _LAST_PATIENCE_S):
            raise CheckpointError(f"ranks {sorted(missing)} have written nothing for {idle:.0f} s; they may have died")
        # many ranks take long to look at, and training needs this interpreter and the filesystem too
        time.sleep(max(_NAP_S, min(1.0, 20 * (time.monotonic() - glance))))


def _add(rows: dict[Key, Row], row: Row, boxes: list[Any], rank: int) -> None:
    """Add ``boxes`` of the tensor of ``row`` to the known ones. CheckpointError when ranks differ about the tensor."""
    key = row["state"], row["name"]
    first = rows.setdefault(key, row)
    if first is not row and (first["dtype"], first["shape"]) != (row["dtype"], row["shape"]):
        raise CheckpointError(
            f"{key[0]} of {key[1]!r} is torch.{first['dtype']} {(*first['shape'],)} on one rank and "
            f"torch.{row['dtype']} {(*row['shape'],)} on rank {rank}; ranks hold different models"
        )
    first["boxes"] = [*first["boxes"], *boxes] if first is not row else boxes


def join_lists(folder: Path, ranks: int) -> tuple[dict[Key, Row], dict[str, int], dict[str, Any]]:
    """Join every rank's list into one and remove them: rows of tensors, bytes of files, facts as ``join_facts``."""
    rows, files = dict[Key, Row](), dict[str, int]()
    facts = list[dict[str, Any]]()
    for path in (folder / _LIST.format(rank) for rank in range(ranks)):
        part = parsed(path.read_bytes(), where=str(path), checksum=crc32c)
        path.unlink()
        files |= part["files"]
        for row in part["tensors"]:
            _add(rows, row, row["boxes"], len(facts))
        facts.append(part["facts"])
    for (state, name), row in rows.items():
        for gap in gaps_in(row):
            label = f"elements {gap.lo} to {gap.hi} of {state} of {name!r}"
            raise CheckpointError(f"{label} were written by {gap.times} ranks; ranks do not agree on who holds them")
    return rows, files, join_facts(facts)


def join_facts(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the manifest's facts: the first rank's, additions of ranks with other parameters, and each rank's own."""
    facts: dict[str, Any] = {**ranks[0]["common"], "ranks": [rank["rank"] for rank in ranks]}
    for more in (rank["common"] for rank in ranks[1:]):
        for name in ("shared", "extra_state") if more else ():
            facts[name] = facts[name] | more[name] | facts[name]
        for group, names in zip((facts.get("optimizer") or {}).get("groups", []), more.get("groups", []), strict=False):
            group["names"] = list(dict.fromkeys((*group["names"], *names)))
    lists = [rank["stage"]["groups"] for rank in facts["ranks"] if "stage" in rank]
    options = [[group["options"] for group in groups] for groups in lists]
    if any(some != options[0][: len(some)] for some in options):  # the first stage's are not those of the model
        facts["optimizer"]["groups"] = [group for groups in lists for group in groups]
        facts["lr_scheduler"] = None
    if facts.setdefault("optimizer", None) is not None:
        numbers = (pair for rank in facts["ranks"] for pair in rank.pop("scalars", {}).items())
        facts["optimizer"]["scalars"] = in_rows(numbers)
    return facts


class Background:
    """Save that runs in a thread. ``hurry``: lifts its rate limit; ``raised``: its error has been reported."""

    def __init__(
        self, tag: str, folder: Path, acts: Iterable[Callable[[threading.Event], None]], hurry: Callable[[], None]
    ) -> None:
        self.tag, self.folder, self.hurry = tag, folder, hurry
        self.error: BaseException | None = None
        self.raised = False
        self._stop, self._acts = threading.Event(), acts
        self._device = get_accelerator().current_device()
        # Not a daemon: a process that ends by itself waits for its last checkpoint.
        self._thread = Thread(target=self._run, name=f"checkpoint-{tag}", daemon=False)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many of them, or this process is ending; the other ranks count on this one
            logger.warning("checkpoint %s is written at once, because no thread can be started: %s", tag, error)
            self.hurry()
            self._run()

    def _run(self) -> None:
        try:
            get_accelerator().set_device(self._device)  # a new thread stands on the first one
            for act in self._acts:
                act(self._stop)
        except BaseException as error:
            self.error = error
            logger.error("the background save of checkpoint %s failed: %s", self.tag, error)
            atexit.register(self._end_badly)

    def _end_badly(self) -> None:
        """End the process with status 1 when nobody has heard of the failure, instead of as if all were well."""
        if self.raised:
            return
        self.raised = True  # the other handlers first, which may call this one again
        atexit._run_exitfuncs()
        logger.error("ending with status 1, because checkpoint %s was not saved: %s", self.tag, self.error)
        sys.stdout.flush()
        os._exit(1)

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None, *, give_up: bool = False) -> None:
        """Wait until it has ended, or ``seconds``, at full speed; ``give_up``: stop after the part being written."""
        if give_up:
            self._stop.set()
        self.hurry()
        if not self.finished:
            self._thread.join(seconds)


@dataclass(frozen=True)
class SaveOrder:
    """Request of a save. ``rate_bytes``: a second, in the background; 0: no limit. ``extra``: writes further files."""

    save_dir: Path
    tag: str
    latest: bool = True
    keep_last: int | None = None
    rate_bytes: int = 0
    extra: Callable[[Path, dict[Key, Any], dict[str, Any]], None] | None = None


class Saver:
    """Save one engine's checkpoints, one at a time, in the foreground or behind the training."""

    def __init__(self, mesh: Mesh, arena: Arena | None = None) -> None:
        """Take ``arena`` for the memory of copies, page-locked where the states are on an accelerator."""
        self._mesh, self._arena = mesh, arena or Arena()
        self._running: Background | None = None
        self._copies = Copies(self._arena)

    def save(self, order: SaveOrder, content: Content, *, background: bool = False) -> None:
        """Save; return when the checkpoint has its name. Collective. Raises CheckpointError on every rank.

        ``background``: copy what training will change and return; a thread does the rest. Waits for an earlier save.
        """
        self.settle(wait=True)
        with self._begin(order, content) as folder, contextlib.ExitStack() as undone:
            with self._together(order), _explained(folder):
                file = RankFile(folder, self._mesh.job.index, content, pinned=self._arena if self._arena.pins else None)
                undone.push(file)
                content.hold(hurry := lambda: file.limit(0))
                near, nbytes = [p for p in content.parts if p.elements.store is None], content.nbytes
                if background:
                    file.limit(order.rate_bytes)
                    near = self._copies.take(near)
                    content.parts = [p for p in content.parts if p.elements.store is not None]  # the rest may go
            bar = progress(f"saving {order.tag}", nbytes, show=self._mesh.first and not background)

            def write(stop: threading.Event) -> None:
                file.tells = background
                with file, _explained(folder), bar as report:
                    try:
                        file.write(content.away(), stop, report)  # first, as an update may wait for it
                    finally:
                        content.release()
                    if background:
                        self._copies.arrive()
                    file.write(near, stop, report)
                    file.close()

            acts = (write, functools.partial(self._finish, folder, order))
            if background:
                self._running = Background(order.tag, folder, acts, hurry)
            else:
                for act in acts:
                    with self._together(order):
                        act(threading.Event())
            undone.pop_all()

    def before_update(self) -> None:
        """Let copies of a background save finish reading: the engine is about to write their sources."""
        self._copies.before_update()

    def settle(self, *, wait: bool, alone: bool = False) -> None:
        """Bring a background save to its end (``wait``: until it has ended); raise on all ranks when some failed.

        Collective while one is running. ``alone``: of this rank's part only, without the others.
        """
        while (save := self._running) is not None:
            finished = save.finished  # looked at before the error, which is final then
            error = None if save.error is None else str(save.error)
            local = self._mesh.job.ranks[self._mesh.job.index], finished, error
            states = [local] if alone else gather_objects(local, self._mesh.talk)
            failed = [(rank, text) for rank, _, text in states if text is not None]
            if failed:
                save.raised = True
                save.wait(give_up=True)
                self._running = None
                if not alone:
                    gather_objects(None, self._mesh.talk)  # nobody writes any more
                if self._mesh.first:
                    shutil.rmtree(save.folder, ignore_errors=True)
                raise CheckpointError(
                    f"the background save of checkpoint {save.tag} failed on rank {failed[0][0]}: {failed[0][1]}. "
                    "The training state is untouched, and the checkpoint before it is intact"
                )
            if all(ended for _, ended, _ in states):
                self._running = None
            elif wait:
                save.wait(_GLANCE_S)  # not to its end: a failure elsewhere may be what it waits for
            else:
                return

    @property
    def running(self) -> bool:
        """Tell whether there is a background save that is not settled."""
        return self._running is not None

    def _together(self, order: SaveOrder) -> Any:
        return together(self._mesh, f"saving checkpoint {order.tag}")

    @contextlib.contextmanager
    def _begin(self, order: SaveOrder, content: Content) -> Iterator[Path]:
        """Make the folder to fill, on the first rank; after an error remove it and release the content. Collective."""
        with self._together(order) as made, _explained(order.save_dir):
            made.mine = folders.begin(order.save_dir, order.tag).name if self._mesh.first else None
        folder = order.save_dir / made.all[0]
        try:
            yield folder
        except BaseException:  # interrupted: whatever the other ranks do, this save is none
            content.release()  # an update would wait for ever
            if self._mesh.first:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _finish(self, folder: Path, order: SaveOrder, stop: threading.Event) -> None:
        """Finish a save on the first rank: manifest, final name, ``latest``, pruning. Does nothing on other ranks."""
        if not self._mesh.first:
            return
        with _explained(folder):
            wait_for_ranks(folder, self._mesh.job.size, stop)
            rows, files, facts = join_lists(folder, self._mesh.job.size)
            if order.extra is not None:
                order.extra(folder, {key: row["shape"] for key, row in rows.items()}, facts)
            content = text_of([*rows.values()], files, facts, crc32c)
            folders.write_atomically(folder / folders.MANIFEST, content)
            final = folders.publish(folder, order.tag)
            if order.latest:
                folders.write_latest(order.save_dir, order.tag)
            with contextlib.suppress(OSError):
                write_script(order.save_dir)
            keep = order.keep_last
            if keep is not None and (removed := folders.prune(order.save_dir, keep, protect=(order.tag,))):
                logger.info("removed older checkpoints: %s", ", ".join(removed))
            logger.info("saved checkpoint %s", final)
            if note := os.environ.get(_NOTE):  # an elastic launcher wants to know
                with contextlib.suppress(OSError):
                    folders.write_atomically(Path(note), str(final).encode())
