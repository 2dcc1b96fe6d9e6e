"""Schedules of pipelines: every rank can execute its program, waits as its paper says, and keeps as little."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.errors import PipelineError
from deepspeed.pipe.orders import COSTS, Action, Program, bubble, by_chunks, check, homes_of, most_alive, timeline
from deepspeed.pipe.torch_pipelining import make_order, split_backward
from tests.harness.rows import for_each

NAMES = (("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("breadth_first", 2))
NAMES += (("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2), ("dualpipev", 2))


@for_each(("name", "chunks"), NAMES)
def test_every_number_of_ranks_and_micro_batches_has_a_program(name: str, chunks: int) -> None:
    for ranks in (1, 2, 3, 4, 8):
        for micros in (1, 2, 3, 5, 8, 16, 19):
            order = make_order(name, ranks, micros, chunks_per_rank=chunks)
            check(order)
            assert order.ranks == ranks and order.micros == micros


def _bubble(name: str, chunks: int, ranks: int, micros: int) -> float:
    costs = {op: cost / chunks for op, cost in COSTS.items()}
    return bubble(timeline(make_order(name, ranks, micros, chunks_per_rank=chunks), costs))


@pytest.mark.parametrize(("ranks", "micros"), [(4, 8), (8, 32), (2, 4)])
def test_bubbles_are_those_of_the_papers(ranks: int, micros: int) -> None:
    """With B = 2 F and I = W = F; chunks divide a rank's work."""
    for name in ("gpipe", "1f1b", "eager_1f1b"):
        assert _bubble(name, 1, ranks, micros) == pytest.approx((ranks - 1) / (micros + ranks - 1))
    for chunks in (2, 4):
        wait = (ranks - 1) / chunks
        for name in ("interleaved", "breadth_first"):
            assert _bubble(name, chunks, ranks, micros) == pytest.approx(wait / (micros + wait))
    # Zero Bubble Pipeline Parallelism (Qi et al. 2023), ZB-H1: (p - 1)(F + I - W)
    assert _bubble("zero_bubble", 1, ranks, micros) == pytest.approx((ranks - 1) / (3 * micros + ranks - 1))
    assert _bubble("zbv", 2, ranks, micros) < _bubble("zero_bubble", 1, ranks, micros)
    assert _bubble("dualpipev", 2, ranks, micros) < _bubble("interleaved", 2, ranks, micros)


def test_activations_kept_are_those_of_the_papers() -> None:
    kept = [most_alive(program) for program in make_order("1f1b", 4, 8).actions]
    assert kept == [4, 3, 2, 1]
    assert [most_alive(program) for program in make_order("eager_1f1b", 4, 8).actions] == [7, 5, 3, 1]
    assert [most_alive(program) for program in make_order("gpipe", 4, 8).actions] == [8] * 4
    assert [most_alive(program) for program in make_order("zero_bubble", 4, 8).actions] == [4] * 4


@pytest.mark.parametrize(("ranks", "micros"), [(4, 8), (8, 32), (2, 4)])
@pytest.mark.parametrize("hop", [0.1, 0.25, 0.5])
def test_messages_are_hidden_but_for_filling_and_draining(ranks: int, micros: int, hop: float) -> None:
    """But in 1f1b, where every way through all stages and back takes longer, one for a stage's worth of micro-batches.
    (A forward takes 1; the terms of docs/parallelism.md.)
    """

    def longer(name: str) -> float:
        spans = [timeline(make_order(name, ranks, micros), hop=late) for late in (0.0, hop)]
        start, end = (max(one.end for row in span for one in row) for span in spans)
        return (end - start) / hop

    ways = 2 * (ranks - 1)
    assert longer("gpipe") == pytest.approx(ways)
    assert longer("eager_1f1b") == pytest.approx(ways)
    assert longer("1f1b") == pytest.approx(ways * micros / ranks + 2 * (ranks - 2))


def test_micro_batches_that_do_not_fit_run_as_in_gpipe() -> None:
    for name, micros in (("zbv", 3), ("dualpipev", 7), ("interleaved", 11)):
        order = make_order(name, 4, micros, chunks_per_rank=2)
        assert order.name == "gpipe" and order.homes == homes_of(4, 2, style="loop" if name == "interleaved" else "v")


@pytest.mark.parametrize(
    ("name", "chunks", "words"),
    [("fifo", 1, "unknown; use one of"), ("1f1b", 2, "one chunk per rank"), ("zbv", 4, "two chunks per rank")],
)
def test_what_no_schedule_does_is_refused(name: str, chunks: int, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        make_order(name, 2, 4, chunks_per_rank=chunks)


def test_an_order_that_waits_for_ever_is_seen() -> None:
    good = by_chunks((0, 1), 1)
    check(good)
    swapped = Program("swapped", 1, (0, 1), (tuple(reversed(good.actions[0])), good.actions[1]))
    with pytest.raises(PipelineError, match=r"cannot go on: rank 0 at B0\.0, rank 1 at B1\.0|cannot go on: rank 0"):
        check(swapped)
    with pytest.raises(PipelineError, match="runs chunk 1 not once on micro-batch 0"):
        check(Program("short", 1, (0, 1), (good.actions[0], (Action("F", 1, 0),))))
    with pytest.raises(PipelineError, match="runs chunk 0 not once"):
        check(Program("away", 1, (0, 1), (good.actions[1], good.actions[0])))


def test_messages_of_a_link_are_in_the_order_in_which_they_are_made() -> None:
    order = make_order("interleaved", 2, 4, chunks_per_rank=2)
    made = [a for a in order.actions[1] if order.sends(a) == 0]
    assert [(m.chunk, m.micro) for m in order.messages(1, 0)] == [(a.chunk, a.micro) for a in made]
    assert {m.op for m in order.messages(1, 0)} == {"F", "B"}, "chunk 1 to chunk 2, and gradients to chunks 0 and 2"
    v = make_order("zbv", 2, 4)
    assert all(m.chunk in (0, 3) for m in v.messages(0, 1)), "between chunks 1 and 2 nothing travels"


class _Beside(nn.Module):
    """One output depends on the input, one on a weight alone, and a weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.b(torch.tanh(self.a(x)))) + self.a.bias
        return (y * self.gate.exp()).transpose(0, 1), self.gate.square()


def _same_in_two_halves(
    outputs: Callable[[], list[torch.Tensor]], grads: list[torch.Tensor], x: torch.Tensor, weights: list[nn.Parameter]
) -> None:
    """Compare a backward in two halves with a whole one, over two micro-batches of which the second adds."""
    for _ in range(2):
        torch.autograd.backward(outputs(), grads)
    expected, wanted = [p.grad.clone() for p in weights], x.grad.clone()
    for param in (*weights, x):
        param.grad = None
    halves = [split_backward(outputs(), grads, [x], weights) for _ in range(2)]
    torch.testing.assert_close(x.grad, wanted)
    assert all(p.grad is None for p in weights), "weights come later"
    for second in halves:
        second()
    torch.testing.assert_close([p.grad for p in weights], expected)


@for_each("seed", range(8))
def test_a_backward_in_two_halves_loses_and_doubles_no_gradient(seed: int) -> None:
    """Also of weights that reach the outputs on ways of their own or are used at two depths, and where an output is a
    view or an input.
    """
    torch.manual_seed(seed)
    model, x = _Beside(), torch.randn(3, 4, requires_grad=True)
    grads = [torch.randn(4, 3), torch.randn(4), torch.randn(3, 4)]
    _same_in_two_halves(lambda: [*model(x), x], grads, x, list(model.parameters()))


class _TwoDepths(nn.Module):
    """A norm before attention and before the MLP, and a layer inside that is called twice."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.norm, self.mix, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.calls, self.scale = calls, nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = x + torch.tanh(self.mix(self.norm(x))) * self.scale.cos()
            x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + self.scale


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_a_weight_at_several_depths_of_a_stage_gets_its_gradient_once(calls: int, order: int) -> None:
    """On every torch: before 2.13 torch's own split counts what flows from one use down to the next twice."""
    torch.manual_seed(calls)
    model, x, grad = _TwoDepths(calls), torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)
    _same_in_two_halves(lambda: [model(x)], [grad], x, list(model.parameters())[::order])


class _Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_neither_half_of_a_backward_does_the_work_of_the_other() -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5))), torch.randn(3, 4, requires_grad=True)
    out = model(x)
    with _Products() as first:
        second = split_backward([out], [torch.ones(3, 4)], [x], list(model.parameters()))
    with _Products() as later:
        second()
    assert (first.count, later.count) == (5, 5)
