"""A model whose weights are mapped from files: each rank reads what it keeps; its values are those of the files."""

import contextlib
import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.monitor import hostmem
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.ranks import RankFailure
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero import build
from deepspeed.zero.layout import Place
from deepspeed.zero.module import mapped
from deepspeed.zero.module.mapped import FilePart
from tests.harness.control_group import limited
from tests.harness.decoders import GPT2, Llama, batch, loss_of
from tests.harness.pool import RankPool
from tests.harness.training import outcome

pytestmark = pytest.mark.timeout(90)
MODELS: dict[str, Any] = {"llama": lambda: Llama(tied=True, bias=True), "gpt2": lambda: GPT2()}
WIDTH, LAYERS = 1024, 16


def config(stage: int, *, ways: int = 1) -> dict[str, Any]:
    block = {"tensor_parallel": {"autotp_size": ways}} if ways > 1 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 20, "reduce_bucket_size": 400},
        **block,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of both kinds, other than those that they are born with, and of a deep model."""
    path = tmp_path_factory.mktemp("weights")
    for kind, make in MODELS.items():
        model = make()
        for param in model.parameters():
            param.data.mul_(0.75)
        torch.save(model.state_dict(), path / f"{kind}.pt")
    deep = {f"{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(LAYERS)}
    torch.save(deep, path / "deep.pt")
    return path


def of_file(kind: str, file: str) -> nn.Module:
    """A model of that kind whose values are mappings of ``file``."""
    model, first = MODELS[kind](), dict[nn.Parameter, str]()
    ties = {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}
    model.load_state_dict(torch.load(file, mmap=True), assign=True)
    for name, real in ties.items():
        home, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(home), leaf, model.get_parameter(real))
    return model


@contextlib.contextmanager
def reads() -> Iterator[list[int]]:
    """The bytes of values that are read from files inside."""
    counted, plain = [0], FilePart.read

    def read(self: FilePart, out: Tensor, lo: int, place: Place | None = None) -> None:
        counted[0] += out.numel() * self.dtype.itemsize
        plain(self, out, lo, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilePart, "read", read)
        yield counted


def trained(kind: str, folder: str, settings: dict[str, Any], change: str = "") -> tuple[float, int, int]:
    """The largest difference of weights and losses to a plain run; the bytes this rank read, and those of its model."""
    plain, file = MODELS[kind](), f"{folder}/{kind}.pt"
    plain.load_state_dict(torch.load(file))
    if change == "another file" and dist.get_rank() == 1:
        file = shutil.copy(file, f"{folder}/{kind}-of-rank-1.pt")
        torch.save({name: 2 * values for name, values in torch.load(file).items()}, file)
    model = of_file(kind, file)
    if change == "edited":
        with torch.no_grad():
            next(model.parameters()).add_(dist.get_rank())
    with reads() as counted:
        engine = deepspeed.initialize(model=model, config=settings)[0]
    read, nbytes = counted[0], sum(p.nbytes for p in plain.parameters())
    optimizer, error = torch.optim.SGD(plain.parameters(), lr=0.1), 0.0
    for step in range(3):
        for name, param in engine.module.named_parameters():
            difference = safe_get_full_fp32_param(param) - plain.get_parameter(name).detach()
            error = max(error, float(difference.abs().max()))
        loss, expected = loss_of(engine, batch(step, 0)), loss_of(plain, batch(step, 0))
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        error = max(error, abs(float(loss.detach() - expected.detach())))
    engine.destroy()
    return error, read, nbytes


@pytest.mark.in_make_test("llama-1")
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_each_rank_reads_its_share_and_trains_as_a_plain_run(
    pool2: RankPool, folder: Path, kind: str, stage: int
) -> None:
    results = pool2.run(trained, kind, str(folder), config(stage))
    for error, read, nbytes in results:
        assert error < 1e-6
        assert 0 < read <= 0.75 * nbytes, "small parameters stay whole on both"
    assert sum(read for _, read, _ in results) <= 1.2 * results[0][2]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_a_part_of_each_layer_is_read_under_tensor_parallelism(
    pool4: RankPool, folder: Path, kind: str, stage: int
) -> None:
    for error, read, nbytes in pool4.run(trained, kind, str(folder), config(stage, ways=2)):
        assert error < 1e-6
        assert 0 < read <= 0.5 * nbytes, "a half of the halves, and what is whole on all"


@pytest.mark.parametrize("change", ["edited", "another file"])
def test_values_that_ranks_do_not_share_are_those_of_the_first_rank(pool2: RankPool, folder: Path, change: str) -> None:
    for error, read, nbytes in pool2.run(trained, "gpt2", str(folder), config(3), change):
        assert error < 1e-6
        assert read < 0.4 * nbytes if change == "edited" else read == 0


def shortened(folder: str) -> str:
    """A file that loses its end on one rank, where the other has a copy of its own."""
    file = f"{folder}/deep-of-rank-{dist.get_rank()}.pt"
    torch.save({"0.weight": torch.randn(64, 64), "1.weight": torch.randn(64, 64)}, file)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model.load_state_dict(torch.load(file, mmap=True), assign=True)
    if dist.get_rank() == 1:
        os.truncate(file, 20_000)
    return outcome(lambda: deepspeed.initialize(model=model, config=config(3)))


def test_a_file_that_has_become_short_is_refused_on_all_ranks(pool2: RankPool, folder: Path) -> None:
    for said in pool2.run(shortened, str(folder), time_limit=30):
        assert "UsageError" in said and "rank 1: " in said and "deep-of-rank-1.pt ends early" in said


def with_additions(stage: int) -> list[dict[str, float]]:
    """Sums of the values of every rank, for a model born in shards to which each rank has added layers of its own."""
    settings = config(stage)
    settings["zero_optimization"] |= {"reduce_bucket_size": 100_000, "param_persistence_threshold": 0}
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    torch.manual_seed(dist.get_rank())
    model[1].append(nn.Linear(8, 8))
    model.append(nn.Linear(8, 3))
    first = {name: float(p.detach().double().sum()) for name, p in model.named_parameters() if not hasattr(p, "ds_id")}
    engine = deepspeed.initialize(model=model, config=settings)[0]
    sums = {name: float(value.double().sum()) for name, value in full_parameters(model).items()}
    engine.destroy()
    return [sums, first]


@pytest.mark.parametrize("stage", [0, 3])
def test_layers_added_to_a_model_born_in_shards_are_those_of_the_first_rank(pool2: RankPool, stage: int) -> None:
    (first, added), (second, _) = pool2.run(with_additions, stage)
    assert first == second
    assert added == {name: first[name] for name in ("1.1.weight", "1.1.bias", "3.weight", "3.bias")}


def in_other_order(folder: str) -> list[float]:
    """Parameters that each rank names in an order of its own: the first rank's values reach all of them."""
    engine = deepspeed.initialize(model=of_file("gpt2", f"{folder}/gpt2.pt"), config=config(3))[0]
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params[:: 1 - 2 * dist.get_rank()], modifier_rank=0):
        for number, param in enumerate(params):
            param.data.fill_(number + dist.get_rank())
    values = [float(safe_get_full_fp32_param(p).mean()) for p in params]
    engine.destroy()
    return values


def test_ranks_may_name_parameters_in_any_order(pool2: RankPool, folder: Path) -> None:
    for values in pool2.run(in_other_order, str(folder)):
        assert values == [float(number) for number in range(len(values))]


def warnings_of(folder: str) -> list[list[str]]:
    """What is said of a model built whole, of one in files, and at a stage that leaves parameters whole."""
    said: list[list[str]] = []
    files = f"{folder}/gpt2.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "_MUCH_BYTES", 1)
        for model, stage in ((GPT2(), 3), (of_file("gpt2", files), 3), (GPT2(), 1)):
            lines: list[str] = []
            patch.setattr(build, "log_dist", lambda text, lines=lines, **_: lines.append(text))
            deepspeed.initialize(model=model, config=config(stage))[0].destroy()
            said.append([line for line in lines if "whole in the memory of every rank" in line])
    return said


def test_weights_that_were_whole_on_every_rank_are_announced_with_the_reason(pool2: RankPool, folder: Path) -> None:
    whole, in_files, unshared = pool2.run(warnings_of, str(folder))[0]
    assert len(whole) == 1 and "wte.weight" in whole[0] and "HfDeepSpeedConfig" in whole[0]
    assert not in_files and not unshared


def deep_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def engine_of(model: nn.Module, folder: str, settings: dict[str, Any], *, mmap: bool) -> Any:
    model.load_state_dict(torch.load(f"{folder}/deep.pt", mmap=mmap), assign=True)
    return deepspeed.initialize(model=model, config=settings)[0]


def peak(folder: str, mmap: bool, ways: int, stage: int) -> int:  # noqa: FBT001 - crosses processes
    """By how many bytes the resident set of this process grew at most, from the file to a model in shards."""
    model = deep_model()
    model.tp_plan = {"*": "colwise_gather_output"} if ways > 1 else {}  # type: ignore[assignment]
    gc.collect()
    hostmem.HeapTrimmer().trim()
    dist.barrier()
    assert hostmem.reset_peak_rss()
    before = hostmem.rss_bytes()
    engine = engine_of(model, folder, config(stage, ways=ways), mmap=mmap)
    grown = hostmem.peak_rss_bytes() - before
    engine.destroy()
    return grown


@pytest.mark.in_make_test("1-3")
@pytest.mark.parametrize(("ways", "stage"), [(1, 3), (2, 0), (2, 3)])
def test_a_rank_holds_little_more_than_its_shard(pool4: RankPool, folder: Path, ways: int, stage: int) -> None:
    largest, slack = 4 * WIDTH * WIDTH, 12 << 20
    total, share = LAYERS * largest, 2 if stage == 0 else 4
    for grown in pool4.run(peak, str(folder), True, ways, stage):
        assert grown <= 1.3 * total / share + largest + slack, grown
    for grown in pool4.run(peak, str(folder), False, ways, stage):
        assert grown >= 0.9 * total, "a control: what is read into memory first is whole there"


def confined(folder: str, mmap: bool, nbytes: int) -> bool:  # noqa: FBT001 - crosses processes
    """Load within ``nbytes`` of new memory; whether the kernel has watched."""
    model = deep_model()
    hostmem.HeapTrimmer().trim()
    with limited(nbytes) as watched:
        dist.barrier()
        engine = engine_of(model, folder, config(3), mmap=mmap) if watched or mmap else None
    if engine is not None:
        engine.destroy()  # makes it whole
    return watched


BOUND = int(1.3 * LAYERS * 4 * WIDTH * WIDTH / 4) + 4 * WIDTH * WIDTH + (12 << 20)


def test_a_control_group_of_that_size_is_enough_for_a_rank(pool4: RankPool, folder: Path) -> None:
    if not all(pool4.run(confined, str(folder), True, BOUND)):
        pytest.skip("no control groups can be made here; the resident set is asserted above")


@pytest.mark.exhaustive
def test_a_control_group_of_that_size_ends_a_rank_that_reads_all(pool4: RankPool, folder: Path) -> None:
    """A control: what the one above is worth."""
    try:
        watched = pool4.run(confined, str(folder), False, BOUND)
    except RankFailure:
        return
    if not any(watched):
        pytest.skip("no control groups can be made here")
    pytest.fail("nobody was ended")
