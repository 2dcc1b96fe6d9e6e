"""What travels between pipeline ranks: activations forwards, their gradients backwards.

All ranks know all programs, so both ends of a link know its messages and their order. What the receiver must know
beside it is the *shape* of an activation: shapes, dtypes and which parts need a gradient. The first micro-batch of a
kind (``keys``: the shapes of its inputs) sends it ahead as a small object on the host; later ones, unless shapes are
dynamic, are received without a word, and early, so that they travel while the ranks compute. A gradient has the shape
of its activation. A rank that has failed goes on sending (lost messages), so that nobody waits for it: see ``run.py``.

Messages are sent one by one, for which nccl makes a communicator for each pair of ranks and direction, and that is
wanted: in a communicator of all stages, which batched ones share, a receive that is posted early holds up what is sent
to the next stage, and 1F1B hangs from 4 stages on (``tests/pure/test_pipe_links.py``).
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed.comm import point_to_point
from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import PipelineError, UsageError
from deepspeed.monitor.events import Events
from deepspeed.pipe.orders import Message, Program
from deepspeed.tier.transfer import Several, Transfer


class Part(NamedTuple):
    """Describe one tensor of an activation; ``grad``: it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


class Signature(NamedTuple):
    """Shape of an activation. ``parts``: None where a tuple has None; ``single``: a tensor, not a tuple of one."""

    parts: tuple[Part | None, ...]
    single: bool


class BrokenLinkError(PipelineError):
    """Raised when a neighbour does not answer any more: its process has ended."""


class _Incoming(NamedTuple):
    transfers: list[Transfer]
    tensors: list[torch.Tensor | None]
    shape: Signature


def unpack(value: Any) -> tuple[Signature, list[torch.Tensor | None]]:
    """Return the signature of an activation, and its tensors. Raise UsageError for a value that cannot travel."""
    single = isinstance(value, torch.Tensor)
    items = [value] if single else list(value) if isinstance(value, (tuple, list)) else None
    odd = [type(i) for i in items if not (i is None or isinstance(i, torch.Tensor))] if items is not None else []
    if items is None or odd:
        kind = f"a {type(value).__name__}" if items is None else f"a tuple with a {odd[0].__name__}"
        raise UsageError(
            f"returned {kind}, which cannot go to the next pipeline stage; a tensor can, or a tuple of tensors and None"
        )
    parts = (None if t is None else Part(tuple(t.shape), t.dtype, t.requires_grad) for t in items)
    return Signature(tuple(parts), single), items


class Links:
    """Messages of one pipeline rank, over the groups ``rising`` (to higher ranks), ``falling`` and ``host``."""

    def __init__(
        self, rising: AxisGroup, falling: AxisGroup, host: AxisGroup, device: torch.device, name: Callable[[int], str]
    ) -> None:
        """Keep the groups; ``name(rank)`` returns the name of a pipeline rank for people."""
        self._rising, self._falling, self._host, self._device, self._name = rising, falling, host, device, name
        self.rank = rising.index
        self.dynamic = False
        self.events = Events()
        self._known: dict[tuple[int, Hashable], Signature] = {}
        self.begin(None, ())

    def begin(self, order: Program | None, keys: Sequence[Hashable]) -> None:
        """Begin a batch whose micro-batches are of the kinds ``keys``."""
        self._order, self._keys = order, keys
        self._shapes: dict[tuple[int, int], Signature | None] = {}
        self._outgoing: dict[Message, list[Transfer]] = {}
        self._places: dict[int, dict[Message, int]] = {}
        self._sent: set[Message] = set()
        self._taken: set[Message] = set()
        self._incoming: dict[Message, _Incoming | None] = {}
        peers = [r for r in range(order.ranks if order is not None else 0) if r != self.rank]
        self._queues = {r: deque(order.messages(r, self.rank)) for r in peers} if order is not None else {}

    def forget(self) -> None:
        """Forget all known shapes after a failure: the ends of a link may know different ones."""
        self._known.clear()
        self.begin(None, ())

    def _group(self, source: int, target: int) -> AxisGroup:
        return self._rising if source < target else self._falling

    def _on_host(self, rank: int) -> int:
        return self._host.ranks.index(self._rising.ranks[rank])

    def _trouble(self, verb: str, message: Message, peer: int, error: Exception) -> BrokenLinkError:
        kind = "activations" if message.op == "F" else "gradients"
        return BrokenLinkError(
            f"{self._name(self.rank)} {verb} {kind} of chunk {message.chunk}, micro-batch {message.micro}, and "
            f"{self._name(peer)} does not answer: its process has ended or is out of reach "
            f"({str(error).partition(chr(10))[0]})"
        )

    def send(self, message: Message, target: int, shape: Signature, tensors: Sequence[torch.Tensor | None]) -> None:
        """Send an activation, of ``shape``. Raise UsageError if its kind had another shape before."""
        place = (message.chunk, self._keys[message.micro])
        prior = None if self.dynamic else self._known.get(place)
        if prior is not None and prior != shape:
            raise UsageError(
                f"made {_words(shape)} of micro-batch {message.micro}, but {_words(prior)} of one whose inputs had the "
                "same shapes; build the PipelineModule with dynamic_shape=True"
            )
        self._announce(message, target, shape)
        self.put(message, target, [t for t in tensors if t is not None])

    def send_lost(self, message: Message, target: int) -> None:
        """Send zeros, or no shape, in place of a message that was not made; nothing, where it was sent already."""
        if message in self._sent:
            return
        if message.op == "B":
            shape = self._shapes.get((message.chunk - 1, message.micro))
        else:
            shape = None if self.dynamic else self._known.get((message.chunk, self._keys[message.micro]))
            self._announce(message, target, shape)
        parts = [p for p in shape.parts if p is not None and (p.grad or message.op == "F")] if shape is not None else []
        self.put(message, target, [torch.zeros(p.shape, dtype=p.dtype, device=self._device) for p in parts])

    def _announce(self, message: Message, target: int, shape: Signature | None) -> None:
        place = (message.chunk, self._keys[message.micro])
        self._shapes[message.chunk, message.micro] = shape
        if self.dynamic or place not in self._known:
            peer = self._on_host(target)
            self._outgoing[message] = [point_to_point.send_object(shape, peer, self._host)]
            if shape is not None:
                self._known[place] = shape

    def put(self, message: Message, target: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors whose shapes ``target`` knows: gradients, of the parts of an activation that need one."""
        group = self._group(self.rank, target)
        self._sent.add(message)
        try:
            started = [point_to_point.send(t.detach().contiguous(), target, group) for t in tensors]
        except RuntimeError as error:
            raise self._trouble("sends", message, target, error) from error
        self._outgoing.setdefault(message, []).extend(started)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for message, transfers in self._outgoing.items():
            self._wait(transfers, message, sending=True)
        self._outgoing.clear()

    def _wait(self, transfers: Sequence[Transfer], message: Message, *, sending: bool = False) -> None:
        try:
            if self.events:
                self.events.note_wait(Several(transfers), "messages of the pipeline")
            for transfer in transfers:
                transfer.wait()
        except RuntimeError as error:
            assert self._order is not None
            chunk = message.chunk + (1 if message.op == "F" else -1) * sending
            peer = self._order.homes[chunk]
            raise self._trouble("sends" if sending else "waits for", message, peer, error) from error

    def get_ready(self) -> None:
        """Post the first receive from each rank, so that its message travels while this rank computes."""
        for source, queue in self._queues.items():
            self._post_early(queue, source)

    def _post_early(self, queue: deque[Message], source: int) -> None:
        if queue and self.predicted(queue[0]):
            first = queue.popleft()
            self._incoming[first] = self._post(first, source)

    def receive(self, message: Message, source: int) -> tuple[Signature, list[torch.Tensor | None]] | None:
        """Wait for a message and return it; None for a lost one. Gradients come for the parts that need one."""
        self._taken.add(message)
        queue = self._queues[source]
        while message not in self._incoming:
            first = queue.popleft()
            self._incoming[first] = self._post(first, source)
        self._post_early(queue, source)
        incoming = self._incoming.pop(message)
        if incoming is None:
            return None
        self._wait(incoming.transfers, message)
        self._let_go(message, source)
        return incoming.shape, incoming.tensors

    def _let_go(self, message: Message, source: int) -> None:
        """Release the sends that the maker of ``message`` had to receive before: they have arrived."""
        assert self._order is not None
        if source not in self._places:
            self._places[source] = self._order.places(source)
        places, made = self._places[source], self._places[source][message]
        for sent in list(self._outgoing):
            wanted = Message(sent.op, sent.chunk + (1 if sent.op == "F" else -1), sent.micro)
            if places.get(wanted, made) < made:
                self._wait(self._outgoing.pop(sent), sent, sending=True)

    def skip(self, message: Message, source: int) -> None:
        """Receive and discard a message, unless it was received before."""
        if message not in self._taken:
            self.receive(message, source)

    def predicted(self, message: Message) -> bool:
        """Return whether the shape of ``message`` is known without asking."""
        if message.op == "B":
            return (message.chunk - 1, message.micro) in self._shapes
        return not self.dynamic and (message.chunk, self._keys[message.micro]) in self._known

    def _post(self, message: Message, source: int) -> _Incoming | None:
        shape: Signature | None
        if message.op == "B":
            shape = self._shapes.get((message.chunk - 1, message.micro))
        else:
            place = (message.chunk, self._keys[message.micro])
            shape = None if self.dynamic else self._known.get(place)
            if shape is None:
                try:
                    shape = point_to_point.receive_object(self._on_host(source), self._host)
                except RuntimeError as error:
                    raise self._trouble("waits for", message, source, error) from error
                if shape is not None:
                    self._known[place] = shape
            self._shapes[message.chunk, message.micro] = shape
        if shape is None:
            return None
        wanted = [p if p is not None and (p.grad or message.op == "F") else None for p in shape.parts]
        tensors = [None if p is None else torch.empty(p.shape, dtype=p.dtype, device=self._device) for p in wanted]
        group = self._group(source, self.rank)
        try:
            transfers = [point_to_point.receive(t, source, group) for t in tensors if t is not None]
        except RuntimeError as error:
            raise self._trouble("waits for", message, source, error) from error
        return _Incoming([*transfers], tensors, shape)


def _words(shape: Signature) -> str:
    parts = ["None" if p is None else f"{tuple(p.shape)} {p.dtype}" for p in shape.parts]
    return parts[0] if shape.single else f"({', '.join(parts)})"
