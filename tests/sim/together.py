"""Ranks that differ, each simulated in a process of its own: what runs there, started by ``test_together.py``."""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.client.zero.init import Init
from deepspeed.comm.mesh import groups
from deepspeed.engine.initialize import initialize
from deepspeed.errors import DivergenceError, RankFailedError
from deepspeed.tools.simulate.control import talking
from deepspeed.tools.simulate.costs import load_machine
from deepspeed.tools.simulate.device import NAME
from deepspeed.tools.simulate.install import recording
from tests.sim.loops import Block
from tests.sim.matrix import CASES

WIDTH, BLOCKS = 256, 4
STEADY = 5  # by then all ranks predict what comes
STEPS = 9
PLAIN_GATHER = dist.all_gather_object


class Routed(nn.Module):
    """Blocks, of which a forward runs those that it is given; it fails at ``None``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, route: tuple[int | None, ...]) -> torch.Tensor:
        x = self.first(x)
        for index in route:
            if index is None:
                raise ArithmeticError("this rank alone fails")
            x = self.blocks[index](x)
        return x.square().mean()


ALL: tuple[int | None, ...] = tuple(range(BLOCKS))


class Loop:
    """A user's loop on one rank; ``differs``: this is the rank that does something else in step STEADY."""

    def __init__(self, engine: Any, scenario: str, rank: int) -> None:
        self.engine, self.scenario = engine, scenario
        self.differs, self.chance = rank == 1, random.Random(rank)

    def forward(self, route: tuple[int | None, ...]) -> torch.Tensor:
        loss: torch.Tensor = self.engine(torch.randn(4, WIDTH, device=NAME), route)
        return loss

    def step(self, number: int) -> None:
        surprise = number == STEADY and self.differs
        route = ALL
        if self.scenario == "any route":
            route = tuple(self.chance.choices(ALL, k=self.chance.randrange(1, 6)))
        if surprise and self.scenario == "skips a block":
            route = (0, 2, 3)
        if surprise and self.scenario == "another order":
            route = (2, 0, 1, 3)
        if surprise and self.scenario == "one more evaluation":
            with torch.no_grad():
                self.forward(ALL)
        if number == STEADY and self.scenario == "raises and tries again":  # one alone fails, all give the batch up
            with contextlib.suppress(ArithmeticError, RankFailedError):
                self.engine.backward(self.forward((0, 1, None) if self.differs else ALL))
        if surprise and self.scenario == "dies":
            os._exit(3)
        self.engine.backward(self.forward(route))
        if surprise and self.scenario == "one more backward":
            self.engine.backward(self.forward(route))
        self.engine.step()


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """Inside, the programs' messages are gloo's, to the processes that share the job's store."""
    make, gather = groups._new_group, PLAIN_GATHER

    def new_group(name: str, axis: Any, backend: str) -> Any:
        return make(name, axis, "gloo" if name.endswith("/control") else backend)

    def gather_objects(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            gather(*args, **kwargs)

    with patch.object(groups, "_new_group", new_group), patch.object(dist, "all_gather_object", gather_objects):
        yield


def rank_of(scenario: str, case: str, store: str, *, strict: bool = False) -> dict[str, Any]:
    """What one rank did: collectives by group, messages, errors. Called in a process of a pool, by all of them."""
    if dist.is_initialized():
        dist.destroy_process_group()  # the pool's own
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = {**CASES[case], "zero_optimization": {**CASES[case]["zero_optimization"]}}
    if strict:
        config["zero_optimization"]["divergence"] = "error"
    facts: dict[str, Any] = {"messages": [], "error": ""}
    machine = load_machine("h100")
    with (
        recording(machine, world=world, rank=rank, store=dist.FileStore(store, world)) as recorder,
        talking(recorder) as control,
        _heard(),
    ):
        with Init(config_dict_or_path=config):
            model = Routed()
        engine = initialize(model=model, config=config)[0]
        loop = Loop(engine, scenario, rank)
        try:
            for number in range(STEPS):
                facts["step"] = number
                control.restart()
                loop.step(number)
                facts["messages"].append(control.messages)
        except DivergenceError as error:
            facts["error"] = str(error)
        facts["differing"], facts["now"] = engine.runtime.agreement.mismatches, recorder.timeline.now
        with contextlib.suppress(RuntimeError) if facts["error"] else contextlib.nullcontext():  # its groups are closed
            engine.destroy()
    facts["issued"] = {str(ranks): issued for ranks, issued in recorder.issued.items() if rank in ranks}
    facts["unordered"] = [str(problem) for problem in recorder.order.problems]
    return facts
