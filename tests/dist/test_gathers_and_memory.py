"""Under a sharded PARAM every unit is gathered exactly twice a step, in place, with nothing copied in or out.

Also: alternating train and eval passes keep their forecasts, log nothing, and the bytes on the wire are the predicted
ones.
"""

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from deepspeed.tools.verify.models import case_named
from deepspeed.zero.gradients import reduce_over_axes
from deepspeed.zero.unit import Unit, UnitState
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, start, train_step

pytestmark = pytest.mark.timeout(60)
WIDTH, BLOCKS, VOCAB = 24, 5, 40
REGULAR = 4  # so many times a train pass and an eval pass alternate, and then one and two


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Language(nn.Module):
    """Embedding, blocks, head: seven units that are all needed in both directions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _engine(**changes: Any) -> Any:
    zero = {"param_persistence_threshold": 0, "reduce_bucket_size": 200, **changes.pop("zero", {})}
    return start(Language(), make_config(3, zero=zero, **changes))


def _train(engine: Any, seed: int) -> None:
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCAB, (3, 6))
    loss = nn.functional.cross_entropy(engine(ids).flatten(0, 1).float(), ids.flatten())
    engine.backward(loss)
    engine.step()


def _evaluate(engine: Any) -> None:
    with torch.no_grad():
        engine(torch.zeros(2, 4, dtype=torch.long))


def reductions_in_flight(overlap: bool) -> int:  # noqa: FBT001
    """The most at once in the backward of seven units."""
    engine, under_way = _engine(zero={"overlap_comm": overlap}), list[int]()

    def reduce(*args: Any, **words: Any) -> Any:
        under_way.append(len(engine.runtime.gradients._flying) + 1)
        return reduce_over_axes(*args, **words)

    with patch("deepspeed.zero.gradients.reduce_over_axes", reduce):
        _train(engine, 0)
    engine.destroy()
    return max(under_way)


@pytest.mark.parametrize(("overlap", "most"), [(True, 2), (False, 1)])
def test_at_most_two_partial_sums_are_in_flight_and_one_without_overlap(
    pool2: RankPool, *, overlap: bool, most: int
) -> None:
    assert pool2.run(reductions_in_flight, overlap) == [most] * 2


def alternate() -> dict[str, Any]:
    """Gathers of each train and eval pass; from the third step on, forecasts that came true, and what is logged."""
    engine = _engine()
    counts, schedule = engine.runtime.counts, engine.runtime.schedule
    gathers: dict[str, list[int]] = {"train": [], "eval": []}

    def counted(kind: str, run: Callable[[], None]) -> None:
        before = counts.gathers
        run()
        gathers[kind].append(counts.gathers - before)

    with logged() as lines:
        for step in range(REGULAR + 3):
            counted("train", lambda step=step: _train(engine, step))
            for _ in range(1 if step < REGULAR else 2):
                counted("eval", lambda: _evaluate(engine))
            if step == 1:
                schedule.hits = schedule.uses = 0
                lines.clear()
            if step == REGULAR - 1:
                dummies = counts.dummy_collectives
    names = [u.name for u in engine.runtime.units if u.movable]
    seen = {"names": names, "dummies": dummies, "hits": schedule.hits / schedule.uses, "lines": lines}
    engine.destroy()
    return gathers | seen


def test_each_unit_is_gathered_twice_a_step_and_once_where_it_stays(pool2: RankPool) -> None:
    """Also where train and eval passes alternate: each kind keeps its forecast, and nothing is logged."""
    for seen in pool2.run(alternate):
        units = len(seen["names"])
        assert units == BLOCKS + 2
        # The head is the last of the forward and the first of the backward: from the second step on it stays in
        # between.
        assert seen["train"] == [2 * units] + [2 * units - 1] * (REGULAR + 2)
        assert seen["eval"][:REGULAR] == [units] * REGULAR
        assert seen["dummies"] == 0
        assert seen["hits"] == 1.0 and seen["lines"] == []


def watch_addresses() -> list[str]:
    engine = _engine(bf16={"enabled": True})
    runtime = engine.runtime
    faults: list[str] = []
    original = Unit.start_gather

    def spied(unit: Unit) -> object:
        moved: list[tuple[int, torch.dtype]] = []
        group = unit.mesh.zero
        group.ledger.append(lambda op, numel, dtype, size: moved.append((numel, dtype)))
        transfer = original(unit)
        group.ledger.clear()
        if moved != [(unit.layout.numel, torch.bfloat16)]:
            faults.append(f"{unit.name} moved {moved}")
        return transfer

    def check(module: nn.Module, *_: object) -> None:
        for param in module.parameters():
            unit = param._ds_unit
            full = unit.buffer.full
            inside = full.data_ptr() <= param.data_ptr() < full.data_ptr() + full.numel() * 2
            if unit.state is not UnitState.READY or not inside:
                faults.append(f"{param._ds_name} is not a view of its unit's gather buffer")

    with patch.object(Unit, "start_gather", spied):
        for block in engine.module.blocks:
            block.register_forward_pre_hook(check)
        for step in range(2):
            _train(engine, step)
    if not runtime.counts.gathers:
        faults.append("nothing was gathered")
    return faults


def test_parameters_are_views_of_the_gather_buffer(pool2: RankPool) -> None:
    assert pool2.run(watch_addresses) == [[], []]


class Boxed(nn.Linear):
    """Hands its output over in an object that nothing can be found in."""

    def forward(self, x: torch.Tensor) -> object:
        y = super().forward(x)
        return lambda: y


class Unboxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Boxed(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)()


def stays_gathered() -> tuple[list[str], bool]:
    with logged(set_level=logging.INFO) as lines:
        engine = start(Unboxing(), make_config(3))
        for _ in range(2):
            loss = engine(torch.ones(2, 8)).sum()
            kept = all(u.kept for u in engine.runtime.units if u.movable)
            engine.backward(loss)
            engine.step()
    engine.destroy()
    return [line for line in lines if "stay gathered" in line], kept


def test_a_module_whose_parameters_stay_gathered_is_named_once(pool2: RankPool) -> None:
    for lines, kept in pool2.run(stays_gathered):
        assert kept and len(lines) == 1 and lines[0].startswith("Boxed returned no tensor"), lines


def live_bytes() -> dict[str, int]:
    engine = _engine(bf16={"enabled": True})
    units = engine.runtime.units
    seen = {"forward": 0}

    def measure(*_: object) -> None:
        held = sum(u.buffer.full.untyped_storage().nbytes() for u in units if u.movable)
        seen["forward"] = max(seen["forward"], held)

    for module in engine.module.modules():
        module.register_forward_hook(measure)
    for step in range(3):
        _train(engine, step)
    block = max(u.layout.numel for u in units)
    resting = sum(u.shard.numel() * 2 + u.master.numel() * 4 + u.grad.numel() * 4 for u in units)
    numel = sum(u.layout.numel for u in units)
    return {
        **seen,
        "block": block * 2,
        "resting": resting,
        "numel": numel,
        "after": sum(u.buffer.full.untyped_storage().nbytes() for u in units),
    }


def test_live_parameter_bytes_are_a_few_units_and_nothing_stays(pool2: RankPool) -> None:
    for seen in pool2.run(live_bytes):
        assert seen["after"] == 0
        # The running unit, the one whose leave is still pending, and at most two fetched early.
        assert 0 < seen["forward"] <= 4 * seen["block"]
        assert seen["resting"] == seen["numel"] * (2 + 4 + 4) // 2


def kept_after_the_forward(share: float) -> tuple[int, int, int]:
    """Elements that may stay, a ``share`` of all; of the largest unit; and of those that are here between the forward
    and the backward of a known step.
    """
    total = sum(p.numel() for p in Language().parameters())
    limit = int(share * total)
    engine = _engine(zero={"max_live_parameters": limit, "max_reuse_distance": 10**9, "prefetch_bucket_size": 0})
    units = [u for u in engine.runtime.units if u.movable]
    for _ in range(2):  # the first forward does not know yet what comes back
        out = engine(torch.zeros(3, 6, dtype=torch.long))
        kept = sum(u.layout.numel for u in units if u.state is not UnitState.ABSENT)
        engine.backward(out.square().mean())
        engine.step()
    engine.destroy()
    return limit, max(u.layout.numel for u in units), kept


@pytest.mark.parametrize("share", [0.0, 0.5, 1.1])
def test_what_stays_for_its_reuse_keeps_to_max_live_parameters(pool2: RankPool, share: float) -> None:
    for limit, largest, kept in pool2.run(kept_after_the_forward, share):
        assert max(-1, limit - largest) < kept <= limit


def _waits_at_gradients() -> tuple[int, int]:
    """(gradients that autograd produced, waits for reductions that it was held up by) in a backward of whole
    gradients.
    """
    case = case_named("plain")
    torch.manual_seed(0)
    engine = start(case.build(), make_config(0, zero={"reduce_bucket_size": 40}))
    gradients, waits, seen = engine.runtime.gradients, [], []
    train_step(engine, case, 0)
    handles = [
        p.register_post_accumulate_grad_hook(lambda _: seen.append(len(waits))) for p in engine.module.parameters()
    ]
    real = gradients.land_all
    gradients.land_all = lambda: (waits.append(1), real())[1]
    loss = case.seeded_loss(engine, here(1, 0))[0]
    engine.backward(loss)
    gradients.land_all = real
    during = seen[-1] - seen[0]
    for handle in handles:
        handle.remove()
    engine.step()
    engine.destroy()
    return len(seen), during


def test_whole_gradients_do_not_hold_the_backward_up(pool2: RankPool) -> None:
    """What shows them in ``param.grad`` asks at every gradient, and waits for no reduction then."""
    for gradients, waits in pool2.run(_waits_at_gradients):
        assert gradients > 2 and waits == 0
