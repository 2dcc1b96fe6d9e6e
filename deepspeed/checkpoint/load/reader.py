"""Opening a checkpoint folder, whoever wrote it; reading any range of this package's own, with checksums verified."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.foreign.legacy import open_reference
from deepspeed.checkpoint.foreign.unpickle import load_pickled
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.files import ChunkReader, Wanted
from deepspeed.checkpoint.format.folders import MANIFEST
from deepspeed.checkpoint.format.manifest import Key, Manifest
from deepspeed.checkpoint.format.plain import decode
from deepspeed.checkpoint.load.source import Described, Source, Wish, outside, whole
from deepspeed.checkpoint.save.collect import unpack_scalar
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.errors import CheckpointError
from deepspeed.zero.regions import Region, Span, runs
from deepspeed.zero.sync.failures import together


def open_checkpoint(folder: Path, *, rank: int = 0, allow_pickle: bool = False) -> Source:
    """Open the checkpoint in a tag's folder, as in ``OwnSource``. CheckpointError if absent, incomplete or damaged."""
    if folders.is_complete(folder):
        return OwnSource(folder, rank=rank, allow_pickle=allow_pickle)
    if folders.is_any(folder):
        return open_reference(folder)
    reason = f"has no {MANIFEST}, and no files of DeepSpeed's layout" if folder.is_dir() else "is no folder"
    raise CheckpointError(f"{folder} is no checkpoint: it {reason}")


def located(path: Path, tag: str | None = None) -> Path:
    """Return the tag's folder for ``path`` and ``tag``: ``path`` itself, or the result of ``find_checkpoint``."""
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint in {path} (no such folder)")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; name the folder of a checkpoint")
    folder = path if tag is None and folders.is_any(path) else folders.find_checkpoint(path, tag)
    if folder is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return folder


def find_and_open(load_dir: Path, tag: str | None = None, *, allow_pickle: bool = False) -> Source:
    """Open the checkpoint that ``located`` finds, as ``open_checkpoint`` does."""
    return open_checkpoint(located(load_dir, tag), allow_pickle=allow_pickle)


def open_everywhere(mesh: Mesh, load_dir: Path, tag: str | None, *, allow_pickle: bool) -> Source | None:
    """Open the checkpoint on every rank, or raise on every rank; None when there is none. Collective."""
    with together(mesh, f"loading from {load_dir}") as shared:
        folder = folders.find_checkpoint(load_dir, tag) if mesh.first else None
        shared.mine = None if folder is None else folder.name
    name = shared.all[0]
    if name is None:
        return None
    with together(mesh, f"loading {load_dir / name}"):
        source = open_checkpoint(load_dir / name, rank=mesh.job.index, allow_pickle=allow_pickle)
    return source


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder. CheckpointError when it is missing, damaged or of another version."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {folder} is no complete checkpoint") from error
    return Manifest.from_bytes(content, where=str(path), checksum=crc32c)


class OwnSource:
    """Checkpoint of this package, as ``rank`` sees it; needing pickle is an error unless ``allow_pickle``."""

    kind = "deepspeed-checkpoint"

    def __init__(self, folder: Path, *, rank: int = 0, allow_pickle: bool = False) -> None:
        self.path = folder
        self.manifest = read_manifest(folder)
        self._rank, self._allow_pickle = rank, allow_pickle
        self._check_files()
        self._reader = ChunkReader(folder)

    @cached_property
    def entries(self) -> dict[Key, Described]:
        return {key: Described(e.dtype, e.shape) for key, e in self.manifest.entries.items()}

    def read(self, key: Key, out: torch.Tensor, *, start: int = 0, region: Region | None = None) -> None:
        """Read as ``Source.read``."""
        self.read_many([Wish(key, out, start, region)])

    def read_many(self, wishes: Iterable[Wish]) -> None:
        """Do many reads in the order of the files. Raises as ``read``."""
        wanted: list[Wanted] = []
        for wish in wishes:
            (state, name), out, start, region = wish
            entry, label = self.manifest.entries.get(wish.key), f"{state} of {name}"
            if entry is None:
                raise CheckpointError(f"{self.path} has no {label}")
            if wrong := outside(wish, entry.dtype, entry.shape):
                raise ValueError(wrong)
            width, raw, missing = entry.dtype.itemsize, out.view(torch.uint8), out.numel()
            for box in entry.boxes:
                for at, inside, numel in runs(entry.shape, Span(start, start + out.numel(), region), box.span):
                    target = raw[(at - start) * width : (at - start + numel) * width]
                    wanted.append(Wanted(box, (inside - box.lo) * width, target, label))
                    missing -= numel
            if missing:
                raise CheckpointError(f"{self.path / MANIFEST} has no bytes for part of {label}")
        self._reader.read_many(wanted)

    def _check_files(self) -> None:
        """Raise CheckpointError for a manifest that contradicts the files or itself, before anything is read."""
        for name, nbytes in self.manifest.files.items():
            path, entries = self.path / name, self.manifest.entries.values()
            size = path.stat().st_size if path.is_file() else -1
            if size != nbytes:
                inside = [f"{e.state} of {e.name}" for e in entries if any(box.file == name for box in e.boxes)]
                raise CheckpointError(
                    f"{path} {f'has {size} bytes, not {nbytes}' if size >= 0 else 'is missing'}; it holds "
                    f"{', '.join(inside[:4])} ({len(inside)} tensors); fetch it again, or use another checkpoint"
                )
        place = self.path / MANIFEST
        for entry, box in ((e, box) for e in self.manifest.entries.values() for box in e.boxes):
            end, nbytes = self.manifest.files.get(box.file, -1), (box.hi - box.lo) * entry.dtype.itemsize
            if box.offset + box.extent > end or not 0 <= nbytes <= box.extent:
                raise CheckpointError(f"{place} places {entry.state} of {entry.name} outside of {box.file}")
            values = torch.empty(box.hi - box.lo, dtype=entry.dtype, device="meta")
            wrong = box.region and outside(Wish(entry.key, values, box.lo, box.region), entry.dtype, entry.shape)
            if wrong:
                raise CheckpointError(f"{place} has a part outside of its tensor: {wrong}")
        for entry in self.manifest.entries.values():
            for gap in entry.faults():
                fault = f"{'several places' if gap.times else 'no bytes'} for elements {gap.lo} to {gap.hi}"
                raise CheckpointError(f"{place} has {fault} of {entry.state} of {entry.name}")

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Decode the facts, of ranks only the first's and this one's. CheckpointError for what no release writes."""
        raw = self.manifest.facts
        try:
            ranks = raw.get("ranks") or []
            local = ranks[self._rank] if self._rank < len(ranks) else {}
            client = local if "client_state" in local or not ranks else ranks[0]
            entry = client.get("pickled")
            pickled = load_pickled(self.path, entry, allow=self._allow_pickle) if entry else None
            return {
                **{k: raw.get(k) for k in ("saved", "engine", "config", "world", "lr_scheduler_type")},
                "shared": raw.get("shared") or {},
                "optimizer": self._optimizer(raw.get("optimizer")),
                **{name: self._plain(raw.get(name)) for name in ("lr_scheduler", "loss_scaler", "extra_state")},
                "client_state": self._plain(client.get("client_state"), pickled) or {},
                "stages": self._plain([rank["stage"] for rank in ranks if "stage" in rank]),
                "ranks": {
                    rank: {name: self._plain(ranks[rank].get(name)) for name in ("rng", "data", "odd")}
                    for rank in {0, self._rank} & set(range(len(ranks)))
                },
            }
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = f"has facts this release does not understand: {type(error).__name__}: {error}"
            raise CheckpointError(f"{self.path / MANIFEST} {reason}") from error

    def _optimizer(self, raw: dict[str, Any] | None) -> dict[str, Any]:
        if raw is None:
            return {}
        groups = [{"names": g["names"], "options": self._plain(g["options"])} for g in raw["groups"]]
        scalars = {
            name: {k: unpack_scalar(v) for k, v in row["values"].items()}
            for row in raw["scalars"]
            for name in row["names"]
        }
        return {"type": raw["type"], "groups": groups, "scalars": scalars}

    def _plain(self, value: Any, pickled: dict[str, Any] | None = None) -> Any:
        return decode(value, lambda name: whole(self, ("plain", name)), pickled=pickled)

    def close(self) -> None:
        self._reader.close()
