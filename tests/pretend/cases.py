"""Runs of the engine on the device that pretends, in a process of their own: it is process-global.

python -m tests.pretend FILE JOB ...     writes what each job answers, as JSON, to FILE

``JOBS`` has the jobs that stand alone. "train PLACE ORDER DTYPE" trains; "without CALL" takes a wait out of the
package, trains in all orders and names what became of the numbers. A call is named as in tests/sim/unseen.py.
"""

import contextlib
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.config.model.blocks import MemoryConfig
from deepspeed.sequence.tiling.blocks import PlannedBlocks
from deepspeed.sequence.tiling.choice import Choice, Keep
from tests.gpu.test_offload_cuda import LATE as RULES, Stack, places
from tests.pretend import device as pretend, group  # noqa: F401 - the groups are registered
from tests.pretend.table import LATE, LATE_STEPS, ORDERS, PLACES, PLANTED
from tests.sim import mutants

WIDTH, DEPTH, ROWS, STEPS, GAS = 32, 3, 4, 3, 2
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
_CPU = {"device": "cpu"}
_COLUMNS = {**RULES["zenflow"]["zenflow"]}
RULES = {
    **RULES,
    "zenflow at once": {"offload_optimizer": _CPU, "zenflow": {**_COLUMNS, "overlap_step": False}},
    "zenflow every step": {"offload_optimizer": _CPU, "zenflow": {**_COLUMNS, "update_interval": 1}},
    "delayed, both": {**RULES["delayed"], "offload_param": _CPU},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def start(place: str, dtype: str = "fp32", model: nn.Module | None = None, **more: Any) -> Any:
    stage, addition = (PLACES | LATE)[place]
    zero = (places(tempfile.gettempdir()) | RULES)[addition]
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        **more,
    }
    if dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    return deepspeed.initialize(model=model or Stack(WIDTH, DEPTH), config=config)[0]


def batch(number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)


def of_ranks(step: int, *, rank: int | None = None) -> int:
    """The number of a batch: each rank has its own."""
    return step * WORLD + (RANK if rank is None else rank)


def stepping(
    engine: Any, dtype: str = "fp32", *, steps: int = STEPS, first: int = 0, behind: Callable[[], object] = lambda: None
) -> list[float]:
    """Losses, read at the end, so that the program is far ahead of its device. ``behind``: called behind each step."""
    losses = []
    for number in range(first, steps * GAS):
        loss = (engine(batch(of_ranks(number), DTYPES[dtype]).to(engine.device)).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
        behind()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def weights(engine: Any) -> list[float]:
    """The fp32 sums of all parameters."""
    found = [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return [float(value.double().sum()) for value in found]


def train(place: str, order: str, dtype: str, **more: Any) -> list[float]:
    """Losses and sums of weights. Late updates are unclipped: the program waits for no norm."""
    more = {"gradient_clipping": 0.0, **more} if place in LATE else more
    pretend.set_order(order, 7)
    engine = start(place, dtype, **more)
    try:
        return [*stepping(engine, dtype, steps=LATE_STEPS if place in LATE else STEPS), *weights(engine)]
    finally:
        engine.destroy()
        pretend.set_order("late")


def plain() -> list[float]:
    """The same by plain PyTorch on the CPU, in fp32."""
    torch.manual_seed(0)
    model, losses = Stack(WIDTH, DEPTH), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    for number in range(STEPS * GAS):
        parts = [
            (model(batch(of_ranks(number, rank=rank), torch.float32)) - 1).square().mean() for rank in range(WORLD)
        ]
        (sum(parts) / WORLD / GAS).backward()
        losses.append(float(parts[RANK]))
        if number % GAS == GAS - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(float(p.detach().double().sum()) for p in model.parameters())]


def without(call: str) -> dict[str, str]:
    """Order -> what becomes of the numbers where that wait is missing: "equal", "other numbers" or an error."""
    module, _, _ = call.partition(":")
    number, unclipped = mutants.calls(module).index(call), {"gradient_clipping": 0.0}  # nothing waits for the norm
    expected, found = train(PLANTED[call], "now", "fp32", **unclipped), {}
    # with others every rank must go on, whatever its numbers
    for order in ("late", "sides", "random") if WORLD == 1 else ("late",):
        with mutants.changed(module, number):
            try:
                numbers = train(PLANTED[call], order, "fp32", **unclipped)
                found[order] = "equal" if numbers == expected else "other numbers"
            except Exception as error:
                found[order] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            pretend.synchronize()
    return found


# --- findings of a review of the device path ---


class WithEmpty(Stack):
    """A parameter without elements beside the others."""

    def __init__(self) -> None:
        super().__init__(WIDTH, DEPTH)
        self.nothing = nn.Parameter(torch.empty(0, 3))


def empty_parameter() -> dict[str, list[list[float]]]:
    """dtype -> losses with a parameter of no elements, and without."""
    found = {}
    for dtype in ("bf16", "fp16"):
        found[dtype] = []
        for model in (WithEmpty, None):
            torch.manual_seed(0)
            engine = start("2", dtype, model and model())
            found[dtype].append(stepping(engine, dtype))
            engine.destroy()
    return found


def foreign_devices() -> list[str]:
    """Questions from threads about a device that is not theirs, while the program is on device 1."""
    deepspeed.init_distributed()
    torch.hpu.set_device(1)
    pretend.FAULTS.clear()
    for place in ("2 optimizer", "3 both", "2 early"):
        engine = start(place, gradient_clipping=0.0)  # with it the program waits for gradients before the thread asks
        assert engine.device.index == 1
        stepping(engine)
        engine.destroy()
    torch.hpu.set_device(0)
    return sorted({f"{what} ({thread})" for what, thread, _ in pretend.FAULTS})


def edited_masters() -> dict[str, list[list[float]]]:
    """Place -> losses when the device is late and when not, of a client that writes to masters between steps."""
    found: dict[str, list[list[float]]] = {}
    for place in ("2 optimizer", "2 early", "3 travelling"):
        for order in ("late", "now"):
            pretend.set_order(order)
            engine = start(place, gradient_clipping=0.0)

            def edit(groups: Any = engine.basic_optimizer.param_groups) -> None:
                for param in itertools.chain.from_iterable(each["params"] for each in groups):
                    param.data.mul_(0.9)

            found.setdefault(place, []).append(stepping(engine, behind=edit))
            engine.destroy()
    pretend.set_order("late")
    return found


@torch.library.custom_op("pretend::attention", mutates_args=())
def _attention(x: torch.Tensor) -> torch.Tensor:
    """What is taken for an attention kernel, by its name."""
    return x.tanh()


def _setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


_attention.register_autograd(lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2), setup_context=_setup)


class Block(nn.Sequential):
    """Saves what attention returns twice."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = _attention(self[0](x))
        return x + self[1](mixed) * mixed.sigmoid()


def kept_activations() -> dict[str, list[float]]:
    """Order -> sums of gradients of blocks that keep, recompute and offload in turn; "plain": that do nothing of it."""
    found = {}
    for order in ("plain", *ORDERS):
        pretend.set_order(order if order in ORDERS else "now", 7)
        torch.manual_seed(0)
        blocks = [Block().to(pretend.NAME) for _ in range(6)]
        kept = PlannedBlocks(blocks, MemoryConfig(), None)  # type: ignore[arg-type]
        kept._forwards, kept.choices = 9, [Choice(keep, share) for share in (1.0, 0.4) for keep in Keep]
        for number in range(STEPS):
            hidden = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number)).to(pretend.NAME)
            hidden = hidden.requires_grad_() * 1.0
            for place, block in enumerate(blocks):
                hidden = block(hidden) if order == "plain" else kept.run(place, block, hidden)
            hidden.square().sum().backward()
        found[order] = [float(p.grad.double().cpu().sum()) for block in blocks for p in block.parameters()]
        assert order == "plain" or kept._offload.copied > STEPS * 6, kept._offload.copied
    pretend.set_order("late")
    return found


JOBS: dict[str, Callable[[], Any]] = {
    "plain": plain, "empty parameter": empty_parameter, "foreign devices": foreign_devices,
    "edited masters": edited_masters,
    "kept activations": kept_activations,
}  # fmt: skip


def answer(job: str) -> Any:
    kind, _, rest = job.partition(" ")
    if kind == "train":
        place, order, dtype = rest.rsplit(" ", 2)
        return train(place, order, dtype)
    return without(rest) if kind == "without" else JOBS[job]()


def main() -> None:
    found: dict[str, Any] = {}
    for job in sys.argv[2:]:
        try:
            found[job] = answer(job)
        except Exception:
            found[job] = traceback.format_exc()
            with contextlib.suppress(Exception):
                pretend.synchronize()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    Path(sys.argv[1]).write_text(json.dumps(found))
    sys.stderr.flush()
    os._exit(0)  # a thread of the group may stand in torch's store, which aborts an interpreter that ends
