"""The exchange: what is planned once, moved as often as the source has new weights.

Every rank goes through the same rounds. In a round it has one message at most for, and from, every other rank, packed
from, and unpacked to, where the values rest; the next round is on its way meanwhile. The ranks agree before the first
and after the last round: what one meets, all raise.
"""

import functools
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm import collectives, point_to_point
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.config.model.values import byte_count
from deepspeed.errors import UsageError
from deepspeed.reallocate.moves import PIECE_BYTES, RegionTransfer, in_rounds, plan_reallocation
from deepspeed.reallocate.resting import RestingWeights
from deepspeed.reallocate.sides import Inventory, Side, follow, match
from deepspeed.zero.unit import Unit

_LEAST_BYTES = 16  # of a message: any element fits


class _Message(NamedTuple):
    """Message to, or from, one peer: bytes [lo, hi) of the round's buffer, its regions packed one after the other."""

    peer: int
    lo: int
    hi: int
    parts: list[tuple[RegionTransfer, int, int]]  # each with its bytes [lo, hi)


class ParameterReallocation:
    """Move the weights of ``source`` into ``target``, for any layouts of both sides, on whichever ranks they are.

    ``source``, ``target``: an engine of any configuration, a module, or None on ranks that have no part in that side.
    A rank that passes a module has all of it, or its local part of each DTensor. ``group``: the ranks that take part
    (None: the job). Moved are parameters and persistent buffers by their names in ``state_dict()``, tied ones once, in
    the dtype of the parameters. ``convert_dtype``: allow different floating dtypes; bytes travel in the narrower one.
    ``strict``: both sides must have the same names; otherwise only common names are moved. ``max_bytes``: limit for
    the message buffers of a rank (a number of bytes, or "512MB").

    The constructor is collective over the group, plans the exchange (``plan``, the same on all ranks), moves nothing.
    Raises UsageError on all ranks where the sides do not fit, or where not all ranks of a side pass that side;
    ValueError for ``max_bytes``. The objects are not kept alive.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        *,
        group: Any = None,
        max_bytes: int | str = "512MB",
        convert_dtype: bool = False,
        strict: bool = True,
    ) -> None:
        try:
            self._job = plain_mesh(get_accelerator().communication_backend_name(), group=group).job
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(
                "ParameterReallocation: this rank is not in the group; leave the call to those in it"
            ) from error
        self._rank = self._job.ranks[self._job.index]
        sides: list[Inventory | None] = [None, None]
        fault: Exception | None = None
        most = 0
        try:
            most = _round_bytes(max_bytes)
            self._sides = Side(source, "source", self._rank), Side(target, "target", self._rank)
            sides = [side.inventory() for side in self._sides]
            one, two = ({id(t): n for n, t in side.open()[0].items()} for side in self._sides)
            if shared := [n for key, n in one.items() if key in two]:
                raise UsageError(f"{shared[0]} is one object in source and target; make the target a model of its own")
        except Exception as error:  # whatever it is, the others wait for the answer
            fault = error
        self._agree(fault, "cannot be planned")
        settings = (most, convert_dtype, strict)
        gathered = collectives.gather_objects((sides, settings, socket.gethostname()), self._job)
        for rank, (_, theirs, _) in zip(self._job.ranks, gathered, strict=True):
            if theirs != gathered[0][1]:
                raise UsageError(f"rank {rank} passes other options than rank {self._job.ranks[0]}; make them equal")
        self._ours = sides
        sources, targets = (
            {rank: ours[i] for rank, (ours, _, _) in zip(self._job.ranks, gathered, strict=True) if ours[i] is not None}
            for i in (0, 1)
        )
        self._match = match(sources, targets, convert=convert_dtype, strict=strict)
        shapes, resting, needed = self._match.shapes, self._match.resting, self._match.needed
        nodes = {rank: node for rank, (_, _, node) in zip(self._job.ranks, gathered, strict=True)}
        self.plan = plan_reallocation(shapes, resting, needed, nodes=nodes, piece_bytes=min(PIECE_BYTES, most))
        rounds = in_rounds(self.plan, shapes, most)
        self._sends = [self._messages(one, sends=True) for one in rounds]
        self._takes = [self._messages(one, sends=False) for one in rounds]
        self._copies = [t for t in self.plan.copies if t.target == self._rank]

    def _messages(self, transfers: Iterable[tuple[RegionTransfer, int]], *, sends: bool) -> list[_Message]:
        """Return this rank's messages of one round, by peer; each packs the widest dtype first, to align all parts."""
        by_peer: dict[int, list[tuple[RegionTransfer, int]]] = {}
        for transfer, nbytes in transfers:
            ours, peer = (transfer.source, transfer.target) if sends else (transfer.target, transfer.source)
            if ours == self._rank:
                by_peer.setdefault(peer, []).append((transfer, nbytes))
        made, at = list[_Message](), 0
        for peer, peer_transfers in sorted(by_peer.items()):
            begin, parts = at, []
            for transfer, nbytes in sorted(peer_transfers, key=lambda one: -self._match.shapes[one[0].name].width):
                parts.append((transfer, at, at + nbytes))
                at += nbytes
            made.append(_Message(self._job.ranks.index(peer), begin, at, parts))
            at = -(-at // _LEAST_BYTES) * _LEAST_BYTES
        return made

    def run(self) -> None:
        """Copy the source's weights, as of its last step, into the target. Collective over the group.

        Pending work of an engine is awaited first. fp32 master weights of a training target take the new values, except
        those that already round to them; its optimizer state stays. Raises UsageError on all ranks, with nothing moved:
        inside a forward or backward, between both of a target, while a target is gathered, and when a side has changed
        since planning. Raises an error of any rank during the exchange, too; the target then mixes two steps.
        """
        fault: Exception | None = None
        ends, buffers, written = list[RestingWeights](), list[torch.Tensor](), dict[Unit, list[torch.Tensor]]()
        try:
            for side, planned in zip(self._sides, self._ours, strict=True):
                tensors, aliases = side.open(moving=True)
                ends.append(RestingWeights(tensors, write=side.role == "target"))
                if planned is not None and (ends[-1].entries, aliases) != planned[:2]:
                    raise UsageError(f"the {side.role} has other tensors than when this was planned; plan another one")
            for name, tensor in tensors.items():  # of the target, which came last
                if name in self._match.stored and hasattr(tensor, "_ds_unit"):
                    written.setdefault(tensor._ds_unit, []).append(tensor)
            device = get_accelerator().torch_device()
            for rounds in (self._sends, self._takes) * 2:
                size = max((message.hi for one in rounds for message in one), default=0)
                buffers.append(collectives.fresh(size, torch.uint8, device))
        except Exception as error:
            fault = error
        self._agree(fault, "nothing was moved")
        faults: list[Exception] = []
        with torch.no_grad():
            self._exchange(ends, buffers, faults)
            for end in ends:
                _try(end.close, faults)
            for unit, params in written.items():
                _try(functools.partial(follow, unit, params), faults)
        self._agree(faults[0] if faults else None, "the target may hold parts of two steps; run() again")

    def _exchange(
        self, ends: Sequence[RestingWeights], buffers: Sequence[torch.Tensor], faults: list[Exception]
    ) -> None:
        """Run all rounds; collect errors in ``faults``, as the other ranks wait for this rank's messages anyway."""
        (source, target), stored, wire = ends, self._match.stored, self._match.wire

        def put(transfer: RegionTransfer, values: torch.Tensor) -> None:
            target.region(transfer.name, transfer.region).copy_(values)

        def copy(transfer: RegionTransfer) -> None:
            put(transfer, source.region(stored[transfer.name], transfer.region))

        def pack(buffer: torch.Tensor, transfer: RegionTransfer) -> None:
            out = buffer.view(wire[transfer.name]).view(transfer.region.shape)
            out.copy_(source.region(stored[transfer.name], transfer.region))

        def unpack(buffer: torch.Tensor, transfer: RegionTransfer) -> None:
            put(transfer, buffer.view(wire[transfer.name]).view(transfer.region.shape))

        def start(number: int) -> Callable[[], None]:
            outbox, inbox = buffers[2 * (number % 2) :][:2]
            sends, takes = self._sends[number], self._takes[number]
            for transfer, lo, hi in (part for message in sends for part in message.parts):
                _try(functools.partial(pack, outbox[lo:hi], transfer), faults)
            leaving = [(outbox[message.lo : message.hi], message.peer) for message in sends]
            coming = [(inbox[message.lo : message.hi], message.peer) for message in takes]
            work = point_to_point.exchange(leaving, coming, self._job)

            def finish() -> None:
                work.wait()
                for transfer, lo, hi in (part for message in takes for part in message.parts):
                    _try(functools.partial(unpack, inbox[lo:hi], transfer), faults)

            return finish

        def copies() -> None:
            for transfer in self._copies:
                _try(functools.partial(copy, transfer), faults)

        before: Callable[[], None] = copies
        for number in range(len(self._sends)):
            after = start(number)
            before()
            before = after
        before()

    def _agree(self, fault: Exception | None, outcome: str) -> None:
        """Raise an error of any rank on all ranks. Collective."""
        for rank, text in collectives.failures(fault, self._job).items():
            if fault is not None:
                raise fault
            raise UsageError(f"parameter reallocation, rank {rank}: {text} ({outcome})")


def _round_bytes(max_bytes: int | str) -> int:
    """Return the most bytes of one message buffer: a quarter of the limit, as two rounds are in flight, each way."""
    try:
        return max(_LEAST_BYTES, byte_count(max_bytes) // 4)
    except ValueError as error:
        raise ValueError(f"ParameterReallocation: max_bytes {error}") from None


def _try(work: Callable[[], None], faults: list[Exception]) -> None:
    try:
        work()
    except Exception as error:  # whatever it is, the others must not wait for ever
        faults.append(error)
