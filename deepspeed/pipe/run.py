"""One batch through the chunks of one rank, action by action.

[Note: failures] A rank that fails in the middle of a batch (the model raises, its data are odd) does not leave: it goes
through the rest of its program without computing, takes what it is sent and sends *lost* messages, so all others come
to their end too and hear of it. What a rank cannot compute from a lost message is lost in turn. Within a batch the
ranks of one pipeline wait for nothing else (parameters are whole on their rank meanwhile), so this ends. Ranks that
share its layers mostly fail alike; one that does not may wait for it inside a layer, so they see to each other first
(``Runtime.lose``). Only where a process has died, its neighbours raise at once, and theirs when these have ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.errors import PipelineError
from deepspeed.monitor.events import ACTION
from deepspeed.pipe.links import BrokenLinkError, Links, Signature, unpack
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.orders import Action, Message, Micro, Program
from deepspeed.pipe.torch_pipelining import split_backward
from deepspeed.tensor.differentiable import paired


@dataclass
class _Kept:
    """State for the backward of one chunk and micro-batch: leaves of the graph, and its roots."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    second: Callable[[], None] | None = None


class _LostError(Exception):
    """Raised when an input was lost on another rank, which reports why."""


@dataclass
class PassResult:
    """``losses`` and ``outputs`` by micro-batch, where the last chunk is; ``fault``: why it failed on this rank."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    fault: Exception | None = None


class Pass:
    """Run of a batch on one rank. ``compute`` returns a chunk's output, given that of the chunk before, or the batch's
    inputs. ``scale``: factor of each loss for the backward; None: there is no backward.

    ``alarm`` is called where the batch is lost.
    """

    def __init__(
        self,
        order: Program,
        links: Links,
        module: PipelineModule,
        batch: Sequence[Micro],
        *,
        compute: Callable[[int, Any, Micro], Any],
        scale: float | None = None,
        with_loss: bool = True,
        with_outputs: bool = False,
        alarm: Callable[[PassResult], object] = lambda _: None,
    ) -> None:
        self._order, self._links, self._module, self._batch, self._compute = order, links, module, batch, compute
        self._scale, self._with_loss, self._with_outputs, self._alarm = scale, with_loss, with_outputs, alarm
        self._kept: dict[tuple[int, int], _Kept] = {}
        # Between two chunks of this rank: activations, and gradients, by the chunk that made them.
        self._local: dict[Message, tuple[Signature, list[torch.Tensor | None]]] = {}
        self.outcome = PassResult()

    def run(self) -> PassResult:
        """Execute this rank's program. Raise BrokenLinkError where a neighbour has died."""
        lost = self.outcome.fault is not None
        self._links.get_ready()
        steps = {"F": self._forward, "B": self._backward, "I": self._inputs, "W": self._weights}
        for action in self._order.actions[self._links.rank]:
            try:
                if not lost:
                    if self._links.events:
                        self._links.events.begin(ACTION, action)
                    steps[action.op](action)
            except BrokenLinkError:
                raise
            except Exception as error:
                lost = True
                if not isinstance(error, _LostError):
                    self.outcome.fault = self._located(error, action)
                self._alarm(self.outcome)
            if lost:  # see [Note: failures]
                self._kept.clear()
                self._local.clear()
                self._pass_on(action)
        self._links.finish()
        if self._links.events:
            self._links.events.begin(ACTION)
        return self.outcome

    def _located(self, error: Exception, action: Action) -> Exception:
        phase = {"F": "forward", "W": "weight gradients"}.get(action.op, "backward")
        text = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        place = self._module.place(action.chunk, backward=action.op != "F")
        fault = PipelineError(f"{phase} of micro-batch {action.micro} at {place}: {text}")
        fault.__cause__ = error
        return fault

    def _pass_on(self, action: Action) -> None:
        for message, source in self._awaits(action):
            self._links.skip(message, source)
        if (target := self._order.sends(action)) is not None:
            self._links.send_lost(Message("F" if action.op == "F" else "B", action.chunk, action.micro), target)

    def _awaits(self, action: Action) -> list[tuple[Message, int]]:
        """Return the message from another rank that ``action`` needs, with that rank, if any."""
        op, chunk, micro = action
        before = chunk - 1 if op == "F" else chunk + 1
        if op == "W" or not 0 <= before < self._order.chunks or self._order.homes[before] == self._links.rank:
            return []
        return [(Message("F" if op == "F" else "B", before, micro), self._order.homes[before])]

    def _take(self, action: Action) -> tuple[Signature, list[torch.Tensor | None]]:
        """Return the output of the chunk before (in a backward: after) for ``action``; raise if it is lost."""
        for message, source in self._awaits(action):
            arrived = self._links.receive(message, source)
            if arrived is None:
                raise _LostError
            return arrived
        forward = action.op == "F"
        return self._local.pop(Message("F" if forward else "B", action.chunk + (-1 if forward else 1), action.micro))

    def _give(self, action: Action, shape: Signature, tensors: list[torch.Tensor | None]) -> None:
        """Hand the result of ``action`` to the chunk that needs it."""
        message = Message("F" if action.op == "F" else "B", action.chunk, action.micro)
        target = self._order.sends(action)
        if target is None:
            self._local[message] = shape, [None if t is None else t.detach() for t in tensors]
        elif action.op == "F":
            self._links.send(message, target, shape, tensors)
        else:
            self._links.put(message, target, [t for t in tensors if t is not None])

    def _forward(self, action: Action) -> None:
        _, chunk, micro = action
        batch, trains = self._batch[micro], self._scale is not None
        leaves: list[torch.Tensor] = []
        value = batch.inputs
        if chunk:
            shape, tensors = self._take(action)
            for i, (part, tensor) in enumerate(zip(shape.parts, tensors, strict=True)):
                if trains and part is not None and part.grad and tensor is not None:
                    leaves.append(tensor.requires_grad_())
                    # The same memory, but no leaf, so that a layer may write into it.
                    tensors[i] = paired(torch.Tensor.detach, lambda grad: grad, tensor)
            value = tensors[0] if shape.single else tuple(tensors)
        output = self._compute(chunk, value, batch)
        if chunk + 1 < self._order.chunks:
            shape, tensors = unpack(output)
            if trains:
                roots = [t for t in tensors if t is not None and t.requires_grad]
                self._kept[chunk, micro] = _Kept(leaves, roots)
            self._give(action, shape, tensors)
            return
        if self._with_outputs:
            self.outcome.outputs[micro] = output
        if self._with_loss:
            loss = self._module.loss(output, batch)
            self.outcome.losses[micro] = loss.detach()
            if self._scale is not None:
                self._kept[chunk, micro] = _Kept(leaves, [loss * self._scale] if loss.requires_grad else [])

    def _arriving(self, action: Action) -> list[torch.Tensor] | None:
        """Return gradients of the chunk's outputs that need one; None after the last, whose output is the loss."""
        if action.chunk + 1 == self._order.chunks:
            return None
        _, tensors = self._take(action)
        return [t for t in tensors if t is not None]

    def _leaving(self, action: Action, kept: _Kept) -> None:
        """Hand the gradients of the chunk's inputs over."""
        if action.chunk:
            grads: list[torch.Tensor | None] = [torch.zeros_like(t) if t.grad is None else t.grad for t in kept.inputs]
            self._give(action, Signature((), single=False), grads)
            for leaf in kept.inputs:
                leaf.grad = None

    def _backward(self, action: Action) -> None:
        kept, grads = self._kept.pop((action.chunk, action.micro)), self._arriving(action)
        if kept.outputs:
            torch.autograd.backward(kept.outputs, grads)
        self._leaving(action, kept)

    def _inputs(self, action: Action) -> None:
        kept, grads = self._kept[action.chunk, action.micro], self._arriving(action)
        outputs, kept.outputs = kept.outputs, []
        if outputs and kept.inputs:
            kept.second = split_backward(outputs, grads, kept.inputs, self._module.params_of(action.chunk))
        elif outputs:  # nobody waits for anything: all of it is work for later
            kept.second = lambda: torch.autograd.backward(outputs, grads)
        self._leaving(action, kept)

    def _weights(self, action: Action) -> None:
        kept = self._kept.pop((action.chunk, action.micro))
        if kept.second is not None:
            kept.second()
