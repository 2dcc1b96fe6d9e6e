"""ZenFlow equals the same rule written down with plain torch, one process, element by element.

m: masters, w: the weights a forward computes with, C: the chosen columns of each matrix (vectors are chosen whole). At
every step m[C] = Adam(m[C], g[C]) and w[C] = m[C]. The rest is updated at the end of each window with the mean of its
gradients, and w of it follows at once, or with ``overlap_step`` at the end of the next window. Each side counts its own
updates for the bias correction. C is chosen at the first step of a window by the gradient of that step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.errors import CheckpointError
from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import IN_FEATURES, MicroBatch
from deepspeed.tools.verify.reference import GATE_ADAM
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.dist.test_update_behind import behind
from tests.harness.offload import (
    CASES,
    CPU,
    PRECISION,
    at_the_end,
    differences,
    differs_resumed,
    plain_steps,
    same,
    started,
)
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start, train_step

STEPS = 13


@dataclass
class Element:
    """One parameter of the statement; every tensor has its shape."""

    m: Tensor
    w: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    total: Tensor
    chosen: Tensor
    trained: bool = False  # in the open window

    def adam(self, where: Tensor, grad: Tensor, count: int) -> None:
        """AdamW (Loshchilov and Hutter) on the elements ``where``, which have the count ``count``."""
        lr, (b1, b2), eps, decay = (GATE_ADAM[name] for name in ("lr", "betas", "eps", "weight_decay"))
        first, second = b1 * self.exp_avg + (1 - b1) * grad, b2 * self.exp_avg_sq + (1 - b2) * grad * grad
        update = first / (1 - b1**count) / ((second / (1 - b2**count)).sqrt() + eps)
        new = self.m * (1 - lr * decay) - lr * update
        for old, now in ((self.m, new), (self.exp_avg, first), (self.exp_avg_sq, second)):
            old.copy_(torch.where(where, now, old))


@dataclass
class Statement:
    """The rule for all parameters."""

    ratio: float
    window: int
    select: int
    overlap: bool = False
    warm_up: int = 0
    elements: list[Element] = field(default_factory=list)
    device_count: int = 0
    host_count: int = 0
    steps: int = 0
    filled: int = 0
    since: int | None = None
    choices: int = 0

    def begin(self, params: list[Tensor]) -> None:
        for p in params:
            m = p.detach().float().clone()
            none = torch.zeros_like(m, dtype=torch.bool)
            self.elements.append(Element(m, m.clone(), *(torch.zeros_like(m) for _ in range(3)), none))

    def choose(self, grads: list[Tensor | None]) -> None:
        """Anew, for all of a parameter's rows."""
        for element, given in zip(self.elements, grads, strict=True):
            grad = torch.zeros_like(element.m) if given is None else given
            if grad.dim() < 2:
                element.chosen = torch.ones_like(grad, dtype=torch.bool)
                continue
            matrix = grad.flatten(1)
            columns = min(matrix.shape[1], max(1, int(self.ratio * matrix.shape[1])))
            best = matrix.square().sum(0).argsort(descending=True, stable=True)[:columns]
            mask = torch.zeros(matrix.shape[1], dtype=torch.bool)
            mask[best] = True
            element.chosen = mask.expand_as(matrix).reshape(grad.shape).clone()
        self.device_count = self.host_count if self.since is None else self.device_count
        self.since, self.choices = 0, self.choices + 1

    def step(self, grads: list[Tensor | None]) -> None:
        """None: of a parameter that is frozen, and stands still; but what it had got in the window until then counts
        at its end, as torch's optimizers count a gradient from before.
        """
        warm = self.steps < self.warm_up
        if not warm and self.filled == 0 and (self.since is None or self.since >= self.select):
            self.choose(grads)
        if self.since is not None:
            self.since, self.device_count = self.since + 1, self.device_count + 1
        self.filled += 1
        ends = warm or self.filled == self.window
        if ends:
            self.host_count += 1
        for e, grad in zip(self.elements, grads, strict=True):
            if self.since is not None and grad is not None:
                e.adam(e.chosen, grad, self.device_count)
            if grad is not None:
                e.total, e.trained = e.total + grad, True
            if ends and self.overlap and not warm:
                e.w.copy_(e.m)
            if ends and e.trained:
                e.adam(~e.chosen, e.total / self.filled, self.host_count)
            if ends:
                e.total, e.trained = torch.zeros_like(e.total), False
            if ends and (warm or not self.overlap):
                e.w.copy_(e.m)
            e.w.copy_(torch.where(e.chosen, e.m, e.w))
        self.steps, self.filled = self.steps + 1, 0 if ends else self.filled


def stated(
    rule: Statement,
    case_name: str,
    *,
    world: int,
    clip: float = 0.0,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    before: Callable[[int, nn.Module], object] = lambda *_: None,
) -> Statement:
    """``rule`` after the steps of the case; ``before`` each that is called with its number and the model."""
    case = CASES[case_name]()
    model = case.build().train().to(dtype)
    rule.begin(list(case.build().parameters()))
    for step in range(steps):
        before(step, model)
        for p, e in zip(model.parameters(), rule.elements, strict=True):
            p.data.copy_(e.w)
        grads = [torch.zeros_like(e.m) for e in rule.elements]
        for rank in range(world):
            for micro in range(case.accumulation):
                model.zero_grad()
                losses = case.seeded_loss(model, MicroBatch(step, micro, rank, world))
                case.backward([loss / case.accumulation for loss in losses], Tensor.backward)
                for total, p in zip(grads, model.parameters(), strict=True):
                    if p.requires_grad and p.grad is not None:
                        total += p.grad.float() / world
        norm = torch.stack([g.norm() for g in grads]).norm()
        factor = min(1.0, clip / (float(norm) + 1e-6)) if clip else 1.0
        trains = [p.requires_grad for p in model.parameters()]
        rule.step([g * factor if trained else None for g, trained in zip(grads, trains, strict=True)])
    return rule


def block(rule: Statement, **changes: Any) -> dict[str, Any]:
    """The configuration of the same rule."""
    keys = {"topk_ratio": rule.ratio, "update_interval": rule.window, "full_warm_up_rounds": rule.warm_up}
    chosen = {"select_strategy": "step", "select_interval": rule.select, "overlap_step": rule.overlap}
    return {"offload_optimizer": CPU, "zenflow": {**keys, **chosen, **changes}}


def zenflow_engine(stage: int, rule: Statement, case_name: str = "wide", *, zero: Any = (), **config: Any) -> Any:
    return started(stage, {**block(rule), **dict(zero)}, case_name, **config)


def rule_of(**changes: Any) -> Statement:
    return Statement(**{"ratio": 0.2, "window": 3, "select": 6, **changes})


def errors_against(wanted: Statement, engine: Any, dtype: torch.dtype = torch.float32) -> list[float]:
    """Largest errors of weights and masters, and of the moments. Collective."""
    weights = full_parameters(engine.module).values()
    errors = [
        max(scaled_error(w.float(), e.w.to(dtype).float()) for w, e in zip(weights, wanted.elements, strict=True))
    ]
    for name in ("m", "exp_avg", "exp_avg_sq"):
        found = [
            safe_get_full_fp32_param(p) if name == "m" else safe_get_full_optimizer_state(p, name)
            for p in engine.module.parameters()
        ]
        pairs = [(f, e) for f, e in zip(found, wanted.elements, strict=True) if e.m.numel()]  # nothing has no slots
        errors.append(max(scaled_error(f, getattr(e, name)) for f, e in pairs))
    return errors


def against_statement(
    stage: int, precision: str, rule: dict[str, Any], case_name: str, clip: float, zero: Any
) -> list[float]:
    """Largest errors of weights and masters, and of the moments. Collective."""
    case, wanted = CASES[case_name](), rule_of(**rule)
    engine = zenflow_engine(stage, wanted, case_name, zero=zero, **{**PRECISION[precision], "gradient_clipping": clip})
    for step in range(STEPS):
        train_step(engine, case, step)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    stated(wanted, case_name, world=engine.world_size, clip=clip, dtype=dtype)
    assert wanted.choices >= 2
    errors = errors_against(wanted, engine, dtype)
    engine.destroy()
    return errors


CASES_OF_IT = [
    (2, "fp32", {}, "wide_accumulation", 0.05, {}),
    (3, "fp32", {"overlap": True}, "wide", 0.0, {}),
    (3, "bf16", {"warm_up": 2}, "wide", 0.0, {}),
    (2, "bf16", {"overlap": True, "warm_up": 1, "window": 2, "select": 4}, "wide", 0.05, {}),
    (1, "fp32", {"select": 3}, "wide", 0.0, {}),
    (3, "fp32", {"ratio": 0.5}, "wide", 0.05, {"mics_shard_size": 1}),
]


@pytest.mark.in_make_test("1-3-bf16-{'warm_up': 2}", "2-3-fp32-{'overlap': True}")
@pytest.mark.parametrize("case", CASES_OF_IT, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_the_rule_with_plain_torch(pool1: RankPool, pool2: RankPool, ranks: int, case: tuple[Any, ...]) -> None:
    limit = 2e-2 if case[1] == "bf16" else 2e-5  # a weight that is rounded the other way changes what comes after it
    for errors in (pool1 if ranks == 1 else pool2).run(against_statement, *case):
        assert max(errors) < limit, errors


# -- checkpoints -----------------------------------------------------------------------------------------------------
def resumed(folder: str, precision: str, stage: int, overlap: bool, at: int) -> list[str]:
    """What differs after a save in the middle between going on and starting from it. Collective."""
    rule = rule_of(overlap=overlap, warm_up=1)
    return differs_resumed(lambda: zenflow_engine(stage, rule, **PRECISION[precision]), "wide", at, STEPS, folder)


@pytest.mark.in_make_test("bf16-3-True-6")
@pytest.mark.parametrize(("precision", "stage", "overlap", "at"), [("bf16", 3, True, 6), ("fp32", 2, False, 5)])
def test_training_goes_on_from_the_middle_of_a_window_bit_for_bit(
    pool2: RankPool, tmp_path: Path, precision: str, stage: int, overlap: bool, at: int
) -> None:
    assert pool2.run(resumed, str(tmp_path), precision, stage, overlap, at) == [[], []]


def saved(folder: str, at: int) -> dict[str, Tensor]:
    """A save after so many steps; what training from there comes to. Collective."""
    engine = zenflow_engine(3, rule_of())
    plain_steps(engine, "wide", 0, at)
    engine.save_checkpoint(folder)
    masters = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    engine.destroy()
    return masters


def continued(folder: str, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    """Masters and counts as they are loaded by any number of ranks, and one step behind. Collective."""
    engine = zenflow_engine(stage, rule_of())
    engine.load_checkpoint(folder)
    masters = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    plain_steps(engine, "wide", 4, 5)
    policy = engine.runtime.update
    counts = [policy._counts.window, policy._counts.updates]
    whole = sum(int(policy._mask_of(view).sum()) for view in policy._views)
    engine.destroy()
    return masters, [*counts, whole]


def test_another_number_of_ranks_goes_on_with_the_same_columns(
    pool1: RankPool, pool2: RankPool, tmp_path: Path
) -> None:
    written = pool2.run(saved, str(tmp_path), 4)[0]
    (alone, counts), *_ = pool1.run(continued, str(tmp_path), 2)
    both = pool2.run(continued, str(tmp_path), 3)
    assert all(same(alone[name], value) for name, value in written.items())
    assert [c[:2] for _, c in both] == [counts[:2]] * 2 == [[2, 5]] * 2
    assert sum(c[2] for _, c in both) == counts[2]


def into_plain(folder: str, at: int) -> str | list[str]:
    """What an engine without the block makes of a save; the slots that it has then. Collective."""
    saved(folder, at)
    engine = started(3, {"offload_optimizer": CPU})
    try:
        engine.load_checkpoint(folder)
        plain_steps(engine, "wide", at, at + 1)
        return sorted({name for state in engine.basic_optimizer.state.values() for name in state})
    except CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()


def test_an_engine_without_it_takes_whole_windows_and_refuses_sums(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(into_plain, str(tmp_path / "whole"), 6) == [["exp_avg", "exp_avg_sq", "step"]] * 2
    assert all(
        "in the middle of a window of zero_optimization.zenflow" in t for t in pool2.run(into_plain, str(tmp_path), 4)
    )


def from_plain(folder: str) -> list[int]:
    """The counts of an engine with the block that goes on from one without. Collective."""
    engine = started(2, {"offload_optimizer": CPU})
    plain_steps(engine, "wide", 0, 3)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = zenflow_engine(3, rule_of())
    engine.load_checkpoint(folder)
    plain_steps(engine, "wide", 3, 5)
    counts = engine.runtime.update._counts
    engine.destroy()
    return [counts.steps, counts.window, counts.since, counts.updates]


def test_it_goes_on_from_an_engine_without_it(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(from_plain, str(tmp_path)) == [[5, 2, 2, 5]] * 2


# -- doors, skipped steps, a thread ----------------------------------------------------------------------------------
def trained(stage: int, precision: str, *, look: bool) -> dict[str, Tensor]:
    """States after some steps; with ``look`` some are read in between, which changes nothing."""
    engine = zenflow_engine(stage, rule_of(overlap=True), **PRECISION[precision], gradient_clipping=0.05)
    seen = []
    for step in range(STEPS):
        train_step(engine, CASES["wide"](), step)
        if look and step in (1, 5, 6, 8):
            seen.append(safe_get_full_fp32_param(engine.module.inp.weight))
            seen.append(safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg"))
    found = at_the_end(engine, [])
    assert all(value is None or bool(value.isfinite().all()) for value in seen)  # None: skipped from the first on
    return found


def in_a_thread(precision: str, stage: int) -> list[str]:
    """What differs from updates that the program waits for, and during which nobody looks. Collective."""
    wanted = trained(stage, precision, look=False)
    with behind() as turns:
        found = trained(stage, precision, look=True)
    return differences(wanted, found) + ([] if turns else ["nothing was done behind"])


@pytest.mark.in_make_test("fp16-3")
@pytest.mark.parametrize(("precision", "stage"), [("fp16", 3), ("bf16", 2)])
def test_in_a_thread_it_is_the_same_bit_for_bit_whoever_looks(pool2: RankPool, precision: str, stage: int) -> None:
    assert pool2.run(in_a_thread, precision, stage) == [[], []]


def evaluated() -> list[str]:
    """What differs where evaluations between steps are in inference mode, not without gradients."""
    found = list[dict[str, Tensor]]()
    for mode in (torch.no_grad, torch.inference_mode):
        engine = zenflow_engine(2, rule_of())
        for step in range(4):
            train_step(engine, CASES["wide"](), step)
            with mode():
                engine.eval()
            engine.train()
        found.append(at_the_end(engine, []))
    return differences(*found)


def test_evaluations_in_inference_mode_leave_states_that_train(pool2: RankPool) -> None:
    assert pool2.run(evaluated) == [[], []]


def undisturbed_loop() -> list[bool]:
    """Whether the states of what is chosen stayed on the device from step to step, and what is written counts."""
    engine, stayed = zenflow_engine(3, rule_of()), []
    for step in range(5):
        train_step(engine, CASES["wide"](), step)
        stayed.append(engine.runtime.update.states_out)
    weight = engine.module.inp.weight
    safe_set_full_fp32_param(weight, torch.full_like(safe_get_full_fp32_param(weight), 0.25))
    train_step(engine, CASES["wide"](), 5)
    moved = (safe_get_full_fp32_param(weight) - 0.25).abs()
    engine.destroy()
    return [*stayed, 0 < float(moved.max()) < 0.1]


def test_states_stay_where_they_are_and_follow_what_is_written(pool2: RankPool) -> None:
    assert pool2.run(undisturbed_loop) == [[True] * 6] * 2


def looked_at_behind_an_overflow() -> list[bool]:
    """Whether states are away after the step that is left out, and after a look at the optimizer's state behind it."""
    with behind():
        engine = zenflow_engine(2, rule_of(), "wide", bf16={"enabled": True, "check_grad_overflow": True})
        for step in range(2):
            train_step(engine, CASES["wide"](), step)
        engine.backward(engine(torch.full((2, IN_FEATURES), float("inf"), dtype=torch.bfloat16)).sum())
        engine.step()
        update, optimizer = engine.runtime.update, engine.basic_optimizer
        away = update.states_out
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        seen = [away, update.states_out, update.further_slots + "sum" in state]
        engine.destroy()
    return seen


def test_who_looks_behind_a_step_that_is_left_out_sees_all_states(pool2: RankPool) -> None:
    assert pool2.run(looked_at_behind_an_overflow) == [[True, False, True]] * 2


def few_elements(stage: int, zero: dict[str, Any]) -> tuple[int, Tensor]:
    """How many views this rank has of one small trained matrix, and what it has become. Collective."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1, bias=False)).requires_grad_(requires_grad=False)
    model[1].requires_grad_(requires_grad=True)
    engine = start(model, make_config(stage, zero=zero, **PRECISION["bf16"]))
    views = sum(len(unit.views) for unit in engine.runtime.units)
    for step in range(6):
        engine.backward(engine(torch.full((2, 8), 1.0 + step, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        if step == 3:
            engine.eval()
            engine.train()
    engine.eval()
    weight = safe_get_full_fp32_param(model[1].weight)
    engine.destroy()
    return views, weight


@pytest.mark.in_make_test("True", "None")
@pytest.mark.parametrize("overlap", [True, False, None])
def test_a_rank_without_elements_takes_part(pool1: RankPool, pool2: RankPool, overlap: bool | None) -> None:
    """``overlap`` None: the delayed update."""
    zero = {"offload_optimizer": {**CPU, "delayed_update": True}}
    if overlap is not None:
        zero = block(rule_of(overlap=overlap, window=2, select=4, warm_up=1))
    (_, alone), *_ = pool1.run(few_elements, 2, zero)
    both = pool2.run(few_elements, 2, zero)
    assert min(views for views, _ in both) == 0
    assert all(same(weight, alone) for _, weight in both)


def weights_alone(folder: str, *, only: bool) -> list[str]:
    """Moments that differ between an engine that has loaded weights alone and one that has loaded nothing."""
    found = []
    for loads in (False, True):
        engine = zenflow_engine(2, rule_of(), **PRECISION["bf16"])
        plain_steps(engine, "wide", 0, 5)
        if not loads:
            engine.save_checkpoint(folder)
        plain_steps(engine, "wide", 5, 8)
        if loads:
            engine.load_checkpoint(folder, **({"load_module_only": True} if only else {"load_optimizer_states": False}))
        pairs = [(n, p, key) for n, p in engine.module.named_parameters() for key in ("exp_avg", "exp_avg_sq")]
        found.append({f"{n}.{key}": safe_get_full_optimizer_state(p, key) for n, p, key in pairs})
        plain_steps(engine, "wide", 8, 9)
        counts = engine.runtime.update._counts
        found[-1]["counts"] = torch.tensor([counts.steps, counts.window, counts.since, counts.updates])
        engine.destroy()
    return differences(*found)


@pytest.mark.in_make_test("True")
@pytest.mark.parametrize("only", [True, False])
def test_loading_weights_alone_keeps_the_states_of_chosen_columns(pool2: RankPool, tmp_path: Path, only: bool) -> None:
    assert pool2.run(weights_alone, str(tmp_path), only=only) == [[], []]


def hook_raises(stage: int, overlap: bool, at: int) -> str:
    """What a rank hears of a hook of the user's that raises on the last rank in step ``at``. Collective."""
    engine = zenflow_engine(stage, rule_of(overlap=overlap), **PRECISION["bf16"])
    plain_steps(engine, "wide", 0, at)

    def mine(*_: Any) -> None:
        raise ValueError("the hook of mine")

    if engine.global_rank == engine.world_size - 1:
        engine.basic_optimizer.register_step_pre_hook(mine)
    text = str(outcome(lambda: plain_steps(engine, "wide", at, at + 2)))
    engine.destroy()
    return text


@pytest.mark.in_make_test("True-4")
@pytest.mark.parametrize(("overlap", "at"), [(False, 1), (False, 2), (True, 4)])
def test_a_hook_that_raises_on_one_rank_leaves_no_other_waiting(pool2: RankPool, overlap: bool, at: int) -> None:
    assert all("the hook of mine" in text for text in pool2.run(hook_raises, 2, overlap, at))
