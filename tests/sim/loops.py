"""The model of the matrix on the simulated device, and what loops of clients do with it beside training."""

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

import deepspeed
from deepspeed.tools.simulate.device import MODULE, NAME
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from deepspeed.zero.plan import StateKind

WIDTH, VOCABULARY, TOKENS = 256, 2048, 64


class Block(nn.Module):
    """A block that costs few operations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, three blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).float(), tokens)


def _skip(model: Any, step: int) -> None:
    """The last step leaves the middle block out."""
    if step == 2:
        block = model.blocks[1]
        block.__class__ = type("Absent", (type(block),), {"__call__": lambda self, x: x})


_held = contextlib.ExitStack()


def _hold(model: Any, step: int) -> None:
    """The second step is inside a context that has the first block's parameters gathered."""
    if step == 1:
        _held.enter_context(deepspeed.zero.GatheredParameters(list(model.blocks[0].parameters())))
    if step == 2:
        _held.close()


def _serve(model: Any, step: int) -> None:
    """In the forward of the second step another rank asks for what this one has, or has asked for: no peer is there to
    do so, so what its message leads to is called.
    """
    if step != 1:
        return

    def ask(block: Any, *_: Any) -> None:
        for parameter in (block.up.weight, model.blocks[2].up.weight):
            unit = parameter._ds_unit
            unit.keeper._gather(unit, dummy=True)

    model.blocks[1].register_forward_pre_hook(ask)


def _look(model: Any, step: int) -> None:
    """In the middle of a window the client reads a gradient, and in that of the next one takes states away for a
    while.
    """
    parameter = model.tokens.weight  # the last whose gradient is reduced
    if step == 1:
        safe_get_local_grad(parameter).sum()
    if step == 3:
        engine = parameter._ds_unit.keeper.client()
        engine.offload_states()
        engine.reload_states()


def _evaluate(model: Any, step: int) -> None:
    """In the middle of the second window, whose first gradients are on their way, weights are brought up to date."""
    if step == 3:
        parameter = model.tokens.weight  # the last whose gradient is reduced
        engine = parameter._ds_unit.keeper.client()
        engine.eval()
        engine.train()
        safe_get_local_grad(parameter).sum()


def _set(model: Any, step: int) -> None:
    """The client writes a master, and goes on with the memory that it took the values from."""
    parameter = model.tokens.weight
    value = torch.empty(safe_get_local_fp32_param(parameter).shape, device="cpu")
    safe_set_local_fp32_param(parameter, value)
    value.add_(1)


def _read(model: Any, step: int) -> None:
    """The client reads ``.grad`` between backward and step, and puts another gradient in the place of one."""
    parameter = model.tokens.weight
    engine = parameter._ds_unit.keeper.client()
    if step > 0:
        return
    take_step = engine.step

    def read_and_step() -> None:
        other = torch.zeros_like(parameter.grad)
        sum(p.grad.square().sum() for p in model.parameters())
        parameter.grad = other
        take_step()

    engine.step = read_and_step


_folder = tempfile.TemporaryDirectory(prefix="ds_matrix_")


def _save(model: Any, step: int) -> None:
    """After the first step all is saved behind the second, whose update waits for the copies."""
    if step == 1:
        model.tokens.weight._ds_unit.keeper.client().save_checkpoint(_folder.name)


def _save_early(model: Any, step: int) -> None:
    """The thread of the save is ahead of the program, whose next step is not taken."""
    if step == 1:
        MODULE.sink.early = True  # type: ignore[attr-defined]
        _save(model, step)
        _leave(model, step)


def _save_and_write(model: Any, step: int) -> None:
    """The client goes on at once with what it can reach, and changes a master by the function that is there for it."""
    if step == 1:
        parameter = model.tokens.weight
        _save(model, step)
        with torch.no_grad():
            for reachable in (p for p in model.parameters() if p._ds_unit.whole):
                reachable.zero_()
        safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter).clone())


def _save_and_set(model: Any, step: int) -> None:
    """It changes an optimizer's slot."""
    if step == 1:
        _save(model, step)
        value = safe_get_local_optimizer_state(model.tokens.weight, "exp_avg")
        safe_set_local_optimizer_state(model.tokens.weight, value, "exp_avg")


def _save_and_lend(model: Any, step: int) -> None:
    """It takes states away."""
    if step == 1:
        _save(model, step)
        engine = model.tokens.weight._ds_unit.keeper.client()
        engine.offload_states()
        engine.reload_states()


def _leave(model: Any, step: int) -> None:
    """The last step is not taken: the end of the engine comes while gradients are reduced."""
    if step == 1:
        model.tokens.weight._ds_unit.keeper.client().step = lambda: None


def _fail(model: Any, step: int) -> None:
    """A forward raises when some of a unit is on its way to the device; the client catches that and goes on."""
    if step != 1:
        return
    unit = model.blocks[1].up.weight._ds_unit
    store = unit.rest[StateKind.PARAM]
    get = store.get

    times = []

    def get_some(out: torch.Tensor, *, start: int = 0) -> Any:
        times.append(get(out, start=start))
        if len(times) == 1:  # what the other ranks were promised is to be had
            raise OSError("planted")
        return times[-1]

    with patch.object(store, "get", get_some), contextlib.suppress(OSError):
        unit.keeper.client()(torch.randint(VOCABULARY, (TOKENS,), device=NAME))


def _tear(model: Any, step: int) -> None:
    """The last update fails at its first part, with others on their way from the drive."""
    engine = model.tokens.weight._ds_unit.keeper.client()
    take_step = engine.step

    def fail(*_: Any) -> None:
        raise OSError("planted")

    def take_step_and_fail() -> None:
        engine.basic_optimizer.register_step_pre_hook(fail)
        with contextlib.suppress(OSError):
            take_step()

    if step == 1:
        engine.step = take_step_and_fail


def _ask(model: Any, step: int) -> None:
    """The client asks for the norm of each update at once, when the device is far behind."""
    if step > 0:
        return
    engine = model.tokens.weight._ds_unit.keeper.client()
    take_step = engine.step

    def step_and_ask() -> None:
        matrix = torch.zeros(1 << 14, 1 << 14, device=NAME)
        torch.mm(matrix, matrix)
        take_step()
        engine.get_global_grad_norm()

    engine.step = step_and_ask


# What a loop of the user's does before a forward, by the first word of a case's name.
LOOPS: dict[str, tuple[Callable[[Any, int], None], int]] = {
    "skipping": (_skip, 3), "held": (_hold, 3), "serving": (_serve, 2), "looking": (_look, 2),
    "reading": (_read, 2), "setting": (_set, 2), "leaving": (_leave, 2), "failing": (_fail, 2), "torn": (_tear, 2),
    "saving": (_save, 2), "sooner": (_save_early, 2), "writing": (_save_and_write, 2), "slots": (_save_and_set, 2),
    "lending": (_save_and_lend, 2), "asking": (_ask, 2),
    "evaluating": (_evaluate, 2),
}  # fmt: skip
