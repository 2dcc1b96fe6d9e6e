"""Parameters whose values are still in a file: each rank reads what it keeps, and nothing else is ever in memory.

safetensors, ``torch.load(mmap=True)`` and, over them, transformers give tensors whose memory is a private mapping of
the file: it costs nothing until it is touched. ``/proc/self/smaps`` tells which file, and whether a page is written.
"""

import bisect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.errors import UsageError
from deepspeed.zero.layout import Place, Segment
from deepspeed.zero.param import expose
from deepspeed.zero.plan import StateKind
from deepspeed.zero.regions import Region, Span, runs, spans_of
from deepspeed.zero.unit import Unit

_MAPS, _SMAPS = "/proc/self/maps", "/proc/self/smaps"
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ (\d+) +(/.*)")
_CONTENT = re.compile(r"[0-9a-f]{40,64}")  # files of Hugging Face's cache are named by what is in them
_WINDOW_BYTES, _CLOSE_BYTES = 4 << 20, 4096  # read at once; what lies between is read too


@dataclass(frozen=True)
class FilePart:
    """Place of a tensor's elements (row-major, of ``dtype``) in a file: from byte ``at`` of the file at ``path``.

    ``identity``: equal where it is the same file, on any machine.
    """

    path: str
    identity: tuple[Any, ...]
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal on ranks that would read the same values."""
        return self.identity, self.at, str(self.dtype), self.shape

    def read(self, out: torch.Tensor, lo: int, place: Place | None = None) -> None:
        """Fill ``out`` (flat, any dtype and device) with the elements from ``lo`` on of the part at ``place``, its
        boxes one after the other (None: of the whole). Raises OSError, UsageError for a file that ends early.
        """
        boxes = place.boxes if place is not None else (((0,) * len(self.shape), self.shape),)
        whole, file = Span(0, prod(self.shape)), os.open(self.path, os.O_RDONLY)
        try:
            for at, _, span in spans_of((Region(*box) for box in boxes), lo, lo + out.numel()):
                for window in _windows(runs(self.shape, whole, span), self.dtype.itemsize):
                    self._read(file, window, out, at - lo - span.lo)
        finally:
            os.close(file)

    def _read(self, file: int, window: list[tuple[int, int, int]], out: torch.Tensor, shift: int) -> None:
        begin, (last, _, count) = window[0][0], window[-1]
        values = torch.empty(last + count - begin, dtype=self.dtype, device="cpu")
        room, done = values.view(torch.uint8).numpy().data, 0
        while done < len(room):
            got = os.preadv(file, [room[done:]], self.at + begin * self.dtype.itemsize + done)
            if not got:
                raise _ends_early(self.path)
            done += got
        for where, at, numel in window:
            out[at + shift : at + shift + numel].copy_(values[where - begin : where - begin + numel])


def _ends_early(path: str) -> UsageError:
    return UsageError(f"{path} ends early: it has become shorter since the model was loaded from it")


def _windows(common: Iterable[tuple[int, int, int]], width: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield runs (place in the file, place in the part, length) in groups read at once; long ones in pieces."""
    most, window = _WINDOW_BYTES // width, list[tuple[int, int, int]]()
    for begin, to, length in common:
        for skip in range(0, length, most):
            piece = (begin + skip, to + skip, min(most, length - skip))
            if window:
                end = window[-1][0] + window[-1][2]
                if (piece[0] - end) * width > _CLOSE_BYTES or piece[0] + piece[2] - window[0][0] > most:
                    yield window
                    window = []
            window.append(piece)
    if window:
        yield window


class _Mapping(NamedTuple):
    start: int
    stop: int
    offset: int
    path: str
    inode: int


def identity_of(path: str) -> tuple[Any, ...]:
    """Return the size of a file, and what else tells it from others. Raises OSError."""
    facts, name = os.stat(path), os.path.basename(os.path.realpath(path))
    return (facts.st_size, name) if _CONTENT.fullmatch(name) else (facts.st_size, facts.st_ino, facts.st_mtime_ns)


class MappedFiles:
    """Private mappings of files in this process that nothing was written to, as they are now."""

    def __init__(self) -> None:
        self._identities: dict[tuple[str, int], tuple[Any, ...] | None] = {}

    @cached_property
    def _mapped(self) -> list[_Mapping]:
        return list(_private(_MAPS))

    @cached_property
    def _clean(self) -> set[int]:
        """Return the start addresses of mappings without a page of their own."""
        clean, start = set[int](), -1
        for line in _lines(_SMAPS):
            if "-" in line.partition(" ")[0]:
                start = int(line.partition("-")[0], 16)
                clean.add(start)
            elif line.startswith(("Anonymous:", "Swap:")) and line.split()[1] != "0":
                clean.discard(start)
        return clean

    def part_of(self, tensor: torch.Tensor) -> FilePart | None:
        """Return the place of the values of ``tensor`` in a file; None: in memory of their own.

        Raises UsageError where the file is too short by now: reading that memory would end the process.
        """
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
            return None
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._mapped, address, key=lambda entry: entry.start) - 1
        if at < 0 or not tensor.is_contiguous():
            return None
        mapping = self._mapped[at]
        if address + tensor.nbytes > mapping.stop or (identity := self._identity(mapping.path, mapping.inode)) is None:
            return None
        where = address - mapping.start + mapping.offset
        if where + tensor.nbytes > identity[0]:
            raise _ends_early(mapping.path)
        # Of a lazily negated or conjugated view the file has other values.
        if mapping.start not in self._clean or tensor.is_neg() or tensor.is_conj():
            return None
        return FilePart(mapping.path, identity, where, tensor.dtype, tuple(tensor.shape))

    def _identity(self, path: str, inode: int) -> tuple[Any, ...] | None:
        """Return the file's identity; None when another file has that name by now."""
        if (path, inode) not in self._identities:
            try:
                same = os.stat(path).st_ino == inode
                self._identities[path, inode] = identity_of(path) if same else None
            except OSError:
                self._identities[path, inode] = None
        return self._identities[path, inode]


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            yield from (line.rstrip("\n") for line in file)
    except OSError:  # a system without it: everything counts as memory of its own
        return


def _private(path: str) -> Iterator[_Mapping]:
    for line in _lines(path):
        if (row := _LINE.fullmatch(line)) and row[3].endswith("p"):
            yield _Mapping(int(row[1], 16), int(row[2], 16), int(row[4], 16), row[6], int(row[5]))


def parts_of(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, FilePart]:
    """Find those ``tensors`` that are in files. Collective. UsageError on all ranks for a file that is too short."""
    files, fault, parts = MappedFiles(), None, dict[str, FilePart]()
    try:
        parts = {name: part for name, tensor in tensors.items() if (part := files.part_of(tensor)) is not None}
    except UsageError as error:
        fault = error
    if faults := collectives.failures(fault, mesh.job):
        rank, text = next(iter(faults.items()))
        raise UsageError(f"{mesh.title(rank)}: {text}") from fault
    return parts


def agreed_files(model: nn.Module, mesh: Mesh) -> dict[nn.Parameter, FilePart]:
    """Return parameters of ``model`` that all ranks that share them have in the same file. Collective."""
    plain = {n: p for n, p in model.named_parameters() if type(p) is nn.Parameter and not hasattr(p, "_ds_unit")}
    parts = parts_of({name: p.detach() for name, p in plain.items()}, mesh)
    for group in (mesh.zero, mesh.tp):
        parts = _on_all(parts, group)
    return {plain[name]: part for name, part in parts.items()}


def _on_all(parts: dict[str, FilePart], group: AxisGroup) -> dict[str, FilePart]:
    """Return the parts that every rank of ``group`` has in the same place. Collective."""
    keys = {name: part.key for name, part in parts.items()}
    if collectives.alike(sorted(keys.items()), group):
        return parts
    gathered = collectives.gather_objects(keys, group)
    return {name: part for name, part in parts.items() if all(peer.get(name) == part.key for peer in gathered)}


def values_from_files(
    unit: Unit, device: torch.device, files: Mapping[nn.Parameter, FilePart], *, mesh: Mesh
) -> torch.Tensor | None:
    """Read flat values of ``unit`` from files: this rank's ranges of a sharded one, all of another. Collective.

    Returns None unless all of it is in files. Of what stays whole each rank reads a share, and they exchange them.
    """
    segments = unit.layout.segments
    parts = [files.get(p) for p in unit.params]
    shapes = [part.shape if part is not None else None for part in parts]
    if not parts or unit.mesh is not mesh or shapes != [s.whole_shape for s in segments]:
        return None
    group, numel = unit.mesh.zero, unit.layout.numel
    values = torch.empty(numel, dtype=unit.params[0].dtype, device=device)
    ranges = {(0, numel)}
    if unit.movable:
        kinds = (StateKind.PARAM,) if unit.plan.optim is None else (StateKind.PARAM, StateKind.OPTIM)
        ranges = {unit.range_of(kind) for kind in kinds}
    elif numel % group.size == 0:
        ranges = {(group.index * numel // group.size, (group.index + 1) * numel // group.size)}
    with torch.no_grad():
        for lo, hi in ranges:
            for start, stop in unit.layout.gaps:
                values[max(lo, start) : max(lo, min(hi, stop))].zero_()
            for part, segment in zip(parts, segments, strict=True):
                assert part is not None
                read_segment(part, segment, values, lo=lo, hi=hi)
        if not unit.movable and ranges != {(0, numel)}:
            (lo, hi), *_ = ranges
            collectives.all_gather(values, values[lo:hi].clone(), group).wait()
    for param in unit.params:
        if hasattr(param, "tp_place"):
            param.tp_was_whole = param.tp_place  # type: ignore[attr-defined]
        expose([param], [torch.empty(0, dtype=param.dtype, device=device)])
        param.grad = None
    return values


def read_segment(part: FilePart, segment: Segment, flat: torch.Tensor, *, lo: int, hi: int, base: int = 0) -> None:
    """Read the part of ``segment`` in the flat range [``lo``, ``hi``) into ``flat``, which begins at index ``base``."""
    first, last = max(lo, segment.offset), min(hi, segment.stop)
    if first < last:
        part.read(flat[first - base : last - base], first - segment.offset, segment.place)


def say_full_load(model: nn.Module, files: Mapping[nn.Parameter, FilePart], say: Callable[[str], None]) -> None:
    """Warn, by ``say``, that ``model`` was whole on each rank before sharding, and why, where that is a lot."""
    whole = [(n, p) for n, p in model.named_parameters() if not hasattr(p, "_ds_unit") and p not in files]
    nbytes = sum(p.nbytes for _, p in whole if not p.is_meta)
    if nbytes >= _MUCH_BYTES:
        say(
            f"{nbytes / 1e9:.1f} GB of weights ({whole[0][0]}, ...) are whole in the memory of every rank before they "
            "are shared out, as they are no longer those of a file: built, cast or changed. To have shards alone, load "
            "them in the dtype of their files, or build the model under deepspeed.zero.Init; transformers does so when "
            "an HfDeepSpeedConfig (or TrainingArguments) with stage 3 exists before from_pretrained"
        )


_MUCH_BYTES = 1 << 30
