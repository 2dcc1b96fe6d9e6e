"""Gathers by copy engines: where torch and NCCL can, they land in memory that all ranks have registered and arrive as
any others; where they cannot, or one rank cannot, all gather the usual way and the log says once why.

The device's part is played by a stand-in of torch's interface over gloo; what NCCL makes of it no test here can see.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm import collectives, window
from deepspeed.device import Accelerator
from deepspeed.verify.grads import full_parameters
from deepspeed.verify.models import IN_FEATURES, case_named
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start

pytestmark = pytest.mark.timeout(120)

ZERO_POLICY = 2
MODULE = "torch.distributed._symmetric_memory"


class StandIn:
    """``torch.distributed._symmetric_memory`` with its three functions, and what they were asked."""

    def __init__(self, refuses: str = "") -> None:
        self.backend, self.refuses = "", refuses
        self.registered: list[tuple[int, str]] = []

    def set_backend(self, name: str) -> None:
        self.backend = name

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self.backend == "NCCL", "torch takes the backend before the first allocation"
        return torch.empty(*size, dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor, group: str) -> None:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.registered.append((tensor.numel(), group))


@contextlib.contextmanager
def standing_in(symmetric: Any, *, version: tuple[int, ...] = (2, 28, 3)) -> Iterator[list[Any]]:
    """A torch with NCCL, whose communicators are gloo's; the options that were made."""
    made: list[Any] = []

    def options() -> Any:
        made.append(SimpleNamespace(config=SimpleNamespace(cta_policy=None)))
        return made[-1]

    nccl = SimpleNamespace(Options=options, NCCL_CTA_POLICY_ZERO=ZERO_POLICY)
    with (
        mock.patch.dict(sys.modules, {MODULE: symmetric}),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
        mock.patch.object(Accelerator, "collectives_version", lambda _: version),
        mock.patch.object(window, "_BACKENDS", ("nccl", "gloo")),
    ):
        yield made


def _train(*, asked: bool, **changes: Any) -> dict[str, Any]:
    """Losses, weights, and the gathers that went through the window, of a model with units of several sizes."""
    torch.manual_seed(3)
    through: list[int] = []
    plain = window.Window.gather

    def gather(self: window.Window, full: Tensor, shard: Tensor, group: Any) -> Any:
        through.append(full.numel())
        return plain(self, full, shard, group)

    zero = {"param_persistence_threshold": 0, "copy_engine_gathers": asked}
    lines: list[str] = []
    with (
        mock.patch.object(window.Window, "gather", gather),
        mock.patch.object(window.logger, "warning", lambda text, *args: lines.append(text % args)),
    ):
        engine = start(case_named("plain").build(), make_config(3, zero=zero, **changes))
        largest = max(u.layout.numel * u.shard.element_size() for u in engine.runtime.units)
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            batch = torch.randn(4, IN_FEATURES, generator=generator)
            loss = engine(batch.to(next(engine.module.parameters()).dtype)).float().square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        fetching, steps = engine.mesh.fetching, engine.runtime.gathers
        weights = full_parameters(engine.module)
        engine.destroy()
    closed = fetching is None or not fetching.window.fits(0)
    facts = {"largest": largest, "through": len(through), "gathers": steps, "closed": closed, "lines": lines}
    return {"losses": losses, "weights": weights, "group": fetching is not None, **facts}


def _both(changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Any], list[Any]]:
    symmetric = StandIn()
    before = len(dist.distributed_c10d._world.pg_map)
    with standing_in(symmetric) as made:
        by_engines = _train(asked=True, **changes)
    plain = _train(asked=False, **changes)
    assert len(dist.distributed_c10d._world.pg_map) == before
    return plain, by_engines, [options.config.cta_policy for options in made], symmetric.registered


@pytest.mark.parametrize("changes", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_what_comes_through_the_window_is_what_comes_otherwise(pool2: RankPool, changes: dict[str, Any]) -> None:
    for plain, by_engines, policies, registered in pool2.run(_both, changes):
        assert policies == [ZERO_POLICY] and not plain["group"] and by_engines["group"]
        assert [size for size, _ in registered] == [by_engines["largest"]] and "gathers" in registered[0][1]
        assert plain["losses"] == by_engines["losses"]
        assert all(torch.equal(value, by_engines["weights"][name]) for name, value in plain["weights"].items())
        assert plain["through"] == 0 and by_engines["through"] >= by_engines["gathers"] > 0
        assert by_engines["closed"] and by_engines["lines"] == []


def _without_a_barrier() -> bool:
    barrier = mock.Mock(side_effect=RuntimeError("a barrier takes the device of this rank's number"))
    with standing_in(StandIn()), mock.patch.object(dist, "barrier", barrier):
        trained = _train(asked=True)
    return trained["through"] > 0 and not trained["lines"]


def test_the_communicator_is_made_on_the_device_of_the_window(pool2: RankPool) -> None:
    """A barrier of nccl would choose one by the rank's number, which may be another rank's."""
    assert pool2.run(_without_a_barrier) == [True, True]


def _left_out(rank_that_refuses: int) -> dict[str, Any]:
    refuses = "no fabric handles" if dist.get_rank() == rank_that_refuses else ""
    with standing_in(StandIn(refuses)):
        return _train(asked=True)


def test_where_one_rank_cannot_register_none_does_and_one_says_why(pool2: RankPool) -> None:
    first, second = pool2.run(_left_out, 1)
    assert first["through"] == second["through"] == 0 and second["lines"] == []
    assert len(first["lines"]) == 1 and "no fabric handles" in first["lines"][0]


def _on_gloo() -> dict[str, Any]:
    return _train(asked=True)


def test_another_backend_gathers_the_usual_way(pool2: RankPool) -> None:
    first, second = pool2.run(_on_gloo)
    assert not first["group"] and first["through"] == 0 and second["lines"] == []
    assert len(first["lines"]) == 1 and "the backend is gloo" in first["lines"][0]


@pytest.mark.parametrize(
    ("symmetric", "version", "word"),
    [
        (StandIn(), (2, 27, 7), "has 2.27.7"),
        (StandIn(), (), "has unknown"),
        (SimpleNamespace(set_backend=None, empty=None), (2, 28, 3), "has no torch.distributed._symmetric_memory.rend"),
        (None, (2, 28, 3), "has no symmetric memory"),
    ],
    ids=["old NCCL", "no NCCL", "another interface", "no interface"],
)
def test_what_is_absent_is_named(symmetric: Any, version: tuple[int, ...], word: str) -> None:
    with standing_in(symmetric, version=version):
        assert word in window._refusal("nccl")
    with standing_in(StandIn()):
        assert window._refusal("nccl") == ""


def test_the_real_interface_has_the_names_and_parameters_that_are_used() -> None:
    import inspect

    import torch.distributed._symmetric_memory as real

    assert list(inspect.signature(real.set_backend).parameters) == ["name"]
    assert list(inspect.signature(real.rendezvous).parameters) == ["tensor", "group"]
    assert {"size", "dtype", "device"} <= set(inspect.signature(real.empty).parameters)
    helper = inspect.signature(dist.distributed_c10d._new_process_group_helper).parameters
    assert "backend_options" in helper and callable(collectives.gather_flat)


def _over_machines() -> bool:
    group = collectives.AxisGroup(dist.group.WORLD, 2, dist.get_rank(), (0, 1), "gloo")
    with standing_in(StandIn()), mock.patch("socket.gethostname", lambda: f"node{dist.get_rank()}"):
        return window.window_options(group) is None


def test_ranks_of_several_machines_gather_the_usual_way(pool2: RankPool) -> None:
    assert pool2.run(_over_machines) == [True, True]
