"""What a client of a pipeline engine sees: evaluation, sources of data, places, parameters that several stages hold."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.utils import RepeatingLoader, safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.harness import pipes
from tests.harness.pool import RankPool
from tests.harness.training import outcome

pytestmark = pytest.mark.timeout(120)
MICROS = (3, 2, 4)  # micro-batches of batches that follow each other


def _module(**options: Any) -> PipelineModule:
    return PipelineModule(pipes.layers(), num_stages=2, loss_fn=pipes.cross_entropy, **options)


def _expected(count: int, model: pipes.Plain | None = None) -> tuple[float, list[Tensor]]:
    """Mean loss and outputs of so many micro-batches in one process."""
    model = model or pipes.Plain(pipes.layers())
    with torch.no_grad():
        pairs = [pipes.micro_batch(0, micro, 0) for micro in range(count)]
        outputs = [model(tokens) for tokens, _ in pairs]
        losses = [float(pipes.cross_entropy(out, labels)) for out, (_, labels) in zip(outputs, pairs, strict=True)]
    return sum(losses) / count, outputs


def _evaluates(level: int) -> dict[str, Any]:
    engine = pipes.start(_module(), pipes.config(level, 4, pipeline={"schedule": "interleaved", "chunks_per_stage": 2}))
    data = lambda: pipes.batches(0, micros=4)  # noqa: E731
    out = {"mean": engine.eval_batch(data()), "two": engine.eval_batch(data(), num_micro_batches=2)}
    out["logits"] = engine.eval_batch(data(), return_logits=True)
    out["outputs"] = engine.eval_batch(data(), reduce_output=None)
    out["here"] = engine.eval_batch(data(), bcast_loss=False)
    out["other"] = outcome(lambda: engine.eval_batch(data(), reduce_output="max"))
    before = engine.module.training
    out["trained"] = [float(engine.train_batch(data())), float(engine.eval_batch(data()))]
    out["last"], out["training"] = engine.is_last_stage(), (before, engine.module.training)
    engine.destroy()
    return out


@pytest.mark.parametrize("level", [0, 3])
def test_eval_batch(pool2: RankPool, level: int) -> None:
    mean, outputs = _expected(4)
    for out in pool2.run(_evaluates, level):
        assert float(out["mean"]) == pytest.approx(mean, rel=1e-6)
        assert float(out["two"]) == pytest.approx(_expected(2)[0], rel=1e-6)
        loss, logits = out["logits"]
        assert float(loss) == pytest.approx(mean, rel=1e-6)
        assert "NotYetError" in out["other"] and out["training"] == (True, True)
        assert out["trained"][0] == pytest.approx(mean, rel=1e-6) and out["trained"][1] < mean
        if out["last"]:
            torch.testing.assert_close(logits, outputs)
            torch.testing.assert_close(out["outputs"], outputs)
            assert float(out["here"]) == pytest.approx(mean, rel=1e-6)
        else:
            assert logits is None and out["outputs"] is None and out["here"] is None


def _reads(how: str) -> tuple[list[float], Any]:
    pairs = [pipes.micro_batch(0, micro, 0) for micro in range(4)]
    dataset = [(tokens[row], labels[row]) for tokens, labels in pairs for row in range(pipes.SAMPLES)]
    extra = {"training_data": dataset} if how == "training_data" else {}
    engine, _, loader, _ = deepspeed.initialize(model=_module(), config=pipes.config(1, 4), **extra)
    if how == "set_dataiterator":
        engine.set_dataiterator(iter(RepeatingLoader(pairs)))
    elif how == "set_dataloader":
        engine.set_dataloader(pairs)
    elif how == "set_batch_fn":
        engine.set_batch_fn(lambda item: (item["x"], item["y"]))
        engine.set_dataiterator(iter(RepeatingLoader([{"x": x, "y": y} for x, y in pairs])))
    losses = [float(engine.train_batch()) for _ in range(2)]
    places = (engine.is_first_stage(), engine.is_last_stage(), engine.get_pipeline_parallel_rank(), engine.num_stages)
    counters = (engine.global_steps, engine.micro_steps, engine.global_samples, engine.train_batch_size())
    engine.destroy()
    return losses, (places, counters, loader is not None)


@pytest.mark.in_make_test("training_data", "set_batch_fn")
@pytest.mark.parametrize("how", ["training_data", "set_dataiterator", "set_dataloader", "set_batch_fn"])
def test_sources_of_data(pool2: RankPool, how: str) -> None:
    for rank, (losses, (places, counters, loads)) in enumerate(pool2.run(_reads, how)):
        assert places == (rank == 0, rank == 1, rank, 2) and counters == (2, 8, 16, 8)
        assert loads == (how == "training_data")
        if how != "training_data":  # a loader shuffles
            assert losses[0] == pytest.approx(_expected(4)[0], rel=1e-6)
        assert losses[1] != losses[0]


def _surface() -> list[Any]:
    module = _module()
    before = module.get_tied_weights_and_groups()
    engine = pipes.start(module, pipes.config(1, 4))
    ((weight, group),) = module.get_tied_weights_and_groups()
    assert engine.mpu is engine.grid and engine.mpu.get_pipe_parallel_world_size() == 2
    facts = [before, weight is module.tied_modules["embed"].weight, dist.get_process_group_ranks(group)]
    calls = module.allreduce_tied_weight_gradients, lambda: module.ckpt_layer_path("saved", 3)
    facts += [outcome(call) for call in calls]
    engine.destroy()
    return facts


def test_what_stages_share_is_listed_and_what_is_not_there_is_refused(pool2: RankPool) -> None:
    for before, same, ranks, reduce, path in pool2.run(_surface):
        assert before == [] and same and ranks == [0, 1]
        assert "PipelineError" in reduce and "delete this call" in reduce
        assert "checkpoints have no file for each layer" in path and "saved" in path


def _between(level: int, schedule: str, folder: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Batches of 3, 2 and 4 micro-batches; between them evaluations, a batch that fails, and one that is taken back."""
    armed: list[int] = []

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        if armed and armed.pop() == 0:
            raise ValueError("odd labels")
        return pipes.cross_entropy(output, labels)

    pipeline = {"schedule": schedule, "chunks_per_stage": 2 if schedule == "interleaved" else 1}
    engine = pipes.engine_of(pipes.layers(), pipes.config(level, 3, pipeline=pipeline), loss_fn=loss_fn)
    way, losses, norms = engine.mesh.data.index, list[float](), list[float]()
    data = lambda step, micros: iter([pipes.micro_batch(step, micro, way) for micro in range(micros)])  # noqa: E731
    for step, micros in enumerate(MICROS):
        engine.set_train_batch_size(micros * pipes.SAMPLES * engine.mesh.data.size)
        losses.append(float(engine.train_batch(data(step, micros))))
        norms.append(engine.get_global_grad_norm())
        if step < 2:
            engine.eval_batch(data(7, 5), num_micro_batches=5)
            armed[:] = [0, 1]  # at its second micro-batch
            failed = outcome(lambda: engine.train_batch(data(8, engine.gradient_accumulation_steps())))
            assert "odd labels" in failed, failed
            engine.save_checkpoint(folder, tag=f"step{step}")
            engine.train_batch(data(9, engine.gradient_accumulation_steps()))
            engine.load_checkpoint(folder, tag=f"step{step}")
            armed.clear()
    params = full_parameters(engine.module)
    engine.destroy()
    return losses, norms, params


@pytest.mark.parametrize(
    ("ranks", "level", "schedule"),
    [
        (2, 0, "eager_1f1b"),
        (4, 3, "zero_bubble"),
        pytest.param(4, 1, "1f1b", marks=pytest.mark.exhaustive),
        pytest.param(4, 2, "interleaved", marks=pytest.mark.exhaustive),
    ],
)
def test_batches_of_other_sizes_train_as_one_process_whatever_comes_between_them(
    request: pytest.FixtureRequest, tmp_path: Any, ranks: int, level: int, schedule: str
) -> None:
    """Sums of a batch are added in memory that the one before has left."""
    expected = pipes.plain_run(pipes.layers(), micros=MICROS, data_ranks=ranks // 2)
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    for found in pool.run(_between, level, schedule, str(tmp_path)):
        assert pipes.worst(found, expected) <= 1e-6


def _freeze(model: Any, step: int) -> None:
    """What the first stage has stands still in the second batch."""
    for name, param in model.named_parameters():
        param.requires_grad_(step != 1 or name[0] not in "0123")


def _frozen_between(level: int) -> Any:
    module = PipelineModule(
        pipes.layers(tied=False), num_stages=2, loss_fn=pipes.cross_entropy, partition_method="uniform"
    )
    engine = pipes.start(module, pipes.config(level, 4))

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        for step, micro in itertools.product(range(4), range(4)):
            _freeze(module, step)
            yield pipes.micro_batch(step, micro, 0)

    return pipes.trained(engine, data(), steps=4)


@pytest.mark.parametrize("level", [0, 3])
def test_a_stage_may_be_frozen_and_trained_again_between_batches(pool2: RankPool, level: int) -> None:
    plain = pipes.Plain(pipes.layers(tied=False))

    def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
        _freeze(plain, step)
        return pipes.micro_batch(step, micro, rank)

    expected = pipes.plain_run(plain, steps=4, batch=batch)
    for found in pool2.run(_frozen_between, level):
        assert pipes.worst(found, expected) <= 1e-6


def _frozen() -> str:
    module = _module(partition_method="uniform")
    for name, param in module.named_parameters():
        param.requires_grad_(name.partition(".")[0] not in ("tied_modules", "1", "2", "3"))
    return outcome(lambda: pipes.start(module, pipes.config(3, 4)))


def test_a_stage_that_trains_nothing_is_named_on_all_ranks(pool2: RankPool) -> None:
    for text in pool2.run(_frozen):
        assert "OptimizerConfigError" in text and "rank 0 (pipeline stage 0, layers 0-3): " in text
        assert "got no parameters" in text and "rank 1" not in text


def _grids() -> list[Any]:
    alone = PipelineParallelGrid()
    grid = PipelineParallelGrid(topology=PipeDataParallelTopology(2, 1), process_group=dist.group.WORLD)
    groups = grid.get_pipe_parallel_group(), grid.get_data_parallel_group(), grid.get_model_parallel_group()
    found = [dist.get_process_group_ranks(group) for group in (*groups, alone.get_data_parallel_group())]
    module = _module()
    refused = outcome(lambda: pipes.start(module, pipes.config(0, 4), mpu=grid))
    engine = pipes.start(module, pipes.config(0, 4))
    module.set_checkpoint_interval(1)
    engine.set_has_attention_mask(True)
    engine.reset_activation_shape()
    more = engine.get_additional_losses(), module.partitions(), module.stage_owner(7), module.topology().world_size()
    ranks = dist.get_process_group_ranks(module.mpu().get_pipe_parallel_group())
    engine.destroy()
    return [
        found,
        grid.get_stage_id(),
        alone.get_data_parallel_rank(),
        refused,
        more,
        ranks,
        engine.grid is module.mpu(),
    ]


def test_a_grid_is_made_by_clients_or_by_the_engine(pool2: RankPool) -> None:
    for rank, (found, stage, way, refused, more, ranks, same) in enumerate(pool2.run(_grids)):
        assert found == [[0, 1], [rank], [rank], [0, 1]] and stage == way == rank
        assert "mpu" in refused and more == (None, [0, 4, 8], 1, 2) and ranks == [0, 1] and same


def _tied(level: int) -> tuple[Tensor, Tensor, list[str]]:
    engine = pipes.start(_module(), pipes.config(level, 4))
    engine.train_batch(pipes.batches(engine.mesh.data.index, micros=4))
    weight = engine.module.tied_modules["embed"].weight
    values = safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg")
    names = [unit.facts.tie for unit in engine.runtime.units if unit.facts.tie]
    engine.destroy()
    return *values, names


@pytest.mark.parametrize("level", [1, 3])
def test_a_tied_parameter_is_one_on_all_stages(pool4: RankPool, level: int) -> None:
    answers = pool4.run(_tied, level)
    for weight, moment, names in answers:
        assert names == ["tied_modules.embed.weight"]
        assert torch.equal(weight, answers[0][0]) and torch.equal(moment, answers[0][1]) and moment.any()
    expected = pipes.plain_run(pipes.layers(), data_ranks=2, steps=1)[2]
    torch.testing.assert_close(answers[0][0], expected[names[0]])


def _cuts() -> tuple[list[list[int]], set[str]]:
    """Cuts by four methods; the layers that this rank has of the first one."""
    specs = [LayerSpec(pipes.Embed, 1), *(LayerSpec(pipes.Block, i) for i in range(4)), LayerSpec(pipes.Head, 2)]
    sample = torch.zeros(2, 3, dtype=torch.int64)
    modules = [PipelineModule(specs, 2, partition_method=by) for by in ("uniform", "parameters", [9, 1, 1, 1, 1, 1])]
    measured = PipelineModule(specs, 2, partition_method="profile", sample_input=sample).partitions()
    assert modules[0].stage_owner(5) == 1 and modules[0].num_pipeline_stages() == 2
    built = {name.partition(".")[0] for name, _ in modules[0].named_parameters()}
    return [*[module.partitions() for module in modules], measured], built


def test_ways_to_cut_and_a_stage_builds_its_layers_only(pool2: RankPool) -> None:
    (first, layers), (second, others) = pool2.run(_cuts)
    assert first == second, "ranks that measure would cut in different places"
    assert first[:3] == [[0, 3, 6], [0, 3, 6], [0, 1, 6]] and first[3][0] == 0 and first[3][2] == 6
    assert layers == {"0", "1", "2"} and others == {"3", "4", "5"}


def _load(module: PipelineModule, values: dict[str, Tensor]) -> None:
    here = {name for name, _ in module.named_parameters()}
    module.load_state_dict({name: value for name, value in values.items() if name in here}, strict=False)


def _set(module: PipelineModule, values: dict[str, Tensor]) -> None:
    for name, param in module.named_parameters():
        param.data.copy_(values[name])


class _Noted(pipes.Block):
    """With a buffer that is saved and one that is not."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(2), persistent=False)


_ANEW = {
    "chunks": {"schedule": "interleaved", "chunks_per_stage": 2},
    "v": {"schedule": "zbv"},
    "partition": {"partition": "type:_Noted|Embed"},
}


def _before(how: str, pipeline: dict[str, Any]) -> Any:
    first, last = pipes.layers(0)
    other = pipes.Plain([first, *(LayerSpec(_Noted, 50 + i) for i in range(5)), last])
    for param in other.parameters():
        param.data.mul_(1.25)
    specs = [first, *(LayerSpec(_Noted, 10 + i) for i in range(5)), last]
    module = PipelineModule(specs, num_stages=2, loss_fn=pipes.cross_entropy)
    (_load if how == "load" else _set)(module, dict(other.named_parameters()))
    for name, buffer in module.named_buffers():
        buffer.add_(int(name.split(".")[0]))
    for name, param in module.named_parameters():
        param.requires_grad_("norm.bias" not in name)
    engine = pipes.start(module, pipes.config(1, 4, pipeline=pipeline))
    values = full_parameters(module)
    wanted = dict(other.named_parameters())
    same = all(torch.equal(values[name], wanted[name]) for name in values)
    buffers = [bool((b == int(n.split(".")[0])).all()) for n, b in module.named_buffers()]
    frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
    frozen ^= {n for n, _ in module.named_parameters() if "norm.bias" in n}
    losses = [float(engine.train_batch(pipes.batches(0, micros=4))) for _ in range(2)]
    engine.destroy()
    return same, all(buffers), frozen, losses[0] - _expected(4, other)[0]


@pytest.mark.parametrize("how", ["load", "data"])
@pytest.mark.parametrize("cut", _ANEW)
def test_weights_set_before_initialize_are_there_when_the_configuration_cuts_anew(
    pool2: RankPool, how: str, cut: str
) -> None:
    """Tied layers, buffers and frozen parameters too; what is set is what trains."""
    for same, buffers, frozen, gap in pool2.run(_before, how, _ANEW[cut]):
        assert same and buffers and not frozen and gap == pytest.approx(0.0, abs=1e-6)


def _cannot() -> tuple[list[str], set[torch.dtype], bool]:
    found = []
    module = _module()
    for param in module.parameters():
        param.data.add_(0.5)
    found.append(outcome(lambda: pipes.start(module, pipes.config(1, 4, pipeline={"seed_layers": True}))))
    module = _module()
    if dist.get_rank() == 0:
        getattr(module, "3").register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    found.append(outcome(lambda: pipes.start(module, pipes.config(1, 4, pipeline=_ANEW["chunks"]))))
    module = _module().to(torch.bfloat16)
    module.recut(2, "loop")
    dtypes = {p.dtype for p in module.parameters()}
    fresh = _module()
    fresh.recut(1, "loop", seeds=True)
    return found, dtypes, fresh.seed_layers


def test_what_cannot_be_kept_is_refused_on_all_ranks_and_a_dtype_is_kept(pool2: RankPool) -> None:
    _, (found, _, _) = both = pool2.run(_cannot)
    assert both[0] == both[1] == (found, {torch.bfloat16}, True)
    assert "UsageError" in found[0] and "pass seed_layers=True to PipelineModule" in found[0]
    assert "builds '3' with other parameters or buffers than it has on pipeline stage 0" in found[1]
