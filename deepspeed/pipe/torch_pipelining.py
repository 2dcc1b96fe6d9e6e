"""The one adapter on ``torch.distributed.pipelining``: the programs of its schedules, and the backward in two halves.

Taken from torch are the order in which a schedule's class lets ranks run their chunks, and the split of a backward.
Its executor is not used: it wants the shapes of a batch beforehand, and a rank that fails leaves the others waiting.
Private torch names: ``_ComputationType`` values and ``sub_actions`` in a schedule's ``pipeline_order``,
``_backward.stage_backward_input`` and ``stage_backward_weight``. ``tests/pure/test_pipe_orders.py`` fails where a new
torch has others.
"""

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from deepspeed.errors import PipelineError
from deepspeed.observe.log import log_dist_once
from deepspeed.pipe.orders import SCHEDULES, Action, Program, by_chunks, check, chunks_and_style, homes_of, one_f_one_b

_TORCH = "torch.distributed.pipelining"  # imported when it is used: it takes a second and brings much with it
_Tensors = Sequence[torch.Tensor]


def make_order(name: str, ranks: int, micros: int, *, chunks_per_rank: int = 1) -> Program:
    """The programs of all ranks. Where a schedule cannot do with so few or such a number of micro-batches, those of
    GPipe, chunk by chunk, which always can; the log says so. Raises PipelineError for an unknown schedule.
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
    """What torch's class plans, from stages that exist only as far as its constructor asks."""
    plain = {"num_stages": len(homes), "group_size": ranks, "group_rank": 0, "submod": nn.Identity()}
    mine = [i for i, home in enumerate(homes) if home == 0]
    parts: list[Any] = [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=False, **plain) for i in mine]
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
    """Plain actions: pauses left out, and what torch calls overlapped one after the other."""
    flat: list[Action] = []
    for action in planned:
        if action is None:
            continue
        for one in getattr(action, "sub_actions", None) or (action,):
            flat.append(Action(one.computation_type.value, one.stage_index, one.microbatch_index))
    return flat


def split_backward(
    outputs: _Tensors, grads: _Tensors | None, inputs: _Tensors, params: list[nn.Parameter]
) -> Callable[[], None]:
    """The first half: gradients of ``inputs`` (into their ``.grad``) now; the second, when the result is called.

    The second half adds to the parameters' ``.grad`` without any hook of theirs. torch walks from the weights up to the
    ways between inputs and outputs, so an output that depends on no input would give its weights nothing: the backward
    of such outputs belongs to the second half as a whole.
    """
    torch_backward = import_module(f"{_TORCH}._backward")
    # It detaches the outputs in place, which no view allows, and which an input that is passed on must not suffer.
    roots = [out.clone() if out._is_view() or out.is_leaf else out for out in outputs]
    grads = [torch.ones_like(root) for root in roots] if grads is None else grads
    leaves = {get_gradient_edge(leaf).node for leaf in inputs}
    near, far = list[tuple[torch.Tensor, torch.Tensor]](), list[tuple[torch.Tensor, torch.Tensor]]()
    for root, grad in zip(roots, grads, strict=True):
        (near if _reaches(root, leaves) else far).append((root, grad))
    weights = [p for p in params if p.requires_grad]
    try:
        _, groups = torch_backward.stage_backward_input(
            [r for r, _ in near], [g for _, g in near], inputs, iter(weights)
        )
    except RuntimeError as error:
        raise error.__cause__ or error from None  # torch wraps whatever comes from inside

    groups = _disjoint(groups)

    def second() -> None:
        torch_backward.stage_backward_weight(iter(weights), groups, retain_graph=True)
        if far:
            torch.autograd.backward([r for r, _ in far], [g for _, g in far])

    return second


def _disjoint(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that have parameters or nodes in common, as one.

    torch (2.13) joins such groups as it goes through a set, and sometimes forgets that it has: a weight that is used at
    two depths then gets its gradient twice.
    """
    apart: list[dict[str, Any]] = []
    for group in groups:
        captured = {n: g for n, g in zip(group["intermediates"], group.get("grads", ()), strict=False) if g is not None}
        params = set(group["params"])
        for other in [o for o in apart if params & o["params"] or captured.keys() & o["captured"].keys()]:
            apart.remove(other)
            params |= other["params"]
            captured |= other["captured"]
        apart.append({"params": params, "captured": captured})
    used = [(group["params"], group["captured"]) for group in apart if group["captured"]]
    return [{"params": p, "intermediates": list(c), "grads": list(c.values())} for p, c in used]


def _reaches(root: torch.Tensor, leaves: set[Any]) -> bool:
    """Whether a gradient of ``root`` would come to one of ``leaves`` (nodes of the graph)."""
    seen: set[Any] = set()
    todo: list[Any] = [get_gradient_edge(root).node]
    while todo:
        node = todo.pop()
        if node in leaves:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo.extend(before for before, _ in node.next_functions)
    return False
