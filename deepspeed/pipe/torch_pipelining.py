"""The programs of the schedules of ``torch.distributed.pipelining``, and the backward in two halves that some want.

Taken from torch is the order in which a schedule's class lets ranks run their chunks. Its executor is not used: it
wants the shapes of a batch beforehand, and a rank that fails leaves the others waiting. Nor is its split of a backward:
torch before 2.13 counts a weight that is used at two depths twice. Private torch names: ``_ComputationType`` values and
``sub_actions`` in a schedule's ``pipeline_order``. ``tests/pure/test_pipe_orders.py`` holds them.
"""

import logging
from collections.abc import Callable, Container, Sequence
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from deepspeed.errors import PipelineError
from deepspeed.monitor.log import log_dist_once
from deepspeed.pipe.orders import SCHEDULES, Action, Program, by_chunks, check, chunks_and_style, homes_of, one_f_one_b

_TORCH = "torch.distributed.pipelining"  # imported when it is used: it takes a second and brings much with it
_Tensors = Sequence[torch.Tensor]


@cache
def make_order(name: str, ranks: int, micros: int, *, chunks_per_rank: int = 1) -> Program:
    """Return the programs of all ranks. A schedule that cannot run so few, or such a number of, micro-batches gives way
    to GPipe, chunk by chunk, which always can; the log says so. Raise PipelineError for an unknown schedule.
    """
    chunks, style = chunks_and_style(name, chunks_per_rank)
    homes = homes_of(ranks, chunks, style=style)
    torch_name, _ = SCHEDULES[name]
    if torch_name is None or ranks == 1:
        one_by_one = name.endswith("1f1b")
        return one_f_one_b(ranks, micros, eager=name != "1f1b") if one_by_one else by_chunks(homes, micros)
    # The formulas of these want a full pipeline: with fewer micro-batches they leave gaps or do not end.
    least = {"zero_bubble": ranks, "zbv": 2 * ranks - 1, "dualpipev": 2 * ranks}.get(name, 1)
    rounds = max(1, micros // ranks)
    if micros < least or (name in ("interleaved", "zero_bubble") and micros % rounds):
        more = f"at least {least}" if micros < least else f"a multiple of {rounds}"
        log_dist_once(
            f"the schedule {name!r} of {ranks} ranks wants {more} micro-batches; {micros} are run as in GPipe"
        )
        return by_chunks(homes, micros)
    order = Program(name, micros, homes, _programs(torch_name, homes, ranks, micros))
    check(order)
    return order


def _programs(torch_name: str, homes: tuple[int, ...], ranks: int, micros: int) -> tuple[tuple[Action, ...], ...]:
    """Return the programs that torch's class plans, for stages with only the attributes that its constructor reads."""
    plain = {"num_stages": len(homes), "group_size": ranks, "group_rank": 0, "submod": nn.Identity()}
    stages = [i for i, holder in enumerate(homes) if holder == 0]
    parts: list[Any] = [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=False, **plain) for i in stages]
    schedules = import_module(f"{_TORCH}.schedules")
    torch_log = logging.getLogger(schedules.__name__)
    level = torch_log.level
    torch_log.setLevel(logging.ERROR)
    try:
        planned = getattr(schedules, torch_name)(parts, micros).pipeline_order
    except (AttributeError, TypeError) as error:
        raise PipelineError(
            f"torch {torch.__version__} plans {torch_name} in a way that is not known: {error}"
        ) from error
    finally:
        torch_log.setLevel(level)
    return tuple(tuple(_flat(planned[rank])) for rank in range(ranks))


def _flat(planned: Sequence[Any]) -> list[Action]:
    """Return plain actions: pauses are left out, overlapped actions come one after the other."""
    actions = (action for action in planned if action is not None)
    parts = (one for action in actions for one in getattr(action, "sub_actions", None) or (action,))
    return [Action(one.computation_type.value, one.stage_index, one.microbatch_index) for one in parts]


def split_backward(
    outputs: _Tensors, grads: _Tensors | None, inputs: _Tensors, params: list[nn.Parameter]
) -> Callable[[], None]:
    """Run the first half: gradients of ``inputs`` (into their ``.grad``); the result, when called, runs the second.

    The first half notes the gradients that arrive at *boundary* nodes: the nodes between outputs and inputs that a
    weight's path to the outputs meets first. The second half goes from there to the weights (Qi et al. 2023, section
    4). Weights with boundary nodes in common are one group. Where nodes of a group lie above each other, the nodes
    between them run again; each boundary node then replaces arriving gradients by the noted ones, which include them.
    An output that depends on no input has no such nodes: its whole backward belongs to the second half.
    """
    grads = [torch.ones_like(out) for out in outputs] if grads is None else grads
    roots = [get_gradient_edge(out).node for out in outputs]
    users = _users(roots)
    between = _above([get_gradient_edge(leaf).node for leaf in inputs], users)
    groups = _groups([p for p in params if p.requires_grad], users, between)
    noted: dict[Node, tuple[torch.Tensor | None, ...]] = {}
    hooks = [node.register_prehook(partial(noted.__setitem__, node)) for _, nodes in groups for node in nodes]
    pairs = list(zip(outputs, grads, strict=True))
    far = [pair for pair, root in zip(pairs, roots, strict=True) if root not in between]
    near = [pair for pair, root in zip(pairs, roots, strict=True) if root in between]
    _run(near, inputs, hooks=hooks)

    def second() -> None:
        for weights, nodes in groups:
            arrived = {node: noted.pop(node) for node in nodes}
            edges = [(GradientEdge(n, i), g) for n, gs in arrived.items() for i, g in enumerate(gs) if g is not None]
            again = [n.register_prehook(lambda _, gs=gs: gs) for n, gs in arrived.items() if len(arrived) > 1]
            _run(edges, weights, hooks=again)
        _run(far)

    return second


def _run(
    starts: Sequence[tuple[Any, torch.Tensor]], inputs: _Tensors | None = None, *, hooks: Sequence[Any] = ()
) -> None:
    """Run a backward from ``starts`` (tensors or edges, with gradients) to ``inputs``, or all; remove ``hooks``."""
    try:
        if starts:
            places, grads = zip(*starts, strict=True)
            torch.autograd.backward(places, grads, retain_graph=inputs is not None, inputs=inputs)
    finally:
        for hook in hooks:
            hook.remove()


def _users(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return every node below ``roots``, with the nodes that hand it gradients."""
    users: dict[Node, list[Node]] = {root: [] for root in roots}
    todo = list(users)
    while todo:
        node = todo.pop()
        for below in [below for below, _ in node.next_functions if below is not None]:
            if below not in users:
                todo.append(below)
            users.setdefault(below, []).append(node)
    return users


def _above(starts: Sequence[Node], users: dict[Node, list[Node]], stop: Container[Node] = ()) -> dict[Node, None]:
    """Return ``starts`` and all nodes above them, but none above one in ``stop``."""
    seen: dict[Node, None] = {}
    todo = [node for node in starts if node in users]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen[node] = None
            todo.extend(() if node in stop else users[node])
    return seen


def _groups(
    weights: list[nn.Parameter], users: dict[Node, list[Node]], between: dict[Node, None]
) -> list[tuple[list[nn.Parameter], dict[Node, None]]]:
    """Group weights that have boundary nodes in common; return each group with its nodes."""
    groups: list[tuple[list[nn.Parameter], dict[Node, None]]] = []
    for weight in weights:
        above = _above([get_gradient_edge(weight).node], users, between)
        group, nodes = [weight], {node: None for node in above if node in between}
        apart = [one for one in groups if not nodes.keys() & one[1].keys()]
        for other, met in (one for one in groups if nodes.keys() & one[1].keys()):
            group, nodes = other + group, met | nodes
        groups = [*apart, (group, nodes)] if nodes else apart
    return groups
