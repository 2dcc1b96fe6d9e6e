"""Whole weights of a running engine, bucket by bucket, to one rank or to all.

Shards travel straight from where they rest to the ranks that lack them: to all ranks in broadcasts, to one rank from
each owner once. No parameter of the model is gathered in place, so the engine's state does not change meanwhile.

[Note: leaving] Before each bucket the ranks tell each other that they are there, and after it whether it is good. A
rank that stops early (``break``, an error in its loop, its next call of the engine) says so in the place of the next
bucket; those that go on raise then. So a rank that has begun may leave, and nobody waits for it.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch

from deepspeed.comm import collectives, point_to_point
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.errors import UsageError
from deepspeed.reallocate.moves import holders
from deepspeed.reallocate.resting import FlowTensor, RestingWeights
from deepspeed.tier.transfer import Transfer
from deepspeed.zero.regions import Region, Span

_MESSAGE_BYTES = 32 << 20
_ALIGNED = 16  # bytes between the pieces of a message: any dtype may be there

Bucket = list[tuple[str, torch.Tensor]]
Item = TypeVar("Item")


class FlowPiece(NamedTuple):
    """Elements of the tensor ``name`` that member ``source`` of the job sends; -1: all receivers have them already."""

    source: int
    name: str
    span: Span


@dataclass(frozen=True)
class Parcel:
    """Tensors ``names`` that belong together; ``unpack`` maps their whole values, by name, to the yielded ones."""

    names: tuple[str, ...]
    unpack: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] = field(default=lambda tensors: tensors)


def plan_shards(
    items: Sequence[Item], max_bytes: int | None, nbytes: Callable[[Item], int] = attrgetter("nbytes")
) -> list[list[Item]]:
    """Split ``items``, in order, into shards of ``max_bytes`` (None: one shard); larger items get their own shard."""
    shards, filled = [list[Item]()], 0
    for item in items:
        if shards[-1] and max_bytes is not None and filled + nbytes(item) > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += nbytes(item)
    return shards


def sources(name: str, entries: Sequence[FlowTensor | None], target: int | None) -> list[FlowPiece]:
    """List the senders of a tensor's elements, each element once; -1: ``target`` has them, or without one everybody.

    ``entries``: by member.
    """
    has = {member: entry.spans for member, entry in enumerate(entries) if entry is not None}
    shape = next(entry.shape for entry in entries if entry is not None)
    regions = dict.fromkeys(span.region for spans in has.values() for span in spans)
    whole = [Span(0, prod(shape if region is None else region.shape), region) for region in regions]
    pieces = []
    for span, members in holders(shape, whole, has):
        assert members, f"no rank has {span} of {name}"
        has_all = len(members) == len(entries) if target is None else target in members
        pieces.append(FlowPiece(-1 if has_all else min(members), name, span))
    return pieces


def messages(
    pieces: Iterable[FlowPiece], width: Mapping[str, int], most: int = _MESSAGE_BYTES
) -> Iterator[list[FlowPiece]]:
    """Pack ``pieces`` of a source into groups of ``most`` bytes, cutting long ones; ``width``: bytes of an element."""
    message, filled = list[FlowPiece](), 0
    for source, name, (lo, hi, region) in pieces:
        while lo < hi:
            if filled and most - filled < width[name]:
                yield message
                message, filled = [], 0
            count = min(hi - lo, max(1, (most - filled) // width[name]))
            message.append(FlowPiece(source, name, Span(lo, lo + count, region)))
            filled += -(-count * width[name] // _ALIGNED) * _ALIGNED
            lo += count
    if message:
        yield message


def put(whole: torch.Tensor, lo: int, values: torch.Tensor) -> None:
    """Write the flat ``values`` to ``whole``, any view, from its ``lo``-th element in row-major order on."""
    if whole.is_contiguous():
        whole.view(-1)[lo : lo + values.numel()].copy_(values)
        return
    row = prod(whole.shape[1:])
    first, done = lo // row, 0
    if lo % row:
        done = min(row - lo % row, values.numel())
        put(whole[first], lo % row, values[:done])
        first += 1
    rows = (values.numel() - done) // row
    if rows:
        whole[first : first + rows].copy_(values[done : done + rows * row].view(rows, *whole.shape[1:]))
        done += rows * row
    if done < values.numel():
        put(whole[first + rows], 0, values[done:])


def inside(whole: torch.Tensor, region: Region | None) -> torch.Tensor:
    """Return the view of ``whole`` that is ``region``."""
    return whole if region is None else whole[tuple(slice(s, s + n) for s, n in zip(*region, strict=True))]


class WeightFlow:
    """Iterate over buckets of (name, whole tensor); also a context manager. See [Note: leaving].

    Made by ``engine.stream_weights``. A bucket's tensors are the consumer's: fresh memory on the device.
    """

    def __init__(
        self,
        mesh: Mesh,
        tensors: Mapping[str, torch.Tensor],
        *,
        max_bytes: int,
        device: torch.device,
        target: int | None = None,
        parcels: Sequence[Parcel] | None = None,
    ) -> None:
        """Plan buckets of ``tensors``, this rank's parameters and buffers by name; ``target``: the receiving member.

        ``parcels``: tensors delivered together, in order (None: each tensor alone). Collective.
        """
        self._over, self._cut = True, False
        self._mesh, self._device, self._target = mesh, device, target
        self._resting = RestingWeights(tensors)
        gathered: list[dict[str, FlowTensor]] = collectives.gather_objects(self._resting.entries, mesh.talk)
        names = dict.fromkeys(name for of_rank in gathered for name in of_rank)
        self.entries = {name: next(of_rank[name] for of_rank in gathered if name in of_rank) for name in names}
        self._pieces = {n: sources(n, [of_rank.get(n) for of_rank in gathered], target) for n in names}
        self._message_bytes = max(_ALIGNED, min(_MESSAGE_BYTES, max_bytes // 8))
        parcels = parcels or [Parcel((name,)) for name in names]
        self._todo = plan_shards(parcels, max_bytes - self._message_bytes, self._nbytes)[::-1]  # the next one last
        self._wanted = target is None or target == mesh.job.index
        if target is not None and mesh.job.backend not in ("gloo", "none"):
            # Messages use the job's communicator, which nccl makes in the first call that all members make.
            collectives.broadcast(torch.zeros(1, device=device), mesh.job)
        self._number, self._over = 0, False

    def _nbytes(self, parcel: Parcel) -> int:
        return sum(self.entries[name].nbytes for name in parcel.names)

    def __iter__(self) -> "WeightFlow":
        return self

    def __next__(self) -> Bucket:
        """Return the next bucket, empty on ranks that are not the target. Collective."""
        if self._cut:
            raise UsageError(
                "stream_weights was ended by another call of the engine inside its loop; take all buckets first"
            )
        if self._over:
            raise StopIteration
        fault: Exception | None = None
        bucket = self._todo.pop() if self._todo else []
        names = [name for parcel in bucket for name in parcel.names]
        whole: dict[str, torch.Tensor] = {}
        try:
            for name in names if self._wanted else ():
                whole[name] = torch.empty(self.entries[name].shape, dtype=self.entries[name].dtype, device=self._device)
        except Exception as error:  # no memory; the others must not wait in the bucket
            fault = error
        self._compare(fault)
        if not bucket:
            self._over = True
            raise StopIteration
        self._compare(self._fill(names, whole))
        self._number += 1
        made: Bucket = []
        try:
            for parcel in bucket if self._wanted else ():
                made += parcel.unpack({name: whole.pop(name) for name in parcel.names}).items()
        except Exception as error:
            self.close(collectives.describe(error))
            raise
        return made

    def _compare(self, fault: Exception | None) -> None:
        """Raise an error of any rank on all ranks, also when one has left. Collective."""
        failed = collectives.failures(fault, self._mesh.talk)
        if not failed:
            return
        self._over = True
        if fault is not None:
            raise fault
        rank, text = next(iter(failed.items()))
        raise UsageError(f"{self._mesh.title(rank)}, bucket {self._number} of stream_weights: {text}")

    def _fill(self, names: Sequence[str], whole: dict[str, torch.Tensor]) -> Exception | None:
        """Exchange the pieces of ``names``; return this rank's error after everything has been sent and received."""
        fault: Exception | None = None
        try:
            for _, name, (lo, hi, region) in (
                p for n in names if self._wanted for p in self._pieces[n] if p.source < 0
            ):
                put(inside(whole[name], region), lo, self._resting.span(name, Span(lo, hi, region)))
        except Exception as error:
            fault = error
        by_source: dict[int, list[FlowPiece]] = {}
        for piece in (p for name in names for p in self._pieces[name] if p.source >= 0):
            by_source.setdefault(piece.source, []).append(piece)
        width, most = {n: self.entries[n].dtype.itemsize for n in names}, self._message_bytes // max(1, len(by_source))
        queues = [messages(pieces, width, most) for _, pieces in sorted(by_source.items())]
        for wave in itertools.zip_longest(*queues):  # one message of each source
            fault = self._pass([message for message in wave if message], whole) or fault
        self._resting.close()
        return fault

    def _pass(self, wave: list[list[FlowPiece]], whole: dict[str, torch.Tensor]) -> Exception | None:
        """Send one message of each source to its receivers, concurrently; return this rank's error."""
        job, fault = self._mesh.job, None
        works: list[Transfer] = []
        leaving, coming = list[tuple[torch.Tensor, int]](), list[tuple[torch.Tensor, int]]()
        arriving: list[tuple[FlowPiece, torch.Tensor]] = []
        for message in wave:
            source = message[0].source
            sends = source == job.index
            if not (sends or self._wanted):
                continue
            buffer, views = self._room(message)
            try:
                for view, (_, name, span) in zip(views, message, strict=True) if sends else ():
                    view.copy_(self._resting.span(name, span))
            except Exception as error:  # sent all the same, as the others wait
                fault = error
            if self._target is None:
                works.append(collectives.start_broadcast(buffer, job, source=source))
            elif sends:
                leaving.append((buffer, self._target))
            else:
                coming.append((buffer, source))
            arriving += zip(message, views, strict=True)
        for work in (*works, point_to_point.exchange(leaving, coming, job)):
            work.wait()
        for (_, name, span), view in arriving if self._wanted else ():
            put(inside(whole[name], span.region), span.lo, view)
        return fault

    def _room(self, message: list[FlowPiece]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Allocate a message as bytes; return the buffer and the view of each piece."""
        places, at = [], 0
        for _, name, span in message:
            dtype = self.entries[name].dtype
            size = (span.hi - span.lo) * dtype.itemsize
            places.append((at, size, dtype))
            at += -(-size // _ALIGNED) * _ALIGNED
        buffer = torch.empty(at, dtype=torch.uint8, device=self._device)
        return buffer, [buffer[start : start + size].view(dtype) for start, size, dtype in places]

    def close(self, reason: str = "it has left the loop", *, cut: bool = False) -> None:
        """End early; ranks that go on get ``reason`` with their next bucket. ``cut``: not as asked. Collective."""
        if not self._over:
            self._over, self._cut = True, cut
            collectives.failures(UsageError(reason), self._mesh.talk)

    def __enter__(self) -> "WeightFlow":
        return self

    def __exit__(self, kind: object, raised: BaseException | None, _: TracebackType | None) -> None:
        if raised is None or isinstance(raised, Exception):
            self.close(collectives.describe(raised) if raised is not None else "it has left the loop")

    def __del__(self) -> None:
        if not self._over and not sys.is_finalizing():
            self.close()
