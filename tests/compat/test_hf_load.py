"""from_pretrained of a sharded safetensors folder: each rank reads its own slices, and holds little more than these."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.client.zero import incoming, init
from deepspeed.monitor import hostmem
from tests.compat.common import forget_clients, llama_config, need
from tests.harness.pool import RankPool

need("transformers", "safetensors")
pytestmark = pytest.mark.timeout(300)

SIZES = {"vocab_size": 24_000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
SLACK = 12 << 20  # modules, messages, allocator


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in several safetensors files."""
    path = tmp_path_factory.mktemp("llama")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(11)
    for name, sizes in ("large", SIZES), ("small", {}):
        transformers.LlamaForCausalLM(llama_config(**sizes)).save_pretrained(path / name, max_shard_size="20MB")
    assert len(list((path / "large").glob("*.safetensors"))) > 3
    return path


def from_pretrained(folder: str, config: dict[str, Any] | None = CONFIG, **options: Any) -> Any:
    forget_clients()
    transformers = importlib.import_module("transformers")
    kept = None if config is None else transformers.integrations.HfDeepSpeedConfig(config)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, **options)
    del kept
    return model


def read_bytes() -> int:
    rows = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(dict(rows)["rchar"])


def costs(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of ``work``, by how much the resident set of this process grew at most, and the bytes it read."""
    dist.barrier()
    before, read = hostmem.rss_bytes(), read_bytes()
    assert hostmem.reset_peak_rss()
    result = work()
    return result, hostmem.peak_rss_bytes() - before, read_bytes() - read


def digest(model: Any) -> dict[str, float]:
    """Sums of the whole values. Collective."""
    sums = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            sums[name] = float(param.detach().double().abs().sum())
    return sums


def load_zero3(folder: str, ours: bool = True) -> tuple[int, int, dict[str, float]]:  # noqa: FBT001, FBT002
    with pytest.MonkeyPatch.context() as patch:
        if not ours:
            patch.setattr(init, "follow_transformers", lambda: None)
        from_pretrained(f"{folder}/small")  # what is imported and built once
        model, peak, read = costs(lambda: from_pretrained(f"{folder}/large"))
    return peak, read, digest(model)


def expected(folder: Path) -> tuple[int, int, dict[str, float]]:
    """Bytes of all weights and of the largest, and their sums."""
    model = from_pretrained(f"{folder}/large", None)
    sizes = [p.nbytes for p in model.parameters()]
    return sum(sizes), max(sizes), {n: float(p.detach().double().abs().sum()) for n, p in model.named_parameters()}


def test_each_rank_reads_its_own_slices_under_zero_3(pool4: RankPool, folder: Path) -> None:
    total, largest, sums = expected(folder)
    for peak, read, found in pool4.run(load_zero3, str(folder), time_limit=200):
        assert found == sums
        assert peak <= 1.3 * total / 4 + largest + SLACK
        assert read <= 1.05 * total / 4 + (2 << 20)


def test_a_load_without_it_costs_the_first_rank_the_whole_model(pool4: RankPool, folder: Path) -> None:
    """A control: what the bounds above are worth."""
    total, _, sums = expected(folder)
    results = pool4.run(load_zero3, str(folder), False, time_limit=200)
    assert results[0][0] > total and [found for _, _, found in results] == [sums] * 4


def load_changed(folder: str) -> dict[str, float]:
    """Half of the weights, into a model with other words: what is missing or of another shape stays as it was born."""
    transformers = importlib.import_module("transformers")
    kept = transformers.integrations.HfDeepSpeedConfig(CONFIG)
    model = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/half", dtype=torch.bfloat16)
    del kept
    assert all(p.dtype == torch.float32 for p in model.parameters()), "as the configuration says"
    return digest(model)


def test_missing_weights_are_initialised_and_others_are_those_of_the_file(pool2: RankPool, folder: Path) -> None:
    safetensors = importlib.import_module("safetensors.torch")
    (folder / "half").mkdir(exist_ok=True)
    state = safetensors.load_file(folder / "small" / "model.safetensors")
    left = {name: values for name, values in state.items() if "layers.1" not in name}
    safetensors.save_file(left, folder / "half" / "model.safetensors", metadata={"format": "pt"})
    (folder / "half" / "config.json").write_text((folder / "small" / "config.json").read_text())
    first, second = pool2.run(load_changed, str(folder))
    assert first == second
    for name, values in state.items():
        same = first[name] == float(values.double().abs().sum())
        assert same == (name in left or "norm" in name), name
        assert first[name] > 0


def load_experts(folder: str) -> tuple[dict[str, float], list[str]]:
    """A model whose experts transformers puts together on the way: these are sent."""
    transformers = importlib.import_module("transformers")
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incoming, "log_dist", lines.append)
        kept = transformers.integrations.HfDeepSpeedConfig(CONFIG)
        model = transformers.MixtralForCausalLM.from_pretrained(f"{folder}/experts")
        del kept
    return digest(model), lines


def test_experts_that_are_stacked_on_the_way_are_read_from_their_files(pool2: RankPool, folder: Path) -> None:
    transformers = importlib.import_module("transformers")
    sizes = llama_config().to_dict() | {"num_local_experts": 2, "num_experts_per_tok": 1, "model_type": "mixtral"}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    model.save_pretrained(folder / "experts")
    sums = {name: float(p.detach().double().abs().sum()) for name, p in model.named_parameters()}
    for found, lines in pool2.run(load_experts, str(folder)):
        assert found == pytest.approx(sums, rel=1e-12)
        assert not any("were sent whole" in line for line in lines)


def start(folder: str, settings: dict[str, Any], dtype: torch.dtype | None) -> tuple[int, int, float, list[int]]:
    """from_pretrained without a living HfDeepSpeedConfig, then initialize."""

    def work(which: str) -> Any:
        model = from_pretrained(f"{folder}/{which}", None, **({} if dtype is None else {"dtype": dtype}))
        return deepspeed.initialize(model=model, config=settings)[0]

    work("small").destroy()
    engine, peak, read = costs(lambda: work("large"))
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        loss = float(engine(input_ids=ids, labels=ids).loss)
    shapes = list(engine.module.model.layers[0].mlp.up_proj.weight.shape)
    engine.destroy()
    return peak, read, loss, shapes


@pytest.mark.parametrize(("ways", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_the_order_does_not_matter_and_tensor_parallel_ranks_read_their_parts(
    pool4: RankPool, folder: Path, ways: int, stage: int
) -> None:
    total, largest, _ = expected(folder)
    zero = CONFIG["zero_optimization"] | {"stage": stage}
    settings = CONFIG | {"zero_optimization": zero, "tensor_parallel": {"autotp_size": ways}}
    model, ids = from_pretrained(f"{folder}/large", None), torch.arange(8).view(1, 8)
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    share = ways if stage == 1 else 4
    for peak, read, found, (rows, _) in pool4.run(start, str(folder), settings, None, time_limit=200):
        assert found == pytest.approx(loss, abs=1e-5) and rows == SIZES["intermediate_size"] // ways
        assert peak <= 1.3 * total / share + largest + SLACK, (peak / 1e6, total / 1e6)
        # Of what data-parallel ranks hold whole each reads a share; a little beside narrow columns is read too.
        assert read <= 1.25 * total / 4 + (2 << 20)


def test_a_cast_before_the_shards_costs_the_whole_model(pool2: RankPool, folder: Path) -> None:
    """A control, and what is said of it."""
    total, *_ = expected(folder)
    settings = CONFIG | {"bf16": {"enabled": True}}
    for peak, *_ in pool2.run(start, str(folder), settings, torch.bfloat16, time_limit=200):
        assert peak > total / 2
