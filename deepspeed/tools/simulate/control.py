"""The messages of the ranks' programs to each other, in which they agree on one order of collectives, and their time.

All other ranks are taken to say what the simulated one says. Of a pipeline one rank of each stage is simulated, in a
process of its own (``column``): each speaks for the ranks of its stage, and how long they wait for each other is found
when their events are put together.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.comm import collectives, point_to_point
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh import groups
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.comm.mesh.topology import Axis
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine import initialize as start
from deepspeed.moe import exchange
from deepspeed.moe.layer import Experts
from deepspeed.pipe.engine import PipelineEngine
from deepspeed.sequence import wire
from deepspeed.sequence.batch import taken
from deepspeed.sequence.layout import Layout, in_turn
from deepspeed.sequence.ring import RingMask, attend_around, inner_ranks
from deepspeed.tensor import loss
from deepspeed.tensor.apply import FirstBatch
from deepspeed.tensor.differentiable import sum_parts
from deepspeed.tools.simulate.events import Talk
from deepspeed.tools.simulate.models import Attention, Decoder, causal_attention
from deepspeed.tools.simulate.record import Recorder
from deepspeed.zero.regions import bounds, widths
from deepspeed.zero.sync import agreement

_PICOSECONDS = 1e12
_HOST = "host"


class Control:
    """Send one rank's messages. Since ``restart``: how many, and ``seconds`` of the program, waits included."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._timeline = recorder, recorder.timeline
        self.restart()

    def restart(self) -> None:
        """Restart the counts from here on."""
        self.messages = 0
        self.seconds = 0.0

    def merge(self, largest: list[int], union: list[int], group: AxisGroup) -> tuple[list[int], list[int]]:
        """Merge in place of ``collectives.merge``. Messages that reach others carry the simulated time along: a rank
        that has waited goes on when the last rank has sent its own.
        """
        seconds, now = self._timeline.machine.agreement(group.size), self._timeline.now
        (*largest, latest), union = collectives.merge([*largest, int(now * _PICOSECONDS)], union, group)
        self.take(seconds + max(0.0, latest / _PICOSECONDS - now))
        return largest, union

    def gather(self, object_list: list[Any], value: Any, group: Any = None) -> None:
        """Gather in place of ``dist.all_gather_object``: all others say the same."""
        object_list[:] = [value] * len(object_list)
        self.take(self._timeline.machine.gather(len(object_list)))

    def take(self, seconds: float, ranks: Sequence[int] = (), channel: str = "") -> None:
        """Spend ``seconds`` on a message; with a ``channel``, once all ``ranks`` have come to it."""
        self._recorder.emit(Talk(seconds, tuple(ranks), channel))
        self.messages, self.seconds = self.messages + 1, self.seconds + seconds


class _Column:
    """Send messages between pipeline stages, of each of which one rank is simulated, ``ranks`` by stage."""

    def __init__(self, recorder: Recorder, control: Control, ranks: Sequence[int]) -> None:
        self._machine, self._control, self._ranks = recorder.timeline.machine, control, tuple(ranks)
        self._make, self._gather = groups._new_group, dist.all_gather_object
        self._send, self._receive = point_to_point.send_object, point_to_point.receive_object
        axis = Axis("pp", len(self._ranks), self._ranks.index(dist.get_rank()), self._ranks)
        self._peers = self._make("simulated", axis, "gloo")

    def new_group(self, name: str, axis: Any, backend: str) -> AxisGroup:
        """Make a group in place of ``groups._new_group``: the group on the host is one whose members differ."""
        made = self._make(name, axis, backend)
        return replace(made, backend=_HOST) if name.endswith("/host") else made

    def _place(self, rank: int) -> int:
        return rank * len(self._ranks) // dist.get_world_size()

    def gather(self, object_list: list[Any], value: Any, group: Any = None) -> None:
        """Gather in place of ``dist.all_gather_object``: each rank says the same as its stage's simulated rank."""
        ranks = dist.get_process_group_ranks(group)
        if not set(ranks).issuperset(self._ranks):  # of one stage
            self._control.gather(object_list, value)
            return
        heard: list[Any] = [None] * len(self._ranks)
        with _disable_current_modes():
            self._gather(heard, value, group=self._peers.pg)
        object_list[:] = [heard[self._place(rank)] for rank in ranks]
        self._control.take(self._machine.gather(len(ranks)), ranks, "programs")

    def total(self, numbers: list[Any], _: Any) -> list[Any]:
        """Sum each number over all ranks, in place of ``PipelineEngine._sum``, by gloo's ring."""
        gathered: list[Any] = [None] * dist.get_world_size()
        self.gather(gathered, numbers)
        return [sum(column) for column in zip(*gathered, strict=True)]

    def send_object(self, value: object, peer: int, group: AxisGroup) -> Any:
        """Send in place of ``point_to_point.send_object``."""
        with _disable_current_modes():
            return self._send(value, self._place(group.ranks[peer]), self._peers)

    def receive_object(self, peer: int, group: AxisGroup) -> Any:
        """Receive in place of ``point_to_point.receive_object``."""
        with _disable_current_modes():
            return self._receive(self._place(group.ranks[peer]), self._peers)


class _Routing:
    """Stand for the tokens' choice of experts, which nobody knows: all experts are chosen equally often, but those of
    this rank ``skew`` times as often.
    """

    def __init__(self, recorder: Recorder, skew: float) -> None:
        self._recorder, self._skew = recorder, skew
        self._plan, self._apply = exchange.plan_routes, Experts.forward

    def plan_routes(self, index: torch.Tensor, group: AxisGroup, experts: int, **more: Any) -> exchange.Routes:
        """Plan in place of ``exchange.plan_routes``: the counts that it reads are those of the assumed choice."""
        (tokens, choices), ranks = index.shape, group.size // more.get("etp", 1)
        total = ranks * experts
        share = 1 - math.comb(total - experts, choices) / math.comb(total, choices)
        sent = [round(tokens * share), round(tokens * choices / ranks)]
        most = [tokens, tokens * min(choices, experts)]
        received = [min(round(self._skew * count), limit) for count, limit in zip(sent, most, strict=True)]
        self._recorder.routing = f"the experts of a rank get {self._skew:g} times an even share of the tokens"
        self._recorder.numbers = [[[*counts, 0]] * group.size for counts in (sent, received)]
        return self._plan(index, group, experts, **more)

    def apply(self, module: Experts, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Apply in place of ``Experts.forward``, which reads how many tokens each expert has."""
        number = len(module.deepspeed_experts._modules)
        self._recorder.numbers = widths(bounds(len(hidden), number)) if number > 1 else None
        return self._apply(module, hidden, index, weights)


def _even_edges(logits: torch.Tensor, group: AxisGroup) -> list[int]:
    """Replace ``loss._edges``, which reads how many words all ranks have: the program waits for a number."""
    int(collectives.sum_in_place(torch.zeros(group.size, device=logits.device, dtype=torch.float64), group).sum())
    return bounds(logits.shape[-1] * group.size, group.size)


def _wire_sequences(
    model: nn.Module, cfg: DeepSpeedConfig, mesh: Mesh, *more: Any, wired: Callable[..., Mesh] = wire.wire_sequences
) -> Mesh:
    """Wire in place of ``wire.wire_sequences``: it knows models of Transformers, and ``Decoder`` is none."""
    if mesh.sp.size == 1 or not isinstance(model, Decoder):
        return wired(model, cfg, mesh, *more)
    ways = inner_ranks(mesh.sp.size, model.shape.heads // mesh.tp.size, cfg.sequence.attention)
    mesh, ring = wire._with_ring(mesh, ways)
    group, plain, current = mesh.sp, model.forward, list[Layout]()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: int = 0) -> torch.Tensor:
        if ring is None:
            return current[-1].attend(q, k, v, causal_attention)
        return attend_around(current[-1], q, k, v, mask=RingMask(), scale=None)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        _agreed([*tokens.shape, tokens.sum()], None, group, tokens.device)
        lengths = widths(bounds(tokens.shape[1], group.size))
        current[:] = [_layout_of(tokens, group, lengths, ring, from_ends=True)]
        return sum_parts(plain(taken(tokens, current[-1].tokens_of(group.index))) / group.size, group)

    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        attention.attend = attend  # type: ignore[assignment]
    model.forward = forward  # type: ignore[method-assign]
    return mesh


def _agreed(
    numbers: Sequence[int | torch.Tensor], _: Any, group: AxisGroup, device: torch.device
) -> tuple[torch.Tensor, list[list[int]]]:
    """Agree in place of ``wire.agreed``: all ranks say the same. The program waits for the answers."""
    in_turn([*numbers, 0], group, device).sum().item()
    known = [[number if isinstance(number, int) else 0 for number in numbers]] * group.size
    return torch.tensor(known, device="cpu"), known


def _layout_of(codes: torch.Tensor, group: AxisGroup, lengths: Sequence[int], *more: Any, **options: Any) -> Layout:
    """Return a layout in place of ``wire.layout_of``, which waits for where documents begin: each row is one."""
    rows, tokens = codes.shape
    codes.sum().item()
    documents = tuple((row * tokens, tokens) for row in range(rows))
    return Layout(group, rows, tuple(lengths), documents, codes.device, *more, **options)


def _post(posted: Sequence[dist.P2POp]) -> list[Any]:
    """Post in place of ``dist.batch_isend_irecv``, which asks for the device's own backend: one after the other."""
    sides = {dist.isend: "group_dst", dist.irecv: "group_src"}
    return [one.op(one.tensor, group=one.group, **{sides[one.op]: one.group_peer}) for one in posted]


@contextlib.contextmanager
def talking(recorder: Recorder, *, column: Sequence[int] = (), skew: float = 1.0) -> Iterator[Control]:
    """Make messages take their time inside. ``column``: they are sent to these ranks, one of each pipeline stage.
    ``skew``: how many tokens this rank's experts get, in even shares.
    """
    control, routing = Control(recorder), _Routing(recorder, skew)
    count = dist.ProcessGroup._get_sequence_number_for_group  # type: ignore[attr-defined]

    def collectives_of(group: Any) -> int:
        """Count for torch's group without peers, whose zero would look like somebody else's collectives."""
        return recorder.collectives if "fake" in dist.get_backend(group) else count(group)

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (agreement, "merge", control.merge),
        (dist.ProcessGroup, "_get_sequence_number_for_group", collectives_of),
        (FirstBatch, "__call__", lambda *_: None),  # there are no values to be compared
        (loss, "_edges", _even_edges),
        (exchange, "plan_routes", routing.plan_routes),
        (Experts, "forward", lambda *given: routing.apply(*given)),
        (start, "wire_sequences", _wire_sequences),
        (wire, "agreed", _agreed),
        (wire, "layout_of", _layout_of),
        (dist, "batch_isend_irecv", _post),
    ]
    if column:
        among = _Column(recorder, control, column)
        places += [(groups, "_new_group", among.new_group), (dist, "all_gather_object", among.gather)]
        places += [(PipelineEngine, "_sum", among.total)]
        places += [(point_to_point, name, getattr(among, name)) for name in ("send_object", "receive_object")]
    else:
        places += [(dist, "all_gather_object", control.gather)]
    with contextlib.ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(patch.object(owner, name, value))
        yield control
