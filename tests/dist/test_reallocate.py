"""Weights move from one layout of ranks to another: the target computes what the source computes, every byte travels
once to each rank that lacks it, and a plan is good for every later step.
"""

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.comm.point_to_point import exchange
from deepspeed.monitor import hostmem
from deepspeed.pipe.plain import cut_model
from deepspeed.reallocate import ParameterReallocation
from deepspeed.tensor.layers import LinearLayer
from deepspeed.zero.plan import StateKind
from tests.harness.decoders import Llama, batch, loss_of
from tests.harness.pool import RankPool
from tests.harness.spy import CollectiveSpy
from tests.harness.training import ADAMW, make_config, outcome, start

ZERO = {"param_persistence_threshold": 20, "reduce_bucket_size": 400}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero3": {"stage": 3},
    "zero3 on the host": {"stage": 3, "zero": dict.fromkeys(("offload_param", "offload_optimizer"), {"device": "cpu"})},
    "zero3 in groups": {"stage": 3, "zero": {"mics_shard_size": 2}},
    "bf16": {"stage": 3, "bf16": {"enabled": True}},
    "tp2": {"stage": 0, "tp": 2},
    "tp2 zero1": {"stage": 1, "tp": 2},
    "tp2 zero3": {"stage": 3, "tp": 2},
    "tp4": {"stage": 0, "tp": 4},
    "tp2 to generate": {"stage": 0, "tp": 2, "optimizer": None},
    "pp2": {"stage": 1, "pp": 2},
    "bf16 zero1": {"stage": 1, "bf16": {"enabled": True}},
    "late": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu", "delayed_update": True}}},
    "early": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
}  # fmt: skip


def model(*, other: bool = False) -> nn.Module:
    made = Llama(tied=True, bias=True)
    if other:
        with torch.no_grad():
            for p in made.parameters():
                p.fill_(-3.0)
    return made


def engine_of(layout: str, *, other: bool = False, ranks: tuple[int, ...] | None = None) -> Any:
    """An engine of ``model``; of other weights, so that what is not moved is seen."""
    facts = dict(LAYOUTS[layout])
    stage, zero, tp, pp = facts.pop("stage"), facts.pop("zero", {}), facts.pop("tp", 1), facts.pop("pp", 1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage, **ZERO, **zero},
        "tensor_parallel": {"autotp_size": tp},
        **facts,
    }
    module = model(other=other)
    if pp > 1:
        module = cut_model(module, pp, loss_fn=lambda out, labels: out.square().mean())
        config["gradient_accumulation_steps"] = 2
    how: dict[str, Any] = {}
    if ranks is not None:
        made = dist.new_group(list(ranks))
        how["mpu"] = SimpleNamespace(get_data_parallel_group=lambda: made)
        if dist.get_rank() not in ranks:
            return None
    return start(module, {k: v for k, v in config.items() if v is not None}, **how)


def whole(engine: Any) -> dict[str, Tensor]:
    return {n: t.clone() for bucket in engine.stream_weights() for n, t in bucket}


def logits(engine: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = engine(batch(3, 0))
    return out.float()


def train(engine: Any, turn: int) -> None:
    engine.backward(loss_of(engine, batch(turn, 0)))
    engine.step()


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n].to(one[n])) for n in one)


def between(first: str, second: str) -> dict[str, Any]:
    """There, after a step again, and back."""
    source, target = engine_of(first), engine_of(second, other=True)
    piped, to_piped = ("pp" in LAYOUTS[name] for name in (first, second))
    trains, is_trained = (LAYOUTS[name].get("optimizer", True) for name in (first, second))
    there = ParameterReallocation(source, target, max_bytes=3000)
    with CollectiveSpy() as spy:
        there.run()
    found = {"moved": spy.nbytes("isend"), "plan": there.plan, "equal": equal(whole(source), whole(target))}
    if not (piped or to_piped):
        found["forward"] = float((logits(source) - logits(target)).abs().max())
        if trains:
            train(source, 0)
        there.run()
        found["again"] = equal(whole(source), whole(target))
    before = whole(target)
    if is_trained and not to_piped:
        train(target, 1)
        ParameterReallocation(target, source, max_bytes="1MB").run()
        found["back"] = equal(whole(source), whole(target)) and not equal(before, whole(source))
        if trains and not piped:
            train(source, 2)
            found["goes on"] = not equal(whole(source), whole(target))
    for engine in (source, target):
        engine.destroy()
    return found


PAIRS = [
    ("zero3", "tp2 zero1"), ("tp2 zero3", "zero3"), ("zero3 in groups", "tp2 to generate"), ("pp2", "tp2"),
    ("zero3 on the host", "zero1"), ("tp4", "tp2 zero3"),
]  # fmt: skip


@pytest.mark.in_make_test("zero3-tp2 zero1", "zero3 in groups-tp2 to generate", "pp2-tp2")
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_any_layout_becomes_any_other_and_back(pool4: RankPool, first: str, second: str) -> None:
    answers = pool4.run(between, first, second)
    plan = answers[0]["plan"]
    assert sum(found["moved"] for found in answers) == plan.bytes_moved == plan.lower_bound > 0
    for found in answers:
        assert found["plan"] == plan, "the same on all ranks"
        assert found["equal"] and found.get("again", True) and found.get("back", True) and found.get("goes on", True)
        assert found.get("forward", 0.0) <= 1e-5
    for rank, found in enumerate(answers):
        assert found["moved"] == plan.sent[rank]


# -- some ranks train, others generate --------------------------------------------------------------------------------
def two_and_two(layout: str) -> dict[str, Any]:
    """Ranks 0 and 1 train, 2 and 3 (or rank 3, a module without an engine) generate."""
    source = engine_of("zero3", ranks=(0, 1))
    rank, found = dist.get_rank(), dict[str, Any]()
    target: Any = None
    if layout != "a module":
        target = engine_of(layout, other=True, ranks=(2, 3))
    elif rank == 3:
        target = model(other=True)
    there = ParameterReallocation(source, target, max_bytes="100KB")
    for turn in range(2):
        if source is not None:
            train(source, turn)
        there.run()
    found["plan"], found["logits"] = there.plan, logits(source or target) if source or target else None
    if source is not None:
        found["before"] = whole(source)
        train(source, 2)
    ParameterReallocation(target, source).run()
    if source is not None:
        found["back"] = equal(found["before"], whole(source))
    for engine in (source, target):
        if engine is not None and not isinstance(engine, Llama):
            engine.destroy()
    return found


@pytest.mark.in_make_test("tp2 to generate", "a module")
@pytest.mark.parametrize("layout", ["tp2 to generate", "zero3", "a module"])
def test_ranks_that_train_feed_ranks_that_generate(pool4: RankPool, layout: str) -> None:
    answers = pool4.run(two_and_two, layout)
    plan = answers[0]["plan"]
    assert plan.bytes_moved == plan.lower_bound and all(found["plan"] == plan for found in answers)
    for found in answers[2:]:
        assert found["logits"] is None or (found["logits"] - answers[0]["logits"]).abs().max() <= 1e-5
    assert answers[3]["logits"] is not None and all(found["back"] for found in answers[:2])
    copies = 1 if layout == "a module" else 2
    assert set(plan.received) == {2, 3} if copies == 2 else {3}


def parts_of_a_client(convert: bool) -> tuple[str, list[float]]:  # noqa: FBT001
    """A bf16 engine fills a module of fp32 DTensors; why not, and the errors."""
    source, target = engine_of("bf16"), model(other=True)
    mesh = init_device_mesh("cpu", (2,))
    for module in target.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p.dim() == 2 and module is not target.lm_head and module is not target.model.embed_tokens:
                setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(p.shape[0] % 2)])))
    kept: list[Any] = []
    why = outcome(lambda: kept.append(ParameterReallocation(source, target, convert_dtype=convert)))
    errors = []
    if kept:
        kept[0].run()
        right = whole(source)
        for name, p in target.named_parameters():
            values: Any = p.detach()
            values = values.full_tensor() if hasattr(values, "full_tensor") else values
            errors.append(float((right[name].float() - values).abs().max()))
        assert kept[0].plan.bytes_moved == kept[0].plan.lower_bound <= 2 * sum(t.numel() for t in right.values())
    source.destroy()
    return why, errors


def test_a_client_s_parts_are_filled_in_their_dtype_when_that_is_asked_for(pool2: RankPool) -> None:
    for why, _ in pool2.run(parts_of_a_client, False):
        assert "UsageError" in why and "is torch.bfloat16 in the source and torch.float32 in the target" in why
    for why, errors in pool2.run(parts_of_a_client, True):
        assert why == "" and errors and max(errors) == 0.0


def layers_in_parts(parts: list[int]) -> list[bool]:
    """Ranks 0 and 1 share a layer of which they fill one on ranks 2 and 3, and a whole one on rank 3."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def layer(value: float) -> nn.Sequential:
        torch.manual_seed(3)
        linear = nn.Linear(4, 6)
        with torch.no_grad():
            linear.weight.mul_(value)
        return nn.Sequential(LinearLayer(linear, groups[rank // 2], parts=parts))

    mine = layer(1.0 if rank < 2 else -1.0)
    torch.manual_seed(3)
    right, whole_one = nn.Linear(4, 6), nn.Sequential(nn.Linear(4, 6))
    ParameterReallocation(mine if rank < 2 else None, mine if rank > 1 else None).run()
    ParameterReallocation(mine if rank > 1 else None, whole_one if rank == 3 else None).run()
    found = [torch.equal(mine[0].weight, layer(1.0)[0].weight)]
    return found if rank < 3 else [*found, torch.equal(whole_one[0].weight, right.weight)]


@pytest.mark.parametrize("parts", [[], [2, 4]])
def test_layers_in_parts_without_an_engine_are_no_replicas(pool4: RankPool, parts: list[int]) -> None:
    assert pool4.run(layers_in_parts, parts) == [[True], [True], [True], [True, True]]


# -- what a target that trains goes on with ---------------------------------------------------------------------------
def masters_of(engine: Any) -> list[Tensor]:
    return [u.master.clone() for u in engine.runtime.units if u.master is not None]


def masters(layout: str) -> tuple[bool, bool, float]:
    """Whether masters keep their bits where the same weights come back, follow where others come, and lead then."""
    trainer, generator = engine_of(layout), engine_of("bf16", other=True)
    train(trainer, 0)
    before = masters_of(trainer)
    ParameterReallocation(trainer, generator).run()
    back = ParameterReallocation(generator, trainer)
    back.run()
    same = all(torch.equal(a, b) for a, b in zip(before, masters_of(trainer), strict=True))
    train(generator, 1)
    back.run()
    expected = whole(generator)
    follows = equal(expected, whole(trainer))
    with torch.no_grad():
        for group in trainer.basic_optimizer.param_groups:
            group["lr"] = 0.0
    train(trainer, 2)  # publishes from the masters
    error = max(float((expected[n] - t).abs().max()) for n, t in whole(trainer).items())
    trainer.destroy()
    generator.destroy()
    return same, follows, error


@pytest.mark.in_make_test("bf16 zero1")
@pytest.mark.parametrize("layout", ["bf16", "bf16 zero1"])
def test_masters_follow_and_keep_what_rounds_to_the_same(pool2: RankPool, layout: str) -> None:
    for same, follows, error in pool2.run(masters, layout):
        assert same and follows and error == 0.0


def under_way(layout: str) -> bool:
    """Moved right after a step whose update is not over; what is not late is as without offload."""
    source, target = engine_of(layout), engine_of("zero3", other=True)
    beside = [engine_of("zero1")] if layout == "early" else []
    there, good = ParameterReallocation(source, target), True
    for turn in range(3):
        for engine in (source, *beside):
            train(engine, turn)
        there.run()
        moved = whole(target)
        good = good and equal(whole(source), moved)
        good = good and all((moved[n] - t).abs().max() <= 1e-5 for plain in beside for n, t in whole(plain).items())
    for engine in (source, target, *beside):
        engine.destroy()
    return good


@pytest.mark.parametrize("layout", ["late", "early"])
def test_an_update_under_way_is_waited_for(pool2: RankPool, layout: str) -> None:
    assert pool2.run(under_way, layout) == [True, True]


class Pieces(nn.Module):
    """Parameters of one size in one unit."""

    def __init__(self, names: str, value: float) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((50,), value)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(p * x).sum() for p in self.parameters()]).sum()


def ahead(keys: dict[str, Any]) -> list[float]:
    """By how much what is not moved differs from a run in which nothing was moved: weights, masters."""
    config = make_config(2, zero={"offload_optimizer": {"device": "cpu"}, **keys}, bf16={"enabled": True})
    engine, plain = start(Pieces("abc", 1.0), config), start(Pieces("abc", 1.0), config)
    source = Pieces("a", 5.0).bfloat16()
    there = ParameterReallocation(source, engine, strict=False)
    errors = []
    for turn in range(4):
        for each in (engine, plain):
            each.backward(each(torch.full((50,), 1.0 + turn, dtype=torch.bfloat16)).float())
            each.step()
        there.run()
        one, two = whole(engine), whole(plain)
        assert torch.equal(one["a"], source.a)
        errors += [float((one[n] - two[n]).abs().max()) for n in "bc"]
        for unit, other in zip(engine.runtime.units, plain.runtime.units, strict=True):
            with unit.values(StateKind.OPTIM) as ours, other.values(StateKind.OPTIM) as theirs:
                for segment in unit.layout.segments[1:]:
                    part = unit.part(StateKind.OPTIM, segment, ours) - unit.part(StateKind.OPTIM, segment, theirs)
                    errors.append(float(part.abs().sum()))
    for each in (engine, plain):
        each.destroy()
    return errors


LATE = {
    "delayed": {"offload_optimizer": {"device": "cpu", "delayed_update": True}},
    "zenflow": {"zenflow": {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 2, "update_interval": 2}},
}


@pytest.mark.parametrize("way", LATE)
def test_masters_that_are_ahead_of_what_is_not_moved_stay_ahead(pool2: RankPool, way: str) -> None:
    for errors in pool2.run(ahead, LATE[way]):
        assert max(errors) == 0.0


class Odd(nn.Module):
    """Parameters and buffers of every kind that has a border: no dimension, no element, one, other dtypes, strides."""

    def __init__(self, value: int, *, strides: bool = False) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5 * value))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.full((1, 1, 1), 2.0 * value))
        self.frozen = nn.Parameter(torch.arange(7.0) * value, requires_grad=False)
        self.narrow = nn.Parameter(torch.arange(5).half() * value, requires_grad=False)
        matrix = (torch.arange(12.0) * value).view(3, 4).t()
        self.turned = nn.Parameter(matrix if strides else matrix.contiguous())
        self.register_buffer("count", torch.tensor(3 * value))
        self.register_buffer("flags", torch.tensor([value == 1, value != 1]))
        self.register_buffer("codes", (torch.arange(9) * value).to(torch.int8))
        self.register_buffer("waves", torch.arange(4.0).to(torch.complex128) * value)
        self.register_buffer("nothing", torch.empty(2, 0))


def odd(stage: int, most: int) -> list[str]:
    """Names of what does not arrive: in a module on the other rank, and in an engine from a module with strides."""
    right = Odd(1).state_dict()
    engine, source = start(Odd(1), make_config(stage)), Odd(1, strides=True)
    target = Odd(2) if dist.get_rank() == 1 else None
    ParameterReallocation(engine, target, max_bytes=most).run()
    wrong = [n for n, t in target.state_dict().items() if not torch.equal(t, right[n])] if target is not None else []
    other = start(Odd(5), make_config(3 - stage))
    ParameterReallocation(source if dist.get_rank() == 0 else None, other, max_bytes=most).run()
    moved = whole(other)
    wrong += [n for n, t in right.items() if not torch.equal(moved[n], t)]
    engine.destroy()
    other.destroy()
    return wrong


@pytest.mark.parametrize(("stage", "most"), [(0, 1), (3, 1 << 20)])
def test_tensors_of_every_kind_arrive(pool2: RankPool, stage: int, most: int) -> None:
    assert pool2.run(odd, stage, most) == [[], []]


def from_a_drive(folder: str) -> bool:
    place = {"device": "nvme", "nvme_path": folder}
    config = make_config(3, zero={"offload_param": place, "offload_optimizer": place}, bf16={"enabled": True})
    on_drive, plain = start(model(), config), engine_of("bf16", other=True)
    ParameterReallocation(on_drive, plain, max_bytes=2000).run()
    good = equal(whole(on_drive), whole(plain))
    train(plain, 0)
    ParameterReallocation(plain, on_drive, max_bytes=2000).run()
    good = good and equal(whole(on_drive), whole(plain))
    for engine in (on_drive, plain):
        engine.destroy()
    return good


def test_weights_on_drives_come_and_go(pool2: RankPool, tmp_path: Any) -> None:
    assert pool2.run(from_a_drive, str(tmp_path)) == [True, True]


# -- costs ------------------------------------------------------------------------------------------------------------
WIDTH, LAYERS = 1100, 8  # blocks that glibc gives back


def peaks(limits: list[int]) -> list[tuple[int, int]]:
    """By how many bytes this process grew at most in a run under each limit; control messages of the run."""

    def wide() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    config = make_config(3, zero={"param_persistence_threshold": 0})
    source, target = start(wide(), config), start(wide(), make_config(0, optimizer=None))
    found = []
    for max_bytes in limits:
        there = ParameterReallocation(source, target, max_bytes=max_bytes)
        gc.collect()
        hostmem.HeapTrimmer().trim()
        dist.barrier()
        assert hostmem.reset_peak_rss()
        before = hostmem.rss_bytes()
        with CollectiveSpy() as spy:
            there.run()
        found.append((hostmem.peak_rss_bytes() - before, spy.count("all_gather_object")))
    source.destroy()
    target.destroy()
    return found


def test_a_run_holds_its_messages_and_plans_nothing(pool2: RankPool) -> None:
    model_bytes = 4 * WIDTH * WIDTH * LAYERS
    bounded, at_once = zip(*pool2.run(peaks, [4 << 20, 1 << 30]), strict=True)
    for grown, control in bounded:
        assert grown <= (4 << 20) + (8 << 20), grown
        assert control == 2, "before and after"
    assert max(grown for grown, _ in at_once) >= 0.4 * model_bytes, "a control: one round"


def grouped() -> list[float]:
    """What comes of messages posted as one group, as on nccl."""
    group = replace(plain_mesh("gloo").job, backend="posts as one")
    peer, out = 1 - group.index, torch.zeros(5)
    work = exchange(
        [(torch.full((3 + 2 * peer,), float(group.index + 1)), peer)], [(out[: 3 + 2 * group.index], peer)], group
    )
    work.wait()
    return out.tolist()


def test_messages_may_be_posted_as_one_group(pool2: RankPool) -> None:
    assert pool2.run(grouped) == [[2.0, 2.0, 2.0, 0.0, 0.0], [1.0] * 5]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", [name for name in LAYOUTS if not LAYOUTS[name].get("bf16")])
def test_every_layout_becomes_every_other(pool4: RankPool, first: str) -> None:
    for second in (name for name in LAYOUTS if not LAYOUTS[name].get("bf16")):
        answers = pool4.run(between, first, second)
        assert all(found["equal"] and found.get("back", True) for found in answers), (first, second)
        plan = answers[0]["plan"]
        assert plan.bytes_moved == plan.lower_bound == sum(found["moved"] for found in answers)
