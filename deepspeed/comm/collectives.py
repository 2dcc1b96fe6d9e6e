"""The collectives ZeRO is made of, over flat 1-D tensors, as transfers that are waited for.

On gloo (CPU ranks) gathers and reduce-scatters are pairwise exchanges: gloo's own reduce-scatter is an all-reduce and
its all-gather copies both ends, while a direct exchange moves the minimum of bytes, straight between the caller's
buffers, and lets the receiver add in the accumulation dtype. On other backends (nccl) they are the tensor collectives.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.accelerator.device import get_accelerator
from deepspeed.errors import DeepSpeedError, DivergenceError, UsageError
from deepspeed.monitor import hostmem
from deepspeed.tier.transfer import Transfer

# torch 2.13 renamed the tensor collectives; older releases in our range have only the first names.
gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class AxisGroup:
    """Process group and this rank's place in it. ``pg`` is None only for a single rank without torch.distributed."""

    pg: dist.ProcessGroup | None
    size: int
    index: int
    ranks: tuple[int, ...]
    backend: str
    # Called as listener(op, numel, dtype, group size) for every collective, by tests and traces; what it returns, if
    # anything, is called when the collective has ended.
    ledger: list[Callable[[str, int, torch.dtype, int], Callable[[], None] | None]] = field(
        default_factory=list, compare=False
    )

    @property
    def alike(self) -> bool:
        """Return whether the other members do not exist, and are taken to answer as this rank (backend "fake")."""
        return self.backend == "fake"

    def note(self, op: str, tensor: torch.Tensor) -> Callable[[], None]:
        """Report a collective to the listeners; return the function to call when the collective has ended."""
        next(_odometer)
        if not self.ledger:
            return _nothing
        answers = [listener(op, tensor.numel(), tensor.dtype, self.size) for listener in self.ledger]

        def end() -> None:
            for answer in filter(None, answers):
                answer()

        return end


def _nothing() -> None:
    """Do nothing; end a collective to which nobody listens."""


# Collectives of this package in this process, whatever they belong to; reading it counts too.
_odometer = itertools.count()


def require_group(caller: str) -> None:
    """Raise UsageError, which names ``caller``, where there is no process group."""
    if not dist.is_initialized():
        raise UsageError(f"{caller} needs a process group; call deepspeed.initialize() or init_distributed() first.")


def noted() -> int:
    """Return a number that grows by one per call, and by more if this package has issued a collective in between."""
    return next(_odometer)


def issued() -> int:
    """Return a number that grows by one per call, and by more if this process has communicated in between. Counted
    are the collectives of this package, and those of anybody on a process group; where a group does not count them, it
    counts as busy. (Private torch names: ``_world.pg_map``, ``_get_sequence_number_for_group``.)
    """
    groups = dist.distributed_c10d._world.pg_map
    try:
        return next(_odometer) + sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]
    except RuntimeError:
        return next(_odometer)


def fresh(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised flat buffer; on the host it is backed by huge pages where the system offers them."""
    buffer = torch.empty(numel, dtype=dtype, device=device)
    if device.type == "cpu":
        hostmem.prefer_huge_pages(buffer.data_ptr(), buffer.nbytes)
    return buffer


_KNOWN = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View ``tensor`` as bytes if a backend, which only moves it, may not know its dtype (8-bit floats, ...)."""
    return tensor if tensor.dtype in _KNOWN else tensor.view(-1).view(torch.uint8)


class Collective(Transfer):
    """Collective in flight over ``buffers``, the largest first; ``wait`` calls each of ``then`` when it has arrived."""

    def __init__(self, works: list[Any], *buffers: torch.Tensor, then: tuple[Callable[[], None], ...] = ()) -> None:
        self.nbytes = buffers[0].nbytes if buffers else 0
        self._works, self._buffers, self._then = works, buffers, then

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        then, self._then = self._then, ()
        for call in then:
            call()
        self._buffers = ()

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    is_completed = done  # the name in torch, for what ``deepspeed.comm`` hands out


def _exchange(
    send: Callable[[int], torch.Tensor], receive: Callable[[int], torch.Tensor], group: AxisGroup
) -> list[Any]:
    """Post one receive from and one send to every other member, in a rotated order that avoids hot spots."""
    works: list[Any] = []
    for k in range(1, group.size):
        source, target = (group.index - k) % group.size, (group.index + k) % group.size
        works.append(dist.irecv(receive(source), group=group.pg, group_src=source))
        works.append(dist.isend(send(target), group=group.pg, group_dst=target))
    return works


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: AxisGroup) -> Transfer:
    """Fill ``full`` (numel = size * shard.numel()) with every member's ``shard``, in member order. ``shard`` may be
    this rank's slice of ``full`` itself. Asynchronous on every backend.
    """
    end = group.note("all_gather", full)
    if full.dtype not in _KNOWN:
        full, shard = as_bytes(full), as_bytes(shard)
    piece = shard.numel()
    local = full[group.index * piece : (group.index + 1) * piece]
    if group.size == 1 or group.backend == "gloo":
        if local.data_ptr() != shard.data_ptr():
            local.copy_(shard)  # first: where it fails nothing is on its way into memory that will be freed
        works = _exchange(lambda _: shard, lambda r: full[r * piece : (r + 1) * piece], group)
        return Collective(works, full, shard, then=(end,))
    return Collective([gather_flat(full, shard, group=group.pg, async_op=True)], full, shard, then=(end,))


def reduce_scatter(full: torch.Tensor, out: torch.Tensor, group: AxisGroup, *, accumulate: bool) -> Collective:
    """Sum ``full`` over the members and put (or, with ``accumulate``, add) this rank's piece into ``out``. ``out`` has
    numel full/size and any floating dtype: on gloo the members' pieces are added one after the other, in member order,
    in the dtype of ``out``. ``full`` must stay untouched until ``wait``.
    """
    piece = full.numel() // group.size
    local = full[group.index * piece : (group.index + 1) * piece]
    if group.size == 1 or group.backend == "gloo":
        # The first two pieces may change places in a sum: one of them comes straight to where that will be.
        straight = int(group.index == 0) if group.size > 1 and not accumulate and out.dtype == full.dtype else None
        peers = [r for r in range(group.size) if r not in (group.index, straight)]
        inbox = {r: fresh(piece, full.dtype, full.device) for r in peers} | {group.index: local}
        end = group.note("reduce_scatter", full)
        works = _exchange(lambda r: full[r * piece : (r + 1) * piece], lambda r: inbox.get(r, out), group)

        def finish() -> None:
            for count, position in enumerate(sorted(inbox)):
                _store(out, inbox[position], accumulate or straight is not None or count > 0)

        return Collective(works, full, then=(end, finish))
    same = out.dtype == full.dtype and not accumulate
    result = out if same else torch.empty_like(local)
    end = group.note("reduce_scatter", full)
    work = scatter_flat(result, full, group=group.pg, async_op=True)
    return Collective([work], full, result, then=(end,) if same else (end, lambda: _store(out, result, accumulate)))


_ADD_NUMEL = 1 << 18  # the fp32 copy that a mixed-dtype addition makes stays in the cache


def _store(out: torch.Tensor, value: torch.Tensor, accumulate: bool) -> None:  # noqa: FBT001 - private
    if not accumulate:
        out.copy_(value)
    elif out.dtype == value.dtype or out.device.type != "cpu":
        out.add_(value)
    else:
        for part, addend in zip(out.split(_ADD_NUMEL), value.split(_ADD_NUMEL), strict=True):
            part.add_(addend)


def all_reduce(full: torch.Tensor, out: torch.Tensor, group: AxisGroup, *, accumulate: bool) -> Collective:
    """Sum ``full`` over the members into (or onto) ``out`` of the same numel; ``full`` is overwritten."""
    end = group.note("all_reduce", full)
    works = [dist.all_reduce(full, group=group.pg, async_op=True)] if group.size > 1 else []
    return Collective(works, full, then=(end, lambda: _store(out, full, accumulate)))


def sum_in_place(values: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Sum ``values`` over the members in place, wait, and return them: norms, flags, sums of cut layers."""
    if group.size > 1:
        end = group.note("all_reduce", values)
        dist.all_reduce(values, group=group.pg)
        end()
    return values


def broadcast(tensor: torch.Tensor, group: AxisGroup, *, source: int = 0) -> None:
    """Overwrite ``tensor`` on every member with member ``source``'s values."""
    if group.size > 1:
        start_broadcast(tensor, group, source=source).wait()


def start_broadcast(tensor: torch.Tensor, group: AxisGroup, *, source: int) -> Collective:
    """Start a broadcast of member ``source``'s values into ``tensor`` on every member, without waiting for it."""
    end = group.note("broadcast", tensor)
    work = dist.broadcast(as_bytes(tensor), group_src=source, group=group.pg, async_op=True)
    return Collective([work], tensor, then=(end,))


def merge(largest: list[int], union: list[int], group: AxisGroup) -> tuple[list[int], list[int]]:
    """Reduce ``largest`` by maximum and ``union`` by bitwise OR over the members, element by element, and return both;
    int64, the same lengths everywhere. ceil(log2(size)) exchanges over doubling distances (the dissemination of
    Hensgen, Finkel and Manber 1988): either may meet the same number twice, also when size is no power of two.
    """
    count, local = len(largest), torch.tensor([*largest, *union], dtype=torch.int64, device="cpu")
    for distance in (1 << k for k in range(0 if group.alike else (group.size - 1).bit_length())):
        received = torch.empty_like(local)
        source, target = (group.index - distance) % group.size, (group.index + distance) % group.size
        end = group.note("merge", local)
        works: list[Any] = [dist.irecv(received, group=group.pg, group_src=source)]
        works.append(dist.isend(local, group=group.pg, group_dst=target))
        Collective(works, then=(end,)).wait()
        local = torch.cat([torch.maximum(local[:count], received[:count]), local[count:] | received[count:]])
    numbers = local.tolist()
    return numbers[:count], numbers[count:]


def gather_objects(value: object, group: AxisGroup) -> list[Any]:
    """All-gather one picklable object per member (set-up paths only)."""
    if group.size == 1 or group.alike:
        return [value] * group.size
    gathered: list[Any] = [None] * group.size
    dist.all_gather_object(gathered, value, group=group.pg)
    return gathered


def check_alike(
    what: str, entries: list[str], group: AxisGroup, advice: str, *, title: Callable[[int], str] = "rank {}".format
) -> None:
    """Raise DivergenceError, which names the first entry that differs, unless all ranks have equal ``entries``.
    Collective.
    """
    if alike(entries, group):
        return
    first, *others = gather_objects(entries, group)
    rank, theirs = next(pair for pair in zip(group.ranks[1:], others, strict=True) if pair[1] != first)
    pairs = itertools.zip_longest(first, theirs, fillvalue="nothing more")
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise DivergenceError(f"ranks {what}: {title(group.ranks[0])} has {one}, {title(rank)} has {other}. {advice}")


def alike(value: object, group: AxisGroup) -> bool:
    """Return whether all ranks have the same ``value``, by its representation. Collective."""
    return len(set(gather_objects(hashlib.sha256(repr(value).encode()).hexdigest(), group))) == 1


def describe(fault: BaseException) -> str:
    """Format an error for the other ranks: sentences of this package as they are, other errors with their class."""
    return str(fault) if isinstance(fault, DeepSpeedError) else f"{type(fault).__name__}: {fault}"


def failures(fault: BaseException | None, group: AxisGroup, *, depth: Callable[[], int] = lambda: 0) -> dict[int, str]:
    """Return rank -> error text of the members with a ``fault``. Collective: if one rank raised alone, the others would
    wait for it. ``depth``: how deep this rank is in nested calls, of which outer ones repeat theirs until all are out.
    """
    text = None if fault is None else describe(fault)
    while True:
        deep = depth()
        depths, texts = zip(*gather_objects((deep, text), group), strict=True)
        if deep == max(depths):
            return {rank: text for rank, text in zip(group.ranks, texts, strict=True) if text is not None}


def is_of_backend(error: BaseException) -> bool:
    """Return whether ``error`` comes from a collective, whose other ranks are gone or too late."""
    text = str(error) if type(error) is RuntimeError else ""
    return isinstance(error, dist.DistError) or "/gloo/" in text or "pair closure" in text


def break_off(group: AxisGroup) -> set[int]:
    """End all waits for this rank over ``group``, and this rank's for others: for good, from any thread. A wait on gloo
    that runs out of time closes its connections. Of nccl the communicator is aborted: the kernel in which this rank's
    device waits ends, and other machines see the connections go. Return the ranks whose connections were gone already.
    """
    gone = set()
    if group.backend != "gloo" and group.pg is not None and group.size > 1:
        with contextlib.suppress(RuntimeError):  # not every backend can
            group.pg.abort()
    peers = [peer for peer in range(group.size) if peer != group.index and group.backend == "gloo"]
    for peer in peers:  # one that has ended leaves the others' connections open
        try:
            work = dist.irecv(torch.empty(1, device="cpu"), group=group.pg, group_src=peer, tag=_NOBODYS_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))
        except (RuntimeError, ValueError) as error:  # ended already, or now
            gone |= set() if "Timed out" in str(error) else {group.ranks[peer]}
    return gone


_NOBODYS_TAG = 1 << 20


class SideTransfer(Transfer):
    """Transfer on a side stream; ``wait`` makes the compute stream wait. ``captured`` lives as long as the transfer."""

    def __init__(self, inner: Transfer, event: Any, captured: Any) -> None:
        self.nbytes, self._event, self._captured = inner.nbytes, event, captured

    def wait(self) -> None:
        if self._event is not None:
            get_accelerator().current_stream().wait_event(self._event)
        self._event = None

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())


class SideStream:
    """Stream of ``device`` for transfers beside the compute stream; on the CPU there is none.

    Buffers are allocated and freed on the compute stream only; a side stream first waits for the compute stream, and
    the compute stream waits for the event before anyone touches the result, so the caching allocator never hands out
    memory that a side stream still uses.
    """

    def __init__(self, device: torch.device) -> None:
        # The small kernels around a collective would otherwise queue behind the computation that it hides behind.
        self._stream = get_accelerator().urgent_stream() if device.type not in ("cpu", "meta") else None

    def run(self, start: Callable[[], Transfer]) -> Transfer:
        """Call ``start`` on this stream; return its transfer, whose ``wait`` orders the compute stream behind it."""
        if self._stream is None:
            return start()
        accelerator = get_accelerator()
        self._stream.wait_stream(accelerator.current_stream())
        try:
            with accelerator.stream(self._stream):
                transfer = start()
                # Waiting for nccl here only orders this stream: the host goes on. The buffers must outlive the event.
                transfer.wait()
                event = accelerator.Event()
                event.record(self._stream)
        except BaseException:  # what has begun must end before the memory is given back
            accelerator.current_stream().wait_stream(self._stream)
            raise
        return SideTransfer(transfer, event, start)
