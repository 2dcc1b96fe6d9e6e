"""Where the program does not wait for the norm, the optimizer leaves out what is not finite by itself, and nothing else
differs: not one bit, no count, and the log names parameter, rank and step as soon as anybody asks.
"""

import contextlib
import math
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import UsageError
from deepspeed.ops.adam import FusedAdam
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import case_named
from deepspeed.zero import gradients, step
from deepspeed.zero.plan import StatePlan, Tier
from deepspeed.zero.unit import Unit
from deepspeed.zero.update import result as step_result
from deepspeed.zero.update.inline import InlineUpdate
from tests.harness.lockstep import equal
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.rows import for_each
from tests.harness.training import STAGES, make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(120)

BAD, STEPS = (1, 2, 4), 6
DTYPES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


@contextlib.contextmanager
def late() -> Iterator[list[Any]]:
    """As on a device that has not done yet what it was given: the optimizer decides, and to read is to wait. Gives
    what was read.
    """
    reads: list[Any] = []
    read = step_result.norm_of

    def counted(sums: torch.Tensor) -> Any:
        reads.append(read(sums))
        return reads[-1]

    def launches_ahead(policy: InlineUpdate) -> bool:
        return getattr(type(policy.optimizer), "heeds_skip", False)

    with (
        mock.patch.object(InlineUpdate, "launches_ahead", launches_ahead),
        mock.patch.object(step_result, "norm_of", counted),
        mock.patch.object(step.LateResult, "known", lambda self: False),
        mock.patch.object(gradients, "_probes", gradients._probes_of_parameters),
    ):
        yield reads


def _bad(lines: list[str]) -> list[str]:
    return [line for line in lines if "not finite" in line]


class Poisoned:
    """An engine; in the updates of the numbers ``bad`` rank 1 has a gradient of the parameter ``name`` with one element
    that is ``value``.
    """

    name = "layers.1.up.weight"

    def __init__(
        self, stage: int, bad: Collection[int], value: float = math.nan, *, schedule: Any = None, **config: Any
    ) -> None:
        self.case, self.bad, self.number = case_named("plain"), bad, 0
        self.value = value
        self.engine = start(self.case.build(), make_config(stage, **config), lr_scheduler=schedule)
        self.engine.module.get_parameter(self.name).register_hook(self._poison)

    def _poison(self, grad: torch.Tensor) -> torch.Tensor:
        if self.number in self.bad and dist.get_rank() == 1:
            grad = grad.clone()
            grad.view(-1)[0] = self.value
        return grad

    def update(self, *numbers: int) -> None:
        """Train so many steps. Collective."""
        for self.number in numbers:
            train_step(self.engine, self.case, self.number)


def trained(stage: int, config: dict[str, Any]) -> dict[str, Any]:
    """Parameters after each step, of which some have bad gradients, and what engine and log say at the end."""
    job, weights = Poisoned(stage, BAD, **config), []
    engine = job.engine
    with logged() as lines:
        for number in range(STEPS):
            job.update(number)
            weights.append(full_parameters(engine.module))
        early = _bad(lines)
        counts = (engine.skipped_steps, engine.global_steps, engine.optimizer.overflow, engine.was_step_applied())
        norm = engine.get_global_grad_norm()
    found = {"weights": weights, "counts": counts, "norm": norm, "lines": _bad(lines), "early": early}
    found["rates"] = engine.get_lr(), engine.get_mom()
    engine.destroy()
    return found


def both(stage: int, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Read at each step, not read, and where the weights differ."""
    at_once = trained(stage, config)
    with late() as reads:
        behind = trained(stage, config)
    assert len(reads) == STEPS  # each once
    differ = [
        f"{number} {name}"
        for number, (one, other) in enumerate(zip(at_once.pop("weights"), behind.pop("weights"), strict=True))
        for name in one
        if not torch.equal(one[name], other[name])
    ]
    return at_once, behind, differ


@pytest.mark.in_make_test(
    "0-fp32-AdamW-0.0", "1-bf16-Lion-0.05", "2-fp32-AdamW-0.05", "3-fp32-Lion-0.0", "3-bf16-AdamW-0.05"
)
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_not_one_bit_and_no_count_differs(pool2: RankPool, stage: int, dtype: str, optimizer: str, clip: float) -> None:
    config = {**DTYPES[dtype], "optimizer": {"type": optimizer, "params": {"lr": 1e-2, "weight_decay": 0.1}}}
    config["gradient_clipping"] = clip  # of norms that are larger
    if clip and stage in (0, 1):  # a part of the mean's divisor is left for the update
        config["gradient_predivide_factor"] = 3.0
    for rank, (at_once, behind, differ) in enumerate(pool2.run(both, stage, config)):
        assert not differ
        assert behind["counts"] == at_once["counts"] == (len(BAD), STEPS, False, True)
        assert behind["norm"] == at_once["norm"] and math.isfinite(behind["norm"])
        assert not behind["early"] and len(behind["lines"]) == len(BAD)
        for text, number in zip(behind["lines"], BAD, strict=True):
            assert f"step {number + 1} skipped" in text
            assert rank == 0 or (Poisoned.name in text and "rank 1" in text), text


def _restarts(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)


CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}},
    "OneCycle": {"scheduler": {"type": "OneCycle", "params": CYCLE}},  # of momenta, too
    "the client's": {"schedule": _restarts},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_does_not_go_on_with_an_update_that_was_left_out(pool2: RankPool, name: str) -> None:
    """It has taken its step before that is known, and takes it back before the next update."""
    for at_once, behind, differ in pool2.run(both, 3, DTYPES["bf16"] | SCHEDULES[name]):
        assert not differ
        assert (behind["counts"], behind["rates"]) == (at_once["counts"], at_once["rates"])


def _loaded_behind(folder: str) -> tuple[list[float], list[float], int]:
    """Rates as saved, and as they are an update later, after a load behind an update that was left out."""
    with late():
        job = Poisoned(3, [3], **DTYPES["bf16"] | SCHEDULES["WarmupLR"])
        engine = job.engine
        job.update(0, 1)
        engine.save_checkpoint(folder)
        saved = engine.get_lr()
        job.update(2, 3)
        engine.load_checkpoint(folder)
        job.update(2)
        rates, steps = engine.get_lr(), engine.lr_scheduler.last_batch_iteration
        engine.destroy()
    return saved, rates, steps


def test_a_load_is_not_taken_back_with_an_update_that_was_left_out(pool2: RankPool, tmp_path: Path) -> None:
    for saved, rates, steps in pool2.run(_loaded_behind, str(tmp_path)):
        assert saved < rates and steps == 2


class _WithAnEmptyOne(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.none = torch.nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(torch.cat([x, self.none]))).float().square().mean()


def _with_an_empty_one(stage: int) -> tuple[list[float], list[str]]:
    """Losses of two updates, between which one is left out, and what is said of it."""
    losses = []
    torch.manual_seed(0)
    with late(), logged() as lines:
        engine = start(_WithAnEmptyOne(), make_config(stage, bf16={"enabled": True}))
        for number in range(3):
            batch = torch.ones(2, 4, dtype=torch.bfloat16) * (math.inf if number == 1 and dist.get_rank() == 1 else 1)
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    return losses[::2], _bad(lines)


@pytest.mark.in_make_test("1", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_elements_is_finite(pool2: RankPool, stage: int) -> None:
    """As a device looks at the gradients, parameter by parameter."""
    for rank, ((first, last), lines) in enumerate(pool2.run(_with_an_empty_one, stage)):
        assert 0 < last < first
        assert len(lines) == 1 and "step 2 skipped" in lines[0], lines
        assert rank == 0 or "none" not in lines[0], lines


def _asked(question: str) -> tuple[object, int]:
    """An answer right after an update that was left out, and how many updates have been read for it."""
    with late() as reads:
        job = Poisoned(3, [1], math.inf, **DTYPES["bf16"])
        engine = job.engine
        job.update(0, 1)
        assert not reads
        answers: dict[str, Any] = {
            "norm": engine.get_global_grad_norm,
            "applied": engine.was_step_applied,
            "overflow": lambda: engine.optimizer.overflow,
            "skipped": lambda: engine.skipped_steps,
            "saved": lambda: engine._checkpoints.facts({}, "")["engine"]["skipped_steps"],
        }
        answer, count = answers[question](), len(reads)
        engine.destroy()
    return answer, count


@pytest.mark.parametrize(
    ("question", "answer"), [("norm", math.inf), ("applied", False), ("overflow", True), ("skipped", 1), ("saved", 1)]
)
def test_whoever_asks_gets_the_truth(pool2: RankPool, question: str, answer: object) -> None:
    assert pool2.run(_asked, question) == [(answer, 2)] * 2


def _destroyed() -> list[str]:
    with late(), logged() as lines:
        job = Poisoned(2, [0])
        job.update(0)
        job.engine.destroy()
    return _bad(lines)


def test_the_end_of_the_engine_says_what_nobody_asked_for(pool2: RankPool) -> None:
    assert all(len(lines) == 1 for lines in pool2.run(_destroyed))


def _read_at(config: dict[str, Any]) -> int:
    """How many of three updates are read before anybody asks."""
    with late() as reads:
        job = Poisoned(3, (), **config)
        job.update(0, 1, 2)
        count = len(reads)
        job.engine.destroy()
    return count


SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, 0),
        ({"gradient_clipping": 1.0}, 0),  # by what the gradient is multiplied is known where it is
        ({"scheduler": SCHEDULE}, 2),  # did the schedule rightly go on? asked at the next update
        ({"scheduler": SCHEDULE, "bf16": {"enabled": True, "check_grad_overflow": False}}, 0),  # it always does
        ({"fp16": {"enabled": True}}, 3),  # does the scale change?
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, 3),  # cannot leave out anything
    ],
    ids=["none", "clipping", "schedule", "unchecked", "scaled", "sgd"],
)
def test_the_program_waits_where_it_must(pool2: RankPool, config: dict[str, Any], count: int) -> None:
    assert pool2.run(_read_at, config) == [count] * 2


def _with_a_hook(ranks: tuple[int, ...]) -> tuple[int, int, int]:
    """Three updates, of which the second is left out, with a hook on ``ranks``: its calls, what was read before anybody
    asked, how many the engine says were left out; the weights are those of the norm read at once.
    """
    calls, weights = list[int](), []
    for context in (contextlib.nullcontext([]), late()):
        calls.clear()
        with context as reads:
            job = Poisoned(1, [1])
            engine = job.engine
            if dist.get_rank() in ranks:
                engine.basic_optimizer.register_step_post_hook(lambda *_: calls.append(1))
            job.update(0, 1, 2)
            count = len(reads)
            weights.append(full_parameters(engine.module))
            skipped = engine.skipped_steps
            engine.destroy()
    assert equal(*weights)
    return len(calls), count, skipped


@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=str)
def test_a_hook_of_the_users_runs_behind_updates_only(pool2: RankPool, ranks: tuple[int, ...]) -> None:
    """And where it is of one rank alone, as a logger's may be, the ranks still meet at the same places."""
    assert pool2.run(_with_a_hook, ranks) == [(2 if rank in ranks else 0, 0, 1) for rank in range(2)]


def _failed(place: str, stage: int) -> list[str]:
    """What two batches raise, in whose first rank 1 fails on its way to the update; nobody reads a norm."""
    errors = list[str]()
    owner, name = {"norm": (Unit, "gradient_square"), "copy": (step.LateResult, "__init__")}[place]
    with late() as reads:
        job = Poisoned(stage, (), zero={"param_persistence_threshold": 0})
        job.update(0)
        wrong = mock.patch.object(owner, name, mock.Mock(side_effect=RuntimeError("injected")))
        with wrong if dist.get_rank() == 1 else contextlib.nullcontext():
            errors.append(outcome(lambda: job.update(1)))
        errors.append(outcome(lambda: job.update(2)))
        assert not reads
        with pytest.raises(UsageError, match="parts of two states"):
            job.update(3)
        job.engine.destroy()
    return errors


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", ["norm", "copy"])
def test_an_error_of_one_rank_before_the_update_is_heard_in_the_next_batch(
    pool2: RankPool, place: str, stage: int
) -> None:
    others, mine = pool2.run(_failed, place, stage, time_limit=60.0)
    assert others[0] == "" and "RankFailedError" in others[1], others
    assert "rank 1 failed" in others[1] and "load a check" in others[1], others
    assert "RuntimeError" in mine[0] and mine[0].endswith(": injected") and "parts of two states" in mine[1], mine


NORMS = 0.0, 1e-30, 0.7, 1.0, 4.2, 1e300, math.inf, math.nan


@for_each(("whole", "scale"), product(NORMS, (1.0, 1.0 / 3, 2.0**-16)))
def test_the_factor_of_the_device_is_that_of_the_host(whole: float, scale: float) -> None:
    for clip in (1e-3, 0.05, 1.0, 3.7):
        sums = torch.tensor([whole, float(not math.isfinite(whole)), 0.0], dtype=torch.float64)
        norm = step_result.norm_of(sums)[0] * scale
        assert step._clipped(sums, scale, clip).item() == scale / max(1.0, (norm + 1e-6) / clip)


def test_no_rank_decides_by_what_is_its_own() -> None:
    """Not by its views, of which it may have none where another's rest on the host, and not by hooks."""
    optimizer = FusedAdam([torch.nn.Parameter(torch.zeros(2))])
    optimizer.register_step_post_hook(lambda *_: None)

    def goes_ahead(*tiers: Tier) -> bool:
        units = [SimpleNamespace(plan=SimpleNamespace(optim=StatePlan((), tier))) for tier in tiers]
        units.append(SimpleNamespace(plan=SimpleNamespace(optim=None)))
        host: Any = SimpleNamespace(device=torch.device("meta"), units=units)
        return InlineUpdate(host, optimizer).launches_ahead()

    assert goes_ahead(Tier.DEVICE, Tier.DEVICE)
    assert not goes_ahead(Tier.DEVICE, Tier.HOST)
    assert not goes_ahead(Tier.NVME)
