"""Whole weights out of engines over models of transformers and PEFT: folders for from_pretrained, streams with adapters
merged in, generation; and changes of the model after initialize.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from tests.compat.common import (
    batches,
    everything,
    forget_clients,
    llama,
    losses_of,
    mine,
    need,
    sentences,
    settings,
    zero_block,
)
from tests.harness.pool import RankPool
from tests.harness.training import outcome

need("peft", "transformers", "safetensors")
pytestmark = pytest.mark.timeout(180)


def engine_of(model: nn.Module, stage: int, **changes: Any) -> Any:
    forget_clients()
    return deepspeed.initialize(model=model.train(), config=settings(stage, **changes))[0]


def trained(engine: Any) -> None:
    losses_of(engine, mine(batches(sentences(2 * dist.get_world_size()))))


def build(kind: str) -> nn.Module:
    if kind != "mixtral":
        return llama(tie_word_embeddings=kind == "tied")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def saved(kind: str, stage: int, ways: int, folder: str, dtype: str) -> dict[str, Any]:
    changes: dict[str, Any] = {"tensor_parallel": {"autotp_size": ways}} if ways > 1 else {}
    if dtype == "bf16":
        changes["bf16"] = {"enabled": True}
    engine = engine_of(build(kind), stage, **changes)
    if ways == 1:
        trained(engine)
    expected = everything(engine.module)
    engine.save_pretrained(folder, max_shard_size="20KB")
    engine.destroy()
    return expected


@pytest.mark.parametrize(
    ("kind", "stage", "ways", "dtype"),
    [("llama", 3, 1, "fp32"), ("tied", 3, 1, "bf16"), ("llama", 1, 2, "fp32"), ("mixtral", 3, 1, "fp32")],
)
def test_a_saved_folder_is_what_transformers_writes_and_reads(
    pool2: RankPool, tmp_path: Path, kind: str, stage: int, ways: int, dtype: str
) -> None:
    transformers = importlib.import_module("transformers")
    expected = pool2.run(saved, kind, stage, ways, str(tmp_path / "ours"), dtype)[0]
    model = build(kind).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    model.load_state_dict({**model.state_dict(), **expected})
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    load = importlib.import_module("safetensors.torch").load_file

    def content(folder: Path) -> dict[str, Tensor]:
        return {n: v for file in sorted(folder.glob("*.safetensors")) for n, v in load(file).items()}

    ours, theirs = content(tmp_path / "ours"), content(tmp_path / "theirs")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == theirs[n].dtype for n in theirs)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    files = [p.name for p in (tmp_path / "theirs").iterdir() if p.suffix == ".json"]
    assert {p.name for p in (tmp_path / "ours").iterdir() if p.suffix == ".json"} == set(files)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(theirs)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in again.named_parameters())


WRITES_16_BIT = {"stage3_gather_16bit_weights_on_model_save": True}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "a head beside": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "rank-stabilised": {"target_modules": ["q_proj"], "use_rslora": True},
}


def peft_model(kind: str) -> nn.Module:
    peft = importlib.import_module("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **ADAPTERS[kind]))
    torch.manual_seed(5)
    for name, param in model.named_parameters():
        if "lora_B" in name or "lora_embedding" in name:
            nn.init.normal_(param, std=0.02)
    return model


def merged(kind: str, stage: int, dst: int | None) -> list[str]:
    """Names of what is not as it should be."""
    engine = engine_of(peft_model(kind), stage)
    trained(engine)
    before = everything(engine.module)
    got = dict(pair for bucket in engine.stream_weights(20_000, dst=dst, merge_adapters=True) for pair in bucket)
    after = everything(engine.module)
    wrong = [name for name in before if not torch.equal(before[name], after[name])]
    wrong += [n for n, m in engine.module.named_modules() if getattr(m, "merged_adapters", [])]
    trained(engine)
    plain = peft_model(kind)
    plain.load_state_dict({**plain.state_dict(), **before})
    expected = dict(plain.merge_and_unload(safe_merge=True).named_parameters())
    engine.destroy()
    if dst is not None and dist.get_rank() != dst:
        return wrong + list(got)
    wrong += sorted(expected.keys() ^ got.keys())
    return wrong + [n for n in expected if n in got and not torch.equal(expected[n], got[n])]


@pytest.mark.parametrize(("stage", "dst"), [(1, None), (3, None), (3, 1)])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_adapters_are_streamed_as_peft_merges_them(
    pool2: RankPool, kind: str, stage: int, dst: int | None
) -> None:
    for wrong in pool2.run(merged, kind, stage, dst):
        assert wrong == []


def adapters_saved(folder: str) -> dict[str, Tensor]:
    engine = engine_of(peft_model("a head beside"), 3)
    trained(engine)
    expected = everything(engine.module)
    engine.save_pretrained(folder)
    engine.destroy()
    return expected


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_of_a_peft_model_its_adapters_are_saved(pool2: RankPool, tmp_path: Path) -> None:
    peft = importlib.import_module("peft")
    expected = pool2.run(adapters_saved, str(tmp_path))[0]
    again = dict(peft.PeftModel.from_pretrained(llama(), tmp_path).named_parameters())
    assert set(again) == set(expected) and all(torch.equal(again[n], expected[n]) for n in expected)


def vera_model() -> nn.Module:
    peft = importlib.import_module("peft")
    return peft.get_peft_model(llama(), peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def shared_projections(stage: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    engine = engine_of(vera_model(), stage, zero_optimization={**zero_block(stage), **WRITES_16_BIT})
    trained(engine)
    expected = everything(engine.module) | {n: b.clone() for n, b in engine.module.named_buffers() if "vera" in n}
    engine.save_pretrained(folder)
    engine.save_16bit_model(folder)
    merged = dict(pair for bucket in engine.stream_weights(merge_adapters=True) for pair in bucket)
    names = list(engine.module.state_dict())
    engine.destroy()
    return expected, merged, names


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("stage", [1, 3])
def test_projections_that_layers_share_are_saved_by_all_names(pool2: RankPool, tmp_path: Path, stage: int) -> None:
    peft = importlib.import_module("peft")
    expected, merged, names = pool2.run(shared_projections, stage, str(tmp_path))[0]
    assert sorted(torch.load(tmp_path / "pytorch_model.bin")) == sorted(names)
    again = peft.PeftModel.from_pretrained(llama(), tmp_path)
    found = dict(again.named_parameters()) | dict(again.named_buffers())
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    whole = dict(again.merge_and_unload(safe_merge=True).named_parameters())
    assert set(whole) == set(merged) and all(torch.equal(whole[n], merged[n]) for n in whole)


def tokens_of_unsharded(stage: int) -> tuple[list[int], list[int]]:
    engine = engine_of(llama(), stage)
    plain, ids = llama(), torch.arange(3, 8).view(1, -1)
    length = 3 + 4 * dist.get_rank()
    with engine.unsharded() as module:
        ours = module.generate(ids, max_new_tokens=length, do_sample=False)
    theirs = plain.generate(ids, max_new_tokens=length, do_sample=False)
    trained(engine)
    engine.destroy()
    return ours[0].tolist(), theirs[0].tolist()


def test_ranks_generate_other_lengths_from_unsharded_weights(pool2: RankPool) -> None:
    for ours, theirs in pool2.run(tokens_of_unsharded, 3):
        assert ours == theirs


def _resize(model: Any) -> None:
    with deepspeed.zero.GatheredParameters([model.get_input_embeddings().weight]):
        model.resize_token_embeddings(80)


def _head(model: Any) -> None:
    model.lm_head = nn.Linear(32, 64, bias=False)


def _tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _adapter(model: Any) -> None:
    peft = importlib.import_module("peft")
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))


CHANGES = {
    "resize": (_resize, "'model.embed_tokens.weight' "),
    "another head": (_head, "'lm_head.weight' was replaced"),
    "tie": (_tie, "'lm_head.weight' was tied to 'model.embed_tokens.weight'"),
    "an adapter": (_adapter, "lora_A.default.weight' was added"),
}


def changed(what: str, stage: int) -> str:
    engine = engine_of(llama(), stage)
    trained(engine)

    def act() -> None:
        CHANGES[what][0](engine.module)
        trained(engine)

    said = outcome(act)
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", CHANGES)
def test_a_model_that_was_changed_is_refused_by_name(pool2: RankPool, what: str, stage: int) -> None:
    for said in pool2.run(changed, what, stage):
        assert "UsageError" in said and CHANGES[what][1] in said and "initialize again" in said, said
