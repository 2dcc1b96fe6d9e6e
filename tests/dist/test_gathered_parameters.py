"""GatheredParameters: what is read inside may be kept, edits are made or refused on every rank, and no rank waits for
one that raised.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack

import deepspeed
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import case_named
from deepspeed.utils import safe_set_full_fp32_param
from tests.harness.lockstep import TOLERANCE, Lockstep, equal, live_bytes, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(60)
ZERO = {"param_persistence_threshold": 0}
gathered = deepspeed.zero.GatheredParameters


def _shared(p: nn.Parameter) -> Tensor:
    return p.detach().share_memory_()


TAKEN: dict[str, Callable[[nn.Parameter], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "cpu": lambda p: p.detach().cpu(),
    "view": lambda p: p.detach().t()[1:],
    "numpy": lambda p: p.detach().numpy(),
    "memoryview": lambda p: memoryview(p.detach().numpy()),
    "dlpack": lambda p: dlpack.to_dlpack(p.data),
    "shared memory": _shared,
    "state_dict": lambda p: nn.ParameterList([p]).state_dict()["0"],
}


def _as_tensor(taken: Any) -> Tensor:
    if isinstance(taken, Tensor):
        return taken
    return dlpack.from_dlpack(taken) if type(taken).__name__ == "PyCapsule" else torch.as_tensor(np.asarray(taken))


def kept(how: str, born_sharded: bool) -> float:
    """Take something inside and keep it over exits and steps; the error of the training."""
    config = make_config(3, zero=ZERO)
    case = case_named("plain")

    def take(weight: nn.Parameter) -> tuple[Any, Tensor]:
        """What is taken, and the values that it is to keep."""
        with gathered(weight):
            values = weight.detach().clone()
            return TAKEN[how](weight), values.t()[1:] if how == "view" else values

    with deepspeed.zero.Init(config_dict_or_path=config, enabled=born_sharded):
        model = case.build().train()
    if born_sharded:
        early, values = take(model.head.weight)
        assert torch.equal(take(model.head.weight)[1], values)
        assert torch.equal(_as_tensor(early), values), "lost before initialize"
    pair = Lockstep(case, config, model=model)
    pair.step(0)
    taken, values = take(pair.engine.module.layers[1].up.weight)
    assert live_bytes(pair.engine.module) == 0, "not released"
    pair.step(1)
    assert not torch.equal(take(pair.engine.module.layers[1].up.weight)[1], values), "the step changed nothing"
    pair.step(2)
    found = _as_tensor(taken)
    assert torch.equal(found, values), "the values were lost"
    storage = StorageWeakRef(found.untyped_storage())
    del taken, found
    gc.collect()
    assert storage.expired(), "the memory of the alias was not given back"
    assert not_at_rest(pair.engine) == []
    return pair.finish()[0]


@pytest.mark.parametrize(
    "born_sharded", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["built", "zero_init"]
)
@pytest.mark.parametrize("how", TAKEN)
def test_what_is_taken_inside_keeps_its_values_after_the_exit(pool2: RankPool, how: str, born_sharded: bool) -> None:
    assert max(pool2.run(kept, how, born_sharded)) <= TOLERANCE


def evaluated_in_inference_mode(gathers: bool) -> float:
    """With an alias alive, so that the next gather, which is in inference mode, makes a new buffer."""
    pair = Lockstep(case_named("plain"), make_config(3, zero=ZERO))
    pair.step(0)
    params = list(pair.engine.module.parameters())
    with gathered(params):
        kept = [p.detach() for p in params]
    with torch.inference_mode():
        pair.engine.eval()
        if gathers:
            with gathered(params):
                kept += [p.detach() for p in params]
        pair.engine(pair.case.batch(here(0))[0])
        pair.engine.train()
    pair.step(1)
    pair.step(2)
    assert len(kept) > 0
    return pair.finish()[0]


@pytest.mark.parametrize("gathers", [False, True])
def test_training_goes_on_after_an_evaluation_in_inference_mode(pool2: RankPool, gathers: bool) -> None:
    """The buffer became an inference tensor, which no later gather could write to."""
    assert max(pool2.run(evaluated_in_inference_mode, gathers)) <= TOLERANCE


class Exporting(nn.Module):
    """Looks at its own weight through numpy in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 5)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.second.weight.detach().numpy())
        return self.second(self.first(x))


def exported_in_forward() -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model, plain = Exporting(), Exporting()
    plain.load_state_dict(model.state_dict())
    pair = Lockstep(case_named("plain"), make_config(3, zero=ZERO), model=model, plain=plain)
    for step in range(3):
        pair.step(step)
    for ours, theirs in zip(pair.engine.module.seen, plain.seen[::2], strict=True):
        assert ours.shape == theirs.shape
    return pair.finish()[0]


def test_a_forward_may_export_a_weight_to_numpy(pool2: RankPool) -> None:
    assert max(pool2.run(exported_in_forward)) <= TOLERANCE


class Large(nn.Module):
    """More than one row of the sums that edits are found by."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(96, 96) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)).square().mean()


@contextlib.contextmanager
def large(**changes: Any) -> Iterator[Any]:
    engine = start(Large(), make_config(3, zero=ZERO, **changes))
    yield engine
    engine.destroy()


def _assign(p: nn.Parameter) -> None:
    p.data = p.data + 1


def _numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[0, 0] += 1.0


def _swap(p: nn.Parameter) -> None:
    p.data[[0, 90]] = p.data[[90, 0]]


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "add_": lambda p: p.add_(1.0),
    "data": lambda p: p.data.mul_(2.0),
    "one element": lambda p: p.data[95, 95].fill_(7.0),
    "first element": lambda p: p.data[0, 0].fill_(7.0),
    "detach": lambda p: p.detach().zero_(),
    "numpy": _numpy,
    "assigned": _assign,
    "two rows exchanged": _swap,
}


def edited(how: str, ranks: tuple[int, ...]) -> str:
    """What an edit without a modifier says; one with a modifier is made."""
    with large() as engine:
        before = full_parameters(engine.module)
        weight = engine.module.blocks[0].weight

        def edit(modifier: int | None = None) -> None:
            with torch.no_grad(), gathered(weight, modifier_rank=modifier):
                if dist.get_rank() in ranks:
                    EDITS[how](weight)

        said = outcome(edit)
        assert not_at_rest(engine) == []
        assert equal(before, full_parameters(engine.module)), "the values changed"
        edit(ranks[0])
        assert not equal(before, full_parameters(engine.module)), "the modifier's edit was lost"
        return said


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("how", EDITS)
def test_an_edit_in_a_read_only_context_is_an_error_on_every_rank(
    pool2: RankPool, how: str, ranks: tuple[int, ...]
) -> None:
    for said in pool2.run(edited, how, ranks):
        assert "UsageError" in said and f"rank {ranks[0]}" in said and "modifier_rank" in said and "blocks.0" in said


def frozen_and_rounded(threshold: int) -> tuple[float, str, str]:
    """As adapters that are merged for an inference server and unmerged: how far the base moves; what is said; and what
    of an edit of trained weights.
    """
    model = Large()
    model.blocks[0].requires_grad_(False)
    engine = start(model, make_config(3, zero={"param_persistence_threshold": threshold}))
    base = full_parameters(engine.module)["blocks.0.weight"]

    def merged(block: int) -> None:
        with torch.no_grad(), gathered(list(engine.module.parameters())):
            weight = engine.module.blocks[block].weight
            weight.data += 1.0
            weight.data -= 1.0 + 1e-6

    for _ in range(2):
        engine.backward(engine(torch.ones(2, 96)))
        engine.step()
        said = outcome(lambda: merged(0))
    error = float((full_parameters(engine.module)["blocks.0.weight"] - base).abs().max())
    refused = outcome(lambda: merged(1))
    assert not_at_rest(engine) == []
    engine.destroy()
    return error, said, refused


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("threshold", [0, 10**6])
def test_adapters_may_be_merged_and_unmerged_in_a_read_only_context(
    pool1: RankPool, pool2: RankPool, threshold: int, ranks: int
) -> None:
    """Their base is frozen, and not bit for bit what it was (this was refused as an edit)."""
    for error, said, refused in (pool1, pool2)[ranks - 1].run(frozen_and_rounded, threshold):
        assert said == "" and error <= (0.0 if ranks == 2 and not threshold else 1e-5)
        assert "UsageError" in refused and "read-only" in refused and "blocks.0" not in refused


def no_edits(dtype: str) -> None:
    """What writes without an edit of the user's, or with a word about whose values count."""
    with large(**({dtype: {"enabled": True}} if dtype else {})) as engine:
        weight = engine.module.blocks[0].weight
        with torch.no_grad(), gathered(list(engine.module.parameters())):
            weight.add_(0)
            weight.data = weight.data.clone()
        with torch.no_grad(), gathered(weight):
            with gathered(weight, modifier_rank=1):
                weight.fill_(3.0)
            safe_set_full_fp32_param(weight, torch.full((96, 96), 4.0))
            assert bool((weight == 4.0).all()), "a value set inside is not seen there"
        assert bool((full_parameters(engine.module)["blocks.0.weight"] == 4.0).all()), "lost"
        assert not_at_rest(engine) == []


@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_writes_with_an_owner_are_no_edits(pool2: RankPool, dtype: str) -> None:
    pool2.run(no_edits, dtype)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add_(0)": lambda p: p.add_(0),
    "copy_ of itself": lambda p: p.copy_(p.clone()),
    "detach": lambda p: p.detach().mul_(1),
    "add_(1)": lambda p: p.add_(1),
}


def written(how: str, ranks: tuple[int, ...], checks: bool) -> list[str]:
    """What is said of in-place writes of ``ranks`` before there is an engine, and under one that has trained."""
    config = make_config(3, zero={**ZERO, "enable_sanity_checks": checks})
    case = case_named("plain")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = case.build().train()

    def write() -> None:
        with torch.no_grad(), gathered(model.head.weight):
            if dist.get_rank() in ranks:
                WRITES[how](model.head.weight)

    said = [outcome(write)]
    pair = Lockstep(case, config, model=model)
    pair.step(0)
    before = full_parameters(model)
    said.append(outcome(write))
    assert equal(before, full_parameters(model)), "the values changed"
    with gathered(model.head.weight):  # what has a word about whose values count is no such write
        with torch.no_grad(), gathered(model.head.weight, modifier_rank=0):
            model.head.weight.add_(0)
        pair.step(1)
    with torch.no_grad(), gathered(model.head.weight, modifier_rank=1):
        model.head.weight.add_(0)
    error, worst = pair.finish()
    assert error <= TOLERANCE, worst
    return said


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("how", WRITES)
def test_with_sanity_checks_any_write_in_a_read_only_context_is_an_error_on_every_rank(
    pool2: RankPool, how: str, ranks: tuple[int, ...]
) -> None:
    first, second = pool2.run(written, how, ranks, checks=True)
    assert first == second
    for said in first:
        assert "UsageError" in said and f"rank {ranks[0]}" in said and "enable_sanity_checks" in said
    assert "head.weight" in first[1]


def test_without_sanity_checks_a_write_that_changes_nothing_passes(pool2: RankPool) -> None:
    first, second = pool2.run(written, "add_(0)", (0, 1), checks=False)
    assert first == second == ["", ""]


def raising(where: str, modifier: int | None) -> str:
    """What ranks see where rank 1 raises inside; training goes on."""
    pair = Lockstep(case_named("plain"), make_config(3, zero=ZERO))
    model = pair.engine.module
    pair.step(0)
    before = full_parameters(model)

    def reach(place: str) -> None:
        if where == place and dist.get_rank() == 1:
            raise KeyError("the cause")

    def inside() -> None:
        with torch.no_grad(), gathered(model.head.weight, modifier_rank=modifier):
            if modifier is not None:
                model.head.weight.fill_(9.0)
            reach("before a gather")
            with gathered(model.layers[1].up.weight):
                reach("in a nested one")
            reach("after a gather")

    said = outcome(inside)
    assert not_at_rest(pair.engine) == []
    assert equal(before, full_parameters(model)), "an edit was kept"
    pair.step(1)
    error, worst = pair.finish()
    assert error <= TOLERANCE, worst
    return said


@pytest.mark.parametrize("modifier", [None, 0, 1])
@pytest.mark.parametrize("where", ["before a gather", "in a nested one", "after a gather"])
def test_a_rank_that_raises_inside_ends_the_context_on_every_rank(
    pool2: RankPool, where: str, modifier: int | None
) -> None:
    other, own = pool2.run(raising, where, modifier, time_limit=20)
    assert "KeyError" in own
    assert all(word in other for word in ("UsageError", "rank 1", "KeyError", "the cause")), other


def wrong_shape() -> str:
    with large() as engine:

        def edit() -> None:
            with gathered(engine.module.blocks[0].bias, modifier_rank=0):
                if dist.get_rank() == 1:
                    engine.module.blocks[0].bias.data = torch.ones(7)

        said = outcome(edit)
        assert not_at_rest(engine) == []
        return said


def test_a_fault_of_one_rank_at_the_exit_is_raised_on_all(pool2: RankPool) -> None:
    for said in pool2.run(wrong_shape, time_limit=20):
        assert "UsageError" in said and "rank 1" in said and "(7,)" in said


def step_inside(dtype: str, modifier: int | None) -> float:
    """The largest difference of a loss from those of a run without the context."""
    case = case_named("plain")
    changes = {"bf16": {"enabled": True}} if dtype else {}
    engine = start(case.build().train(), make_config(3, zero=ZERO, **changes))
    model = engine.module
    with gathered(list(model.parameters()), modifier_rank=modifier):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        alias = model.head.weight.detach()
        losses = train_step(engine, case, 0)
        inside = {n: p.detach().clone() for n, p in model.named_parameters()}
        assert torch.equal(alias, inside["head.weight"]), "an alias taken inside shows the old values"
        losses += train_step(engine, case, 1)
        after = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert not [n for n in before if torch.equal(before[n], inside[n]) or torch.equal(inside[n], after[n])]
    assert equal(after, full_parameters(model)), "the values inside were not those of the step"
    other = start(case.build().train(), make_config(3, zero=ZERO, **changes))
    expected = [loss for step in range(2) for loss in train_step(other, case, step)]
    assert equal(after, full_parameters(other.module)), "not as a run without the context"
    assert not_at_rest(engine) == []
    engine.destroy()
    other.destroy()
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


@pytest.mark.parametrize("modifier", [None, 0])
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_a_step_inside_shows_the_new_values(pool2: RankPool, dtype: str, modifier: int | None) -> None:
    assert pool2.run(step_inside, dtype, modifier) == [0.0, 0.0]


def small_one_edited() -> str:
    with large() as engine:

        def edit() -> None:
            with torch.no_grad(), gathered(list(engine.module.parameters())):
                engine.module.blocks[1].bias.add_(1.0)

        return outcome(edit)


def test_small_parameters_are_looked_at_too(pool2: RankPool) -> None:
    assert all("UsageError" in said for said in pool2.run(small_one_edited))


class _Reads(nn.Module):
    """A block that reads its own weight through a context inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        with gathered([self.weight]):
            scale = self.weight.detach().abs().sum()
        return x @ self.weight / scale


class _Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Reads(), _Reads()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, skip: bool) -> Tensor:  # noqa: FBT001 - what a model takes
        return self.head(self.blocks[1](x) if skip else self.blocks[1](self.blocks[0](x))).mean()


def _one_rank_skips_the_reader() -> int:
    torch.manual_seed(0)
    engine = start(_Skips(), make_config(3, zero=ZERO))
    for step in range(6):
        engine.backward(engine(torch.ones(2, 4), step % 2 == 1 and dist.get_rank() == 1))
        engine.step()
    steps = engine.global_steps
    engine.destroy()
    return steps


def test_a_reader_inside_a_forward_waits_for_nobody(pool2: RankPool) -> None:
    """A rank may skip the module whose forward opens the context."""
    assert pool2.run(_one_rank_skips_the_reader, time_limit=60) == [6, 6]


def assigned(transposed: bool) -> None:
    """The owner puts a tensor of its own (fp32, or a view of the values) in the place of a bf16 one."""
    with large(bf16={"enabled": True}) as engine:
        weight = engine.module.blocks[0].weight
        before = full_parameters(engine.module)["blocks.0.weight"]
        value = before.t().clone() if transposed else torch.arange(96 * 96.0).view(96, 96) / 1000
        owner = dist.get_world_size() - 1
        with gathered(weight, modifier_rank=owner):
            if dist.get_rank() == owner:
                weight.data = weight.data.t() if transposed else value
        with gathered(weight):
            assert torch.equal(weight, value.to(weight.dtype)), "not the owner's values"
        assert not_at_rest(engine) == []


@pytest.mark.parametrize("transposed", [False, True], ids=["fp32", "view"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_that_the_owner_assigns_reaches_every_rank(
    pool1: RankPool, pool2: RankPool, ranks: int, transposed: bool
) -> None:
    (pool1, pool2)[ranks - 1].run(assigned, transposed)
